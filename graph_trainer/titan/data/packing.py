"""One epoch's documents, shuffled, end to end, cut into rows, and the rows shuffled again."""

import numpy as np
import numpy.typing as npt

from graph_trainer.titan.data.corpus import Split
from graph_trainer.titan.data.store import TokenStore


class PackedRows:
    """The endless, fixed sequence of rows that a split, a row length and a seed give.

    Within a document, every token but the last is an input and the one after
    it its label. An epoch is these pairs of every document, end to end, in an
    order that the seed and the epoch fix, cut into rows of ``seq_len``; the
    pairs that fill no row at its end are left out of that epoch. The rows are
    then shuffled too: long documents fill many rows, and a batch of a single
    document's would move the model towards that document alone. Row ``i``
    belongs to epoch ``i // rows_per_epoch``. Any row can be had without those
    before it, so that a position in the data is one number, and ranks can
    share rows out as they like.

    Arguments:
        store: the tokenised corpus.
        split: the documents to use.
        seq_len: tokens a row, at least 1.
        seed: fixes the order of documents and of rows; not negative.
    """

    def __init__(self, store: TokenStore, split: Split, *, seq_len: int, seed: int):
        chosen = np.flatnonzero(store.validation == (split == "validation"))
        self._tokens = store.tokens
        self._starts = store.offsets[chosen]
        # A document of one token has no pair; one of none must not count -1.
        self._pairs = np.maximum(store.offsets[chosen + 1] - self._starts - 1, 0)
        self._seq_len = seq_len
        self._seed = seed
        self._epoch = -1
        self._order = self._ends = self._row_order = np.empty(0, dtype=np.int64)
        self.documents = len(chosen)
        """Documents an epoch."""
        self.pairs_per_epoch = int(self._pairs.sum())
        """Tokens to predict an epoch, those that fill no row included."""
        self.rows_per_epoch = self.pairs_per_epoch // seq_len
        """Whole rows an epoch."""

    def fill(
        self,
        row: int,
        inputs: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int64],
    ) -> None:
        """Write row ``row`` into three arrays, each [seq_len] int64.

        Positions count from 0 at the start of the row and of each document in
        it, so they stay below seq_len.
        """
        epoch, row = divmod(row, self.rows_per_epoch)
        if epoch != self._epoch:
            self._shuffle(epoch)
        first = int(self._row_order[row]) * self._seq_len
        place = int(np.searchsorted(self._ends, first, side="right"))
        done = 0
        while done < self._seq_len:
            document = self._order[place]
            pairs = self._pairs[document]
            skipped = first + done - (self._ends[place] - pairs)
            size = int(min(pairs - skipped, self._seq_len - done))
            begin = self._starts[document] + skipped
            here = slice(done, done + size)
            inputs[here] = self._tokens[begin : begin + size]
            labels[here] = self._tokens[begin + 1 : begin + 1 + size]
            positions[here] = np.arange(size)
            done += size
            place += 1

    def _shuffle(self, epoch: int) -> None:
        # numpy promises the raw output of a bit generator for all versions, and
        # does not promise that of Generator.permutation: a run resumed after an
        # upgrade must meet the same order.
        bits = np.random.PCG64(np.random.SeedSequence((self._seed, epoch)))
        self._order = np.argsort(bits.random_raw(self.documents), kind="stable")
        self._ends = np.cumsum(self._pairs[self._order])
        self._row_order = np.argsort(bits.random_raw(self.rows_per_epoch), kind="stable")
        self._epoch = epoch
