"""Capture every operator and module that PyTorch tests itself with, and compare with eager.

    python -m benchmarks.sweep --samples 4   # of each operator and module: half an hour
    python -m benchmarks.sweep --names "nn.functional.*" --samples 3 --variants float32 bfloat16

The samples are those of PyTorch's OpInfo and ModuleInfo databases, which belong to the installed
torch. Each becomes a model: the tensors that require a gradient are its parameters, the others the
batch. Two steps, each with values of its own, are taken eagerly and captured, after the default
passes and with the eager backend. Loss, gradients, buffers and batch must have equal bits.
Under the variants of `LAYOUTS` tensors are laid out otherwise, with views before and behind.

    equal       the captured steps are bit for bit eager's
    rounding    they are near, in an operator of `UP_TO_ROUNDING`
    refused     a CaptureError, counted by its message
    DIFFERENT   any other difference
    RAW         an error that is not a CaptureError
    CRASHED     the process ended, or the sample took longer than two minutes

The exit status is 1 where there is one of the last three. Samples whose eager step fails, gives
other bits when it is repeated, or reaches no parameter are not counted.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import fnmatch
import gc
import json
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from graph_trainer.core.capture.tracing.trace import without_fused_layers
from graph_trainer.core.tensor_diff import Results, compare
from graph_trainer.core.training.check_capture import gradients_of, named_results
from graph_trainer.errors import CaptureError

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "permuted": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "inner": lambda t: t.mT.contiguous().mT,
    "channels-last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "sliced": lambda t: torch.cat([t, t])[:: 2 if t.shape[0] else 1],
    "expanded": lambda t: t[:1].expand(t.shape),
}
"""What is done to every tensor of a sample of two dimensions or more before it is given."""
VARIANTS = ("float32", "bfloat16", "checkpointed", "non-contiguous", *LAYOUTS)
OUTCOMES = ("equal", "rounding", "refused", "DIFFERENT", "RAW", "CRASHED")
BAD = OUTCOMES[3:]
UP_TO_ROUNDING = {
    "masked_fill", "prod", "masked.prod", "max.reduction_no_dim", "min.reduction_no_dim", "median",
    "nanmedian", "nn.functional.cross_entropy", "nn.CrossEntropyLoss",
}  # fmt: skip
"""Operators whose gradients docs/limits.md excepts from equal bits."""
CHUNK = 200
SECONDS_A_SAMPLE = 120

Sample = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Callable[[Any], Any]]
"""A function or a module, its arguments, and what makes its result independent of conventions."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, what is not equal and not refused, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", nargs="+", default=["*"], help="patterns of operators, modules")
    parser.add_argument("--samples", type=int, help="at most so many of each, evenly chosen")
    parser.add_argument("--every", type=int, default=1, help="only every so many of the names")
    parser.add_argument("--passes", nargs="+", default=["default"], help="as in PassConfig")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--json", help="write the results to this file as well")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        work(json.loads(arguments.child), arguments.samples, arguments.passes)
        return
    wanted = [
        (variant, name)
        for variant in arguments.variants
        for name in list(entries())[:: arguments.every]
        if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.names)
    ]
    options = ["--passes", *arguments.passes]
    if arguments.samples is not None:
        options += ["--samples", str(arguments.samples)]
    rows = list(run_in_processes(wanted, options))
    results = summary(rows)
    print_tables(results)
    text = json.dumps(results)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text)
    compared = any(row["outcome"] in OUTCOMES for row in rows)
    if not compared or any(row["outcome"] in BAD for row in rows):
        raise SystemExit(1)


def entries() -> dict[str, Any]:
    """PyTorch's OpInfos and ModuleInfos by name."""
    # the package expecttest, of the dev extra, is imported here
    from torch.testing._internal import common_methods_invocations as operators
    from torch.testing._internal.common_modules import module_db

    # Operators that draw are called through this, which seeds: capture refuses a step that does.
    operators.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    infos = {info.full_name: info for info in operators.op_db}
    return infos | {info.name: info for info in module_db}


def run_in_processes(
    wanted: Sequence[tuple[str, str]], options: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Run the samples of (variant, name) pairs; a crash costs the sample that it happens in."""
    todo = [[*pair, 0] for pair in wanted]
    while todo:
        chunk = todo[:CHUNK]
        command = [sys.executable, "-m", "benchmarks.sweep", "--child", json.dumps(chunk)]
        with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            begun = last = None
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                row = json.loads(line)
                if begun is not None and row["outcome"] != "begun":
                    print(*row.values(), file=sys.stderr)
                    yield row
                last, begun = row, row if row["outcome"] == "begun" else None
        if process.returncode == 0:
            todo = todo[CHUNK:]
            continue
        if last is None:
            raise SystemExit(f"a process of the sweep failed outside of a sample: {chunk}")
        if begun is not None:
            yield begun | {"outcome": "CRASHED", "detail": f"exit status {process.returncode}"}
        at = [last["variant"], last["name"]]
        here = next(i for i, each in enumerate(todo) if each[:2] == at)
        todo = [[*at, last["sample"] + 1], *todo[here + 1 :]]


def work(chunk: Sequence[tuple[str, str, int]], limit: int | None, passes: Sequence[str]) -> None:
    """Print one line of JSON before and after each sample."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    infos = entries()
    gc.freeze()  # capture collects garbage, and the databases are a million objects
    for variant, name, start in chunk:
        for number, first, second in samples(infos[name], variant, limit):
            if number < start:
                continue
            row = {"variant": variant, "name": name, "sample": number}
            print(json.dumps(row | {"outcome": "begun"}), flush=True)
            faulthandler.dump_traceback_later(SECONDS_A_SAMPLE, exit=True)
            outcome, detail = outcome_of(first, second, gt.PassConfig(passes=passes), variant)
            if outcome == "near":
                outcome = "rounding" if name in UP_TO_ROUNDING else "DIFFERENT"
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps(row | {"outcome": outcome, "detail": detail}), flush=True)


def samples(info: Any, variant: str, limit: int | None) -> Iterator[tuple[int, Sample, Sample]]:
    """The samples of one entry, each twice: equal but for the values of its tensors."""
    dtype = torch.bfloat16 if variant == "bfloat16" else torch.float32
    of = of_module if hasattr(info, "module_cls") else of_operator
    twice = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        twice.append(list(of(info, dtype, variant == "non-contiguous")))
    step = max(1, -(-len(twice[0]) // limit)) if limit else 1
    for number, first in islice(enumerate(twice[0]), 0, None, step):
        second = twice[1][number] if number < len(twice[1]) else first
        yield number, first, second if _alike(first, second) else first


def of_operator(info: Any, dtype: torch.dtype, noncontiguous: bool) -> Iterator[Sample]:
    """The samples of an OpInfo that autograd and the type allow."""
    if not info.supports_autograd or dtype not in info.supported_backward_dtypes("cpu"):
        return
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        args = (sample.input, *sample.args)
        if noncontiguous:
            tensors = (t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor))
            if any(t.layout is not torch.strided for t in tensors):
                continue
            sample = sample.noncontiguous()
            args = (sample.input, *sample.args)
        yield info.op, args, sample.kwargs, sample.output_process_fn_grad


def of_module(info: Any, dtype: torch.dtype, noncontiguous: bool) -> Iterator[Sample]:
    """The samples of a ModuleInfo, in training and, where that differs, in evaluation."""
    from torch.testing._internal.common_utils import noncontiguous_like

    if dtype is not torch.float32 and dtype not in info.dtypes:
        return
    for training in (True, False) if info.train_and_eval_differ else (True,):
        made = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        for sample in made:
            if sample.forward_input is None:
                continue
            module = info.module_cls(
                *sample.constructor_input.args, **sample.constructor_input.kwargs
            )
            arguments = (sample.forward_input.args, sample.forward_input.kwargs)
            if noncontiguous:
                arguments = pytree.tree_map_only(torch.Tensor, noncontiguous_like, arguments)
            yield module.to(dtype).train(training), *arguments, lambda result: result


def _alike(first: Sample, second: Sample) -> bool:
    """Tell whether two samples differ in nothing but the values of their tensors."""

    def kind(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided else value.layout
            return value.shape, strides, value.dtype, value.requires_grad
        return repr(value)

    leaves = [pytree.tree_flatten(sample[1:3]) for sample in (first, second)]
    return leaves[0][1] == leaves[1][1] and all(
        kind(a) == kind(b) for a, b in zip(leaves[0][0], leaves[1][0], strict=True)
    )


class Sampled(nn.Module):
    """A sample as a model: what requires a gradient is a parameter, other tensors the batch."""

    def __init__(self, sample: Sample, variant: str) -> None:
        super().__init__()
        self.layout = LAYOUTS.get(variant)
        self.function, args, kwargs, self.process = sample
        self.leaves, self.tree = pytree.tree_flatten((args, kwargs))
        self.trained: dict[int, str] = {}
        self.given: list[int] = []
        names: dict[int, str] = {}
        for place, leaf in enumerate(self.leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.requires_grad:
                self.trained[place] = names.setdefault(id(leaf), f"leaf{place}")
                self.register_parameter(self.trained[place], nn.Parameter(leaf.detach()))
            else:
                self.given.append(place)
            self.leaves[place] = None

    def take_values(self, sample: Sample) -> list[torch.Tensor]:
        """Give the parameters a sample's values, and return the batch that belongs to them."""
        leaves = pytree.tree_leaves(sample[1:3])
        with torch.no_grad():
            for place, name in self.trained.items():
                self.get_parameter(name).copy_(leaves[place].detach())
        return [copy.deepcopy(leaves[place]) for place in self.given]

    def scale(self, factor: float) -> None:
        """Scale the parameters of the module that is sampled."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.startswith("function."):
                    parameter.mul_(factor)

    def forward(self, *batch: torch.Tensor) -> list[torch.Tensor]:
        """Return the results that autograd can differentiate."""
        leaves = list(self.leaves)
        for place, name in self.trained.items():
            leaves[place] = getattr(self, name)
        for place, tensor in zip(self.given, batch, strict=True):
            leaves[place] = tensor
        if self.layout is not None:
            # the gradient of a view is one too, of what the operator's backward gives
            leaves = [
                self.layout(each.reshape(-1).view(each.shape)) if _has_layout(each) else each
                for each in leaves
            ]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        results = pytree.tree_leaves(self.process(self.function(*args, **kwargs)))
        results = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        if self.layout is not None:
            viewed = [(r.mT, r.movedim(1, -1)) for r in results if _has_layout(r)]
            results += [view for views in viewed for view in views]
        return results


def _has_layout(value: Any) -> bool:
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return dense and not value.is_nested and value.dim() > 1


class NoGradientError(Exception):
    """The results of a sample do not depend on its parameters."""


def loss_of(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weigh every element differently, so that gradients are no constants, and have both signs."""
    total: Any = 0
    for result in results:
        real = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
        flat = real.to_dense().reshape(-1) if real.is_sparse else real.reshape(-1)
        total = total + (flat * torch.linspace(-1.0, 0.75, flat.numel(), dtype=flat.dtype)).sum()
    if not isinstance(total, torch.Tensor):
        raise NoGradientError
    return total


def outcome_of(
    first: Sample, second: Sample, passes: gt.PassConfig, variant: str
) -> tuple[str, str]:
    """Take two steps eagerly and captured; return the outcome and what there is to say of it."""

    def loss_fn(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        if variant == "checkpointed":
            return loss_of(checkpoint(model, *batch, use_reentrant=False))
        return loss_of(model(*batch))

    def eager(model: nn.Module, *batch: torch.Tensor) -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        with without_fused_layers():
            loss = loss_fn(model, *batch)
            loss.backward()
        return loss, gradients_of(model)

    def two_steps(model: Sampled, step: Callable[..., Any]) -> Iterator[Results]:
        torch.manual_seed(2)
        for values, scale in ((first, 1.0), (second, 0.75)):
            batch = model.take_values(values)
            model.scale(scale)
            loss, gradients = step(model, *batch)
            results = named_results(model, loss, gradients)
            results |= {f"batch {place}": [tensor] for place, tensor in enumerate(batch)}
            results |= {f"strides of {n}": [_strides(g)] for n, g in gradients.items()}
            yield results

    try:
        model = Sampled(first, variant)
        wanted, again = (list(two_steps(copy.deepcopy(model), eager)) for _ in range(2))
    except Exception as error:
        return "eager fails", f"{type(error).__name__}: {error}"[:200]
    if any(compare(*pair) for pair in zip(wanted, again, strict=True)):
        return "eager varies", ""
    try:
        captured = copy.deepcopy(model)
        joint = gt.capture(captured, loss_fn, captured.take_values(first))
        gt.run_passes(joint, passes)
        found = list(two_steps(captured, gt.compile(joint, backend="eager")))
    except CaptureError as error:
        return "refused", _class_of(str(error))
    except Exception as error:
        return "RAW", f"{type(error).__name__}: {error}"[:300]
    differences = [d for pair in zip(wanted, found, strict=True) for d in compare(*pair)]
    if not differences:
        return "equal", ""
    worst = "; ".join(f"{d.name} {d.max_rel:.2g} {d.note}".strip() for d in differences)[:300]
    dtype = next(p.dtype for p in model.parameters())
    near = all(d.max_rel < torch.finfo(dtype).eps ** 0.5 for d in differences)
    return ("near" if near else "DIFFERENT"), worst


def _strides(gradient: torch.Tensor) -> torch.Tensor:
    """The strides that matter."""
    if gradient.numel() < 2:
        return torch.empty(0)
    pairs = zip(gradient.shape, gradient.stride(), strict=True)
    return torch.tensor([stride for size, stride in pairs if size > 1])


def _class_of(message: str) -> str:
    """A message without what differs from sample to sample."""
    message = re.sub(r"^.* cannot be captured: in .*?: (?=\w+: )", "", message, flags=re.S)
    message = re.sub(r"'[^']*'|\(module [^)]*\)", "...", message)
    return re.sub(r"\s+", " ", re.sub(r"[\[(]?\d[\d., \])]*", "N ", message))[:90].strip()


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts by variant and outcome, messages of refusals, and every sample that is at fault."""
    counts = {
        variant: dict(Counter(row["outcome"] for row in rows if row["variant"] == variant))
        for variant in dict.fromkeys(row["variant"] for row in rows)
    }
    refused = Counter(row["detail"] for row in rows if row["outcome"] == "refused")
    return {
        "torch": torch.__version__,
        "counts": counts,
        "refused": dict(refused.most_common()),
        "at_fault": [row for row in rows if row["outcome"] in BAD],
        "rounding": sorted({row["name"] for row in rows if row["outcome"] == "rounding"}),
    }


def print_tables(results: dict[str, Any]) -> None:
    """A line a variant, the refusals, and the names of what is at fault."""
    columns = (*OUTCOMES, "eager fails", "eager varies")
    print(f"{'':<14}" + "".join(f"{name:>{max(9, len(name) + 1)}}" for name in columns))
    for variant, counts in results["counts"].items():
        cells = (f"{counts.get(name, 0):>{max(9, len(name) + 1)},}" for name in columns)
        print(f"{variant:<14}" + "".join(cells))
    for message, count in results["refused"].items():
        print(f"refused {count:>5,}  {message[:84]}")
    if results["rounding"]:
        print(f"equal up to rounding: {len(results['rounding'])} names, in the JSON")
    names = Counter((row["outcome"], row["variant"], row["name"]) for row in results["at_fault"])
    for (outcome, variant, name), count in names.items():
        print(f"{outcome:<10}{count:>4}  {variant:<16}{name}"[:100])


if __name__ == "__main__":
    main()
