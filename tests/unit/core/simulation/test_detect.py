"""The profile of the machine that is there, and ranks that agree on it."""

import dataclasses

import pytest
import torch

import graph_trainer as gt
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.base import Pass, Stage
from graph_trainer.core.simulation import detect
from graph_trainer.core.simulation.detect import HARDWARE, detect_for, detect_hardware
from graph_trainer.core.simulation.hardware import known_hardware, load_hardware
from tests.unit.core.simulation.machines import has
from tests.unit.fake_ranks import Agreed
from tests.unit.graphs import captured_decoder, hungry


@pytest.mark.parametrize(
    "name, gib, profile",
    [
        ("NVIDIA A100-SXM4-80GB", 79.25, "a100-80g"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm"),
        ("NVIDIA H100", 95.04, "h100-grand-teton"),  # as torchtitan's published logs have it
        ("NVIDIA H200", 139.8, "h200-sxm"),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g"),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie"),
        ("AMD Instinct MI300X", 191.98, "mi300x"),
    ],
)
def test_a_gpu_with_a_profile(monkeypatch, name, gib, profile):
    has(monkeypatch, name, gib)
    found = detect_hardware()
    assert found.exact and found.hardware.name == profile and found.why.startswith(profile)
    assert name in found.why


@pytest.mark.parametrize(
    "name, gib, capability, profile",
    [
        ("NVIDIA A100-PCIE-40GB", 39.4, (8, 0), "a100-40g"),
        ("NVIDIA A100 80GB PCIe", 79.3, (8, 0), "a100-80g"),
        ("NVIDIA H100 NVL", 93.1, (9, 0), "h100-grand-teton"),
        ("NVIDIA H200 NVL", 139.8, (9, 0), "h200-sxm"),
        ("NVIDIA GH200 480GB", 94.5, (9, 0), "h100-sxm"),
        ("NVIDIA L40S", 44.4, (8, 9), "a100-80g"),
        ("Tesla V100-SXM2-16GB", 15.8, (7, 0), "a100-80g"),
        ("NVIDIA GB300", 277.0, (10, 3), "b200"),
        ("NVIDIA GeForce RTX 5090", 31.4, (12, 0), "b200"),
    ],
)
def test_any_other_gpu_gets_one_with_a_reason(monkeypatch, name, gib, capability, profile):
    has(monkeypatch, name, gib, *capability)
    found = detect_hardware()
    assert not found.exact and found.hardware.name == profile
    for words in (f"{profile} in place of {name}", HARDWARE, *known_hardware()):
        assert words in found.why


def test_another_gpu_of_amd_gets_that_of_amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    has(monkeypatch, "AMD Instinct MI355X", 287.98, 9, 5)
    found = detect_hardware()
    assert not found.exact and found.hardware.name == "mi300x"


@pytest.mark.parametrize("name", ["AMD Instinct MI300X", "NVIDIA L40S"])
def test_a_letter_after_the_number_belongs_to_the_name(monkeypatch, name):
    own = name.split()[-1].lower()
    profile = dataclasses.replace(load_hardware("h100-sxm"), name=own)
    monkeypatch.setattr(detect, "known_hardware", lambda: {own: None, own[:-1]: None})
    monkeypatch.setattr(
        detect, "load_hardware", lambda each, key: dataclasses.replace(profile, name=each)
    )
    has(monkeypatch, name, profile.memory_gib)
    found = detect.detect_hardware()
    assert found.exact and found.hardware.name == own


def test_what_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in (None, torch.device("cpu"), torch.device("meta")):
        found = detect_hardware(device)
        assert found.exact and found.hardware.name == "cpu"
    found = detect_hardware(torch.device("xpu"))
    assert not found.exact and found.why.startswith("cpu in place of a device of type 'xpu'")
    assert not detect_hardware(torch.device("cuda")).exact


def test_a_step_on_cpu_of_a_machine_with_a_gpu(monkeypatch):
    has(monkeypatch, "NVIDIA H200", 139.8)
    assert detect_for(captured_decoder()).hardware.name == "cpu"


def simulating(seen):
    """A pass that decides by simulation, and needs room."""

    def run(joint, options, context):
        seen.append(context.hardware)
        hungry(10)(joint)

    always = {"needs_hardware": lambda options, settings: True}
    return Pass("simulating", Stage.SCHEDULE, "for a test", run, **always)


def test_a_pass_gets_the_machine_and_the_report_says_which():
    seen, joint = [], captured_decoder()
    without = copy_graph(joint)
    report = gt.run_passes(joint, gt.PassConfig(passes=[simulating(seen)]))
    assert [each.name for each in seen] == ["cpu"]
    assert report.notes() == ["simulating: simulated on cpu, as the step runs on CPU"]
    named = gt.PassConfig(passes=[simulating(seen)], hardware=seen[0])
    assert gt.run_passes(without, named).notes() == []


@pytest.mark.parametrize("mine", ["a100-80g", "h100-sxm"])
def test_ranks_on_unlike_devices_are_refused(monkeypatch, mine):
    joint = captured_decoder()
    has(monkeypatch, *{"a100-80g": ("A100", 79.2), "h100-sxm": ("H100", 79.1)}[mine])
    monkeypatch.setattr(
        "graph_trainer.core.passes.context.detect_for", lambda joint: detect_hardware()
    )
    places = [list(known_hardware()).index(name) for name in ("a100-80g", "h100-sxm")]

    answers = iter([max(places), max(-place for place in places)])
    words = f"{HARDWARE} is unset .* different devices.*a100-80g and h100-sxm.*this rank: {mine}"
    with pytest.raises(gt.PassError, match=words):
        config = gt.PassConfig(passes=[simulating([])])
        gt.run_passes(joint, config, agreement=Agreed(lambda number: next(answers)))
