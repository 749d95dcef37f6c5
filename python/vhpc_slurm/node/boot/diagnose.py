# SPDX-License-Identifier: Apache-2.0
"""Why a guest that was started did not come up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vhpc_slurm.errors import UserError
from vhpc_slurm.model import GuestPlan
from vhpc_slurm.node.boot.state import Boot, Started
from vhpc_slurm.node.guest import console, qemulog
from vhpc_slurm.node.host.confine import DisturbedError
from vhpc_slurm.node.store.layout import domain_name

END_S = 2.0
"""How much later than others libvirt may notice the end of a guest."""


def has_ended(work: Boot, guest: GuestPlan) -> bool:
    """Whether a guest has ended; waits up to ``END_S`` for libvirt to notice it."""
    name = domain_name(work.lease.generation, guest.index)
    until = time.monotonic() + END_S
    while work.hypervisor.running(name):
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)
    return True


@contextmanager
def placed(work: Boot, guest: GuestPlan) -> Iterator[None]:
    """Errors about disturbed helpers name the node and the image of the guest."""
    try:
        yield
    except DisturbedError as err:
        what = f"{err.what} on {_place(work, guest)} while image {work.image.ref} booted"
        raise UserError(what, err.why, err.hint) from err


def boot_failure(work: Boot, started: Started, *, late: bool) -> UserError:
    """Why a guest did not come up: silent until the deadline (``late``), or ended before it.

    Mostly the image is the reason.  A crash of QEMU may be the guest's doing as
    well, so it fails the job and not the node.
    """
    guest, helpers = started.guest.plan, started.helpers
    last = console.last_words(Path(guest.paths.console_log))
    said = f"its console ended with: {last}" if last else "it wrote nothing to its console"
    image, node = work.image.ref, _place(work, guest)
    if error := helpers.disturbed() or helpers.exhausted():
        return error
    if late:
        return UserError(
            f"image {image} did not get ready within {guest.boot_timeout_s} s on {node}",
            said,
            "--vhpc-timeout gives it longer",
        )
    name = domain_name(work.lease.generation, guest.index)
    crash = qemulog.crash(name) if has_ended(work, guest) else None
    if crash:
        return UserError(
            f"QEMU crashed on {node} while image {image} booted",
            crash,
            "submit the job again; if it ends like this again, tell the site's support",
        )
    if crash is not None and not last:
        return UserError(
            f"the guest ended on {node} while image {image} booted",
            "QEMU crashed or was killed, or the kernel panicked without a message",
            "submit the job again; if it ends like this again, check the image",
        )
    return UserError(f"image {image} did not boot on {node}", said)


def _place(work: Boot, guest: GuestPlan) -> str:
    """The node, and which of its guests where it has several."""
    node = work.plan.node
    return node if len(work.plan.guests) == 1 else f"{node} (guest {guest.hostname})"
