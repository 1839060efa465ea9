"""What a captured step depends on beside tensors: modes, hooks and attributes of the modules, and
torch's defaults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graph_trainer.core.graph.call import Call
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.torch_private import hooks_of
from graph_trainer.errors import CaptureError

_SCALARS = {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size}
_CONTAINERS = {list, tuple, dict}
OF_EVERY_MODULE = vars(nn.Module()).keys()
"""What torch keeps in every module: modes, tensors, modules, hooks."""

Attributes = dict[str, tuple[type, Any]]
"""By name, the type and the value of a module's numbers, texts and switches; of a list, tuple or
dict of such values its text, since the object may change."""


@dataclass(frozen=True, slots=True)
class ModuleSettings:
    """The modules of a model, with the modes, hooks and attributes its graph was captured with."""

    training: dict[str, bool]
    """The mode of every module, by its name."""
    hooks: tuple[Any, ...]
    """Every hook of a module and of a parameter and every forward that is an attribute of a
    module, in order."""
    modules: tuple[tuple[str, type, Attributes], ...]
    """Name, class and attributes of every module, in order."""
    defaults: tuple[Any, ...]
    """See `defaults_of`."""

    @classmethod
    def of(cls, model: nn.Module, device_types: Iterable[str]) -> ModuleSettings:
        """Read them from a model."""
        training = {clean_fqn(name): module.training for name, module in model.named_modules()}
        modules = [(name, type(m), _attributes(m)) for name, m in model.named_modules()]
        hooks = hooks_of(model.modules())
        return cls(training, hooks, tuple(modules), defaults_of(device_types))

    def without(self, changed: Iterable[str]) -> ModuleSettings:
        """Leave out the attributes that forward itself changes, by "module.attribute"."""
        names = set(changed)
        modules = []
        for fqn, kind, attributes in self.modules:
            kept = {n: v for n, v in attributes.items() if f"{fqn}.{n}".strip(".") not in names}
            modules.append((fqn, kind, kept))
        return replace(self, modules=tuple(modules))

    def check(self, call: Call, device_types: Iterable[str]) -> None:
        """Refuse a model with other modes, hooks or attributes. A model may be wrapped otherwise.

        Raises:
            CaptureError: with what differs, and the first module where it does.
        """
        if call.training != list(self.training.values()):
            for name, module in call.model.named_modules():
                before = self.training.get(clean_fqn(name), module.training)
                if before != module.training:
                    raise CaptureError(
                        f"module '{clean_fqn(name)}' was in {'train' if before else 'eval'}() mode "
                        "when the graph was captured and is not now; dropout and norms are another "
                        "graph then: capture again"
                    )
        if call.hooks != self.hooks:
            raise CaptureError(
                "the hooks of the model's modules or parameters, or replaced forwards, are others "
                "than when the graph was captured, which has what they did in it: capture again"
            )
        if len(call.modules) == len(self.modules):
            for module, (name, kind, attributes) in zip(call.modules, self.modules, strict=True):
                if type(module) is not kind:
                    raise CaptureError(
                        f"module '{name}' was a {kind.__name__} when the graph was captured and is "
                        f"a {type(module).__name__} now: capture again"
                    )
                contents = vars(module)
                for attribute, (of_type, value) in attributes.items():
                    now = contents.get(attribute)
                    if now is value:
                        continue
                    is_container = of_type in _CONTAINERS
                    is_equal = (repr(now) if is_container else now) == value
                    if type(now) is not of_type or not is_equal:
                        before = value if is_container else repr(value)
                        raise CaptureError(
                            f"'{f'{name}.{attribute}'.strip('.')}' was {before} when the graph "
                            f"was captured and is {now!r} now: capture again"
                        )
        if defaults_of(device_types) != self.defaults:
            raise CaptureError(
                f"torch's default dtype and autocast are {defaults_of(device_types)}, and were "
                f"{self.defaults} when the graph was captured: run the step within the same "
                "torch.autocast, or capture again"
            )


def defaults_of(device_types: Iterable[str]) -> tuple[Any, ...]:
    """Return torch's default dtype, and the dtype of autocast by type of device where it is on."""
    casts = ((d, torch.get_autocast_dtype(d)) for d in sorted(device_types) if autocast_enabled(d))
    return (torch.get_default_dtype(), *casts)


def autocast_enabled(device_type: str) -> bool:
    """Return whether autocast is on for a type of device, "meta" included."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _attributes(module: nn.Module) -> Attributes:
    attributes: Attributes = {}
    for name, value in vars(module).items():
        if name not in OF_EVERY_MODULE and _is_plain(value):
            kind = type(value)
            attributes[name] = (kind, repr(value) if kind in _CONTAINERS else value)
    return attributes


def _is_plain(value: Any) -> bool:
    """Tell whether a value is a number, text or switch, or a container of such values alone."""
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else type(value) in _SCALARS
