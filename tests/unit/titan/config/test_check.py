"""What `compile.hardware` may name, and what mode "eager" leaves without effect."""

import pytest

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import of_captured_steps


def test_a_file_that_is_no_profile(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("speed = 1\nmemory_gib = 1\n")
    with pytest.raises(ConfigError, match=f"compile.hardware = \"{path}\": unknown key 'speed'"):
        load_config(["--compile.hardware", str(path)])


def test_the_settings_that_act_on_a_captured_step_alone():
    assert of_captured_steps(load_config(["--compile.mode", "eager"])) == []
    flags = ["--parallelism.fsdp_reshard_after_forward", "always", "--compile.bitwise"]
    flags += ["--compile.schedule_overlap.prefetch_depth", "1"]
    assert of_captured_steps(load_config(flags)) == [
        "compile.bitwise",
        "compile.schedule_overlap",
        "parallelism.fsdp_reshard_after_forward",
    ]
