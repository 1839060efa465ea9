"""What makes the comparison with the peer fair: turns, ratios, the same work on one graph.

Benchmarks are run by hand, and no other test starts one.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.step import summary
from benchmarks.turns import orders


def test_a_ratio_is_the_median_of_the_rounds_and_the_mean_of_the_ranks():
    def rank(*own):
        profile = {"forward_backward": 1.0, "compute": 0.5, "gloo": 0.25}
        parts = ("main_cpu", "all_cpu", "forward_backward", "clip", "optimizer")
        steps = {"eager": [4.0, 8.0, 4.0], "never": list(own)}
        return {
            name: {
                "seconds": {"step": step, **dict.fromkeys(parts, [0.5])},
                "profile": profile,
                "memory": {},
            }
            for name, step in steps.items()
        }

    # one rank sees 2, 4 and 1, the other 4, 8 and 1
    ranks = [rank(2.0, 2.0, 4.0), rank(1.0, 1.0, 4.0)]
    assert summary("never", ranks)["times_eager"] == 3
    assert summary("eager", ranks)["times_eager"] == 1


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_everyone_has_every_place_and_many_predecessors(count):
    names = [chr(ord("a") + i) for i in range(count)]
    rounds = orders(names, count)
    assert all(sorted(round_) == names for round_ in rounds)
    assert all(sorted(place) == names for place in zip(*rounds, strict=True))
    follows = Counter(pair for round_ in rounds for pair in pairwise(round_))
    assert max(follows.values(), default=0) <= (2 if count % 2 else 1)


@pytest.mark.full
def test_communication_of_ours_and_the_peers_passes_on_one_graph():
    flags = ["--cases", "debugmodel:4:2:1", "--layers", "2", "--sequence", "16384"]
    merged = ("transformer_block", "default", "peer")
    flags += ["--variants", "plain", *merged, "--unfused-qkv"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.communication", *flags],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (result,) = json.loads(done.stdout.splitlines()[-1])
    rows = {(row["policy"], row["variant"]): row for row in result["rows"]}
    for policy in ("always", "never"):
        plain, ours, scheduled, peer = (rows[policy, v] for v in ("plain", *merged))
        # nine parameters a layer, one read of each but the embedding's; four buckets
        assert (plain["gathers"], plain["reductions"]) == (2 * 9 + 3, 2 * 9 + 3)
        for row in (ours, scheduled, peer):
            assert (row["gathers"], row["reductions"]) == (4, 4)
            # the same work: the peer's passes ran on what ours captured. They keep the output head
            # gathered under every policy.
            kernels = [r["floor"]["compute"] for r in (row, plain)]
            assert kernels[0] == pytest.approx(kernels[1], rel=0.1)
            bandwidths = [r["floor"]["bandwidth"] for r in (row, plain)]
            assert bandwidths[0] == pytest.approx(bandwidths[1], rel=0.1 if row is peer else 1e-6)
            exposed = [sum(r["exposed_seconds"].values()) for r in (row, plain)]
            assert exposed[0] < exposed[1]
        assert scheduled["step_seconds"] < ours["step_seconds"] < plain["step_seconds"]
        for row in (plain, ours, scheduled, peer):
            assert bool(row["gathers_again"]) == (policy == "always")
            floor = row["floor"]
            assert row["step_seconds"] > max(floor["compute"], *floor["bandwidth"].values())
            parallel = sum(each["seconds"] for each in row["exposed_tensor_parallel"])
            assert parallel == pytest.approx(row["exposed_seconds"]["tensor_parallel"])
