"""The console script: what it prints, starts and refuses."""

import os
import re
import signal
import subprocess
import sys
import tomllib

import pytest

import graph_trainer as gt
from graph_trainer.cli import launcher
from graph_trainer.cli import main as cli
from graph_trainer.core.simulation.hardware import known_hardware
from graph_trainer.titan import device_memory
from tests.unit.core.simulation.machines import has


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.setattr(launcher, "start", lambda launch: pytest.fail("ranks were started"))


def run(capsys, *argv):
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_config_prints_what_the_flags_resolve_to(capsys):
    code, out, err = run(capsys, "config", "--config", "8b", "--training.steps", "3")
    assert code == 0 and err == ""
    table = tomllib.loads(out)
    assert (table["base"], table["training"]["steps"]) == ("llama3_8b", 3)


def test_a_folder_for_compiled_code_that_cannot_be_made(tmp_path):
    """In a process of its own: torch makes the folder where anything imports torch._dynamo."""
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "graph_trainer", "passes"],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file")},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    said = " ".join(done.stderr.split())
    assert f"in TORCHINDUCTOR_CACHE_DIR = '{tmp_path}/file', which cannot be made" in said


@pytest.mark.parametrize("command", ["config", "train"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--training.stepz", "3"], "training.steps?"),
        (["--config", "debugmodle"], "debugmodel"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    command, flags, said, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, command, *flags)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and said in err and "Traceback" not in err
    assert not any(tmp_path.iterdir())


def test_the_exit_code_of_train_is_the_launchs(monkeypatch):
    started = []
    monkeypatch.setattr(launcher, "start", lambda launch: started.append(launch) or 7)
    assert cli.main(["train", "--training.steps", "3"]) == 7
    assert started[0].arguments[-3:] == ["graph_trainer.train", "--training.steps", "3"]


def test_under_a_launcher_train_is_one_rank_and_leaves_without_finalization(monkeypatch):
    import graph_trainer.train as train

    calls = []

    def leave(status):
        raise SystemExit(("left", status))

    monkeypatch.setattr(train, "run", lambda argv: calls.append(argv) or 2)
    monkeypatch.setattr(train, "leave", leave)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--training.steps", "3"])
    assert ended.value.code == ("left", 2)
    assert calls == [["--training.steps", "3"]]


def test_a_rank_tells_its_mistake_in_one_message_and_leaves_with_2(monkeypatch):
    """A real process, as a launcher starts it: nothing of finalization runs."""
    probe = (
        "import atexit, sys; from graph_trainer.cli.main import main\n"
        "atexit.register(print, 'finalized')\n"
        "sys.exit(main(['train', '--training.stepz', '3']))"
    )
    monkeypatch.setenv("RANK", "0")
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("error") == 1
    assert "training.steps?" in done.stderr


def test_a_rank_without_a_planner_names_the_way_to_hold_to_a_plan(monkeypatch, capsys):
    import graph_trainer.train as train

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert train.run(["--plan=plan.json"]) == 2
    error = capsys.readouterr().err
    assert "graph-trainer train --plan" in error and "graph_trainer.planner.train_planned" in error


def test_help_teaches_by_examples_without_torchtitans_seconds_of_import():
    probe = (
        "import sys; from graph_trainer.cli.main import main\n"
        "try: main(['--help'])\n"
        "finally: print('torchtitan' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    for part in ("train", "passes", "config", "examples:", "--config", "NGPU=8", "--module"):
        assert part in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_the_help_of_train_lists_every_key_with_its_documentation(capsys):
    from graph_trainer.titan.config.build import settable_keys
    from graph_trainer.titan.config.load import load_config

    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(launcher.USAGE) and max(map(len, out.splitlines())) <= 100
    for key in settable_keys(load_config([])):
        # an entry of a list has flags of its own
        assert f"  --{key} " in out or key == "optimizer.param_groups", key
    text = " ".join(out.split())
    assert "bitwise equal to the model itself" in text  # our own documentation
    assert "--training.steps INT = 40 How many train steps to run" in text  # torchtitan's
    assert "--compile.enable " not in text and "--dry-run" in text and "--plan FILE" in text
    assert '--dataloader.type {text,huggingface,huggingface_interleaved} = "text"' in text
    assert "--optimizer.param_groups.0.pattern STR = " in text


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["train", "--help", "max_norm"], ["training.max_norm"]),
        (
            ["config", "--training.steps", "7", "--help", "training", "how", "many"],
            ["steps INT = 7"],
        ),
        (["train", "--help", "max-norm", "--config", "8b"], ["training.max_norm FLOAT|INT = 1.0"]),
    ],
)
def test_help_shows_the_keys_that_were_asked_for(words, keys, capsys):
    with pytest.raises(SystemExit):
        cli.main(words)
    out = capsys.readouterr().out
    found = [line for line in out.splitlines() if line.startswith("  --")]
    assert len(found) == len(keys) and "usage" not in out
    assert all(key in line for key, line in zip(keys, found, strict=True))


def test_help_about_nothing_is_told_what_there_is(capsys):
    code, _, err = run(capsys, "train", "--help", "trainin_")
    assert code == 2 and "Did you mean training?" in err and "optimizer" in err


@pytest.mark.parametrize("command", ["config", "passes", "doctor", "plan", "check"])
def test_every_command_has_help(command, capsys):
    try:
        assert cli.main([command, "--help"]) == 0
    except SystemExit as ended:
        assert ended.code == 0
    out, err = capsys.readouterr()
    assert f"graph-trainer {command}" in out and err == ""
    assert max(map(len, out.splitlines())) <= 100
    assert command != "config" or "--schema" in out


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupted(command, words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["plan"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_reader_that_has_enough_is_no_error(monkeypatch, capfd):
    """As of `graph-trainer train --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["--help"]) == 141
    assert capfd.readouterr() == ("", "")


def test_an_output_that_is_full_or_closed(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["--version"]) == 2
    assert capsys.readouterr().err == "error: the output cannot be written: the disk is full\n"
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["--version"]) == 0


def test_a_table_is_no_error_either_for_a_reader_that_has_enough(monkeypatch):
    """As of `graph-trainer doctor | head -1`; rich would end with code 1."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["passes"]) == 141


def test_a_dry_run_prints_config_ranks_and_need(capsys, monkeypatch):
    has(monkeypatch, "NVIDIA L40S", 44.4, major=8, minor=9)
    flags = ["--parallelism.tensor_parallel_degree", "2", "--training.seq_len", "64"]
    code, out, err = run(capsys, "train", "--dry-run", *flags, "--compile.mode", "eager")
    comments = [line for line in out.splitlines() if line.startswith("# ")]
    assert code == 0 and "2 ranks: --nproc_per_node=2" in comments[0]
    notes = " ".join(line.removeprefix("# ").strip() for line in comments)
    assert "llama3 debugmodel" in comments[1] and "captures no graph" in notes
    assert "Simulated on a100-80g in place of NVIDIA L40S" in notes and "of the 44.40 GiB" in notes
    assert max(map(len, comments)) <= 100 and any("# Fits: needs" in line for line in comments)
    assert tomllib.loads(out)["training"]["seq_len"] == 64
    assert "capturing the train step" in err
    code, out, err = run(capsys, "train", "--dry-run", "--training.seq_len", "63", *flags[:2])
    assert (code, out) == (2, "") and "multiple of 2" in err


def test_a_dry_run_rehearses_a_plan_on_its_hardware(capsys, monkeypatch, tmp_path):
    """Of a profile that only the planning machine has, on several machines that cannot be met."""
    mine, saved = tmp_path / "mine.toml", str(tmp_path / "plan.json")
    text = known_hardware()["h100-sxm"].read_text()
    mine.write_text(re.sub(r"^memory_gib = .*", "memory_gib = 81.5", text, flags=re.M))
    flags = ["--config", "debugmodel", "--training.seq_len", "64"]
    plan = ["plan", "--world-size", "2", "--hardware", str(mine), "--save", saved]
    code, tables, _ = run(capsys, *plan, *flags)
    mine.unlink()
    monkeypatch.setenv("NNODES", "2")
    dry_run = ["train", "--dry-run", "--plan", saved, *flags]
    again, out, _ = run(capsys, *dry_run)
    assert (code, again) == (0, 0) and "# 2 ranks, as in " in out
    figures = re.search(r"\S+ tokens/s/GPU.* a step of", " ".join(tables.split())).group()
    told = " ".join(line.removeprefix("# ").strip() for line in out.splitlines())
    assert figures in told and "of the 81.50 GiB of mine;" in told
    assert tomllib.loads(out)["training"]["seq_len"] == 64
    code, out, err = run(capsys, *dry_run, "--parallelism.fsdp_reshard_after_forward", "never")
    assert code == 2 and "captured another step" in err and 'planned "default", now "never"' in err
    assert "# Config or versions are not those of" in out
    launches = []
    monkeypatch.setattr(launcher, "start", lambda launch: launches.append(launch) or 0)
    monkeypatch.delenv("NNODES")
    assert run(capsys, *dry_run[:1], *dry_run[2:])[0] == 0
    assert "graph_trainer.planner.train_planned" in launches[0].arguments, "the ranks read it too"


def test_a_dry_run_refuses_a_step_that_cannot_fit(monkeypatch, capsys):
    monkeypatch.setattr(device_memory, "available_on_cpu", lambda: (2 << 30, "on this machine"))
    dry_run = ("train", "--dry-run", "--training.local_batch_size", "400")
    limit = "--compile.memory_limit_gib"
    code, out, err = run(capsys, *dry_run)
    assert code == 2 and "# Does not fit: needs" in out and tomllib.loads(out)
    assert "tokens/s" not in out and "MFU" not in out
    words = " ".join(err.split())
    assert "GiB more than there is" in words
    assert "This rank has 1.00 GiB: 2.00 GiB available on this machine / 2 ranks" in words
    code, _, err = run(capsys, *dry_run, limit, "1")
    assert code == 2 and "memory_limit_gib = 1: the step needs" in err
    assert run(capsys, *dry_run, limit, "0")[0] == 0, "a risk that is taken"
    # on the hardware that the passes decide for it would fit; ranks elsewhere need as much
    monkeypatch.setenv("NNODES", "2")
    code, out, err = run(capsys, *dry_run, "--compile.hardware", "h100-sxm")
    assert code == 2 and "# Fits: needs" in out and "GiB more than there is" in err


def test_unknown_commands_are_told_the_nearest(capsys):
    code, out, err = run(capsys, "frain")
    assert (code, out) == (2, "") and "no command frain; did you mean 'train'?" in err
    assert "did you mean '--help'?" in run(capsys, "--hlep")[2]
    assert run(capsys, "help") == run(capsys, "--help")
    for command in ("passes", "doctor"):
        code, out, err = run(capsys, command, "now")
        assert (code, out) == (2, "") and "now" in err


def test_the_table_of_passes_names_them_all_in_stage_order_within_100_columns(capsys):
    from graph_trainer.core.passes.catalogue import registered_passes

    code, out, _ = run(capsys, "passes")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in out.splitlines()]
    passes = registered_passes()
    found = [(cells[0], cells[1]) for cells in rows if cells and cells[0] in passes]
    in_order = sorted(passes, key=lambda name: passes[name].stage)
    assert found == [(name, passes[name].stage.name.lower()) for name in in_order]
    assert 'strategy = "transformer_block"' in out


def test_a_pass_in_the_current_folder_is_in_the_table(tmp_path, capsys, monkeypatch):
    (tmp_path / "my_passes.py").write_text(
        "import graph_trainer as gt\n"
        "@gt.graph_pass(stage=gt.Stage.CLEANUP, summary='a pass of mine')\n"
        "def tidy(joint, options, context): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["passes", "--compile.passes", "default,my_passes:tidy"]
    monkeypatch.setattr(sys, "argv", ["graph-trainer", *words])
    assert cli.main() == 0
    out = capsys.readouterr().out
    assert "tidy" in out and "a pass of mine" in out and "schedule_overlap" in out


def test_without_a_command_the_help_is_shown(capsys):
    code, out, _ = run(capsys)
    assert code == 0 and "examples:" in out


@pytest.mark.parametrize("word", ["--help", "--version", "trian"])
def test_help_and_a_mistyped_command_come_without_torch(word):
    program = """
import atexit, sys
heavy = {"torch", "torchtitan", "pydantic"}
atexit.register(lambda: print(sorted(heavy & sys.modules.keys())))
from graph_trainer.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, word], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr
    assert done.returncode == (2 if word == "trian" else 0)
    said = {"--help": "usage: ", "--version": "0.1.0", "trian": "did you mean 'train'?"}[word]
    assert said in done.stdout + done.stderr


def test_every_public_name_is_imported_when_it_is_used():
    assert set(gt._MODULES) < set(gt.__all__) <= set(dir(gt))
    for name in gt.__all__:
        assert getattr(gt, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'captur'"):
        _ = gt.captur
