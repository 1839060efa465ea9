"""graph-trainer bisect-passes: the verdict as a table and an exit code."""

import json
import math
import os
import re
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from graph_trainer.cli import launcher
from graph_trainer.cli import main as cli
from graph_trainer.cli.bisect import verdict_table
from graph_trainer.core.analysis.node_diff import NodeDifference
from graph_trainer.core.bisect.search import Prefix, Verdict
from graph_trainer.core.tensor_diff import Difference

NAN, INF = math.nan, math.inf


def shown(verdict):
    console = Console(width=100, file=None)
    with console.capture() as captured:
        console.print(verdict_table(verdict))
    return captured.get()


def found_node(**changes):
    entries = {
        "position": 7,
        "name": "mul_1",
        "op": "aten.mul.Tensor",
        "module": "layers.1.attention",
        "phase": "forward",
        "after": "%mul_1 : [num_users=1] = " + "call_function[...]" * 12,
        "before": "",
        "kept": False,
        "seen_at": "relu",
        "difference": Difference("relu", 0.25, NAN, "(3,) float32 instead of (4,) float32"),
    }
    return NodeDifference(**(entries | changes))


def long_verdict():
    name = "gradient of layers.100.feed_forward.a_module_with_a_long_name.[0].weight"
    bad = [Difference(name, 1.5e-7, INF), Difference("loss", NAN, 0.0, "missing")]
    rows = [
        Prefix("capture", 12_345, [[] for _ in range(64)]),
        Prefix("functionalize_writes", 12_345, [[], *([bad] * 63)]),
    ]
    return Verdict(rows, 900, [None, *([found_node()] * 63)])


def test_the_table_fits_and_says_what_where_and_how_much():
    text = shown(long_verdict())
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    for part in ("12,345", "1.5e-07", "inf", "0, 1"[3:], "(63)", "none of 900", "mul_1"):
        assert part in words
    assert "inserted by the pass" in words and "at relu, which reads it" in words
    assert "'functionalize_writes' is the first pass that changes the numbers" in words
    joined = re.sub(r"\s", "", text)
    assert "[0]" in joined and "(3,)float32insteadof(4,)float32" in joined


def test_a_verdict_survives_its_file():
    verdict = long_verdict()
    again = TypeAdapter(Verdict).validate_json(json.dumps(asdict(verdict)))
    assert repr(again) == repr(verdict)  # NaN is not equal to itself


@pytest.fixture
def launched(monkeypatch):
    """Runs the command with ranks that leave this verdict, or none."""

    def launch(verdict, *argv):
        started = []

        def start(launch):
            started.append((launch.arguments, dict(os.environ)))
            if verdict is not None:
                with open(os.environ["GRAPH_TRAINER_VERDICT_FILE"], "w") as file:
                    json.dump(asdict(verdict), file)
            return 1  # torchrun's own status says nothing of the verdict

        monkeypatch.setattr(launcher, "start", start)
        for name in ("CUDA_VISIBLE_DEVICES", "GRAPH_TRAINER_VERDICT_FILE"):
            monkeypatch.setenv(name, "restored when the test ends")
        return cli.main(["bisect-passes", *argv]), started

    return launch


def test_the_exit_code_says_what_was_found(launched, capsys):
    equal = Verdict(long_verdict().prefixes[:1], 3, [])
    assert launched(equal)[0] == 0
    assert "bitwise equal" in capsys.readouterr().out
    code, ((words, environment),) = launched(long_verdict(), "--training.seq_len", "32")
    assert code == 1 and "first pass that changes" in capsys.readouterr().out
    assert words[-4:] == ["-m", "graph_trainer.cli.bisect_worker", "--training.seq_len", "32"]
    assert "--nproc_per_node=2" in words and environment["CUDA_VISIBLE_DEVICES"] == ""
    assert launched(None)[0] == 2
    differs = [Prefix("capture", 3, [[Difference("loss", 1.0, 1.0)]])]
    assert launched(Verdict(differs, 3, []))[0] == 1
    assert "capture is at fault" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--training.stepz", "3"], ["training.steps?"]),
        (["--compile.passes", "nothing"], ["compile.passes", "nothing"]),
    ],
)
def test_bad_input_starts_no_ranks(flags, words, launched, capsys):
    code, started = launched(None, *flags)
    assert code == 2 and not started
    err = capsys.readouterr().err
    assert all(word in err for word in words) and "Traceback" not in err
