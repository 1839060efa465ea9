"""A headless Chromium or Chrome without a network, that reads pages from files."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
_PATIENCE = 30


class Browser:
    """One window, and what tests ask of it."""

    def __init__(self) -> None:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        driver = shutil.which("chromedriver")
        assert program and driver, (
            "no Chromium with its driver: apt-get install chromium chromium-driver, or run .ci/run"
        )
        options = webdriver.ChromeOptions()
        options.binary_location = program
        for flag in _FLAGS:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(driver))
        self.cdp("Network.enable")
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.cdp("Network.emulateNetworkConditions", **offline)

    def cdp(self, command: str, **arguments: Any) -> Any:
        """One command of Chrome's own protocol."""
        return self.driver.execute_cdp_cmd(command, arguments)

    def js(self, script: str, *arguments: Any) -> Any:
        """What a script returns, run in the page."""
        return self.driver.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        """Return the text of each element that a selector finds."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        return self.js(script, selector)

    def window(self, width: int, height: int, *, dark: bool = False) -> None:
        """A phone, for one, is 375 by 812 pixels."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> None:
        """Load a plan's page and wait until its plots are drawn."""
        self.driver.get(page.as_uri())
        self.until("return document.documentElement.dataset.drawn === 'yes'")

    def until(self, script: str) -> Any:
        """Run a script until it returns something true."""
        end = time.monotonic() + _PATIENCE
        while not (found := self.js(script)):
            assert time.monotonic() < end, f"never true: {script}\n{self.log()}"
            time.sleep(0.05)
        return found

    def log(self) -> list[str]:
        """What the console said since last asked, but for information."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] != "INFO"]

    def point_at(self, selector: str, right: int = 0, down: int = 0) -> None:
        """Move the mouse to the middle of an element, or so many pixels beside it."""
        element = self.driver.find_element("css selector", selector)
        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        self.actions().move_to_element_with_offset(element, right, down).perform()

    def picture(self, selector: str = "") -> bytes:
        """Return what the window shows, or an element, as a PNG."""
        if not selector:
            return self.driver.get_screenshot_as_png()
        element = self.driver.find_element("css selector", selector)
        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        return element.screenshot_as_png

    def actions(self) -> ActionChains:
        """The mouse, quick."""
        return ActionChains(self.driver, duration=50)

    def close(self) -> None:
        """End the browser and its driver."""
        self.driver.quit()


def hover(browser: Browser, plot: str, selector: str, right: int = 0) -> tuple[Any, str]:
    """Point at something: what plotly says is there, and the label that appears."""
    browser.js(
        """
        delete window.pointed;
        document.getElementById(arguments[0]).on("plotly_hover", ({points}) => {
            window.pointed = points.map((p) => p.customdata).find((c) => c !== undefined);
        });
        """,
        plot,
    )
    browser.point_at(selector, right)
    browser.until("return window.pointed !== undefined")
    labels = f"#{plot} .hoverlayer .hovertext"
    browser.until(f"return document.querySelector('{labels}')?.textContent")
    return browser.js("return window.pointed"), " ".join(browser.texts(labels))
