# SPDX-License-Identifier: Apache-2.0
"""Run as a job's program: what slurmstepd has given it, as JSON in a file of the user's home."""

import json
import os
import resource
import stat
import sys
from pathlib import Path


def kind(fd: int) -> str:
    """The kind of the descriptor."""
    status = os.fstat(fd)
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(1, 3):
        return "/dev/null"
    if os.isatty(fd):
        return "terminal"
    kinds = {stat.S_IFREG: "file", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(status.st_mode), "other")


def reopens(fd: int) -> str:
    """Whether ``echo >/dev/stderr`` and the like work."""
    mode = os.O_WRONLY | os.O_APPEND if fd else os.O_RDONLY | os.O_NONBLOCK
    try:
        os.close(os.open(f"/dev/fd/{fd}", mode))
    except OSError as error:
        return str(error)
    return "yes"


lines = Path("/proc/self/status").read_text().split("\n")
status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
umask = os.umask(0)
os.umask(umask)
# 32 and 33 belong to the C library, which lets no program change them: they are as slurmd was started.
hidden = 1 << 31 | 1 << 32
signals = {n: f"{int(status[n], 16) & ~hidden:016x}" for n in ("SigPnd", "SigBlk", "SigCgt", "SigIgn")}
found = {
    "argv": [os.fsencode(word).decode("latin-1") for word in sys.orig_argv],
    "environ": {k.decode("latin-1"): v.decode("latin-1") for k, v in os.environb.items()},
    "cwd": str(Path.cwd()),
    "ids": [os.getresuid(), os.getresgid(), sorted(os.getgroups())],
    "umask": oct(umask),
    "nice": os.nice(0),
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    "signals": signals,
    "capabilities": [status[n] for n in ("CapInh", "CapPrm", "CapEff", "CapAmb")],
    "no_new_privs": status["NoNewPrivs"],
    "oom": Path("/proc/self/oom_score_adj").read_text(),
    "fds": sorted(int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.exists()),
    "kinds": [kind(fd) for fd in range(3)],
    "out_is_err": os.path.sameopenfile(1, 2),
    "reopens": [reopens(fd) for fd in range(3)],
    "group_leader": os.getpgrp() == os.getpid(),
    "cpus": len(os.sched_getaffinity(0)),
    "kernel": os.uname().release,
}
where = Path(__file__).resolve().with_name(f"{os.environ['SLURM_JOB_ID']}.{sys.argv[1]}")
where.write_text(json.dumps(found))
