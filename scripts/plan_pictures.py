"""Take the pictures of docs/images from a page that `graph-trainer plan --html PAGE` wrote.

python scripts/plan_pictures.py PAGE.html docs/images
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.integration.browser import Browser

DESK, PHONE = (1024, 768), (375, 812)


def main() -> int:
    """Write plan.png, plan_memory.png, plan_streams.png and plan_phone.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("folder", type=Path)
    words = parser.parse_args()
    words.folder.mkdir(parents=True, exist_ok=True)
    browser = Browser()
    try:
        for name, picture in pictures(browser, words.page.resolve()):
            path = words.folder / f"{name}.png"
            path.write_bytes(picture)
            print(f"{path}: {len(picture) / 1000:,.0f} kB")
    finally:
        browser.close()
    return 0


def pictures(browser: Browser, page: Path):
    """Name and PNG of each."""
    browser.window(*DESK)
    browser.open(page)
    yield "plan", browser.picture()
    browser.js("document.querySelector('#memory-part').scrollIntoView({block: 'center'})")
    browser.point_at("#memory", right=-100)
    browser.until("return document.querySelector('#memory .hoverlayer .hovertext')")
    yield "plan_memory", browser.picture("#memory-part")
    browser.js("document.querySelector('[data-zoom=peak]').click()")
    yield "plan_streams", browser.picture("#streams-part")
    browser.window(*PHONE, dark=True)
    browser.open(page)
    yield "plan_phone", browser.picture()


if __name__ == "__main__":
    sys.exit(main())
