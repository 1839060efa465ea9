"""The backends, by name."""

from __future__ import annotations

from graph_trainer.core.runtime.backends.base import Backend
from graph_trainer.core.runtime.backends.eager import EAGER
from graph_trainer.core.runtime.backends.inductor import INDUCTOR
from graph_trainer.core.runtime.backends.regional.backend import REGIONAL
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.errors import ConfigError

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (EAGER, INDUCTOR, REGIONAL)}


def find_backend(name: str) -> Backend:
    """Look up a backend by its name.

    Raises:
        ConfigError: there is none of that name; the message names the nearest.
    """
    if name not in BACKENDS:
        hint = did_you_mean(name, BACKENDS, otherwise=".")
        raise ConfigError(
            f"compile.backend is '{name}'{hint} It must be one of {', '.join(BACKENDS)}"
        )
    return BACKENDS[name]
