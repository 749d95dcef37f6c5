# SPDX-License-Identifier: Apache-2.0
"""A job's state as people see it, and how far its boot is; also for srun and salloc, which wait for it."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vhpc_slurm.cli import options
from vhpc_slurm.config import Config
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import Lease, LeaseState
from vhpc_slurm.terminal import printable

if TYPE_CHECKING:
    from vhpc_slurm.controller.wire_types import ProgressWire

FIRST_S = 2.0
"""A boot that takes no longer is not worth a line."""
LINE_S, AGAIN_S = 1.0, 10.0
"""Seconds between two lines at least, and between two that say the same."""
ASK_S, ASK_LATER_S, LATER = 2.0, 15.0, 120.0
"""Seconds between two questions; the longer ones for a job that has been queued for LATER seconds."""
LONGEST_S = 7 * 86400.0
BOOTING = "booting"


def state(lease: Lease, progress: ProgressWire | None) -> str:
    """The state of a job as all commands and pages show it.

    It is the lease's, but ``booting`` until all guests are ready: a lease is ready when nodes may begin.
    """
    return BOOTING if lease.state is LeaseState.READY and progress is not None else lease.state.value


def document(progress: ProgressWire | None) -> dict[str, Any] | None:
    """How far the boot is, as JSON; None if the job does not boot."""
    if progress is None:
        return None
    doing = [
        {"node": node, "stage": stage, "for_s": round(for_s, 1)} for node, stage, for_s in progress.doing
    ]
    return {"nodes_ready": progress.ready, "doing": doing}


def line(guests_per_node: int, progress: ProgressWire | None) -> str:
    """``3 of 4 guests ready, n7: agent for 12 s``; empty if the job does not boot."""
    if progress is None:
        return ""
    text = f"{progress.ready * guests_per_node} of {progress.nodes * guests_per_node} guests ready"
    if progress.doing:
        node, stage, for_s = progress.doing[0]
        text += f", {node}: {_plain(stage)} for {for_s:.0f} s"
    return printable(text)


def _plain(stage: str) -> str:
    """A stage without the number of the only guest."""
    return re.sub(r" g0$", "", stage)


def without_seconds(text: str) -> str:
    """A line that stays the same while nothing happens."""
    return re.sub(r" for \d+ s$", "", text)


def watch(
    waiter: Annotated[str, typer.Argument(metavar="WORD", show_default=False)],
    pid: Annotated[int, typer.Argument(metavar="PID", min=1, show_default=False)],
) -> int:
    """Print on stderr how far the job is that srun or salloc waits for; the SPANK plugin runs this."""
    # ends when the guests are ready, when the job has ended, and when the command (pid) has ended
    config = options.config()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # the shell of salloc may be in the foreground
    try:
        command = os.pidfd_open(pid)
    except OSError:
        return 0
    if os.isatty(2):
        _watch(config, waiter, command)
    return 0


def _watch(config: Config, waiter: str, command: int) -> None:
    import msgspec

    from vhpc_slurm.controller.client import ControllerClient

    brief = msgspec.structs.replace(config.controller, request_timeout_s=2)
    client = ControllerClient(msgspec.structs.replace(config, controller=brief), patient=False)
    began = time.monotonic()
    seen, said, said_at = 0.0, "", 0.0
    while (now := time.monotonic()) - began < LONGEST_S:
        found: list[str] | None = None
        try:
            records, progress = client.booting(waiter=waiter)
        except VhpcError:
            records, progress = [], {}
        else:
            found = [
                line(record.lease.request.guests_per_node, progress.get(str(record.lease.generation)))
                for record in records
            ]
        if found:
            seen = seen or now
            text = found[-1]
            if not text:
                return  # ready, or over
            what = without_seconds(text)
            pause = LINE_S if what != said else AGAIN_S
            if now - seen >= FIRST_S and now - said_at >= pause:
                said, said_at = what, now
                _say(text)
        later = not seen and now - began > LATER
        if select.select([command], [], [], ASK_LATER_S if later else ASK_S)[0]:
            return


def _say(text: str) -> None:
    """One write, so that no other output comes between."""
    try:
        os.write(2, f"vhpc: {text}\n".encode())
    except OSError:
        raise SystemExit(0) from None
