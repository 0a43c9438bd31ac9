"""A headless Chromium, driven by Selenium; without one, these tests are skipped and say so."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NEEDS = "install Debian's packages chromium and chromium-driver to run the tests in a browser"
TIME_LIMIT_S = 60.0


class Page:
    """A page in the browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int = 1300, height: int = 900, dark: bool = False) -> float:
        """Open a page in a window of this size; return the seconds until it said that it was ready."""
        self.open_plainly(url, width=width, height=height, dark=dark)
        self.wait("document.documentElement.dataset.ready === 'yes'")
        return self.seconds_until("ready")

    def seconds_until(self, mark: str) -> float:
        """Return the seconds until the page set a mark: `readable`, then `ready` with its curves."""
        return float(self.run("return performance.getEntriesByName(arguments[0])[0]?.startTime ?? 0", mark)) / 1000

    def work(self) -> float:
        """Return the seconds that the page's main thread has computed: the time to open on a machine without load."""
        metrics = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))

    def open_plainly(self, url: str, *, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        """Open a page in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        self.driver.get_log("browser")
        self.driver.get(url)

    def run(self, script: str, *arguments: object) -> Any:
        """Return what a script in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: str) -> None:
        """Wait until an expression in the page is true."""
        end = time.monotonic() + TIME_LIMIT_S
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} did not become true; the console says {self.errors()}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """Return the text of the first element that a selector finds."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def fill(self, selector: str, value: str) -> None:
        """Set an input or a choice, as typing does."""
        self.run(
            "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
            "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, { bubbles: true }))",
            selector,
            value,
        )

    def errors(self) -> list[str]:
        """Return the errors and warnings of the browser's console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if "favicon" not in entry["message"]]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip(NEEDS)
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium to run the tests in a browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any) -> Page:
    return Page(browser)


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """Records a number in the report of the tests, for speed is not asserted."""
    return lambda name, value: record_property(name, round(value, 2))
