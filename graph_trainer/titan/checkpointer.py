"""torchtitan's checkpoint manager, with complete and verified checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torchtitan.components.checkpointer.base import MODEL, BaseCheckpointManager
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from graph_trainer.errors import CheckpointError
from graph_trainer.titan.checkpoint_files import (
    HF_INDEX,
    SUMS,
    ManifestWriter,
    damage,
    empty,
    is_complete,
)
from graph_trainer.titan.checkpoint_reader import DataLoadPlanner, reader_of

_STEP = re.compile(r"step-(\d+)")
_SHOWN = 5


class CheckedCheckpointManager(CheckpointManager):
    """Save and load torchtitan's checkpoints as torchtitan does, and guarantee:

    - A folder step-N is a checkpoint once its last file is there, which torch gives its name when
      the others are on the disk: `.metadata`, or the index of an export to Hugging Face. What a
      run that was killed, or that filled the disk, has left is never loaded or counted among the
      checkpoints to keep.
    - Older checkpoints are removed only once the newer ones are complete.
    - Before a checkpoint is loaded, all ranks together read it once and compare it with the
      digests that were written with it. Without `checkpoint.load_step` the newest good
      checkpoint is loaded, with a warning that names the files of newer, damaged ones; it is an
      error if none is good.

    A checkpoint without digests (plain torchtitan's, or `checkpoint.verify` off) is checked for
    missing and short files only, and the log says so. On remote storage (a folder with "://" in
    its name) everything is as in torchtitan.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's [checkpoint] and a switch for digests."""

        verify: bool = True
        """
        Write a SHA-256 digest of every file with a checkpoint (SHA256SUMS), and compare all bytes
        with the digests before a checkpoint is loaded. Switched off, files are only checked for
        existence and size.
        """

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        self._verify = config.verify
        self._saving = ""  # the checkpoint that is, or was last, written
        self._damaged: set[str] = set()
        self._checked: set[str] = set()

    def saves_at(self, step: int, last_step: bool) -> bool:
        """Return whether `save` writes a checkpoint at this step."""
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
        """Save as torchtitan does, with a list of digests, and replace what the folder holds.

        Raises:
            CheckpointError: on every rank, when one of them cannot write.
        """
        if filesystem.is_remote(checkpoint_id):
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        self._damaged.discard(checkpoint_id)
        self._saving = checkpoint_id
        writer = ManifestWriter(checkpoint_id, verify=self._verify)
        saved: Future[Any] | AsyncSaveResponse | None = None
        try:
            # The error of an asynchronous save is raised later, where the save is waited for.
            if to_hf:
                if dist.get_rank() == 0:
                    # What cannot be removed cannot be written either: all ranks hear of that.
                    with contextlib.suppress(OSError):
                        empty(Path(checkpoint_id))
                dist.barrier()
                super().dcp_save(state_dict, checkpoint_id, async_mode, to_hf=True)
            elif async_mode == AsyncMode.DISABLED:
                dcp.save(state_dict, storage_writer=writer)
            elif async_mode == AsyncMode.ASYNC:
                saved = dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
            else:
                saved = dcp.async_save(
                    state_dict,
                    storage_writer=writer,
                    process_group=self.pg,
                    async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                    async_stager=self.stager,
                )
        except (Exception, dcp.CheckpointException) as error:
            raise self._could_not_save(error) from error
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    def _wait_for_saving(self) -> None:
        try:
            super()._wait_for_saving()
        except (Exception, dcp.CheckpointException) as error:
            raise self._could_not_save(error) from error

    def _could_not_save(self, error: BaseException) -> CheckpointError:
        """Remove the unfinished checkpoint and make the error, on every rank.

        The exception has reached all ranks, because it came out of an exchange between them.
        """
        final = Path(self._saving)
        if dist.get_rank() == 0 and not is_complete(final):
            shutil.rmtree(final, ignore_errors=True)
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, dcp.CheckpointException):
            reason = _reasons(error)
        # Without this one: another rank may be removing it.
        kept = [step for step, complete in self._steps().items() if complete]
        last = next((p for p in map(self._create_checkpoint_id, kept) if p != self._saving), "")
        return CheckpointError(
            f"the checkpoint {final} could not be written: {reason}. Its files are removed; "
            + (f"the last complete one is {last}" if last else "there is no earlier one")
            + ". Free space or correct the cause named above, or set checkpoint.folder to another "
            "folder, then start again."
        )

    def _purge_stale_checkpoints(self) -> None:
        """Queue old checkpoints for removal.

        Damaged and unfinished ones do not count among those to keep, nor does one that is being
        written.
        """
        if filesystem.is_remote(self.folder):
            super()._purge_stale_checkpoints()
        elif self._should_purge():
            uncounted = self._damaged | ({self._saving} if self.save_future else set())
            steps = self._steps()
            kept = [
                step
                for step, complete in steps.items()
                if complete and self._create_checkpoint_id(step) not in uncounted
            ]
            if len(kept) >= self.keep_latest_k:
                for step in steps:
                    if step < kept[self.keep_latest_k - 1]:
                        self.purge_queue.put(self._create_checkpoint_id(step))

    # Loading

    def _load(self, step: int = -1) -> bool:
        if step == -1 and not filesystem.is_remote(self.folder):
            step = self._newest_good_step()
        return super()._load(step)

    def _newest_good_step(self) -> int:
        """Find the newest step with a good checkpoint, the same on every rank; -1 without any.

        Raises:
            CheckpointError: there are complete checkpoints, and all of them are damaged.
        """
        from_first_rank = [self._steps()]
        dist.broadcast_object_list(from_first_rank, src=0)
        passed_over: list[str] = []
        for step, complete in from_first_rank[0].items():
            path = self._create_checkpoint_id(step)
            if not complete:
                logger.warning(f"The checkpoint {path} was never completed and is not used")
                continue
            damage = self._damage(path)
            if not damage:
                for line in passed_over:
                    logger.warning(f"{line}; going back to step {step}")
                return step
            passed_over.append(f"The checkpoint {path} is damaged and not used: {_listed(damage)}")
        if passed_over:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} is whole. {'. '.join(passed_over)}. Put "
                "a good copy in place of one of them, or move them away to train from the start."
            )
        return -1

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load as torchtitan does, after the files have been verified, and run no code of theirs.

        Raises:
            CheckpointError: on every rank, when the checkpoint is damaged, lacks values that are
                to be loaded, or holds more than data.
        """
        if not from_hf and not filesystem.is_remote(checkpoint_id):
            damage = self._damage(checkpoint_id)
            if damage:
                raise CheckpointError(
                    f"the checkpoint {checkpoint_id} is damaged: {_listed(damage)}. Choose another "
                    "one, or leave checkpoint.load_step out to take the newest that is good."
                )
        try:
            if from_hf:  # safetensors and JSON
                super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            else:
                dcp.load(
                    state_dict, storage_reader=reader_of(checkpoint_id), planner=DataLoadPlanner()
                )
                if MODEL in self.states:
                    self.states[MODEL].load_state_dict(state_dict)
        except dcp.CheckpointException as error:  # no Exception, but a BaseException
            if any(isinstance(e, CheckpointError) for e, _ in error.failures.values()):
                raise CheckpointError(
                    f"the checkpoint {checkpoint_id} was refused: {_reasons(error)}."
                ) from error
            raise CheckpointError(
                f"the checkpoint {checkpoint_id} cannot be loaded: {_reasons(error)}. If it is "
                "the last one of a finished run it may contain the model alone: with "
                "checkpoint.last_save_model_only = false a run can be continued beyond its last "
                "step. Choose an earlier one with checkpoint.load_step, or give this one as "
                "checkpoint.initial_load_path of a new run."
            ) from error

    def _damage(self, path: str) -> list[str]:
        """Find damaged files, the same on every rank; each rank reads a part of the files."""
        if path in self._checked or (Path(path) / HF_INDEX).exists():
            return []
        rank, ranks = dist.get_rank(), dist.get_world_size()
        local = damage(Path(path), verify=self._verify, share=rank, shares=ranks)
        by_rank: list[list[str]] = [[]] * ranks
        dist.all_gather_object(by_rank, local)
        found = sorted({line for lines in by_rank for line in lines})
        if found:
            self._damaged.add(path)
            return found
        self._checked.add(path)
        if self._verify and not (Path(path) / SUMS).exists():
            logger.warning(
                f"The checkpoint {path} has no {SUMS}: its files exist and are long enough, "
                "their content is unverified"
            )
        return []

    def _steps(self) -> dict[int, bool]:
        """List the steps that have a folder, the newest first, and whether it is complete."""
        folder = Path(self.folder)
        steps = {
            int(name[1]): is_complete(path)
            for path in (folder.iterdir() if folder.is_dir() else ())
            if (name := _STEP.fullmatch(path.name))
        }
        return dict(sorted(steps.items(), reverse=True))


def with_checked_checkpoints(config: BaseCheckpointManager.Config) -> BaseCheckpointManager.Config:
    """Return the config of a CheckedCheckpointManager for that of torchtitan's manager.

    Any other config, one of a user's own manager for example, is returned as it is.
    """
    if type(config) is not CheckpointManager.Config:
        return config
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return CheckedCheckpointManager.Config(**fields)


def _reasons(error: dcp.CheckpointException) -> str:
    failures = sorted(error.failures.items())[:_SHOWN]
    return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in failures)


def _listed(lines: list[str]) -> str:
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return ", ".join(lines[:_SHOWN]) + more
