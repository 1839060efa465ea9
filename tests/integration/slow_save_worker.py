"""graph_trainer.train with a slow disk, so that a test finds it in the middle of a save."""

from __future__ import annotations

import time
from typing import Any

from graph_trainer.titan import checkpoint_files
from graph_trainer.train import leave, run


class SlowFile(checkpoint_files._HashingFile):
    def write(self, data: Any) -> int:
        written = super().write(data)
        self.flush()
        time.sleep(0.1)
        return written


if __name__ == "__main__":
    checkpoint_files._HashingFile = SlowFile  # type: ignore[misc]
    leave(run())
