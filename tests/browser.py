"""Chromium without a window, driven over WebDriver."""

import base64
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.slurm import wait_for
from trainer.distributed import free_port

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --window-size=1600,1000"


class Browser:
    """One window."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        options = {"binary": CHROMIUM, "args": FLAGS.split()}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self._session = self._ask("POST", "/session", wanted)["sessionId"]

    def open(self, address: str) -> None:
        self._command("POST", "/url", {"url": address})

    def count(self, selector: str) -> int:
        script = f"return document.querySelectorAll({json.dumps(selector)}).length"
        return self._command("POST", "/execute/sync", {"script": script, "args": []})

    def text(self) -> str:
        script = "return document.body.innerText"
        return self._command("POST", "/execute/sync", {"script": script, "args": []})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._command("GET", "/screenshot")))

    def close(self) -> None:
        self._command("DELETE", "")

    def _command(self, method: str, path: str, body: object = None) -> Any:
        return self._ask(method, f"/session/{self._session}{path}", body)

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{self._driver}{path}", data, method=method)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)["value"]


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, and end it."""
    port = free_port()
    driver = subprocess.Popen(
        [str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        try:
            with urllib.request.urlopen(f"{address}/status", timeout=5) as answer:
                return json.load(answer)["value"]["ready"]
        except OSError:
            return False

    try:
        wait_for("chromedriver", is_up, 30)
        window = Browser(address)
        try:
            yield window
        finally:
            window.close()
    finally:
        driver.terminate()
        driver.wait()
