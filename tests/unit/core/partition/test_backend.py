"""gt.backend: torch.compile of a partitioned step repeats its partition."""

import itertools
import logging
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import graph_trainer as gt
from graph_trainer.core.analysis.lifetimes import bytes_kept
from graph_trainer.core.graph.annotations import Role, role_of, set_offload
from graph_trainer.core.graph.host_copies import WAIT_COPY
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.offload_activations import OffloadActivationsOptions
from graph_trainer.testing import become, captured, fake_mesh, mean_square
from tests.unit.core.capture.steps import batch, squares
from tests.unit.core.graph.test_registered_effects import Blocks, runs_of
from tests.unit.core.partition.test_partitioned_step import MODELS, gradients, net, partitioned
from tests.unit.graphs import GATHER, Decoder


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Seen:
    """What a second compilation partitioned."""

    def __init__(self):
        self.graphs = []

    def __call__(self, forward, backward):
        self.graphs.append((forward, backward))

    def counts(self):
        """Gathers in forward and in backward, and bytes saved beside inputs."""
        ((forward, backward),) = self.graphs
        taken = {n.name for n in backward.graph.find_nodes(op="placeholder")}
        returned = forward.graph.output_node().all_input_nodes
        saved = [n for n in returned if n.name in taken]
        return gathers(forward), gathers(backward), bytes_kept(forward.graph, saved)


def gathers(module):
    found = [n for n in module.graph.nodes if n.target is GATHER]
    assert all(role_of(n) is Role.UNSHARD for n in found)
    return len(found)


def counts_of(step):
    halves = step.halves
    both = (gathers(half.graph_module) for half in (halves.forward, halves.backward))
    return *both, halves.saved_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_bits_are_eagers_with_an_eager_compiler(name):
    assert_bits_are_eagers(name, gt.backend("eager"))


def assert_bits_are_eagers(name, compiler):
    become(0, 1)
    build, loss_fn, args = MODELS[name]
    torch.manual_seed(0)
    model, other = build(), build()
    other.load_state_dict(model.state_dict())
    step = partitioned(model, args, loss_fn)
    step = torch.compile(step, backend=compiler, fullgraph=True)
    for number in range(3):
        found = []
        for each, call in ((model, step), (other, lambda *a: loss_fn(other, *a))):
            torch.manual_seed(number)
            loss = call(*args)
            (loss * 1.5).backward()
            state = {n: b.clone() for n, b in each.named_buffers()}
            found.append((loss.detach(), gradients(each), state, torch.get_rng_state()))
        torch.testing.assert_close(*found, rtol=0, atol=0, check_stride=True)


@cache
def _decoder():
    torch.manual_seed(0)
    model = Decoder()
    return model, captured(model, torch.zeros(2, 3, dtype=torch.int64))


def plain_decoder():
    """A decoder on one of four fake ranks, its step as captured, and a batch.

    It is the same decoder for all tests, which do not train it; each has a graph of its own.
    """
    model, joint = _decoder()
    fake_mesh(4)
    model.zero_grad()
    return model, copy_graph(joint), (torch.zeros(2, 3, dtype=torch.int64),)


def decoder(**config):
    """Its step, partitioned, and a batch."""
    model, joint, args = plain_decoder()
    gt.run_passes(joint, gt.PassConfig(**config))
    return gt.partition(joint, model, compare_ranks=False), args


FULL = pytest.mark.full


class Asserted(torch.autograd.Function):
    """Refuses large numbers in forward, and large gradients in backward."""

    @staticmethod
    def forward(ctx, x, *messages):
        ctx.messages = messages[1:]
        torch._assert_async((x.abs() < 100).all(), *messages[:1])
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch._assert_async((gradient.abs() < 100).all(), *ctx.messages)
        return gradient.clone(), *(None for _ in ctx.needs_input_grad[1:])


@pytest.mark.parametrize(
    ("compiler", "partition", "messages"),
    [
        ("eager", "tags", ()),
        ("eager", "min_cut", ("a large number", "a large gradient")),
        pytest.param("inductor", "tags", ("a large number", "a large gradient"), marks=FULL),
    ],
)
def test_an_assertion_raises_in_the_half_that_violates_it(compiler, partition, messages):
    become(0, 1)
    number, gradient = messages or 2 * ("Expected Tensor with single nonzero value, but got zero",)
    model, x = nn.Linear(4, 4), torch.ones(3, 4)

    def loss_fn(model, x):
        return Asserted.apply(model(x), *messages).mean()

    backend = gt.backend(compiler, partition=partition)
    step = torch.compile(partitioned(model, (x,), loss_fn), backend=backend)
    for call in (lambda x: loss_fn(model, x), step):
        call(x).backward()
        with pytest.raises(RuntimeError, match=number):
            call(x * 1e4)
        loss = call(x) * 1e6
        with pytest.raises(RuntimeError, match=gradient):
            loss.backward()


@pytest.mark.parametrize(
    ("partition", "policy", "checkpointed", "compiler"),
    [
        ("tags", "none", False, "eager"),
        ("tags", "full", True, "eager"),
        ("min_cut", "none", True, "eager"),
        pytest.param("min_cut", "full", False, "inductor", marks=FULL),
    ],
)
def test_registered_effects_run_as_often_as_in_eager_and_in_its_order(
    partition, policy, checkpointed, compiler
):
    become(0, 1)
    torch.manual_seed(0)
    model, x = Blocks(checkpointed), torch.randn(3, 4)
    expected = [name for name, _ in runs_of(lambda: mean_square(model, x).backward())]
    step = partitioned(model, (x,), mean_square, activation_policy=policy)
    step = torch.compile(step, backend=gt.backend(compiler, partition=partition))
    for _ in range(2):
        assert [name for name, _ in runs_of(lambda: step(x).backward())] == expected


def test_a_graph_may_be_retained_after_a_backward_that_did_not():
    become(0, 1)
    model, args = net(), batch()
    step = torch.compile(partitioned(model, args), backend=gt.backend("eager"))
    step(*args).backward()  # which compiles backward
    once = {n: g.clone() for n, g in gradients(model).items()}
    loss = step(*args)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(gradients(model), {n: 3 * g for n, g in once.items()})
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


POLICIES = (
    {"reshard_after_forward": "always"},
    {"reshard_after_forward": "default"},
    {"reshard_after_forward": "never"},
    {"reshard_after_forward": "always", "activation_policy": "full"},
    {"reshard_after_forward": "always", "activation_policy": "selective"},
)


@pytest.mark.parametrize("config", POLICIES)
def test_the_second_compilation_decides_as_the_first(config):
    step, args = decoder(**config)
    seen = Seen()
    compiler = gt.backend("eager", on_partition=seen)
    torch.compile(step, backend=compiler, fullgraph=True)(*args).backward()
    assert seen.counts() == counts_of(step)
    order = [[n.target for n in g.graph.nodes if "c10d" in str(n.target)] for g in seen.graphs[0]]
    halves = (step.halves.forward, step.halves.backward)
    assert order == [[n.target for n in h.graph.nodes if "c10d" in str(n.target)] for h in halves]


def test_what_is_offloaded_stays_in_host_memory_in_both():
    """The copy is saved, and not the tensor; both compilations save as much."""

    @gt.graph_pass(stage=gt.Stage.TAG, summary="Offload every relu")
    def offload_relus(joint, options, context):
        for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            set_offload(node)

    passes = {"passes": ["default", offload_relus]}
    options = {"offload_activations": OffloadActivationsOptions(min_bytes=0)}
    step, args = decoder(**passes, options=options)
    plain, _ = decoder()
    saved = [n.target for n in step.halves.saved()]
    relus = [
        each.count(torch.ops.aten.relu.default)
        for each in (saved, [n.target for n in plain.halves.saved()])
    ]
    assert saved.count(WAIT_COPY) == relus[1] - relus[0] > 0
    assert step.halves.saved_bytes() < plain.halves.saved_bytes()
    seen = Seen()
    torch.compile(step, backend=gt.backend("eager", on_partition=seen))(*args).backward()
    assert seen.counts() == counts_of(step)


BUDGET = {"activation_memory_budget": 0.1}


@pytest.mark.parametrize("config", (POLICIES[0], POLICIES[4]))
def test_pytorchs_partitioner_gathers_again_what_the_passes_do(config):
    step, args = decoder(**config)
    saved = []
    for settings in ({}, BUDGET):
        torch.compiler.reset()
        seen = Seen()
        compiler = gt.backend("eager", partition="min_cut", settings=settings, on_partition=seen)
        torch.compile(step, backend=compiler, fullgraph=True)(*args).backward()
        *gathered, kept = seen.counts()
        assert tuple(gathered) == counts_of(step)[:2]
        saved.append(kept)
    without, with_budget = saved
    assert with_budget < without <= counts_of(step)[2]


@pytest.mark.parametrize(
    ("name", "settings"), list(zip(MODELS, itertools.cycle([{}, BUDGET]), strict=False))
)
def test_bits_are_eagers_with_pytorchs_partitioner_too(name, settings):
    """Random numbers are drawn once, and a buffer is read before forward writes it."""
    compiler = gt.backend("eager", partition="min_cut", settings=settings)
    assert_bits_are_eagers(name, compiler)


def test_without_our_partitioner_it_decides_otherwise(monkeypatch):
    from graph_trainer.core.partition import torch_compile_backend as room
    from graph_trainer.core.torch_private_compile import standard_partition

    monkeypatch.setitem(room.PARTITIONS, "tags", standard_partition)
    step, args = decoder(reshard_after_forward="always")
    seen = Seen()
    torch.compile(step, backend=gt.backend("eager", on_partition=seen))(*args).backward()
    (_, gathered_again, saved), wanted = seen.counts(), counts_of(step)
    assert gathered_again == 0 < wanted[1]
    assert saved > 1.5 * wanted[2]


def test_without_gradients_nothing_is_partitioned():
    step, args = decoder(reshard_after_forward="always")
    seen = Seen()
    compiled = torch.compile(step, backend=gt.backend("eager", on_partition=seen))
    with torch.no_grad():
        loss = compiled(*args)
        assert not loss.requires_grad
    assert seen.graphs == []


def test_a_step_is_in_one_graph_with_the_ops_around_it():
    become(0, 1)
    model, args = net(), batch()
    seen = Seen()
    compiler = gt.backend("eager", on_partition=seen)
    step = partitioned(model, args)

    def function(x, y):
        return (step(x * 1.5, y) * 2).sin()

    def eager(x, y):
        return (squares(model, x * 1.5, y) * 2).sin()

    found = []
    for call in (torch.compile(function, backend=compiler, fullgraph=True), eager):
        model.zero_grad()
        loss = call(*args)
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert len(seen.graphs) == 1


def evaluated(model):
    model.eval()


def hooked(model):
    model[0].register_forward_hook(lambda *given: None)


def hooked_parameter(model):
    model[0].weight.register_hook(lambda gradient: gradient * 2)


def frozen(model):
    model[0].weight.requires_grad_(False)


def replaced(model):
    model[0].weight = nn.Parameter(torch.randn(8, 4).t().contiguous().t())


def tied(model):
    model[0].bias = model[1].bias


@pytest.mark.parametrize(
    ("change", "fullgraph"),
    [
        (evaluated, True),
        (hooked, False),
        (hooked_parameter, True),
        (frozen, False),
        (replaced, True),
        (tied, False),
    ],
)
def test_a_model_that_changed_is_refused_in_a_later_call(change, fullgraph):
    become(0, 1)
    model, args = net(), batch()
    step = partitioned(model, args)
    compiled = torch.compile(step, backend=gt.backend("eager"), fullgraph=fullgraph)
    compiled(*args).backward()
    change(model)
    with pytest.raises(gt.CaptureError) as wanted:
        step(*args)
    with pytest.raises(gt.CaptureError) as found:
        compiled(*args)
    assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_step_without_a_batch(fullgraph):
    become(0, 1)
    step = partitioned(net(), (), lambda model: model(torch.ones(2, 4)).square().mean())
    compiled = torch.compile(step, backend=gt.backend("eager"), fullgraph=fullgraph)
    assert torch.equal(compiled(), step())


class Writes(nn.Module):
    """Writes into a buffer; a batch may be in its memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(3, 4))

    def forward(self, x):
        self.count.add_(1)
        return self.linear(x) + self.count


@pytest.mark.parametrize(
    ("batch_of", "inside", "first"),
    [
        (lambda model: model.count, False, True),
        (lambda model: model.count[:], False, False),
        (lambda model: model.count.view(4, 3).view(3, 4), True, True),
        (lambda model: model.count, True, False),
    ],
)
def test_a_batch_in_memory_that_the_step_writes_is_refused(batch_of, inside, first):
    become(0, 1)
    model = Writes()
    step = partitioned(model, (torch.randn(3, 4),), lambda m, x: m(x).sum())
    with pytest.raises(gt.CaptureError, match="shares the memory of 'count'") as wanted:
        step(batch_of(model))

    def function(*batch):
        return step(*(batch or (batch_of(model),)))

    compiled = torch.compile(function, backend=gt.backend("eager"), fullgraph=True)
    if not first:
        compiled(torch.randn(3, 4)).backward()
    before = model.count.clone()
    with pytest.raises(gt.CaptureError) as found:
        compiled(*(() if inside else (batch_of(model),)))
    assert str(found.value) == str(wanted.value) and torch.equal(model.count, before)
    if not first:  # AOTAutograd's graph of inputs in one memory is for such alone
        compiled(model.count.clone()).backward()


def test_a_dtensor_for_a_tensor_is_refused_as_without_torch_compile():
    become(0, 1)
    mesh = init_device_mesh("cpu", (1,))
    x, y = batch()
    step = partitioned(net(), (x, y))
    given = distribute_tensor(x, mesh, [Replicate()])
    with pytest.raises(gt.CaptureError) as wanted:
        step(given, y)
    with pytest.raises(gt.CaptureError) as found:
        torch.compile(step, backend=gt.backend("eager"))(given, y)
    assert str(found.value) == str(wanted.value)


def test_a_batch_of_another_shape_is_refused_as_without_torch_compile():
    become(0, 1)
    model = net()
    step = torch.compile(partitioned(model, batch()), backend=gt.backend("eager"))
    with pytest.raises(gt.CaptureError, match="the graph was captured with"):
        step(*batch(5))


def test_one_graph_needs_a_batch_of_plain_tensors():
    become(0, 1)
    nested = ({"x": torch.ones(2, 4)},)
    step = partitioned(nn.Linear(4, 4), nested, lambda model, batch: model(batch["x"]).mean())
    torch.compile(step, backend=gt.backend("eager"))(*nested).backward()
    torch.compiler.reset()
    compiled = torch.compile(step, backend=gt.backend("eager"), fullgraph=True)
    with pytest.raises(RuntimeError, match="fullgraph=True needs a batch of plain tensors"):
        compiled(*nested)


def test_a_module_that_is_not_partitioned_is_compiled_plainly_and_it_says_so_once(
    caplog, monkeypatch
):
    become(0, 1)
    compiler = gt.backend("eager")
    x = torch.randn(2, 4)
    with caplog.at_level(logging.WARNING):
        for model in (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.Tanh())):
            found = torch.compile(model, backend=compiler)(x)
            assert torch.equal(found, model(x))
            found.sum().backward()
    assert [r.message for r in caplog.records if "gt.backend" in r.message] == [
        "gt.backend: this module has no partitioned step, so it is compiled as by plain "
        "torch.compile: give it gt.partition(joint)"
    ]


def test_a_compiler_that_does_not_exist_is_refused():
    with pytest.raises(gt.ConfigError, match="did you mean 'inductor'"):
        gt.backend("inducter")


@pytest.mark.parametrize(
    ("compiler", "partition", "setting", "message"),
    [
        ("inductor", "tags", {"reorder_for_localty": 1}, "did you mean 'reorder_for_locality'"),
        ("eager", "tags", {"reorder_for_locality": 1}, "there is no such setting"),
        ("inductor", "tags", BUDGET, "PyTorch's partitioner alone reads this setting"),
        ("eager", "tags", {"graphsafe_rng_functionalization": False}, "pass partition='min_cut'"),
        ("eager", "min_cut", {"cse": True}, "this setting has no effect"),
        ("inductor", "tags", {"_pre_fusion_custom_pass": None}, "this setting has no effect"),
        ("eager", "min_cut", {"activation_memory_budget": 1.5}, "at most 1"),
        ("eager", "min_cut", {"activation_memory_budget": "0.5"}, "must be a number above 0"),
        ("eager", "mincut", {}, "partition is 'mincut'; it must be one of tags, min_cut"),
    ],
)
def test_a_setting_without_effect_is_refused(compiler, partition, setting, message):
    with pytest.raises(gt.ConfigError, match=message):
        gt.backend(compiler, partition=partition, settings=setting)


# --- Inductor -------------------------------------------------------------------------------------


@pytest.fixture
def settings_seen(monkeypatch):
    """Inductor's settings whenever it compiles a graph, which is then run as it is."""
    import torch._inductor.compile_fx as inductor
    from torch._functorch import config as autograd_config
    from torch._inductor import config

    seen = []
    plain = inductor.compile_fx.__kwdefaults__ or {}
    assert "inner_compile" not in plain  # by position, so that the module's name is not used
    defaults = list(inductor.compile_fx.__defaults__)

    def compile_nothing(module, inputs, **how):
        is_backward = bool(how.get("is_backward"))
        given = (
            config.reorder_for_compute_comm_overlap,
            autograd_config.debug_assert,
            autograd_config.activation_memory_budget,
        )
        seen.append((is_backward, config.reorder_for_locality, config.custom_partitioner_fn, given))

        def run(values):
            given = list(values)
            values.clear()
            return list(module(*given))

        run._boxed_call = True
        return run

    defaults[defaults.index(inductor.compile_fx_inner)] = compile_nothing
    monkeypatch.setattr(inductor.compile_fx, "__defaults__", tuple(defaults))
    monkeypatch.setattr(inductor, "compile_fx_inner", compile_nothing)
    return seen


def test_settings_hold_for_the_step_and_its_backward_and_for_nothing_else(settings_seen):
    from torch._functorch import config

    def compile_something_else():
        torch.compiler.reset()
        model = nn.Linear(4, 4)
        torch.compile(model)(torch.randn(2, 4)).sum().backward()
        found, settings_seen[:] = [*settings_seen], []
        return found

    before = compile_something_else()
    assert before and all(locality and fn is None for _, locality, fn, _ in before)
    step, args = decoder(reshard_after_forward="always")
    seen = Seen()
    with config.patch(force_non_lazy_backward_lowering=False):
        loss = torch.compile(step, backend=gt.backend(on_partition=seen))(*args)
        assert [is_backward for is_backward, *_ in settings_seen] == [False]
        loss.backward()
    assert [is_backward for is_backward, *_ in settings_seen] == [False, True]
    assert all(not locality and fn is not None for _, locality, fn, _ in settings_seen)
    assert seen.counts()[:2] == counts_of(step)[:2]
    settings_seen.clear()
    assert compile_something_else() == before


def test_settings_of_a_users_hold_in_both_halves_and_nowhere_else(settings_seen):
    from torch._functorch import config

    step, args = decoder()
    given = {"reorder_for_compute_comm_overlap": True, "debug_assert": True} | BUDGET
    compiler = gt.backend(partition="min_cut", settings=given)
    with config.patch(force_non_lazy_backward_lowering=False):
        loss = torch.compile(step, backend=compiler)(*args)
        torch.compile(nn.Linear(4, 4))(torch.randn(2, 4)).sum().backward()
        loss.backward()
    found = [(is_backward, given) for is_backward, *_, given in settings_seen]
    plain, ours = (False, False, 1.0), tuple(given.values())
    assert found == [(False, ours), (False, plain), (True, plain), (True, ours)]
