"""Find equal layers of a model, and skip all but four periods of them in a trace.

A stack of layers (a ModuleList, ModuleDict or Sequential) often repeats one layer, or a short
sequence of different ones: a period. The first two periods of a run, one in the middle and the last
are traced. When the model calls the other layers, they compute nothing and return aliases of the
results of the traced period before them. `extend` then inserts their nodes into the graph, and
checks that the traced periods are one pattern.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, NamedTuple

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
"""The attribute with the initializers of torchtitan's modules, which no step reads. Their scale
depends on a layer's depth."""


class NotRepeated(CaptureError):
    """The layers of a model compute different things, so that all of them must be traced."""


@dataclass(slots=True)
class Repetition:
    """A run of layers in one stack, the same ones every `period` layers."""

    names: list[str]
    """FQNs, in the order of the stack, in which the model must call them."""
    layers: list[nn.Module] = field(repr=False)
    period: int
    counterparts: list[Tensors] = field(repr=False)
    """For each layer, from the id of each tensor of its sample to the tensor of the layer."""

    @property
    def periods(self) -> int:
        """The number of periods, at least five."""
        return len(self.layers) // self.period

    @property
    def traced(self) -> tuple[int, ...]:
        """The numbers of the periods that are traced, of which the second is the pattern."""
        return 0, 1, self.periods // 2, self.periods - 1

    def sample(self, place: int) -> int:
        """Return the place of the layer of the second period that corresponds to a layer."""
        return self.period + place % self.period

    def is_traced(self, place: int) -> bool:
        """Return whether a layer is of a traced period."""
        return place // self.period in self.traced

    def left_out(self) -> set[int]:
        """Return the ids of the tensors of layers that are not traced."""
        ids = set()
        for place, tensors in enumerate(self.counterparts):
            if not self.is_traced(place):
                # a tensor that all layers share is the sample's
                ids |= {id(tensor) for sample, tensor in tensors.items() if id(tensor) != sample}
        return ids

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        """Inside, let only the traced layers compute.

        Raises:
            NotRepeated: in the model's forward or at the end. The model does not call each layer
                once and in order, or it calls a layer with other arguments than its sample.
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
    """The arguments and results of a layer's call, flat."""

    arguments: list[Any]
    structure: Any
    """How pytree rebuilds the arguments."""
    results: list[Any] = field(default_factory=list)
    result_structure: Any = None


class _Calls:
    """The calls of a repetition's layers in one trace."""

    def __init__(self, repetition: Repetition) -> None:
        self._run = repetition
        self._done: list[_Call] = []
        self._failure = ""

    def enter(self, place: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Check and store a call before it runs."""
        if _in_backward():
            return  # a checkpointed layer that is recomputed
        if place != len(self._done):
            self._refuse(f"forward does not call '{self._run.names[place]}' once and in order")
        arguments, structure = pytree.tree_flatten((args, kwargs))
        call = _Call(arguments, structure)
        if place >= 2 * self._run.period:
            self._check_arguments(place, call)
        self._done.append(call)

    def leave(self, place: int, layer: nn.Module, args: Any, output: Any) -> None:
        """Store the results of a layer."""
        if not _in_backward() and place < len(self._done):
            call = self._done[place]
            call.results, call.result_structure = pytree.tree_flatten(output)

    def skip(self, place: int, *args: Any, **kwargs: Any) -> Any:
        """Return aliases of the results of the traced period before.

        Each layer returns new objects, by which `_check_arguments` sees that the next layer gets
        these results and no others.
        """
        run = self._run
        if _in_backward():
            self._refuse(f"'{run.names[place]}' runs again in backward")
        self.enter(place, run.layers[place], args, kwargs)
        period, position = divmod(place, run.period)
        traced = max(number for number in run.traced if number < period)
        traced_call = self._done[traced * run.period + position]
        call = self._done[place]
        for value in traced_call.results:
            is_tensor = isinstance(value, torch.Tensor)
            call.results.append(torch.ops.aten.alias.default(value) if is_tensor else value)
        call.result_structure = traced_call.result_structure
        return pytree.tree_unflatten(call.results, call.result_structure)

    def check_complete(self) -> None:
        """Refuse a trace in which a layer was not called, or the model caught a refusal."""
        num_calls = len(self._done)
        self._done = []  # it refers to tensors of the trace
        if not self._failure and num_calls != len(self._run.layers):
            self._failure = f"forward does not call '{self._run.names[num_calls]}'"
        if self._failure:
            raise NotRepeated(self._failure)

    def _check_arguments(self, place: int, call: _Call) -> None:
        """Check that a layer gets the arguments of its sample, with results of other layers: those
        of the period before in place of the first period's, and those of the same period."""
        run = self._run
        start = place - place % run.period  # of the layer's period
        sample = self._done[run.sample(place)]
        corresponding = [(q, start - run.period + q) for q in range(run.period)]
        corresponding += [(run.sample(q), q) for q in range(start, place)]
        replaced: dict[int, Any] = {}  # by id of a result that the sample may get
        for place_before, place_now in corresponding:
            before = self._done[place_before]
            now = self._done[place_now]
            if before.result_structure != now.result_structure:
                self._refuse(
                    f"'{run.names[place_now]}' returns something else than "
                    f"'{run.names[place_before]}'"
                )
            for old, new in zip(before.results, now.results, strict=True):
                if isinstance(old, torch.Tensor):
                    replaced[id(old)] = new
        expected = [replaced.get(id(value), value) for value in sample.arguments]
        if call.structure != sample.structure or not all(map(_is_same, call.arguments, expected)):
            self._refuse(
                f"the arguments of '{run.names[place]}' differ from those of "
                f"'{run.names[run.sample(place)]}'"
            )

    def _refuse(self, reason: str) -> None:
        self._failure = self._failure or reason
        raise NotRepeated(reason)


def repetition_in(model: nn.Module, tensors: Sequence[torch.Tensor]) -> Repetition | None:
    """Find the run of layers that leaves out most of a model; None if no layers repeat.

    Args:
        model: the model. The work is linear in the attributes of its modules, for each kind of
            layer.
        tensors: its parameters and buffers, which are inputs of the step.
    """
    inputs = {id(tensor): tensor for tensor in tensors}
    best: Repetition | None = None
    most_skipped = 0  # modules
    for fqn, module in model.named_modules():
        is_stack = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        if not is_stack or len(module) <= TRACED_PERIODS:
            continue
        if _num_modules(module) <= most_skipped:  # it cannot leave out more
            continue
        layers = {clean_fqn(f"{fqn}.{key}".strip(".")): m for key, m in module.named_children()}
        repetition = _repetition_of(layers, inputs)
        if repetition is None:
            continue
        skipped = 0
        for place, layer in enumerate(repetition.layers):
            if not repetition.is_traced(place):
                skipped += _num_modules(layer)
        if skipped > most_skipped:
            best = repetition
            most_skipped = skipped
    return best


def _num_modules(module: nn.Module) -> int:
    return sum(1 for _ in module.modules())


def _repetition_of(
    stack: dict[str, nn.Module], inputs: Mapping[int, torch.Tensor]
) -> Repetition | None:
    """Return the run of layers of a stack that leaves out most of it, None if there is none."""
    names = list(stack)
    layers = list(stack.values())
    # the kind of each layer is the place of the first layer that it equals
    kinds: list[int] = []
    # for each layer, from the id of each tensor of that first layer to the tensor of the layer
    tensors_of: list[Tensors] = []
    for place, layer in enumerate(layers):
        for kind in (*dict.fromkeys(kinds), place):
            tensors = compare(layers[kind], layer, (names[kind], names[place]), inputs)
            if tensors is not None:
                break
        else:
            return None  # a layer with hooks, say, does not even equal itself
        kinds.append(kind)
        tensors_of.append(tensors)
    run = _most_repeated(kinds)
    if (run.stop - run.start) // run.period <= TRACED_PERIODS:
        return None
    counterparts: list[Tensors] = []
    for place in range(run.start, run.stop):
        sample = run.start + run.period + (place - run.start) % run.period
        samples = tensors_of[sample]
        counterparts.append({id(samples[key]): t for key, t in tensors_of[place].items()})
    if not _each_of_one_layer_or_all(counterparts, run.period):
        return None
    layers_of_run = layers[run.start : run.stop]
    return Repetition(names[run.start : run.stop], layers_of_run, run.period, counterparts)


def _each_of_one_layer_or_all(counterparts: list[Tensors], period: int) -> bool:
    """Return whether each tensor is of one layer, or of all layers at its place in a period.

    The gradient of a tensor of some layers would be a sum, which the pattern does not have.
    """
    of_one_layer: set[int] = set()
    for position in range(period):
        layers = counterparts[position::period]
        for sample in layers[0]:
            ids = {id(tensors[sample]) for tensors in layers}
            if len(ids) == 1:
                continue
            if len(ids) < len(layers) or not of_one_layer.isdisjoint(ids):
                return False
            of_one_layer |= ids
    return True


class _Run(NamedTuple):
    """A run of layers from `start` to `stop`, the same ones every `period` layers."""

    start: int
    stop: int
    period: int


def _most_repeated(kinds: list[int]) -> _Run:
    """Return the run with the most layers to skip; of equal runs, that with the shortest period."""
    best = _Run(0, 0, period=1)
    most_skipped = 0
    for period in range(1, len(kinds) // (TRACED_PERIODS + 1) + 1):
        start = 0
        for place in range(len(kinds)):
            if place - start >= period and kinds[place] != kinds[place - period]:
                start = place - period + 1
            periods = (place + 1 - start) // period
            skipped = (periods - TRACED_PERIODS) * period
            if skipped > most_skipped:
                best = _Run(start, start + periods * period, period)
                most_skipped = skipped
    return best


def _in_backward() -> bool:
    return (get_current_meta().get("custom") or {}).get("phase") == Phase.BACKWARD.value


def _is_same(argument: Any, expected: Any) -> bool:
    """Return whether an argument is the expected object, or an equal number or text."""
    if argument is expected:
        return True
    are_atoms = type(argument) is type(expected) and type(argument) in _ATOMS
    return are_atoms and repr(argument) == repr(expected)


def compare(
    first: nn.Module, second: nn.Module, names: tuple[str, str], inputs: Mapping[int, torch.Tensor]
) -> Tensors | None:
    """Compare two layers: classes and attributes of their modules, layouts of their tensors.

    Layers with hooks are not equal. An attribute with the number of a layer in its stack may
    differ. Of a forward that `Module.parallelize` of torchtitan set, only the code is compared: the
    sharding config that it closes over is another attribute. Linear in the layers' attributes.

    Args:
        names: FQNs of the layers; a number at the end is that in the stack.
        inputs: the tensors that are inputs of the step, by id.

    Returns:
        From the id of each tensor of the first layer to the tensor of the second; None if the
        layers differ.
    """
    pairs = list(zip(first.named_modules(), second.named_modules(), strict=False))
    if len(pairs) != sum(1 for _ in first.modules()) or _has_hooks(first) or _has_hooks(second):
        return None
    numbers = [name.rpartition(".")[2] for name in names]
    tensors: Tensors = {}
    for (name, module), (other_name, other) in pairs:
        if name != other_name or type(module) is not type(other):
            return None
        attributes = _attributes(module)
        other_attributes = _attributes(other)
        if attributes.keys() != other_attributes.keys():
            return None
        for key, value in attributes.items():
            other_value = other_attributes[key]
            are_numbers = type(value) is int and [str(value), str(other_value)] == numbers
            if not are_numbers and not _is_equal(value, other_value):
                return None
        # parameters, then buffers
        for named, other_named in zip(
            tensor_dicts(module)[:2], tensor_dicts(other)[:2], strict=True
        ):
            if named.keys() != other_named.keys():
                return None
            for key, tensor in named.items():
                if not _match(tensor, other_named[key], inputs, tensors):
                    return None
    # two tensors of the first layer must not be one tensor of the second
    other_ids = {id(tensor) for tensor in tensors.values()}
    return tensors if len(other_ids) == len(tensors) else None


def _match(
    tensor: torch.Tensor | None,
    other: torch.Tensor | None,
    inputs: Mapping[int, torch.Tensor],
    tensors: Tensors,
) -> bool:
    """Return whether two tensors correspond, and store that they do in `tensors`.

    They do not if their layouts differ, or if the first one corresponds to another tensor.
    """
    if tensor is None or other is None:
        return tensor is other
    if id(tensor) not in inputs or id(other) not in inputs:
        return False
    if tensor is not other:
        _, layout = unwrap(tensor)
        _, other_layout = unwrap(other)
        if tensor.requires_grad != other.requires_grad or layout != other_layout:
            return False
    return tensors.setdefault(id(tensor), other) is other


def _has_hooks(layer: nn.Module) -> bool:
    forwards = {id(vars(m)["forward"]) for m in layer.modules() if "forward" in vars(m)}
    return any(id(hook) not in forwards for hook in hooks_of(layer.modules()))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a step may read, without registered tensors and modules."""
    registered = set(map(id, tensor_dicts(module)))
    return {
        name: value
        for name, value in vars(module).items()
        if name != _INITIAL and "hooks" not in name and id(value) not in registered
    }


def _is_equal(value: Any, other: Any) -> bool:
    """Return whether two attributes are equal.

    Compares numbers, texts, containers of them, the code of functions and methods, and objects by
    == if their class defines it, else by their attributes.
    """
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if type(value) in _ATOMS:
        return repr(value) == repr(other)  # -0.0 is not 0.0
    if isinstance(value, MethodType):  # bound to a module of the layer, as a wrapped forward is
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
    # an object that every layer has one of, such as the dispatcher of tokens to experts
    return hasattr(value, "__dict__") and _is_equal(vars(value), vars(other))
