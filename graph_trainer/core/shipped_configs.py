"""Where the configs and hardware profiles that come with the package lie."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def config_folders(name: str = "") -> list[Path]:
    """List the folders `name` of configs/ that are there: the installed copy, then a checkout's."""
    folders = (parent / "configs" / name for parent in (_PACKAGE, _PACKAGE.parent))
    return [folder for folder in folders if folder.is_dir()]
