"""torchtitan's checkpoint manager, with checkpoints that are whole, checked and never lost."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from graph_trainer.errors import CheckpointError
from graph_trainer.titan.checkpoint_files import (
    SUMS,
    WRITING,
    PublishingWriter,
    clean,
    damage,
    publish,
)

_STEP = re.compile(r"step-(\d+)")
_HF_INDEX = "model.safetensors.index.json"
_SHOWN = 5

T = TypeVar("T")


class CheckedCheckpointManager(CheckpointManager):
    """torchtitan's manager and torchtitan's checkpoints, with these promises on top:

    - A folder step-N is a complete checkpoint. It is written as writing-N and renamed at the
      end, so a run that is killed, or that fills the disk, leaves nothing that a later one
      would take for a checkpoint. What such a run left is removed by the next.
    - Older checkpoints are removed only once the newer ones are complete.
    - Before a checkpoint is loaded all ranks together read it once and compare it with the
      digests that were written with it. Without `checkpoint.load_step` a damaged one is passed
      over for the newest good one, with a warning that names the file; where none is good that
      is an error.

    A checkpoint without digests (plain torchtitan's) is looked at for missing and short files
    only, and the log says so. On remote storage (a folder with "://" in its name), where there is
    nothing to rename, all is as in torchtitan.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's [checkpoint]."""

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        self._damaged: set[str] = set()
        self._checked: set[str] = set()

    def saves_at(self, step: int, last_step: bool) -> bool:
        """Whether `save` would write a checkpoint at this step."""
        return self.enable and self._should_save(step, last_step)

    # Saving

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """As torchtitan's, by way of a name that no loader takes.

        Raises:
            CheckpointError: on every rank, when one of them cannot write.
        """
        if filesystem.is_remote(checkpoint_id):
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        self._damaged.discard(checkpoint_id)
        final = Path(checkpoint_id)
        writing = final.with_name(WRITING + final.name.rpartition("-")[2])
        try:
            saved: Future[Any] | AsyncSaveResponse | None = None
            if to_hf:
                _on_first_rank(lambda: shutil.rmtree(writing, ignore_errors=True))
                super().dcp_save(state_dict, str(writing), async_mode, to_hf=True)
                dist.barrier()  # every rank's files are there
                _on_first_rank(lambda: publish(writing, final))
            else:
                saved = self._save_as(state_dict, writing, final, async_mode)
        except (Exception, dcp.CheckpointException) as error:
            raise self._could_not_save(writing, final, error) from error
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        # an asynchronous save fails later, where it is waited for
        self._in_flight = (writing, final)
        return saved

    def _save_as(
        self, state_dict: dict[str, Any], writing: Path, final: Path, async_mode: AsyncMode
    ) -> Future[Any] | AsyncSaveResponse | None:
        writer = PublishingWriter(writing, publish_as=final)
        if async_mode == AsyncMode.ASYNC:
            return dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            stager: DefaultStager | None = self.stager
            return dcp.async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=stager,
            )
        dcp.save(state_dict, storage_writer=writer)
        return None

    def _wait_for_saving(self) -> None:
        try:
            super()._wait_for_saving()
        except (Exception, dcp.CheckpointException) as error:
            raise self._could_not_save(*self._in_flight, error) from error

    def _could_not_save(self, writing: Path, final: Path, error: BaseException) -> CheckpointError:
        """Every rank is here: the error came out of an exchange that all took part in."""
        if dist.get_rank() == 0:
            shutil.rmtree(writing, ignore_errors=True)
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, dcp.CheckpointException):
            reason = _reasons(error)
        kept = self._steps_there()
        return CheckpointError(
            f"the checkpoint {final} could not be written: {reason}. Nothing of it is left; "
            + (
                f"the last complete one is {final.with_name(f'step-{kept[0]}')}"
                if kept
                else "there is no earlier one"
            )
            + ". Make room or mend what is said above, or point checkpoint.folder somewhere "
            "else, then start again."
        )

    def _purge_stale_checkpoints(self) -> None:
        """As torchtitan's, counting no damaged checkpoint among those to keep."""
        if filesystem.is_remote(self.folder):
            super()._purge_stale_checkpoints()
        elif self._should_purge():
            there = self._steps_there()
            good = [s for s in there if self._create_checkpoint_id(s) not in self._damaged]
            oldest_kept = good[self.keep_latest_k - 1] if len(good) >= self.keep_latest_k else 0
            for step in there:
                if step < oldest_kept:
                    self.purge_queue.put(self._create_checkpoint_id(step))

    # Loading

    def _load(self, step: int = -1) -> bool:
        if not filesystem.is_remote(self.folder):
            if not self.load_only:
                _on_first_rank(lambda: clean(Path(self.folder)))
            if step == -1:
                step = self._newest_good_step()
        return super()._load(step)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """As torchtitan's, after a look at every byte.

        Raises:
            CheckpointError: on every rank, when the checkpoint is damaged, or lacks what is to
                be loaded.
        """
        if not from_hf and not filesystem.is_remote(checkpoint_id):
            found = self._damage(checkpoint_id)
            if found:
                raise CheckpointError(
                    f"the checkpoint {checkpoint_id} is damaged: {_listed(found)}. Choose "
                    "another one, or leave checkpoint.load_step out to take the newest that is "
                    "good."
                )
        try:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        except dcp.CheckpointException as error:  # no Exception, but a BaseException
            raise CheckpointError(
                f"the checkpoint {checkpoint_id} cannot be loaded: {_reasons(error)}. If it is "
                "the last one of a finished run it may hold the model alone: with "
                "checkpoint.last_save_model_only = false a run can be continued beyond its last "
                "step. Choose an earlier one with checkpoint.load_step, or give this one as "
                "checkpoint.initial_load_path of a new run."
            ) from error

    def _newest_good_step(self) -> int:
        """The newest step whose checkpoint is whole, on every rank the same; -1 without any."""
        steps = _from_first_rank(self._steps_there() if dist.get_rank() == 0 else [])
        told: list[str] = []
        for step in steps:
            path = self._create_checkpoint_id(step)
            found = self._damage(path)
            if not found:
                for line in told:
                    logger.warning(f"{line}; going back to step {step}")
                return step
            told.append(f"The checkpoint {path} is damaged and not used: {_listed(found)}")
        if told:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} is whole. {'. '.join(told)}. Put a "
                "good copy in place of one of them, or move them away to train from the start."
            )
        return -1

    def _damage(self, path: str) -> list[str]:
        """What is wrong with a checkpoint, on every rank the same; each reads its share of it."""
        if path in self._checked or (Path(path) / _HF_INDEX).exists():
            return []
        mine = damage(Path(path), share=dist.get_rank(), shares=dist.get_world_size())
        everyone: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        found = sorted({line for lines in everyone for line in lines})
        if found:
            self._damaged.add(path)
            return found
        self._checked.add(path)
        if not (Path(path) / SUMS).exists():
            logger.warning(
                f"The checkpoint {path} has no {SUMS}: its files are there and long enough, "
                "what is in them is unverified"
            )
        return []

    def _steps_there(self) -> list[int]:
        """The steps that the folder has a checkpoint of, the newest first."""
        folder = Path(self.folder)
        names = [_STEP.fullmatch(p.name) for p in folder.iterdir()] if folder.is_dir() else []
        return sorted((int(name[1]) for name in names if name), reverse=True)


def with_checked_checkpoints(config: BaseCheckpointManager.Config) -> BaseCheckpointManager.Config:
    """The same [checkpoint], built as our manager where it says torchtitan's; others stay."""
    if type(config) is not CheckpointManager.Config:
        return config
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return CheckedCheckpointManager.Config(**fields)


def _on_first_rank(work: Callable[[], None]) -> None:
    """Do something on rank 0 while the others wait; its error is everyone's."""
    problem = ""
    if dist.get_rank() == 0:
        try:
            work()
        except Exception as error:
            problem = f"rank 0: {type(error).__name__}: {error}"
    problem = _from_first_rank(problem)
    if problem:
        raise CheckpointError(problem)


def _from_first_rank(value: T) -> T:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _reasons(error: dcp.CheckpointException) -> str:
    failures = sorted(error.failures.items())[:_SHOWN]
    return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in failures)


def _listed(lines: list[str]) -> str:
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return ", ".join(lines[:_SHOWN]) + more
