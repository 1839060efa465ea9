"""The file of tokens by step, layer and expert: what is read, refused, kept and written."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import graph_trainer as gt
from graph_trainer.titan import routing
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.routing import RoutingRecorder, mixtures_of, read_routing
from tests.unit.graphs import fake_world

MIXTURES = {f"layers.{i}": SimpleNamespace(num_experts=4) for i in (1, 2)}


def document(**changes):
    tokens = [[5, 3, 2, 2], [12, 0, 0, 0]]
    received = [[8, 4], [12, 0]]
    first = {"step": 1, "microbatch": 0, "tokens": tokens, "received": received}
    return {
        "schema": routing.SCHEMA,
        "world_size": 2,
        "expert_parallel_degree": 2,
        "layers": ["layers.1", "layers.2"],
        "microbatches": [first],
    } | changes


def microbatch(**changes):
    return document()["microbatches"][0] | changes


def written(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_routing_is_read(tmp_path):
    found = read_routing(written(tmp_path / "r.json", document()), "--routing", MIXTURES)
    assert found.num_experts == 4 and found.microbatches[0].received == [[8, 4], [12, 0]]
    unknown = [microbatch() | {"received": None}]
    path = written(tmp_path / "r.json", document(microbatches=unknown))
    assert read_routing(path, "--routing", MIXTURES).microbatches[0].received is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Invalid JSON"),
        (document(schema="another/2"), 'schema = "another/2": Input should be'),
        (document(world_size="2"), 'world_size = "2": Input should be a valid integer'),
        (
            document(microbatches=[microbatch(tokens=[[-1, 1, 1, 1], [1, 1, 1, 1]])]),
            "microbatches.0.tokens.0.0 = -1: Input should be greater than or equal to 0",
        ),
        (
            document(microbatches=[microbatch(), microbatch(tokens=[[1, 1, 1, 1]])]),
            "microbatches.1.tokens: it must have 2 layers of 4 numbers",
        ),
        (
            document(microbatches=[microbatch(tokens=[[1, 1, 1, 1], [0, 0, 0, 0]])]),
            "microbatches.0.tokens: a layer has no token",
        ),
        (
            document(microbatches=[microbatch(received=[[8, 4], [12, 1]])]),
            "microbatches.0: tokens and received have different sums in a layer",
        ),
        (
            document(layers=["layers.0", "layers.1"]),
            "layers = layers.0 and layers.1, and the model has experts in layers.1 and layers.2",
        ),
        (
            document(microbatches=[microbatch(tokens=[[1, 1]] * 2, received=None)]),
            "microbatches.0.tokens: 2 experts a layer, and the model has 4",
        ),
    ],
)  # fmt: skip
def test_any_other_file_is_refused(tmp_path, content, said):
    path = written(tmp_path / "r.json", content)
    with pytest.raises(gt.ConfigError) as raised:
        read_routing(path, "--routing", MIXTURES)
    message = str(raised.value)
    assert message.startswith(f"--routing {path}: ") and said in message
    assert message.endswith("Name a file that metrics.save_routing wrote for this model.")


@pytest.mark.parametrize("path", ["none.json", "", "a\0b"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, path):
    with pytest.raises(gt.ConfigError, match="cannot be read: "):
        read_routing(tmp_path / path, "--routing", MIXTURES)


def test_layers_of_every_list_are_named():
    words = ["--module", "graph_trainer.deepseek_v3", "--config", "debugmodel"]
    model = load_config(words).model_spec.model
    assert [*mixtures_of(model)] == [f"layers.{i}" for i in range(1, 6)]
    model.mtp_layers = [model.layers[1]]
    assert [*mixtures_of(model)][-1] == "mtp_layers.0"
    assert mixtures_of(load_config(["--config", "debugmodel"]).model_spec.model) == {}


class Mixture(nn.Module):
    """One layer that counts tokens as torchtitan's does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"1": nn.Module()})
        self.layers["1"].register_buffer("tokens_per_expert_E", torch.zeros(4))


def test_the_most_uneven_microbatches_are_kept_and_written_in_order(tmp_path, monkeypatch):
    fake_world(1)
    monkeypatch.setattr(routing, "_MOST_MICROBATCHES", 3)
    model, path = Mixture(), tmp_path / "new" / "routing.json"
    dims = SimpleNamespace(ep_enabled=False, ep=1, tp=1)
    recorder = RoutingRecorder(model, dims, path)
    recorder.write()
    assert not path.exists()  # there is nothing to say yet
    counts = model.layers["1"].tokens_per_expert_E
    for step, favoured in ((1, 2), (2, 9), (2, 4), (3, 1), (4, 7)):
        with recorder.microbatch(step):
            counts += torch.tensor([favoured, 3.0, 10.0 - favoured, 0])
        if step != 2:
            counts.zero_()  # as the optimizer's hook does
    recorder.write()
    found = json.loads(path.read_text())
    places = [(each["step"], each["microbatch"]) for each in found["microbatches"]]
    assert places == [(1, 0), (2, 0), (3, 0)]
    assert found["microbatches"][1]["tokens"] == [[9, 3, 1, 0]]
    assert found["microbatches"][1]["received"] == [[13]]
    assert [each.name for each in path.parent.iterdir()] == ["routing.json"]


def test_a_resumed_run_goes_on_with_the_file_and_a_new_one_does_not(tmp_path):
    fake_world(1)
    path, dims = tmp_path / "routing.json", SimpleNamespace(ep_enabled=False, ep=1, tp=1)

    def run(*steps):
        model = Mixture()
        recorder = RoutingRecorder(model, dims, path)
        for step in steps:
            with recorder.microbatch(step):
                model.layers["1"].tokens_per_expert_E += torch.tensor([1.0, 0, 0, 2])
        recorder.write()
        return [each["step"] for each in json.loads(path.read_text())["microbatches"]]

    assert run(1, 2, 3) == [1, 2, 3]
    assert run(3, 4) == [1, 2, 3, 4]
    assert run(1) == [1]
    path.write_text("{}")
    assert run(5) == [5]


def test_counts_of_a_buffer_that_nobody_sets_to_zero_stay_exact(tmp_path):
    """float32 cannot count on from 2**24; the buffer is what it would have been."""
    fake_world(1)
    model, dims = Mixture(), SimpleNamespace(ep_enabled=False, ep=1, tp=1)
    counts = model.layers["1"].tokens_per_expert_E
    counts += 2.0**24
    recorder = RoutingRecorder(model, dims, tmp_path / "routing.json")
    with recorder.microbatch(1):
        counts += torch.tensor([1.0, 3, 5, 7])
    ((_, _, kept),) = recorder._kept
    assert kept.tokens == [[1, 3, 5, 7]]
    assert counts.tolist() == (torch.full((4,), 2.0**24) + torch.tensor([1.0, 3, 5, 7])).tolist()


def test_a_disk_that_is_full_ends_no_training(tmp_path, monkeypatch, caplog):
    fake_world(1)
    model, dims = Mixture(), SimpleNamespace(ep_enabled=False, ep=1, tp=1)
    recorder = RoutingRecorder(model, dims, tmp_path / "routing.json")
    with recorder.microbatch(1):
        model.layers["1"].tokens_per_expert_E += 1

    def full(path):
        raise gt.ConfigError(f"{path}: cannot be written (No space left on device)")

    monkeypatch.setattr(routing, "published", full)
    warned = []
    monkeypatch.setattr(routing.logger, "warning", warned.append)
    recorder.write()
    assert "metrics.save_routing" in warned[0] and "No space left" in warned[0]


def test_tensor_parallel_ranks_without_expert_parallelism_count_the_same_tokens(tmp_path):
    fake_world(2)  # whose all-reduces add nothing
    model = Mixture()
    dims = SimpleNamespace(ep_enabled=False, ep=1, tp=2)
    recorder = RoutingRecorder(model, dims, tmp_path / "routing.json")
    with recorder.microbatch(1):
        model.layers["1"].tokens_per_expert_E += torch.tensor([8.0, 0, 2, 0])
    ((_, _, kept),) = recorder._kept
    assert kept.tokens == [[4, 0, 1, 0]] and kept.received == [[10, 0]]


def test_a_resumed_run_compares_with_what_the_file_has(tmp_path, monkeypatch):
    """Both are divided by the ranks that count the same tokens."""
    fake_world(2)
    monkeypatch.setattr(routing, "_MOST_MICROBATCHES", 1)
    path, dims = tmp_path / "routing.json", SimpleNamespace(ep_enabled=False, ep=1, tp=2)
    for step, most in ((1, 8.0), (2, 6.0)):  # the run that ends, and the one that resumes it
        model = Mixture()
        recorder = RoutingRecorder(model, dims, path)
        with recorder.microbatch(step):
            model.layers["1"].tokens_per_expert_E += torch.tensor([most, 10 - most, 0, 0])
        recorder.write()
    (kept,) = json.loads(path.read_text())["microbatches"]
    assert kept["step"] == 1 and kept["tokens"] == [[4, 1, 0, 0]]


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path):
    fake_world(1)
    (tmp_path / "file").write_text("")
    with pytest.raises(gt.ConfigError, match=r"metrics\.save_routing.*cannot be made"):
        RoutingRecorder(Mixture(), SimpleNamespace(), tmp_path / "file" / "routing.json")
