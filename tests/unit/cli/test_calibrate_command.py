"""`graph-trainer calibrate`: bad input is one message; a trace becomes a profile of plan."""

from __future__ import annotations

import json

import pytest
import torch

from graph_trainer.cli import calibrate_command as command
from graph_trainer.cli import main as cli
from graph_trainer.core.simulation.hardware import OpKind, load_hardware
from graph_trainer.planner.calibration import OpSample, Samples
from graph_trainer.planner.plan import make_plan
from tests.unit.planner.conftest import RANKS, config_of

BAD = {
    "neither": (["--output", "TMP/my.toml"], "--measure to time this machine, or --trace FILE"),
    "both": (["--measure", "--trace", "x", "--output", "TMP/my.toml"], "leave one of the two out"),
    "no output": (["--measure"], "--output"),
    "no folder": (["--measure", "--output", "TMP/none/my.toml"], "there is no folder"),
    "no file": (["--trace", "TMP/no.json", "--output", "TMP/my.toml"], "no.json: cannot be read"),
    "a base": (["--measure", "--base", "h100", "--output", "TMP/my.toml"], "did you mean 'h100"),
    "ranks": (["--measure", "--ranks", "0", "--output", "TMP/my.toml"], "'0': write a whole"),
    **{
        f"{seconds} seconds": (
            ["--measure", "--seconds", seconds, "--output", "TMP/my.toml"],
            f"'{seconds}' is not a positive number of seconds",
        )
        for seconds in ("nan", "0", "-5", "inf", "ten")
    },
    "a GPU's base": (
        ["--measure", "--base", "h100-sxm", "--output", "TMP/my.toml"],
        "--base h100-sxm: it describes a GPU, and this machine has none",
    ),
    "a key": (
        ["--measure", "--trainin.steps", "2", "--world-size", "2", "--output", "TMP/my.toml"],
        "trainin",
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_command_line_is_one_message(bad, tmp_path, capsys, monkeypatch):
    for name in ("measure", "make_plan"):
        monkeypatch.setattr(command, name, lambda *a, **k: pytest.fail("the work was begun"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words, message = bad
    words = [word.replace("TMP", str(tmp_path)) for word in words]
    assert cli.main(["calibrate", *words]) == 2
    out, err = capsys.readouterr()
    assert message in " ".join(err.split()) and not out
    assert not list(tmp_path.iterdir())


def test_the_help_has_an_example_of_both_ways(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["calibrate", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and max(map(len, text.splitlines())) <= 100
    for words in ("calibrate --measure --config", "calibrate --trace", "plan --hardware my.toml"):
        assert words in text


def test_a_trace_becomes_a_profile_with_another_plan(tmp_path, capsys):
    """Matmuls of one size, half as fast as in the base's profile: a plan's take twice as long."""
    base = load_hardware("cpu")
    config = config_of()
    before = make_plan(config, RANKS, base, every_pass=False)
    costs = before.simulation.costs
    events = []
    for node, cost in costs.items():
        if node.target is torch.ops.aten.mm.default:
            tensors = [source.meta["val"] for source in node.args]
            args = {
                "Input Dims": [list(t.shape) for t in tensors],
                "Input Strides": [list(t.stride()) for t in tensors],
                "Input type": ["c10::BFloat16"] * 2,
            }
            seconds = 2 * cost.flops / (base.flops(torch.bfloat16) * base.matmul_efficiency)
            start = 1e6 * len(events)
            named = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1}
            events.append({**named, "ts": start, "dur": seconds * 1e6, "args": args})
    trace, output = tmp_path / "trace.json", tmp_path / "my.toml"
    trace.write_text(json.dumps({"traceEvents": events}))
    assert cli.main(["calibrate", "--trace", str(trace), "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert f"graph-trainer plan --hardware {output}" in out and "matmul_efficiency" in out
    table, _, _ = out.partition("wrote")
    assert ("too few samples" in out) == (len({str(e["args"]) for e in events}) < 10)
    assert max(map(len, table.splitlines())) <= 100
    hardware = load_hardware(str(output))
    assert hardware.calibration.samples == len({str(e["args"]) for e in events})
    assert hardware.calibration.spread < 0.01 and hardware.calibration.device_name == "a CPU"
    assert hardware.matmul_efficiency == pytest.approx(base.matmul_efficiency / 2, rel=1e-3)
    after = make_plan(config, RANKS, hardware, every_pass=False)
    for node, cost in after.simulation.costs.items():
        if node.target is torch.ops.aten.mm.default and cost.flops > 1e7:
            flops = base.flops(torch.bfloat16) * base.matmul_efficiency
            assert cost.seconds == pytest.approx(2 * cost.flops / flops, rel=1e-2)
    assert after.step_seconds > before.step_seconds


def test_a_measured_machine_becomes_a_profile(tmp_path, capsys, monkeypatch):
    """With ranks that measured a matmul alone, and a step of one rank."""

    def measured(job, say):
        sample = job.ops[0].sample
        assert job.ranks == 1 and not job.collectives and isinstance(sample, OpSample)
        timed = [OpSample(**{**_fields(call.sample), "seconds": 1e-3}) for call in job.ops]
        return Samples(ops=timed), ["aten.bad.default: an error"]

    monkeypatch.setattr(command, "measure", measured)
    monkeypatch.setattr(command, "load_config", lambda words, **how: config_of(world_size=1))
    output = tmp_path / "my.toml"
    words = ["--config", "debugmodel", "--training.seq_len", "32", "--world-size", "1"]
    assert cli.main(["calibrate", "--measure", *words, "--output", str(output)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "[[efficiencies]] rows" in out and "too few samples" not in out
    assert "not measured: aten.bad.default: an error" in out
    assert "--config debugmodel --training.seq_len 32 --world-size 1" in out
    hardware = load_hardware(str(output))
    assert {entry.kind for entry in hardware.efficiencies} == {*OpKind}
    first = output.read_text().splitlines()[0]
    assert "graph-trainer calibrate --measure --config debugmodel" in first


def _fields(sample):
    return {name: getattr(sample, name) for name in sample.__slots__}
