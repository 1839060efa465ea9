"""What the tests of buckets share: strategies, counts, and a graph of gathers by hand."""

from graph_trainer.core.graph.annotations import Role, is_backward, role_of
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.core.passes.bucketing.bucket_collectives import (
    BucketCollectivesOptions,
    bucket_collectives,
)
from graph_trainer.core.passes.bucketing.tag_buckets import tag_buckets
from tests.unit.graphs import BACKWARD, GATHER, aten

STRATEGIES = {
    "block": {"strategy": "transformer_block"},
    "small": {"strategy": "size", "cap_mib": 0.0005},
    "large": {"strategy": "size"},
    "near": {"strategy": "size", "max_span": 40},
}


def bucket(joint, **options):
    tag_buckets(joint)
    bucket_collectives(joint, BucketCollectivesOptions(**options))
    joint.validate()
    return joint


def collectives_of(joint, role, backward):
    return [
        n
        for n in joint.graph.nodes
        if is_collective(n) and role_of(n) is role and is_backward(n) is backward
    ]


def counts(joint):
    return (
        len(collectives_of(joint, Role.UNSHARD, False)),
        len(collectives_of(joint, Role.UNSHARD, True)),
        len(collectives_of(joint, Role.REDUCE_GRAD, True)),
    )


def finish(b, loss, gradients):
    return b.joint(loss, **{name.replace(".", "__"): node for name, node in gradients.items()})


def gathering(b, parameters, empty=None):
    """Forward gathers and sums each parameter; its gradient is a copy of the shard."""
    shards = [(name, group, b.parameter(name, 3, dtype=dtype)) for name, group, dtype in parameters]
    if empty is not None:
        name, group, dtype = empty
        shards.append((name, group, b.parameter(name, 0, dtype=dtype)))
    wholes = []
    for name, group, shard in shards:
        role = {"role": Role.UNSHARD, "parameter": name, "module": name.rpartition(".")[0]}
        wholes.append(b.waited(GATHER, shard, 2, group, **role))
    loss = b.total(*wholes)
    return finish(b, loss, {n: b.call(aten.clone.default, s, phase=BACKWARD) for n, _, s in shards})
