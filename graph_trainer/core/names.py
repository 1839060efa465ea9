"""Names of parameters and modules, as users and checkpoints write them."""

from __future__ import annotations

from torch import nn

# Names that wrappers put into FQNs; checkpoints and users write FQNs without them.
_WRAPPER_NAMES = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


def clean_fqn(fqn: str) -> str:
    """Remove the names of checkpoint and compile wrappers from an FQN."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPER_NAMES)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside checkpoint and compile wrappers; the module itself without any."""
    for name, child in module.named_children():
        if name in _WRAPPER_NAMES:
            return unwrapped(child)
    return module


def without_layer(fqn: str) -> str:
    """Replace every number in an FQN by a star, to name the same module of all layers."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))
