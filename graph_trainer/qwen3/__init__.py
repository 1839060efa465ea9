"""Qwen 3, dense and with experts: torchtitan's model, sharded and captured by graph_trainer.

A config registry and nothing else.
"""
