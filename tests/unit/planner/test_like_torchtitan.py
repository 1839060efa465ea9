"""A plan of what torchtitan runs: what is recomputed, and when FSDP2 gathers and reduces."""

import dataclasses
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
import torch

from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.fsdp_copies import fsdp_copies
from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.graph.annotations import (
    Role,
    block_of,
    counts_of,
    is_backward,
    module_of,
    role_of,
)
from graph_trainer.core.graph.ops import is_wait
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.runtimes import TORCHTITAN
from graph_trainer.errors import ConfigError
from graph_trainer.planner.plan import make_plan, outside_seconds, sums_of_norm
from graph_trainer.titan.config.load import load_config
from tests.unit.core.simulation.machines import INSTANT

RANKS = 4
MODELS = {"deepseek_v3": ("debugmodel", 1), "qwen3": ("debugmodel_moe", 0)}
"""Family -> config and its first layer that is a mixture of experts."""

aten = torch.ops.aten


@cache
def planned(policy, degree, module="deepseek_v3", layers=1, backend="eager", **changes):
    config, first = MODELS[module]
    words = ["--module", f"graph_trainer.{module}", "--config", config]
    words += ["--training.local_batch_size", "1", "--training.seq_len", "16"]
    words += ["--activation_checkpoint.type", policy, "--compile.backend", backend]
    words += ["--parallelism.expert_parallel_degree", str(degree)]
    for key, value in changes.items():
        words += [f"--parallelism.{key}", value]
    loaded = load_config(words, world_size=RANKS)
    model = loaded.model_spec.model
    model.layers = model.layers[first : first + layers]
    hardware = load_hardware("h100-sxm")
    return make_plan(loaded, RANKS, hardware, runtime=TORCHTITAN, every_pass=False)


def nodes_of(plan, target):
    return [n for n in plan.simulation.joint.graph.nodes if n.target is target]


@pytest.mark.parametrize("module", MODELS)
@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [("none", []), ("selective", []), ("full", [None, "0", "0 back"])],
)
def test_exchanges_are_recomputed_as_the_policy_says(policy, recomputed, module):
    """Counts, tokens and results are sent in forward, gradients of the latter two in backward."""
    plan = planned(policy, 2, module)
    sent = [c.node for c in collectives(plan.simulation.joint) if c.kind == "all_to_all_single"]
    forward = [counts_of(node) for node in sent if not is_backward(node)]
    backward = [counts_of(node) for node in sent if is_backward(node)]
    assert forward == [None, "0", "0 back"]
    assert backward == [*recomputed, "0", "0 back"]


@pytest.mark.parametrize(("policy", "waits"), [("none", 1), ("selective", 1), ("full", 2)])
def test_the_host_waits_for_the_counts_of_each_exchange(policy, waits):
    """A copy that does not block, of what is sent, comes before the one of what arrives."""
    copies = [
        node
        for node in nodes_of(planned(policy, 2), aten._to_copy.default)
        if node.kwargs.get("device") == torch.device("cpu")
    ]
    blocking = Counter(not node.kwargs.get("non_blocking", False) for node in copies)
    assert blocking == {False: waits, True: waits}


@pytest.mark.parametrize(("backend", "recomputed"), [("eager", 3), ("inductor", 2)])
def test_only_a_compiler_leaves_out_what_backward_does_not_read(backend, recomputed):
    """Without early_stop the last product of the shared experts runs again, for nothing."""
    plan = planned("full", 1, backend=backend)
    of_shared = [n for n in nodes_of(plan, aten.mm.default) if "shared_experts" in module_of(n)]
    backward = [n for n in of_shared if is_backward(n)]
    assert len(of_shared) - len(backward) == 3
    assert len(backward) == 2 * 3 + recomputed


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--activation_checkpoint.type", "budget"), "activation_checkpoint.type"),
        (
            ("--parallelism.fsdp_reshard_after_forward", "auto"),
            "parallelism.fsdp_reshard_after_forward",
        ),
    ],
)
def test_policies_of_a_captured_step_are_refused(flags, key):
    config = load_config(["--compile.memory_limit_gib", "8", *flags], world_size=RANKS)
    with pytest.raises(ConfigError, match=f"^{key} is .* leave --like torchtitan out"):
        make_plan(config, RANKS, load_hardware("h100-sxm"), runtime=TORCHTITAN)


LAYERS = 3
BLOCKS = [f"layers.{number}" for number in range(LAYERS)]
HEAD = "norm"


def sides(plan):
    """By unit and phase, the places of what surrounds the collectives of FSDP: for gathers and for
    reductions, those of the collectives and those of their waits."""
    joint = plan.simulation.joint
    place = {node: number for number, node in enumerate(joint.graph.nodes)}
    found = {Role.UNSHARD: {}, Role.REDUCE_GRAD: {}}
    for collective in plan.simulation.collectives:
        if collective.role is None:
            continue
        first = collective.parameters[0]
        unit = (is_backward(collective.node), block_of(first) or first.partition(".")[0])
        (wait,) = (n for n in collective.node.users if is_wait(n))
        places = found[collective.role].setdefault(unit, [])
        places.append((place[collective.node], place[wait]))
    return found


def computes(plan, unit):
    """The places of the first and last node that computes in a unit."""
    backward, part = unit
    places = []
    for place, node in enumerate(plan.simulation.joint.graph.nodes):
        module = module_of(node) or ""
        if (block_of(module) or module, is_backward(node), role_of(node)) != (part, backward, None):
            continue
        if plan.simulation.costs[node].seconds:
            places.append(place)
    return min(places), max(places)


@pytest.mark.parametrize(("degree", "meshes"), [(1, 1), (2, 2)])
def test_a_block_is_gathered_and_reduced_once_on_each_of_its_meshes(degree, meshes):
    plan = planned("full", degree, layers=LAYERS)
    found = sides(plan)
    gathers = {unit: len(places) for unit, places in found[Role.UNSHARD].items()}
    both = {(backward, block): meshes for backward in (False, True) for block in BLOCKS}
    # the head is kept for backward, and an embedding is gathered for its backward, which reads
    # nothing of it
    assert gathers == {
        (False, "tok_embeddings"): 1,
        (True, "tok_embeddings"): 1,
        (False, HEAD): 1,
        **both,
    }
    reductions = {unit: len(places) for unit, places in found[Role.REDUCE_GRAD].items()}
    in_blocks = {(True, block): meshes for block in BLOCKS}
    assert reductions == {(True, "tok_embeddings"): 1, (True, HEAD): 1, **in_blocks}


@pytest.mark.parametrize("degree", [1, 2])
def test_gathers_run_while_the_block_before_computes(degree):
    plan = planned("full", degree, layers=LAYERS)
    gathers = sides(plan)[Role.UNSHARD]
    forward = [(False, name) for name in ("tok_embeddings", *BLOCKS, HEAD)]
    backward = [(True, name) for name in (*reversed(BLOCKS), "tok_embeddings")]
    for units in (forward, backward):
        for unit in units:
            start, _ = computes(plan, unit)
            assert all(wait < start for _, wait in gathers[unit]), "copied before a block begins"
    for before, unit in pairwise(backward):
        start, _ = computes(plan, before)
        for launch, _ in gathers[unit]:
            assert max(wait for _, wait in gathers[before]) < launch < start
    for two_before, before, unit in zip(forward, forward[1:], forward[2:], strict=False):
        start, end = computes(plan, two_before)
        reads = [
            place
            for place, node in enumerate(plan.simulation.joint.graph.nodes)
            if start < place < end and node.kwargs.get("device") == torch.device("cpu")
        ]
        assert bool(reads) == (degree > 1 and two_before[1] in BLOCKS)
        begin = max(wait for _, wait in gathers[two_before])
        for launch, _ in gathers[unit]:
            assert max([begin, *reads]) < launch < (computes(plan, before)[0] if reads else start)


def test_a_reduction_is_complete_before_the_next_gradients_are_copied():
    plan = planned("full", 2, layers=LAYERS)
    reductions = sides(plan)[Role.REDUCE_GRAD]
    units = [(True, name) for name in (HEAD, *reversed(BLOCKS), "tok_embeddings")]
    place = {node: number for number, node in enumerate(plan.simulation.joint.graph.nodes)}
    copies = fsdp_copies(plan.simulation.joint.graph).before
    for before, unit in pairwise(units):
        _, end = computes(plan, unit)
        waits = [wait for _, wait in reductions[before]]
        launches = {launch for launch, _ in reductions[unit]}
        copied = [place[n] for n, collective in copies.items() if place[collective] in launches]
        assert end < min(waits) and max(waits) < min(copied) < min(launches)
    last = max(wait for _, wait in reductions[units[-1]])
    assert last > computes(plan, units[-1])[1]


def test_what_is_kept_is_not_gathered_again():
    gathers = sides(planned("full", 2, layers=1, fsdp_reshard_after_forward="never"))[Role.UNSHARD]
    assert not any(backward for backward, _ in gathers)
    gathers = sides(planned("full", 2, layers=1, fsdp_reshard_after_forward="always"))[Role.UNSHARD]
    assert (True, HEAD) in gathers


@pytest.mark.parametrize("mesh", [{}, {"data_parallel_replicate_degree": "2"}])
def test_sums_of_tensor_parallelism_are_in_no_bucket(mesh):
    """Each is complete before the gradients of its block are copied into their bucket."""
    plan = planned("none", 1, layers=2, tensor_parallel_degree="2", **mesh)
    reductions = [c for c in plan.simulation.collectives if c.role is Role.REDUCE_GRAD]
    tensor_parallel = [c for c in reductions if c.ranks == (0, 1)]
    bucketed = [c for c in reductions if c.ranks != (0, 1)]
    assert {c.kind for c in tensor_parallel} == {"all_reduce"}
    assert all(len(c.parameters) == 1 for c in tensor_parallel)
    summed = dict.fromkeys(BLOCKS[:2], 0)
    place = {node: number for number, node in enumerate(plan.simulation.joint.graph.nodes)}
    for c in tensor_parallel:
        (parameter,) = c.parameters
        (bucket,) = (b for b in bucketed if parameter in b.parameters)
        (wait,) = c.node.users
        _, end = computes(plan, (True, block_of(parameter) or parameter.partition(".")[0]))
        assert end < place[c.node] < place[wait] < place[bucket.node]
        if block_of(parameter):
            summed[block_of(parameter)] += 1
        earlier = [b for b in bucketed if place[b.node] < place[bucket.node]]
        if earlier:  # the reduction before is complete after the sums
            assert place[wait] < place[next(iter(earlier[-1].node.users))]
    assert all(count > 1 for count in summed.values())


@pytest.mark.parametrize(
    ("degree", "mesh", "sizes"),
    [
        (1, {}, [4]),
        (2, {}, [2, 2, 4]),  # experts have a mesh of their own, of two dimensions
        (1, {"data_parallel_replicate_degree": "2"}, [2]),  # copies have equal norms
        (1, {"tensor_parallel_degree": "2"}, [2, 2]),
    ],
)
def test_ranks_sum_the_norm_over_each_dimension_that_shards(degree, mesh, sizes):
    """Each is a message without bytes to speak of, which takes as long as its ranks make it."""
    plan = planned("none", degree, layers=1, **mesh)
    joint, hardware = plan.simulation.joint, plan.hardware
    sums = sums_of_norm(joint, hardware)
    by_size = dict(zip(sorted(sizes), sorted(sums), strict=True))
    assert len(by_size) == len(set(sums))
    state = plan.simulation.memory.by_category[Category.OPTIMIZER_STATE][0]
    instant = dataclasses.replace(hardware, host=INSTANT, memory_efficiency=1e300)
    assert outside_seconds(
        dataclasses.replace(plan.simulation, hardware=instant), state
    ) == pytest.approx(sum(sums))
