"""What a run needs of the machine beside memory."""

from __future__ import annotations

import pytest

from graph_trainer.errors import ConfigError
from graph_trainer.titan.device import check_compiler


def test_a_backend_that_compiles_for_the_cpu_needs_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "nonexistent")
    check_compiler("eager")
    with pytest.raises(ConfigError, match='compile.backend = "inductor".* no nonexistent. apt'):
        check_compiler("inductor")
