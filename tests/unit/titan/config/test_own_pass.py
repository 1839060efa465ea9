"""A pass of a user's own, in a folder of its own: named by files and flags, with options."""

import json
import sys
import tomllib

import pytest
from torchtitan.distributed import ParallelDims

from graph_trainer.cli import main as cli
from graph_trainer.core.passes.catalogue import resolve_passes
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.write_toml import config_to_toml
from graph_trainer.titan.step_inputs import passes_of
from tests.unit.titan.config.test_config_errors import BASE

SOURCE = '''
from dataclasses import dataclass

from graph_trainer.core.passes.base import Stage, graph_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOptions:
    """Which parameters stay gathered."""

    max_kib: int = 64
    """The largest parameter that stays gathered, in KiB."""

    names: tuple[str, ...] = ()
    """Parameters that stay gathered, whatever their size."""

    def __post_init__(self):
        if self.max_kib < 0:
            raise ValueError("max_kib is below 0")


@graph_pass(stage=Stage.TAG, summary="Keep small parameters gathered", options_type=KeepOptions)
def keep_small_unshards(joint, options, context):
    pass


@graph_pass(stage=Stage.CLEANUP, summary="Run early")
def early(joint, options, context):
    pass


@graph_pass(stage=Stage.TAG, summary="Take a section", options_type=KeepOptions, section="passes")
def misnamed(joint, options, context):
    pass
'''
NAME = "own_passes:keep_small_unshards"
LISTED = f'[compile]\npasses = ["default", "{NAME}"]\n'
OPTIONS = "[compile.keep_small_unshards]\nmax_kib = 8\n"


@pytest.fixture(autouse=True)
def own_passes(tmp_path, monkeypatch):
    (tmp_path / "own_passes.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_passes", None)


def load(tmp_path, text, *flags):
    path = tmp_path / "run.toml"
    path.write_text(BASE + text)
    return load_config(["--config", str(path), *flags])


def options_of(config):
    dims = ParallelDims.from_config(config.parallelism, 1)
    return passes_of(config, dims).options["keep_small_unshards"]


def test_a_file_lists_it_and_sets_its_options_and_flags_override_them(tmp_path):
    config = load(tmp_path, LISTED + OPTIONS)
    assert options_of(config).max_kib == 8
    config = load(tmp_path, LISTED + OPTIONS, "--compile.keep_small_unshards.max_kib", "9")
    assert options_of(config).max_kib == 9
    document = config_to_toml(config)
    assert tomllib.loads(document)["compile"]["keep_small_unshards"] == {"max_kib": 9, "names": []}
    again = load(tmp_path, document.removeprefix(BASE).replace(BASE, "", 1))
    assert config_to_toml(again) == document and again.compile == config.compile


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b", "c"]])
def test_a_tuple_is_a_list_in_a_file_and_commas_in_a_flag(names, tmp_path):
    def names_of(config):
        return config.compile.keep_small_unshards.names

    (tmp_path / "a.toml").write_text(f"{BASE}{LISTED}{OPTIONS}names = {names}\n")
    config = load_config(["--config", str(tmp_path / "a.toml")])
    assert names_of(config) == tuple(names)
    (tmp_path / "b.toml").write_text(config_to_toml(config))
    assert names_of(load_config(["--config", str(tmp_path / "b.toml")])) == tuple(names)
    if names:
        flags = ["--compile.passes", f"default,{NAME}"]
        flags += ["--compile.keep_small_unshards.names", ",".join(names)]
        assert names_of(load_config(flags)) == tuple(names)


def test_flags_alone_name_it_and_set_its_options():
    flags = [f"--compile.passes=default,{NAME}", "--compile.keep-small-unshards.max-kib=7"]
    config = load_config(flags)
    assert options_of(config).max_kib == 7
    assert not hasattr(load_config([]).compile, "keep_small_unshards")


def test_beside_default_each_joins_the_list_at_its_stage_and_can_be_disabled_by_name():
    listed = f"default,{NAME},own_passes:early"
    flags = ["--compile.passes", listed, "--compile.disable_passes", "keep_small_unshards"]
    config = load_config(flags).compile
    names = [each.name for each in resolve_passes(config.passes, config.disable_passes)]
    assert names.index("early") < names.index("rematerialize")
    assert "keep_small_unshards" not in names


def test_flags_name_another_pass_with_the_section_of_the_files(tmp_path):
    other = tmp_path / "other_passes.py"
    other.write_text(SOURCE.replace("max_kib", "max_gib"))
    flags = [f"--compile.passes=default,{NAME.replace('own', 'other')}"]
    config = load(tmp_path, LISTED, *flags, "--compile.keep_small_unshards.max_gib=2")
    assert options_of(config).max_gib == 2
    sys.modules.pop("other_passes")


@pytest.mark.parametrize("in_file", [False, True])
def test_help_schema_and_table_show_it(in_file, tmp_path, capsys):
    flag = ["--compile.passes", f"default,{NAME}"]
    if in_file:
        (tmp_path / "run.toml").write_text(BASE + LISTED)
        flag = ["--config", str(tmp_path / "run.toml")]
    with pytest.raises(SystemExit) as ended:
        load_config([*flag, "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "--compile.keep_small_unshards.max_kib" in out
    assert "The largest parameter that stays gathered" in out
    assert cli.main(["config", "--schema", *flag]) == 0
    definitions = json.loads(capsys.readouterr().out)["$defs"]
    key = definitions["own_passes.KeepOptions"]["properties"]["max_kib"]
    assert key == {"description": "The largest parameter that stays gathered, in KiB."} | {
        "type": "integer"
    }
    assert cli.main(["passes", *flag]) == 0
    out = capsys.readouterr().out
    assert "keep_small_unshards" in out and "max_kib = 64" in out and "rematerialize" in out
    assert cli.main(["passes"]) == 0 and "keep_small" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (LISTED.replace("own_passes", "no_passes"), ["'no_passes:keep", "no module 'no_passes'"]),
        (LISTED.replace(NAME, "own_passes:keep"), ["'own_passes:keep'", "keep_small_unshards"]),
        (LISTED.replace(NAME, "own_passes:misnamed"), ["[compile.passes]", "exists already"]),
        (LISTED + OPTIONS.replace("8", "'8'"), ["keep_small_unshards.max_kib", '"8"', "= 8."]),
        (LISTED + OPTIONS.replace("8", "-8"), ["max_kib = -8", "max_kib is below 0"]),
        (LISTED + OPTIONS.replace("kib", "mib"), ["max_mib", "= 8", "keep_small_unshards.max_kib"]),
        (OPTIONS, ["compile.keep_small_unshards", "unknown key", "where compile.passes names it"]),
        (
            LISTED + 'disable_passes = ["keep_small_unshards"]\n' + OPTIONS,
            ["compile.keep_small_unshards = { max_kib = 8 }: ", "compile.disable_passes"],
        ),
    ],
)
def test_what_cannot_be_is_refused_with_file_key_and_value(text, parts, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    for part in ("run.toml: ", *parts):
        assert part in str(caught.value)
