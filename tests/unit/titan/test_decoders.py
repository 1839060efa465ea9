"""Every decoder of torchtitan is captured or refused, as docs/models.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.titan import meshes
from tests.unit.titan.decoders import CAPTURED, EVERY, HEAD, decoders, outcome, row

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"

QUICK = (
    "qwen3_moe_debug",
    "deepseek_v3_debugmodel_mtp",
    "deepseek_v3_debugmodel_hybridep",
    "gpt_oss_debugmodel",
    "muse_glimmer_debugmodel",
    EVERY,
)
"""One of each architecture; ./run_tests.sh --full has them all."""


def _rows() -> list[str]:
    _, _, table = PAGE.read_text().partition("\n".join(HEAD) + "\n")
    return table.splitlines()


def _quick(entry: str) -> list[pytest.MarkDecorator]:
    return [] if entry in QUICK else [pytest.mark.full]


@pytest.mark.parametrize(
    ("family", "entry"),
    [pytest.param(*each, id=".".join(each), marks=_quick(each[1])) for each in decoders()],
)
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")
def test_a_decoder_does_what_the_table_says(family: str, entry: str) -> None:
    assert row(family, entry, outcome(family, entry)) in _rows()


def test_the_page_has_the_meshes_of_the_tests() -> None:
    assert "\n".join(meshes.table()) in PAGE.read_text()


def test_the_table_has_every_decoder_and_no_other() -> None:
    rows = [tuple(line.split("|")[1:3]) for line in _rows()]
    assert rows == [(f" `{family}` ", f" `{entry}` ") for family, entry in decoders()]
    captured = {line.split("`")[1] for line in _rows() if line.endswith(f"| {CAPTURED} |")}
    assert captured >= {"llama3", "qwen3", "deepseek_v3", "muse_glimmer"}
