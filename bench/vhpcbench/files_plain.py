# SPDX-License-Identifier: Apache-2.0
"""Runs on the node as `python3 -c`: a plain guest with a plain virtiofsd; prints the result as JSON."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEADLINE_S = 400


def main() -> int:
    """Start virtiofsd and QEMU as specified in argv[1], wait for the guest's line, end both."""
    order = json.loads(sys.argv[1])
    pin = ["taskset", "-c", order["cpus"]]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        daemons: list[subprocess.Popen[bytes]] = []
        qemu: subprocess.Popen[str] | None = None
        try:
            for argv in order["daemons"]:
                daemons.append(subprocess.Popen([*pin, *argv], stderr=subprocess.PIPE))
            for path in order["sockets"]:
                wait_for(Path(path))
            with Path(folder, "errors").open("wb") as errors:
                qemu = subprocess.Popen(
                    [*pin, *order["argv"]],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    errors="replace",
                )
            found, said = listen(qemu, order["marker"])
            said += Path(folder, "errors").read_text(errors="replace")
        finally:
            for process in daemons if qemu is None else [qemu, *daemons]:
                process.kill()  # type: ignore[attr-defined]
                process.wait()  # type: ignore[attr-defined]
    print(json.dumps({"line": found, "console": said[-1500:]}))
    return 0


def wait_for(path: Path) -> None:
    """Wait until a daemon listens."""
    until = time.monotonic() + 20
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)


def listen(qemu: "subprocess.Popen[str]", marker: str) -> "tuple[str, str]":
    """The rest of the console's line that has the marker, and all lines before."""
    assert qemu.stdout is not None
    said, until = "", time.monotonic() + DEADLINE_S
    for line in qemu.stdout:
        before, found, rest = line.partition(marker)
        if found:
            return rest.strip(), said
        said += before
        if time.monotonic() > until:
            break
    return "", said


if __name__ == "__main__":
    sys.exit(main())
