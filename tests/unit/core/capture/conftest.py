"""What tests of captured layers share."""

import logging
from types import SimpleNamespace

import pytest


@pytest.fixture
def reasons(caplog):
    """Why all layers were traced, one line each."""
    caplog.set_level(logging.INFO, logger="graph_trainer.core.capture.capture")
    return SimpleNamespace(
        all=lambda: [r.getMessage() for r in caplog.records if "Tracing all" in r.getMessage()]
    )
