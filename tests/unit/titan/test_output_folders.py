"""Folders that a rank would write to are refused before the first step where it cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.output_folders import check_output_folders


@pytest.mark.parametrize(
    ("key", "value", "flags"),
    [
        ("dump_folder", "file/run", []),
        ("dump_folder", ".", []),  # a file has the name of its structured_logs
        ("checkpoint.folder", "../file/x", ["--dump_folder", "new", "--checkpoint.enable"]),
        (
            "profiler.save_traces_folder",
            "../file",
            ["--dump_folder", "new", "--profiler.enable_profiling"],
        ),
    ],
)
def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, flags: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "structured_logs").touch()
    with pytest.raises(ConfigError, match=rf'^{key} = "{re.escape(value)}": .* Set it to a folder'):
        check_output_folders(load_config([f"--{key}", value, *flags]))
    check_output_folders(load_config(flags))
    assert not (tmp_path / "new").exists(), "a check that leaves nothing"


def test_a_remote_folder_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_output_folders(load_config(["--checkpoint.enable", "--dump_folder", "gs://bucket"]))
    assert not any(tmp_path.iterdir())
