"""The backends, by name."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from graph_trainer.core.runtime.backends.backend import Backend
from graph_trainer.core.runtime.backends.eager import EAGER
from graph_trainer.core.runtime.backends.inductor import INDUCTOR
from graph_trainer.core.runtime.backends.regional.regional import REGIONAL
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.errors import ConfigError

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (EAGER, INDUCTOR, REGIONAL)}


COMPILER_REMEDY = "apt install g++ python3-dev, or set CXX"
"""Where `missing_compiler` finds something missing."""


def missing_compiler() -> str:
    """Return what Inductor lacks to build kernels for the CPU, a C++ compiler or Python's headers;
    empty where both are there."""
    name = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not shutil.which(name):
        return name
    return "" if header.is_file() else str(header)


def find_backend(name: str) -> Backend:
    """Return the backend of a name; a ConfigError that suggests the nearest where there is none."""
    if name not in BACKENDS:
        hint = did_you_mean(name, BACKENDS, otherwise=".")
        raise ConfigError(
            f"there is no backend '{name}'{hint} It must be one of {', '.join(BACKENDS)}"
        )
    return BACKENDS[name]
