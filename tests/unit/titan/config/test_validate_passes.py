"""A pass that decides by simulation needs a hardware profile, and no rank starts without one."""

import pytest

from graph_trainer import train
from graph_trainer.cli import launcher
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.validate_passes import check_hardware

AUTO = ["--compile.bucketing.strategy", "auto"]
NAMED = ["--compile.hardware", "h100-sxm"]


def test_what_asks_needs_a_profile():
    with pytest.raises(ConfigError, match="compile.hardware is unset.*h100-sxm"):
        check_hardware(load_config(AUTO))
    check_hardware(load_config([*AUTO, *NAMED]))
    check_hardware(load_config([*AUTO, "--compile.mode", "eager"]))


def test_what_does_not_ask_needs_none():
    check_hardware(load_config([]))
    check_hardware(load_config(["--compile.bucketing.strategy", "transformer_block"]))
    without = ["--compile.disable_passes", "bucket_collectives"]
    check_hardware(load_config(["--compile.passes", "default", *without]))


@pytest.mark.parametrize("begin", [launcher.prepare, train.main])
def test_neither_the_launcher_nor_a_rank_starts(begin):
    with pytest.raises(ConfigError, match="compile.hardware is unset"):
        begin(AUTO)


def test_a_profile_that_is_none():
    with pytest.raises(ConfigError, match="compile.hardware h100: there is no such profile.*h100-"):
        load_config(["--compile.hardware", "h100"])


def test_a_file_that_is_no_profile(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("speed = 1\n")
    with pytest.raises(ConfigError, match=f"compile.hardware {path}: unknown key 'speed'"):
        load_config(["--compile.hardware", str(path)])
