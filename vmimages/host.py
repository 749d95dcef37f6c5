# SPDX-License-Identifier: Apache-2.0
"""The build host: finds and runs its tools, and reports progress."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vmimages.errors import BuildError

# Tool -> Debian package that has it.
PACKAGES = {
    "arch-test": "arch-test",
    "lz4": "lz4",
    "mmdebstrap": "mmdebstrap",
    "mkfs.erofs": "erofs-utils",
    "zstd": "zstd",
    "newuidmap": "uidmap",
    "veritysetup": "cryptsetup-bin",
}
# sbin is not in an ordinary user's PATH on Debian, and mkfs.erofs may be there.
SEARCH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
TAIL_LINES = 20


def need(*tools: str) -> None:
    """Check that tools are installed.

    Raises:
        BuildError: tools are missing; names them and the packages to install.
    """
    missing = [tool for tool in tools if shutil.which(tool, path=SEARCH) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[tool] for tool in missing}))
        raise BuildError(f"not installed: {', '.join(missing)}", hint=f"apt-get install {packages}")


def say(text: str) -> None:
    """Write one line of progress to stderr."""
    print(f"image: {text}", file=sys.stderr, flush=True)


class BuildStep:
    """``with BuildStep("installing"):`` reports the start of a step, and its duration at the end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.start = 0.0

    def __enter__(self) -> BuildStep:
        self.start = time.monotonic()
        say(f"{self.text} …")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            say(f"{self.text}: {time.monotonic() - self.start:.1f} s")


def environment(epoch: int) -> dict[str, str]:
    """Environment of tools: proxies and PATH of the build host, nothing that changes their output."""
    kept = {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
    return kept | {"PATH": SEARCH, "LC_ALL": "C.UTF-8", "TZ": "UTC", "SOURCE_DATE_EPOCH": str(epoch)}


def run(argv: Sequence[str], env: Mapping[str, str], log: Path, relay: re.Pattern[str] | None = None) -> None:
    """Run a tool with its output in a log file.

    Args:
        argv: the command.
        env: its whole environment.
        log: file that gets stdout and stderr appended.
        relay: for each line that matches, the first group is reported as progress.

    Raises:
        BuildError: the tool failed; contains the end of its output.
    """
    with log.open("ab") as out:
        try:
            child = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as err:
            raise BuildError(f"cannot run {argv[0]}", err.strerror or str(err)) from err
        with child:
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    out.write(line)
                    if relay and (match := relay.match(line.decode(errors="replace"))):
                        say(f"  {match[1]}")
            except BaseException:
                child.terminate()  # interrupted: leaving "with" waits until it has removed its mounts
                raise
    if child.returncode != 0:
        lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        raise BuildError(
            f"{argv[0]} failed with exit status {child.returncode}",
            "its output:\n    " + "\n    ".join(lines),
        )


def output(argv: Sequence[str], stdin: bytes = b"", timeout_s: float = 60) -> bytes:
    """Run a tool as a filter and return its stdout; BuildError if it fails."""
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            check=True,
            env={"PATH": SEARCH, "LC_ALL": "C"},
        )
    except subprocess.CalledProcessError as err:
        why = (err.stderr or b"").decode(errors="replace").strip() or f"exit status {err.returncode}"
        raise BuildError(f"{argv[0]} failed", why) from err
    except (OSError, subprocess.TimeoutExpired) as err:
        raise BuildError(f"cannot run {argv[0]}", str(err)) from err
    return done.stdout
