"""Headless Chromium, driven over the DevTools protocol through a pipe: what a page says, and what
it asks for.
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_QUIET = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--disable-features=OptimizationHints,MediaRouter,Translate",
    "--no-default-browser-check",
    "--remote-debugging-pipe",
    "--force-device-scale-factor=1",
)


def browser() -> str | None:
    """The program, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


_PATIENCE_SECONDS = 200.0  # on a busy machine


class Page:
    """One page. `requests` are the addresses that it asked for, `complaints` what its console said
    in anger.
    """

    def __init__(self, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        self._home = tempfile.mkdtemp(prefix="chromium-")
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()

        def connect() -> None:  # the browser reads from descriptor 3 and writes to 4
            os.dup2(to_browser, 103)
            os.dup2(from_browser, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)

        program = browser()
        assert program is not None
        self._process = subprocess.Popen(
            [program, *_QUIET, f"--user-data-dir={self._home}", "about:blank"],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._buffer = b""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session: str | None = None
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        self.resize(width, height)

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._home, ignore_errors=True)

    def resize(self, width: int, height: int = 900) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def open(self, address: str, drawn: str = "document.documentElement?.dataset.drawn") -> None:
        """Go there and wait until the page has drawn itself."""
        self._call("Page.navigate", url=address)
        self.until(drawn)
        self.settle()

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression holds in the page."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self.ask(expression):
            assert time.monotonic() < deadline, f"{expression} does not hold: {self.complaints}"
            time.sleep(0.1)

    def settle(self, seconds: float = 0.5) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.ask("1")
            time.sleep(0.05)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])
            self._note(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._from, 1 << 20)
            assert chunk, "the browser has gone"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(
                str(params["exceptionDetails"].get("exception", {}).get("description", params))
            )
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.complaints.append(str([argument.get("value") for argument in params["args"]]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in (
            "error",
            "warning",
        ):
            self.complaints.append(params["entry"]["text"])
