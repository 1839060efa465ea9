"""Llama 3: torchtitan's model, sharded and captured by graph_trainer."""

from graph_trainer.device import setup as _setup_device

# The registry beside this file imports torchtitan, which binds its device at import.
_setup_device()
