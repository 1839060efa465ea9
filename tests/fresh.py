"""Python programs in a process that has done nothing but import what takes seconds.

One process imports it; each program runs in a fork. What a program has to import by itself still
has to be named in it, but nothing tells whether it was imported before.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

from tests.integration.launch import ROOT, user_environment


class Fresh:
    """Runs programs as `python` does, with the environment of a user and lines of 100 columns."""

    def __init__(self, folder: Path) -> None:
        self._said = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fresh"],
            cwd=ROOT,
            env=user_environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", COLUMNS="100"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run `python *words` in a folder, where `words` begin with -c, -m or a file."""
        assert self._process.stdin is not None and self._process.stdout is not None
        files = [str(self._said / name) for name in ("stdout", "stderr")]
        order = json.dumps({"words": words, "folder": str(folder), "files": files})
        print(order, file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        said = [Path(file).read_text() for file in files]
        return subprocess.CompletedProcess(words, code, *said)

    def end(self) -> None:
        """End the process that forks."""
        self._process.communicate()


def _run(words: list[str], folder: str, files: list[str]) -> None:
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDONLY)
    outputs = [os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for file in files]
    for number, file in enumerate((null, *outputs)):
        os.dup2(file, number)
    sys.path.insert(0, folder)
    first, *others = words
    if first == "-c":
        sys.argv = ["-c", *others[1:]]
        exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(first, run_name="__main__")


def _main() -> None:
    import pytest  # noqa: F401

    import graph_trainer.planner.plan
    import graph_trainer.testing  # noqa: F401

    gc.freeze()  # collections in the forks leave it alone
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _run(**json.loads(line))
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _main()
    os._exit(0)  # to end in order takes seconds
