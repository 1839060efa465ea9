"""Text for training: a corpus, a tokenizer, packed sequences and a loader that resumes.

No model and no trainer; nothing here is fetched from the network.
"""
