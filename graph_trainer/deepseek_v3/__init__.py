"""DeepSeek V3: torchtitan's model, sharded and captured by graph_trainer.

A config registry and nothing else.
"""
