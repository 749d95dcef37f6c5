# SPDX-License-Identifier: Apache-2.0
"""Runs as root in place of Slurm: a lease by hand, and the real Prolog or Epilog with a kill at some write.

    killed_prolog.py open [--guests N] [--cpus N] [--memory MIB] [--gpu INDEX] [--vfs N] [--network job]
                        [--disk MIB]
                                   make the lease of the job in SLURM_JOB_ID
    killed_prolog.py end           say that the job is over; both on a host of slurmctld
    killed_prolog.py N [torn]      the Prolog; before its N-th journal write (from 1) it ends as by kill -9,
                                   with ``torn`` leaving half of that line behind
    killed_prolog.py N libvirtd    the Prolog, and before its N-th journal write libvirtd is killed; says how
                                   many writes there were
    killed_prolog.py epilog KIND   the Epilog; it ends as by kill -9 when it has released a resource of this
                                   kind, before it notes that in the journal

The product knows nothing of this: only the ``files`` that its journal sees is another.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from unittest import mock

from vhpc_slurm import config, files
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.hooks import epilog, prolog
from vhpc_slurm.model import Allocation, GresAllocation, ImageRef, JobRequest, NodeAllocation
from vhpc_slurm.node.store import journal

JOB = int(os.environ["SLURM_JOB_ID"])


def open_lease(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("guests", 1), ("cpus", None), ("memory", None), ("gpu", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("vfs", "disk"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--network")
    said = parser.parse_args(words)
    guests = said.guests
    image = ImageRef.parse(os.environ["SPANK_VHPC_IMAGE"])
    request = JobRequest(
        JOB,
        0,
        2001,
        2001,
        "alice",
        "/home/alice",
        image,
        vfs=said.vfs,
        guests_per_node=guests,
        network=said.network,
        disk_mib=said.disk,
    )
    gres = () if said.gpu is None else (GresAllocation("gpu", "", 1, (said.gpu,)),)
    cpu_ids = tuple(range(said.cpus or guests))
    part = NodeAllocation(os.environ["SLURMD_NODENAME"], cpu_ids, said.memory or 512 + 512 * guests, gres)
    print(ControllerClient(config.load()).open_generation(request, Allocation((part,))).generation)


class KillingFiles:
    """The journal's ``files``, at whose N-th write somebody is killed; the Prolog itself before it writes."""

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how, self.writes = at, how, 0

    def write(self, fd: int, data: bytes) -> None:
        self.writes += 1
        if self.writes == self.at:
            if self.how == "libvirtd":
                subprocess.run(["pkill", "-KILL", "-x", "libvirtd"], check=True)
            else:
                if self.how == "torn":
                    os.write(fd, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        files.write(fd, data)

    def __getattr__(self, name: str) -> object:
        return getattr(files, name)


class ReleasesKill(KillingFiles):
    """The journal's ``files``: the process is killed when it would note a release of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__(0, "")
        self.kind = kind

    def write(self, fd: int, data: bytes) -> None:
        record = json.loads(data)
        if record["event"] == "released" and record["key"].partition(":")[0] == self.kind:
            os.kill(os.getpid(), signal.SIGKILL)
        files.write(fd, data)


if sys.argv[1] == "open":
    open_lease(sys.argv[2:])
elif sys.argv[1] == "end":
    ControllerClient(config.load()).ending(JOB, 0)
elif sys.argv[1] == "epilog":
    with mock.patch.object(journal, "files", ReleasesKill(sys.argv[2])):
        sys.exit(epilog.entry())
else:
    killing = KillingFiles(int(sys.argv[1]), "".join(sys.argv[2:]))
    with mock.patch.object(journal, "files", killing):
        code = prolog.entry()
    print(killing.writes)
    sys.exit(code)
