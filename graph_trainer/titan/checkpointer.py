"""torchtitan's checkpoint manager, with complete and verified checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections import ChainMap, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save as to_safetensors
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torchtitan.components.checkpointer.base import (
    LR_SCHEDULER,
    MODEL,
    TRAIN_STATE,
    BaseCheckpointManager,
)
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from graph_trainer.core.graph.annotations import block_of
from graph_trainer.core.torch_private import storage_id
from graph_trainer.errors import CheckpointError
from graph_trainer.titan.checkpoint_files import (
    HF_INDEX,
    SUMS,
    ManifestWriter,
    Sums,
    damage,
    digests,
    empty,
    is_complete,
    publish,
    steps_in,
)
from graph_trainer.titan.checkpoint_reader import DataLoadPlanner, DataReader
from graph_trainer.titan.checkpoint_states import (
    GENERATORS,
    StateName,
    describe_excluded,
    set_learning_rates,
)
from graph_trainer.titan.nonfinite_guard import local_tensor

_SHOWN = 5
_T = TypeVar("_T")
_Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class CheckedCheckpointManager(CheckpointManager):
    """Save and load torchtitan's checkpoints as torchtitan does, and guarantee:

    - A folder step-N is a checkpoint once it has its last file: `.metadata`, or the index of an
      export to Hugging Face. An unfinished one is never loaded or counted among those to keep.
    - Older checkpoints are removed only once the newer ones are complete.
    - Before a checkpoint is loaded, all ranks together read it once and compare it with the
      digests that were written with it. Without `checkpoint.load_step` the newest good one is
      loaded, with a warning that names the files of newer, damaged ones.

    A checkpoint without digests (plain torchtitan's, or `checkpoint.verify` off) is checked for
    missing and short files only, and the log says so. On remote storage (a folder with "://" in
    its name) everything is as in torchtitan, but loading runs no code of a file, and exports to
    Hugging Face are refused where the config is checked.
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

        exclude_from_loading: list[StateName] = dataclasses.field(default_factory=list)
        """
        States of a checkpoint that a run which goes on from it does not load; the log says what
        then starts anew.
        """

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        self._verify, self._load_step = config.verify, config.load_step
        self._saving = ""  # the checkpoint that is, or was last, written
        self._damaged: dict[str, str] = {}  # path of a checkpoint -> what is wrong with its files
        self.beside_weights: Callable[[torch.dtype, Path], object] = lambda dtype, folder: None
        """Writes what stands beside the weights in an export to Hugging Face, on rank 0."""
        self.remedy = ""
        """What to do about a checkpoint that lacks values which are to be loaded; empty for what
        the keys of [checkpoint] can do."""
        self.remedy_for_folder = "set checkpoint.folder to another folder"
        """What to do about a folder that cannot be written."""
        if self.saves_at(0, last_step=True) and self.last_save_in_hf:
            self._for_hugging_face(self.states[MODEL].state_dict())  # not after days of training

    def saves_at(self, step: int, last_step: bool) -> bool:
        """Return whether `save` writes a checkpoint at this step."""
        return self.enable and self._should_save(step, last_step)

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
            CheckpointError: on every rank, when one of them cannot write. An asynchronous save
                raises it later, where the save is waited for. Or safetensors have no place for a
                value: then the folder is left as it was.
        """
        self._saving = checkpoint_id
        self._damaged.pop(checkpoint_id, None)
        if filesystem.is_remote(checkpoint_id):
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        weights = self._for_hugging_face(state_dict) if to_hf else {}
        saved: Future[Any] | AsyncSaveResponse | None = None
        with self._errors_of_saving():
            first = dist.get_rank() == 0
            _on_all_ranks(lambda: empty(Path(checkpoint_id)) if first else None)
            writer = ManifestWriter(checkpoint_id, verify=self._verify)
            if to_hf:
                self._save_for_hugging_face(weights, Path(checkpoint_id) / "unfinished")
            elif async_mode == AsyncMode.DISABLED:
                dcp.save(state_dict, storage_writer=writer)
            else:
                pinned = async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
                kind = AsyncCheckpointerType.PROCESS if pinned else AsyncCheckpointerType.THREAD
                saved = dcp.async_save(
                    state_dict,
                    storage_writer=writer,
                    process_group=self.pg,
                    async_checkpointer_type=kind,
                    async_stager=self.stager,  # None but for pinned memory
                )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    @torch.no_grad()
    def _for_hugging_face(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return what an export of a model holds, by Hugging Face's names; tied weights once.

        Raises:
            CheckpointError: safetensors have no place for a value.
        """
        assert self.sd_adapter is not None
        # what was tied in the model is two tensors in another dtype
        tied = _tied(self.states[MODEL].state_dict())
        weights = self.sd_adapter.to_hf({n: state_dict[tied.get(n, n)] for n in state_dict})
        refused = [
            f"{name} ({getattr(value, 'dtype', type(value).__name__)})"
            for name, value in weights.items()
            if not (isinstance(value, torch.Tensor) and _dtype_name(value.dtype))
        ]
        if refused:
            raise CheckpointError(
                f"safetensors, which Hugging Face reads, cannot hold {', '.join(refused[:_SHOWN])}"
                f"{', ...' if len(refused) > _SHOWN else ''}. Let to_hf of the model's "
                "state_dict_adapter leave that out, or convert it."
            )
        tied = _tied(weights)
        return {name: weight.contiguous() for name, weight in weights.items() if name not in tied}

    def _save_for_hugging_face(self, weights: dict[str, Any], staging: Path) -> None:
        """Write each rank's parts of the weights, then the files of an export, and publish it.

        Not by torchtitan's way, torch's consolidate_safetensors_files: there a tensor without
        dimensions becomes 0, and integers are an error.
        """
        adapter: Any = self.sd_adapter
        parts, rank = staging / "sharded", dist.get_rank()
        wanted = adapter.fqn_to_index_mapping or {}
        # of experts, to_hf returns on each rank those that it has
        local = {n: torch.empty(v.shape, dtype=v.dtype, device="meta") for n, v in weights.items()}
        gathered = dict(ChainMap(*_on_all_ranks(lambda: local)))
        index = {name: wanted.get(name, 1) for name in gathered}
        dcp.save(
            weights,
            storage_writer=HuggingFaceStorageWriter(
                str(parts), fqn_to_index_mapping=index, save_distributed=True
            ),
        )
        last = max(index.values())
        files = {name: f"model-{n:05}-of-{last:05}.safetensors" for name, n in index.items()}
        # what is split or merged there, is so within a block of the model
        convert: _Convert = getattr(adapter, "whole_to_hf", dict)
        blocks: dict[tuple[str, str], dict[str, torch.Tensor]] = defaultdict(dict)
        for name, value in gathered.items():
            blocks[files[name], name if convert is dict else block_of(name) or ""][name] = value

        def join() -> Sums:
            mine = sorted(set(files.values()))[rank :: dist.get_world_size()]
            for file in mine:
                of_file = [block for (name, _), block in blocks.items() if name == file]
                _write_whole(staging / file, of_file, convert, parts.glob(f"shard-*-{file}"))
            return digests(staging / file for file in mine) if self._verify else {}

        def complete(sums: Sums) -> None:
            shutil.rmtree(parts)
            held = {n: file for (file, _), block in blocks.items() for n in convert(block)}
            size = sum(tensor.nbytes for tensor in gathered.values())
            index_file = {"metadata": {"total_size": size}, "weight_map": held}
            (staging / HF_INDEX).write_text(json.dumps(index_file, indent=2), encoding="utf-8")
            self.beside_weights(self.export_dtype, staging)
            publish(staging, sums if self._verify else None)

        sums = dict(ChainMap(*_on_all_ranks(join)))
        _on_all_ranks(lambda: complete(sums) if rank == 0 else None)

    def _wait_for_saving(self) -> None:
        with self._errors_of_saving():
            super()._wait_for_saving()

    @contextlib.contextmanager
    def _errors_of_saving(self) -> Iterator[None]:
        """Remove what an error leaves of a checkpoint, where it can be, and name it in the error.

        The exception reaches all ranks, because it comes out of an exchange between them.
        """
        try:
            yield
        except (Exception, dcp.CheckpointException) as error:
            if filesystem.is_remote(self._saving):
                raise
            unfinished = Path(self._saving)
            left = "The one that was there before and those of other steps"
            if not is_complete(unfinished):
                left = "What is left of its files is never loaded; checkpoints of other steps"
                if dist.get_rank() == 0:
                    shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint {unfinished} could not be written: {_reasons(error)}. {left} "
                "are as they were. Free space or correct the cause named above, or "
                f"{self.remedy_for_folder}, then start again."
            ) from error

    def _purge_stale_checkpoints(self) -> None:
        """Queue old checkpoints for removal.

        Damaged and unfinished ones do not count among those to keep, nor does one that is being
        written.
        """
        if filesystem.is_remote(self.folder):
            super()._purge_stale_checkpoints()
        elif self._should_purge():
            steps = steps_in(Path(self.folder))
            uncounted = {*self._damaged, self._saving if self.save_future else ""}
            kept = [
                step
                for step, complete in steps.items()
                if complete and self._create_checkpoint_id(step) not in uncounted
            ]
            for step in steps:
                if len(kept) >= self.keep_latest_k and step < kept[self.keep_latest_k - 1]:
                    self.purge_queue.put(self._create_checkpoint_id(step))

    def _steps(self) -> dict[int, bool]:
        """Return `steps_in` of the folder as the first rank sees it."""
        return _on_all_ranks(lambda: steps_in(Path(self.folder)))[0]

    def step_to_load(self) -> int:
        """Return the step of the checkpoint that a run goes on from: the one that is named, or the
        newest that is complete; 0 where it begins anew, and on remote storage."""
        if not self.enable or filesystem.is_remote(self.folder):
            return 0
        if self._load_step != -1:
            return self._load_step
        return max((step for step, complete in self._steps().items() if complete), default=0)

    def _load(self, step: int = -1) -> bool:
        """Load a step, or the newest that is complete and undamaged, the same on every rank.

        Raises:
            CheckpointError: there are complete checkpoints, and all of them are damaged.
        """
        if step != -1 or filesystem.is_remote(self.folder):
            return super()._load(step)
        damaged: list[str] = []
        for newest, complete in self._steps().items():
            path = self._create_checkpoint_id(newest)
            if not complete:
                logger.warning(f"The checkpoint {path} was never completed and is not used")
                continue
            try:
                return super()._load(newest)
            except CheckpointError:
                if path not in self._damaged:
                    raise
            damaged.append(f"The checkpoint {path} is damaged and not used: {self._damaged[path]}")
            logger.warning(f"{damaged[-1]}; going back to the one before")
        if damaged:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} is whole. {'. '.join(damaged)}. Put "
                "a good copy in place of one of them, or move them away to train from the start."
            )
        return super()._load()

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        if self.exclude_from_loading and not model_only:
            logger.info(
                "Not loaded, by checkpoint.exclude_from_loading: "
                f"{describe_excluded(self.exclude_from_loading)}"
            )
        return super()._states_to_load(model_only)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load as torchtitan does, after the files have been verified, and run no code of theirs.

        Raises:
            CheckpointError: on every rank, when the checkpoint is damaged, lacks values that are
                to be loaded, or holds more than data.
        """
        folder = Path(checkpoint_id)
        summed = self._verify and (folder / SUMS).exists()
        exported = from_hf or (folder / HF_INDEX).exists()
        # an export without digests has no list of its files' sizes either
        if not filesystem.is_remote(checkpoint_id) and (summed or not exported):
            # Each rank reads a part of the files, and all ranks need all of the lines.
            share = {"share": dist.get_rank(), "shares": dist.get_world_size()}
            by_rank = _on_all_ranks(lambda: damage(folder, verify=self._verify, **share))
            lines = sorted(set(itertools.chain(*by_rank)))
            if lines:
                more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
                self._damaged[checkpoint_id] = ", ".join(lines[:_SHOWN]) + more
                initial = checkpoint_id == self.initial_load_path
                newest = "or leave checkpoint.load_step out to take the newest that is good."
                raise CheckpointError(
                    f"the checkpoint {checkpoint_id} is damaged: {self._damaged[checkpoint_id]}. "
                    + ("Choose another one" + ("." if initial else f", {newest}"))
                )
            if self._verify and not summed:
                logger.warning(
                    f"The checkpoint {checkpoint_id} has no {SUMS}: its files exist and are long "
                    "enough, their content is unverified"
                )
        try:
            if from_hf:  # safetensors and JSON
                assert self.sd_adapter is not None
                if hasattr(self.sd_adapter, "read_hf"):
                    self.sd_adapter.read_hf(Path(checkpoint_id), state_dict)
                    self.states[MODEL].load_state_dict(state_dict)
                    return
                weights = self.sd_adapter.to_hf(state_dict)
                tied = _tied(weights)  # of which an export has the first
                dcp.load(
                    {name: weight for name, weight in weights.items() if name not in tied},
                    storage_reader=self.sd_adapter.get_hf_storage_reader(
                        checkpoint_id, from_quantized
                    ),
                )
                self.states[MODEL].load_state_dict(self.sd_adapter.from_hf(weights))
                return
            planner = DataLoadPlanner(optional=GENERATORS)
            dcp.load(state_dict, storage_reader=DataReader(checkpoint_id), planner=planner)
        except dcp.CheckpointException as error:  # no Exception, but a BaseException
            errors = [e for e, _ in error.failures.values()]
            remedy = self.remedy or (
                "Name one of this model with checkpoint.initial_load_path."
                if checkpoint_id == self.initial_load_path
                else "Choose an earlier one with checkpoint.load_step, or give this one as "
                "checkpoint.initial_load_path of a new run."
            )
            refused = any(isinstance(e, CheckpointError | OSError) for e in errors)
            raise CheckpointError(
                f"the checkpoint {checkpoint_id} cannot be loaded: {_reasons(error)}."
                + ("" if refused else f" {remedy}")
            ) from error
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)
        if state_dict.keys() & self.states.keys():  # else the model alone is loaded
            self._replace_what_was_not_loaded(state_dict.keys(), planner.missing, checkpoint_id)

    def _replace_what_was_not_loaded(
        self, loaded: Container[str], missing: Sequence[str], checkpoint_id: str
    ) -> None:
        """Set what a run that goes on needs and a state that was not loaded would have given.

        Args:
            loaded: the names of the states.
            missing: what the checkpoint lacks of the random generators.
        """
        set_learning_rates(self.states[LR_SCHEDULER])
        generators = self.states.get(GENERATORS)
        if generators is None or (GENERATORS in loaded and not missing):
            return
        step = self.states[TRAIN_STATE].state_dict()["step"]
        generators.seed(step)
        if missing:
            logger.info(
                f"{checkpoint_id} has no state of random generators for this mesh "
                f"({generators.mesh}): random numbers, as of dropout, come from debug.seed and "
                f"step {step}, and are not those of a run without a break"
            )


def with_checked_checkpoints(config: BaseCheckpointManager.Config) -> BaseCheckpointManager.Config:
    """Return the config of a CheckedCheckpointManager for that of torchtitan's manager.

    Any other config, one of a user's own manager for example, is returned as it is.
    """
    if type(config) is not CheckpointManager.Config:
        return config
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return CheckedCheckpointManager.Config(**fields)


def _reasons(error: BaseException) -> str:
    """Format an error, or the errors of the ranks in one of torch's, without the last full stop."""
    if not isinstance(error, dcp.CheckpointException):
        return f"{type(error).__name__}: {error}".rstrip(".")
    ranks: dict[str, list[str]] = {}
    for rank, (e, _) in sorted(error.failures.items()):
        ranks.setdefault(f"{type(e).__name__}: {e}".rstrip("."), []).append(str(rank))
    return "; ".join(
        f"{'ranks' if of[1:] else 'rank'} {', '.join(of)}: {reason}"
        for reason, of in itertools.islice(ranks.items(), _SHOWN)
    )


def _on_all_ranks(call: Callable[[], _T]) -> list[_T]:
    """Return what a call returned on each rank; an error of one rank is raised on all."""
    try:
        result: Any = call()
    except Exception as error:
        result = error
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _tied(tensors: dict[str, Any]) -> dict[str, str]:
    """Map the second and further names of the same memory to its first name."""
    firsts: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            local = local_tensor(value)
            place = storage_id(local), local.storage_offset()
            first = firsts.setdefault((*place, local.shape, local.stride(), local.dtype), name)
            if first != name:
                tied[name] = first
    # parts without elements, which some ranks have, may look like the same memory
    everywhere = set.intersection(*(set(names.items()) for names in _on_all_ranks(lambda: tied)))
    return {name: first for name, first in tied.items() if (name, first) in everywhere}


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name that safetensors have for a dtype, "" if none."""
    try:
        data = to_safetensors({"x": torch.empty(1, dtype=dtype)})
    except KeyError:
        return ""
    length = int.from_bytes(data[:8], "little")
    description = json.loads(data[8 : 8 + length])["x"]
    # float4 counts its halves
    return str(description["dtype"]) if description["shape"] == [1] else ""


def _write_whole(
    file: Path,
    blocks: Iterable[dict[str, torch.Tensor]],
    convert: _Convert,
    parts: Iterable[Path],
) -> None:
    """Write weights of these shapes and dtypes to a file, from what torch wrote on each rank.

    One block is in memory at a time, and converted there. Larger dtypes come first, so that all
    values are aligned.
    """
    converted: dict[str, torch.Tensor] = {}
    for block in blocks:
        converted.update(convert(block))
    ordered = sorted(converted.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in ordered:
        start, end = end, end + value.nbytes
        description = {"dtype": _dtype_name(value.dtype), "shape": list(value.shape)}
        header[name] = description | {"data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with contextlib.ExitStack() as opened:
        written = opened.enter_context(file.open("wb"))
        written.write(len(text).to_bytes(8, "little") + text)
        first = written.tell()
        read: Any = [opened.enter_context(safe_open(part, "pt")) for part in parts]
        offsets = [json.loads(part.metadata()["DCP_SHARDING_INFO"]) for part in read]
        opened_parts = list(zip(read, offsets, strict=True))
        for block in blocks:
            joined = {name: _joined(name, value, opened_parts) for name, value in block.items()}
            for name, value in convert(joined).items():
                written.seek(first + header[name]["data_offsets"][0])
                written.write(value.flatten().view(torch.uint8).numpy().data)


def _joined(name: str, like: torch.Tensor, parts: Iterable[tuple[Any, Any]]) -> torch.Tensor:
    """Return a weight, joined of what the ranks' files hold of it."""
    tensor, missing = torch.empty(like.shape, dtype=like.dtype), like.numel()
    for part, places in parts:
        if name in places:
            piece, first = part.get_tensor(name), places[name]["saved_offsets"]
            tensor[tuple(map(slice, first, map(int.__add__, first, piece.shape)))] = piece
            missing -= piece.numel()
    assert missing == 0, f"no rank wrote {missing} values of {name}"
    return tensor
