"""Any causal language model of the library transformers, sharded and captured by graph_trainer.

A config registry, and the wrapper that torchtitan's trainer takes for a model.
"""
