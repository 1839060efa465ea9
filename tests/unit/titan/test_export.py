"""What is exported is what Hugging Face's classes read: the same logits, and the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from graph_trainer.cli.main import main
from graph_trainer.titan.checkpoint_files import SUMS, ManifestWriter, damage
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.serialize import save_resolved_config
from graph_trainer.titan.data.tokenizer import TOKENIZER

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
    folder = tmp_path / "exported"
    assert main(["export", str(checkpoint), "--to", str(folder)]) == 0
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


def test_what_is_no_checkpoint_of_the_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, checkpoint = run_of("graph_trainer.llama3", tmp_path)
    folder = tmp_path / "exported"

    def refused(*words: str) -> str:
        assert main(["export", *words]) == 2
        assert not folder.exists()
        return " ".join(capsys.readouterr().err.split())

    said = refused(str(checkpoint.parent), "--to", str(folder))
    assert f"is no checkpoint: name one of its folders {checkpoint.name}." in said
    assert "name a folder step-N of a run" in refused(str(tmp_path), "--to", str(folder))
    assert "required: checkpoint. `graph-trainer export --help`" in refused("--to", str(folder))
    other = ("--config", "debugmodel", "--module", "graph_trainer.qwen3")
    said = refused(str(checkpoint), "--to", str(folder), *other)
    assert "cannot be loaded: rank 0: " in said
    assert "exists" in refused(str(checkpoint), "--to", str(checkpoint)).replace(str(folder), "")
    (part,) = checkpoint.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    assert "is damaged: __0_0.distcp is truncated" in refused(str(checkpoint), "--to", str(folder))
