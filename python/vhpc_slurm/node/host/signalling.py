# SPDX-License-Identifier: Apache-2.0
"""Signals for processes that outlive the hook that starts them."""

from __future__ import annotations

import os
import signal

from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.process import ProcessRef


def send(ref: ProcessRef, signum: signal.Signals) -> bool:
    """Send a signal to exactly this process; False if it has ended."""
    try:
        fd = os.pidfd_open(ref.pid)
    except OSError:  # no process, or the pid is that of a thread now
        return False
    try:
        if not process.alive(ref):
            return False
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True
