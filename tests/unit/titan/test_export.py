"""What is exported is what Hugging Face's classes read: the same logits, and the same tokens."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from graph_trainer.cli.main import main
from graph_trainer.errors import CheckpointError, GraphTrainerError
from graph_trainer.titan.checkpoint_files import HF_INDEX, SUMS, ManifestWriter, damage
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.write_toml import save_resolved_config
from graph_trainer.titan.data.tokenizer import TOKENIZER
from graph_trainer.titan.hugging_face_export import export
from tests.odd_weights import OddAdapter, OddModel, differing, expected

from torchtitan.components.checkpointer.dcp import CheckpointManager  # isort: skip

TEXT = "def f(x):\n    return 'é' + x  # <|begin|>\n"


def run_of(module: str, folder: Path) -> tuple[GraphTrainerConfig, Any, Path]:
    """A config, its model with random weights, and the checkpoint of a run."""
    (folder / "text.txt").write_text(TEXT * 40)
    words = [
        "--module",
        module,
        "--tokenizer.dataset_path",
        str(folder / "text.txt"),
        "--tokenizer.vocab_size",
        "300",
    ]
    loaded = load_config(words)
    assert loaded.model_spec is not None
    torch.manual_seed(5)
    model: Any = loaded.model_spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a mix-up
                parameter.uniform_(0.5, 1.5)
    save_resolved_config(loaded, folder)
    tokenizer = loaded.tokenizer.build(tokenizer_path="")
    tokenizer.save(folder / TOKENIZER)
    checkpoint = folder / "checkpoint" / "step-3"
    state = model.state_dict() | {"step": torch.ones(1)}
    dcp.save(state, storage_writer=ManifestWriter(checkpoint), no_dist=True)
    return loaded, model, checkpoint


@pytest.mark.parametrize("module", ["graph_trainer.llama3", "graph_trainer.qwen3"])
def test_from_pretrained_gives_the_same_logits_and_tokens(
    module: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded, model, checkpoint = run_of(module, tmp_path)
    text = (tmp_path / "text.txt").rename(tmp_path / "elsewhere.txt")  # only training reads it
    folder = tmp_path / "exported"
    assert main(["export", str(checkpoint), "--to", str(folder)]) == 0
    text.rename(tmp_path / "text.txt")
    assert str(folder) in capsys.readouterr().out
    assert "has no effect" not in caplog.text
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer, ours = AutoTokenizer.from_pretrained(folder), loaded.tokenizer.build()
    assert tokenizer(TEXT).input_ids == ours.encode(TEXT, add_bos=True)
    assert tokenizer.decode(tokenizer(TEXT).input_ids, skip_special_tokens=True) == TEXT
    assert tokenizer.eos_token_id == ours.eos_id == theirs.config.eos_token_id
    tokens = torch.tensor([tokenizer(TEXT * 3).input_ids])
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        wanted = model(tokens, positions=positions)
        found = theirs(tokens).logits
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert damage(folder) == []
    files = {line.split()[1] for line in (folder / SUMS).read_text().splitlines() if line[0] != "#"}
    assert files == {path.name for path in folder.iterdir()} - {SUMS}
    weights = folder / "model-00001-of-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert damage(folder) == [
        f"{weights.name} is truncated or changed: its SHA-256 is not that of {SUMS}"
    ]


def test_a_run_with_a_checkpoint_manager_of_the_users_own_is_exported_whole(tmp_path: Path) -> None:
    class OwnManager(CheckpointManager):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(CheckpointManager.Config):
            pass

    config, _, checkpoint = run_of("graph_trainer.llama3", tmp_path)
    config.checkpoint, config.dump_folder = OwnManager.Config(), str(tmp_path)
    export(checkpoint, tmp_path / "exported", config)
    names = {path.name for path in (tmp_path / "exported").iterdir()}
    assert {"config.json", "tokenizer.json", HF_INDEX, SUMS} < names


def test_what_is_no_checkpoint_of_the_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _, checkpoint = run_of("graph_trainer.llama3", tmp_path)
    folder = tmp_path / "exported"

    def refused(*words: str) -> str:
        assert main(["export", *words]) == 2
        assert not folder.exists()
        return " ".join(capsys.readouterr().err.split())

    said = refused(str(checkpoint.parent), "--to", str(folder))
    assert f"is no checkpoint: name {checkpoint}." in said
    said = refused(f"{checkpoint}7", "--to", str(folder))
    assert f"is no checkpoint: name {checkpoint}." in said
    assert "required: --to." in refused(str(checkpoint), "--too", str(folder))
    (tmp_path / "file").touch()
    said = refused(str(checkpoint), "--to", str(tmp_path / "file" / "x"))
    assert "nothing can be written to" in said and "(Not a directory). Name another" in said
    with pytest.raises(GraphTrainerError, match="name another one with --to") as caught:
        export(checkpoint, tmp_path / "file" / "x", config)
    assert "checkpoint.folder" not in str(caught.value)
    assert f"name {checkpoint}." in refused(str(tmp_path), "--to", str(folder))
    assert "name a folder step-N of a run" in refused(str(tmp_path / "x"), "--to", str(folder))
    assert "required: checkpoint. `graph-trainer export --help`" in refused("--to", str(folder))
    other = ("--config", "debugmodel", "--module", "graph_trainer.qwen3")
    said = refused(str(checkpoint), "--to", str(folder), *other)
    assert "cannot be loaded: rank 0: " in said
    assert "It is of another model than --config names" in said
    assert ".." not in said and "load_step" not in said
    assert "exists" in refused(str(checkpoint), "--to", str(checkpoint)).replace(str(folder), "")
    (folder.parent / "done").mkdir()
    (folder.parent / "done" / HF_INDEX).touch()
    assert "is an export already" in refused(str(folder.parent / "done"), "--to", str(folder))
    moved = shutil.copytree(checkpoint, tmp_path / "moved" / "far" / "step-3")
    assert "moved has no config.toml, which says what model" in refused(
        str(moved), "--to", str(folder)
    )
    (part,) = checkpoint.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    said = refused(str(checkpoint), "--to", str(folder))
    assert "is damaged: __0_0.distcp is truncated" in said and said.endswith("Choose another one.")


def test_a_checkpoint_of_more_layers_is_not_exported_shortened(tmp_path: Path) -> None:
    config, _, checkpoint = run_of("graph_trainer.llama3", tmp_path)
    assert config.model_spec is not None
    model: Any = config.model_spec.model
    model.layers.pop()
    more = rf"has layers\.{len(model.layers)}\.\S+ too\. It is of another model than --config"
    with pytest.raises(CheckpointError, match=more):
        export(checkpoint, tmp_path / "exported", config)
    assert not (tmp_path / "exported").exists()


def odd_run(folder: Path) -> tuple[GraphTrainerConfig, OddModel, Path]:
    """A config of an odd model, that model, and its checkpoint."""
    config = load_config(["--checkpoint.export_dtype", "bfloat16"])
    config.hf_assets_path = str(folder / "assets")
    of_odd = {"model": OddModel.Config(), "state_dict_adapter": OddAdapter}
    config.model_spec = dataclasses.replace(config.model_spec, **of_odd)
    model, checkpoint = OddModel(OddModel.Config()), folder / "checkpoint" / "step-3"
    dcp.save(model.state_dict(), storage_writer=ManifestWriter(checkpoint), no_dist=True)
    return config, model, checkpoint


def test_scalars_and_what_is_no_float_arrive_as_they_are_and_tied_weights_once(
    tmp_path: Path,
) -> None:
    config, model, checkpoint = odd_run(tmp_path)
    export(checkpoint, tmp_path / "to", config)
    (file,) = (tmp_path / "to").glob("*.safetensors")
    found, wanted = load_file(file), expected(model.state_dict(), torch.bfloat16)
    assert differing(found, wanted) == []
    assert damage(tmp_path / "to") == []
    index = json.loads((tmp_path / "to" / HF_INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    assert index["weight_map"] == dict.fromkeys(wanted, file.name)


def test_weights_are_in_as_many_files_as_the_index_of_the_assets_says(tmp_path: Path) -> None:
    """It may name weights that the model has not, and need not name all of them."""
    config, model, checkpoint = odd_run(tmp_path)
    there = {"model.scale": 1, "model.steps": 2, "model.gate.bias": 2, "model.head.weight": 3}
    there = {name: f"model-{file}-of-3.safetensors" for name, file in there.items()}
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / HF_INDEX).write_text(json.dumps({"weight_map": there}))
    export(checkpoint, tmp_path / "to", config)
    files = sorted((tmp_path / "to").glob("*.safetensors"))
    first, second = map(load_file, files)
    assert second.keys() == {"model.steps", "model.gate.bias"}
    assert differing(first | second, expected(model.state_dict(), torch.bfloat16)) == []
    index = json.loads((tmp_path / "to" / HF_INDEX).read_text())["weight_map"]
    assert {index[name] for name in second} == {files[1].name}
    assert damage(tmp_path / "to") == []


def test_weights_that_a_run_untied_are_both_exported(tmp_path: Path) -> None:
    config, model, checkpoint = odd_run(tmp_path)
    state = model.state_dict()
    state["head.weight"] = state["head.weight"] + 1
    dcp.save(state, storage_writer=ManifestWriter(checkpoint), no_dist=True)
    export(checkpoint, tmp_path / "to", config)
    (file,) = (tmp_path / "to").glob("*.safetensors")
    wanted = state["head.weight"].bfloat16()
    assert torch.equal(load_file(file)["model.head.weight"], wanted)


class Gate(nn.Linear):
    """Has a state that is no tensor, which a checkpoint holds in parts."""

    def get_extra_state(self) -> dict[str, int]:
        return {"more": 1}


def test_what_safetensors_cannot_hold_is_refused_by_name_unless_the_adapter_drops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model, checkpoint = odd_run(tmp_path)
    monkeypatch.setattr(nn, "Linear", Gate)
    dcp.save(
        OddModel(OddModel.Config()).state_dict(),
        storage_writer=ManifestWriter(checkpoint),
        no_dist=True,
    )
    with pytest.raises(CheckpointError, match=r"cannot hold model\.gate\._extra_state \(dict\)"):
        export(checkpoint, tmp_path / "to", config)
    assert not (tmp_path / "to").exists()
    to_hf = OddAdapter.to_hf

    def tensors_alone(self: OddAdapter, state_dict: dict[str, Any]) -> dict[str, Any]:
        theirs = to_hf(self, state_dict)
        return {name: value for name, value in theirs.items() if "_extra_state" not in name}

    monkeypatch.setattr(OddAdapter, "to_hf", tensors_alone)
    export(checkpoint, tmp_path / "to", config)
