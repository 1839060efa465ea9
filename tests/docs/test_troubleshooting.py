"""docs/troubleshooting.md has an entry for every error that the package raises, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.raised_errors import CLASSES, HOLE, Raised, all_texts, raised_errors

PAGE = (Path(__file__).resolve().parents[2] / "docs/troubleshooting.md").read_text()
ALL = raised_errors()
TEXTS = all_texts()
FEW_LETTERS = 8
"""A message with fewer of its own is made of what another part of the program says."""


def phrases() -> dict[str, list[str]]:
    """Error class -> the parts of messages that its section has entries for."""
    found = {}
    for section in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        rows = re.findall(r"^\| (`.*?) \| (.+) \|$", section, re.M)
        assert all(remedy.strip().endswith(".") for _, remedy in rows), section[:40]
        found[section.split()[0]] = [p for cell, _ in rows for p in re.findall(r"`([^`]+)`", cell)]
    return {name: found[name] for name in found if name in CLASSES}


def own_letters(message: str) -> str:
    """Those of words: a key's name is where it is, not what is wrong."""
    return re.sub(r"[a-z_]+(\.[a-z_]+)+|[^a-z]", "", message)


@pytest.mark.parametrize("error", sorted(CLASSES - {"GraphTrainerError"}))
def test_every_message_has_an_entry_and_every_entry_a_message(error):
    told = phrases()[error]
    made = [each for each in ALL if each.error == error]
    assert made, f"nothing raises {error}"
    without = [
        each
        for each in made
        if len(own_letters(each.message)) >= FEW_LETTERS
        and not any(phrase in each.message for phrase in told)
    ]
    assert not without, "\n".join(f"{each.where}: {each.message}" for each in without)
    stale = [phrase for phrase in told if not any(phrase in text for text in TEXTS)]
    assert not stale, f"no {error} says any more: {stale}"


def test_the_source_is_read_as_it_is_written():
    assert len(ALL) > 100 and {each.error for each in ALL} == CLASSES - {"GraphTrainerError"}
    rules = Raised("x", "ConfigError", f"{HOLE}: {HOLE} = {HOLE}: {HOLE}. {HOLE}")
    assert len(own_letters(rules.message)) < FEW_LETTERS
    assert any(each.message.startswith(f"loss.num_chunks is {HOLE};") for each in ALL)
    assert any(each.message == "not settable from a file" for each in ALL)  # by bad_value
