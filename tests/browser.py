"""Headless Chromium, driven over its debugging pipe."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Seconds between two looks at a page.
PAUSE = 0.05
COMMANDS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    """The browser's command, or None."""
    return next((found for name in COMMANDS if (found := shutil.which(name))), None)


class Tab:
    """One page in the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, params, self._session)

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60) -> None:
        """Wait until an expression is true. Looks are counted, so that a machine that stands still costs none."""
        looks = int(seconds / PAUSE)
        for _ in range(looks):
            if self.run(script):
                return
            time.sleep(PAUSE)
        shown = self.run("document.body.innerText")
        raise AssertionError(f"{script} was not true at any of {looks} looks; the page says {shown!r}")

    def type(self, text: str) -> None:
        """Type where the focus is; fails where nothing there takes text, which would be lost without a word."""
        takes_text = self.run("document.activeElement?.matches('input, textarea') === true")
        assert takes_text, "nothing that takes text has the focus"
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowDown": 40}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def resize(self, width: int, height: int = 800) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path) -> None:
        """The whole page, however long, as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    @property
    def complaints(self) -> list[Any]:
        """Errors and warnings on the page's console, exceptions and policy violations among them."""
        self.run("0")  # events come before the answer
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        told = [event["params"] for event in mine if event["method"] == "Runtime.exceptionThrown"]
        for event in mine:
            if event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in (
                "error",
                "warning",
                "assert",
            ):
                told.append(event["params"])
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                told.append(event["params"]["entry"])
        return told

    @property
    def requested(self) -> list[str]:
        """The addresses that the page has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event["method"] == "Network.requestWillBeSent" and event.get("sessionId") == self._session
        ]


class Browser:
    """The browser's process."""

    def __init__(self, command: str, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # The browser reads from 3 and writes to 4; the pipes' own numbers must not be in the way.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (to_browser, from_browser)]
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        arguments += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]

        def place() -> None:
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._process = subprocess.Popen(
            [command, *arguments],
            preexec_fn=place,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (*theirs, to_browser, from_browser):
            os.close(end)
        self._rest = b""
        self._last = 0
        self.events: list[Any] = []

    def call(self, method: str, params: dict[str, Any], session: str | None = None) -> Any:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> Any:
        while b"\0" not in self._rest:
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, url: str) -> Tab:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Page.navigate", url=url)
        tab.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")
        # A page may be complete before its first frame, with which the focus comes.
        tab.wait_for("[null, document.activeElement].includes(document.querySelector('[autofocus]'))")
        return tab

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close", {})
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)


@contextlib.contextmanager
def browser(command: str, profile: Path) -> Iterator[Browser]:
    """A browser, which is closed at the end."""
    made = Browser(command, profile)
    try:
        yield made
    finally:
        made.close()
