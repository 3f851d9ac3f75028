"""A real browser for tests of pages: Chromium by Selenium, where both are installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
AXE = os.environ.get("VAERDICT_AXE") or None
"""The path of axe.min.js, which `make test-browser` fetches where npm is installed."""


def in_a_browser(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that starts Chromium, skipped where there is none."""
    return pytest.mark.browser(pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path")(test))


class Browser:
    """One window. `open` loads a page at a width, in light or dark."""

    def __init__(self, downloads: Path) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={downloads / 'profile'}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        self.driver.set_script_timeout(120)
        self.driver.execute_cdp_cmd("Page.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
        self.downloads = downloads

    def open(self, page: Path, *, width: int = 1280, height: int = 800, dark: bool = False, address: str = "") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(page.as_uri() + address)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns; a promise is waited for."""
        return self.driver.execute_script(script, *arguments)

    def keys(self, *keys: str) -> None:
        """Press keys where the focus is."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def complaints(self) -> list[str]:
        """What the page wrote to the console since it was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def violations(self) -> list[str]:
        """What axe-core finds wrong for readers who do not see or point."""
        assert AXE is not None
        self.driver.execute_script(Path(AXE).read_text(encoding="utf-8"))
        found = self.driver.execute_async_script(
            "const done = arguments[0];"
            "axe.run(document, { resultTypes: ['violations'] }).then(result => done(result.violations));"
        )
        return [f"{rule['id']}: {rule['nodes'][0]['html'][:200]}" for rule in found]
