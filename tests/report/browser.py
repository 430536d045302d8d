"""A page in headless Chromium: what it says, what it asks the network for, and a pointer and keys to use it with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.remote.webelement import WebElement

MISSING = "there is no chromium and chromedriver on the PATH: make browser installs them on Debian, as root"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --force-device-scale-factor=1"
).split()


def programs() -> tuple[str, str] | None:
    """The browser and its driver, or None where one is missing."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    return (chromium, driver) if chromium and driver else None


@contextmanager
def started(profile: Path) -> Iterator[Chrome]:
    """A browser with a new profile, closed afterwards."""
    found = programs()
    assert found is not None, MISSING
    chromium, driver = found
    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = Chrome(options=options, service=Service(driver))
    try:
        chrome.get("about:blank")
        yield chrome
    finally:
        chrome.quit()


class Opened:
    """A page that is open: its figures are read as the script has them, its elements as a reader sees them."""

    def __init__(self, chrome: Chrome, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self.chrome = chrome
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.console()
        self.requests()
        chrome.get(path.as_uri())

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def js(self, expression: str, *arguments: Any) -> Any:
        """The value of an expression, in which ``page`` is the page's own object."""
        return self.chrome.execute_script(f"const page = window.autosplitPage; return {expression};", *arguments)

    def console(self) -> list[str]:
        """What the console was told since it was asked last."""
        return [entry["message"] for entry in self.chrome.get_log("browser")]

    def requests(self) -> list[str]:
        """What was asked for since the last time."""
        messages = [json.loads(entry["message"])["message"] for entry in self.chrome.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def find(self, selector: str) -> WebElement:
        return self.chrome.find_element("css selector", selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.chrome.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.find(selector).text)

    def pointer(self, selector: str, *places: tuple[float, float], press: bool = False) -> None:
        """Move over places of an element, in its own pixels; with ``press`` the button is down from first to last."""
        script = "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
        box = self.chrome.execute_script(f"{script} const b = e.getBoundingClientRect(); return [b.x, b.y];", selector)
        actions = ActionBuilder(self.chrome, duration=0)
        for number, (x, y) in enumerate(places):
            actions.pointer_action.move_to_location(round(box[0] + x), round(box[1] + y))
            if press and not number:
                actions.pointer_action.pointer_down()
        if press:
            actions.pointer_action.pointer_up()
        actions.perform()

    def centre(self, lane: int, action: int, *, chart: str = "timelineChart") -> tuple[float, float]:
        """The middle of a bar, in the pixels of its canvas."""
        box = self.js(f"page.{chart}.rectangle(arguments[0], arguments[1])", lane, action)
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def keys(self, selector: str, *keys: str) -> None:
        self.find(selector).send_keys(*keys)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.chrome.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
