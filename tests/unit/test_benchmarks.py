"""Every benchmark runs, as small as it goes; what is timed is asserted nowhere."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.step import summary
from benchmarks.turns import orders

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100

# each starts programs that capture, and some of them ranks
pytestmark = pytest.mark.full


def benchmark(module, *flags, timeout=280):
    """The lines of the table that a benchmark prints, and its JSON."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *table, last = done.stdout.splitlines()
    assert all(len(line) <= WIDTH for line in table), table
    return table, json.loads(last)


CAPTURE = ["--config", "debugmodel", "--fsdp", "2", "--tp", "2", "--sequence", "64"]


def test_capture_measures_every_layer_count_and_policy(tmp_path):
    path = tmp_path / "results.json"
    flags = [*CAPTURE, "--layers", "1", "2", "--sides", "ours", "--json", str(path)]
    _, results = benchmark("benchmarks.capture", *flags)
    assert json.loads(path.read_text()) == results
    rows = {(row["layers"], row["policy"]): row for row in results["rows"]}
    assert len(rows) == len(results["rows"]) == 4
    for policy in ("always", "never"):
        one, two = rows[1, policy], rows[2, policy]
        assert one["captured_nodes"] < two["captured_nodes"]
        assert one["collectives"] < two["collectives"]
    always, never = rows[2, "always"], rows[2, "never"]
    assert always["peak_bytes"] < never["peak_bytes"]
    assert always["collectives"] > never["collectives"]
    for row in rows.values():
        assert row["capture_seconds"] > 0 and row["passes_seconds"] > 0 and row["peak_bytes"] > 0


def test_the_peer_is_captured_beside_ours():
    flags = [*CAPTURE, "--layers", "1", "--policies", "always"]
    table, results = benchmark("benchmarks.capture", *flags, "--sides", "plain", "ours", "peer")
    plain, ours, peer = results["rows"]
    assert [row["side"] for row in results["rows"]] == ["plain", "ours", "peer"]
    # the same model: as many weights to gather; the peer merges them as well
    for merged in (ours, peer):
        assert 0 < merged["collectives"] < plain["collectives"]
    assert 0.5 < peer["captured_nodes"] / ours["captured_nodes"] < 2
    assert "x as fast" in table[-1]


def check_partitions(rows):
    """The second partitions gather as the first; without tags PyTorch's gathers otherwise."""
    for passes in {row["passes"] for row in rows}:
        named = {row["partition"]: row for row in rows if row["passes"] == passes}
        first = named.pop("first")
        untagged = named.pop("untagged", None)
        for name, row in named.items():
            for key in ("forward_gathers", "backward_gathers"):
                assert row[key] == first[key] > 0, (passes, name, key)
            assert all(
                0 < peak < 1.05 * of for peak, of in zip(row["peaks"], first["peaks"], strict=True)
            )
            if name != "min_cut":
                assert row["saved_bytes"] == first["saved_bytes"] > 0
        if untagged is not None:
            assert untagged["backward_gathers"] < first["backward_gathers"]
            assert untagged["saved_bytes"] != first["saved_bytes"]


@pytest.mark.parametrize("activations", ["none", "selective", "full"])
def test_a_partitioned_step_is_partitioned_again_as_it_was(activations):
    partitions = ["tags", "min_cut", "again", "untagged"]
    flags = [*CAPTURE, "--layers", "2", "--activations", activations, "--partitions", *partitions]
    _, rows = benchmark("benchmarks.partition", *flags)
    assert [row["partition"] for row in rows] == 2 * ["first", *partitions]
    check_partitions(rows)


@pytest.mark.timeout(600)
def test_a_partitioned_step_of_8b_is_partitioned_again_as_it_was():
    flags = ["--variants", "plain", "--activations", "selective"]
    _, rows = benchmark("benchmarks.partition", *flags, timeout=580)
    check_partitions(rows)
    # seven weights a layer and two norms, embedding, final norm and head, each gathered once
    assert rows[0]["forward_gathers"] >= 32 * 9 + 3


def test_communication_of_ours_and_the_peers_passes_on_one_graph():
    flags = ["--cases", "debugmodel:4:2:1", "--layers", "2", "--sequence", "256"]
    merged = ("transformer_block", "default", "peer")
    flags += ["--variants", "plain", *merged, "--unfused-qkv"]
    table, (result,) = benchmark("benchmarks.communication", *flags)
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
    for part in ("bytes over bandwidth", "of FSDP's exposed ms"):
        assert any(part in line for line in table)


@pytest.mark.timeout(900)
def test_size_merges_separate_projections_as_far_as_the_page_says():
    page = " ".join((ROOT / "benchmarks/README.md").read_text().split())
    told = re.search(
        r"goes from (\d+) to (\d+) gathers, (\d+) to (\d+) gathers again, "
        r"(\d+) to (\d+) reductions in bfloat16",
        page,
    )
    flags = ["--cases", "8b:16:8:1", "--unfused-qkv", "--reduce-dtype", "bfloat16"]
    flags += ["--variants", "plain", "size", "--policies", "always"]
    _, (result,) = benchmark("benchmarks.communication", *flags, timeout=800)
    kinds = ("gathers", "gathers_again", "reductions")
    found = [row[kind] for kind in kinds for row in result["rows"]]
    assert found == [int(number) for number in told.groups()]


def test_the_default_list_hides_what_fsdp_sends_at_next_to_no_memory():
    # with fewer layers the ends, which nothing hides, are more than a quarter
    flags = ["--cases", "8b:16:8:8", "--layers", "8", "--variants", "plain", "default"]
    _, (result,) = benchmark("benchmarks.communication", *flags)
    for policy in ("always", "never"):
        plain, default = (row for row in result["rows"] if row["policy"] == policy)
        of_fsdp = [
            row["exposed_seconds"]["unshard"] + row["exposed_seconds"]["reduce_grad"]
            for row in (plain, default)
        ]
        assert 0 < of_fsdp[1] <= of_fsdp[0] / 4
        assert default["peak_bytes"] <= 1.03 * plain["peak_bytes"]


@pytest.mark.timeout(600)
def test_a_step_of_ours_eager_and_the_peer_on_two_ranks():
    # long enough for activations to make the peak: while it reduces, gloo holds less than nccl,
    # for which memory is predicted
    flags = ["--fsdp", "2", "--tp", "1", "--batch", "1", "--sequence", "256", "--rounds", "1"]
    variants = ["eager", "never", "never plain", "peer never"]
    flags += ["--warmup", "1", "--variants", *variants]
    _, results = benchmark("benchmarks.step", *flags, timeout=580)
    rows = results["variants"]
    assert list(rows) == variants
    assert rows["eager"]["times_eager"] == 1
    for row in rows.values():
        assert row["step_seconds"] > 0
        assert sum(row["shares"].values()) == pytest.approx(1)
    plain = rows["never plain"]
    for row in (rows["never"], rows["peer never"]):
        # what the graph predicts is what the step holds
        assert 0 < row["live_bytes"] == row["predicted_bytes"]
        assert 0 < row["collectives"] < plain["collectives"]


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


def test_gpu_runs_small_on_a_cpu():
    flags = ["--size", "tiny", "--batch", "1", "--sequence", "16", "--steps", "1"]
    variants = ["eager", "joint, eager"]
    _, results = benchmark("benchmarks.gpu", *flags, "--variants", *variants)
    assert list(results["variants"]) == variants
    assert all(row["ratio"] > 0 for row in results["variants"].values())


def test_digests_of_a_checkpoint_are_measured():
    _, results = benchmark("benchmarks.checkpoint", "--mib", "1", "--rounds", "1")
    assert len(results["rows"]) == 4
    for row in results["rows"]:
        assert 0 < row["blocked"] <= row["save"] and row["cpu"] > 0 and row["check"] > 0


def test_planning_is_measured_from_command_to_table(tmp_path):
    path = tmp_path / "results.json"
    table, rows = benchmark("benchmarks.plan", "--cases", "debugmodel:4:2", "--json", str(path))
    assert json.loads(path.read_text()) == rows
    (row,) = rows
    assert (row["config"], row["ranks"], row["tensor_parallel"]) == ("debugmodel", 4, 2)
    assert 1000 < row["nodes"] < 5000
    assert row["wall_seconds"] > 0 and row["cpu_seconds"] > 0
    assert 50 * 1024**2 < row["peak_resident_bytes"] < 4 * 1024**3
    assert "debugmodel" in table[-1]


@pytest.mark.timeout(900)
def test_regions_and_the_whole_graph_are_compiled_and_compared():
    flags = ["--layers", "1", "--compare-layers", "1", "--sequence", "256", "--steps", "2"]
    _, results = benchmark("benchmarks.regional", *flags, timeout=800)
    assert [row["backend"] for row in results["compiled"]] == ["inductor", "regional"]
    assert all(row["seconds"] > 0 for row in results["compiled"])
    assert results["step"]["regional"]["order"]  # Inductor is free to reorder the whole graph
    own = results["step"]["regional"]
    assert 0 < own["peak_bytes"] <= 1.05 * own["predicted_bytes"]
