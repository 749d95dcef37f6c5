# SPDX-License-Identifier: Apache-2.0
"""Pages in Debian's Chromium, without a window."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

CHROMIUM = shutil.which("chromium")


def in_chromium(folder: Path, address: str, *options: str, prefix: Sequence[str] = ()) -> tuple[str, str]:
    """The DOM after some seconds, and what the page has put on the console.

    ``prefix`` runs Chromium, such as nsenter in the network of another host.
    """
    command = [
        *prefix,
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",  # Chromium refuses to run as root otherwise
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
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
