# SPDX-License-Identifier: Apache-2.0
"""CPU time that the host spends on a guest's output, without the time of the guest's vCPUs."""

from __future__ import annotations

import os
from pathlib import Path

from vhpcbench.common import BenchError

RELAYS = ("vhpc-shim", "vhpc-run")


def of_job(job: int) -> dict[str, float]:
    """CPU seconds of QEMU without its vCPUs, of the shim and of vhpc-run, of a job on this machine.

    Raises:
        BenchError: one of these processes does not exist.
    """
    found: dict[str, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name = _role(entry, job)
            if name:
                found[name] = found.get(name, 0.0) + _cpu_s(entry)
        except OSError:
            continue  # it has ended
    missing = {"qemu", *RELAYS} - found.keys()
    if missing:
        raise BenchError(f"job {job} has no {', '.join(sorted(missing))}")
    return found


def _role(process: Path, job: int) -> str:
    """Role of a process of the job; empty for other processes."""
    words = (process / "cmdline").read_bytes().split(b"\0")
    if b"qemu-system" in words[0]:
        return "qemu" if any(b"guest=vhpc-%d-" % job in word for word in words) else ""
    name = Path(os.fsdecode((process / "exe").readlink())).name
    if name not in RELAYS:
        return ""
    variables = (process / "environ").read_bytes().split(b"\0")
    mark = b"VHPC_GENERATION=%d." if name == "vhpc-shim" else b"SLURM_JOB_ID=%d"
    ours = mark % job
    return name if any(v.startswith(ours) if ours.endswith(b".") else v == ours for v in variables) else ""


def _cpu_s(process: Path) -> float:
    total = 0.0
    for task in (process / "task").iterdir():
        if not (task / "comm").read_text().startswith("CPU "):
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total
