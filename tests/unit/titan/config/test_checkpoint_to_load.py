"""A checkpoint that is not there is refused before any rank starts."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from graph_trainer.cli.export_command import main as export_main
from graph_trainer.cli.launcher import prepare
from graph_trainer.cli.main import main
from graph_trainer.errors import ConfigError
from graph_trainer.titan.checkpoint_reader import METADATA
from graph_trainer.titan.config.check import check_config
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.write_toml import save_resolved_config
from graph_trainer.titan.hugging_face_export import export


@pytest.fixture
def load(tmp_path: Path):
    """Load a config whose dump folder is tmp_path/run, with these keys of [checkpoint]."""

    def load(**keys: object) -> None:
        flags = ["--checkpoint.enable", "--dump_folder", str(tmp_path / "run")]
        for key, value in keys.items():
            flags += [f"--checkpoint.{key}", str(value).lower() if value is True else str(value)]
        load_config(flags, reads_checkpoint=True)

    return load


def save(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / f"step-{step}").mkdir(parents=True)
        (folder / f"step-{step}" / METADATA).touch()
    return folder


def weights(layers: int = 6) -> dict[str, torch.Tensor]:
    """Those of the debug model, or of its first layers."""
    model = load_config([]).model_spec.model
    model.layers = model.layers[:layers]
    with torch.device("meta"):
        state = model.build().state_dict()
    return {name: torch.zeros_like(value, device="cpu") for name, value in state.items()}


def refused(load, **keys: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    return str(caught.value)


def test_a_step_that_is_not_there(load, tmp_path: Path) -> None:
    said = refused(load, load_step=99)
    assert "checkpoint.load_step = 99: " in said and "holds no checkpoint. Leave it out" in said
    (save(tmp_path / "run/checkpoint", 10, 20) / "step-99").mkdir()  # never completed
    assert "holds those of steps 20, 10. Set one of these" in refused(load, load_step=99)
    load(load_step=10)
    load()


def test_steps_are_not_counted_anew_beside_a_schedule_that_goes_on(load) -> None:
    said = refused(load, exclude_from_loading="train_state")
    assert 'checkpoint.exclude_from_loading = ["train_state"]: ' in said
    assert 'Add "lr_scheduler", or leave "train_state" out.' in said
    load(exclude_from_loading="train_state,lr_scheduler")


def test_an_initial_checkpoint_that_is_not_there(load, tmp_path: Path) -> None:
    said = refused(load, initial_load_path="/nonexist")
    assert 'checkpoint.initial_load_path = "/nonexist": there is no such folder' in said
    (tmp_path / "empty").mkdir()
    said = refused(load, initial_load_path=tmp_path / "empty")
    assert "the folder holds no checkpoint" in said
    assert "damaged" not in said and "load_step" not in said
    other = tmp_path / "other"
    dcp.save(weights(), checkpoint_id=other / "step-5")
    assert f"Name {other / 'step-5'}." in refused(load, initial_load_path=other)
    load(initial_load_path=other / "step-5")
    # a run that continues does not read it
    save(tmp_path / "run/checkpoint", 10)
    load(initial_load_path="/nonexist")


def test_weights_of_hugging_face_that_are_not_there(load, tmp_path: Path) -> None:
    assert "no safetensors" in refused(load, initial_load_in_hf=True, initial_load_path=tmp_path)
    (tmp_path / "model.safetensors").touch()
    load(initial_load_in_hf=True, initial_load_path=tmp_path)


def test_a_run_does_not_go_on_from_the_model_alone(load, tmp_path: Path) -> None:
    """As torchtitan saves it at the last step: the first thing that a second start meets."""
    weight = weights()
    folder = tmp_path / "run/checkpoint"
    dcp.save(weight | {"train_state.step": torch.zeros(1)}, checkpoint_id=folder / "step-3")
    dcp.save(weight, checkpoint_id=folder / "step-6")
    assert "checkpoint.load_step = 6: " in refused(load, load_step=6)
    assert "load_step = 6" not in refused(load) and "dump_folder = " in refused(load)
    for said in (refused(load), refused(load, load_step=6)):
        assert f"{folder}/step-6 holds the model alone" in said and "initial_load_path" in said
        assert "Set checkpoint.load_step = 3, or begin another run" in said
    (folder / "step-6/.metadata").write_bytes(bytes(64))
    load()  # damaged: the one before is taken when it is read
    (folder / "step-6/.metadata").unlink()
    (folder / "step-6/model.safetensors.index.json").write_text("{}")
    assert "step-6 holds the model alone" in refused(load), "as Hugging Face has it"
    dcp.save(weight, checkpoint_id=folder / "step-0")
    load(load_step=0)  # a seed
    load(load_step=3)
    load(exclude_from_loading="train_state,lr_scheduler")
    dcp.save(weight, checkpoint_id=tmp_path / "seed/checkpoint/step-0")
    load_config(
        ["--checkpoint.enable", "--dump_folder", str(tmp_path / "seed")], reads_checkpoint=True
    )


def test_the_remedy_for_the_model_alone_can_be_written_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchtitan takes no relative path there."""
    monkeypatch.chdir(tmp_path)
    dcp.save(weights(), checkpoint_id="outputs/checkpoint/step-6")
    words = ["--checkpoint.enable"]
    with pytest.raises(ConfigError, match="initial_load_path") as error:
        load_config(words, reads_checkpoint=True)
    (remedy,) = re.findall(r'initial_load_path = "(.*?)"', str(error.value))
    words += ["--dump_folder", "other", "--checkpoint.initial_load_path", remedy]
    config = load_config(words, reads_checkpoint=True)
    assert config.checkpoint.initial_load_path == str(tmp_path / "outputs/checkpoint/step-6")


def test_a_checkpoint_of_another_model(load, tmp_path: Path) -> None:
    other, fewer = tmp_path / "other/step-3", tmp_path / "fewer/step-3"
    step = {"train_state.step": torch.zeros(1)}
    dcp.save(weights() | {"norm.weight": torch.zeros(1)} | step, checkpoint_id=other)
    dcp.save(weights(layers=5) | step, checkpoint_id=fewer)
    said = refused(load, initial_load_path=other)
    assert (
        f'checkpoint.initial_load_path = "{other}": it is of another model: its norm.weight' in said
    )
    assert "has the shape [1], and the model's [256]. Name one of this model" in said
    assert "it has no layers.5." in refused(load, initial_load_path=fewer)
    (tmp_path / "run").mkdir()
    fewer.parent.rename(tmp_path / "run/checkpoint")
    said = refused(load)
    assert f'dump_folder = "{tmp_path}/run": ' in said and "step-3 is of another model" in said
    assert "Name another dump_folder" in said
    assert "checkpoint.load_step = 3: " in refused(load, load_step=3)


def test_a_damaged_initial_checkpoint(load, tmp_path: Path) -> None:
    dcp.save(weights(), checkpoint_id=tmp_path / "step-3")
    load(initial_load_path=tmp_path / "step-3")
    (file,) = (tmp_path / "step-3").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    assert f"it is damaged: {file.name} is truncated" in refused(
        load, initial_load_path=tmp_path / "step-3"
    )


def test_a_model_that_hugging_face_does_not_know(tmp_path: Path) -> None:
    words = ["--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"]
    config = load_config(["--checkpoint.enable", *words])
    check_config(config, 2, reads_checkpoint=True)
    config.model_spec.state_dict_adapter = None
    with pytest.raises(ConfigError, match="checkpoint.last_save_in_hf = true: the model has no"):
        check_config(config, 2, reads_checkpoint=True)
    with pytest.raises(ConfigError, match="Give its ModelSpec a state_dict_adapter"):
        export(tmp_path / "step-3", tmp_path / "exported", config)


def test_a_run_may_go_on_from_the_seed_before_the_model_alone(load, tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoint"
    dcp.save(weights(), checkpoint_id=folder / "step-0")
    dcp.save(weights(), checkpoint_id=folder / "step-6")
    assert "Set checkpoint.load_step = 0, or begin another run" in refused(load)


@pytest.mark.parametrize(
    "flags",
    [
        ["initial_load_path", "/nonexist"],
        ["load_step", "5"],
        ["initial_load_in_hf"],
        ["last_save_in_hf", "--checkpoint.last_save_model_only"],
    ],
)
def test_a_checkpoint_that_nobody_reads_or_writes_is_said(flags: list[str]) -> None:
    """Without `enable` a fine-tuning would train from random weights."""
    words = [f"--checkpoint.{flags[0]}", *flags[1:]]
    with pytest.raises(ConfigError) as caught:
        load_config(words, reads_checkpoint=True)
    said = str(caught.value)
    assert f"command line: checkpoint.{flags[0]} = " in said
    assert "Set checkpoint.enable = true" in said
    load_config([*words, "--checkpoint.no-enable"], reads_checkpoint=True)
    load_config(words)  # a plan reads none


@pytest.mark.parametrize("flags", [[], ["--checkpoint.no-enable"]])
def test_the_resolved_config_of_a_run_without_checkpoints_can_be_given_back(
    tmp_path: Path, flags: list[str]
) -> None:
    file = tmp_path / "own.toml"
    table = "enable = true\nlast_save_in_hf = true\nlast_save_model_only = true\n"
    file.write_text(f'base = "llama3_debugmodel"\n[checkpoint]\n{table}' if flags else "")
    words = ["--config", str(file)] if flags else []
    config = load_config([*words, *flags], reads_checkpoint=True)
    save_resolved_config(config, tmp_path)
    again = load_config(["--config", str(tmp_path / "config.toml")], reads_checkpoint=True)
    assert not again.checkpoint.enable and again.checkpoint == config.checkpoint


def test_a_file_that_forgets_to_enable_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('base = "llama3_debugmodel"\n[checkpoint]\nload_step = 0\n')
    with pytest.raises(ConfigError, match=r"own.toml: checkpoint.load_step = 0: .*enable is false"):
        load_config(["--config", str(file)], reads_checkpoint=True)


def test_nothing_is_asked_of_remote_storage(load) -> None:
    load(initial_load_path="gs://bucket/step-5")


def test_an_export_to_remote_storage_is_refused() -> None:
    """torch would join the files there, and write each value without dimensions as 0."""
    words = ["--checkpoint.enable", "--checkpoint.last_save_model_only"]
    words += ["--dump_folder", "gs://bucket/run"]
    load_config(words, reads_checkpoint=True)
    with pytest.raises(ConfigError, match="gs://bucket/run/checkpoint is remote storage"):
        load_config([*words, "--checkpoint.last_save_in_hf"], reads_checkpoint=True)
    with pytest.raises(ConfigError, match="s3://exported: copy it"):
        export_main(["outputs/checkpoint/step-1", "--to", "s3://exported"])


def test_a_plan_of_a_run_elsewhere_needs_no_checkpoint_here(capsys) -> None:
    flags = ("--checkpoint.enable", "--checkpoint.initial_load_path", "/cluster/step-5")
    assert main(["config", *flags]) == 0
    assert "/cluster/step-5" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="there is no such folder"):
        prepare(flags)
