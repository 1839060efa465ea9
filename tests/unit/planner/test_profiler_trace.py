"""Traces of torch.profiler: recorded here on CPU, of a GPU by hand, and bad ones."""

import gzip
import json

import pytest
import torch

import graph_trainer as gt
from graph_trainer.core.simulation.hardware import OpKind, load_hardware
from graph_trainer.planner.plan import make_plan
from graph_trainer.planner.profiler_trace import read_trace, samples_of_traces
from tests.unit.planner.conftest import RANKS, config_of


def silent(line):
    pass


@pytest.fixture
def recorded(tmp_path):
    """Records three steps of a small model, whose first has what libraries prepare."""

    def record(**options):
        x, w = torch.randn(64, 32), torch.randn(48, 32, requires_grad=True)
        heads = torch.randn(1, 2, 32, 16)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, **options) as profiler:
            for _ in range(3):
                y = torch.nn.functional.silu(torch.nn.functional.linear(x, w))
                torch.cat([y, y], 1).to(torch.bfloat16).float().sum().backward()
                torch.nn.functional.scaled_dot_product_attention(
                    heads, heads, heads, is_causal=True
                )
                torch.nn.functional.embedding(torch.arange(5), w)
        path = tmp_path / "rank0_trace.json"
        profiler.export_chrome_trace(str(path))
        return path

    return record


def test_a_trace_of_a_cpu_has_each_op_of_a_graph_once(recorded):
    path = recorded(record_shapes=True)
    samples, notes, device = samples_of_traces([path], load_hardware("cpu"), None, silent)
    by_op = {sample.op: sample for sample in samples.ops}
    forward = by_op["aten::mm nt"]
    assert (forward.kind, forward.size, forward.count) == (OpKind.MATMUL, 2 * 64 * 32 * 48, 3)
    assert forward.bytes == 4 * (64 * 32 + 48 * 32 + 64 * 48)
    attention = by_op["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert (attention.kind, attention.size) == (OpKind.ATTENTION, 2 * 2 * 2 * 32 * 32 * 16 / 2)
    assert by_op["aten::embedding"].kind is OpKind.ROWS
    joined = by_op["aten::cat"]
    assert (joined.kind, joined.size) == (OpKind.MEMORY, 2 * 4 * 64 * 96)
    assert {s.dtype for s in samples.ops if s.op == "aten::_to_copy"} == {"float32", "bfloat16"}
    assert {"aten::silu", "aten::silu_backward"} <= by_op.keys()
    # views take no time, composites are the ops within, and what is within an op is part of it
    assert not {"aten::t", "aten::linear", "aten::matmul", "aten::to", "aten::copy_"} & {*by_op}
    assert all(0 < sample.seconds < 1 for sample in samples.ops)
    assert not samples.collectives and "no collective" in notes[-1] and device == "a CPU"


def test_several_traces_and_compressed_ones_are_read_together(recorded, tmp_path):
    path = recorded(record_shapes=True)
    packed = tmp_path / "rank1_trace.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    samples, _, _ = samples_of_traces([path, packed], load_hardware("cpu"), None, silent)
    assert next(s.count for s in samples.ops if s.op == "aten::mm nt") == 6


def event(category, name, start, duration, thread=1, **args):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": duration,
        "pid": 1,
        "tid": thread,
        "args": {key.replace("_", " "): value for key, value in args.items()},
    }


def tensors(*sizes, dtype="c10::BFloat16"):
    """The arguments of an op on contiguous matrices."""
    return {
        "Input_Dims": list(sizes),
        "Input_type": [dtype] * len(sizes),
        "Input_Strides": [[columns, 1] for _, columns in sizes],
        "Concrete_Inputs": [""] * len(sizes),
    }


def gpu_trace(**of_collective):
    """A matmul in a linear layer, an addition whose kernel names no op, and an all-gather."""
    nccl = {
        "Collective_name": "_allgather_base",
        "In_msg_nelems": 1024,
        "Out_msg_nelems": 8192,
        "Group_size": 8,
        "dtype": "BFloat16",
        "Process_Group_Ranks": "[0, 8, ...]",
        "External_id": 9,
    } | of_collective
    collective = {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL"}
    return {
        "deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}],
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            event("cpu_op", "aten::linear", 0, 50, External_id=1, **tensors([4096, 4096])),
            event(
                "cpu_op", "aten::mm", 5, 40, External_id=2, **tensors([4096, 4096], [4096, 4096])
            ),
            event("cuda_runtime", "cudaLaunchKernel", 20, 6, correlation=11),
            event("cpu_op", "aten::add", 60, 20, External_id=3, **tensors([4096, 1024])),
            event("cuda_runtime", "cudaLaunchKernel", 65, 8, correlation=12),
            event("kernel", "nvjet_tst", 100, 200, 7, External_id=2, correlation=11),
            event("kernel", "elementwise", 310, 8, 7, correlation=12),
            event(collective["cat"], collective["name"], 100, 90, 20, **nccl),
            event(collective["cat"], collective["name"], 400, 30, 20, **nccl),
        ],
    }


def written(folder, document):
    path = folder / "trace.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_kernels_of_a_gpu_belong_to_their_ops(tmp_path):
    document = gpu_trace()
    add = next(e for e in document["traceEvents"] if e["name"] == "aten::add")
    add["args"] |= {
        "Input Dims": [[4096, 1024], [4096, 1024], []],
        "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"],
        "Input Strides": [[1024, 1], [1024, 1], []],
        "Concrete Inputs": ["", "", "1"],
    }
    path = written(tmp_path, document)
    samples, _, device = samples_of_traces([path], load_hardware("h100-sxm"), None, silent)
    assert device == "NVIDIA H100 80GB HBM3"
    product, added = samples.ops
    assert (product.op, product.dtype) == ("aten::mm nn", "bfloat16")
    assert (product.size, product.seconds) == (2 * 4096**3, pytest.approx(200e-6))
    assert (added.op, added.size) == ("aten::add", 3 * 2 * 4096 * 1024)
    assert added.seconds == pytest.approx(8e-6)
    (gather,) = samples.collectives
    assert gather.kind == "all_gather_into_tensor" and gather.ranks == tuple(range(0, 64, 8))
    assert (gather.input_bytes, gather.output_bytes) == (2048, 16384)
    assert (gather.seconds, gather.count) == (pytest.approx(30e-6), 2)  # the other one waited
    # the event of an op contains autograd, which a plan adds to op_seconds
    assert samples.host == {"next_kernel_seconds": [pytest.approx(7e-6)]}
    assert samples.launches == [pytest.approx(210e-6)]


def test_a_collective_of_one_rank_or_nothing_to_send_is_no_obstacle(tmp_path):
    base = load_hardware("h100-sxm")
    for changes, count in (({"Group_size": 1}, 0), ({"In_msg_nelems": 0, "Out_msg_nelems": 0}, 1)):
        path = written(tmp_path, gpu_trace(**changes))
        samples, _, _ = samples_of_traces([path], base, None, silent)
        assert len(samples.collectives) == count


def without_shapes():
    document = gpu_trace()
    for each in document["traceEvents"]:
        each.get("args", {}).pop("Input Dims", None)
    return document


def without(category):
    document = gpu_trace()
    document["traceEvents"] = [
        e for e in document["traceEvents"] if e.get("cat") != category and e["ph"] == "X"
    ]
    return document


BAD = {
    "cut off": (json.dumps(gpu_trace())[:-200], "h100-sxm", ["not whole JSON", "record the run"]),
    "another document": ({"rows": []}, "cpu", ["no traceEvents", "export_chrome_trace"]),
    "no kernels": (without("kernel"), "h100-sxm", ["no kernels", "ProfilerActivity.CUDA"]),
    "no ops": (without("cpu_op"), "h100-sxm", ["no ops", "ProfilerActivity.CPU"]),
    "no shapes": (without_shapes(), "h100-sxm", ["no shapes", "record_shapes=True"]),
    "of a GPU for a CPU": (gpu_trace(), "cpu", ["NVIDIA H100", "--base h100-sxm"]),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_trace_is_named_with_the_remedy(tmp_path, bad):
    document, base, words = bad
    path = written(tmp_path, document)
    with pytest.raises(gt.ConfigError) as caught:
        samples_of_traces([path], load_hardware(base), None, silent)
    for part in (str(path), *words):
        assert part in str(caught.value)


def test_a_file_that_is_cut_off_or_missing_is_named(tmp_path):
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(gpu_trace()).encode())[:-50])
    with pytest.raises(gt.ConfigError, match=r"trace\.json\.gz: the compressed file is cut off"):
        read_trace(packed)
    with pytest.raises(gt.ConfigError, match=r"none\.json: cannot be read: No such file"):
        read_trace(tmp_path / "none.json")


def test_a_trace_without_shapes_as_the_profiler_writes_it_is_refused(recorded):
    with pytest.raises(gt.ConfigError, match="record_shapes=True"):
        read_trace(recorded(record_shapes=False))


def test_a_trace_of_another_model_is_refused_and_one_of_this_model_is_not(tmp_path, recorded):
    base = load_hardware("cpu")
    plan = make_plan(config_of(), RANKS, base, every_pass=False)
    with pytest.raises(gt.ConfigError) as caught:
        samples_of_traces([recorded(record_shapes=True)], base, plan, silent)
    for words in ("100% of the time of its matmuls", "aten::mm of [", "--world-size"):
        assert words in str(caught.value)
    mm = next(n for n in plan.simulation.joint.graph.nodes if n.target is torch.ops.aten.mm.default)
    sizes = [list(node.meta["val"].shape) for node in mm.args]
    ops = [event("cpu_op", "aten::mm", 0, 10, **tensors(*sizes))]
    samples, _, _ = samples_of_traces([written(tmp_path, {"traceEvents": ops})], base, plan, silent)
    assert [sample.kind for sample in samples.ops] == [OpKind.MATMUL]
