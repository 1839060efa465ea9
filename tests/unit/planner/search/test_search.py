"""A search beside all runs of a small space: what it leaves out, its bounds, and its best."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from graph_trainer.cli.search_command import main
from graph_trainer.core.simulation.hardware import Hardware, load_hardware
from graph_trainer.errors import ConfigError
from graph_trainer.planner.captures import Captures
from graph_trainer.planner.changes import flags_of
from graph_trainer.planner.fake_rank import FakeProcess
from graph_trainer.planner.pipeline_plan import make_pipeline_plan
from graph_trainer.planner.plan import Plan, make_plan
from graph_trainer.planner.search import search as search_module
from graph_trainer.planner.search.costs import Costs, ModelSize
from graph_trainer.planner.search.search import Found, search
from graph_trainer.planner.search.short_models import estimate
from graph_trainer.planner.search.space import Candidate, Space, fixed_values
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import GraphTrainerConfig

RANKS = 2
FIXED = {
    "parallelism.pipeline_parallel_degree": ("1",),
    "parallelism.tensor_parallel_degree": ("1", "2"),
    "parallelism.fsdp_reshard_after_forward": ("default",),
    "activation_checkpoint.type": ("none", "full"),
    "training.local_batch_size": ("1", "16"),
}
LAYERS = 8


def hardware(memory_gib: float = 79.1) -> Hardware:
    return dataclasses.replace(
        load_hardware("h100-sxm"), memory_gib=memory_gib, memory_reserved_gib=0.1
    )


def load(more: Sequence[str], ranks: int | None = None) -> GraphTrainerConfig:
    config = load_config(
        ["--config", "debugmodel", "--training.mixed_precision_param", "bfloat16", *more],
        world_size=(ranks or RANKS) if more else None,
    )
    model = config.model_spec.model
    model.layers = [model.layers[0]] * LAYERS
    return config


def space(**fixed: tuple[str, ...]) -> Space:
    return Space(
        config=load(()), world_size=RANKS, devices_per_node=8, global_rows=None, fixed=FIXED | fixed
    )


CAPTURES = Captures(100)


@cache
def planned(run: Candidate) -> Plan:
    config = load(flags_of(run.change(79.1)))
    return make_plan(config, RANKS, hardware(), every_pass=False, captures=CAPTURES)


def searched(memory_gib: float) -> Found:
    return search(
        *(space(), load, hardware(memory_gib)),
        seconds=600,
        processes=1,
        on_progress=lambda line: None,
    )


def tokens(plan: Plan) -> float:
    return plan.tokens_per_second_per_gpu


@pytest.mark.full
def test_a_small_space_has_all_runs_and_finds_the_best_of_them_twice() -> None:
    runs = list(space().candidates())
    assert len(runs) == len(set(runs)) == (2 + 1) * 2 * 2
    needs = sorted(planned(run).need.total for run in runs)
    memory_gib = needs[-3] / 2**30 - 0.01  # three runs do not fit
    fit = [run for run in runs if planned(run).need.total <= memory_gib * 2**30]
    assert len(fit) == len(runs) - 3
    one, other = searched(memory_gib), searched(memory_gib)
    assert one.rows[0].run == other.rows[0].run == max(fit, key=lambda run: tokens(planned(run)))
    # what was left out is neither faster nor smaller than what was simulated
    simulated = {row.run for row in one.rows}
    assert simulated >= set(fit)
    assert one.total == len(one.rows) + one.left_out.total() == len(runs)
    assert one.is_complete


def test_no_run_is_faster_or_smaller_than_its_bound() -> None:
    config = load(flags_of(next(space().candidates()).change(79.1)))
    size = ModelSize.of(FakeProcess(config, RANKS, 0, "cuda"))
    costs = Costs(load(()), size, hardware(), RANKS, int(79.1 * 2**30))
    for run in space().candidates():
        bound, plan = costs.bound(run), planned(run)
        assert 0 < bound.seconds < plan.step_seconds
        assert 0 < bound.needed_bytes < plan.need.total
        assert bound.seconds <= costs.estimate(run).seconds


@pytest.mark.full
def test_replicas_on_other_nodes_and_pipelines_keep_to_their_bounds() -> None:
    """Over links so slow that they decide: those within a node and between nodes run at once."""
    slow = dataclasses.replace(hardware(), node_bytes_per_second=1e8, network_bytes_per_second=2e7)
    ranks, words = 16, ["--training.seq_len", "64"]
    of_mesh = {"replicate": 2, "shard": 8, "tensor": 1, "context": 1, "expert": 1, "pipeline": 1}
    of_policy = {"reshard": "default", "policy": "none", "offload": False}
    run = Candidate(**of_mesh, **of_policy, rows=1, repeats=1, schedule="")
    stages = {"replicate": 1, "pipeline": 2, "rows": 4}
    for changed in (
        run,
        dataclasses.replace(run, reshard="never"),
        dataclasses.replace(run, **stages, schedule="1F1B"),
        dataclasses.replace(run, **stages, schedule="Interleaved1F1B", reshard="always"),
    ):
        flags = [*words, *flags_of(changed.change(79.1))]
        config = load(flags, ranks)
        size = ModelSize.of(FakeProcess(config, ranks, 0, "cuda"))
        bound = Costs(config, size, slow, ranks, int(79.1 * 2**30)).bound(changed)
        if changed.pipeline > 1:
            plan = make_pipeline_plan(config, ranks, slow)
        else:
            plan = make_plan(config, ranks, slow, every_pass=False)
        assert 0 < bound.seconds <= plan.step_seconds
        assert 0 < bound.needed_bytes <= plan.need.total


@pytest.mark.parametrize("policy", ["none", "full"])
def test_short_models_estimate_long_ones(policy: str) -> None:
    run = dataclasses.replace(next(space().candidates()), policy=policy, rows=16)
    config = load(flags_of(run.change(79.1)))
    lengths = []

    def plan(config: GraphTrainerConfig) -> Plan:
        lengths.append(len(config.model_spec.model.layers))
        return make_plan(config, RANKS, hardware(), every_pass=False)

    needs = estimate(config, plan)
    assert lengths == [3, 6] and len(config.model_spec.model.layers) == LAYERS
    assert needs.seconds == pytest.approx(planned(run).step_seconds, rel=0.03)
    assert needs.needed_bytes == pytest.approx(planned(run).need.total, rel=0.1)


@pytest.mark.full
def test_a_large_space_is_searched_from_the_most_promising_run_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search_module, "SMALL", 0)
    found = searched(79.1)
    runs = list(space().candidates())
    assert found.left_out["slower"] > 0 and found.is_complete
    best = max(tokens(planned(run)) for run in runs)
    assert tokens(planned(found.rows[0].run)) > best / 1.15
    assert found.bound_tokens >= best
    assert all(0.9 < error < 1.1 for error in found.errors)


@pytest.mark.parametrize("rows", [8, 12, 16])
def test_a_global_batch_is_kept_exactly(rows: int) -> None:
    kept = dataclasses.replace(space(), global_rows=rows, fixed={})
    runs = list(kept.candidates())
    assert {run.rows * run.repeats * run.data_parallel for run in runs} == {rows}
    assert {run.pipeline for run in runs} == {1, 2}
    for run in runs:
        degrees = (run.replicate, run.shard, run.tensor, run.context, run.pipeline)
        product = 1
        for degree in degrees:
            product *= degree
        assert product == RANKS


def test_the_command_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = [f"--fix={key}={','.join(values)}" for key, values in FIXED.items()]
    fixed[-1] = "--fix=training.local_batch_size=2"
    files = [f"--json={tmp_path}/found.json", f"--html={tmp_path}/found.html"]
    sizes = ["--world-size=2", "--hardware=h100-sxm"]
    assert main(["--config", "debugmodel", *sizes, *fixed, *files]) == 0
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "found.json").read_text())
    assert max(map(len, out.split("\n\n")[0].splitlines())) <= 100
    speeds = [row["tokens_per_second_per_gpu"] for row in report["rows"]]
    assert speeds == sorted(speeds, reverse=True) and report["complete"]
    for row in report["rows"]:
        assert sum(row["parts"].values()) == pytest.approx(row["step_seconds"])
    needed = [report["rows"][number]["needed_bytes"] for number in report["front"]]
    assert all(a < b for a, b in pairwise(needed)) and report["front"][-1] == 0
    assert "graph-trainer train --config debugmodel" in out
    page = (tmp_path / "found.html").read_text()
    assert "fsdp 2" in page and page.count("graph-trainer train") == len(report["rows"])
    assert report["rows"][0]["commands"] == out.splitlines()[-2:]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--fix", "parallelism.tensor_parallel_degree"], "key=value"),
        (["--fix", "training.seq_len=8"], "--training.seq_len 8"),
        (["--fix", "parallelism.tensor_parallel_degree=two"], "whole numbers"),
        (["--fix", "parallelism.tensor_parallel_degree=0"], "whole numbers"),
        (["--fix", "activation_checkpoint.type=none,layers"], "type=layers: write none"),
        (["--fix", "parallelism.fsdp_reshard_after_forward=bogus"], "write default"),
        (["--fix", "compile.allow_offload=True"], "write false, true"),
        (["--minutes", "nan"], "number of minutes"),
        (["--minutes", "1e-6"], "no run was simulated"),
        (["--global-batch", "7", "--fix", "parallelism.data_parallel_shard_degree=2"], "global"),
        (["--price", "2"], "--tokens"),
        (["--parallelism.tensor_parallel_degree", "2"], "--fix"),
        (["--fix", "parallelism.tensor_parallel_degree=3"], "no run to choose from"),
    ],
)
def test_bad_input(words: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        main(["--config", "debugmodel", "--world-size", "4", *words])


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer names what came nearest."""
    text = Path("configs/hardware/h100-sxm.toml").read_text()
    small = tmp_path / "small.toml"
    small.write_text(text.replace("memory_gib = 79.1", "memory_gib = 2.01"))
    words = ["--config", "debugmodel", "--world-size", "2", "--hardware", str(small)]
    fixed = ["--fix=parallelism.pipeline_parallel_degree=1", "--fix=training.local_batch_size=64"]
    assert main([*words, *fixed]) == 1
    out = capsys.readouterr().out
    assert "Nothing fits. Nearest is" in out and "rows 64" in out


def test_an_interrupted_search_counts_what_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = 0

    def interrupt(planner: object, what: object) -> object:
        nonlocal simulated
        simulated += 1
        if simulated == 3:
            raise KeyboardInterrupt
        return original(planner, what)

    original = search_module._Planner.__call__
    monkeypatch.setattr(search_module._Planner, "__call__", interrupt)
    found = searched(79.1)
    assert len(found.rows) == 2 and not found.is_complete and found.note == "interrupted"
    assert found.total == len(found.rows) + found.left_out.total()


def test_fixed_values() -> None:
    assert fixed_values(["--training.local-batch-size=1,2"]) == {
        "training.local_batch_size": ("1", "2")
    }
    assert fixed_values(["training.local_batch_size=1,1"]) == {"training.local_batch_size": ("1",)}
    with pytest.raises(ConfigError, match="twice"):
        fixed_values(["training.local_batch_size=1", "training.local_batch_size=2"])
