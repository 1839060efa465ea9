"""Plans that share a capture are those that capture for themselves."""

import dataclasses
from collections import Counter

import pytest

from graph_trainer.cli import plan_command
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.runtimes import TORCHTITAN
from graph_trainer.planner.captures import Captures, what_is_captured
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.plan import make_plan
from graph_trainer.planner.plan_report import plan_report
from graph_trainer.titan.config.load import load_config
from tests.unit.planner.conftest import BFLOAT16

FLAGS = ["--training.seq_len", "64", "--training.local_batch_size", "2"]
HARDWARE = load_hardware("h100-sxm")

BEHIND = (
    ("--parallelism.fsdp_reshard_after_forward", "always"),
    ("--parallelism.fsdp_reshard_after_forward", "never"),
    ("activation_checkpoint:full",),
    ("activation_checkpoint:selective",),
    ("--compile.backend", "eager"),
    ("--compile.disable_passes", '["bucket_collectives"]'),
    ("--compile.memory_limit_gib", "70"),
)
BEFORE = (
    ("--training.seq_len", "128"),
    ("--training.local_batch_size", "1"),
    ("--parallelism.tensor_parallel_degree", "2"),
    BFLOAT16,
    ("--loss.type", "chunked_cross_entropy"),
    ("--compile.mode", "eager"),
)


def config_of(*change, layers=1):
    flags = [
        word
        for text in change
        for word in (
            ("--activation_checkpoint.type", text.partition(":")[2]) if ":" in text else (text,)
        )
    ]
    config = load_config([*FLAGS, *flags], world_size=4)
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    return config


def planned(*change, captures=None):
    return make_plan(config_of(*change), 4, HARDWARE, captures=captures, every_pass=False)


def report(plan):
    """What a plan says, but for the seconds that passes took."""
    document = plan_report(plan)
    for row in document["ledger"]:
        row.pop("pass_seconds")
    return document


def test_what_acts_behind_a_capture_shares_it_and_the_plans_are_equal(captured):
    shared = Captures()
    planned(captures=shared)
    plans = [planned(*change, captures=shared) for change in BEHIND]
    assert len(captured) == 1
    alone = [planned(*change) for change in BEHIND]
    assert len(captured) == 1 + len(BEHIND)
    for change, ours, theirs in zip(BEHIND, plans, alone, strict=True):
        assert report(ours) == report(theirs), change


@pytest.mark.parametrize(
    "mesh",
    [
        ("--parallelism.data_parallel_replicate_degree", "2")
        + ("--parallelism.tensor_parallel_degree", "2"),
        ("--module", "graph_trainer.deepseek_v3", "--parallelism.expert_parallel_degree", "2"),
    ],
    ids=["hsdp_tp", "ep2"],
)
def test_groups_of_a_mesh_that_was_made_anew_are_those_of_the_capture(mesh, captured):
    def of_mesh(*more, captures=None):
        config = load_config([*FLAGS, *mesh, *more], world_size=8)
        config.model_spec.model.layers = config.model_spec.model.layers[1:2]
        return make_plan(config, 8, HARDWARE, captures=captures, every_pass=False)

    shared = Captures()
    of_mesh(captures=shared)
    FakeRank(config_of(), 4)  # another mesh in between
    always = ("--parallelism.fsdp_reshard_after_forward", "always")
    ours = of_mesh(*always, captures=shared)
    assert len(captured) == 1
    assert report(ours) == report(of_mesh(*always))


def step_of(captures, *change, config=None, rank=0, device="cuda"):
    return captures.of(FakeRank(config or config_of(*change), 4, rank, device))


def test_a_model_that_was_edited_is_another(counted):
    shared = Captures()
    for width in (16, 32):
        config = config_of()
        inner = config.model_spec.model.layers[0].feed_forward
        inner.w1.out_features += width
        inner.w3.out_features += width
        inner.w2.in_features += width
        step_of(shared, config=config)
    assert len(counted) == 2


def test_what_acts_before_is_captured_anew(counted):
    shared = Captures(most=20)
    step_of(shared)
    for number, change in enumerate(BEFORE, 2):
        step_of(shared, *change)
        assert len(counted) == number, change
    made = len(counted)
    for other in ({"config": config_of(layers=2)}, {"rank": 1}, {"device": "cpu"}):
        step_of(shared, **other)
        made += 1
        assert len(counted) == made, other


def test_torchtitans_own_program_is_that_of_mode_eager(counted):
    shared = Captures(most=20)
    step_of(shared)
    step_of(shared, "--compile.mode", "eager")
    for policy, made in (((), 2), (("activation_checkpoint:full",), 3)):
        given = (config_of(*policy), 4, HARDWARE)
        make_plan(*given, runtime=TORCHTITAN, captures=shared, every_pass=False)
        assert len(counted) == made


def test_the_first_capture_and_the_latest_stay(counted):
    shared = Captures(most=2)
    for made, change in ((1, ()), (2, BEFORE[0]), (3, BEFORE[1]), (3, BEFORE[1]), (4, BEFORE[0])):
        step_of(shared, *change)
        assert len(counted) == made
    step_of(shared)
    assert len(counted) == 4


def test_the_capture_that_was_used_longest_ago_goes(counted):
    shared = Captures(most=3)
    for made, change in ((1, ()), (2, BEFORE[0]), (3, BEFORE[1]), (3, BEFORE[0]), (4, BEFORE[2])):
        step_of(shared, *change)
        assert len(counted) == made
    step_of(shared, *BEFORE[0])
    assert len(counted) == 4


@pytest.mark.full
def test_one_call_captures_each_step_once(captured, tmp_path, monkeypatch):
    """A run that does not fit: advice, memory curve, page and the classes of --save."""
    small = dataclasses.replace(HARDWARE, memory_gib=0.05, memory_reserved_gib=0.0)
    monkeypatch.setattr(plan_command, "load_hardware", lambda name: small)
    monkeypatch.setattr(plan_command, "usable_processes", lambda: 1)
    words = ["--world-size", "4", "--training.seq_len", "256", "--memory-curve", *BFLOAT16]
    words += ["--save", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]
    assert plan_command.main(words) == 0
    steps = Counter((what_is_captured(run.config), run.rank) for run in captured)
    assert set(steps.values()) == {1}
    # the rank, changes that act before capture, two of these together, and a rank of each of the
    # two other classes
    assert len(steps) == 1 + 5 + 1 + 2
