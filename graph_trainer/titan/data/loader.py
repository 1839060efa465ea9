"""Tokenised documents as one stream of rows, and the dataloader that gives ranks their rows."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data.corpus import open_corpus
from graph_trainer.titan.data.tokenizer import tokenize


class PackedRows:
    """The endless, fixed sequence of rows that a split, a row length and a seed give.

    Within a document, every token but the last is an input, and the token after it is its label.
    An epoch is these pairs of all documents, end to end, in an order that the seed and the epoch
    fix, cut into rows of ``seq_len``; the pairs at its end that fill no row are left out of that
    epoch. The rows are then shuffled too: long documents fill many rows, and a batch from a single
    document would move the model towards that document alone. Row ``i`` belongs to epoch
    ``i // rows_per_epoch``. Any row can be computed without those before it, so a position in
    the data is one number, and rows can be assigned to ranks in any way.

    Args:
        table: the tokenised corpus, from `tokenize`.
        split: "train" or "validation".
        seq_len: tokens a row, at least 1.
        seed: fixes the order of documents and of rows; not negative.
    """

    def __init__(self, table: pa.Table, split: str, *, seq_len: int, seed: int):
        self._tokens = table["tokens"]
        lengths = pc.list_value_length(self._tokens).to_numpy().astype(np.int64)
        validation = table["validation"].to_numpy().astype(np.bool_)
        self._chosen = np.flatnonzero(validation == (split == "validation"))
        # A document of one token has no pair; one of none must not count -1.
        self._pairs = np.maximum(lengths[self._chosen] - 1, 0)
        self._seq_len, self._seed, self._epoch = seq_len, seed, -1
        self.documents = len(self._chosen)
        self.pairs_per_epoch = int(self._pairs.sum())  # the last ones may not fill a row
        self.rows_per_epoch = self.pairs_per_epoch // seq_len
        # Of the tokens, where documents begin, and which of them validate.
        digest = hashlib.blake2b(digest_size=32)
        for chunk in self._tokens.chunks:
            digest.update(chunk.flatten().to_numpy())
        digest.update(np.cumsum([0, *lengths], dtype="<i8").tobytes())
        digest.update(validation.tobytes())
        self.digest = digest.hexdigest()
        """64 hexadecimal digits: equal digests give equal rows, on any machine."""

    def row(self, index: int) -> npt.NDArray[np.int64]:
        """Compute a row: inputs, positions and labels, [3, seq_len].

        Positions count from 0 at the start of the row and of each document in it.
        """
        epoch, index = divmod(index, self.rows_per_epoch)
        if epoch != self._epoch:
            # numpy promises the raw output of a bit generator for all versions, and not that of
            # Generator.permutation: a run resumed after an upgrade must read the same order.
            bits = np.random.PCG64(np.random.SeedSequence((self._seed, epoch)))
            self._order = np.argsort(bits.random_raw(self.documents), kind="stable")
            self._ends = np.cumsum(self._pairs[self._order])
            self._row_order = np.argsort(bits.random_raw(self.rows_per_epoch), kind="stable")
            self._epoch = epoch
        row = np.empty((3, self._seq_len), dtype=np.int64)
        first = int(self._row_order[index]) * self._seq_len
        place = int(np.searchsorted(self._ends, first, side="right"))
        done = 0
        while done < self._seq_len:
            document = self._order[place]
            pairs = self._pairs[document]
            begin = first + done - (self._ends[place] - pairs)
            size = int(min(pairs - begin, self._seq_len - done))
            tokens = self._tokens[int(self._chosen[document])].values.to_numpy()  # no copy
            inputs, labels = tokens[begin : begin + size], tokens[begin + 1 : begin + 1 + size]
            row[:, done : done + size] = inputs, np.arange(size), labels
            done += size
            place += 1
        return row


class TextDataLoader(BaseDataLoader):
    """Give each data-parallel rank its rows of one global, packed stream of documents.

    A global batch is the next ``dp_world_size * local_batch_size`` rows of the stream (see
    PackedRows); rank r takes rows r * local_batch_size to (r + 1) * local_batch_size of it. So the
    ranks together read what one rank with the global batch would read, no row goes to two ranks,
    and all ranks have the same number of batches. The position is one number, the same on every
    rank, and is valid for any number of ranks and any batch size.

    As with torchdata's StatefulDataLoader, iterating again starts anew, except directly after
    ``load_state_dict``. The state is exact after every batch, whatever snapshot_every_n_steps.

    Raises:
        ConfigError: a dataset that is missing, unreadable, or has fewer tokens than one global
            batch; a negative seed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset: str | None = None
        """"stdlib": the source files of the running Python's standard library. "text": files of
        your own at dataset_path. Unset: "text" with a path, else "stdlib"; for validation the
        training data."""

        dataset_path: str | None = None
        """Your own text: a .txt or .jsonl file, or a folder of them."""

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
        corpus = open_corpus(config.dataset, config.dataset_path)
        table = tokenize(corpus, tokenizer)
        self._rows = PackedRows(table, config.split, seq_len=seq_len, seed=config.seed)
        self._infinite = config.infinite
        self._global_rows = dp_world_size * local_batch_size
        self._local = range(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
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
            number = self._rows.documents
            documents = f"{number:,} documents have" if number != 1 else "one document has"
            raise ConfigError(
                f"the {config.split} split of dataset {corpus.name!r} "
                f"({config.dataset_path or 'built in'}) is too small: its {documents} "
                f"{self._rows.pairs_per_epoch:,} tokens to predict, and one global batch needs "
                f"{self._global_rows * seq_len:,} ({dp_world_size} data-parallel ranks "
                f"x {local_batch_size} rows x {seq_len} tokens). "
                + (
                    "Add text, or lower training.local_batch_size or training.seq_len."
                    if number
                    else "A text of one document has none to validate: cut it by blank lines, name "
                    "another one with validator.dataloader.dataset_path, or set validator.enable = "
                    "false."
                )
            )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Generate the batches of this rank.

        Yields:
            ({"input": ..., "positions": ...}, labels), each [local_batch_size, seq_len] int64 on
            the CPU. A label is the token after its input, in the same document. Positions count
            from 0 at the start of each document and of each row.
        """
        if not self._resuming:
            self._position = 0
        self._resuming = False

        def batches() -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while self._infinite or self._position + self._global_rows <= self._rows.rows_per_epoch:
                rows = [self._rows.row(self._position + i) for i in self._local]
                inputs, positions, labels = torch.from_numpy(np.stack(rows, axis=1))
                # Before the yield: a state that is saved while this batch is used is past it.
                self._position += self._global_rows
                yield {"input": inputs, "positions": positions}, labels

        return batches()

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
        changed = [
            f"{key} was {state_dict[key]!r} and is {value!r}"
            for key, value in self._identity.items()
            if key in state_dict and state_dict[key] != value
        ]
        missing = {"position", *self._identity} - state_dict.keys()
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
