# SPDX-License-Identifier: Apache-2.0
"""Several OpenSM with the same file: those of several subnets, and standbys.

A standby that becomes master reads its own file, so all files are replaced before any
OpenSM is signalled. A file that cannot be replaced stops the change: its OpenSM may be
alive, and may later open the fabric with the old file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.child import LineChild
from vhpc_slurm.fabric.fence import ALONE, FabricWriter
from vhpc_slurm.fabric.opensm import (
    COMPLAINTS,
    SWEPT,
    ComplaintError,
    Mark,
    Opensm,
    SubnetManager,
    repair,
    sweep,
)
from vhpc_slurm.fabric.plainfile import NotPlainError
from vhpc_slurm.fabric.smp import FabricReader, Port, Scan
from vhpc_slurm.undecodable import UNDECODABLE

MAX_SAID = 1000
"""The most lines of a log in one answer of a remote host."""


class Managers:
    """All OpenSM of a configuration, grouped by subnet."""

    def __init__(self, subnets: Sequence[Sequence[SubnetManager]], timeout_s: float) -> None:
        self._subnets = subnets
        self._all = [manager for managers in subnets for manager in managers]
        self._timeout_s = timeout_s
        self.partitions: Path | str = self._all[0].partitions

    def check(self) -> None:
        """FabricError unless each subnet has a running OpenSM, and all files can be read."""
        for managers in self._subnets:
            refused = []
            for manager in managers:
                manager.read()
                try:
                    manager.check()
                except FabricError as err:
                    refused.append(err)
            if len(refused) == len(managers):
                raise refused[0]

    def each(self) -> Sequence[SubnetManager]:
        """All of them."""
        return self._all

    def read(self) -> bytes | None:
        """The file of the first one that can be read; FabricError when none can."""
        refused: list[FabricError] = []
        for manager in self._all:
            try:
                return manager.read()
            except FabricError as err:
                refused.append(err)
        raise refused[0]

    def differing(self) -> list[str]:
        """The managers whose file differs from what ``read`` returns, or cannot be read."""
        first = self.read()
        found = []
        for manager in self._all:
            try:
                if manager.read() != first:
                    found.append(f"{manager.partitions} is not the same file as {self.partitions}")
            except FabricError as err:
                found.append(err.line())
        return found

    def repair(self, data: bytes) -> FabricError | None:
        """Replace the file wherever that is possible, and have it read there."""
        return repair(self._subnets, data, self._timeout_s)

    def replace(self, data: bytes) -> None:
        """Replace all files; the first one last, since ``read`` returns it."""
        for manager in reversed(self._all):
            manager.replace(data)

    def hang_up(self) -> None:
        """Signal all of them; standbys need not react."""
        for manager in self._all:
            manager.hang_up()

    def keep(self) -> None:
        """Make all files durable."""
        for manager in self._all:
            manager.keep()

    def sweep(self) -> None:
        """Have all read their files, and wait until each subnet is up."""
        sweep(self._subnets, self._timeout_s)

    def mark(self) -> tuple[Mark, ...]:
        """The current ends of all logs."""
        return tuple(mark for manager in self._all for mark in manager.mark())

    def since(self, marks: tuple[Mark, ...]) -> tuple[bytes, ...]:
        """The log of each since its mark."""
        pairs = zip(self._all, marks, strict=True)
        return tuple(said for manager, mark in pairs for said in manager.since((mark,)))


class SeveralReaders:
    """Reads several subnets as one: no two ports have the same GUID."""

    def __init__(self, readers: Sequence[FabricReader]) -> None:
        self._readers = readers

    def look_ahead(self) -> None:
        """Begin to find the ports of all subnets."""
        for reader in self._readers:
            reader.look_ahead()

    def scan(self, timeout_s: float) -> Scan:
        """Read them one after the other; FabricError when none can be read."""
        scans: list[Scan] = []
        refused: list[FabricError] = []
        for reader in self._readers:
            try:
                scans.append(reader.scan(timeout_s))
            except FabricError as err:
                refused.append(err)
        if not scans:
            raise refused[0]
        return Scan(
            tuple(port for scan in scans for port in scan.ports),
            sum(scan.silent for scan in scans),
            tuple(switch for scan in scans for switch in scan.switches),
            tuple(route for scan in scans for route in scan.silent_at),
            tuple(err.line() for err in refused),
        )

    def ports(self, guids: Collection[int], timeout_s: float) -> tuple[Port, ...]:
        """Read the tables of some ports; FabricError when a subnet cannot be read."""
        return tuple(port for reader in self._readers for port in reader.ports(guids, timeout_s))

    def close(self) -> None:
        """End all of them."""
        for reader in self._readers:
            reader.close()


# --- one on another host ---------------------------------------------------------------


class ManagerRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request to ``vhpc fabric manager``; ``replace`` has a file, ``since`` a mark.

    ``epoch`` is that of the vhpcd, where there are several.
    """

    do: Literal["check", "read", "replace", "hang-up", "mark", "since"]
    file: bytes | None = None
    mark: Mark | None = None
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0


class ManagerAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer of ``vhpc fabric manager``."""

    file: bytes | None = None
    mark: Mark | None = None
    said: bytes = b""
    error: tuple[str, str, str] | None = None
    complaint: bool = False
    plain: bool = True
    """False: the path is not a regular file, but for example a folder."""


class RemoteOpensm:
    """An OpenSM on another host, through a command that runs ``vhpc fabric manager`` there.

    The command is started without a shell and kept; requests go to its stdin,
    one line of JSON each.
    """

    def __init__(self, command: tuple[str, ...], timeout_s: float, writer: FabricWriter = ALONE) -> None:
        self._writer = writer
        self._child = LineChild(command)
        self._timeout_s = timeout_s
        self._command = " ".join(command)
        self.partitions: Path | str = f"the file behind `{self._command}`"

    def check(self) -> None:
        """FabricError unless the host answers, and OpenSM runs there."""
        self._ask(ManagerRequest("check"))

    def read(self) -> bytes | None:
        """Its file."""
        return self._ask(ManagerRequest("read")).file

    def each(self) -> Sequence[SubnetManager]:
        """This one."""
        return (self,)

    def differing(self) -> list[str]:
        """Empty: there is one file."""
        return []

    def repair(self, data: bytes) -> FabricError | None:
        """Send the file and have it read; returns None, or raises FabricError."""
        return repair([(self,)], data, self._timeout_s)

    def replace(self, data: bytes) -> None:
        """Send a new file; the host checks it with the linter first."""
        self._writer.check()
        self._ask(ManagerRequest("replace", file=data, epoch=self._writer.epoch))

    def hang_up(self) -> None:
        """SIGHUP."""
        self._ask(ManagerRequest("hang-up"))

    def keep(self) -> None:
        """Nothing: the host makes the file durable before it answers ``replace``."""

    def sweep(self) -> None:
        """Have the file read, and wait until the subnet is up."""
        sweep([(self,)], self._timeout_s)

    def mark(self) -> tuple[Mark, ...]:
        """The current end of its log."""
        mark = self._ask(ManagerRequest("mark")).mark
        if mark is None:
            raise self._lost("its answer has no position in the log")
        return (mark,)

    def since(self, marks: tuple[Mark, ...]) -> tuple[bytes, ...]:
        """The lines of its log about sweeps and errors."""
        (mark,) = marks
        return (self._ask(ManagerRequest("since", mark=mark)).said,)

    def close(self) -> None:
        """End the command."""
        self._child.close()

    def _ask(self, request: ManagerRequest) -> ManagerAnswer:
        try:
            answer = msgspec.json.decode(
                self._child.ask(msgspec.json.encode(request), self._timeout_s), type=ManagerAnswer
            )
        except (OSError, EOFError, *UNDECODABLE) as err:
            self.close()
            raise self._lost(str(err)) from err
        if answer.error is not None:
            if not answer.plain:
                raise NotPlainError(*answer.error)
            kind = ComplaintError if answer.complaint else FabricError
            raise kind(*answer.error)
        return answer

    def _lost(self, why: str) -> FabricError:
        return FabricError(
            f"cannot reach the file behind `{self._command}`",
            why,
            "check that the command runs `vhpc fabric manager` there",
        )


def serve(opensm: Opensm, line: bytes) -> ManagerAnswer:
    """Answer one line: do one thing with this host's OpenSM."""
    try:
        return _serve(opensm, msgspec.json.decode(line, type=ManagerRequest))
    except UNDECODABLE as err:
        return ManagerAnswer(error=("the request cannot be read", str(err), "see vhpc(1)"))
    except FabricError as err:
        return ManagerAnswer(
            error=(err.what, err.why, err.hint),
            complaint=isinstance(err, ComplaintError),
            plain=not isinstance(err, NotPlainError),
        )


def _serve(opensm: Opensm, request: ManagerRequest) -> ManagerAnswer:
    answer = ManagerAnswer()
    match request:
        case ManagerRequest("read"):
            answer = ManagerAnswer(file=opensm.read())
        case ManagerRequest("replace", file=bytes(data)):
            partitions.parse(data, "the file in the request")
            opensm.writer = FabricWriter(request.epoch)
            opensm.replace(data)
            opensm.keep()
        case ManagerRequest("hang-up"):
            opensm.hang_up()
        case ManagerRequest("mark"):
            answer = ManagerAnswer(mark=opensm.mark()[0])
        case ManagerRequest("since", mark=Mark() as mark):
            (said,) = opensm.since((mark,))
            lines = (line for line in said.split(b"\n") if any(word in line for word in (SWEPT, *COMPLAINTS)))
            answer = ManagerAnswer(said=b"\n".join(list(lines)[:MAX_SAID]))
        case ManagerRequest("check"):
            opensm.check()
        case _:
            raise FabricError(f"cannot {request.do}", "the request lacks its file or mark")
    return answer
