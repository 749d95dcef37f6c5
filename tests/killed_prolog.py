"""Runs on a node, as root, in place of Slurm: a lease by hand, and the real Prolog, killed at a chosen write.

    killed_prolog.py open [N]      make the lease of the job in SLURM_JOB_ID, with N guests on the node
    killed_prolog.py end           say that the job is over
    killed_prolog.py N [torn]      the Prolog; before its N-th journal write (from 1) it ends as by kill -9,
                                   with ``torn`` leaving half of that line behind

The product knows nothing of this: only the ``os`` that its journal sees is another.
"""

from __future__ import annotations

import os
import signal
import sys

from vhpc_slurm import config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.hooks import prolog
from vhpc_slurm.model import Allocation, ImageRef, JobRequest, NodeAllocation
from vhpc_slurm.node import journal

JOB = int(os.environ["SLURM_JOB_ID"])


def open_lease(guests: int) -> None:
    image = ImageRef.parse(os.environ["SPANK_VHPC_IMAGE"])
    request = JobRequest(JOB, 0, 2001, 2001, "alice", "/home/alice", image, guests_per_node=guests)
    cpu_ids = tuple(range(guests))
    allocation = Allocation((NodeAllocation(os.environ["SLURMD_NODENAME"], cpu_ids, 512 + 512 * guests),))
    print(ControllerClient(config.load()).open_generation(request, allocation).generation)


class KillingOs:
    """The journal's ``os``, whose N-th write does not come to be."""

    def __init__(self, at: int, torn: bool) -> None:
        self.left, self.torn = at, torn

    def write(self, fd: int, data: bytes) -> int:
        self.left -= 1
        if self.left == 0:
            if self.torn:
                os.write(fd, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return os.write(fd, data)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


if sys.argv[1] == "open":
    open_lease(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
elif sys.argv[1] == "end":
    ControllerClient(config.load()).ending(JOB, 0)
else:
    journal.os = KillingOs(int(sys.argv[1]), "torn" in sys.argv)  # type: ignore[assignment, attr-defined]
    sys.exit(prolog.entry())
