"""Which activations backward has, by policy, and what that does to memory and numbers."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import graph_trainer as gt
from benchmarks.llama_stack import SIZES, LlamaStack
from graph_trainer.core.analysis.lifetimes import bytes_kept
from graph_trainer.core.analysis.unshard_chains import unshard_chains
from graph_trainer.core.graph.annotations import (
    is_backward,
    module_of,
    recompute_policy,
    set_recompute_policy,
)
from graph_trainer.core.graph.ops import is_random, storage_roots, written_arguments
from graph_trainer.core.passes.context import PassContext, RunSettings
from graph_trainer.core.passes.functionalize_writes import functionalize_writes
from graph_trainer.core.passes.rematerialize import rematerialize
from graph_trainer.core.passes.tag_activations import TagActivationsOptions, tag_activations
from graph_trainer.testing import captured, check_pass
from tests.unit.graphs import BACKWARD, aten, captured_decoder, captured_stack, unshards

TOKENS = torch.zeros(2, 24, dtype=torch.int64)


def stack():
    return captured_stack(SIZES["tiny"], 2, 24)


def kept(joint):
    """Count, by module and op, what forward allocates and backward reads, but for parameters."""
    parameters = {node for chain in unshard_chains(joint) for node in chain.nodes}
    roots = storage_roots(joint.graph)
    read = {roots[n][0] for node in joint.graph.nodes if is_backward(node)
            for n in node.all_input_nodes if not is_backward(n)}  # fmt: skip
    made = (n for n in read - parameters if n.op == "call_function")
    return Counter((module_of(n), str(n.target)) for n in made)


def with_policy(joint, policy, **options):
    settings = {"recompute_matmuls_of": options.pop("of", ())}
    settings |= {"recompute_every_nth_block": options.pop("every", 2)}
    context = PassContext(settings=RunSettings(activation_policy=policy, **settings))
    functionalize_writes(joint)  # or the norms' sums in place of their means may not run twice
    check_pass(tag_activations, joint, TagActivationsOptions(**options), context)
    check_pass(rematerialize, joint)
    return joint


def of_blocks(found):
    return {key: count for key, count in found.items() if (key[0] or "").startswith("layers.")}


def test_full_keeps_the_input_of_each_block():
    found = with_policy(stack(), "full")
    assert of_blocks(kept(found)) == {
        ("layers.0", "aten.add.Tensor"): 1,
        ("layers.1", "aten.add.Tensor"): 1,
    }


def test_selective_keeps_what_is_expensive_and_the_first_residual():
    found = of_blocks(kept(with_policy(stack(), "selective")))
    block = {(name[9:], op) for (name, op) in found if name.startswith("layers.1.")}
    assert {name for name, op in block if op == "aten.mm.default"} == {"attention.wqkv", "w1"}
    assert any("scaled_dot_product" in op for name, op in block if name == "attention")
    assert found["layers.0", "aten.add.Tensor"] == found["layers.1", "aten.add.Tensor"] == 2
    assert not any("silu" in op or "aten.mul" in op for _, op in found)


@pytest.mark.parametrize(
    ("options", "products"),
    [
        ({"matmuls": "keep"}, {"attention.wqkv", "w1", "w3"}),
        ({"matmuls": "recompute"}, set()),
        ({"of": ("wqkv",)}, {"w3"}),
    ],
)
def test_which_matrix_products_selective_keeps(options, products):
    found = kept(with_policy(stack(), "selective", **options))
    assert {
        name[9:]
        for name, op in found
        if op == "aten.mm.default" and (name or "").startswith("layers.1.")
    } == products


def test_none_changes_nothing_and_every_nth_block_is_chosen():
    joint = stack()
    before = kept(joint)
    assert not check_pass(tag_activations, joint)
    found = kept(with_policy(joint, "layers", every=2))
    assert {key: n for key, n in found.items() if key[0].startswith("layers.0")} == {
        key: n for key, n in before.items() if key[0].startswith("layers.0")
    }
    assert sum(found.values()) < sum(before.values())


def test_more_than_there_are_blocks_would_recompute_nothing():
    """A graph without backward, or without blocks, recomputes nothing whatever the number."""
    said = r"recompute_every_nth_block is 3.* only 2 blocks.* 1 to 2.*none"
    with pytest.raises(gt.PassError, match=said):
        with_policy(stack(), "layers", every=3)
    assert not any(map(recompute_policy, with_policy(flat(), "layers", every=3).graph.nodes))
    context = PassContext(
        settings=RunSettings(activation_policy="layers", recompute_every_nth_block=3)
    )
    forward = gt.partition(stack(), LlamaStack(SIZES["tiny"])).halves.forward
    tag_activations.function(forward, TagActivationsOptions(), context)


def flat():
    return captured(nn.Linear(2, 2), torch.ones(2, 2))


def test_the_models_own_tags_win_and_its_checkpoints_are_not_doubled():
    joint = stack()
    silu = next(n for n in joint.graph.nodes if n.target is aten.silu.default)
    set_recompute_policy(silu, CheckpointPolicy.MUST_SAVE, ac_graph_id=1)
    with_policy(joint, "full")
    assert recompute_policy(silu) is CheckpointPolicy.MUST_SAVE
    assert any(is_backward(user) for user in silu.users)

    def recomputed(policy):
        joint = with_policy(captured_decoder(checkpointed=True), policy)
        return sum(n.target is aten.relu.default for n in joint.graph.nodes)

    assert recomputed("none") == recomputed("full") == recomputed("selective") == 4


def test_the_first_residual_is_worth_what_the_docs_say(monkeypatch):
    """Its bytes and no more: what would be kept in its place is kept beside it."""

    def bytes_of(joint):
        read = {n for node in joint.graph.nodes if is_backward(node)
                for n in node.all_input_nodes if not is_backward(n)}  # fmt: skip
        parameters = {node for chain in unshard_chains(joint) for node in chain.nodes}
        return bytes_kept(joint.graph, sorted(read - parameters))

    size = SIZES["tiny"]
    with_it = bytes_of(with_policy(stack(), "selective"))
    monkeypatch.setattr(f"{tag_activations.function.__module__}._is_residual", lambda *_: False)
    without = bytes_of(with_policy(stack(), "selective"))
    assert with_it - without == size.layers * TOKENS.numel() * size.dim * 4  # float32
    page = (Path(__file__).parents[4] / "docs/training.md").read_text()
    mib, tokens, gib, layers = (
        int(number.replace(",", ""))
        for number in re.search(
            r"residual takes (\d+) MiB for each block and sequence of ([\d,]+) tokens in bfloat16: "
            r"(\d+) GiB in the (\d+)",
            " ".join(page.split()),
        ).groups()
    )
    assert mib << 20 == tokens * SIZES["8b"].dim * 2
    assert gib << 30 == layers * mib << 20


class Drops(nn.Module):
    """Blocks with a random op, a value read from a tensor and a buffer that is written."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for layer in self.layers:
            layer.register_buffer("seen", torch.zeros(4))
            layer.register_forward_hook(self.after)

    def after(self, layer, args, out):
        layer.seen.add_(out.detach().sum(0))
        return torch.dropout(out * layer.seen, 0.5, True).sin()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_random_ops_and_what_is_written_are_kept():
    joint = captured(Drops(), torch.randn(2, 4))
    tag_activations(joint, context=PassContext(settings=RunSettings(activation_policy="full")))
    rematerialize(joint)
    random = [n for n in joint.graph.nodes if is_random(n)]
    writes = [n for n in joint.graph.nodes if written_arguments(n)]
    assert len(random) == 2 and len(writes) >= 2
    for node in (*random, *writes):
        assert not is_backward(node) and recompute_policy(node) is CheckpointPolicy.MUST_SAVE
    # the cosine of the second block's product, but not the product of what was written since
    assert any(is_backward(n) and n.target is aten.mm.default for n in joint.graph.nodes)


def test_the_kept_set_is_that_of_a_checkpointed_block():
    """torch's own checkpoint around every block, baked in by the trace, keeps the same."""

    class Checkpointed(LlamaStack):
        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    theirs = kept(captured(Checkpointed(SIZES["tiny"]), TOKENS))
    ours = kept(with_policy(stack(), "full"))
    small = {key: n for key, n in (ours - theirs).items() if key[1] != "aten.mean.dim"}
    assert not small and not theirs - ours


def test_one_block_is_recomputed_at_a_time():
    """Copies of a block stand between the backward of the next block and its own."""
    joint = with_policy(stack(), "full")
    blocks = [
        (module_of(n) or "")[:8] for n in joint.graph.nodes
        if is_backward(n) and n.target is aten.silu.default
    ]  # fmt: skip
    assert blocks == ["layers.1", "layers.0"]
    last_of_1 = max(i for i, n in enumerate(joint.graph.nodes) if is_backward(n)
                    and (module_of(n) or "").startswith("layers.1"))  # fmt: skip
    first_of_0 = min(i for i, n in enumerate(joint.graph.nodes) if is_backward(n)
                     and (module_of(n) or "").startswith("layers.0"))  # fmt: skip
    assert last_of_1 < first_of_0


def test_a_parameter_that_only_recomputation_reads_is_gathered_again():
    """Backward of a linear layer reads its weight alone; of its recomputation, its bias too."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3))
            )

        def forward(self, x):
            return self.layers(x)

    joint = captured(Model(), torch.randn(2, 4))
    plain = ("bucket_collectives", "schedule_overlap")
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always", activation_policy="full",
                                       disable_passes=plain))  # fmt: skip
    again = unshards(joint, BACKWARD)
    assert {"layers.1.0.weight", "layers.1.0.bias"} <= set(again)
    assert all(not chain.backward_readers for chain in unshard_chains(joint))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"matmuls": "everysecond"}, "did you mean 'every_second'"),
        ({"regather": "sometimes"}, "TagActivationsOptions.regather is 'sometimes'"),
    ],
)
def test_bad_options_are_named(options, said):
    with pytest.raises(gt.PassError, match=said):
        TagActivationsOptions(**options)


def test_an_unknown_policy_is_named():
    with pytest.raises(gt.PassError, match="activation_policy is 'ful'.*did you mean 'full'"):
        gt.PassConfig(activation_policy="ful")
    with pytest.raises(gt.PassError, match="recompute_every_nth_block is 0; it must be 1 or more"):
        gt.PassConfig(activation_policy="layers", recompute_every_nth_block=0)
