# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of iproute2, nftables and wireguard-tools; the only place that does.

One process takes a whole batch, so that a job of a thousand nodes needs three. Every
word of a batch is made by ``plan``, so none can be more than a word.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.host import process

TIMEOUT_S = 30.0
WHERE = "/usr/sbin:/usr/bin:/sbin:/bin"
_PACKAGES = {"ip": "iproute2", "bridge": "iproute2", "nft": "nftables", "wg": "wireguard-tools"}
SYSCTL = Path("/proc/sys/net")
_WORD = re.compile(r"[A-Za-z0-9_./:@-]+\Z", re.ASCII)


def find(program: str) -> str | None:
    """Path of a program; None where it is not installed."""
    return shutil.which(program, path=WHERE)


def batch(program: str, commands: Iterable[Sequence[str]], *options: str) -> None:
    """Run commands of ``ip`` or ``bridge`` in one process, up to the first that fails.

    Raises:
        NodeError: one failed; those before it have had their effect.
        ValueError: a word has a character that a batch could take for something else.
    """
    lines = []
    for words in commands:
        if not all(_WORD.match(word) for word in words):
            raise ValueError(f"not a command for a batch: {words}")
        lines.append(" ".join(words))
    if lines:
        run(program, *options, "-batch", "-", data="".join(f"{line}\n" for line in lines), shown=lines)


def query(program: str, *words: str) -> list[dict[str, Any]]:
    """What ``ip`` or ``bridge`` shows, as JSON.

    Raises:
        NodeError: it cannot be asked, or its answer is not JSON.
    """
    text = run(program, "-json", "-details", *words)
    try:
        found = json.loads(text or "[]")
    except ValueError as err:
        raise NodeError(f"cannot parse the output of {program} {' '.join(words)}", str(err)) from err
    return [one for one in found if one]


def tables() -> frozenset[tuple[str, str]]:
    """Families and names of all nftables tables; none where nft is not installed.

    From the text: the JSON of nft 1.0.6 is broken when a table belongs to a process.

    Raises:
        NodeError: nftables cannot be asked.
    """
    if find("nft") is None:
        return frozenset()
    lines = (line.split() for line in run("nft", "list", "tables").splitlines())
    return frozenset((words[1], words[2]) for words in lines if len(words) >= 3 and words[0] == "table")


def run(program: str, *words: str, data: str = "", shown: Sequence[str] = ()) -> str:
    """Run one program; its standard output.

    ``data`` is its standard input, and in no message: it may have keys.
    ``shown`` are the lines of ``data``, for the message of a batch that fails.

    Raises:
        NodeError: it is not installed, fails, or takes too long.
    """
    path = find(program)
    if path is None:
        package = _PACKAGES[program]
        raise NodeError(
            f"{program} is not installed", "job networks need it on every node", f"apt install {package}"
        )
    try:
        done = process.run_briefly([path, *words], data.encode(), TIMEOUT_S)
    except OSError as err:
        raise NodeError(f"cannot run {path}", str(err)) from err
    if done is None:
        raise NodeError(f"{program} did not end within {TIMEOUT_S:.0f} s", " ".join(words))
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        failed = re.search(r"Command failed -:([0-9]+)", said)
        line = int(failed[1]) - 1 if failed else -1
        command = shown[line] if 0 <= line < len(shown) else " ".join(words)
        raise NodeError(f"{program} failed: {command[:200]}", said.splitlines()[0][:300] if said else "")
    return done.stdout.decode(errors="replace")


def set_sysctls(values: Mapping[str, str]) -> None:
    """Set sysctls by their names below ``net``, such as ``ipv4/conf/lo/rp_filter``.

    Raises:
        NodeError: the kernel refuses, or does not know one.
    """
    for key, value in values.items():
        try:
            (SYSCTL / key).write_text(value)
        except OSError as err:
            raise NodeError(f"cannot set net/{key}", str(err)) from err
