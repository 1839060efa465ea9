"""The errors that graph_trainer raises on purpose.

Every message says what was asked, what was found, where (config key, node or
parameter FQN) and what to do about it.
"""


class GraphTrainerError(Exception):
    """Base class of every error that graph_trainer raises on purpose."""


class ConfigError(GraphTrainerError):
    """A configuration file, flag or dataset path that cannot be used as given."""


class CaptureError(GraphTrainerError):
    """A train step that cannot be captured, or a call that does not fit its graph."""


class PassError(GraphTrainerError):
    """A pass list that makes no sense, or a pass that failed."""


class MemoryLimitError(PassError):
    """A step that needs more memory than it may."""


class VerificationError(GraphTrainerError):
    """A graph that breaks a contract, or ranks whose graphs do not agree."""


class CheckpointError(GraphTrainerError):
    """A checkpoint that cannot be written, or none that can be loaded."""


class TrainingError(GraphTrainerError):
    """A run that cannot go on: numbers that are not finite, or ranks that did not arrive."""


class NotFiniteError(TrainingError):
    """A loss or a gradient that is not finite. Raised on every rank alike."""


class CollectiveError(GraphTrainerError):
    """A collective of this rank that failed: timed out, or lost the connection to another rank."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place} failed: {reason}. Another rank has ended, or did not arrive.")
        self.place = place
        """Which collective, and where in the model or the loop."""
        self.reason = reason
        """What the backend said."""
