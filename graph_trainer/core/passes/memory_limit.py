"""A limit of device memory that an optional pass may not break."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from graph_trainer.core.analysis.memory import Category, Memory
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.simulation.simulate import predicted_memory
from graph_trainer.core.units import GIB, gib
from graph_trainer.errors import PassError

KEY = "compile.memory_limit_gib"


class Held(NamedTuple):
    """What decides, beside the graph and its inputs, how much is alive on this rank."""

    optimizer_bytes: int = 0
    """Optimizer state, from the second step on."""
    accumulated_bytes: int = 0
    """Gradients of earlier microbatches."""
    fused: bool = False
    """Whether the backend compiles."""
    device: str = "cuda"
    """ "cpu", where gloo allocates inside collectives; or "cuda"."""


HeldBytes = Callable[[JointGraph], Held]
Agree = Callable[[int], int]
"""Makes of this rank's number one that all ranks share: the largest of any."""


def nothing_held(joint: JointGraph) -> Held:
    """For a graph that is trained without state."""
    return Held()


def alone(mine: int) -> int:
    """`Agree` for a rank that has no others, or asks none."""
    return mine


class Budget:
    """Compares predicted peaks with the limit, the same on every rank.

    A rank with a smaller shard than others may be within the limit where they are not, and all
    must run the same passes; so the peak of the rank that needs most decides.

    Arguments:
        limit_gib: of everything on the device: parameters, buffers, batch, optimizer state,
            gradients and what the graph allocates; None for no limit.
        held: what is alive beside the graph.
        agree: called equally often on every rank.
    """

    def __init__(self, limit_gib: float | None, held: HeldBytes, agree: Agree) -> None:
        if limit_gib is not None and not limit_gib > 0:
            raise PassError(f"{KEY} = {limit_gib}: not a limit; write GiB above 0, or None")
        self._limit_gib = limit_gib
        self._held = held
        self._agree = agree
        self._latest: int | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is a limit."""
        return self._limit_gib is not None

    def memory(self, joint: JointGraph) -> Memory:
        """What is predicted for this rank. Linear in nodes."""
        return predicted_memory(joint, **self._held(joint)._asdict())

    def peak(self, joint: JointGraph) -> int:
        """Predicted peak, in bytes, of the rank that needs most; remembered until `changed`."""
        if self._latest is None:
            self._latest = self._agree(self.memory(joint).peak_bytes)
        return self._latest

    def changed(self) -> None:
        """The graph is another one now."""
        self._latest = None

    def is_over(self, joint: JointGraph) -> bool:
        """Whether the graph as it is now needs more than the limit."""
        return self._limit_gib is not None and self.peak(joint) > self._limit_gib * GIB

    def why_rolled_back(self, before: int, after: int) -> str:
        """What the report says of a pass that was rolled back. Arguments: peaks in bytes."""
        return (
            f"rolled back: it raises the predicted peak by {after - before:,} bytes to "
            f"{gib(after)} GiB, {KEY} is {self._limit_gib:g}"
        )

    def refusal(self, joint: JointGraph, ledger: str, *, reshards: bool) -> PassError:
        """The error for a graph that needs more than the limit whatever passes are left out.

        Arguments:
            ledger: the report so far, as text.
            reshards: whether every parameter is gathered again in backward already.
        """
        memory = self.memory(joint)
        at_peak = memory.peak_by_category()
        parts = ", ".join(
            f"{category.value.replace('_', ' ')} {gib(size)}"
            for category, size in sorted(at_peak.items(), key=lambda entry: -entry[1])
            if size
        )
        return PassError(
            f"{KEY} = {self._limit_gib:g}: the step needs {gib(self.peak(joint))} GiB at its "
            "predicted peak on the rank that needs most, without any optional pass. This rank: "
            f"{gib(memory.peak_bytes)} GiB, of which {parts}.\n{ledger}\n"
            f"Raise {KEY}, or set what would help, with what it frees here at most:\n"
            + "\n".join(f"  {line}" for line in remedies(at_peak, reshards=reshards))
        )


_STATE = (Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.GRADIENTS)
_REMEDIES: tuple[tuple[tuple[Category, ...], str], ...] = (
    (
        (Category.UNSHARDED,),
        'parallelism.fsdp_reshard_after_forward = "always": gather parameters again in backward',
    ),
    (
        (Category.ACTIVATIONS,),
        'activation_checkpoint.type = "selective" or "full": compute activations again',
    ),
    (
        (Category.ACTIVATIONS, Category.TEMPORARIES),
        "a smaller training.local_batch_size or training.seq_len",
    ),
    (_STATE, "a larger parallelism.data_parallel_shard_degree, on more ranks"),
)


def remedies(at_peak: dict[Category, int], *, reshards: bool = False) -> list[str]:
    """Settings that need less memory, the one that concerns most bytes of the peak first.

    Arguments:
        at_peak: bytes of each category at the peak.
        reshards: whether every parameter is gathered again in backward already.
    """
    concerned = [
        (sum(at_peak[c] for c in kinds), text)
        for kinds, text in _REMEDIES
        if not (reshards and kinds == (Category.UNSHARDED,))
    ]
    concerned.sort(key=lambda entry: -entry[0])
    least = sum(at_peak.values()) / 1000  # what concerns less is no help
    return [f"{text} ({gib(size)} GiB)" for size, text in concerned if size > least]
