"""Which ranks can differ is known without a capture, and one rank of each class proves the rest."""

import dataclasses

import pytest
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

import graph_trainer as gt
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import Signature
from graph_trainer.core.passes.memory_limit import unknown
from graph_trainer.core.passes.pipeline import run_passes
from graph_trainer.core.passes.report import Report
from graph_trainer.core.sharding.functional_collectives import all_reduce
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.fingerprint import fingerprint_of
from graph_trainer.planner.plan import make_plan
from graph_trainer.planner.saved_plan import plan_every_class
from graph_trainer.planner.simulated_agreement import decided_by
from graph_trainer.planner.verify_order import (
    MOST_CLASSES,
    check_shapes,
    rank_classes,
    verify_order,
)
from graph_trainer.titan.config.load import load_config
from tests.unit.fake_ranks import Agreed
from tests.unit.planner import conftest
from tests.unit.planner.conftest import shown

DEGREES = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")


def config_of(replicate=1, shard=1, tensor=1, *more, on_rank=None):
    """The debug model with one layer; `on_rank` may change what a rank's model does."""
    degrees = zip(DEGREES, (replicate, shard, tensor), strict=True)
    flags = [word for key, n in degrees for word in (f"--parallelism.{key}_degree", str(n))]
    config = conftest.config_of(*flags, *more, world_size=replicate * shard * tensor)
    spec = config.model_spec
    if on_rank is not None:

        def parallelize(model, **kwargs):
            model = spec.parallelize_fn(model, **kwargs)
            on_rank(dist.get_rank(), model, kwargs["parallel_dims"])
            return model

        config.model_spec = dataclasses.replace(spec, parallelize_fn=parallelize)
    return config


def local_shapes(run):
    return [tuple(p.to_local().shape) for p in run.model.parameters()]


@pytest.mark.parametrize("degrees", [(1, 5, 1), (2, 3, 2), (4, 1, 1)])
def test_ranks_of_a_class_hold_the_same_shapes(degrees):
    """Against every rank's own parameters. 256 rows over 5 ranks, or over 3, are uneven."""
    config = config_of(*degrees)
    world = degrees[0] * degrees[1] * degrees[2]
    classes = rank_classes(FakeRank(config, world, 0, "cpu"))
    by_class = {}
    for rank in range(world):
        run = FakeRank(config, world, rank, "cpu")
        check_shapes(run, classes)
        held = local_shapes(run)
        place = classes.coordinates(rank)
        kind = tuple(of[c] for of, c in zip(classes.labels, place, strict=True))
        assert by_class.setdefault(kind, held) == held
    assert len(by_class) == len(classes.representatives()) <= MOST_CLASSES
    assert sum(classes.representatives().values()) == world


CONTEXT = ("--parallelism.context_parallel_degree", "2")


def test_context_parallelism_is_an_axis_of_its_own():
    """Its ranks share FSDP's shards: 256 rows over 3 x 2 ranks."""
    shard = ("--parallelism.data_parallel_shard_degree", "3")
    config = conftest.config_of(*shard, *CONTEXT, world_size=6)
    classes = rank_classes(FakeRank(config, 6, 0, "cpu"))
    assert classes.names == ("dp_replicate", "fsdp", "cp", "tp") and classes.sizes == (1, 3, 2, 1)
    for rank in range(6):
        check_shapes(FakeRank(config, 6, rank, "cpu"), classes)
    assert verify_order(config, 6, device="cpu").ranks == 6


EXPERTS = ("--module", "graph_trainer.deepseek_v3", "--config", "debugmodel")
SHORT = ("--training.seq_len", "32", "--training.local_batch_size", "1")
SPREAD = {
    "tensor parallelism": ("--parallelism.tensor_parallel_degree", "2"),
    "replicas": ("--parallelism.data_parallel_replicate_degree", "2"),
}


@pytest.mark.parametrize("spread", SPREAD)
def test_ranks_of_a_class_hold_the_same_parts_of_experts(spread):
    degree = ("--parallelism.expert_parallel_degree", "4")
    config = load_config([*EXPERTS, *SHORT, *SPREAD[spread], *degree], world_size=8)
    classes = rank_classes(FakeRank(config, 8, 0, "cpu"))
    for rank in range(8):
        check_shapes(FakeRank(config, 8, rank, "cpu"), classes)


@pytest.mark.full
def test_ranks_of_a_class_of_experts_have_one_fingerprint():
    degree = ("--parallelism.expert_parallel_degree", "2")
    config = load_config([*EXPERTS, *SHORT, *degree], world_size=8)
    classes = rank_classes(FakeRank(config, 8, 0, "cpu"))
    assert classes.representative_of(1) == classes.representative_of(4) == 1
    prints = []
    for rank in (1, 4):
        joint = FakeRank(config, 8, rank, "cpu").capture()
        prints.append(fingerprint_of(joint, rank, classes))
    assert prints[0].difference(prints[1]) is None
    assert "2 ranks 1 apart" in str(prints[0].collectives)


def test_uneven_and_empty_shards_are_proved():
    """Over 100 ranks 256 rows are 85 times 3, then 1, then none; 768 and 2,048 end elsewhere."""
    said = []
    proof = verify_order(config_of(shard=100), 100, device="cpu", on_progress=said.append)
    assert proof.representatives == {0: 1, 1: 84, 85: 1, 86: 10, 96: 1, 97: 1, 98: 1, 99: 1}
    assert proof.ranks == 100 and proof.groups == 1
    assert proof.collectives[0] == proof.collectives[1] > 5
    assert "8 of 100 ranks" in said[0] and "fsdp (100)" in said[0]
    assert len(said) == 9 and "rank 99, 8 of 8" in said[-1]


def test_first_and_last_are_apart_while_that_makes_few_classes(monkeypatch):
    run = FakeRank(config_of(4, 4, 4), 64, 0, "cpu")

    def classes_of_at_most(most):
        monkeypatch.setattr("graph_trainer.planner.verify_order.MOST_CLASSES", most)
        return rank_classes(run).representatives()

    assert sorted(set(classes_of_at_most(27).values())) == [1, 2, 4, 8]
    assert len(classes_of_at_most(27)) == 27
    assert sorted(classes_of_at_most(26).values()) == [1, 3, 3, 3, 9, 9, 9, 27]
    assert classes_of_at_most(7) == {0: 64}


def test_one_rank_of_a_mesh_of_three_axes_stands_for_all(monkeypatch):
    monkeypatch.setattr("graph_trainer.planner.verify_order.MOST_CLASSES", 1)
    proof = verify_order(config_of(2, 2, 2), 8, device="cpu")
    assert proof.representatives == {0: 8} and proof.collectives[0] > 5
    assert proof.groups >= 12  # along each axis four groups of two


def extra_reduction(where):
    """A model that reduces its output once more on the ranks of `where`."""

    def on_rank(rank, model, parallel_dims):
        group = parallel_dims.get_mesh("fsdp").get_group()
        if where(rank):
            model.norm.register_forward_hook(
                lambda module, args, out: out + 0 * all_reduce(out.detach(), group)
            )

    return on_rank


@pytest.mark.full
def test_a_branch_on_the_rank_is_seen_on_all_ranks_only():
    config = config_of(shard=5, on_rank=extra_reduction(lambda rank: rank == 2))
    proof = verify_order(config, 5, device="cpu")
    assert proof.representatives == {0: 1, 1: 3, 4: 1} and "--all-ranks" in str(proof)
    with pytest.raises(gt.VerificationError) as caught:
        verify_order(config, 5, all_ranks=True, device="cpu")
    for word in ("of ranks 0 and 2", "all_reduce(sum)", "module 'norm'", "[0, 1, 2, 3, 4]"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(lambda rank: rank == 0, id="first", marks=pytest.mark.full),
        pytest.param(lambda rank: rank == 4, id="last"),
    ],
)
def test_a_branch_on_the_first_or_the_last_rank_is_seen_by_representatives(where):
    config = config_of(shard=5, on_rank=extra_reduction(where))
    with pytest.raises(gt.VerificationError, match=r"ranks 0 and \d .*all_reduce\(sum\)"):
        verify_order(config, 5, device="cpu")


def test_no_pass_is_measured(monkeypatch):
    """A proof shows no bytes and no times, which take as long to find as the passes take to run."""

    def measured(report, joint, run):
        raise AssertionError(f"{run.name} was measured")

    monkeypatch.setattr(Report, "add", measured)
    verify_order(config_of(shard=2), 2)
    make_plan(config_of(shard=2), 2, load_hardware("h100-sxm"))


def test_all_ranks_are_proved_one_by_one():
    said = []
    config = config_of(shard=2)
    proof = verify_order(config, 2, all_ranks=True, device="cpu", on_progress=said.append)
    assert proof.representatives == {0: 1, 1: 1} and "Every rank's graph" in str(proof)
    assert said[0] == "Capturing the step of all 2 ranks" and len(said) == 3


def test_the_rank_that_cannot_capture_is_named():
    def on_rank(rank, model, parallel_dims):
        if rank == 1:
            model.norm.register_forward_hook(lambda module, args, out: out * out.sum().item())

    with pytest.raises(gt.VerificationError, match="rank 1 could not capture the step: Capture"):
        verify_order(config_of(shard=2, on_rank=on_rank), 2, device="cpu")


def test_parameters_that_are_laid_out_in_another_way_need_every_rank():
    def on_rank(rank, model, parallel_dims):
        if rank == 1:  # as a model would that sees to its own sharding
            held = model.tok_embeddings._parameters
            old = held["weight"]
            local = old.to_local()[:-24]
            new = DTensor.from_local(
                local,
                old.device_mesh,
                old.placements,
                run_check=False,
                shape=old.shape,
                stride=old.stride(),
            )
            held["weight"] = nn.Parameter(new)

    with pytest.raises(gt.VerificationError, match="'tok_embeddings.weight'.*--all-ranks"):
        verify_order(config_of(shard=2, on_rank=on_rank), 2, device="cpu")


@pytest.mark.full
def test_ranks_agree_on_what_a_memory_limit_rolls_back(monkeypatch):
    """The last of 3 ranks holds less, and alone it would keep a pass that the others may not."""
    monkeypatch.setattr("graph_trainer.planner.verify_order.MOST_CLASSES", 1)

    def config_with(limit):
        words = ["--compile.passes", "default,overlap_fsdp", "--compile.memory_limit_gib"]
        return config_of(1, 3, 1, *words, str(limit))

    after = {}
    for rank in (0, 2):
        run = FakeRank(config_with(1000), 3, rank, "cpu")
        joint, peaks, passes = run.capture(), [], run.pass_config()
        assert passes.device_memory is unknown, "a plan depends on no machine's free memory"
        run_passes(joint, passes, agreement=Agreed(lambda peak, to=peaks: to.append(peak) or peak))
        assert peaks[-1] > peaks[0], "the pass needs no memory"
        after[rank] = peaks[-1]
    assert after[2] < after[0]
    said = []
    limit = (after[0] + after[2]) / 2 / 2**30
    proof = verify_order(config_with(limit), 3, device="cpu", on_progress=said.append)
    assert proof.representatives == {0: 2, 2: 1}
    assert f" {after[0]:,} " in [line for line in said if "again" in line][-1]

    plan = make_plan(config_with(limit), 3, load_hardware("cpu"), rank=2)
    assert "overlap_fsdp" in plan.simulation.joint.history, "alone, it would be no question"
    saved = plan_every_class(plan)
    without = plan_every_class(make_plan(config_of(1, 3, 1), 3, load_hardware("cpu")))
    for rank in (0, 2):
        # as without the pass, which all ranks roll back
        kept = without.of_rank(rank).fingerprint
        assert saved.of_rank(rank).fingerprint.difference(kept) is None
    assert "rank that needs most decides" in " ".join(shown(plan).split())


def test_decisions_by_group_are_compared_without_the_names_of_groups():
    graph = fx.Graph()
    graph.output(())
    decided = []
    for caps in ({"21": 4.0, "35": 8.0}, {"22": 4.0, "34": 8.0}, {"21": 8.0, "35": 4.0}):
        joint = JointGraph(fx.GraphModule({}, graph), Signature((), ()))
        joint.decisions["bucket_collectives"] = caps
        decided.append(decided_by(joint))
    assert decided[0] == decided[1] != decided[2]
