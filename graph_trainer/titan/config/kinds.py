"""Which component a section configures: the short names of its `type` key.

A section such as [dataloader] configures one of several components. `type` picks
it by short name, or by "package.module:Class.Config" for a component of your own.
"""

import importlib
from dataclasses import is_dataclass
from typing import Any

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.messages import did_you_mean, join_or, show

NONE = "none"
"""The `type` of an optional section that is switched off."""

# Declared class -> short name -> configured class, all as "module:qualified name" so
# that nothing is imported before a section asks for it. A short name missing here but
# existing in torchtitan is one that cannot work with a captured step (the memory budget
# policy of activation checkpointing acts inside torch.compile).
_KINDS = {
    "torchtitan.components.dataloader:BaseDataLoader.Config": {
        "text": "graph_trainer.titan.data.loader:TextDataLoader.Config",
        "huggingface": "torchtitan.hf_datasets.text_datasets:HuggingFaceTextDataLoader.Config",
        "huggingface_interleaved": (
            "torchtitan.hf_datasets.text_datasets:InterleavedHuggingFaceTextDataLoader.Config"
        ),
    },
    "torchtitan.components.tokenizer:BaseTokenizer.Config": {
        "byte_bpe": "graph_trainer.titan.data.tokenizer:ByteBPETokenizer.Config",
        "huggingface": "torchtitan.components.tokenizer:HuggingFaceTokenizer.Config",
    },
    "torchtitan.components.checkpointer.base:BaseCheckpointManager.Config": {
        "dcp": "graph_trainer.titan.checkpointer:CheckedCheckpointManager.Config",
    },
    "torchtitan.components.loss:BaseLoss.Config": {
        "cross_entropy": "torchtitan.components.loss:CrossEntropyLoss.Config",
        "chunked_cross_entropy": "graph_trainer.titan.chunked_loss:ChunkedCrossEntropyLoss.Config",
    },
    "torchtitan.distributed.activation_checkpoint:ActivationCheckpointing.Config": {
        "selective": "torchtitan.distributed.activation_checkpoint:SelectiveAC.Config",
        "full": "torchtitan.distributed.activation_checkpoint:FullAC.Config",
    },
}


def import_class(path: str) -> Any:
    """The object that "package.module:Outer.Inner" names.

    Raises:
        ValueError, ImportError or AttributeError when there is none.
    """
    module_name, separator, qualified = path.partition(":")
    if not separator or not all(p.isidentifier() for p in module_name.split(".")):
        raise ValueError(f"{path!r} is not of the form package.module:Class.Config")
    found: Any = importlib.import_module(module_name)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


def class_path(cls: type) -> str:
    """The inverse of `import_class`."""
    return f"{cls.__module__}:{cls.__qualname__}"


def short_names(members: list[type]) -> dict[str, str]:
    """Short name -> class path for a section declared as any of `members`."""
    for declared, names in _KINDS.items():
        # Every class whose path is a key descends from it, so compare along the MRO
        # instead of importing all five packages to ask issubclass.
        if any(declared == class_path(base) for m in members for base in m.__mro__):
            return names
    return {}


def kind_of(config: Any, members: list[type]) -> str | None:
    """The `type` to write for `config` in a section declared as `members`.

    None where the declared class says it already.
    """
    path = class_path(type(config))
    names = short_names(members)
    for name, candidate in names.items():
        if candidate == path:
            return name
    return None if members == [type(config)] else path


def class_for(kind: Any, members: list[type], nullable: bool, where: str, key: str) -> type | None:
    """The config class that `type = kind` means for a section, or None for "none".

    Raises:
        ConfigError: a kind that is not known, cannot be imported or does not fit.
    """
    names = short_names(members)
    known = [*names, *([NONE] if nullable else [])]
    remedy = (
        f"Write {join_or(show(n) for n in known)}, or the class of a component of your own "
        'as "package.module:Class.Config".'
        if known
        else 'Leave it out, or name a class as "package.module:Class.Config".'
    )
    if nullable and kind == NONE:
        return None
    if not isinstance(kind, str) or (kind not in names and ":" not in kind):
        guess = did_you_mean(kind, known) if isinstance(kind, str) else ""
        raise ConfigError(f"{where}: {key}.type = {show(kind)}: no such type. {guess}{remedy}")
    try:
        cls = import_class(names.get(kind, kind))
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"{where}: {key}.type = {show(kind)}: cannot be imported ({e}). {remedy}"
        ) from e
    if not (isinstance(cls, type) and is_dataclass(cls) and _fits(cls, members)):
        raise ConfigError(
            f"{where}: {key}.type = {show(kind)}: not a config class for this section, which "
            f"takes {join_or(m.__qualname__ for m in members)}. {remedy}"
        )
    return cls


def _fits(cls: type, members: list[type]) -> bool:
    return any(issubclass(cls, m) for m in members)
