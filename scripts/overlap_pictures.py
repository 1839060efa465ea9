"""Take the pictures of docs/communication.md from two pages that `graph-trainer plan --html` wrote.

python scripts/overlap_pictures.py BEFORE.html AFTER.html docs/images
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.integration.browser import Browser

_BETWEEN = """
const [from, to] = arguments[0];
Plotly.relayout("streams", {"xaxis.range[0]": from, "xaxis.range[1]": to});
"""
DESK = (1200, 800)
FROM, TO = 0.60, 0.68
"""The part of the step that is shown, in backward."""


def main() -> int:
    """Write overlap_before.png and overlap_after.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("folder", type=Path)
    words = parser.parse_args()
    words.folder.mkdir(parents=True, exist_ok=True)
    browser = Browser()
    try:
        for name in ("before", "after"):
            path = words.folder / f"overlap_{name}.png"
            path.write_bytes(picture(browser, getattr(words, name).resolve()))
            print(f"{path}: {path.stat().st_size / 1000:,.0f} kB")
    finally:
        browser.close()
    return 0


def picture(browser: Browser, page: Path) -> bytes:
    """The streams of a part of backward."""
    browser.window(*DESK)
    browser.open(page)
    end = browser.js("return document.getElementById('streams')._fullLayout.xaxis.range[1]")
    browser.js(_BETWEEN, [FROM * end, TO * end])
    browser.until("return document.getElementById('memory')._fullLayout.xaxis.range[0] > 0")
    return browser.picture("#streams-part")


if __name__ == "__main__":
    sys.exit(main())
