"""Compare consecutive captured steps with the same steps of the model itself."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.module_tracker import ModuleTracker

from graph_trainer.core.analysis.node_digests import run_graph
from graph_trainer.core.capture.refusals.second_step import ModuleAttributes
from graph_trainer.core.capture.tracing.trace import LossFn, without_fused_layers
from graph_trainer.core.graph.collective_kinds import Effect, kind_of_op
from graph_trainer.core.graph.ops import OpOverload
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.ordering.agreement import Agreement
from graph_trainer.core.passes.pass_list import PassConfig
from graph_trainer.core.runtime.guard import Guard
from graph_trainer.core.runtime.step import Gradients
from graph_trainer.core.tensor_diff import Results, compare, digest
from graph_trainer.core.torch_private import FakeTensor, TorchDispatchMode, pytree, swap_tensors
from graph_trainer.core.training.step_cache import TrainStep
from graph_trainer.errors import VerificationError

_LEARNING_RATE = 1e-3
_SHOWN = 8


def check_capture(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Sequence[Sequence[Any]],
    *,
    passes: PassConfig | None = None,
    attributes: bool = True,
    full_capture: bool | None = None,
) -> None:
    """Check that captured steps of a model compute what the model does, bit for bit.

    Takes one step for each batch eagerly and again captured, from the same state and the same
    random numbers, and compares after every step loss, gradients, parameters, buffers, random
    state and the attributes of the modules. After a step every parameter moves against its
    gradient, so that what a step should read anew has changed. The model is left as it was.
    In a process group every rank calls it.

    Args:
        model: the model, with its tensors on CPU.
        loss_fn: `loss_fn(model, *args)` -> scalar loss.
        batches: the arguments of each step, two steps or more: `[(tokens, labels), ...]`.
        passes: the passes of the captured steps; None for the default ones.
        attributes: whether the attributes of the modules are compared. A captured step sets none,
            so turn this off for a model that sets some for others to read.
        full_capture: as of `capture`.

    Raises:
        VerificationError: with what differs first, at which step, and the first op of the model
            whose result the graph does not have; or fewer than two batches.
        CaptureError: the step cannot be captured.

    Example::

        gt.check_capture(model, loss_fn, [(tokens[0], labels[0]), (tokens[1], labels[1])])
    """
    if len(batches) < 2:
        raise VerificationError(
            f"check_capture compares consecutive steps and was given {len(batches)} batches: give "
            "two or more, as [(args of the first step...), (args of the second step...)]"
        )
    start = StartingPoint(model, loss_fn, batches)

    def eager(model: nn.Module, *args: Any) -> tuple[torch.Tensor, Gradients]:
        return eager_step(model, loss_fn, args, {})

    # every graph is kept: what is captured below would be seen as ops of the step
    captured = TrainStep(
        loss_fn,
        passes=passes or PassConfig(),
        max_graphs=len(batches),
        full_capture=full_capture,
    )
    with start.again():
        wanted = list(_results(model, eager, batches, attributes))
    with start.again():
        results = list(_results(model, captured, batches, attributes))
    steps = [compare(*pair) for pair in zip(wanted, results, strict=True)]
    number = next((i for i, differences in enumerate(steps) if differences), len(steps))
    ranks = Agreement()
    first = min(ranks.gather(number))
    if first == len(steps):
        return
    computed = [d for d in steps[first] if not d.name.startswith(("attribute", "random"))]
    op = ""
    if any(ranks.gather(bool(computed))):
        # every rank searches where one of them does: the steps communicate
        before, batch = batches[:first], batches[first]
        with start.again():
            list(_results(model, captured, before))
            captured.prepare(model, *batch)
            joint = captured.joint_graphs()[-1]
            guard = Guard(joint)
            run = run_graph(joint, guard.values(guard.tensors(model, batch, {})))
            known = set(itertools.chain(*run.digests.values()))
        with start.again():
            list(_results(model, eager, before))
            with ModuleTracker() as tracker, _FirstOther(known, tracker) as of_model:
                eager(model, *batch)
        op = of_model.name
    for rank, (differences, where) in enumerate(ranks.gather((steps[first], op))):
        if not differences:
            continue
        shown = []
        for difference in differences[:_SHOWN]:
            amount = (
                "" if math.isnan(difference.max_abs) else f"by at most {difference.max_abs:.3g}"
            )
            shown.append(f"{difference.name} {amount} {difference.note}".strip())
        more = len(differences) - len(shown)
        hint = f"The first op whose result the graph has nowhere: {where}. " if where else ""
        if all(difference.name.startswith("attribute") for difference in differences):
            hint = "A captured step sets no attributes: attributes=False leaves them out. "
        raise VerificationError(
            f"rank {rank}, step {first + 1}: the captured step differs from the model itself: "
            f"{'; '.join(shown)}{f'; and {more} more' if more > 0 else ''}. {hint}"
            "docs/what_capture_sees.md says what a step may do, and what to write instead"
        )


def _results(
    model: nn.Module,
    take_step: Callable[..., tuple[torch.Tensor, Gradients]],
    batches: Sequence[Sequence[Any]],
    attributes: bool = False,
) -> Iterator[Results]:
    """Take a step for each batch, and yield all that a program can see after it."""
    for args in batches:
        loss, gradients = take_step(model, *args)
        seen = named_results(model, loss, gradients)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                gradient = gradients.get(clean_fqn(name))
                if gradient is not None and parameter.requires_grad:
                    parameter.add_(gradient, alpha=-_LEARNING_RATE)
        seen["random state"] = [torch.get_rng_state()]
        for fqn, module in model.named_modules() if attributes else ():
            for name, value in vars(module).items():
                if name not in _OF_EVERY_MODULE and isinstance(value, _COMPARED):
                    if isinstance(value, dict):
                        value = [*value, *value.values()]
                    elif not isinstance(value, (list, tuple, set)):
                        value = [value]
                    seen[f"attribute {f'{fqn}.{name}'.strip('.')}"] = list(value)
        yield seen


_OF_EVERY_MODULE = vars(nn.Module()).keys()
_COMPARED = (torch.Tensor, bool, int, float, str, list, tuple, dict, set, type(None))


class _FirstOther(TorchDispatchMode):
    """Finds the first op with a result whose digest is not a known one, and the module it is in."""

    supports_higher_order_operators = True

    def __init__(self, known: set[str], tracker: ModuleTracker) -> None:
        super().__init__()
        self._known, self._tracker = known, tracker
        self.name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (torch.Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # the subclass calls again, with the plain tensors inside it
        result = func(*args, **(kwargs or {}))
        if not self.name and _is_complete(func) and _digests(result) - self._known:
            self.name = f"{func} in {self._place()}"
        return result

    def _place(self) -> str:
        modules = self._tracker.parents - {"Global"}
        if not modules:
            return "the loss"
        name = max(modules, key=len).partition(".")[2]
        part = "backward" if self._tracker.is_bw else "forward"
        return f"{f'module {name!r}' if name else 'the model'} ({part})"


def _digests(values: Any) -> set[str]:
    leaves = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {digest(leaf) for leaf in leaves if not (leaf.is_meta or isinstance(leaf, FakeTensor))}


def _is_complete(func: Any) -> bool:
    """Tell whether an op makes values that are complete when it returns: not a view, memory that is
    not written yet, or a collective that is not waited for yet."""
    if not isinstance(func, OpOverload):
        return True
    kind = kind_of_op(func._schema.name)
    is_view = any(returned.alias_info for returned in func._schema.returns)
    is_started = kind is not None and kind.effect is Effect.STARTS
    return not is_view and not is_started and "empty" not in str(func)


class StartingPoint:
    """Copies of a model's tensors, of a nest of batches and of the random state, to start from
    again. Attributes that the model changes are restored as well."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, batches: Any) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._state = [*model.parameters(), *model.buffers()]
        batch = [t for t in pytree.tree_leaves(batches) if isinstance(t, torch.Tensor)]
        parts = [part.detach() for tensor in (*self._state, *batch) for part in unwrap(tensor)[0]]
        self._stored = [(part, part.clone()) for part in parts]
        self._random = torch.get_rng_state()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Start from the stored state, and restore it afterwards."""
        unchanged = {id(tensor): tensor for tensor in self._state}
        gradients = [(p, p.grad) for p in self._model.parameters()]
        with ModuleAttributes(self._model), swap_tensors(self._model, unchanged):
            torch.set_rng_state(self._random)
            try:
                yield
            finally:
                for part, stored in self._stored:
                    part.copy_(stored)
                torch.set_rng_state(self._random)
                for parameter, gradient in gradients:
                    parameter.grad = gradient


def eager_step(
    model: nn.Module, loss_fn: LossFn, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, Gradients]:
    """Take a step of the model itself, without a graph and with the kernels of a captured step."""
    for parameter in model.parameters():
        parameter.grad = None
    with without_fused_layers():
        loss = loss_fn(model, *args, **kwargs)
        loss.backward()
    return loss, gradients_of(model)


def gradients_of(model: nn.Module) -> Gradients:
    """Return the gradients that a model's parameters have accumulated, by FQN."""
    return {clean_fqn(n): p.grad for n, p in model.named_parameters() if p.grad is not None}


def named_results(
    model: nn.Module, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor]
) -> Results:
    """Return copies of the plain tensors of a step's loss and gradients and of the buffers."""
    tensors = {"loss": loss}
    for name, _ in model.named_parameters():
        if (gradient := gradients.get(clean_fqn(name))) is not None:
            tensors[f"gradient of {clean_fqn(name)}"] = gradient
    for name, buffer in model.named_buffers():
        tensors[f"buffer {clean_fqn(name)}"] = buffer
    results: Results = {}
    for name, tensor in tensors.items():
        parts, _ = unwrap(tensor)
        results[name] = [part.detach().clone() for part in parts]
    return results
