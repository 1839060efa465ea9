"""What `compile.hardware` may name."""

import pytest

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.load import load_config


def test_a_profile_that_is_none():
    with pytest.raises(ConfigError, match="compile.hardware h100: there is no such profile.*h100-"):
        load_config(["--compile.hardware", "h100"])


def test_a_file_that_is_no_profile(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("speed = 1\n")
    with pytest.raises(ConfigError, match=f"compile.hardware {path}: unknown key 'speed'"):
        load_config(["--compile.hardware", str(path)])
