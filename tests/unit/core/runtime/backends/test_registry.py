"""A backend is one file and one line of the registry: help, checks and runs follow."""

import subprocess
import sys

BACKEND = """
from graph_trainer.core.runtime.backends.backend import Backend
from graph_trainer.core.runtime.backends.eager import compile_graph

compiled = []

def compile_and_note(joint):
    compiled.append(joint)
    return compile_graph(joint)

NOTING = Backend(name="noting", compile=compile_and_note, fuses_ops=True, dispatches_ops=True)
"""
RUN = """
import torch
from noting import NOTING, compiled
from graph_trainer.core.runtime.backends.registry import BACKENDS
BACKENDS[NOTING.name] = NOTING

import graph_trainer as gt
from graph_trainer.cli.main import main

model, batch = torch.nn.Linear(4, 1), torch.ones(2, 4)
joint = gt.capture(model, lambda m, x: m(x).sum(), (batch,))
losses = [gt.compile(joint, backend)(model, batch)[0] for backend in ("eager", "noting")]
assert compiled == [joint] and losses[0] == losses[1]

assert main(["config", "--compile.backend", "noting"]) == 0
assert main(["config", "--compile.backend", "noticing"]) == 2
main(["train", "--help"])
"""


def test_a_backend_of_one_file_is_one_registration(tmp_path):
    (tmp_path / "noting.py").write_text(BACKEND)
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'Write "eager", "inductor", "regional", "noting".' in done.stderr, done.stderr
    assert 'backend = "noting"' in done.stdout
    help_line = next(line for line in done.stdout.splitlines() if "--compile.backend " in line)
    assert "eager,inductor,regional,noting" in help_line, help_line
