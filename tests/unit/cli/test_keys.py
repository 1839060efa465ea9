"""What is told of a file and flags without torch: all of it wrong, and in the loader's words."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from graph_trainer.cli.keys import check_early
from graph_trainer.core.config_names import known_modules
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.serialize import config_to_toml
from graph_trainer.titan.config.sources import registry_functions, registry_module
from tests.examples import examples
from tests.unit.titan.config.test_config_errors import TOML
from tests.unit.titan.config.test_schema import CONFIGS, ROOT

BASE = 'base = "llama3_debugmodel"\n'


def early(*argv, command="train"):
    """What is said at once; "" where that is nothing."""
    try:
        check_early([str(word) for word in argv], command)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "bad.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("flag", ["--config", "--module"])
def test_one_of_two_is_not_taken_without_a_word(flag):
    assert f"{flag} a and {flag} b: which of the two? Keep one." in early(flag, "a", f"{flag}=b")
    assert "which of the two" not in early(flag, "a", flag, "a")
    assert "--quiet and --verbose: which of the two? Keep one." in early("--quiet", "--verbose")


@pytest.mark.parametrize(
    ("module", "entries"),
    [("", '"llama3_1b" or'), ('module = "graph_trainer.qwen3"\n', '"qwen3_0_6b" or')],
)
def test_a_wrong_base_is_told_beside_wrong_keys_as_the_loader_tells_it(file, module, entries):
    said = early("--config", str(file(f'{module}base = "nope"\ntraining.stepz = 3\n')))
    assert "training.stepz = 3: unknown key" in said
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", str(file(f'{module}base = "nope"\n'))])
    assert str(caught.value) in said and f"no model to train. Write {entries}" in said


def test_a_base_of_a_users_own_module_is_left_to_the_loader(file):
    assert not early("--config", str(file('module = "llama3"\nbase = "nope"\n')))


ENTRIES = [
    (module, name)
    for module in known_modules()
    for name in registry_functions(registry_module(module))
]


@pytest.mark.parametrize(("module", "base"), ENTRIES)
def test_nothing_that_an_entry_has_is_refused(module, base, file):
    path = file(f'module = "{module}"\nbase = "{base}"\n')
    if module.endswith("transformers"):  # needs the folder of a model
        return
    assert not early("--config", file(config_to_toml(load_config(["--config", str(path)]))))


def test_nothing_that_is_right_is_refused(file, tmp_path, monkeypatch):
    (tmp_path / "my").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for path in CONFIGS:
        assert not early("--config", path)
    own = '[dataloader]\ntype = "my.data:Loader.Config"\nany = 1\n[compile]\npasses = ["my:pass"]\n'
    path = file(BASE + own + "[compile.pass]\nsize = 1\n")
    assert not early("--config", path)
    assert not early("--config", path, "--dataloader.other", "3", "--compile.pass.size=4")
    assert not early("--config", file('module = "my.models"\nbase = "x"\n[mine]\nkey = 1\n'))
    assert not early("--module", "my.models", "--mine.key", "1")
    assert not early(
        *("--training.no-enable_cpu_offload", "--checkpoint.enable", "--world-size", "8"),
        *("--no-capture-cache", "--dump-folder", "x", "--trace=x"),
        *("--optimizer.param-groups.0.optimizer-kwargs.lr", "1e-3", "--training.steps=3"),
        *("--optimizer.param_groups.0.pattern", "x", "activation-checkpoint:full"),
        command="plan",
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--training.stepz 3", ["command line: training.stepz", "Did you mean training.steps?"]),
        ("--checkpoint.enable-checkpoint", ["checkpoint.enable."]),
        ("--optimizer.param_groups.0.patern x", ["optimizer.param_groups[0].pattern?"]),
        ("--optimizer.learning_rate 1e-3", ["Did you mean optimizer.lr?"]),
        ("--optimizer.wd 0.1", ["Did you mean optimizer.weight_decay?"]),
        ("--checkpoint.resume", ["Did you mean checkpoint.enable?"]),
        ("--job.config_file Own.toml", ["Write --config with the path"]),
        ("--model.path gpt2", ["Name their module: --module graph_trainer.transformers."]),
        ("--config LICENSE", ["A file of that name is there, but configs are TOML files"]),
        ("--config configs/hardware/cpu.toml", ["a hardware profile", "--hardware"]),
        ("--no-checkpoint.enable", ["Write --checkpoint.no-enable."]),
        ("--nproc-per-node 4", ["a flag of torchrun", "`NGPU=N graph-trainer train ...`"]),
        ("--model.flavor 8B", ["--config 8b"]),
        ("--training.dataset C4", ['dataloader.dataset = "c4"', 'dataloader.type = "huggingface"']),
        ("--compile.enable", ["set compile.mode, compile.backend"]),
        ("--float8.recipe_name rowwise", ["no float8"]),
        ("--config no/such.toml", ["no such file"]),
        ("--dryrun", ["there is no --dryrun. Did you mean --dry-run?"]),
        ("--dry_run", ["there is no --dry_run. Did you mean --dry-run?"]),
        ("--html x", ["--html is a flag of `graph-trainer plan`"]),
        ("--quite --dump_folder x --training.no_x", ["Did you mean --quiet?", "training.no_x"]),
    ],
)
def test_wrong_flags(flags, said):
    message = early(*flags.split())
    assert all(part in message for part in said), message
    assert len(message.splitlines()) == 1 + ("--quite" in flags)


def test_a_flag_of_the_command_is_guessed_and_none_of_another(tmp_path, monkeypatch):
    (tmp_path / "my").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert "Did you mean --json?" in early("--jason", "x", command="plan")
    assert "Did you mean --hardware?" in early("--hard", "h100-sxm", command="plan")
    assert "Did you mean --world-size?" in early("--world_size", "8", command="plan")
    assert "Did you mean --to?" in early("--too", "x", command="export")
    assert not early("--jason", "x") and not early("--world-sise", "8", command="config")
    assert not early("--dryrun", "--module", "my.models"), "it may be a key of its config"


def test_flags_with_a_wrong_value_are_told_beside_an_unknown_one():
    wrong = ["--training.steps", "2.5", "--checkpoint.interval", "10x", "--optimizer.lr", "fast"]
    assert not early(*wrong), "the loader tells them"
    right = ["--training.seq_len=64", "--optimizer.eps", "None", "--compile.full_capture", "true"]
    unknown, *others = early("--training.stepz", "1", *wrong, *right).splitlines()
    assert "training.stepz" in unknown
    assert others == [
        "command line: training.steps = 2.5: expected an integer. Write --training.steps 2.",
        'command line: checkpoint.interval = "10x": expected an integer. Write '
        "--checkpoint.interval 1.",
        'command line: optimizer.lr = "fast": expected a number. Write --optimizer.lr 1e-3.',
    ]


def test_names_of_configs_and_modules_are_told_as_the_loader_tells_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "own.toml"
    file.write_text('module = "mistral"\n' + BASE)
    for words, said in (
        (["--config", "8bb"], "Did you mean 8b?"),
        (["--module", "qwen3", "--config", "9b"], "Known configs: 0.6b, 30b-a3b, 32b, 8b"),
        (["--module", "nomod", "--config", "8b"], "no such module of configs"),
        (["--config", str(file)], f'{file}: module = "mistral": no such module'),
    ):
        early_on = early(*words)
        assert said in early_on
        with pytest.raises(ConfigError) as caught:
            load_config(words)
        assert str(caught.value) == early_on
    for name in ("llama3_8b", "graph_trainer_llama3_8b", "graph_trainer_8b"):
        assert not early("--config", name)
    (tmp_path / "nomod").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not early("--module", "nomod", "--config", "8b"), "it may be a package"
    assert not early("--module", "torchtitan.models.nomod", "--config", "8b")
    (tmp_path / "deep" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "inside")
    assert not early("--module", "inside", "--config", "8b"), "the loader finds its folder"


def test_a_pipe_is_left_to_the_loader_which_reads_it_too(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    assert not early("--config", tmp_path / "pipe.toml")  # it would wait for a writer


@examples(100)
@given(table=st.dictionaries(st.sampled_from(["training", "optimizer", "job", "x"]), TOML))
def test_whatever_a_file_holds_it_is_passed_on_or_refused(table, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    assert early("--config", path) or True


OLD = """
[job]
dump_folder = "./outputs"
description = "a run"
[profiling]
enable_profiling = true
[model]
name = "llama3"
flavor = "8B"
tokenizer_path = "tokenizer.model"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
batch_size = 1
seq_len = 8192
dataset = "c4"
compile = false
[checkpoint]
enable_checkpoint = false
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[validation]
enabled = true
[float8]
enable_fsdp_float8_all_gather = false
"""


def test_a_file_of_torchtitans_is_recognised_and_each_of_its_keys_explained(file):
    path = file(OLD)
    first, *lines = early("--config", path).splitlines()
    assert "a config of torchtitan before 0.3" in first and 'base = "llama3_8b"' in first
    keys = [
        f"{section}.{key}"
        for section, table in tomllib.loads(OLD).items()
        for key in table
        if f"{section}.{key}" not in ("optimizer.lr", "training.seq_len")
    ]
    assert [line.split()[1] for line in lines] == keys
    assert not [line for line in lines if "unknown key" in line]


def test_what_stands_for_a_key_of_torchtitans_is_a_key_of_ours():
    from graph_trainer.cli.keys import completed_flags

    moved = tomllib.loads((ROOT / "configs/torchtitan_keys.toml").read_text())
    named = re.findall(r"\bWrite ((?:\w+\.)+\w+)", " ".join(moved.values()))
    assert len(named) > 15
    assert not {f"--{key}" for key in named} - {*completed_flags()}
    assert not {f"--{key}" for key in moved} & {*completed_flags()}


def test_a_typo_costs_no_import_of_torch(file):
    program = (
        "import sys, time; from graph_trainer.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "print(code, sorted({'torch', 'torchtitan', 'pydantic'} & sys.modules.keys()))\n"
        "print(time.process_time() < 0.5)"
    )
    path = file(BASE + "[training]\nstep = 3\n")
    words = [sys.executable, "-c", program, "train", "--config", str(path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout == "2 []\nTrue\n" and "training.steps?" in done.stderr
