"""Samples that a known profile would give lead back to that profile; files hold what was fitted."""

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graph_trainer as gt
from graph_trainer.core.simulation.collective_costs import collective_seconds
from graph_trainer.core.simulation.hardware import (
    Efficiency,
    OpKind,
    known_hardware,
    load_hardware,
)
from graph_trainer.core.simulation.op_costs import Curves, costs
from graph_trainer.planner.calibration import (
    CollectiveSample,
    OpSample,
    OverlapSample,
    Samples,
    calibrated,
)
from graph_trainer.planner.profile_toml import profile_to_toml
from graph_trainer.testing import Builder
from tests.unit.core.simulation.machines import changed, machine
from tests.unit.graphs import aten

KINDS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")


def op(kind, size, seconds, *, model=None, name="aten::mm nn", dtype="float32", **more):
    """A sample of an op that the base predicts to take `model` seconds."""
    return OpSample(
        kind=kind,
        op=name,
        dtype=dtype,
        size=float(size),
        model_seconds=size / 1e9 if model is None else model,
        seconds=seconds,
        **more,
    )


def fit(samples, base=None):
    return calibrated(base or machine(device="cpu"), samples, device_name="x", date="2026-01-01")


def seconds_of(hardware, base, sample):
    """What a profile predicts of a sample, without its launch and bytes."""
    scale = base.scalar_efficiency(sample.kind) / hardware.scalar_efficiency(sample.kind)
    slowdown = Curves(hardware).slowdown(sample.kind, sample.op, sample.dtype, sample.size)
    return sample.model_seconds * scale * slowdown


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.sampled_from(OpKind), st.floats(0.01, 0.99), min_size=1),
    st.lists(st.integers(1, 10**12), min_size=1, max_size=30, unique=True),
)
def test_one_efficiency_of_each_kind_is_recovered_at_any_sizes(efficiencies, sizes):
    base = machine(device="cpu")
    samples = Samples()
    for kind, efficiency in efficiencies.items():
        for size in sizes:
            model = size / 1e9
            seconds = model * base.scalar_efficiency(kind) / efficiency
            samples.ops.append(op(kind, size, seconds, name=f"aten::{kind}"))
    hardware, figures, _ = fit(samples, base)
    assert hardware.calibration.samples == len(samples.ops)
    assert len(sizes) == 1 or hardware.calibration.spread < 1e-3
    keys = {f"{kind}_efficiency" for kind in efficiencies if kind is not OpKind.ROWS}
    keys |= {"[[efficiencies]] rows"} & {f"[[efficiencies]] {kind}" for kind in efficiencies}
    assert {figure.key for figure in figures} == keys
    for kind, efficiency in efficiencies.items():
        if kind is not OpKind.ROWS:
            assert hardware.scalar_efficiency(kind) == pytest.approx(efficiency, rel=1e-6)
    for sample in samples.ops:
        assert seconds_of(hardware, base, sample) == pytest.approx(sample.seconds, rel=1e-6)


def test_efficiency_grows_with_the_size_of_matmuls_whatever_the_noise():
    base = machine(device="cpu")
    noise = (1.1, 0.9, 1.3, 0.8, 1.2, 1.0, 0.95, 1.05)
    samples = Samples()
    for place, factor in enumerate(noise):
        size = 10.0 ** (4 + place)
        true = 0.5 * (place + 1) / len(noise)
        samples.ops.append(op(OpKind.MATMUL, size, size / 1e9 * 0.5 / true * factor))
    curve = [e.efficiency for e in fit(samples, base).hardware.efficiencies if e.op is None]
    assert len(curve) == len(noise) and curve == sorted(curve)


def test_time_of_ops_bound_by_memory_grows_and_their_efficiency_may_fall():
    """What leaves a cache is slower; a smaller size that took longer is noise."""
    base = machine(device="cpu")
    times = {1e3: 1e-6, 1e4: 8e-6, 1e5: 7e-6, 1e6: 1e-3, 1e7: 3e-2}
    samples = Samples([op(OpKind.MEMORY, n, t, name="aten::add") for n, t in times.items()])
    hardware, *_ = fit(samples, base)
    predicted = [seconds_of(hardware, base, sample) for sample in samples.ops]
    assert predicted == pytest.approx(sorted(predicted))
    assert predicted[0] == pytest.approx(1e-6) and predicted[-1] == pytest.approx(3e-2)
    efficiencies = [e.efficiency for e in hardware.efficiencies if e.op is None]
    assert efficiencies != sorted(efficiencies)


def test_layouts_of_a_matmul_have_curves_of_their_own():
    samples = Samples(
        [
            op(OpKind.MATMUL, 1e9, 1.0, name="aten::mm nt"),
            op(OpKind.MATMUL, 1e9, 30.0, name="aten::mm nn"),
        ]
    )
    base = machine(device="cpu")
    hardware, *_ = fit(samples, base)
    for sample in samples.ops:
        assert seconds_of(hardware, base, sample) == pytest.approx(sample.seconds)
    other = op(OpKind.MATMUL, 1e9, 0.0, name="aten::mm tt")
    assert 1 < seconds_of(hardware, base, other) < 30


@pytest.mark.parametrize("count", [1, 2, 5, 12, 60])
def test_a_spread_is_that_of_sizes_that_were_not_fitted(count):
    """A curve through all of its samples has no residual, but predicts no other size so well."""
    base, noise = machine(device="cpu"), random.Random(count)
    samples = Samples()
    for place in range(count):
        size = 10.0 ** (5 + 4 * place / count)
        factor = math.exp(0.3 * (-1) ** place + noise.gauss(0, 0.01))
        samples.ops.append(op(OpKind.MEMORY, size, size / 1e9 * factor, name="aten::add"))
    result = fit(samples, base)
    (figure,) = (f for f in result.figures if f.key == "memory_efficiency")
    assert result.hardware.calibration.spread == pytest.approx(figure.spread, abs=1e-4)
    assert 0.15 < figure.spread < 0.9
    fits = {key: fit.samples for key, fit in result.curves.items()}
    own = (OpKind.MEMORY, "aten::add", "float32")
    assert fits == {(OpKind.MEMORY, None, None): count, own: count}
    assert result.curves[own].spread == pytest.approx(figure.spread)


def test_an_op_of_one_size_says_nothing_of_the_spread_beside_others():
    """Attention at one size is a hundred times slower than the base's; no sample predicts it."""
    products = [op(OpKind.MATMUL, 10.0**n, 10.0**n / 2e9) for n in range(5, 9)]
    attention = op(OpKind.ATTENTION, 1e8, 10.0, name="aten::attention")
    assert fit(Samples([*products, attention])).hardware.calibration.spread < 1e-3
    assert fit(Samples([attention])).hardware.calibration.spread > 1


def test_collectives_are_predicted_from_those_of_other_sizes():
    start = machine(base_seconds=1e-5, device="cuda")
    samples = Samples()
    for place in range(4):
        sample = CollectiveSample(
            kind="all_reduce", ranks=(0, 1), input_bytes=0, output_bytes=10**place, seconds=1e-5
        )
        seconds = collective_seconds(sample, start) * math.exp(0.3 * (-1) ** place)
        samples.collectives.append(dataclasses.replace(sample, seconds=seconds))
    fitted = fit(samples, start).hardware
    residuals = [math.log(s.seconds / collective_seconds(s, fitted)) for s in samples.collectives]
    assert fitted.calibration.spread > 1.1 * math.sqrt(math.fsum(r * r for r in residuals) / 4)


groups = st.lists(st.integers(0, 31), min_size=1, max_size=12, unique=True).map(
    lambda ranks: tuple(sorted(ranks))
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), groups, st.integers(0, 10**9)), min_size=1, max_size=25
    ),
    st.floats(0.2, 5),
    st.floats(0.2, 5),
    st.floats(0.1, 1),
    st.floats(0.1, 1),
)
def test_collectives_are_predicted_as_they_were_measured(issued, base, step, node, network):
    """Of any group and size: of one rank, of nothing, of odd sizes, and however few.

    Where rings span nodes one collective is within a node: these may be bound by the links of
    nodes, of which nothing else tells the speed.
    """
    if any(len({rank // 8 for rank in ranks}) > 1 for _, ranks, _ in issued):
        issued = [*issued, ("all_gather_into_tensor", (0, 1), 10**8)]
    start = machine(base_seconds=1e-5, post_seconds=1e-7, device="cuda")
    (protocol,) = start.protocols
    true = changed(
        start,
        base_seconds=protocol.base_seconds * base,
        node_latency_seconds=protocol.node_latency_seconds * step,
        network_latency_seconds=protocol.network_latency_seconds * step,
        post_seconds=protocol.post_seconds * step,
        node_efficiency=node,
        network_efficiency=network,
    )
    samples = Samples()
    for kind, ranks, size in issued:
        sample = CollectiveSample(
            kind=kind, ranks=ranks, input_bytes=size, output_bytes=size, seconds=0.0
        )
        samples.collectives.append(
            dataclasses.replace(sample, seconds=collective_seconds(sample, true))
        )
    counted = [sample for sample in samples.collectives if len(sample.ranks) > 1]
    if not counted:
        with pytest.raises(gt.ConfigError, match="no op and no collective"):
            fit(samples, start)
        return
    hardware, *_ = fit(samples, start)
    assert hardware.calibration.samples == len(counted)
    for sample in counted:
        assert collective_seconds(sample, hardware) == pytest.approx(sample.seconds, rel=0.02)


def test_of_several_protocols_the_proportions_stay():
    base = load_hardware("h100-sxm")
    true = dataclasses.replace(base, network_efficiency=0.5, node_efficiency=0.6)
    samples = Samples()
    for ranks in ((0, 1), tuple(range(8)), tuple(range(0, 64, 8)), tuple(range(32))):
        for size in (2**10, 2**17, 2**22, 2**28):
            sample = CollectiveSample(
                kind="all_gather_into_tensor",
                ranks=ranks,
                input_bytes=size,
                output_bytes=size * len(ranks),
                seconds=0.0,
            )
            seconds = collective_seconds(sample, true)
            samples.collectives.append(dataclasses.replace(sample, seconds=seconds))
    hardware, *_ = fit(samples, base)
    assert hardware.calibration.spread < 0.05
    assert hardware.network_efficiency == pytest.approx(0.5, rel=0.1)
    assert [p.name for p in hardware.protocols] == [p.name for p in base.protocols]


def test_what_is_measured_as_such_is_the_median():
    samples = Samples(
        ops=[op(OpKind.MATMUL, 1e6, 1e-3)],
        launches=[3e-6, 1e-6, 2e-6],
        overlaps=[OverlapSample(1.0, 1.0, 1.25), OverlapSample(1.0, 1.0, 0.9)],
        host={"view_seconds": [2e-6]},
    )
    hardware, figures, _ = fit(samples)
    assert hardware.launch_seconds == 2e-6
    assert hardware.collective_compute_share == 0.125
    assert hardware.host.view_seconds == 2e-6
    assert len(samples) == 7 and {f.key for f in figures} >= {"host.view_seconds"}


def test_a_matmul_beyond_the_peak_names_the_profile_to_change():
    samples = Samples([op(OpKind.MATMUL, 1e12, 0.1, model=1.0)])
    with pytest.raises(gt.ConfigError, match=r"times the peak of h100-sxm.*--base"):
        fit(samples, load_hardware("h100-sxm"))


def a_profile(base):
    samples = Samples(
        ops=[
            *(op(OpKind.MATMUL, n, n / 2e8, dtype="bfloat16") for n in (1e6, 1e8)),
            op(OpKind.MEMORY, 1e6, 1e-2, name="aten::cat", count=3),
        ],
        collectives=[
            CollectiveSample(
                kind="all_reduce",
                ranks=(0, 1),
                input_bytes=n,
                output_bytes=n,
                seconds=1e-3 + n / 1e8,
            )
            for n in (0, 10**6)
        ],
        launches=[2e-6],
        host={"view_seconds": [1.5e-6, 1e-6]},
    )
    return calibrated(base, samples, device_name="a CPU", date="2026-01-02", name="mine")


@pytest.mark.parametrize("name", ["cpu", "h100-sxm"])
def test_a_written_profile_is_read_back(tmp_path, name):
    base = load_hardware(name)
    result = a_profile(base)
    hardware, path = result.hardware, tmp_path / "mine.toml"
    path.write_text(profile_to_toml(result, base, "graph-trainer calibrate --measure"))
    back = load_hardware(str(path))
    assert back.calibration == hardware.calibration
    assert len(back.efficiencies) == len(hardware.efficiencies) > 3
    for mine, other in zip(back.efficiencies, hardware.efficiencies, strict=True):
        assert (mine.kind, mine.op, mine.dtype) == (other.kind, other.op, other.dtype)
        assert mine.efficiency == pytest.approx(other.efficiency, rel=1e-3)
    assert back.host.view_seconds == pytest.approx(1.25e-6)
    assert back.peak_flops == base.peak_flops and back.shared_links == base.shared_links
    for mine, other in zip(back.protocols, hardware.protocols, strict=True):
        assert mine.base_seconds == pytest.approx(other.base_seconds, rel=1e-3)
    text = path.read_text()
    assert "view_seconds = 1.25e-06  # measured: 2 samples, spread" in text
    assert "# matmul in bfloat16: measured: 2 samples, spread " in text
    assert "# aten::cat in float32: measured: 1 sample, spread " in text
    assert max(map(len, text.splitlines())) <= 100
    again = calibrated(back, Samples([op(OpKind.ATTENTION, 1e6, 1.0)]), device_name="", date="")
    assert {*back.efficiencies} < {*again.hardware.efficiencies}  # what was not measured again


def test_what_was_not_measured_is_written_as_the_base_has_it(tmp_path):
    """With all of its digits, and without a comment."""
    base = dataclasses.replace(load_hardware("cpu"), memory_gib=191.98712, host_efficiency=0.123456)
    result = a_profile(base)
    nearly = dataclasses.replace(result.hardware, host_efficiency=0.123456 * (1 + 1e-12))
    text = profile_to_toml(result._replace(hardware=nearly), base, "graph-trainer calibrate")
    lines = text.splitlines()
    assert "memory_gib = 191.98712" in lines and "host_efficiency = 0.123456" in lines
    assert f"float32 = {base.peak_flops['float32']:.4g}" in lines
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert load_hardware(str(path)).memory_gib == base.memory_gib


def test_what_several_tables_have_wrong_is_said_once(tmp_path):
    path = tmp_path / "mine.toml"
    entry = '[[efficiencies]]\nkind = "mm"\nsize = 1\nefficiency = 0.5\n'
    path.write_text(known_hardware()["cpu"].read_text() + "\n" + 12 * entry)
    with pytest.raises(gt.ConfigError) as caught:
        load_hardware(str(path))
    (line,) = str(caught.value).splitlines()
    assert "efficiencies, table 1 and 11 more: kind = 'mm': write" in line


def test_a_graph_takes_the_measured_time_of_its_sizes():
    """Twice the efficiency of the kind at one size is half the time there, and nowhere else."""
    plain = machine(device="cpu")
    b = Builder()
    x, w = b.input("x", 4, 4), b.input("w", 64, 64)
    small, large = b.call(aten.mm.default, x, x), b.call(aten.mm.default, w, w)
    added = b.call(aten.add.Tensor, large, large)
    joint = b.joint(b.call(aten.sum.default, added))
    flops = 2 * 64**3
    entry = Efficiency(kind="matmul", size=flops, efficiency=1.0)
    curve = (dataclasses.replace(entry, size=2 * 4**3, efficiency=0.5), entry)
    before, after = (
        costs(joint, plain),
        costs(joint, dataclasses.replace(plain, efficiencies=curve)),
    )
    assert after[large].seconds == pytest.approx(before[large].seconds / 2)
    assert after[small].seconds == before[small].seconds
    assert after[added].seconds == before[added].seconds
    of_op = Efficiency(kind="matmul", size=1.0, efficiency=0.125, op="aten::mm nn", dtype="float32")
    slower = costs(joint, dataclasses.replace(plain, efficiencies=(*curve, of_op)))
    assert slower[large].seconds == pytest.approx(before[large].seconds * 4)


BAD = {
    "a kind": ('kind = "mm"\nsize = 1\nefficiency = 0.5', "kind = 'mm': write matmul, attention"),
    "a missing key": ('kind = "matmul"\nsize = 1', "table 1: efficiency missing"),
    "no size": ('kind = "matmul"\nsize = 0\nefficiency = 1', "size = 0: not a positive"),
    "a dtype": ('kind = "rows"\nsize = 1\nefficiency = 1\ndtype = "bf16"', "'bf16': not a dtype"),
    "an op": ('kind = "rows"\nsize = 1\nefficiency = 1\nop = 1', "op = 1: write a text"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_efficiency_is_named(tmp_path, bad):
    text, words = bad
    path = tmp_path / "mine.toml"
    path.write_text(f"{known_hardware()['cpu'].read_text()}\n[[efficiencies]]\n{text}\n")
    with pytest.raises(gt.ConfigError) as caught:
        load_hardware(str(path))
    assert words in str(caught.value)


def test_a_bad_calibration_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f"{known_hardware()['cpu'].read_text()}\n[calibration]\nsamples = 1.5\n")
    with pytest.raises(gt.ConfigError) as caught:
        load_hardware(str(path))
    for words in ("samples = 1.5: not a whole", "spread, device_name, date, torch missing"):
        assert f"calibration: {words}" in str(caught.value)


def test_a_curve_interpolates_in_the_logarithm_of_the_size():
    entries = tuple(
        Efficiency(kind="memory", size=size, efficiency=e) for size, e in ((100, 0.2), (10000, 0.8))
    )
    curves = Curves(machine(efficiencies=entries))  # whose memory_efficiency is 1
    for size, efficiency in ((1, 0.2), (100, 0.2), (1000, 0.5), (10000, 0.8), (10**9, 0.8)):
        slowdown = curves.slowdown(OpKind.MEMORY, "aten::add", "float32", size)
        assert math.isclose(slowdown, 1 / efficiency)
    assert curves.slowdown(OpKind.MATMUL, "aten::mm nn", "float32", 100) == 1
