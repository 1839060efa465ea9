"""Hardware profiles: shipped ones, those of users, and messages about bad ones."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import graph_trainer as gt
from graph_trainer.core.simulation.hardware import Protocol, known_hardware, load_hardware
from tests.unit.core.simulation.machines import machine

SHIPPED = sorted(known_hardware())


def test_the_profiles_that_come_along():
    page = (Path(__file__).resolve().parents[4] / "docs/reading_a_plan.md").read_text()
    assert SHIPPED and not [name for name in SHIPPED if f"`{name}`" not in page]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_is_read_and_its_parts_fit_together(name):
    hardware = load_hardware(name)
    assert hardware.name == name
    assert 0 <= hardware.reserved_bytes < hardware.memory_bytes
    assert {"bfloat16", "float16"} <= hardware.peak_flops.keys()
    assert hardware.flops(torch.bfloat16) >= hardware.flops(torch.float32)
    assert hardware.network_bytes_per_second <= hardware.node_bytes_per_second
    for protocol in hardware.protocols:
        assert protocol.node_latency_seconds <= protocol.network_latency_seconds
    assert 0.5 < hardware.clock <= 1
    assert (hardware.compute_units > 1) == (hardware.device == "cuda")


@pytest.mark.parametrize("name", SHIPPED)
def test_each_protocol_is_the_fastest_for_some_size(name):
    """Of two protocols, the one with less bandwidth has less latency."""
    protocols = sorted(load_hardware(name).protocols, key=lambda entry: entry.bandwidth_share)
    latencies = [entry.base_seconds + 7 * entry.node_latency_seconds for entry in protocols]
    assert latencies == sorted(set(latencies))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_constant_names_its_source(name):
    lines = known_hardware()[name].read_text().splitlines()
    constants = [place for place, line in enumerate(lines) if re.match(r"[a-z_0-9]+ = ", line)]
    assert len(constants) > 15
    for place in constants[1:]:  # the first is the kind of device
        beside = lines[place].partition(" # ")[2]
        above = lines[place - 1] if lines[place - 1].startswith("# ") else ""
        assert beside or above, lines[place]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_source_that_is_referred_to_is_given(name):
    text = known_hardware()[name].read_text()
    tags = {*re.findall(r"\[([a-z0-9-]+)\b[^\]=]*\]", text)}
    for tag in tags - {"peak_flops", "host", "protocols"}:
        assert re.search(rf"^# \[{tag}\] ", text, re.M), tag


def test_the_capped_machine_is_slower_only_at_what_the_clock_bounds():
    capped, full = load_hardware("h100-grand-teton"), load_hardware("h100-sxm")
    assert capped.flops(torch.bfloat16) == full.flops(torch.bfloat16)
    assert capped.clock < full.clock == 1


def test_dynamic_power_goes_with_the_third_power_of_the_clock():
    limits = (20, 40, 60, 90, 100)
    clocks = [machine(power_limit_watts=limit).clock for limit in limits]
    assert clocks == sorted(clocks) and clocks[-1] == 1.0
    for limit, clock in zip(limits, clocks, strict=True):
        assert 10 + clock**3 * (100 - 10) == pytest.approx(limit)


def test_a_dtype_that_the_profile_does_not_name_counts_as_float32():
    hardware = machine()
    assert hardware.flops(torch.bfloat16) == 4e9
    assert hardware.flops(torch.float64) == hardware.flops(torch.float32) == 1e9


def test_a_datasheets_peak_and_the_full_chips_with_a_limit_are_near_each_other():
    """An H100 PCIe by its own peak, and as the SXM's chip at 350 W with 114 of 132 units."""
    own, chip = load_hardware("h100-pcie"), load_hardware("h100-sxm")
    limited = dataclasses.replace(chip, power_limit_watts=350).clock * 114 / 132
    of_chip = chip.flops(torch.bfloat16) * chip.matmul_efficiency * limited
    of_own = own.flops(torch.bfloat16) * own.matmul_efficiency * own.clock
    assert of_own == pytest.approx(of_chip, rel=0.02)


def profile(folder, key, value):
    """Write a shipped profile with one line replaced, or left out where `value` is None."""
    line = "" if value is None else f"{key} = {value}"
    text = known_hardware()["h100-sxm"].read_text()
    text, count = re.subn(rf"^{key} = .*$", line, text, flags=re.M)
    assert count == 1
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_users_profile_is_named_by_its_path(tmp_path):
    hardware = load_hardware(profile(tmp_path, "memory_gib", "40"))
    assert (hardware.name, hardware.memory_gib) == ("mine", 40)


BAD_VALUES = {
    "text for a number": ("memory_gib", '"80"', "'80'"),
    "nothing": ("memory_gib", "0", "positive"),
    "no number": ("memory_bytes_per_second", "nan", "nan"),
    "more than the peak": ("matmul_efficiency", "1.1", "between 0 and 1"),
    "half a unit": ("compute_units", "1.5", "not a whole number"),
    "no unit": ("compute_units", "0", "positive"),
    "an unknown device": ("device", '"tpu"', '"cuda" or "cpu"'),
    "more reserved than there is": ("memory_reserved_gib", "200", "leaves nothing"),
    "a key like another": ("memory_gib", "80\nmemory_gb = 80", "'memory_gb': did you mean '"),
    "a missing key": ("network_efficiency", None, "network_efficiency missing"),
    "a limit above the power of the peak": (
        "power_limit_watts",
        "750",
        "above power_watts = 700, at which peak_flops and the efficiencies hold",
    ),
    "a link that there is not": ("shared_links", '["pcie"]', "node, network, host"),
    "no list of links": ("shared_links", '"host"', "node, network, host"),
    "a peak of no dtype": (
        "bfloat16",
        "1\nbf16 = 1",
        "peak_flops.bf16: not a dtype of torch; did",
    ),
}


@pytest.mark.parametrize("bad", BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_bad_value_is_named_with_file_and_key(tmp_path, bad):
    key, value, words = bad
    path = profile(tmp_path, key, value)
    with pytest.raises(gt.ConfigError) as caught:
        load_hardware(path)
    for part in (path, key, words):
        assert part in str(caught.value)


def test_a_misspelt_key_is_one_line(tmp_path):
    path = profile(tmp_path, "network_efficiency", None)
    text = Path(path).read_text()
    Path(path).write_text(f"network_eficiency = 0.5\n{text}")
    with pytest.raises(gt.ConfigError) as caught:
        load_hardware(path)
    (line,) = str(caught.value).splitlines()
    assert "unknown key 'network_eficiency': did you mean 'network_efficiency'?" in line


PROTOCOL = """[[protocols]]
name = "mine"
base_seconds = 1e-5
node_latency_seconds = 1e-6
network_latency_seconds = 5e-6
"""
BAD_PROTOCOLS = {
    "none": ("protocols = []", "protocols = []"),
    "no table": ("protocols = [1]", "protocols = [1]"),
    "a missing key": (PROTOCOL.replace("base_", "# "), "table 1: base_seconds missing"),
    "in the second": (
        f"{PROTOCOL}\n{PROTOCOL}latency_seconds = 1",
        "table 2: unknown key 'latency_seconds'",
    ),
    "a wrong value": (PROTOCOL + "bandwidth_share = 1.5", "table 1: bandwidth_share = 1.5"),
    "a name": (PROTOCOL.replace('"mine"', "1"), "table 1: name = 1"),
    "half a tree": (PROTOCOL + "tree_latency_seconds = 1e-6", "write both or none"),
    "no yes or no": (PROTOCOL + "sends_pairs = 1", "sends_pairs = 1: write true or false"),
    "none for pairs": (PROTOCOL + "sends_pairs = false", "none for an all-to-all"),
}


@pytest.mark.parametrize("bad", BAD_PROTOCOLS.values(), ids=BAD_PROTOCOLS)
def test_a_bad_protocol_is_named(tmp_path, bad):
    text, words = bad
    others = known_hardware()["h100-sxm"].read_text().partition("[[protocols]]")[0]
    top, _, peaks = others.partition("[peak_flops]")
    inline, tables = (text, "") if text.startswith("protocols") else ("", text)
    path = tmp_path / "mine.toml"
    path.write_text(f"{top}\n{inline}\n[peak_flops]{peaks}\n{tables}")
    with pytest.raises(gt.ConfigError) as caught:
        load_hardware(str(path))
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_a_protocol_needs_few_keys(tmp_path):
    path = tmp_path / "mine.toml"
    text = known_hardware()["h100-sxm"].read_text().partition("[[protocols]]")[0]
    path.write_text(text + PROTOCOL)
    assert load_hardware(str(path)).protocols == (
        Protocol(
            name="mine",
            base_seconds=1e-5,
            node_latency_seconds=1e-6,
            network_latency_seconds=5e-6,
        ),
    )


def test_all_mistakes_of_a_profile_are_said_at_once(tmp_path):
    path = profile(tmp_path, "memory_gib", "-80\nmemory_gb = 80\nzzz = 80")
    text = Path(path).read_text().replace("cuda", "tpu").replace("bfloat16", "bf16")
    Path(path).write_text("\n".join(each for each in text.split("\n") if "host_eff" not in each))
    with pytest.raises(gt.ConfigError) as caught:
        load_hardware(path)
    lines = str(caught.value).split("\n")
    assert all(line.startswith(f"--hardware {path}: ") for line in lines)
    said = [
        "-80: not",
        "'memory_gb': did",
        "'zzz': leave",
        "'tpu'",
        "flops.bf16: not",
        "host_efficiency",
    ]
    assert [sum(words in line for line in lines) for words in said] == [1] * len(lines)


@pytest.mark.parametrize("key", ["launch_seconds", "memory_latency_seconds", "compute_capability"])
def test_zero_is_allowed_where_something_can_take_no_time_or_be_missing(tmp_path, key):
    assert getattr(load_hardware(profile(tmp_path, key, "0")), key) == 0


def test_a_file_that_is_no_profile(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    values = known_hardware()["h100-sxm"].read_bytes().partition(b"[peak_flops]")[0]
    for name, content, found in (
        ("a.toml", b"memory = = 1", "a.toml: cannot be read: .*line 1, column 10"),
        ("a.toml", b"a = 1\nlist = [1", "a.toml: cannot be read: .*line 2|end of document"),
        ("b.toml", b"\xff\xfe\x00", "b.toml: cannot be read: .*utf-8"),
        ("c.toml", b"peak_flops = 1\n" + values, "peak_flops = 1.* a table of FLOP/s by dtype"),
        ("d.toml", b"[training]\nsteps = 1", "d.toml: it has none of the keys of a .* --config"),
        ("none.toml", None, "cannot be read: No such file"),
        ("folder.toml", None, "cannot be read: Is a directory"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(gt.ConfigError, match=found):
            load_hardware(str(tmp_path / name))


def test_an_unknown_profile_is_shown_with_the_nearest_and_all():
    with pytest.raises(gt.ConfigError) as caught:
        load_hardware("h100-sxn")
    assert "did you mean 'h100-sxm'?" in str(caught.value)
    assert all(name in str(caught.value) for name in SHIPPED)
    with pytest.raises(gt.ConfigError, match="there is no such profile; Known profiles: a100"):
        load_hardware("zzzzzz")


def test_the_slowest_of_many_devices_is_the_mean_of_the_least_of_many_draws():
    hardware = machine(speed_spread=0.02)
    generator = torch.Generator().manual_seed(0)
    assert hardware.slowest_of(1) == 1
    for count in (2, 8, 128):
        draws = torch.randn(20_000, count, generator=generator)
        drawn = 1 + 0.02 * draws.amax(dim=1).mean().item()
        # the approximation is within 0.03 standard deviations, and the draws within 0.01
        assert hardware.slowest_of(count) == pytest.approx(drawn, abs=0.02 * 0.04)
