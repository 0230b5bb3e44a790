"""A headless Chromium for tests, spoken to over a pipe: no driver, no port, no package.

The browser is the machine's own (Debian: `apt-get install chromium`); `WARMPATH_CHROMIUM` names another one.
Tests that need it skip where there is none. The DevTools protocol goes over two inherited descriptors, a JSON
message and a zero byte at a time: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "WARMPATH_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
NOT_FOUND = f"no Chromium: on Debian `apt-get install chromium`, or set {VARIABLE} to its path"
_ANSWER_LIMIT_S = 30.0
# Descriptors 3 and 4 are where it looks for the pipe. They may be in use, so both ends step aside first.
_WITH_PIPE = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """Its path; None if there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get(VARIABLE) or NAMES[0], *NAMES))), None)


class Navigated(RuntimeError):
    """The page left for another while it was asked."""


class Browser:
    """One process. Messages of all its pages come in one stream, read whenever something is waited for."""

    def __init__(self, process: subprocess.Popen[bytes], reading: int, writing: int) -> None:
        self._process = process
        self._reading = reading
        self._writing = writing
        self._numbers = itertools.count(1)
        self._unread = b""
        self._events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of one command. Raises RuntimeError for an error, TimeoutError without an answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") != number:
                self._events.append(answer)
            elif "error" in answer:
                gone = "navigated" in answer["error"].get("message", "")
                raise (Navigated if gone else RuntimeError)(f"{method}: {answer['error']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def events(self, session: str) -> list[dict[str, Any]]:
        """What has happened on that page so far."""
        return [event for event in self._events if event.get("sessionId") == session]

    @contextlib.contextmanager
    def page(self, *, width: int = 1440, height: int = 900, scheme: str = "light") -> Iterator[Page]:
        """A page without cookies or storage of others. scheme: light or dark, as if the system said so."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.prefer(scheme)
        try:
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._reading], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            received = os.read(self._reading, 1 << 20)
            if not received:
                raise RuntimeError(f"the browser ended with {self._process.wait()}")
            self._unread += received
        message, self._unread = self._unread.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def open(self, url: str) -> None:
        failure = self.call("Page.navigate", url=url).get("errorText")
        assert failure is None, f"{url}: {failure}"

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited. Raises AssertionError for an exception in it."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, *, limit_s: float = 20.0) -> None:
        """Until the expression is truthy; what it looks at may not be there yet."""
        attempt = f"(() => {{ try {{ return Boolean({script}); }} catch {{ return false; }} }})()"
        deadline = time.monotonic() + limit_s
        while not self._is_true(attempt):
            assert time.monotonic() < deadline, f"never came true: {script}\n{self.text()[:2000]}"
            time.sleep(0.05)

    def _is_true(self, script: str) -> bool:
        try:
            return bool(self.run(script))
        except Navigated:  # it was asked of the page before, which cannot tell any more
            return False

    def text(self) -> str:
        """Everything that can be read on the page."""
        return str(self.run("document.body.innerText"))

    def press(self, key: str) -> None:
        """A key, by its name in `KeyboardEvent.key`, on whatever has the focus."""
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        event: Mapping[str, Any] = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper())),
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def prefer(self, scheme: str, *, reduced_motion: bool = False) -> None:
        """The reader's system settings."""
        motion = "reduce" if reduced_motion else "no-preference"
        features = [("prefers-color-scheme", scheme), ("prefers-reduced-motion", motion)]
        pairs = [{"name": name, "value": value} for name, value in features]
        self.call("Emulation.setEmulatedMedia", features=pairs)

    def go_offline(self, is_offline: bool) -> None:
        self.call(
            "Network.emulateNetworkConditions",
            offline=is_offline,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def screenshot(self, path: Path) -> None:
        """The whole page, as long as it is, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))

    def requested(self) -> list[str]:
        """Every address the page has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events(self._session)
            if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Exceptions, violations of the page's own policy, and whatever else the browser's console shows."""
        found = []
        for event in self._browser.events(self._session):
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded":
                found.append(params["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(json.dumps(params["args"])[:500])
        return found


@contextlib.contextmanager
def running_chromium(path: str) -> Iterator[Browser]:
    """Starts it, and ends it with everything it has started."""
    to_browser, writing = os.pipe()
    reading, from_browser = os.pipe()
    folder = tempfile.mkdtemp(prefix="wp", dir="/tmp")

    command = [
        *(sys.executable, "-I", "-c", _WITH_PIPE, str(to_browser), str(from_browser), path),
        "--headless=new",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
        "--no-sandbox",  # tests run as root in containers, where there is none; the page is our own
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-extensions",
        "--hide-scrollbars",
        "--no-first-run",
    ]
    process = subprocess.Popen(
        command,
        pass_fds=(to_browser, from_browser),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    browser = Browser(process, reading, writing)
    try:
        yield browser
    finally:
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            browser.call("Browser.close")
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(reading)
        os.close(writing)
        shutil.rmtree(folder, ignore_errors=True)
