"""The folders of the configs and hardware profiles that come with the package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def config_folders(name: str = "") -> list[Path]:
    """List the existing folders `name` of configs/: the installed copy, then that of a checkout."""
    folders = (parent / "configs" / name for parent in (_PACKAGE, _PACKAGE.parent))
    return [folder for folder in folders if folder.is_dir()]
