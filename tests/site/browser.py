"""A headless Chromium over its debugging pipe: two file descriptors, no socket, no driver.

Only what the tests of the report need: open a page, click and press keys as a person would, read
the document, and list what the page asked for, what it logged and what it threw. Messages are those
of the Chrome DevTools Protocol, one JSON object ended by a zero byte.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shlex
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars"
).split()
WAIT_S = 60.0
POLL_S = 0.02
KEYS = {  # key -> (code, Windows virtual key, text it types)
    " ": ("Space", 32, " "),
    "Tab": ("Tab", 9, None),
    "Enter": ("Enter", 13, "\r"),
    "ArrowLeft": ("ArrowLeft", 37, None),
    "ArrowRight": ("ArrowRight", 39, None),
    "Home": ("Home", 36, None),
    "End": ("End", 35, None),
    "n": ("KeyN", 78, "n"),
}


class RefusedError(AssertionError):
    """The browser could not do what it was told, for one because the page was just left."""


class Browser:
    """One browser with one page."""

    def __init__(self, binary: str, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [binary, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        passed = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        self._process = subprocess.Popen(  # the browser reads from descriptor 3 and writes to 4
            ["bash", "-c", f"exec {shlex.join(command)} 3<&{passed[0]} 4>&{passed[1]}"],
            pass_fds=passed,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (theirs_in, theirs_out, *passed):
            os.close(descriptor)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of one command; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + WAIT_S
        while True:
            found = self._receive(until - time.monotonic())
            if found.get("id") == self._number:
                if "error" in found:
                    raise RefusedError(f"{method}: {found['error']}")
                return dict(found["result"])
            self.events.append(found)

    def _receive(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(seconds, 0))
            chunk = os.read(self._in, 1 << 16) if ready else b""
            assert chunk, "the browser does not answer"
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def close(self) -> None:
        os.close(self._out)  # the end of its commands ends the browser
        os.close(self._in)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(self, address: str) -> None:
        """Go to a page and wait until it is loaded."""
        before = len(self.events)
        if "loaderId" not in self.call("Page.navigate", url=address):
            return  # only what stands after # is new
        until = time.monotonic() + WAIT_S
        while not any(e["method"] == "Page.loadEventFired" for e in self.events[before:]):
            self.events.append(self._receive(until - time.monotonic()))

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of the first element that fits."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.value(f"{found}.getClientRects()[0].toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name: str, times: int = 1) -> None:
        code, number, text = KEYS[name]
        shared = {"key": name, "code": code, "windowsVirtualKeyCode": number}
        for _ in range(times):
            typed = {"text": text} if text else {}
            kind = "keyDown" if text else "rawKeyDown"
            self.call("Input.dispatchKeyEvent", type=kind, **shared, **typed)
            self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def write(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def size(self, width: int, height: int) -> None:
        """The size of the window, in CSS pixels."""
        plain: dict[str, Any] = {"deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **plain)

    def prefer(self, **features: str) -> None:
        """Media features, with dashes as underscores: prefer(prefers_color_scheme="dark")."""
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def value(self, script: str) -> Any:
        """Return what an expression gives, promises awaited."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of the first element that fits."""
        return str(self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def wait(self, script: str) -> None:
        until = time.monotonic() + WAIT_S
        while True:
            with suppress(RefusedError):
                if self.value(f"Boolean({script})"):
                    return
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(POLL_S)

    def requests(self) -> list[str]:
        """Addresses everything asked for, in order."""
        sent = (e for e in self.events if e["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """Return what was thrown, and what was logged as error or warning."""
        found = []
        for event in self.events:
            method, params = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(json.dumps(params["args"]))
            if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(json.dumps(params["entry"]))
        return found
