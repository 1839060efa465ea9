"""Names of parameters and modules as users and checkpoints know them."""

from __future__ import annotations

# Names that wrappers put into FQNs; checkpoints and users know parameters without them.
_WRAPPER_NAMES = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


def clean_fqn(fqn: str) -> str:
    """An FQN without the names of checkpoint and compile wrappers."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPER_NAMES)


def without_layer(fqn: str) -> str:
    """An FQN with a star for every number in it: the same module of every layer."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))
