"""The torchtitan plugin: trainer, configuration, data, checkpoints, sharding of decoders.

Imports the core and torchtitan; knows neither planner nor command line.
"""

from graph_trainer.titan.device import setup as _setup_device

# torchtitan binds its device module when it is first imported, and every module of this package
# may import torchtitan.
_setup_device()
