"""Models of transformers as torchtitan's trainer gets them, on fake ranks and without any."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

import graph_trainer as gt
from graph_trainer.cli import main as cli
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import block_of, module_of
from graph_trainer.core.sharding.simple_fsdp import shard_of
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.errors import ConfigError
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.plan import make_plan
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.write_toml import config_to_toml
from graph_trainer.titan.training_state_memory import trained_bytes
from tests.integration.matrix import arguments
from tests.tiny_transformers import FAMILIES, config_of, flags_of, folder_of

RANKS = 4
SHORT = ["--training.seq_len", "16", "--training.local_batch_size", "2"]


def loaded(path, *more, ranks=RANKS):
    return load_config([*arguments(flags_of(path)), *SHORT, *more], world_size=ranks)


def initialized(model):
    """A model on meta made real, as the trainer does it."""
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def unsharded(path):
    model = loaded(path).model_spec.model
    model.read()
    with torch.device("meta"):
        built = model.build()
    return initialized(built)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_captured_and_every_weight_is_gathered_and_reduced(family, tmp_path):
    rank = FakeRank(loaded(folder_of(family, tmp_path)), RANKS, device="cpu")
    joint = rank.capture()
    gt.run_passes(joint, rank.pass_config())
    found = collectives(joint)
    for role in ("unshard", "reduce_grad"):
        names = {name for c in found if c.role == role for name in c.parameters}
        assert names == {name for name, _ in rank.model.named_parameters()}
    blocks = {block_of(module_of(node)) for node in joint.graph.nodes} - {None}
    assert {name.rpartition(".")[2] for name in blocks} == {"0", "1"}
    total = sum(p.numel() for p in rank.model.parameters())
    assert rank.num_parameters == total and rank.flops_per_token.causal > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_and_buffers_are_the_same_on_any_mesh(family, tmp_path):
    path = folder_of(family, tmp_path)
    sharded = initialized(FakeRank(loaded(path), RANKS, rank=1, device="cpu").model).state_dict()
    whole = unsharded(path)
    for name, expected in whole.state_dict().items():
        found = sharded[name]
        if isinstance(found, DTensor):
            expected, found = shard_of(expected, found), found.to_local()
        assert torch.equal(found, expected), name
    from transformers import AutoModelForCausalLM

    library = AutoModelForCausalLM.from_config(config_of(family))
    buffers = dict(whole.causal_lm.named_buffers())
    assert buffers.keys() == dict(library.named_buffers()).keys()
    for name, expected in library.named_buffers():
        assert torch.equal(buffers[name], expected), name


def test_the_row_of_padding_is_zero_in_its_shard(tmp_path):
    path = folder_of("llama", tmp_path)
    model = initialized(FakeRank(loaded(path), RANKS, rank=0, device="cpu").model)
    rows = dict(model.named_parameters())["causal_lm.model.embed_tokens.weight"].to_local()
    assert torch.nonzero(rows.abs().sum(1) == 0).flatten().tolist() == [3]


@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_folders_weights_logits_are_the_librarys(family, tmp_path):
    from transformers import AutoModelForCausalLM

    path = folder_of(family, tmp_path, weights=True)
    tokens = torch.randint(2048, (2, 16))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path).eval()(tokens, use_cache=False)
        ours = unsharded(path).eval()
        found = ours(tokens, positions=torch.arange(16).expand(2, -1))
        assert torch.equal(found, expected.logits)
        # causal over the row, wherever positions start anew: at 7 and 14
        anew = torch.arange(16).remainder(7).expand(2, -1)
        before = ours(tokens, positions=anew)
        assert torch.allclose(before[:, 9:], found[:, 9:]) != ours.takes_positions
        for changed, first in ((9, 9), (5, 8)):  # the second is of an earlier document
            other = tokens.clone()
            other[:, changed] = (other[:, changed] + 1) % 2048
            after = ours(other, positions=anew)
            torch.testing.assert_close(before[:, :changed], after[:, :changed])
            assert not torch.allclose(before[:, first], after[:, first])


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "mamba"])
def test_a_rank_reads_its_part_of_the_folders_weights(family, tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    path = folder_of(family, tmp_path, weights=True)
    expected = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    weights = load_file(path / "model.safetensors")
    # as the hub has GPT-2: without the name of the model below the head
    bare = {name.removeprefix("transformer."): value for name, value in weights.items()}
    save_file(bare, path / "model.safetensors", metadata={"format": "pt"})
    # of another model, and not what from_pretrained reads
    left = {name: torch.full_like(value, 9.0) for name, value in bare.items()}
    save_file(left, path / "z_left_over.safetensors")
    rank = FakeRank(loaded(path), RANKS, rank=2, device="cpu")
    with patch.object(torch.Tensor, "normal_", side_effect=AssertionError("drawn in vain")):
        model = initialized(rank.model)
    parameters = dict(model.named_parameters())
    assert len(parameters) == len(expected)
    for name, whole in expected.items():
        local = parameters[f"causal_lm.{name}"]
        assert torch.equal(local.to_local(), shard_of(whole, local)), name


def test_weights_that_do_not_fit_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    path = folder_of("llama", tmp_path, weights=True)
    file = path / "model.safetensors"
    weights = load_file(file)
    name = "model.norm.weight"
    for changed, said in (
        (
            {n: w for n, w in weights.items() if n != name},
            f"lack 1 of the model's weights, .*: {name}",
        ),
        (weights | {name: torch.ones(5)}, r"another shape: model.norm.weight is to be \[32\]"),
    ):
        save_file(changed, file)
        with pytest.raises(ConfigError, match=f'model.path = "{path}": .*{said}'):
            loaded(path)
    file.write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match=r"cannot be read \(.*\). Copy them again"):
        loaded(path)
    file.rename(path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"it has adapter_model.safetensors, but neither"):
        loaded(path)
    (path / "adapter_model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="which are not read. Load the folder with from_pretr"):
        loaded(path)


def test_quantized_weights_are_refused(tmp_path):
    path = folder_of("llama", tmp_path, weights=True)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"are quantized, .* dequantize=True"):
        loaded(path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "gpt_neox"])
def test_an_export_has_each_weight_once_and_goes_back(family, tmp_path):
    from safetensors.torch import load_file

    path = folder_of(family, tmp_path, weights=True)
    config = loaded(path)
    adapter = config.model_spec.state_dict_adapter(config.model_spec.model, None)
    model = unsharded(path)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    exported = adapter.to_hf(state)
    tied = {"lm_head.weight"} if family == "qwen2" else set()
    assert {f"causal_lm.{n}" for n in exported.keys() | tied} == state.keys()
    assert exported.keys().isdisjoint(tied)
    back = adapter.from_hf(exported)
    assert back.keys() == state.keys() and all(torch.equal(back[n], state[n]) for n in state)
    # the file is as the hub has it
    files, folder = adapter.whole_to_hf(exported), load_file(path / "model.safetensors")
    assert files.keys() == folder.keys() and all(torch.equal(files[n], folder[n]) for n in files)
    for value in model.state_dict().values():
        value.zero_()
    adapter.read_hf(path, model.state_dict())
    assert all(torch.equal(value, state[n]) for n, value in model.state_dict().items())


def test_eager_checkpointing_wraps_the_blocks(tmp_path):
    flags = ["--compile.mode", "eager", "--activation_checkpoint.type", "full"]
    rank = FakeRank(loaded(folder_of("gpt2", tmp_path), *flags), RANKS, device="cpu")
    assert [type(block).__name__ for block in rank.model.layers] == ["CheckpointWrapper"] * 2


@pytest.mark.parametrize("flags", [(), ("--activation_checkpoint.type", "full")])
def test_a_plan_for_gpus(flags, tmp_path):
    config = loaded(folder_of("mistral", tmp_path), *flags, ranks=8)
    plan = make_plan(config, 8, load_hardware("h100-sxm"), every_pass=False)
    local = [p.to_local().numel() for p in FakeRank(config, 8).model.parameters()]
    assert trained_bytes(plan.simulation.joint) == sum(local) * 4
    assert plan.step_seconds > 0 and plan.simulation.memory.peak_bytes > 0


def test_the_command_plans_a_local_folder(capsys, tmp_path):
    path = folder_of("llama", tmp_path, weights=True)
    words = [*arguments(flags_of(path)), "--training.seq_len", "16", "--hardware", "h100-sxm"]
    assert cli.main(["plan", *words, "--world-size", "8"]) == 0
    said = capsys.readouterr().out
    assert "causal_lm.lm_head.weight" in said and "tokens/s/GPU" in said


def test_the_shipped_config_comes_back_from_its_resolved_file(tmp_path):
    config = load_config(["--module", "transformers", "--config", "debugmodel"], world_size=2)
    assert (config.base, config.model_spec.flavor) == ("causal_lm", "debugmodel")
    path = tmp_path / "resolved.toml"
    path.write_text(config_to_toml(config))
    again = load_config(["--config", str(path)])
    assert again.model == config.model and again.training == config.training


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model.path=", 'model.path = "": it names no model. Name a folder'),
        ("--model.path {empty}", "has no config.json. Name a folder"),
        ("--model.path no/such", 'model.path = "no/such": transformers finds no config there'),
        ("--model.path ./such", 'model.path = "./such": there is no such folder. Name a folder'),
        ("--model.path {empty}/such", "there is no such folder. Name a folder"),
        ("--model.path ~/such", "there is no such folder; ~ is not read as your home. Name"),
        (
            "--model.path bert",
            'model.path = "bert": with this config BertLMHeadModel sees the tokens that it is to '
            "predict. Set is_decoder",
        ),
        ("--model.path t5", "a t5 model is no AutoModelForCausalLM"),
        ("--model.path gpt2 --training.seq_len 2048", "longer than the 1024 positions of"),
        ("--tokenizer.vocab_size 4096", "larger than the model's vocabulary of 2048"),
        ("--model.pth x", "Did you mean model.path?"),
        (
            "--parallelism.tensor_parallel_degree 2",
            "parallelism.tensor_parallel_degree = 2: this model, no decoder of torchtitan's, takes "
            "data parallelism alone. Set parallelism.tensor_parallel_degree = 1",
        ),
        ("--parallelism.context_parallel_degree 2", "context_parallel_degree = 2: "),
        ("--parallelism.expert_parallel_degree 2", "expert_parallel_degree = 2: "),
        ("--parallelism.pipeline_parallel_degree 2", "pipeline_parallel_degree = 2: "),
    ],
)
def test_what_cannot_train_is_refused(words, said, tmp_path):
    argv = ["--module", "graph_trainer.transformers", *words.format(empty=tmp_path).split()]
    with pytest.raises(ConfigError) as caught:
        load_config(argv, world_size=2)
    assert said in str(caught.value)


def test_without_the_library_there_is_one_line(tmp_path, fresh):
    program = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
from graph_trainer.titan.config.load import load_config
from graph_trainer.errors import ConfigError
try:
    load_config(["--module", "graph_trainer.transformers"])
except ConfigError as error:
    print(error)
"""
    done = fresh("-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert "pip install 'graph_trainer[transformers]'" in line and "model.path" in line
