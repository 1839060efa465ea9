"""Which folders count as checkpoints, when old ones are removed and the newest is looked for."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager

from graph_trainer.errors import CheckpointError
from graph_trainer.titan.checkpoint_files import HF_INDEX, METADATA, damage, steps_in
from graph_trainer.titan.checkpointer import CheckedCheckpointManager, _reasons
from tests.odd_weights import OddAdapter, OddModel, differing, expected


@pytest.fixture
def manager(tmp_path: Path) -> CheckedCheckpointManager:
    """Keeps two checkpoints of a model with one weight, on one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = CheckedCheckpointManager.Config(
        enable=True,
        interval=1,
        keep_latest_k=2,
        exclude_from_loading=["dataloader", "optimizer", "lr_scheduler"],
    )
    return config.build(
        dataloader=None,
        model_parts=[nn.Linear(1, 1, bias=False)],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
        base_folder=str(tmp_path),
    )


def saved(manager: CheckedCheckpointManager, step: int) -> Path:
    """Save the model with the step as its weight."""
    path = Path(manager._create_checkpoint_id(step))
    weight = torch.full((1, 1), float(step))
    manager.dcp_save({"weight": weight}, str(path), AsyncMode.DISABLED)
    return path


def steps(manager: CheckedCheckpointManager) -> list[int]:
    """The steps that have a folder when what is queued for removal is gone."""
    manager.close()
    return sorted(steps_in(Path(manager.folder)))


def test_unfinished_and_damaged_checkpoints_are_neither_loaded_nor_kept_in_place_of_good_ones(
    manager: CheckedCheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    first = saved(manager, 1)
    (first.with_name("step-2")).mkdir()
    for step in (3, 4, 5):
        saved(manager, step)
    (first.with_name("step-6")).mkdir()
    (first.with_name("step-5") / METADATA).write_bytes(b"")
    assert manager.load()
    assert manager.states["model"].state_dict()["weight"].item() == 4
    assert "step-6 was never completed and is not used" in caplog.text
    assert "step-5 is damaged and not used: .metadata is truncated" in caplog.text
    manager._purge_stale_checkpoints()
    assert steps(manager) == [3, 4, 5, 6]


def test_a_run_goes_on_from_the_checkpoint_that_is_named_or_the_newest_complete_one(
    manager: CheckedCheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert manager.step_to_load() == 0
    (saved(manager, 3).with_name("step-7")).mkdir()
    assert manager.step_to_load() == 3
    with monkeypatch.context() as patch:
        patch.setattr(manager, "_load_step", 2)
        assert manager.step_to_load() == 2
    with monkeypatch.context() as patch:
        patch.setattr(manager, "enable", False)
        assert manager.step_to_load() == 0


def test_a_checkpoint_replaces_what_its_folder_holds(manager: CheckedCheckpointManager) -> None:
    path = saved(manager, 1)
    names = sorted(file.name for file in path.iterdir())
    for name in ("__7_0.distcp", HF_INDEX):  # of a run on eight ranks that was killed, an export
        (path / name).touch()
    (path / METADATA).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-1 cannot be loaded|is damaged"):
        manager.load(1)
    assert saved(manager, 1) == path
    assert sorted(file.name for file in path.iterdir()) == names
    assert manager.load(1)


def test_nothing_is_removed_for_a_checkpoint_that_is_being_written(
    manager: CheckedCheckpointManager,
) -> None:
    for step in (1, 2, 3):
        saved(manager, step)  # 3 again, after step 2 was loaded
    manager.save_future = object()  # type: ignore[assignment]
    manager._purge_stale_checkpoints()
    assert steps(manager) == [1, 2, 3]


def test_an_export_is_complete_once_it_has_its_index(manager: CheckedCheckpointManager) -> None:
    for step in (1, 2, 3):
        saved(manager, step)
    export = Path(manager._create_checkpoint_id(4))
    export.mkdir()
    manager._purge_stale_checkpoints()
    assert steps_in(Path(manager.folder))[4] is False
    (export / HF_INDEX).touch()
    assert steps_in(Path(manager.folder))[4] is True
    assert steps(manager) == [2, 3, 4]


def test_a_run_whose_first_save_was_killed_begins_anew(manager: CheckedCheckpointManager) -> None:
    Path(manager._create_checkpoint_id(1)).mkdir(parents=True)
    assert manager.load() is False
    (saved(manager, 2) / METADATA).write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the checkpoints in .* is whole"):
        manager.load()


def test_a_failed_save_leaves_what_was_complete(manager: CheckedCheckpointManager) -> None:
    saved(manager, 1)
    path = manager._create_checkpoint_id(2)
    with pytest.raises(CheckpointError, match=r"step-2 could not be written: rank 0: "):
        manager.dcp_save({"x": (i for i in ())}, path, AsyncMode.DISABLED)  # cannot be pickled
    assert steps(manager) == [1]


def test_a_checkpoint_that_cannot_be_removed_stays_as_it_was(
    manager: CheckedCheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder that another user owns, whose files may be writable."""
    path = saved(manager, 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(CheckpointError, match="Permission denied.* was there before"):
            manager.dcp_save({"weight": torch.zeros(2, 2)}, str(path), AsyncMode.DISABLED)
    assert damage(path) == []
    assert manager.load(1)


def test_a_failed_save_to_remote_storage_removes_no_local_files(
    manager: CheckedCheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").touch()
    manager.async_mode = AsyncMode.ASYNC
    monkeypatch.setattr(CheckpointManager, "dcp_save", lambda *_: Future())
    manager.save_future = manager.dcp_save({}, "memory://step-1", AsyncMode.ASYNC)
    manager.save_future.set_exception(RuntimeError("no such bucket"))
    with pytest.raises(RuntimeError, match="no such bucket"):
        manager.maybe_wait_for_saving()
    assert (tmp_path / "mine").exists()


def exporting(model: nn.Module, folder: Path, **options: Any) -> CheckedCheckpointManager:
    """A manager whose last checkpoint is an export, on the one rank that `manager` has begun."""
    config = CheckedCheckpointManager.Config(
        enable=True, keep_latest_k=0, last_save_in_hf=True, **options
    )
    return config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=OddAdapter(OddModel.Config(), None),
        base_folder=str(folder),
    )


@pytest.mark.usefixtures("manager")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_checkpoint_may_be_an_export_of_whatever_a_model_holds(
    tmp_path: Path, dtype: Any
) -> None:
    model = OddModel(OddModel.Config())
    exporting(model, tmp_path, export_dtype=dtype).save(3, last_step=True)
    (file,) = tmp_path.glob("checkpoint/step-3/*.safetensors")
    wanted = expected(model.state_dict(), getattr(torch, dtype))
    assert differing(load_file(file), wanted) == []
    assert damage(file.parent) == []
    other = OddModel(OddModel.Config())
    with torch.no_grad():
        for value in other.state_dict().values():
            value.zero_()
    loading = {"initial_load_path": str(file.parent), "initial_load_in_hf": True}
    assert exporting(other, tmp_path / "other", **loading).load()
    assert differing(expected(other.state_dict(), getattr(torch, dtype)), wanted) == []
    assert torch.equal(other.head.weight, other.emb.weight)


@pytest.mark.usefixtures("manager")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.float4_e2m1fn_x2])
def test_what_no_export_could_hold_is_refused_before_a_step_is_trained(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = OddModel(OddModel.Config())
    model.register_buffer("phases", torch.empty(2, dtype=dtype))
    with pytest.raises(CheckpointError, match=rf"cannot hold model\.phases \({dtype}\)"):
        exporting(model, tmp_path)


@pytest.mark.usefixtures("manager")
def test_an_export_that_cannot_be_joined_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = exporting(OddModel(OddModel.Config()), tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    saving.beside_weights = full
    with pytest.raises(CheckpointError, match=r"could not be written: OSError: .* No space left"):
        saving.save(3, last_step=True)
    assert not (tmp_path / "checkpoint/step-3").exists()


def test_an_initial_checkpoint_of_another_model_is_named_once_with_what_helps(
    manager: CheckedCheckpointManager,
) -> None:
    path = str(saved(manager, 1))
    state = {"other": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="with checkpoint.load_step, or give this one as"):
        manager.dcp_load(state, path, from_hf=False, from_quantized=False)
    manager.initial_load_path = path
    with pytest.raises(CheckpointError) as caught:
        manager.dcp_load(state, path, from_hf=False, from_quantized=False)
    assert str(caught.value).endswith("Name one of this model with checkpoint.initial_load_path.")
    assert "load_step" not in str(caught.value)


def test_ranks_with_one_reason_are_told_together() -> None:
    missing, other = RuntimeError("Missing key x."), ValueError("odd")
    failures = {rank: (error, None) for rank, error in enumerate([missing, other, missing])}
    said = _reasons(dcp.CheckpointException("load", failures))  # type: ignore[arg-type]
    assert said == "ranks 0, 2: RuntimeError: Missing key x; rank 1: ValueError: odd"
