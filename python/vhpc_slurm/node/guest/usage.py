# SPDX-License-Identifier: Apache-2.0
"""Usage of programs in the guests of a node, asked from their agents while the guests run.

The guest's root can make the agent answer anything, so all is bounded here. The node's daemons that serve
shared folders count the bytes that guests move to and from them.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import FIGURE_MAX, Figures, GuestUsage, SharedIo, StepUsage
from vhpc_slurm.model.usage import GpuUsage, shared_total, total
from vhpc_slurm.node.guest.channel import ROOT_SOCKET, ChannelError, ChannelRefusedError, GuestChannel
from vhpc_slurm.node.guest.wire import Op, Tag, fields_of, number
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.record import Record
from vhpc_slurm.terminal import printable

STEPS_MAX = 256
"""Rows of one guest; also in guest/agent/usage.h."""
ROWS_MAX = STEPS_MAX + 2
"""With those of the whole guest and of ssh."""
NODE_STEPS_MAX = 1024
"""Rows of all guests of a node: their report fits into one message to vhpcd."""
ASK_S = 2.0
"""For all guests of a node together: the teardown, or the health check, waits meanwhile."""
AT_ONCE = 16
"""Guests that are asked at a time, so that a silent one does not use up the time of the others."""
CONNECT_S = 0.1
"""To reach a shim, which answers at once; also what a guest gets when the time for all of them is over."""
_NAME = re.compile(rb"[a-z0-9+]{1,31}")
_TASKS_MAX = 2**31
GPUS_MAX = 64
"""GPUs of one guest, also in guest/lib/gpurecord.h; and of all guests of a node."""
_ADDRESS = re.compile(rb"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_WHY_MAX = 200


class AskedGuest(Record, frozen=True):
    """A guest of this node: its run folder, and its daemons of shared folders (None: not all are known)."""

    folder: Path
    daemons: tuple[ProcessRef, ...] | None = ()


def of_guests(asked: Sequence[AskedGuest], most_steps: int = NODE_STEPS_MAX) -> tuple[GuestUsage, ...]:
    """Ask these guests, many at a time; one that does not answer within ASK_S has the reason instead.

    ``most_steps`` is for all of them together.
    """
    if not asked:
        return ()
    until = time.monotonic() + ASK_S
    if len(asked) == 1:
        found = [_of_guest(asked[0], until)]
    else:
        with ThreadPoolExecutor(min(len(asked), AT_ONCE)) as pool:
            found = list(pool.map(lambda one: _of_guest(one, until), asked))
    gpus = max(1, GPUS_MAX // len(found))
    return tuple(
        replace(folded(guest, max(1, most_steps // len(found))), gpus=guest.gpus[:gpus]) for guest in found
    )


def _of_guest(asked: AskedGuest, until: float) -> GuestUsage:
    index = int(asked.folder.name.removeprefix("g"))
    try:
        with GuestChannel.connect(asked.folder / ROOT_SOCKET, CONNECT_S) as channel:
            channel.hello(max(CONNECT_S, until - time.monotonic()), wait_for_boot=False)
            found = ask(channel, index, max(CONNECT_S, until - time.monotonic()))
    except ChannelRefusedError as err:
        old = err.errno == errno.ENOSYS
        why = "the agent of the image is too old to measure: rebuild the image" if old else err.line()
        found = GuestUsage(index, missing=printable(why)[:_WHY_MAX])
    except ChannelError as err:
        found = GuestUsage(index, missing=printable(err.line())[:_WHY_MAX])
    except VhpcError:
        found = GuestUsage(index, missing="the guest had ended")
    return replace(found, shared=_shared(asked.daemons))


def _shared(daemons: Sequence[ProcessRef] | None) -> SharedIo | None:
    """The bytes that the daemons have read and written; None if one of them has ended or is not known.

    They serve one guest each, and read and write little else: some kilobytes when they start.
    """
    counts = [transferred(one) for one in daemons or ()]
    known = [one for one in counts if one is not None]
    if daemons is None or len(known) < len(counts):
        return None
    return shared_total(known)


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
    why = dict(answer).get(Tag.GPU_MISSING, b"").decode("utf-8", errors="replace")
    return GuestUsage(
        index,
        whole,
        tuple(steps.values()),
        memory_kib if 0 < memory_kib < FIGURE_MAX else None,
        gpus=_gpus([value for tag, value in answer if tag == Tag.GPU]),
        gpus_missing=printable(why)[:_WHY_MAX],
    )


def _gpus(rows: Sequence[bytes]) -> tuple[GpuUsage, ...]:
    if len(rows) > GPUS_MAX:
        raise ChannelError("the guest sent a malformed message", f"{len(rows)} GPUs")
    found = []
    for row in (dict(fields_of(value)) for value in rows):
        address = row.get(Tag.GPU_ADDRESS, b"")
        if not _ADDRESS.fullmatch(address):
            raise ChannelError("the guest sent a malformed message", "the address of a GPU")
        busy = _figure(row, Tag.BUSY_E4)
        found.append(
            GpuUsage(
                address.decode("ascii"),
                None if busy is None or busy > 10_000 else busy,
                _figure(row, Tag.MEMORY_BYTES),
                _figure(row, Tag.POWER_MW),
            )
        )
    return tuple(found)


def _figure(row: dict[int, bytes], tag: Tag) -> int | None:
    """A figure; None if it is absent or impossible."""
    value = number(row, tag) if tag in row else FIGURE_MAX
    return value if value < FIGURE_MAX else None


def transferred(ref: process.ProcessRef) -> tuple[int, int] | None:
    """Bytes that a process has read and written by system calls, from proc(5)'s io: rchar and wchar.

    None if it has ended, or the kernel does not count them.
    """
    try:
        lines = Path(f"/proc/{ref.pid}/io").read_text().splitlines()
        counts = dict(line.split(": ", 1) for line in lines)
        found = int(counts["rchar"]), int(counts["wchar"])
    except (OSError, ValueError, KeyError):
        return None
    return found if process.alive(ref) else None
