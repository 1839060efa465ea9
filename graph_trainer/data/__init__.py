"""Real text without a download: corpus, tokenizer and dataloader.

corpus.py reads documents, tokenizer.py learns a byte-level BPE from them,
store.py keeps them tokenised on disk, packing.py cuts the stream of an epoch
into rows, loader.py hands the rows to torchtitan's trainer.
"""
