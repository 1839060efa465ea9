"""The dataloader that torchtitan's trainer and validator draw batches from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data.corpus import open_corpus
from graph_trainer.titan.data.packing import PackedRows, tokenize

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class TextDataLoader(BaseDataLoader):
    """Give each data-parallel rank its rows of one global, packed stream of documents.

    A global batch is the next ``dp_world_size * local_batch_size`` rows of the stream (see
    PackedRows); rank r takes rows r * local_batch_size to (r + 1) * local_batch_size of it. So the
    ranks together read what one rank with the global batch would read, no row goes to two ranks,
    and all ranks have the same number of batches. The position is one number, the same on every
    rank, and is valid for any number of ranks and any batch size.

    As with torchdata's StatefulDataLoader, iterating again starts anew, except directly after
    ``load_state_dict``.

    Args:
        config: what to read.
        dp_world_size: number of data-parallel ranks.
        dp_rank: this rank's index among them.
        tokenizer: encodes the documents, each between bos and eos.
        seq_len: tokens a row.
        local_batch_size: rows a batch and rank.
        snapshot_every_n_steps: torchtitan's; ignored, since the state is exact after every batch.

    Raises:
        ConfigError: a dataset that is missing, unreadable, or has fewer tokens than one global
            batch; a negative seed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset: str = "stdlib"
        """"stdlib": the source files of the running Python's standard library. "text": files of
        your own at dataset_path."""

        dataset_path: str | None = None
        """For dataset "text": a .txt or .jsonl file, or a folder of them."""

        split: Literal["train", "validation"] = "train"
        """Which documents: about 8 in 100 are kept for validation."""

        infinite: bool = True
        """Begin another epoch, in another order, when the documents have all been read; otherwise
        stop after the last whole global batch."""

        seed: int = 0
        """Fixes the order of the documents; 0 or more."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
    ):
        if config.seed < 0:
            raise ConfigError(f"dataloader seed = {config.seed} is negative: set it to 0 or more.")
        table = tokenize(open_corpus(config.dataset, config.dataset_path), tokenizer)
        self._rows = PackedRows(table, config.split, seq_len=seq_len, seed=config.seed)
        self._infinite = config.infinite
        self._seq_len = seq_len
        self._local_rows = local_batch_size
        self._global_rows = dp_world_size * local_batch_size
        self._first_local_row = dp_rank * local_batch_size
        self._position = 0
        self._resuming = False
        # Everything that decides which tokens are at a position.
        self._identity = {
            "dataset_digest": self._rows.digest,
            "split": config.split,
            "seed": config.seed,
            "seq_len": seq_len,
        }
        if self._rows.rows_per_epoch < self._global_rows:
            needed = self._global_rows * seq_len
            raise ConfigError(
                f"the {config.split} split of dataset {config.dataset!r} "
                f"({config.dataset_path or 'built in'}) is too small: its {self._rows.documents} "
                f"documents have {self._rows.pairs_per_epoch} tokens to predict, and one global "
                f"batch needs {needed} ({dp_world_size} data-parallel ranks x {local_batch_size} "
                f"rows x {seq_len} tokens). Add text, or lower training.local_batch_size or "
                "training.seq_len."
            )

    def __iter__(self) -> Iterator[Batch]:
        """Generate the batches of this rank.

        Yields:
            ({"input": ..., "positions": ...}, labels), each [local_batch_size, seq_len] int64 on
            the CPU. A label is the token after its input, in the same document. Positions count
            from 0 at the start of each document and of each row.
        """
        if not self._resuming:
            self._position = 0
        self._resuming = False
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        shape = (self._local_rows, self._seq_len)
        while self._infinite or self._position + self._global_rows <= self._rows.rows_per_epoch:
            first = self._position + self._first_local_row
            inputs, positions, labels = (np.empty(shape, dtype=np.int64) for _ in range(3))
            for i in range(self._local_rows):
                self._rows.fill(first + i, inputs[i], positions[i], labels[i])
            # Before the yield: a state that is saved while this batch is used is past it.
            self._position += self._global_rows
            batch = {"input": torch.from_numpy(inputs), "positions": torch.from_numpy(positions)}
            yield batch, torch.from_numpy(labels)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, and the data that it is a position in.

        Returns:
            "position": rows of the stream that all ranks together have read, the same on every
            rank; "dataset_digest", "split", "seed", "seq_len".
        """
        return {"position": self._position, **self._identity}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved position at the next ``iter``; {} changes nothing.

        The number of ranks and the batch size may differ from those of the run that saved it.

        Raises:
            ConfigError: the position is one in other data: another corpus, tokenizer, split, seed
                or sequence length, or another loader.
        """
        if not state_dict:
            return
        missing = {"position", *self._identity} - state_dict.keys()
        changed = [
            f"{key} was {state_dict[key]!r} and is {value!r}"
            for key, value in self._identity.items()
            if key in state_dict and state_dict[key] != value
        ]
        if missing or changed:
            what = "; ".join(changed) or f"it has no {', '.join(sorted(missing))}"
            raise ConfigError(
                f"the checkpoint's place in the data does not fit this run: {what}. (The digest "
                "changes with the files, the Python whose library is read, and the tokenizer.) "
                "Resume with the same data, or begin the data anew with "
                "checkpoint.exclude_from_loading = ['dataloader']."
            )
        self._position = int(state_dict["position"])
        self._resuming = True
