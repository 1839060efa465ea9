"""`graph-trainer plan`: bad input is one message, before anything is captured."""

from __future__ import annotations

import pytest

from graph_trainer.cli import main as cli
from graph_trainer.cli import plan_command as command
from graph_trainer.core.ordering.proof import OrderProof
from graph_trainer.titan.config import load

TP = "--parallelism.tensor_parallel_degree"
DEEPSEEK = ["--module", "graph_trainer.deepseek_v3", "--config", "debugmodel"]
EP = "--parallelism.expert_parallel_degree"
SHARD = "--parallelism.data_parallel_shard_degree"


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Runs the command, which must end with exit code 2 and captures nothing; what it says."""
    for work in ("make_plan", "verify_order", "compare"):
        monkeypatch.setattr(command, work, lambda *a, **k: pytest.fail("the work was begun"))

    def run(*words: str) -> str:
        words = tuple(word.replace("TMP", str(tmp_path)) for word in words)
        before = sorted(tmp_path.iterdir())
        try:
            code = cli.main(["plan", *words])
        except SystemExit as ended:  # argparse
            code = ended.code
        out, err = capsys.readouterr()
        assert (code, out) == (2, "") and "Traceback" not in err
        assert sorted(tmp_path.iterdir()) == before
        return " ".join(err.replace(str(tmp_path), "TMP").split())

    return run


BAD = {
    "unknown profile": (["--hardware", "h100-smx"], "did you mean 'h100-sxm'? Known profiles:"),
    "unknown key": (
        ["--parallelism.tensor_paralel_degree", "2"],
        "Did you mean parallelism.tensor_parallel_degree",
    ),
    "degree that does not divide": (["--world-size", "6", TP, "4"], "4: does not divide 6"),
    "ranks that nothing says": ([TP, "4"], "so 4 is the fewest that shard: add --world-size 4"),
    "order of another program": (
        ["--verify-order", "--like", "torchtitan"],
        "--like torchtitan plans another program",
    ),
    "no ranks": (["--world-size", "0"], "'0': write a whole number from 1"),
    "rank too high": (["--world-size", "8", "--rank", "8"], "there are 8 ranks: write 0 to 7"),
    "two flags, one file": (["--json", "TMP/x", "--trace", "TMP/x"], "both write TMP/x"),
    "comparison without values": (["--compare", "training.seq_len"], "write key=value,value"),
    "proof and a comparison": (
        ["--verify-order", "--compare", "training.seq_len=64,128"],
        "--verify-order plans nothing: leave it or --compare out",
    ),
    "imbalance without experts": (
        ["--expert-imbalance", "1.5"],
        "--expert-imbalance 1.5: the model has no experts that tokens could be spread over. Set",
    ),
    "more than all tokens": (
        [*DEEPSEEK, EP, "2", "--world-size", "2", "--expert-imbalance", "1,2.5"],
        "--expert-imbalance 2.5: parallelism.expert_parallel_degree = 2, so a rank that receives",
    ),
    "routing without expert parallelism": (
        [*DEEPSEEK, "--world-size", "2", "--routing", "TMP/x"],
        "--routing: parallelism.expert_parallel_degree = 1: every rank has all experts",
    ),
    "no imbalance": ([*DEEPSEEK, "--expert-imbalance", "1,,nan"], "is not a list of imbalances"),
    "routing that is not there": (
        [*DEEPSEEK, EP, "2", "--world-size", "2", "--routing", "TMP/x"],
        "--routing TMP/x: cannot be read: No such file or directory. Name a file that metrics.save",
    ),
    "all ranks of no proof": (["--all-ranks"], "--all-ranks is for --verify-order"),
}  # fmt: skip


@pytest.mark.parametrize("words, said", BAD.values(), ids=BAD)
def test_bad_input(refused, words, said):
    assert said in refused(*words)


@pytest.mark.parametrize("flag", ["--json", "--save"])
def test_an_output_without_its_folder(refused, flag):
    assert "there is no folder TMP/none: make it" in refused(flag, "TMP/none/plan")


def test_an_output_that_is_a_folder_or_below_a_file(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "TMP: is a folder: name a file" in refused("--json", "TMP")
    assert "there is no folder TMP/file" in refused("--json", "TMP/file/plan")


class Reached(Exception):
    """Instead of a plan."""


@pytest.fixture
def asked(monkeypatch):
    """What a plan would have been made with."""
    asked = {}

    def make_plan(config, world_size, hardware, **how):
        asked.update(config=config, world_size=world_size, hardware=hardware.name, **how)
        raise Reached

    monkeypatch.setattr(command, "make_plan", make_plan)
    return asked


def test_what_is_not_refused_is_planned_with_what_was_asked(asked, monkeypatch):
    """The fixture's work is what would run: without a mistake it does. The config is read once."""
    read = []
    original = load.load_config
    monkeypatch.setattr(load, "load_config", lambda *a, **k: read.append(a) or original(*a, **k))
    words = ["--world-size", "8", TP, "2", "--hardware", "a100-80g", "--rank", "3"]
    words += ["--dataloader.dataset_path", "/of/the/cluster"]  # where the run's text is
    with pytest.raises(Reached):
        cli.main(["plan", *words])
    assert (asked["world_size"], asked["hardware"], asked["rank"]) == (8, "a100-80g", 3)
    assert asked["config"].parallelism.tensor_parallel_degree == 2
    assert asked["config"].compile.hardware == "a100-80g" and len(read) == 1
    words[:4] = [TP, "2", "--parallelism.data_parallel_shard_degree", "4"]  # which are 8 ranks too
    with pytest.raises(Reached):
        cli.main(["plan", *words])
    assert asked["world_size"] == 8


@pytest.mark.parametrize(
    ("policy", "more", "imbalance"),
    [
        ("budget", [], 1.5),
        ("budget", ["--compile.expert_imbalance", "1.0"], 1.0),
        ("full", [], None),
        ("full", ["--parallelism.fsdp_reshard_after_forward", "auto"], 1.5),
    ],
)
def test_what_fills_a_limit_leaves_room_for_the_largest_imbalance(asked, policy, more, imbalance):
    words = [*DEEPSEEK, EP, "2", "--world-size", "2", "--expert-imbalance", "1,1.5,1.25", *more]
    words += ["--activation_checkpoint.type", policy, "--compile.memory_limit_gib", "10"]
    with pytest.raises(Reached):
        cli.main(["plan", *words])
    assert asked["config"].compile.expert_imbalance == imbalance


def test_the_proof_of_an_order_is_within_100_columns(monkeypatch, capsys):
    proof = OrderProof(dict.fromkeys(range(40), 1), (22, 24), 3, ("my.op",) * 30)
    monkeypatch.setattr(command, "verify_order", lambda *a, **k: proof)
    assert cli.main(["plan", "--world-size", "40", "--verify-order"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert " ".join(out.split()) == " ".join(str(proof).split())
