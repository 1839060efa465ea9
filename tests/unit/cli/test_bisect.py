"""graph-trainer bisect-passes: what it starts, and its exit code."""

import os

import pytest

from graph_trainer.cli import launcher
from graph_trainer.cli import main as cli


@pytest.fixture
def launched(monkeypatch):
    """Runs the command with ranks that end with this code."""

    def launch(code, *argv):
        started = []

        def start(launch):
            started.append((launch.arguments, dict(os.environ)))
            return code

        monkeypatch.setattr(launcher, "start", start)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "restored when the test ends")
        return cli.main(["bisect-passes", *argv]), started

    return launch


@pytest.mark.parametrize("code", [0, 2])
def test_ranks_verify_on_cpu_and_their_exit_code_is_the_commands(code, launched):
    ended, ((words, environment),) = launched(code, "--training.seq_len", "32")
    assert ended == code
    assert words[-4:] == ["-m", "graph_trainer.cli.bisect", "--training.seq_len", "32"]
    assert "--nproc_per_node=2" in words and environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--training.stepz", "3"], ["training.steps?"]),
        (["--compile.passes", "nothing"], ["compile.passes", "nothing"]),
        (["--compile.mode", "eager"], ["compile.mode", "aot_fx_trace"]),
    ],
)
def test_bad_input_starts_no_ranks(flags, words, launched, capsys):
    code, started = launched(0, *flags)
    assert code == 2 and not started
    err = capsys.readouterr().err
    assert all(word in err for word in words) and "Traceback" not in err
