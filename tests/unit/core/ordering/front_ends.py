"""Sequences by hand, and both front ends of the order check: offline and among ranks."""

import dataclasses
import itertools
from unittest import mock

import pytest

import graph_trainer as gt
from graph_trainer.core.ordering import exchange
from graph_trainer.core.ordering.agreement import Agreement
from graph_trainer.core.ordering.proof import prove_order
from graph_trainer.core.ordering.sequences import Issued
from tests.unit.fake_ranks import in_threads
from tests.unit.graphs import collective

GATHER = collective()
REDUCE = collective("reduce_scatter_tensor", reduction="sum")


def sequence_of(collectives):
    """What the rank issues whose collectives these are."""
    return [Issued(c.entry(), c.waited_after, c.describe(), c.where) for c in collectives]


def program(*steps):
    """What a rank issues: a collective, or the place of a collective that is waited for now."""
    issued, waited = [], {}
    for step in steps:
        if isinstance(step, int):
            waited.setdefault(step, len(issued))
        else:
            issued.append(step)
    return sequence_of(
        [dataclasses.replace(c, waited_after=waited.get(i)) for i, c in enumerate(issued)]
    )


def at_once(*collectives_):
    """Each waited for as soon as it is issued."""
    return program(*itertools.chain.from_iterable((c, i) for i, c in enumerate(collectives_)))


def offline(sequences, classes=None):
    """The message of the proof; None if it accepts. Sequences by rank, in a list or dict."""
    by_rank = sequences if isinstance(sequences, dict) else dict(enumerate(sequences))
    try:
        prove_order(by_rank, classes)
    except gt.VerificationError as error:
        return str(error)
    return None


def exchanged(outcomes):
    """What the exchange raises on every rank, of their sequences or errors; None if it goes on."""
    with mock.patch.object(exchange, "issued_by", lambda sequence, world_size: sequence):
        return in_threads(len(outcomes), lambda rank: _compared(outcomes[rank]))


def _compared(outcome):
    with Agreement().errors_sent():
        if isinstance(outcome, Exception):
            raise outcome
    exchange.check_order_across_ranks(outcome)


def online(sequences):
    """The message that every rank raises before its first step; None if all go on."""
    found = exchanged(sequences)
    unlike = {error and str(error).rpartition("VerificationError: ")[2] for error in found}
    assert len(unlike) == 1, unlike
    assert all(error is None or isinstance(error, gt.VerificationError) for error in found), found
    return unlike.pop()


FRONT_ENDS = pytest.mark.parametrize("check", [offline, online])


def refused(*sequences, words=(), check=offline, classes=None):
    """The message with which a front end refuses; it has all these words."""
    given = sequences[0] if isinstance(sequences[0], dict) else sequences
    message = check(given, classes) if classes else check(given)
    assert message is not None, "accepted"
    for word in words:
        assert word in message, message
    return message
