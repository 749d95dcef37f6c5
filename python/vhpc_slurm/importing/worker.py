# SPDX-License-Identifier: Apache-2.0
"""The process that reads the source of an import; it runs in the sandbox and is not trusted.

It reads one JSON object from stdin, finds the source below /in and writes
``/out/root.erofs``. It writes JSON lines to stdout: ``{"step": TEXT}`` and
``{"amount": [TEXT, DONE, TOTAL]}`` (bytes) while it works, and at the end
``{"refused": TEXT}`` or ``{"done": {...}}``. Standard library only.
"""

from __future__ import annotations

import errno
import gc
import json
import resource
import sys
from pathlib import Path
from typing import Any

from vhpc_slurm.architecture import named
from vhpc_slurm.bootfiles import verity
from vhpc_slurm.bootfiles.errors import BootFileError
from vhpc_slurm.importing import ownkernel, rootfs
from vhpc_slurm.importing.artifact import describe
from vhpc_slurm.importing.diskformat import VIRTUAL_MAX
from vhpc_slurm.importing.layers import Budget
from vhpc_slurm.importing.listing import ROOT, write_listing
from vhpc_slurm.importing.owncommands import own_commands, told
from vhpc_slurm.importing.process import put_files
from vhpc_slurm.importing.source import DISKS
from vhpc_slurm.importing.taking import check_type, read_container, take
from vhpc_slurm.importing.tree import RefusedError, folder

SOURCE, BOOT, OUT, MEMORY = Path("/in/source"), Path("/in/boot"), Path("/out"), Path("/memory")
SWITCH_S = 0.0005
"""With Python's 5 ms, a thread that hashes waits longer for Python's lock than it works."""
EXPECTED_DIRS = {
    "dev": 0o755,
    "etc": 0o755,
    "proc": 0o755,
    "run": 0o755,
    "sys": 0o755,
    "tmp": 0o1777,
    "usr/bin": 0o755,
}
"""Folders that vhpc-init and the agent need; the agent links Slurm's commands into /usr/bin."""


def main() -> int:
    """Read the request, do it; exit status 0 also if the source is refused."""
    sys.setswitchinterval(SWITCH_S)
    gc.disable()  # it would look through all nodes of the tree again and again, and find nothing
    request = json.load(sys.stdin)
    _limit(request)
    try:
        done = _do(request, SOURCE, OUT)
    except (RefusedError, BootFileError) as err:
        _say({"refused": str(err)})
        return 0
    except MemoryError:
        _say({"refused": "it needs more memory than an import may have"})
        return 0
    except OSError as err:
        _say({"refused": _reason(err)})
        return 0
    _say({"done": done})
    return 0


def _reason(err: OSError) -> str:
    """An error of the system in the words of the user, who does not know the sandbox."""
    if err.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "the catalogue has no space left to unpack it"
    name = str(err.filename or "")
    if not name.startswith(str(SOURCE)):
        return f"its reader cannot continue: {err.strerror}"
    return f"cannot read {name.removeprefix(str(SOURCE)).strip('/')[:80] or 'it'}: {err.strerror}"


def _limit(request: dict[str, Any]) -> None:
    # a disk's raw file is sparse
    size = max(request["max_bytes"], VIRTUAL_MAX if request.get("kind") in DISKS else 0)
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_AS, request["max_memory"]),
        (resource.RLIMIT_CPU, 2 * request["timeout_s"]),  # of two threads
    ):
        resource.setrlimit(what, (limit, limit))
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # each layer is open while the root is written


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _step(text: str) -> None:
    _say({"step": text})


def _amount(what: str, done: int, total: int) -> None:
    _say({"amount": [what, done, total]})


def _do(request: dict[str, Any], source: Path, out: Path) -> dict[str, Any]:
    if request["kind"] == "offer":
        return describe(source)
    if request["kind"] == ROOT:
        return {"files": write_listing(request, source, out, MEMORY, _amount)}
    check_type(request["kind"], source)
    if request.get("only_digest"):
        wanted = request["name"], request["variant"], named(request["arch"])
        return {"digest": read_container(request["kind"], source, *wanted).digest}
    return _import(request, source, out)


def _import(request: dict[str, Any], source: Path, out: Path) -> dict[str, Any]:
    taken = take(request, source, BOOT, out, _step)
    tree, tars, root = taken.tree, taken.tars, out / "root.erofs"
    put_files(tree, taken.process, out, len(tars))
    for name, mode in EXPECTED_DIRS.items():
        if not tree.has(name):
            tree.put(name, folder(len(tars), mode))
    contents = {id(node): node.content.size for _, node in tree.walk() if node.content}
    Budget(request["max_bytes"]).take(sum(contents.values()))  # holes of files are bytes of the root, too
    found: dict[str, Any] = {
        "special": taken.special,
        "process": taken.process,
        "created": taken.created,
        "labels": taken.labels,
    }
    path = (taken.process.get("environment") or {}).get("PATH", "")
    found["own_commands"] = own_commands(tree, request["commands"], path)
    if line := told(found["own_commands"]):
        _step(line)
    hashed = request.get("verity")
    if taken.bootable:
        found["own"] = ownkernel.take(tree, tars, BOOT / "initrd", out, named(request["arch"]))
        hashed = hashed and found["own"]["verity"]
    _step("writing the root file system")
    rootfs.write(tree, tars, root)
    found["digest"] = taken.digest()
    if hashed:
        found["verity"] = verity.append_tree(root)
    return found


if __name__ == "__main__":
    sys.exit(main())
