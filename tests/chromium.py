# SPDX-License-Identifier: Apache-2.0
"""Pages in Debian's Chromium, without a window."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pace import limit

CHROMIUM = shutil.which("chromium")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # Chromium refuses to run as root otherwise
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def in_chromium(folder: Path, address: str, *options: str, prefix: Sequence[str] = ()) -> tuple[str, str]:
    """The DOM after some seconds, and what the page has put on the console.

    ``prefix`` runs Chromium, such as nsenter in the network of another host.
    """
    command = [
        *prefix,
        str(CHROMIUM),
        *OPTIONS,
        f"--user-data-dir={folder}/profile",
        "--virtual-time-budget=8000",
        "--enable-logging=stderr",
        "--v=0",
        "--dump-dom",
        *options,
        address,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    console = (line for line in done.stderr.splitlines() if "CONSOLE" in line and "source: http" in line)
    return done.stdout, "\n".join(console)


class Driven:
    """A page in a Chromium that a test drives, by the DevTools protocol over two pipes."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._rest = 0, b""
        self._session: str | None = None
        (target,) = self._ask("Target.getTargets")["targetInfos"][:1]
        attached = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self._ask("Page.enable")

    def open(self, address: str) -> None:
        """Load a page and its script."""
        self._ask("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def look(self, width: int, height: int, scheme: str) -> None:
        """Give the page a window, up to 600 pixels that of a phone; ``scheme`` is light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width <= 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        """Write the whole page as PNG, also what is below the window."""
        shot = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key and let it go: a letter, or a name such as Tab, Enter, ArrowRight."""
        code = {"Tab": 9, "Enter": 13, " ": 32, "ArrowRight": 39}.get(key, ord(key[0].upper()))
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        more = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self._ask("Input.dispatchKeyEvent", type="keyDown", text=text, **more)
        self._ask("Input.dispatchKeyEvent", type="keyUp", **more)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self._ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + limit(60)
        while not self.value(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.1)

    def _ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> Any:
        deadline = time.monotonic() + limit(120)
        while b"\0" not in self._rest:
            assert select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]
            piece = os.read(self._answers, 1 << 16)
            assert piece, "Chromium has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)


@contextmanager
def driven(folder: Path) -> Iterator[Driven]:
    """A Chromium without a window, which ends with the block; it reads commands from its descriptor 3."""
    reads, commands = os.pipe()
    answers, writes = os.pipe()
    options = (*OPTIONS, f"--user-data-dir={folder}/driven", "--remote-debugging-pipe", "about:blank")
    # a shell gives the pipes the numbers that Chromium wants
    script = f'exec "$@" 3<&{reads} 4>&{writes}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", str(CHROMIUM), *options],
        pass_fds=(reads, writes),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (reads, writes):
        os.close(end)
    try:
        yield Driven(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
