"""Batches: their content, the rows of each rank, and resumed runs."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pytest
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torchtitan.components.tokenizer import BaseTokenizer

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data.loader import PackedRows, TextDataLoader
from tests.examples import examples

BOS, EOS = 256, 257


class ByteTokenizer(BaseTokenizer):
    """One id a byte: documents can be read back out of the rows."""

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [BOS] * add_bos + list(text.encode()) + [EOS] * add_eos

    def decode(self, ids) -> str:
        return bytes(ids).decode()

    def get_vocab_size(self) -> int:
        return 258


DOCUMENTS = [f"{i:02d}" + "abcdefghijklmnop" * (i % 7) for i in range(40)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return str(path)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GRAPH_TRAINER_CACHE", str(tmp_path_factory.mktemp("cache")))


def make(path, *, ranks=1, rank=0, batch=1, seq_len=16, tokenizer=None, **config):
    config = {"infinite": False, **config}
    return TextDataLoader.Config(dataset="text", dataset_path=path, **config).build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=tokenizer or ByteTokenizer(),
        seq_len=seq_len,
        local_batch_size=batch,
        snapshot_every_n_steps=3,
    )


def rows(batches) -> list[tuple[list[int], list[int], list[int]]]:
    """The rows of batches: (input, positions, labels) each."""
    return [
        row
        for inputs, labels in batches
        for row in zip(
            inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist(), strict=True
        )
    ]


def in_document_order(loader) -> list[tuple[list[int], list[int], list[int]]]:
    """The rows of one epoch as they were before the rows were shuffled."""
    shuffled = rows(loader)
    return [shuffled[i] for i in np.argsort(loader._rows._row_order)]


def encoded(split_rows) -> list[bytes]:
    """The documents in rows of ByteTokenizer, the last one perhaps cut off."""
    stream = list(itertools.chain.from_iterable(row[0] for row in split_rows))
    starts = [i for i, value in enumerate(stream) if value == BOS] + [len(stream)]
    return [bytes(stream[a + 1 : b]) for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("seq_len", [1, 5, 16, 100])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_epoch_is_every_document_once_with_labels_inside_it(dataset, seq_len, split):
    epoch = in_document_order(make(dataset, seq_len=seq_len, split=split))
    pairs = [(a, b) for row in epoch for a, b in zip(row[0], row[2], strict=True)]
    # The label is the next input, except that a document's last label is its end.
    for (_, label), (following, _) in itertools.pairwise(pairs):
        assert following == (BOS if label == EOS else label)
    documents = encoded(epoch)
    other = encoded(
        in_document_order(
            make(dataset, seq_len=1, split="validation" if split == "train" else "train")
        )
    )
    assert pairs[0][0] == BOS
    whole, last = documents[:-1], documents[-1]
    assert len(set(whole)) == len(whole)
    remaining = {text.encode() for text in DOCUMENTS} - set(other) - set(whole)
    assert any(text.startswith(last) for text in remaining)
    # What is left out of the epoch is less than a row.
    assert sum(len(text) + 1 for text in remaining) - (len(last) + 1) < seq_len
    assert set(whole) | remaining | set(other) == {text.encode() for text in DOCUMENTS}


def test_neighbouring_rows_come_from_different_documents(dataset):
    """A batch out of one long document would pull the model towards that document."""
    loader = make(dataset, seq_len=4)
    epoch = rows(loader)
    assert sorted(epoch) == sorted(in_document_order(loader))
    follows = [following[0][0] == label[2][-1] for label, following in itertools.pairwise(epoch)]
    assert sum(follows) < len(follows) / 2


@pytest.mark.parametrize("seq_len", [1, 5, 16, 100])
def test_positions_count_from_each_document_and_row(dataset, seq_len):
    for inputs, positions, _ in rows(make(dataset, seq_len=seq_len)):
        expected = 0
        for value, position in zip(inputs, positions, strict=True):
            expected = 0 if value == BOS else expected
            assert position == expected < seq_len
            expected += 1


shapes = st.tuples(st.integers(1, 5), st.integers(1, 3))


@given(shape=shapes, seq_len=st.integers(1, 40), seed=st.integers(0, 2**40), infinite=st.booleans())
@examples(25)
def test_ranks_together_see_what_one_rank_sees(dataset, shape, seq_len, seed, infinite):
    ranks, batch = shape
    options = {"seq_len": seq_len, "seed": seed, "infinite": infinite}
    one = itertools.islice(make(dataset, batch=ranks * batch, **options), 150)
    many = [
        list(itertools.islice(make(dataset, ranks=ranks, rank=r, batch=batch, **options), 150))
        for r in range(ranks)
    ]
    # The same number of batches on every rank: none waits for another at the end.
    for whole, *parts in zip(one, *many, strict=True):
        assert rows([whole]) == rows(parts)


def test_a_finite_loader_stops_after_the_last_whole_global_batch(dataset):
    total = len(rows(make(dataset)))
    for ranks, batch in [(1, 1), (2, 3), (5, 2), (1, total), (total, 1)]:
        for rank in (0, ranks - 1):
            count = len(list(make(dataset, ranks=ranks, rank=rank, batch=batch)))
            assert count == total // (ranks * batch)


def test_each_epoch_and_seed_has_another_order(dataset):
    total = len(rows(make(dataset)))
    endless = rows(itertools.islice(make(dataset, infinite=True), 2 * total))
    first, second = endless[:total], endless[total:]
    assert first == rows(make(dataset))
    assert first != second != rows(make(dataset, seed=1)) != first
    loader = make(dataset)
    documents = encoded(in_document_order(loader))
    assert sorted(documents[:-1]) != documents[:-1]
    # The order is pinned: a run resumed after an upgrade must read the same one.
    assert [int(text[:2]) for text in documents[:6]] == [11, 3, 20, 13, 2, 21]
    assert loader._rows._row_order[:6].tolist() == [56, 77, 75, 72, 23, 17]


@given(
    before=shapes,
    after=shapes,
    steps=st.integers(0, 40),
    seq_len=st.sampled_from([7, 16, 60]),
    infinite=st.booleans(),
)
@examples(60)
def test_a_resumed_run_continues_at_the_position(dataset, before, after, steps, seq_len, infinite):
    options = {"seq_len": seq_len, "infinite": infinite}
    whole = rows(itertools.islice(make(dataset, **options), 1200))
    states, taken = [], 0
    for rank in range(before[0]):
        loader = make(dataset, ranks=before[0], rank=rank, batch=before[1], **options)
        taken = len(list(itertools.islice(loader, steps))) * before[0] * before[1]
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert all(state == states[0] for state in states)
    resumed = [
        make(dataset, ranks=after[0], rank=rank, batch=after[1], **options)
        for rank in range(after[0])
    ]
    for loader in resumed:
        loader.load_state_dict(states[0])
        assert loader.state_dict() == states[0]
    following = [
        row for parts in itertools.islice(zip(*resumed, strict=True), 20) for row in rows(parts)
    ]
    assert following == whole[taken : taken + len(following)]
    if infinite:
        assert len(following) == 20 * after[0] * after[1]
    else:
        left = (len(whole) - taken) // (after[0] * after[1])
        assert len(following) == min(20, left) * after[0] * after[1]


def test_iterating_again_starts_anew_and_a_state_holds_for_one_iteration(dataset):
    loader = make(dataset)
    everything = rows(loader)
    assert rows(loader) == everything
    iterator = iter(loader)
    assert loader.state_dict()["position"] == 0
    next(iterator)
    state = loader.state_dict()
    assert state["position"] == 1
    other = make(dataset)
    other.load_state_dict(state)
    assert rows(other) == everything[1:]
    assert rows(other) == everything
    other.load_state_dict({})
    assert rows(other) == everything


def test_a_distributed_checkpoint_keeps_the_position(dataset, tmp_path):
    loader = make(dataset, ranks=2, rank=1, batch=2, infinite=True)
    list(itertools.islice(loader, 5))
    dcp.save({"dataloader": loader}, checkpoint_id=str(tmp_path / "checkpoint"))
    other = make(dataset, ranks=4, rank=0, batch=1, infinite=True)
    dcp.load({"dataloader": other}, checkpoint_id=str(tmp_path / "checkpoint"))
    assert other.state_dict() == loader.state_dict()
    assert other.state_dict()["position"] == 20


def test_a_position_in_other_data_is_refused(dataset, tmp_path):
    state = make(dataset).state_dict()
    (tmp_path / "other.txt").write_text(" ".join(DOCUMENTS))
    changes = {
        "seed was 0 and is 4": make(dataset, seed=4),
        "seq_len was 16 and is 8": make(dataset, seq_len=8),
        "split was 'train' and is 'validation'": make(dataset, split="validation"),
        "dataset_digest was": make(str(tmp_path / "other.txt")),
    }
    for message, loader in changes.items():
        with pytest.raises(ConfigError, match=message) as caught:
            loader.load_state_dict(state)
        assert "exclude_from_loading" in str(caught.value)
    with pytest.raises(ConfigError, match="has no dataset_digest, position"):
        make(dataset).load_state_dict({"dp_rank_0": b"", "world_size": 1})


def test_less_text_than_a_global_batch_is_refused_with_both_numbers(dataset, tmp_path):
    total = len(rows(make(dataset, seq_len=16)))
    make(dataset, batch=total, infinite=True)
    with pytest.raises(ConfigError) as caught:
        make(dataset, batch=total + 1, infinite=True)
    tokens = len(rows(make(dataset, seq_len=1)))
    needed = (total + 1) * 16
    assert f"its 36 documents have {tokens:,} tokens" in str(caught.value)
    assert f"needs {needed:,} " in str(caught.value)
    with pytest.raises(ConfigError, match="validation split .* too small"):
        make(dataset, split="validation", batch=total)
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "one"}))
    with pytest.raises(ConfigError, match="its one document has 4 tokens to predict"):
        make(str(tmp_path / "one.jsonl"))


def test_a_bad_seed_is_refused(dataset):
    with pytest.raises(ConfigError, match="seed = -1 is negative"):
        make(dataset, seed=-1)


def test_a_digest_is_of_tokens_borders_and_split_not_of_chunks():
    def of(*chunks: list[list[int]], validation: tuple[bool, ...] = (False, False)) -> str:
        tokens = pa.chunked_array(chunks, pa.list_(pa.uint16()))
        table = pa.table({"tokens": tokens, "validation": validation})
        return PackedRows(table, "train", seq_len=1, seed=0).digest

    same = of([[1, 2], [3]])
    assert same == of([[1, 2]], [[3]])
    others = [of([[1, 2], [4]]), of([[1], [2, 3]]), of([[1, 2], [3]], validation=(False, True))]
    assert len({same, *others}) == 4


def test_documents_of_no_or_one_token_are_passed_over():
    """A tokenizer without bos and eos gives such, and there is nothing to predict in them."""
    documents = [[], [1], [2, 3, 4], [], [5], [6, 7]]
    tokens = pa.chunked_array([documents[:3], documents[3:]], pa.list_(pa.uint16()))
    table = pa.table({"tokens": tokens, "validation": [False] * len(documents)})
    packed = PackedRows(table, "train", seq_len=1, seed=0)
    assert packed.rows_per_epoch == packed.pairs_per_epoch == 3
    for epoch in range(20):
        epoch_rows = [packed.row(row).tolist() for row in range(3 * epoch, 3 * epoch + 3)]
        pairs = {(inputs[0], labels[0]) for inputs, _, labels in epoch_rows}
        assert pairs == {(2, 3), (3, 4), (6, 7)}
