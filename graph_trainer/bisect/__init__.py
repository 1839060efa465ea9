"""Which pass changed the numbers: growing prefixes of the pass list against the eager model."""

from graph_trainer.bisect.search import bisect_passes
from graph_trainer.bisect.verdict import Verdict

__all__ = ["Verdict", "bisect_passes"]
