"""The sweep over PyTorch's own samples: a slice of it, and what it must not overlook."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# a process of its own, and some hundred captures
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

WRONG = """
import os, signal, torch, graph_trainer as gt

@gt.graph_pass(stage=gt.Stage.CLEANUP, summary="Computes cosine for sine, and crashes at tangents")
def wrong(joint, options, context):
    for node in joint.graph.nodes:
        if node.target is torch.ops.aten.sin.default:
            node.target = torch.ops.aten.cos.default
        if node.target is torch.ops.aten.tan.default:
            os.kill(os.getpid(), signal.SIGSEGV)
        if node.target is torch.ops.aten.exp.default:
            raise ValueError("no exponents")
"""


def sweep(*flags, folder=ROOT):
    """The exit status, the table and the results of a sweep."""
    path = os.pathsep.join([str(ROOT), str(folder)])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sweep", *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1) and done.stdout, done.stderr[-4000:]
    *table, last = done.stdout.splitlines()
    assert all(len(line) <= 100 for line in table)
    return done.returncode, table, json.loads(last)


def test_a_slice_of_all_samples_is_bitwise_eager(tmp_path):
    variants = ["float32", "bfloat16", "checkpointed", "non-contiguous", "transposed"]
    flags = ["--every", "43", "--samples", "1", "--json", str(tmp_path / "results.json")]
    flags += ["--variants", *variants]
    status, table, results = sweep(*flags)
    assert status == 0, table
    assert json.loads((tmp_path / "results.json").read_text()) == results
    for counts in results["counts"].values():
        assert counts["equal"] >= 10
    assert list(results["counts"]) == variants


def test_what_a_wrong_pass_does_is_found_and_a_crash_costs_one_sample(tmp_path):
    (tmp_path / "wrong_pass.py").write_text(WRONG)
    flags = ["--variants", "float32", "--passes", "default", "wrong_pass:wrong"]
    names = ["sin", "tan", "exp", "sinh", "combinations", "prod"]
    status, _, results = sweep(*flags, "--samples", "2", "--names", *names, folder=tmp_path)
    assert status == 1
    found = {(row["name"], row["outcome"]) for row in results["at_fault"]}
    assert found == {("sin", "DIFFERENT"), ("tan", "CRASHED"), ("exp", "RAW")}
    assert results["counts"]["float32"]["equal"] >= 2  # sinh, which comes after the crash
    assert results["counts"]["float32"]["refused"] == 2  # combinations
