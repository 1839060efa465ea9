"""Read the traces of torch.profiler: how long ops, kernels, collectives and launches took.

The format is Chrome's, as `export_chrome_trace` writes it (torch/csrc/profiler and Kineto). An op
is a "cpu_op" with its arguments' shapes if the profiler recorded them; a kernel names the op that
launched it by "External id", or the call that launched it by "correlation". Kernels of NCCL have
the arguments of their collective.
"""

from __future__ import annotations

import ast
import functools
import gzip
import json
import keyword
import statistics
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.graph.data_sizes import shape_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import schema_of
from graph_trainer.core.graph.signature import Signature
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.torch_private import is_composite
from graph_trainer.errors import ConfigError
from graph_trainer.planner.calibration import CollectiveSample, OpSample, Samples
from graph_trainer.planner.measured_calls import model_costs, sample_of
from graph_trainer.planner.plan import Plan
from graph_trainer.planner.terminal import OnProgress

_MICROSECOND = 1e-6
_SAME_MODEL = 0.5
"""The part of the time of a trace's matmuls whose shapes the config must have."""
_LEAST = 0.05
"""The quantile of the times of all kernels that is the time of a launch."""

_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
    "long int": torch.int64,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
}
_BY_NUMBER = {
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
}
"""dtypes by their numbers in c10/core/ScalarType.h."""
_COLLECTIVE_BYTES = {
    **dict.fromkeys(("Double", "Long"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
}
_KINDS = (
    ("reduce_scatter", "reduce_scatter_tensor"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("allgather", "all_gather_into_tensor"),
    ("all_gather", "all_gather_into_tensor"),
    ("all_to_all", "all_to_all_single"),
    ("alltoall", "all_to_all_single"),
)
"""Beginnings of what c10d names collectives in a trace ("_allgather_base"), and our kinds."""


class Recorded(NamedTuple):
    """A distinct op of a trace."""

    name: str
    dims: str
    types: str
    strides: str
    values: str
    """Each as JSON of the op's arguments: sizes, types, strides and values of numbers."""


class Trace(NamedTuple):
    """One file."""

    path: Path
    device_name: str
    """Empty without a GPU."""
    ops: list[dict[str, Any]]
    kernels: list[dict[str, Any]]
    """On the GPU, copies included."""
    launches: list[dict[str, Any]]
    """Calls of CUDA's runtime."""


def read_trace(path: Path) -> Trace:
    """Read one file, .json or .json.gz.

    Raises:
        ConfigError: it cannot be read, is cut off, or is no trace with ops.
    """
    remedy = "name another file, or record the run again"
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        document = json.loads(data)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ConfigError(
            f"--trace {path}: the compressed file is cut off or damaged, as where a run ended as "
            f"it wrote: {remedy}"
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--trace {path}: not whole JSON (line {error.lineno}: {error.msg}), as where a run "
            f"ended while it wrote: {remedy}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--trace {path}: cannot be read: {reason}: {remedy}") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise ConfigError(
            f"--trace {path}: has no traceEvents, so no profiler's trace: name a file that "
            "export_chrome_trace of torch.profiler wrote"
        )
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X" and "dur" in event:
            by_category[str(event.get("cat"))].append(event)
    kernels = [e for c in ("kernel", "gpu_memcpy", "gpu_memset") for e in by_category[c]]
    devices = document.get("deviceProperties") if isinstance(document, dict) else None
    name = str(devices[0].get("name", "a GPU")) if devices and kernels else ""
    trace = Trace(path, name, by_category["cpu_op"], kernels, by_category["cuda_runtime"])
    if not trace.ops:
        raise ConfigError(
            f"--trace {path}: has no ops (category cpu_op): record with ProfilerActivity.CPU too"
        )
    if not any("Input Dims" in event.get("args", {}) for event in trace.ops):
        raise ConfigError(
            f"--trace {path}: no shapes are recorded, without which no FLOPs and bytes are known: "
            "record with torch.profiler.profile(record_shapes=True)"
        )
    return trace


def samples_of_traces(
    paths: Sequence[Path], base: Hardware, plan: Plan | None, on_progress: OnProgress
) -> tuple[Samples, list[str], str]:
    """Read what traces of one kind of device recorded.

    Args:
        base: the profile with which samples are compared.
        plan: of the config that ran; None where it is not known.

    Returns:
        Samples, notes, and the name of the device.

    Raises:
        ConfigError: a file is bad, has no kernels of the base's device, or is of another model.
    """
    samples, names, left_out = Samples(), dict[str, None](), 0.0
    seconds: dict[Recorded, list[float]] = defaultdict(list)
    issued: dict[CollectiveSample, list[float]] = defaultdict(list)
    for path in paths:
        on_progress(f"reading {path}")
        trace = read_trace(path)
        _check_device(trace, base)
        names[trace.device_name or "a CPU"] = None
        of_trace = dict[Recorded, list[float]]()
        for recorded, value in _timed_ops(trace):
            of_trace.setdefault(recorded, []).append(value)
        on_progress(f"{len(of_trace)} distinct ops")
        if plan is not None:
            _check_model(path, of_trace, plan)
        for recorded, values in of_trace.items():
            seconds[recorded] += values
        for collective, value in _collectives(trace):
            issued[collective].append(value)
        if trace.kernels:
            samples.launches.append(_launch_seconds(trace))
            for key, values in _host(trace).items():
                samples.host.setdefault(key, []).extend(values)
    models = _models(list(seconds), base)
    for recorded, values in seconds.items():
        model = models.get(recorded)
        if model is None:
            left_out += sum(values)
            continue
        timed = replace(model, seconds=statistics.median(values), count=len(values))
        samples.ops.append(timed)
    for collective, values in issued.items():
        # a kernel of NCCL also waits for the last rank to start, so the shortest one counts
        samples.collectives.append(replace(collective, seconds=min(values), count=len(values)))
    total = sum(map(sum, seconds.values()))
    notes = []
    if total and left_out > 0.01 * total:
        notes.append(f"{left_out / total:.0%} of the time of ops is of ops without a cost model")
    if not issued:
        notes.append("no collective has its sizes in the traces: links are those of the base")
    return samples, notes, ", ".join(names)


def _check_device(trace: Trace, base: Hardware) -> None:
    if base.device == "cuda" and not trace.kernels:
        raise ConfigError(
            f"--trace {trace.path}: has no kernels of a GPU, and {base.name} describes one: record "
            "with ProfilerActivity.CUDA too, or name the profile of a CPU with --base cpu"
        )
    if base.device == "cpu" and trace.kernels:
        raise ConfigError(
            f"--trace {trace.path}: has kernels of {trace.device_name}, and {base.name} describes "
            "a CPU: name the profile of a GPU that is near with --base, such as --base h100-sxm"
        )


def _check_model(path: Path, seconds: dict[Recorded, list[float]], plan: Plan) -> None:
    """Refuse a trace of another model, batch or mesh: of other matmuls."""
    known = set()
    for node in plan.simulation.joint.graph.nodes:
        schema = schema_of(node)
        if schema is not None:
            shapes = [list(shape_of(t)) for n in node.all_input_nodes for t in tensors_of(n)]
            known.add((schema.name, json.dumps(sorted(shapes))))
    matched = total = 0.0
    other = ""
    for recorded, values in seconds.items():
        if recorded.name not in ("aten::mm", "aten::bmm", "aten::addmm", "aten::_grouped_mm"):
            continue
        shapes = sorted(dims for dims in json.loads(recorded.dims) if dims)
        total += sum(values)
        if (recorded.name, json.dumps(shapes)) in known:
            matched += sum(values)
        else:
            other = f"{recorded.name} of {' and '.join(map(str, shapes))}"
    if matched < _SAME_MODEL * total:
        raise ConfigError(
            f"--trace {path}: {1 - matched / total:.0%} of the time of its matmuls has shapes that "
            f"the config does not have, such as {other}: give the flags of the run that was "
            "traced (model, batch, sequence, parallelism and --world-size), or no config"
        )


class _Op(NamedTuple):
    """A cpu_op with the ops that contain it, the outermost first."""

    event: dict[str, Any]
    parents: tuple[int, ...]
    """Places in the list of ops."""


def _nested(ops: Iterable[dict[str, Any]]) -> list[_Op]:
    """Return all ops by thread and time, with the ops around them. n log n."""
    nested: list[_Op] = []
    by_thread: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for event in ops:
        by_thread[event.get("pid"), event.get("tid")].append(event)
    for events in by_thread.values():
        stack: list[int] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while stack and _end(nested[stack[-1]].event) <= event["ts"]:
                stack.pop()
            nested.append(_Op(event, tuple(stack)))
            stack.append(len(nested) - 1)
    return nested


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _timed_ops(trace: Trace) -> Iterator[tuple[Recorded, float]]:
    """Yield distinct ops with the seconds of one call: of the op itself on a CPU, else of its
    kernels. Of nested ops the outermost counts that is one op of a graph."""
    nested = _nested(trace.ops)
    chosen = _graph_ops(nested)
    if not trace.kernels:
        for place, recorded in chosen.items():
            yield recorded, nested[place].event["dur"] * _MICROSECOND
        return
    for place, kernels in _kernels_by_op(trace, nested, chosen).items():
        yield chosen[place], sum(kernel["dur"] for kernel in kernels) * _MICROSECOND


def _graph_ops(nested: list[_Op]) -> dict[int, Recorded]:
    """Return the ops that a graph could have and that are not within another such op."""
    chosen: dict[int, Recorded] = {}
    for place, op in enumerate(nested):
        if not any(parent in chosen for parent in op.parents):
            recorded = _recorded(op.event)
            if recorded is not None:
                chosen[place] = recorded
    return chosen


def _kernels_by_op(
    trace: Trace, nested: list[_Op], chosen: dict[int, Recorded]
) -> dict[int, list[dict[str, Any]]]:
    """Return the kernels that each op of a graph launched, itself or by ops within it."""
    kernels: dict[int, list[dict[str, Any]]] = defaultdict(list)
    launcher = _Launchers(trace, nested)
    for kernel in trace.kernels:
        launched_by = launcher.of(kernel)
        if launched_by is None or "Collective name" in kernel.get("args", {}):
            continue
        around = (*nested[launched_by].parents, launched_by)
        outer = next((place for place in around if place in chosen), None)
        if outer is not None:
            kernels[outer].append(kernel)
    return kernels


class _Launchers:
    """Finds the innermost op that launched a kernel."""

    def __init__(self, trace: Trace, nested: list[_Op]) -> None:
        self._by_id: dict[object, int] = {}
        self._by_thread: dict[object, list[tuple[float, int]]] = defaultdict(list)
        self._nested = nested
        for place, op in enumerate(nested):
            number = op.event.get("args", {}).get("External id")
            if number is not None:
                self._by_id[number] = place
            thread = (op.event.get("pid"), op.event.get("tid"))
            self._by_thread[thread].append((op.event["ts"], place))
        self._calls = {
            call["args"]["correlation"]: call
            for call in trace.launches
            if "correlation" in call.get("args", {})
        }

    def of(self, kernel: dict[str, Any]) -> int | None:
        """Return the place of an op, None for a kernel of no op."""
        args = kernel.get("args", {})
        number = args.get("External id")
        if number in self._by_id:
            return self._by_id[number]
        call = self._calls.get(args.get("correlation"))
        if call is None:
            return None
        started = self._by_thread[call.get("pid"), call.get("tid")]
        after = bisect_right(started, (call["ts"], len(self._nested)))
        if not after:
            return None
        latest = started[after - 1][1]
        for place in (latest, *reversed(self._nested[latest].parents)):
            if _end(self._nested[place].event) >= call["ts"]:
                return place
        return None


def _recorded(event: dict[str, Any]) -> Recorded | None:
    """Return an op with its arguments; None of what is no op of a graph, or has no tensor."""
    name, args = str(event["name"]), event.get("args", {})
    if "Input Dims" not in args or not any(args["Input Dims"]) or not _overloads(name):
        return None
    keys = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
    return Recorded(name, *(json.dumps(args.get(key, [])) for key in keys))


@functools.cache
def _overloads(name: str) -> list[Any]:
    """Return the overloads of an op that a captured graph could have, without those of composites,
    which a capture divides."""
    namespace, _, op = name.partition("::")
    packet: Any = getattr(getattr(torch.ops, namespace, None), op, None) if op else None
    if not hasattr(packet, "overloads"):
        return []
    # a graph cannot call the overload "from" of random_, a word of Python
    names = [overload for overload in packet.overloads() if not keyword.iskeyword(overload)]
    overloads = [getattr(packet, overload) for overload in names]
    return [
        overload
        for overload in overloads
        if not is_composite(overload) and not any(a.is_out for a in overload._schema.arguments)
    ]


def _models(ops: Sequence[Recorded], base: Hardware) -> dict[Recorded, OpSample]:
    """Return what is predicted of ops, as samples of 0 seconds, from their shapes alone."""
    graph, nodes = fx.Graph(), {}
    for recorded in ops:
        node = _node(graph, recorded)
        if node is not None:
            nodes[node] = recorded
    graph.output(())
    joint = JointGraph(fx.GraphModule(nn.Module(), graph), Signature((), ()))
    of_node = model_costs(joint, base)
    models = {}
    for node, recorded in nodes.items():
        sample = sample_of(node, of_node[node])
        if sample is not None:
            models[recorded] = sample
    return models


def _node(graph: fx.Graph, recorded: Recorded) -> fx.Node | None:
    """Add an op on meta tensors to a graph; return None where no overload takes its arguments."""
    parts = [json.loads(text) for text in recorded[1:]]
    for op in _overloads(recorded.name):
        try:
            by_name, tensors = _arguments(op, *parts)
            result = op(**by_name)
        except Exception:  # whatever an overload raises on arguments of another
            continue
        inputs = {}
        for tensor in tensors:
            inputs[id(tensor)] = graph.placeholder(f"x{len(graph.nodes)}")
            inputs[id(tensor)].meta["val"] = tensor
        kwargs = {name: _with_nodes(value, inputs) for name, value in by_name.items()}
        # by position, as a capture writes what has a position
        positional = []
        for argument in op._schema.arguments:
            if argument.kwarg_only or argument.name not in kwargs:
                break
            positional.append(kwargs.pop(argument.name))
        node = graph.call_function(op, tuple(positional), kwargs)
        node.meta["val"] = result
        return node
    return None


def _with_nodes(value: Any, nodes: dict[int, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_with_nodes(item, nodes) for item in value]
    return nodes.get(id(value), value) if isinstance(value, torch.Tensor) else value


def _arguments(
    op: Any, dims: list[Any], types: list[str], strides: list[Any], values: list[str]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return arguments by name, with meta tensors, and all these tensors.

    Raises:
        ValueError: the overload takes others.
    """
    schema = op._schema.arguments
    if len(dims) > len(schema):
        raise ValueError("too many arguments")
    by_name: dict[str, Any] = {}
    tensors: list[torch.Tensor] = []
    for place, argument in enumerate(schema[: len(dims)]):
        kind, sizes = str(argument.real_type), dims[place]
        type_ = types[place] if place < len(types) else ""
        value = values[place] if place < len(values) else ""
        of_strides = strides[place] if place < len(strides) else []
        takes_tensor = "Tensor" in kind
        if type_ in _DTYPES and takes_tensor and "List" not in kind:
            tensor = _meta(sizes, of_strides, _DTYPES[type_])
            tensors.append(tensor)
            by_name[argument.name] = tensor
        elif type_ == "TensorList" and takes_tensor and "List" in kind:
            dtype = torch.float32  # a trace has no dtypes of a list's tensors
            parts = [
                _meta(shape, of_strides[n] if n < len(of_strides) else [], dtype)
                for n, shape in enumerate(sizes)
            ]
            tensors += parts
            by_name[argument.name] = parts
        elif type_ in _DTYPES or takes_tensor and value:
            raise ValueError("a tensor in the place of a number, or the reverse")
        elif value:
            parsed = _number(kind, value)
            if parsed is not None:
                by_name[argument.name] = parsed
    return by_name, tensors


def _meta(sizes: list[int], strides: list[int], dtype: torch.dtype) -> torch.Tensor:
    if len(strides) == len(sizes):
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    return torch.empty(sizes, dtype=dtype, device="meta")


def _number(kind: str, value: str) -> Any:
    """Read a number, a bool or a list of them; None of what stays at its default."""
    if any(word in kind for word in ("Layout", "Device", "MemoryFormat", "Generator")):
        return None
    parsed = ast.literal_eval(value.replace("inf", "1e999"))
    if "ScalarType" in kind:
        return _BY_NUMBER.get(parsed)
    return parsed


def _collectives(trace: Trace) -> Iterator[tuple[CollectiveSample, float]]:
    """Yield the collectives of NCCL's kernels, as samples of 0 seconds, with their seconds."""
    for kernel in trace.kernels:
        args = kernel.get("args", {})
        name = str(args.get("Collective name", "")).lstrip("_")
        kind = next((kind for begin, kind in _KINDS if name.startswith(begin)), None)
        size = int(args.get("Group size", 0))
        if kind is None or size < 2:
            continue
        width = _COLLECTIVE_BYTES.get(str(args.get("dtype")), 0)
        sample = CollectiveSample(
            kind=kind,
            ranks=_ranks(str(args.get("Process Group Ranks", "")), size),
            input_bytes=int(args.get("In msg nelems", 0)) * width,
            output_bytes=int(args.get("Out msg nelems", 0)) * width,
            seconds=0.0,
        )
        yield sample, kernel["dur"] * _MICROSECOND


def _ranks(text: str, size: int) -> tuple[int, ...]:
    """Read the ranks of a group; a list that ends in "..." goes on in equal steps."""
    numbers = [int(word) for word in text.strip("[]").replace("...", "").split(",") if word.strip()]
    if len(numbers) == size:
        return tuple(numbers)
    first = numbers[0] if numbers else 0
    step = numbers[1] - first if len(numbers) > 1 else 1
    return tuple(first + step * place for place in range(size))


def _launch_seconds(trace: Trace) -> float:
    """Return the time of the shortest kernels, from the start of one to that of the next, which
    follows at once."""
    by_stream: dict[object, list[float]] = defaultdict(list)
    for kernel in trace.kernels:
        by_stream[kernel.get("pid"), kernel.get("tid")].append(kernel["ts"])
    steps = []
    for starts in by_stream.values():
        starts.sort()
        steps += [after - before for before, after in zip(starts, starts[1:], strict=False)]
    if not steps:
        return min(kernel["dur"] for kernel in trace.kernels) * _MICROSECOND
    return sorted(steps)[int(_LEAST * len(steps))] * _MICROSECOND


def _host(trace: Trace) -> dict[str, list[float]]:
    """Return what the host took, by field of `Host`: for a launch.

    The time of an op is left out: an event of the profiler begins above the dispatcher's key of
    autograd, and that of an op with its backward is no time of either.
    """
    calls = [c["dur"] * _MICROSECOND for c in trace.launches if "LaunchKernel" in c["name"]]
    return {"next_kernel_seconds": [statistics.median(calls)]} if calls else {}
