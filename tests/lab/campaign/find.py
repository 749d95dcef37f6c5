# SPDX-License-Identifier: Apache-2.0
"""Runs on a host of the lab, as root: waits for a process of a role, then does something to it.

    find.py ROLE ACT PICK DELAY_S WAIT_S

ACT is a signal's name, "reset" and "destroy" for QEMU through libvirt, or "look"
to do nothing.  Says as JSON what was hit: {"pid": …, "job": …, "what": …}; {} when nothing was there.
Uses nothing of the product: what a process is, its command line and
environment tell.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def environment(pid: int, name: str) -> str:
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(name.encode() + b"="):
            return entry.partition(b"=")[2].decode()
    return ""


def job_of(role: str, pid: int, words: list[str]) -> int:
    """The job of a process when it plays that role, else 0."""
    line = " ".join(words)
    found = None
    if role in ("qemu", "networked-qemu") and "qemu-system" in words[0]:
        if role == "qemu" or '"type":"tap"' in line or " tap," in line:
            found = re.search(r" guest=vhpc-(\d+)-", line)
    elif role == "qemu":
        # of a light lab: the shell that waits for the agent (bench/vhpcbench/light_libvirt.py)
        found = re.search(r"^/bin/sh .* light-guest=vhpc-(\d+)-", line)
    elif role == "stepd":
        found = re.match(r"slurmstepd: \[(\d+)\.(?!extern)", line)
    elif role == "step-stepd":
        found = re.match(r"slurmstepd: \[(\d+)\.\d", line)
    elif role in ("virtiofsd", "locks", "shim", "passt"):
        if Path(words[0]).name.removeprefix("vhpc-").removesuffix(".avx2") == role:
            found = re.match(r"(\d+)\.", environment(pid, "VHPC_GENERATION"))
    elif role == "run" and Path(f"/proc/{pid}/exe").readlink().name == "vhpc-run":
        found = re.match(r"(\d+)$", environment(pid, "SLURM_JOB_ID"))
    elif role == "slurmctld-hook":  # the clients of vhpc-hookd
        if Path(words[0]).name in ("prolog-slurmctld", "epilog-slurmctld"):
            found = re.match(r"(\d+)$", environment(pid, "SLURM_JOB_ID"))
    elif role == "keeper" and "vhpc_slurm.hooks.keeper" in words:
        found = re.search(r"hooks\.keeper (\d+)\.", line)
    elif role in ("prolog", "epilog") and (
        f"vhpc_slurm.hooks.{role}" in words
        or (Path(words[0]).name == "vhpc-node-hook" and words[1] == role)  # a preloaded process serves it
    ):
        found = re.match(r"(\d+)$", environment(pid, "SLURM_JOB_ID"))
    return int(found[1]) if found else 0


def candidates(role: str) -> list[tuple[int, int, str]]:
    """(pid, job, command line) of all processes of a role."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = [word.decode(errors="replace") for word in (entry / "cmdline").read_bytes().split(b"\0")]
            job = job_of(role, int(entry.name), words) if words[0] else 0
        except OSError:
            continue  # it has ended
        if job:
            found.append((int(entry.name), job, " ".join(words)[:100]))
    return sorted(found)


def hit(act: str, pid: int, line: str) -> None:
    if act == "look":
        return
    if act in ("reset", "destroy"):
        name = re.search(r" guest=([^, ]+)", line)
        assert name is not None
        # an error does not tell whether it worked
        subprocess.run(["virsh", "-q", act, name[1]], check=False, capture_output=True, timeout=20)
    else:
        os.kill(pid, getattr(signal, f"SIG{act}"))


def main() -> None:
    role, act, pick, delay_s, wait_s = sys.argv[1:]
    until = time.monotonic() + float(wait_s)
    while time.monotonic() < until:
        found = candidates(role)
        if not found:
            time.sleep(0.05 if float(delay_s) else 0.01)
            continue
        pid, job, line = found[int(float(pick) * len(found))]
        time.sleep(float(delay_s))
        if float(delay_s) and (pid, job, line) not in candidates(role):
            continue  # it has ended meanwhile: another one
        try:
            hit(act, pid, line)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
        print(json.dumps({"pid": pid, "job": job, "what": line}))
        return
    print("{}")


main()
