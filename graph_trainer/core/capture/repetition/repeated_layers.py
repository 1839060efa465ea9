"""Layers of a model that are alike: four of them are traced, and the graph is extended.

A stack of layers (a ModuleList, ModuleDict or Sequential) often repeats one layer, or a short
sequence of different ones: a period. The first two periods of a run, one in the middle and the last
are traced. While the model calls the others, they return aliases of what the traced period before
them has returned, and compute nothing. `extend` then inserts into the graph what they would have
computed, and checks that the traced periods are one pattern.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.fx.traceback import get_current_meta

from graph_trainer.core.graph.annotations import Phase
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.torch_private import forward_replaced, hooks_of, pytree, tensor_dicts
from graph_trainer.errors import CaptureError

Tensors = dict[int, torch.Tensor]

TRACED_PERIODS = 4

_ATOMS = {type(None), bool, int, float, complex, str, bytes}
_NO_EQ: Any = object.__eq__
_INITIAL = "_param_init"
"""Where torchtitan's modules keep how to draw their initial values, which no step reads. The scale
of these depends on a layer's depth."""


class NotRepeated(CaptureError):
    """The layers of a model turn out to differ in what is computed: all of them are traced."""


@dataclass(slots=True)
class Repetition:
    """A run of layers in one stack, the same ones every `period` layers."""

    names: list[str]
    """FQNs, in the order of the stack, in which the model must call them."""
    layers: list[nn.Module] = field(repr=False)
    period: int
    counterparts: list[Tensors] = field(repr=False)
    """By layer: by id of each tensor of its sample, its own."""

    @property
    def periods(self) -> int:
        """How many times the period is repeated, at least five."""
        return len(self.layers) // self.period

    @property
    def traced(self) -> tuple[int, ...]:
        """The numbers of the periods that are traced, of which the second is the pattern."""
        return 0, 1, self.periods // 2, self.periods - 1

    def sample(self, place: int) -> int:
        """Return the place of the layer in the second period that a layer is like."""
        return self.period + place % self.period

    def is_traced(self, place: int) -> bool:
        """Return whether a layer is of a traced period."""
        return place // self.period in self.traced

    def left_out(self) -> set[int]:
        """Return the ids of the tensors of layers that are not traced."""
        return {
            id(tensor)
            for place, tensors in enumerate(self.counterparts)
            for sample, tensor in tensors.items()
            if id(tensor) != sample and not self.is_traced(place)
        }

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        """While entered: of the layers, only those that are traced compute anything.

        Raises:
            NotRepeated: in the model's forward or at the end. The model does not call each layer
                once and in order, or it gives a layer something else than its sample.
        """
        calls = _Calls(self)
        with contextlib.ExitStack() as stack:
            for place, layer in enumerate(self.layers):
                if self.is_traced(place):
                    enter = functools.partial(calls.enter, place)
                    leave = functools.partial(calls.leave, place)
                    before = layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                    stack.callback(before.remove)
                    stack.callback(layer.register_forward_hook(leave).remove)
                else:
                    skip = functools.partial(calls.skip, place)
                    stack.enter_context(forward_replaced(layer, skip))
            yield
        calls.check_complete()


@dataclass(slots=True)
class _Call:
    """What a layer was called with, and has returned."""

    arguments: list[Any]
    structure: Any
    output: list[Any] = field(default_factory=list)
    of_output: Any = None
    """The structure of the output."""


class _Calls:
    """The calls of a repetition's layers in one trace."""

    def __init__(self, repetition: Repetition) -> None:
        self._run = repetition
        self._done: list[_Call] = []
        self._failure = ""

    def enter(self, place: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Note and check a call before it runs."""
        if _in_backward():
            return  # a checkpointed layer that is recomputed
        if place != len(self._done):
            self._refuse(f"forward does not call '{self._run.names[place]}' once and in order")
        call = _Call(*pytree.tree_flatten((args, kwargs)))
        if place >= 2 * self._run.period:
            self._check_arguments(place, call)
        self._done.append(call)

    def leave(self, place: int, layer: nn.Module, args: Any, output: Any) -> None:
        """Note what a layer has returned."""
        if not _in_backward() and place < len(self._done):
            call = self._done[place]
            call.output, call.of_output = pytree.tree_flatten(output)

    def skip(self, place: int, *args: Any, **kwargs: Any) -> Any:
        """Return aliases of what the traced period before has returned: each layer's results are
        objects of its own, by which the next layer is seen to get these and no others."""
        run = self._run
        if _in_backward():
            self._refuse(f"'{run.names[place]}' runs again in backward")
        self.enter(place, run.layers[place], args, kwargs)
        period, position = divmod(place, run.period)
        traced = max(number for number in run.traced if number < period)
        call, before = self._done[place], self._done[traced * run.period + position]
        for value in before.output:
            is_tensor = isinstance(value, torch.Tensor)
            call.output.append(torch.ops.aten.alias.default(value) if is_tensor else value)
        call.of_output = before.of_output
        return pytree.tree_unflatten(call.output, call.of_output)

    def check_complete(self) -> None:
        """Refuse a trace in which a layer was not called, or whose refusal the model caught."""
        run, calls = self._run, len(self._done)
        self._done = []  # holds tensors of the trace
        if not self._failure and calls != len(run.layers):
            self._failure = f"forward does not call '{run.names[calls]}'"
        if self._failure:
            raise NotRepeated(self._failure)

    def _check_arguments(self, place: int, call: _Call) -> None:
        """Check that a layer gets what its sample gets, but for the results of layers: those of
        the period before instead of the first, and those of its own period."""
        run = self._run
        begin, of_sample = place - place % run.period, run.sample(place)
        sample = self._done[of_sample]
        results = [(q, begin - run.period + q) for q in range(run.period)]
        results += [(run.sample(q), q) for q in range(begin, place)]
        carried: dict[int, Any] = {}
        for one, other in results:
            first, second = self._done[one], self._done[other]
            if first.of_output != second.of_output:
                self._refuse(f"'{run.names[other]}' returns something else than '{run.names[one]}'")
            pairs = zip(first.output, second.output, strict=True)
            carried.update({id(a): b for a, b in pairs if isinstance(a, torch.Tensor)})
        wanted = [carried.get(id(value), value) for value in sample.arguments]
        is_same = call.structure == sample.structure and all(map(_is_same, call.arguments, wanted))
        if not is_same:
            name, like = run.names[place], run.names[of_sample]
            self._refuse(f"the arguments of '{name}' are others than those of '{like}'")

    def _refuse(self, why: str) -> None:
        self._failure = self._failure or why
        raise NotRepeated(why)


def repetition_in(model: nn.Module, tensors: Sequence[torch.Tensor]) -> Repetition | None:
    """Find the run of layers that leaves out most of a model, None where nothing repeats.

    Args:
        model: the model. The work is linear in what its modules hold, for each kind of layer.
        tensors: its parameters and buffers, which are inputs of the step.
    """
    inputs = {id(tensor): tensor for tensor in tensors}
    best, most = None, 0
    for fqn, module in model.named_modules():
        is_stack = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        if not is_stack or len(module) <= TRACED_PERIODS:
            continue
        size = sum(1 for _ in module.modules())
        if size <= most:  # it cannot leave out more
            continue
        layers = {clean_fqn(f"{fqn}.{key}".strip(".")): m for key, m in module.named_children()}
        run = _longest_run(layers, inputs)
        if run is not None:
            skipped = [m for place, m in enumerate(run.layers) if not run.is_traced(place)]
            left_out = sum(1 for layer in skipped for _ in layer.modules())
            if left_out > most:
                best, most = run, left_out
    return best


def _longest_run(
    stack: dict[str, nn.Module], inputs: Mapping[int, torch.Tensor]
) -> Repetition | None:
    names, layers = list(stack), list(stack.values())
    # the kind of each layer is the place of the first one that it is like
    kinds: list[int] = []
    of_kind: list[Tensors] = []  # from what that first one has
    for place, (name, layer) in enumerate(stack.items()):
        for kind in (*dict.fromkeys(kinds), place):
            alike = compare(layers[kind], layer, (names[kind], name), inputs)
            if alike is not None:
                break
        else:
            return None  # not even like itself
        kinds.append(kind)
        of_kind.append(alike)
    start, period, stop = _most_repeated(kinds)
    if (stop - start) // period <= TRACED_PERIODS:
        return None
    pairs_of_run: list[Tensors] = []
    for place in range(start, stop):
        sample = start + period + (place - start) % period
        own, its = of_kind[place], of_kind[sample]
        pairs_of_run.append({id(its[key]): own[key] for key in own})
    # a tensor is of one layer or of all: gradients of some would be summed
    owned: set[int] = set()
    for first in range(period):
        like = pairs_of_run[first::period]
        for key in like[0]:
            ids = {id(pairs[key]) for pairs in like}
            if len(ids) > 1 and (len(ids) < len(like) or not owned.isdisjoint(ids)):
                return None
            owned |= ids if len(ids) > 1 else set()
    return Repetition(names[start:stop], layers[start:stop], period, pairs_of_run)


def _most_repeated(kinds: list[int]) -> tuple[int, int, int]:
    """Return start, period and stop of the run with the most layers to skip. The shortest period
    of equals wins."""
    best = (0, 0, 1, 0)
    for period in range(1, len(kinds) // (TRACED_PERIODS + 1) + 1):
        start = 0
        for place in range(len(kinds)):
            if place - start >= period and kinds[place] != kinds[place - period]:
                start = place - period + 1
            periods = (place + 1 - start) // period
            skipped = (periods - TRACED_PERIODS) * period
            if skipped > best[0]:
                best = (skipped, start, period, start + periods * period)
    return best[1:]


def _in_backward() -> bool:
    return (get_current_meta().get("custom") or {}).get("phase") == Phase.BACKWARD.value


def _is_same(argument: Any, wanted: Any) -> bool:
    """Return whether an argument is the object that is wanted, or an equal number or text."""
    are_atoms = type(argument) is type(wanted) and type(argument) in _ATOMS
    return argument is wanted or (are_atoms and repr(argument) == repr(wanted))


def compare(
    first: nn.Module, second: nn.Module, names: tuple[str, str], inputs: Mapping[int, torch.Tensor]
) -> Tensors | None:
    """Compare two layers: classes and attributes of their modules, layouts of their tensors.

    Layers with hooks are not alike. An attribute that is the layer's own number in its stack may
    differ, as may what a forward that `Module.parallelize` of torchtitan set closes over: the
    sharding config is another attribute. Linear in what the layers hold.

    Args:
        names: FQNs of the layers; a number at the end is that in the stack.
        inputs: the tensors that are inputs of the step, by id.

    Returns:
        By id of each tensor of the first layer, the one of the second; None if they differ.
    """
    pairs = list(zip(first.named_modules(), second.named_modules(), strict=False))
    if len(pairs) != sum(1 for _ in first.modules()) or _has_hooks(first) or _has_hooks(second):
        return None
    numbers = [name.rpartition(".")[2] for name in names]
    tensors: Tensors = {}
    for (name, module), (other_name, other) in pairs:
        if name != other_name or type(module) is not type(other):
            return None
        attributes, others = _attributes(module), _attributes(other)
        if attributes.keys() != others.keys():
            return None
        for key, value in attributes.items():
            are_numbers = type(value) is int and [str(value), str(others[key])] == numbers
            if not are_numbers and not _is_equal(value, others[key]):
                return None
        for one, its in zip(tensor_dicts(module)[:2], tensor_dicts(other)[:2], strict=True):
            if one.keys() != its.keys() or not all(
                _match(tensor, its[key], inputs, tensors) for key, tensor in one.items()
            ):
                return None
    back = {id(tensor) for tensor in tensors.values()}
    return tensors if len(back) == len(tensors) else None


def _match(
    tensor: torch.Tensor | None,
    other: torch.Tensor | None,
    inputs: Mapping[int, torch.Tensor],
    tensors: Tensors,
) -> bool:
    """Note that two tensors correspond, if their layouts are equal and nothing contradicts."""
    if tensor is None or other is None:
        return tensor is other
    if id(tensor) not in inputs or id(other) not in inputs:
        return False
    same_kind = tensor.requires_grad == other.requires_grad
    is_alike = tensor is other or (same_kind and unwrap(tensor)[1] == unwrap(other)[1])
    return is_alike and tensors.setdefault(id(tensor), other) is other


def _has_hooks(layer: nn.Module) -> bool:
    forwards = {id(vars(m)["forward"]) for m in layer.modules() if "forward" in vars(m)}
    return any(id(hook) not in forwards for hook in hooks_of(layer.modules()))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a step may read, but for registered tensors and modules."""
    registered = set(map(id, tensor_dicts(module)))
    return {
        name: value
        for name, value in vars(module).items()
        if name != _INITIAL and "hooks" not in name and id(value) not in registered
    }


def _is_equal(value: Any, other: Any) -> bool:
    """Compare attributes: numbers and texts, containers of them, and objects by == where their
    class defines it, otherwise by what they hold; of a function or method only its code."""
    if value is other or type(value) is not type(other):
        return value is other
    if type(value) in _ATOMS:
        return repr(value) == repr(other)  # -0.0 is not 0.0
    if isinstance(value, MethodType):  # of its own module, as where that was wrapped
        return _is_equal(value.__func__, other.__func__)
    if isinstance(value, FunctionType):
        return value.__code__ is other.__code__
    if type(value) in (list, tuple):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(
            _is_equal(entry, other[key]) for key, entry in value.items()
        )
    if isinstance(value, torch.Tensor | nn.Module):
        return False
    if type(value).__eq__ is not _NO_EQ:
        return bool(value == other)
    # an object that each layer has for itself, such as the dispatcher of tokens to experts
    return hasattr(value, "__dict__") and _is_equal(vars(value), vars(other))
