"""Check that a run can begin with the checkpoint it names, and export its last one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.tools.filesystem import is_remote

from graph_trainer.titan.checkpoint_files import HF_INDEX, damage, is_complete, steps_in
from graph_trainer.titan.checkpoint_reader import METADATA, DataReader
from graph_trainer.titan.config.remedies import show
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.sources import COMMAND_LINE, Origins, Problem


def checkpoint_problems(config: GraphTrainerConfig, origins: Origins) -> Iterator[Problem]:
    """Check that the checkpoint which the run would begin with is there."""
    section = config.checkpoint
    folder = os.path.join(config.dump_folder, getattr(section, "folder", ""))
    if not isinstance(section, CheckpointManager.Config):
        return
    if not section.enable:
        yield from _without_checkpoints(section, origins)
        return
    excluded = section.exclude_from_loading
    if "train_state" in excluded and "lr_scheduler" not in excluded:
        yield Problem(
            "checkpoint.exclude_from_loading",
            "steps would be counted from zero while the learning rate schedule goes on to its end",
            'Add "lr_scheduler", or leave "train_state" out.',
            value=excluded,
        )
    for name in ("initial_load_in_hf", "last_save_in_hf"):
        if getattr(section, name) and not getattr(config.model_spec, "state_dict_adapter", True):
            remedy = "Leave it out, or give the model's ModelSpec a state_dict_adapter."
            yield Problem(f"checkpoint.{name}", "the model has no names of Hugging Face's", remedy)
    if section.last_save_in_hf and is_remote(folder):
        yield Problem(
            "checkpoint.last_save_in_hf",
            f"{folder} is remote storage, to which no export is written",
            "Leave it out, copy the last checkpoint to a disk and `graph-trainer export` it.",
            ("dump_folder", "checkpoint.folder"),
        )
    if is_remote(folder) or is_remote(section.initial_load_path or ""):
        return
    steps = [step for step, complete in steps_in(Path(folder)).items() if complete]
    if section.load_step not in (-1, *steps):
        held = f"those of steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
        yield Problem(
            "checkpoint.load_step",
            f"{folder} holds {held}",
            f"{'Set one of these, or l' if steps else 'L'}eave it out to begin with the newest.",
            ("checkpoint.folder", "dump_folder"),
        )
    step = section.load_step if section.load_step >= 0 else max(steps, default=0)
    path = Path(folder, f"step-{step}")
    key = "checkpoint.load_step" if section.load_step >= 0 else "dump_folder"
    if step in steps and (difference := _other_model(path, config)):
        remedy = "Name another dump_folder, or train the model of that run: its --module and "
        remedy += f"--config, with the values in {Path(config.dump_folder, 'config.toml')}."
        yield Problem(key, f"{path} is of another model: {difference}", remedy)
    # of step 0, a seed, the model alone is read
    if step and "train_state" not in section.exclude_from_loading and _holds_model_alone(path):
        problem = f"{path} holds the model alone, as does the last one of a run"
        earlier = max((saved for saved in steps if saved < step), default=None)
        remedy = (
            f"Set checkpoint.load_step = {earlier}, or begin" if earlier is not None else "Begin"
        )
        remedy += " another run, with its own dump_folder and "
        remedy += f"checkpoint.initial_load_path = {show(os.path.abspath(path))}, or without "
        remedy += "checkpoints: checkpoint.enable = false."
        yield Problem(key, problem, remedy, ("checkpoint.last_save_model_only",))
    if steps or section.load_step != -1:  # the run continues, and the keys below have no effect
        return
    named = section.initial_load_path
    key, path = ("checkpoint.initial_load_path", Path(named or config.hf_assets_path))
    if section.initial_load_in_hf:
        key = key if named else "hf_assets_path"
        if not any(path.glob("*.safetensors")):
            yield Problem(
                key,
                "the folder holds no safetensors" if path.is_dir() else "there is no such folder",
                "Name the folder of the model's weights, as Hugging Face lays it out.",
                ("checkpoint.initial_load_in_hf",),
            )
    elif named and not is_complete(path):
        inside = [step for step, complete in steps_in(path).items() if complete]
        problem = "the folder holds no checkpoint" if path.is_dir() else "there is no such folder"
        there = f"{path / f'step-{inside[0]}'}" if inside else "the folder step-N of a run"
        yield Problem(key, problem, f"Name {there}.")
    elif named and (path / METADATA).is_file():
        # where a run goes on, the checkpoint before a damaged one is taken; this is the only one
        if damaged := damage(path, verify=False):
            yield Problem(key, f"it is damaged: {damaged[0]}", "Name another one.")
        elif difference := _other_model(path, config):
            remedy = "Name one of this model, or train that one with its --module and --config."
            yield Problem(key, f"it is of another model: {difference}", remedy)


def _other_model(checkpoint: Path, config: GraphTrainerConfig) -> str:
    """Return which parameter of the model a checkpoint lacks or has in another shape; "" if none,
    or where that cannot be known: damaged bytes and a model that is refused raise anything."""
    assert config.model_spec is not None
    with contextlib.suppress(Exception):
        held: Any = DataReader(str(checkpoint)).read_metadata().state_dict_metadata
        with torch.device("meta"):
            values = config.model_spec.model.build().state_dict(keep_vars=True)
        for name, value in values.items():
            if not isinstance(value, torch.nn.Parameter):
                continue  # a buffer may depend on the length of a sequence
            if name not in held:
                return f"it has no {name}"
            shape, size = list(value.shape), list(getattr(held[name], "size", ()))
            if shape != size:
                return f"its {name} has the shape {size}, and the model's {shape}"
    return ""


def _holds_model_alone(checkpoint: Path) -> bool:
    if not (checkpoint / METADATA).is_file():
        return (checkpoint / HF_INDEX).is_file()
    # damaged bytes raise anything; such a checkpoint is passed over later
    with contextlib.suppress(Exception):
        states = DataReader(str(checkpoint)).read_metadata().state_dict_metadata
        return "train_state.step" not in states
    return False


def _without_checkpoints(section: Any, origins: Origins) -> Iterator[Problem]:
    """Refuse keys that load or export a checkpoint where checkpoints are switched off.

    A user who switches them off beside such a key, or by a flag, does so on purpose.
    """
    switched, default = origins.of("checkpoint.enable"), type(section)()
    for name in ("load_step", "initial_load_path", "initial_load_in_hf", "last_save_in_hf"):
        origin = origins.of(f"checkpoint.{name}") if switched != COMMAND_LINE else ""
        if origin not in ("", switched) and getattr(section, name) != getattr(default, name):
            yield Problem(
                f"checkpoint.{name}",
                "checkpoint.enable is false, and so no checkpoint is read or written",
                "Set checkpoint.enable = true, or leave this out.",
            )
