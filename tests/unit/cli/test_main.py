"""The console script: what it prints, starts and refuses."""

import subprocess
import sys

import pytest
import tomli

from graph_trainer.cli import main as cli


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "NGPU", "NNODES", "NODE_RANK", "RDZV_ENDPOINT", "LOG_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MAX_RESTARTS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def run(capsys, *argv):
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_config_prints_what_the_flags_resolve_to(capsys):
    code, out, err = run(capsys, "config", "--config", "8b", "--training.steps", "3")
    assert code == 0 and err == ""
    table = tomli.loads(out)
    assert (table["base"], table["training"]["steps"]) == ("llama3_8b", 3)


@pytest.mark.parametrize("command", ["config", "train"])
def test_a_mistake_is_one_message_and_exit_code_2(command, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_execve", lambda *a: pytest.fail("ranks were started"))
    code, out, err = run(capsys, command, "--training.stepz", "3")
    assert code == 2 and out == ""
    assert err.startswith("error: ") and "--training.steps" in err and "Traceback" not in err


def test_train_checks_the_config_against_the_ranks_it_would_start(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_execve", lambda *a: pytest.fail("ranks were started"))
    monkeypatch.setenv("NGPU", "3")
    code, _, err = run(capsys, "train", "--parallelism.data_parallel_shard_degree", "2")
    assert code == 2 and "3 are started" in err


def test_train_starts_torchrun_with_the_ranks_of_the_environment(monkeypatch):
    started = []
    monkeypatch.setattr(cli, "_execve", lambda *a: started.append(a) or 0)
    monkeypatch.setenv("NGPU", "4")
    monkeypatch.setenv("LOG_RANK", "0,1")
    flags = ["--config", "debugmodel", "--training.steps", "3"]
    assert cli.main(["train", *flags]) == 0
    ((command, environment),) = started
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert "--nproc_per_node=4" in command and "--nnodes=1" in command
    assert "--local-ranks-filter=0,1" in command
    assert command[-6:] == ["-m", "graph_trainer.train", *flags]
    assert int(environment["OMP_NUM_THREADS"]) >= 1


def test_train_on_several_machines_needs_a_meeting_point(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_execve", lambda command, environment: print(*command) or 0)
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.setenv("NNODES", "2")
    code, _, err = run(capsys, "train")
    assert code == 2 and "RDZV_ENDPOINT" in err and "host:port" in err
    monkeypatch.setenv("RDZV_ENDPOINT", "node0:29500")
    monkeypatch.setenv("NODE_RANK", "1")
    code, out, _ = run(capsys, "train", "--parallelism.data_parallel_shard_degree", "4")
    assert code == 0
    assert "--nnodes=2 --node_rank=1 --rdzv_conf=is_host=0" in out
    assert "--rdzv_endpoint=node0:29500" in out


@pytest.mark.parametrize(("name", "value"), [("NGPU", "0"), ("NGPU", "two"), ("NNODES", "-1")])
def test_a_number_of_ranks_that_is_none_is_refused(name, value, capsys, monkeypatch):
    monkeypatch.setenv(name, value)
    code, _, err = run(capsys, "train")
    assert code == 2 and name in err and value in err


@pytest.mark.parametrize("status", [0, 2])
def test_under_a_launcher_train_is_one_rank_and_leaves_without_finalization(status, monkeypatch):
    import graph_trainer.train as train

    calls = []

    def leave(status):
        raise SystemExit(("left", status))

    monkeypatch.setattr(train, "run", lambda argv: calls.append(argv) or status)
    monkeypatch.setattr(train, "leave", leave)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--training.steps", "3"])
    assert ended.value.code == ("left", status)
    assert calls == [["--training.steps", "3"]]


def test_a_rank_tells_its_mistake_in_one_message_and_leaves_with_2(monkeypatch):
    """A real process, as a launcher starts it: nothing of finalization runs."""
    probe = (
        "import atexit, sys; from graph_trainer.cli.main import main\n"
        "atexit.register(print, 'finalized')\n"
        "main(['train', '--training.stepz', '3'])"
    )
    monkeypatch.setenv("RANK", "0")
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "--training.steps" in done.stderr


def test_without_gpus_two_ranks(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.ranks_per_machine() is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert cli.ranks_per_machine() == 8
    monkeypatch.setenv("NGPU", "3")
    assert cli.ranks_per_machine() == 3


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ([], 2),
        (["--parallelism.tensor_parallel_degree", "2"], 2),
        (["--parallelism.data_parallel_replicate_degree", "3"], 3),
        (["--parallelism.data_parallel_shard_degree", "1"], 1),
        (
            [
                *("--parallelism.data_parallel_shard_degree", "4"),
                *("--parallelism.tensor_parallel_degree", "2"),
            ],
            8,
        ),
    ],
)
def test_without_gpus_the_degrees_choose_the_ranks(flags, ranks, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    commands = []
    cli.launch(flags, execute=lambda command, environment: commands.append(command) or 0)
    assert f"--nproc_per_node={ranks}" in commands[0]


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
    from graph_trainer.titan.config.fields import settable_keys
    from graph_trainer.titan.config.load import load_config

    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for key in settable_keys(load_config([])):
        # tyro has flags for the entries of lists and tables, none for an empty table.
        if not key.startswith(("activation_checkpoint", "optimizer.")):
            assert f"--{key.replace('_', '-')}" in out, key
    text = " ".join(out.replace("│", " ").split())
    assert "bitwise equal to the model itself" in text  # our own documentation
    assert "How many train steps to run (default: " in text  # torchtitan's
    assert "--compile.enable" not in text
    assert "--dataloader.type {text,huggingface" in text


def test_every_field_of_our_section_is_documented():
    import inspect
    import re

    from graph_trainer.titan.config import run_config as sections
    from graph_trainer.titan.config.fields import field_hints, is_suppressed

    source = inspect.getsource(sections.GraphCompileConfig)
    fields = re.findall(r"^    (\w+): (?!Annotated)[^\n]*\n    (\S*)", source, re.M)
    hints = field_hints(sections.GraphCompileConfig)
    settable = {name for name in hints if not is_suppressed(hints[name])}
    assert {name for name, _ in fields} == settable
    assert all(follows.startswith('"""') for _, follows in fields)


def test_the_table_of_passes_names_them_all_in_stage_order_within_100_columns(capsys):
    from graph_trainer.core.passes.catalogue import registered_passes

    code, out, _ = run(capsys, "passes")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    passes = registered_passes()
    rows = [line for line in lines if any(f" {name} " in line for name in passes)]
    assert len(rows) == len(passes)
    stages = []
    for name, each in passes.items():
        (row,) = (r for r in rows if f" {name} " in r)
        assert each.stage.name.lower() in row
    for row in rows:
        (stage,) = {p.stage for n, p in passes.items() if f" {n} " in row}
        stages.append(stage)
    assert stages == sorted(stages)
    assert "reshard_after_forward" in out


def test_passes_takes_no_arguments_and_unknown_commands_are_refused(capsys):
    for argv in (["passes", "x"], ["frain"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(argv)
        assert ended.value.code == 2
        assert argv[-1] in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys):
    code, out, _ = run(capsys)
    assert code == 0 and "examples:" in out


def test_train_asks_for_restarts_where_a_checkpoint_is_there_to_go_on_from(capsys, monkeypatch):
    own_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    monkeypatch.setattr(cli, "_execve", lambda c, e: print(*c, e.get(own_store)) or 0)
    monkeypatch.setenv("NGPU", "2")
    _, out, _ = run(capsys, "train")
    assert "--max_restarts=0" in out and out.endswith(" None\n")
    monkeypatch.setenv("MAX_RESTARTS", "3")
    checkpoint = ["--checkpoint.enable"]
    code, out, _ = run(capsys, "train", *checkpoint)
    assert code == 0 and "--max_restarts=3" in out and out.endswith(" 1\n")
    for flags, key in (
        ([], "checkpoint.enable"),
        ([*checkpoint, "--checkpoint.load_only"], "checkpoint.load_only"),
        ([*checkpoint, "--checkpoint.load_step", "4"], "checkpoint.load_step"),
    ):
        code, out, err = run(capsys, "train", *flags)
        assert (code, out) == (2, "") and f"MAX_RESTARTS = 3, but {key} = " in err
    monkeypatch.setenv("MAX_RESTARTS", "twice")
    code, _, err = run(capsys, "train", *checkpoint)
    assert code == 2 and "MAX_RESTARTS = 'twice'" in err
