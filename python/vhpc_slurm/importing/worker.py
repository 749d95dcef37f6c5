# SPDX-License-Identifier: Apache-2.0
"""The process that reads what a user imports; it runs in the sandbox, and nobody trusts it.

It reads one JSON object from stdin, finds the source below /in and writes
``/out/root.erofs``. It writes JSON lines to stdout: ``{"step": TEXT}`` while it works, and at
the end ``{"refused": TEXT}`` or ``{"done": {...}}``. Standard library only.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import resource
import stat
import sys
from pathlib import Path
from typing import Any

from vhpc_slurm.bootfiles import verity
from vhpc_slurm.bootfiles.errors import BootFileError
from vhpc_slurm.importing import diskformat, diskguest, ownkernel, rootfs
from vhpc_slurm.importing.archives import (
    Archive,
    Container,
    Folder,
    checked,
    read_docker,
    read_fetched,
    read_layout,
)
from vhpc_slurm.importing.artifact import describe
from vhpc_slurm.importing.hashing import FileHash
from vhpc_slurm.importing.layers import Budget, apply, unpack
from vhpc_slurm.importing.listing import ROOT, write_listing
from vhpc_slurm.importing.tree import Content, Node, RefusedError, Tree, folder

SOURCE, BOOT, OUT = Path("/in/source"), Path("/in/boot"), Path("/out")
DISKS = ("qcow2", "raw", "vmdk")
BOOTABLE_LABEL = "containers.bootc"
SWITCH_S = 0.0005
"""With Python's 5 ms, a thread that hashes waits longer for Python's lock than it works."""
FOLDERS = {"dir", "fetched", "oci"}
"""Kinds of sources that are folders."""
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

ENVIRONMENT_FILE = "etc/vhpc/environment"
ENVIRONMENT_MAX, VARIABLES_MAX = 131072, 512
SURROGATE = re.compile("[\ud800-\udfff]")
"""Halves of characters, which JSON can have and UTF-8 cannot."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)


def main() -> int:
    """Read the request, do it; exit status 0 also if the source is refused."""
    sys.setswitchinterval(SWITCH_S)
    gc.disable()  # it would look through all nodes of the tree again and again, and find nothing
    request = json.load(sys.stdin)
    _limit(request)
    try:
        done = _import(request, SOURCE, OUT)
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
    """What an error of the system means to somebody who does not know the sandbox."""
    if err.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "the catalogue has no space left to unpack it"
    name = str(err.filename or "")
    if not name.startswith(str(SOURCE)):
        return f"its reader cannot go on: {err.strerror}"
    return f"cannot read {name.removeprefix(str(SOURCE)).strip('/')[:80] or 'it'}: {err.strerror}"


def _limit(request: dict[str, Any]) -> None:
    # a disk's raw file is sparse
    size = max(request["max_bytes"], diskformat.VIRTUAL_MAX if request.get("kind") in DISKS else 0)
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_AS, request["max_memory"]),
        (resource.RLIMIT_CPU, 2 * request["timeout_s"]),  # of two threads
    ):
        resource.setrlimit(what, (limit, limit))


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _import(request: dict[str, Any], source: Path, out: Path) -> dict[str, Any]:
    if request["kind"] == "offer":
        return describe(source)
    if request["kind"] == ROOT:
        return {"files": write_listing(source, out, request["max_files"], request["max_bytes"])}
    _check_type(request["kind"], source)
    if request.get("only_digest"):
        return {"digest": _container(request["kind"], source, request["name"]).digest}
    kind, budget = request["kind"], Budget(request["max_bytes"])
    tree = Tree(request["max_files"])
    tars: list[Path] = []
    process: dict[str, Any] = {}
    digest, special, bootable = "", 0, kind in DISKS
    in_place: FileHash | None = None
    if kind == "dir":
        special = _take_folder(tree, source, budget)
    elif bootable:
        tar, digest = _files_of_disk(kind, source, out, request)
        budget.take(tar.stat().st_size)
        tars.append(tar)
        special = apply(tree, 0, tar)
    elif kind == "tar" and not request["compression"]:
        tars.append(source)
        in_place = FileHash(source)
        budget.take(in_place.size)
        special = apply(tree, 0, source)
    elif kind == "tar":
        tars.append(out / "layer-0")
        _say({"step": "unpacking"})
        with source.open("rb") as file:
            digest = unpack(file, request["compression"], tars[0], budget)
        special = apply(tree, 0, tars[0])
    else:
        container = _container(kind, source, request["name"])
        tars, special = take_layers(tree, container, out, budget)
        digest = container.digest
        process = process_of(container.config)
        bootable = is_bootable(container.config)
    if process.get("environment"):
        _put_environment(tree, process["environment"], out / "environment", len(tars))
    for name, mode in EXPECTED_DIRS.items():
        if not tree.has(name):
            tree.put(name, folder(len(tars), mode))
    contents = {id(node): node.content.size for _, node in tree.walk() if node.content}
    Budget(request["max_bytes"]).take(sum(contents.values()))  # holes of files are bytes of the root, too
    found: dict[str, Any] = {"digest": digest, "special": special, "process": process}
    hashed = request.get("verity")
    if bootable:
        found["own"] = ownkernel.take(tree, tars, BOOT / "initrd", out)
        hashed = hashed and found["own"]["verity"]
    _say({"step": "writing the root file system"})
    rootfs.write(tree, tars, out / "root.erofs")
    if in_place is not None:
        found["digest"] = in_place.digest()
    if hashed:
        found["verity"] = verity.append_tree(out / "root.erofs")
    return found


def _files_of_disk(kind: str, source: Path, out: Path, request: dict[str, Any]) -> tuple[Path, str]:
    """The files of a disk as a tar, and the digest of the disk's file."""

    def step(text: str) -> None:
        _say({"step": text})

    disk, limit = out / "disk.raw", request["max_bytes"]
    with source.open("rb") as file:
        digest = diskformat.convert(file, kind, disk, limit, step)
    tar = diskguest.read_files(disk, BOOT, request["cmdline"], out, limit, step)
    disk.unlink()
    return tar, digest


def is_bootable(config: dict[str, Any]) -> bool:
    """Whether a container says that it is a whole system with a kernel (bootc)."""
    wanted = config.get("config")
    labels = wanted.get("Labels") if isinstance(wanted, dict) else None
    return isinstance(labels, dict) and labels.get(BOOTABLE_LABEL) in ("1", "true")


def _check_type(kind: str, source: Path) -> None:
    """RefusedError if it is no folder or no file, such as a pipe, on which a reader would wait."""
    mode = source.stat().st_mode
    if kind in FOLDERS and not stat.S_ISDIR(mode):
        raise RefusedError("it is not a folder")
    if kind not in FOLDERS and not stat.S_ISREG(mode):
        raise RefusedError("it is not a regular file")
    if not os.access(source, os.R_OK):
        raise RefusedError("cannot read it: its mode forbids it")


def _container(kind: str, source: Path, name: str) -> Container:
    if kind == "fetched":
        return read_fetched(Folder(source))
    if kind == "oci":
        return read_layout(Folder(source), name)
    return (read_docker if kind == "docker-archive" else read_layout)(Archive(source), name)


def take_layers(tree: Tree, container: Container, out: Path, budget: Budget) -> tuple[list[Path], int]:
    """Unpack a container's layers into ``out`` and apply them to a tree.

    Returns:
        the unpacked tars, and the number of devices and pipes that were left out.

    Raises:
        RefusedError: a layer is damaged, hostile or not the one of its digest.
    """
    tars, special = [], 0
    for number, layer in enumerate(container.layers):
        _say({"step": f"layer {number + 1} of {len(container.layers)}"})
        tars.append(out / f"layer-{number}")
        with checked(container, layer) as file:
            diff_id = unpack(file, layer.compression, tars[-1], budget)
        if diff_id != layer.diff_id:
            raise RefusedError(f"layer {number + 1}, unpacked, is {diff_id} instead of {layer.diff_id}")
        special += apply(tree, number, tars[-1])
    return tars, special


def _take_folder(tree: Tree, top: Path, budget: Budget) -> int:
    """Add a folder's files, as root's; their mode, time and links are kept. Returns what was left out."""
    special = 0
    seen: dict[tuple[int, int], str] = {}
    stack = [""]
    while stack:
        above = stack.pop()
        try:
            entries = sorted(os.scandir(top / above), key=lambda entry: entry.name)
        except OSError as err:
            raise RefusedError(f"cannot read the folder {above[:80] or '.'}: {err.strerror}") from err
        for entry in entries:
            path = f"{above}/{entry.name}" if above else entry.name
            about = entry.stat(follow_symlinks=False)
            mode, mtime = stat.S_IMODE(about.st_mode), max(0, int(about.st_mtime))
            if stat.S_ISDIR(about.st_mode):
                tree.put(path, Node(0, mode, mtime=mtime, children={}))
                stack.append(path)
            elif stat.S_ISLNK(about.st_mode):
                tree.put(path, Node(0, mode, mtime=mtime, target=str(Path(entry.path).readlink())))
            elif stat.S_ISREG(about.st_mode):
                first = seen.setdefault((about.st_dev, about.st_ino), path) if about.st_nlink > 1 else path
                if first != path:
                    tree.link(path, first, 0)
                    continue
                if not os.access(entry.path, os.R_OK):
                    raise RefusedError(f"cannot read {path[:80]!r}: the mode of the file forbids it")
                budget.take(about.st_size)
                pieces = ((0, 0, about.st_size),) if about.st_size else ()
                tree.put(path, Node(0, mode, mtime=mtime, content=Content(entry.path, about.st_size, pieces)))
            else:
                special += 1
    return special


def _put_environment(tree: Tree, environment: dict[str, str], file: Path, layer: int) -> None:
    """Put the file that the guest's agent reads (guest/agent/imageenv.h) into the tree."""
    for name, value in environment.items():
        if not VARIABLE.match(name) or "\n" in value or "\0" in value or SURROGATE.search(value):
            raise RefusedError(
                f"its variable {name[:80]!r} cannot be set: a bad name, or a value of several lines"
            )
    data = "".join(f"{name}={value}\n" for name, value in environment.items()).encode()
    if len(data) > ENVIRONMENT_MAX or len(environment) > VARIABLES_MAX:
        raise RefusedError(
            f"its environment has more than {VARIABLES_MAX} variables or {ENVIRONMENT_MAX >> 10} KiB"
        )
    file.write_bytes(data)
    content = Content(str(file), len(data), ((0, 0, len(data)),))
    tree.put(ENVIRONMENT_FILE, Node(layer, 0o644, content=content))


def process_of(config: dict[str, Any]) -> dict[str, Any]:
    """What a container's configuration would start, with the manifest's keys.

    Raises:
        RefusedError: it is not a configuration.
    """
    wanted = config.get("config")
    if wanted is None:
        return {}
    if not isinstance(wanted, dict):
        raise RefusedError("its configuration has no valid 'config'")
    environment = {}
    listed = wanted.get("Env") or []
    if not isinstance(listed, list):
        raise RefusedError("its configuration has no valid 'Env'")
    for text in listed:
        name, equals, value = str(text).partition("=")
        if not equals:
            raise RefusedError(f"its environment has {str(text)[:80]!r}, which is not NAME=VALUE")
        environment[name] = value
    return {
        "entrypoint": _texts(wanted, "Entrypoint"),
        "arguments": _texts(wanted, "Cmd"),
        "environment": environment,
        "user": _text(wanted, "User"),
        "working_dir": _text(wanted, "WorkingDir"),
    }


def _text(of: dict[str, Any], key: str) -> str:
    found = of.get(key)
    if not isinstance(found, str | None):
        raise RefusedError(f"its configuration has no valid {key!r}")
    return found or ""


def _texts(of: dict[str, Any], key: str) -> list[str]:
    found = of.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise RefusedError(f"its configuration has no valid {key!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
