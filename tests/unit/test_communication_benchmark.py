"""Communication of ours and the peer's passes on one graph, and what the page says of it."""

import re

import pytest

from tests.unit.benchmark_runs import ROOT, benchmark

# starts programs that capture
pytestmark = pytest.mark.full


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
