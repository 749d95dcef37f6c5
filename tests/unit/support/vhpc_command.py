# SPDX-License-Identifier: Apache-2.0
"""The `vhpc` command in tests, with a machine and images that are written out by hand."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from vhpc_slurm.cli.main import main


class Vhpc:
    """The command with a configuration and a machine of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, *argv: str, code: int = 0) -> str:
        """Run it, check the exit status, return stdout; an error must be one line on stderr."""
        assert main(argv) == code, self._capsys.readouterr()
        done = self._capsys.readouterr()
        self.error = done.err
        if code not in (0, 1) or done.err:
            assert done.err.startswith("vhpc: ")
            assert done.err.count("\n") == 1
        return done.out

    def json(self, *argv: str, code: int = 0) -> Any:
        """Run it with --json; nothing but one document may be on stdout."""
        return json.loads(self(*argv, "--json", code=code))


def two_sockets(sys_root: Path) -> None:
    """Two sockets of two cores of two threads, numbered as BIOSes like to: even CPUs on socket 0."""
    sockets = {cpu: 0x55 if cpu % 2 == 0 else 0xAA for cpu in range(8)}
    cores = {cpu: (0x11 << cpu % 4) for cpu in range(8)}
    files = {"devices/system/cpu/online": "0-7", "devices/system/cpu/present": "0-7"}
    for cpu in range(8):
        topology = f"devices/system/cpu/cpu{cpu}/topology"
        files[f"{topology}/package_cpus"] = f"{sockets[cpu]:x}"
        files[f"{topology}/core_cpus"] = f"{cores[cpu]:x}"
    for cell, mask, row in ((0, "55", "10 21"), (1, "aa", "21 10")):
        files[f"devices/system/node/node{cell}/cpumap"] = mask
        files[f"devices/system/node/node{cell}/distance"] = row
        files[f"devices/system/node/node{cell}/meminfo"] = f"Node {cell} MemTotal:       4096000 kB"
    for name, text in files.items():
        (sys_root / name).parent.mkdir(parents=True, exist_ok=True)
        (sys_root / name).write_text(text + "\n")


def publish(catalog: Path, store: Path, arch: str = os.uname().machine) -> None:
    """An image tiny:1 whose kernel is in the node's store already, and a broken one."""
    base = json.loads((Path(__file__).parents[2] / "data/manifests/manifest.json").read_text())
    blobs = {}
    for name, data in (("kernel", b"k" * 1024), ("initrd", b"i" * 512), ("root", b"r" * 2048)):
        digest = hashlib.sha256(data).hexdigest()
        blobs[name] = base[name] | {"sha256": digest, "size": len(data)}
        if name == "kernel" and arch == "aarch64":
            blobs[name]["media_type"] = "application/vnd.vhpc.kernel.image"
        for top in (catalog, store) if name == "kernel" else (catalog,):
            (top / "blobs/sha256").mkdir(parents=True, exist_ok=True)
            (top / "blobs/sha256" / digest).write_bytes(data)
    manifest = base | blobs | {
        "arch": arch, "cmdline": "", "min_cpus": 1, "min_memory_mib": 300,
        "drivers": {"virtio_blk": ""}, "description": "for [bold]tests[/bold]",
        "provenance": base["provenance"] | {"created": "2026-01-02T03:04:05Z"},
    }  # fmt: skip
    raw = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    digest = hashlib.sha256(raw).hexdigest()
    for path, data in (
        (f"manifests/sha256/{digest}.json", raw),
        ("names/tiny/1", f"sha256:{digest}\n".encode()),
        ("names/tiny/broken", b"sha256:" + b"0" * 64 + b"\n"),
    ):
        (catalog / path).parent.mkdir(parents=True, exist_ok=True)
        (catalog / path).write_bytes(data)
