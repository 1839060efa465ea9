"""Take the pictures of docs/images from a page that `graph-trainer plan --html PAGE` wrote.

python scripts/plan_pictures.py PAGE.html docs/images
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.integration.browser import Browser

_LONGEST_WAIT = """
return plotting.read().then(({lanes, step_ns}) => {
    const {start, ns} = lanes.find(({waits}) => waits);
    const longest = ns.indexOf(Math.max(...ns));
    const each = step_ns / document.getElementById("streams")._fullLayout.xaxis.range[1];
    const [from, to] = [start[longest] - 4 * ns[longest], start[longest] + 5 * ns[longest]];
    const range = [Math.max(from, 1) / each, Math.min(to, step_ns) / each];
    return Plotly.relayout("streams", {"xaxis.range[0]": range[0], "xaxis.range[1]": range[1]});
}).then(() => true);
"""
DESK = (1200, 800)


def main() -> int:
    """Write plan.png, plan_memory.png and plan_streams.png."""
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
    browser.point_at("#memory", right=320)
    browser.until("return document.querySelector('#memory .hoverlayer .hovertext')")
    yield "plan_memory", browser.picture("#memory-part")
    browser.js(_LONGEST_WAIT)
    browser.until("return document.getElementById('memory')._fullLayout.xaxis.range[0] > 0")
    yield "plan_streams", browser.picture("#streams-part")


if __name__ == "__main__":
    sys.exit(main())
