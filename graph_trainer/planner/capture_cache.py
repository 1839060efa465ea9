"""Captured steps on disk, for later calls of `graph-trainer plan`."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import pickle
import re
import sys
import sysconfig
from pathlib import Path
from platform import python_version
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torchtitan.tools.logging import logger

from graph_trainer.core.capture.fake_mode import fake_mode
from graph_trainer.core.capture.side_effects import REVIEWED, is_installed_file
from graph_trainer.core.graph.call_signature import slots_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.module_settings import OF_EVERY_MODULE
from graph_trainer.core.graph.serialize import graph_from_bytes, graph_to_bytes
from graph_trainer.core.text import wrapped
from graph_trainer.core.torch_private import ambient_state
from graph_trainer.planner.console import OnProgress
from graph_trainer.planner.fake_rank import FakeRank

FOLDER = "GRAPH_TRAINER_CAPTURES"
"""The variable that names the folder; without it, graph_trainer/captures where caches lie."""
MOST_BYTES = 256 * 2**20
"""Of all files together; those used least recently are removed. A step of 8B takes 0.4 MiB."""

_FORMAT = 2
_PACKAGE = str(Path(__file__).parents[1])
_LOCK_SECONDS = 10


def default_folder() -> Path:
    """Return the folder that the environment names, or the user's folder for caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get(FOLDER) or Path(caches, "graph_trainer", "captures")).expanduser()


class CaptureCache:
    """Captured steps in the files of a folder, each named after all that its capture depends on.

    A folder or file that cannot be used is warned of once, if at all, and the step is captured.
    """

    def __init__(self, folder: Path, *, warns: bool = True) -> None:
        self._folder = folder
        self._warned = not warns
        self._digests: dict[str, bytes] = {}

    def of(self, run: FakeRank, what: str, on_progress: OnProgress) -> JointGraph:
        """Read the step of a rank, or capture and write it.

        Args:
            what: the part of the rank's config that is captured.

        Raises:
            CaptureError: the step cannot be captured.
        """
        key = key_of(run, what, self._digests)
        path = self._folder / f"{key}.graph"
        if (joint := self._read(path, run)) is not None:
            on_progress(f"captured by an earlier call: {key[:16]} in {self._folder}")
            return joint
        on_progress("capturing the train step")
        joint = run.capture()
        # otherwise the capture has imported further files
        if key == key_of(run, what, self._digests):
            self._write(path, joint, run)
        return joint

    def _read(self, path: Path, run: FakeRank) -> JointGraph | None:
        collects = gc.isenabled()
        gc.disable()  # everything that is made here remains; this halves the time
        try:
            if path.exists() and not path.is_file():
                raise OSError("it is no file")
            joint = graph_from_bytes(path.read_bytes(), fake_mode(), run.meshes)
            with contextlib.suppress(OSError):  # of another user, or on a disk to read from only
                os.utime(path)
            return joint
        except FileNotFoundError:
            return None
        except Exception as error:
            reason = getattr(error, "strerror", None) or error  # without the path again
            self._warn(f"{path} cannot be read: {reason}")
            return None
        finally:
            if collects:
                gc.enable()

    def _write(self, path: Path, joint: JointGraph, run: FakeRank) -> None:
        try:
            content = graph_to_bytes(joint, run.meshes)
        except pickle.PicklingError:  # sizes that data decide, subgraphs: captured every time
            return
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self._folder / "lock", timeout=_LOCK_SECONDS):
                try:
                    unfinished.write_bytes(content)
                    unfinished.replace(path)
                finally:
                    unfinished.unlink(missing_ok=True)
                self._remove_oldest()
        except OSError as error:
            self._warn(f"{self._folder} cannot be written to: {error}")

    def _remove_oldest(self) -> None:
        files = [(each.stat(), each) for each in self._folder.glob("*.graph*")]
        total = sum(stat.st_size for stat, _ in files)
        for stat, path in sorted(files, key=lambda each: each[0].st_mtime_ns):
            if total <= MOST_BYTES:
                return
            path.unlink(missing_ok=True)
            total -= stat.st_size

    def _warn(self, problem: str) -> None:
        if not self._warned:
            warning = (
                f"warning: cache of captured steps: {problem}. The step is captured; name another "
                f"folder with {FOLDER}, or leave the cache out with --no-capture-cache"
            )
            logger.warning(wrapped(warning))
        self._warned = True


def key_of(run: FakeRank, what: str, digests: dict[str, bytes] | None = None) -> str:
    """Hash everything that the captured step of a rank depends on.

    That is the config, the rank, the model as it was built, torch's settings, and all code: the
    files of this package, every imported file of the packages that the model and its loss are of,
    or of no installed one, with the variables of the environment that these files name; of
    torchtitan and transformers each file by size and time; of all others the versions.

    Args:
        digests: of files by path, as they were when this process first read them, and with it what
            it has imported: a file that has changed since is not what is captured.
    """
    classes = {of for module in run.model.modules() for of in type(module).__mro__}
    own = {of.__module__ for of in classes} | {getattr(run.loss_fn, "__module__", "")}
    packages = {name.partition(".")[0] for name in own} - {"torch", *sys.stdlib_module_names}
    tensors = [*run.model.named_parameters(), *run.model.named_buffers()]
    parts = [
        *(_FORMAT, python_version(), torch.version.git_version, sys.byteorder),
        sorted({each.name for path in sys.path for each in Path(path).glob("*.dist-info")}),
        *(what, run.world_size, run.rank, run.device),
        *(ambient_state(), torch.are_deterministic_algorithms_enabled()),
        _modules_of(run.model),
        [(name, _described(tensor)) for name, tensor in tensors],
    ]
    key = hashlib.sha256(repr(parts).encode())
    digests = {} if digests is None else digests
    for path in sorted(_sources(packages)):
        if path not in digests:
            digests[path] = _digest(path)
        key.update(f"\0{path}\0".encode() + digests[path])
    for package in sorted(packages & {*REVIEWED} | {"torchtitan"}):
        for file in sorted(Path(sys.modules[package].__path__[0]).rglob("*.py")):
            stat = file.stat()
            key.update(f"\0{file}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return key.hexdigest()


def _digest(path: str) -> bytes:
    """Hash a source file, and of the environment the variables that it names."""
    source = Path(path).read_bytes()
    digest = hashlib.sha256(source)
    if not path.startswith(_PACKAGE):
        words = set(re.findall(rb"\w+", source))
        named = {name: each for name, each in os.environ.items() if name.encode() in words}
        digest.update(repr(sorted(named.items())).encode())
    return digest.digest()


def _modules_of(model: torch.nn.Module) -> list[str]:
    """Describe every module: its name, class, mode, and what it holds beside parameters, buffers
    and modules. An object that several modules hold, their config say, is described once."""
    seen: set[int] = set()
    described = []
    for fqn, module in model.named_modules():
        kind = type(module)
        described.append(f"{fqn} {kind.__module__}.{kind.__qualname__} {module.training}")
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE:
                with contextlib.suppress(Exception):  # of an attribute, or nested without end
                    described.append(f"{name} {_text(value, seen)}")
    return described


def _text(value: Any, seen: set[int]) -> str:
    """Describe a value by its class and what it holds, in every process alike. Of objects of torch
    and of the standard library, of functions and of what was seen before it is the name."""
    kind = type(value)
    if isinstance(value, (type(None), int, float, complex, str, bytes, torch.dtype, torch.device)):
        return repr(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if id(value) in seen or isinstance(value, (torch.Tensor, torch.nn.Module)):
        return name
    seen.add(id(value))
    parts: list[str] = []
    if isinstance(value, dict):
        parts = [f"{_text(key, seen)}: {_text(each, seen)}" for key, each in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = [_text(each, seen) for each in value]
        parts = parts if isinstance(value, (list, tuple)) else sorted(parts)
    elif isinstance(value, np.ndarray):
        parts = [f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"]
    elif isinstance(value, functools.partial):
        parts = [_text(each, seen) for each in (value.func, value.args, value.keywords)]
    elif isinstance(value, (type, FunctionType, MethodType, BuiltinFunctionType)):
        parts = [f"{value.__module__}.{value.__qualname__}"]
    elif kind.__module__.partition(".")[0] not in ("torch", *sys.stdlib_module_names):
        held = [*slots_of(kind), *getattr(value, "__dict__", ())]
        # a hash is another number in another process
        held = [each for each in held if "hash" not in each]
        parts = [f"{each}={_text(getattr(value, each, None), seen)}" for each in held]
    return f"{name}({', '.join(parts)})"


def _described(tensor: torch.Tensor) -> tuple[object, ...]:
    local = getattr(tensor, "_local_tensor", tensor)
    placed = (getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None))
    return (tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad, local.shape, *placed)


def _sources(packages: set[str]) -> set[str]:
    """List the source files of this package, and the imported ones of some packages and of none
    that is installed."""
    files = {str(path) for path in Path(_PACKAGE).rglob("*.py")}
    standard = sysconfig.get_path("stdlib")  # site-packages may lie below
    for name, module in list(sys.modules.items()):
        path, package = getattr(module, "__file__", None), name.partition(".")[0]
        if not path or not os.path.isfile(path) or package in REVIEWED:
            continue
        if package in packages or not (path.startswith(standard) or is_installed_file(path)):
            files.add(path)
    return files
