# SPDX-License-Identifier: Apache-2.0
"""What programs have used in the guests of a node: asked of their agents before the guests end.

The guest's root can make the agent answer anything, so all is bounded here.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import FIGURE_MAX, Figures, GuestUsage, StepUsage
from vhpc_slurm.model.usage import total
from vhpc_slurm.node.guest.channel import ChannelError, ChannelRefusedError, GuestChannel
from vhpc_slurm.node.guest.helpers import ROOT_SOCKET
from vhpc_slurm.node.guest.wire import Op, Tag, fields_of, number
from vhpc_slurm.terminal import printable

STEPS_MAX = 256
"""Rows of one guest; also in guest/agent/usage.h."""
ROWS_MAX = STEPS_MAX + 2
"""With those of the whole guest and of ssh."""
NODE_STEPS_MAX = 1024
"""Rows of all guests of a node: their report fits into one message to vhpcd."""
ASK_S = 2.0
"""For all guests of a node together: the teardown waits meanwhile."""
CONNECT_S = 0.1
"""To reach a shim, which answers at once; also what a guest gets when the time for all of them is over."""
_NAME = re.compile(rb"[a-z0-9+]{1,31}")
_TASKS_MAX = 2**31
_WHY_MAX = 200


def of_guests(folders: Iterable[Path]) -> tuple[GuestUsage, ...]:
    """Ask the guests with these run folders; one that does not answer has the reason instead of figures."""
    until = time.monotonic() + ASK_S
    found: list[GuestUsage] = []
    for folder in folders:
        index = int(folder.name.removeprefix("g"))
        try:
            with GuestChannel.connect(folder / ROOT_SOCKET, CONNECT_S) as channel:
                channel.hello(max(CONNECT_S, until - time.monotonic()), wait_for_boot=False)
                found.append(ask(channel, index, max(CONNECT_S, until - time.monotonic())))
        except ChannelRefusedError as err:
            old = err.errno == errno.ENOSYS
            why = "the agent of the image is too old to measure: rebuild the image" if old else err.line()
            found.append(GuestUsage(index, missing=printable(why)[:_WHY_MAX]))
        except ChannelError as err:
            found.append(GuestUsage(index, missing=printable(err.line())[:_WHY_MAX]))
        except VhpcError:
            found.append(GuestUsage(index, missing="the guest had ended"))
    return tuple(folded(guest, max(1, NODE_STEPS_MAX // len(found))) for guest in found)


def folded(guest: GuestUsage, most: int) -> GuestUsage:
    """The same with at most so many steps: the last is the sum of the others."""
    if len(guest.steps) <= most:
        return guest
    named = [step for step in guest.steps if step.step != "other"]
    kept = named[: most - 1]
    rest = [step for step in guest.steps if step not in kept]
    other = StepUsage("other", total(step.figures for step in rest), sum(step.tasks or 0 for step in rest))
    return replace(guest, steps=(*kept, other))


def ask(channel: GuestChannel, index: int, timeout_s: float) -> GuestUsage:
    """The figures of one guest until now.

    Raises:
        ChannelRefusedError: ENOSYS: the image's agent does not know the operation.
        ChannelError: silence, a malformed answer, or the channel was closed.
    """
    answer = list(fields_of(channel.ask(Op.USAGE, b"", timeout_s)))
    rows = [dict(fields_of(value)) for tag, value in answer if tag == Tag.USAGE]
    if len(rows) > ROWS_MAX:
        raise ChannelError("the guest sent a malformed message", f"{len(rows)} rows of usage")
    memory_kib = number(dict(answer), Tag.MEMORY_KIB)
    whole = Figures()
    steps: dict[str, StepUsage] = {}
    for row in rows:
        figures = Figures(**{field.name: _figure(row, Tag[field.name.upper()]) for field in fields(Figures)})
        if Tag.STEP not in row:
            whole = figures
            continue
        if not _NAME.fullmatch(row[Tag.STEP]):
            raise ChannelError("the guest sent a malformed message", "the name of a step")
        name = row[Tag.STEP].decode("ascii")
        tasks = number(row, Tag.TASKS) if Tag.TASKS in row else None
        steps[name] = StepUsage(name, figures, None if tasks is None else min(tasks, _TASKS_MAX))
    return GuestUsage(
        index, whole, tuple(steps.values()), memory_kib if 0 < memory_kib < FIGURE_MAX else None
    )


def _figure(row: dict[int, bytes], tag: Tag) -> int | None:
    """A figure; None if it is absent or impossible."""
    value = number(row, tag) if tag in row else FIGURE_MAX
    return value if value < FIGURE_MAX else None
