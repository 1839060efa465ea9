"""Hardware profiles: shipped ones, those of users, and messages about bad ones."""

import re
from pathlib import Path

import pytest
import torch

import graph_trainer as gt
from graph_trainer.core.simulation.hardware import known_hardware, load_hardware
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
    assert hardware.node_latency_seconds <= hardware.network_latency_seconds
    assert 0.5 < hardware.clock <= 1
    assert (hardware.compute_units > 1) == (hardware.device == "cuda")


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
    for tag in set(re.findall(r"\[([a-z0-9-]+)\b[^\]=]*\]", text)) - {"peak_flops"}:
        assert re.search(rf"^# \[{tag}\] ", text, re.M), tag


def test_the_capped_machine_is_slower_only_at_what_the_clock_bounds():
    capped, full = load_hardware("h100-grand-teton"), load_hardware("h100-sxm")
    assert capped.flops(torch.bfloat16) == full.flops(torch.bfloat16)
    assert capped.clock < full.clock == 1


def test_dynamic_power_goes_with_the_third_power_of_the_clock():
    clocks = [machine(power_limit_watts=limit).clock for limit in (20, 40, 60, 90, 100, 150)]
    assert clocks == sorted(clocks) and clocks[-1] == clocks[-2] == 1.0
    for limit, clock in zip((20, 40, 60, 90), clocks, strict=False):
        assert 10 + clock**3 * (100 - 10) == pytest.approx(limit)


def test_a_dtype_that_the_profile_does_not_name_counts_as_float32():
    hardware = machine()
    assert hardware.flops(torch.bfloat16) == 4e9
    assert hardware.flops(torch.float64) == hardware.flops(torch.float32) == 1e9


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
    "a missing key": ("link_efficiency", None, "link_efficiency missing"),
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


def test_all_mistakes_of_a_profile_are_said_at_once(tmp_path):
    path = profile(tmp_path, "memory_gib", "-80\nmemory_gb = 80\nzzz = 80")
    text = Path(path).read_text().replace("cuda", "tpu").replace("bfloat16", "bf16")
    Path(path).write_text("\n".join(each for each in text.split("\n") if "link_eff" not in each))
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
        "link_efficiency",
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
