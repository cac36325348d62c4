"""Pages in a real headless Chromium, driven over the pipe of its DevTools protocol."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--remote-debugging-pipe",
)
_OVERFLOWING = """
[...document.querySelectorAll("body *")].filter((node) => {
  const box = node.getBoundingClientRect();
  return box.width && !node.closest("svg svg, pre, .prompt") && (box.right > innerWidth + 1 || box.left < -1);
}).map((node) => `${node.tagName}.${node.className.baseVal ?? node.className}: ${node.textContent.slice(0, 40)}`)
"""


class Page:
    """One page at a time in a browser that runs."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = os.fdopen(commands, "wb")
        self._answers = answers
        self._unread = b""
        self._commands_sent = 0
        self._session: str | None = None
        self._has_loaded = False
        self.problems = list[str]()
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable")

    def open(self, path: Path, width: int = 1300, height: int = 900, ready: str = "true") -> None:
        """Load a file at a width in CSS pixels; `problems` then lists what the console complains about.

        Args:
            path: The page.
            width: Of the window; below 600 it is a phone's.
            height: Of the window.
            ready: JavaScript that is true once the page's modules, which run on after the load, are done.
        """
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        self.problems = []
        self._has_loaded = False
        self._send("Page.navigate", url=path.resolve().as_uri())
        while not self._has_loaded:
            self._read()
        until = time.monotonic() + 30
        while not self.run(f"document.fonts.ready.then(() => Boolean({ready}))"):
            assert time.monotonic() < until, f"not so after 30 s: {ready}"
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self._send("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def prefer(self, scheme: str) -> None:
        """Set the colour scheme that pages see: light or dark."""
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def overflowing(self) -> list[str]:
        """What reaches beyond the window's sides, and boxes that hide a part of what is in them."""
        wider = self.run("document.documentElement.scrollWidth > innerWidth ? ['the page'] : []")
        hidden = self.run(
            "[...document.querySelectorAll('.scroll')].filter((node) => node.scrollWidth > node.clientWidth + 1)"
            ".map((node) => 'cut: ' + node.firstElementChild.id)"
        )
        return [*wider, *hidden, *self.run(_OVERFLOWING)]

    def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        data = self._send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        self._commands_sent += 1
        number = self._commands_sent
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        answer = self._read()
        while answer.get("id") != number:
            answer = self._read()
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        """The next message, which ends with a NUL; loads and complaints are noted."""
        while b"\0" not in self._unread:
            assert select.select([self._answers], [], [], 120)[0], "the browser says nothing"
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser has ended"
            self._unread += data
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        params = message.get("params", {})
        event = message.get("method")
        if event == "Page.loadEventFired":
            self._has_loaded = True
        elif event == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile.

    Skips the test where no Chromium is installed, since Python's package index has none; `.ci/run` installs it, so that
    no page goes unseen there.
    """
    if CHROMIUM is None:
        pytest.skip(
            "no Chromium is installed (Debian: apt-get install chromium); pages are not looked at; .ci/run installs it"
        )
    command_end, commands = os.pipe()
    answers, answer_end = os.pipe()
    # The protocol's pipes are file descriptors 3 and 4 of the browser.
    script = f'exec 3<&{command_end} 4>&{answer_end}; exec "$0" "$@"'
    process = subprocess.Popen(
        ["bash", "-c", script, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(command_end, answer_end),
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    os.close(command_end)
    os.close(answer_end)
    try:
        yield Page(commands, answers)
    finally:
        process.terminate()
        process.wait(timeout=30)
