"""One key names the text of training, validation and tokenizer; each may have another."""

from pathlib import Path

import datasets
import pytest

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import with_text_of_training
from graph_trainer.titan.config.write_toml import config_to_toml


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "mine.txt").write_text("some text of my own")
    return str(tmp_path / "mine.txt")


def texts(*flags: str) -> list[tuple[str | None, str | None]]:
    config = with_text_of_training(load_config([*flags, "--validator.enable"]))
    sections = (config.dataloader, config.validator.dataloader, config.tokenizer)
    return [(each.dataset, each.dataset_path) for each in sections]


def test_the_path_of_the_training_data_is_that_of_all_three(text: str) -> None:
    assert texts("--dataloader.dataset_path", text) == [(None, text)] * 3
    assert texts() == [(None, None)] * 3  # the standard library


def test_each_may_differ_when_said(text: str) -> None:
    mine = ("--dataloader.dataset_path", text)
    standard = ("stdlib", None)
    validates_on_another = texts(*mine, "--validator.dataloader.dataset", "stdlib")
    assert validates_on_another == [(None, text), standard, (None, text)]
    other = texts("--tokenizer.dataset_path", text, "--tokenizer.vocab_size", "300")
    assert other == [(None, None), (None, None), (None, text)]


def test_validation_takes_the_part_that_is_kept_for_it(text: str) -> None:
    config = with_text_of_training(load_config(["--dataloader.dataset_path", text]))
    assert (config.dataloader.split, config.validator.dataloader.split) == ("train", "validation")


def test_a_saved_config_can_be_given_another_text(text: str, tmp_path: Path) -> None:
    saved = tmp_path / "config.toml"
    saved.write_text(config_to_toml(load_config(["--dataloader.dataset_path", text])))
    other = str(Path(text).rename(tmp_path / "other.txt"))
    found = texts("--config", str(saved), "--dataloader.dataset_path", other)
    assert found == [(None, other)] * 3


def test_a_tokenizer_beside_other_data_says_what_it_is_trained_on(text: str) -> None:
    """Torchtitan's datasets are no text that one could be trained on."""
    other = ("--dataloader.type", "huggingface", "--dataloader.dataset", "c4_test")
    with pytest.raises(ConfigError, match=r"tokenizer.dataset.*no text that a tokenizer could"):
        load_config(other)
    for said in (("--tokenizer.dataset", "stdlib"), ("--tokenizer.dataset_path", text)):
        load_config([*other, *said])


def test_a_dataset_of_torchtitans_has_a_document_for_each_data_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "three.jsonl").write_text("".join(['{"text": "some words"}\n'] * 3))
    flags = ["--tokenizer.dataset", "stdlib", "--dataloader.type", "huggingface"]
    flags += ["--dataloader.dataset_path", str(tmp_path / "text")]
    load_config(flags, world_size=3)
    load_config([*flags, "--parallelism.tensor_parallel_degree", "2"], world_size=4)
    with pytest.raises(ConfigError, match="dataloader.dataset_path.* 3 documents for 4 data"):
        load_config(flags, world_size=4)
    validates = [flag.replace("--data", "--validator.data") for flag in flags[2:]]
    with pytest.raises(ConfigError, match="validator.dataloader.dataset_path.* 3 documents for 4"):
        load_config([*validates, "--validator.enable"], world_size=4)
    (tmp_path / "text" / "three.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="dataloader.dataset_path.*cannot be read.*another path"):
        load_config(flags, world_size=2)
