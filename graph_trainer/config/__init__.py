"""One checked config from a registry entry, a TOML file and command line flags.

Precedence: flags, then the file, then the registry entry that the file's `base`
names, then defaults. Everything wrong with any of them is a ConfigError that
names the file, the key, the value and what to write instead.
"""

from graph_trainer.device import setup as _setup_device

# torchtitan binds its device module when it is first imported; every module of
# this package may import torchtitan, so the binding is settled here, first.
_setup_device()

from graph_trainer.config.check import check_config, wanted_ranks  # noqa: E402
from graph_trainer.config.check_hardware import check_hardware  # noqa: E402
from graph_trainer.config.convert import to_graph_trainer_config  # noqa: E402
from graph_trainer.config.load import load_config  # noqa: E402
from graph_trainer.config.sections import GraphCompileConfig, pass_config  # noqa: E402
from graph_trainer.config.serialize import config_to_toml, save_resolved_config  # noqa: E402

__all__ = [
    "GraphCompileConfig",
    "check_config",
    "check_hardware",
    "config_to_toml",
    "load_config",
    "pass_config",
    "save_resolved_config",
    "to_graph_trainer_config",
    "wanted_ranks",
]
