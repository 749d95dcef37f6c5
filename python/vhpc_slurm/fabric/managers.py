"""Several OpenSM that are told the same: those of several subnets, and those that stand by.

A standby that becomes master reads its own file, so each has the new one before
any is told to read it.  One that cannot be given the file stops the change: it
may be alive, and open the fabric with its old file one day.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from vhpc_slurm.errors import UNDECODABLE, FabricError
from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.opensm import COMPLAINTS, SWEPT, ComplaintError, Mark, Opensm, SubnetManager, sweep
from vhpc_slurm.fabric.smp import FabricReader, Scan

MAX_SAID = 1000
"""Lines of a log that a remote host hands over at once."""


class Managers:
    """All OpenSM that a change concerns; in ``subnets`` those of one subnet are together."""

    def __init__(self, subnets: Sequence[Sequence[SubnetManager]], timeout_s: float) -> None:
        self._subnets = subnets
        self._all = [manager for managers in subnets for manager in managers]
        self._timeout_s = timeout_s
        self.partitions: Path | str = self._all[0].partitions

    def check(self) -> None:
        """FabricError unless each subnet has one that runs, and all can be given a file."""
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

    def read(self) -> bytes | None:
        """The first one's file."""
        return self._all[0].read()

    def differing(self) -> list[str]:
        """Whose file is not the first one's."""
        first = self.read()
        return [
            f"{one.partitions} is not the same file as {self.partitions}"
            for one in self._all[1:]
            if one.read() != first
        ]

    def replace(self, data: bytes) -> None:
        """Give all of them the new file; the first one last, since it says what all were given."""
        for manager in reversed(self._all):
            manager.replace(data)

    def hang_up(self) -> None:
        """Signal all of them; those that stand by are not expected to do anything."""
        for manager in self._all:
            manager.hang_up()

    def sweep(self) -> None:
        """Have all read their files, and wait until each subnet is up."""
        sweep(self._subnets, self._timeout_s)

    def mark(self) -> tuple[Mark, ...]:
        """Where all logs end now."""
        return tuple(mark for manager in self._all for mark in manager.mark())

    def since(self, marks: tuple[Mark, ...]) -> tuple[bytes, ...]:
        """What each has logged."""
        pairs = zip(self._all, marks, strict=True)
        return tuple(said for manager, mark in pairs for said in manager.since((mark,)))


class SeveralReaders:
    """Reads several subnets as if they were one: no two ports have one GUID."""

    def __init__(self, readers: Sequence[FabricReader]) -> None:
        self._readers = readers

    def scan(self, timeout_s: float) -> Scan:
        """Read them one after the other; FabricError when one cannot be read."""
        scans = [reader.scan(timeout_s) for reader in self._readers]
        ports = tuple(port for scan in scans for port in scan.ports)
        switches = tuple(switch for scan in scans for switch in scan.switches)
        return Scan(ports, sum(scan.silent for scan in scans), switches)

    def close(self) -> None:
        """End all of them."""
        for reader in self._readers:
            reader.close()


# --- one on another host ---------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``vhpc fabric manager`` prints: one JSON object."""

    file: bytes | None = None
    mark: Mark | None = None
    said: bytes = b""
    error: tuple[str, str, str] | None = None
    complaint: bool = False


class RemoteOpensm:
    """An OpenSM on another host, through a command that runs ``vhpc fabric manager`` there.

    The command is started without a shell, with one of the words read, replace,
    hang-up, mark, since and check at its end.
    """

    def __init__(self, command: tuple[str, ...], timeout_s: float) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self.partitions: Path | str = f"the file behind `{' '.join(command)}`"

    def check(self) -> None:
        """Whether the host answers, and OpenSM runs there."""
        self._ask("check")

    def read(self) -> bytes | None:
        """Its file."""
        return self._ask("read").file

    def differing(self) -> list[str]:
        """Nothing: there is one file."""
        return []

    def replace(self, data: bytes) -> None:
        """Send a new file, which the host looks at before it takes it."""
        self._ask("replace", given=data)

    def hang_up(self) -> None:
        """SIGHUP."""
        self._ask("hang-up")

    def sweep(self) -> None:
        """Have the file read, and wait until the subnet is up."""
        sweep([(self,)], self._timeout_s)

    def mark(self) -> tuple[Mark, ...]:
        """Where its log ends now."""
        mark = self._ask("mark").mark
        if mark is None:
            raise self._nonsense("no mark")
        return (mark,)

    def since(self, marks: tuple[Mark, ...]) -> tuple[bytes, ...]:
        """Of its log what matters to vhpcd."""
        (mark,) = marks
        return (self._ask("since", str(mark.inode), str(mark.size)).said,)

    def _ask(self, *words: str, given: bytes = b"") -> Answer:
        try:
            done = subprocess.run(
                [*self._command, *words],
                input=given,
                capture_output=True,
                check=False,
                timeout=self._timeout_s,
                cwd="/",
            )
            answer = msgspec.json.decode(done.stdout, type=Answer)
        except (OSError, subprocess.TimeoutExpired) as err:
            raise FabricError(
                f"cannot reach {self.partitions}", str(err), "see fabric.subnets in vhpc.toml(5)"
            ) from err
        except UNDECODABLE as err:
            said = done.stderr.decode(errors="replace").strip()[-300:]
            raise self._nonsense(f"exit status {done.returncode}: {said or err}") from err
        if answer.error is not None:
            kind = ComplaintError if answer.complaint else FabricError
            raise kind(*answer.error)
        return answer

    def _nonsense(self, why: str) -> FabricError:
        return FabricError(
            f"cannot reach {self.partitions}", why, "does the command run `vhpc fabric manager` there?"
        )


def serve(opensm: Opensm, words: Sequence[str], given: bytes) -> Answer:
    """What ``vhpc fabric manager`` does: one thing with this host's OpenSM."""
    try:
        return _serve(opensm, words, given)
    except FabricError as err:
        return Answer(error=(err.what, err.why, err.cure), complaint=isinstance(err, ComplaintError))


def _serve(opensm: Opensm, words: Sequence[str], given: bytes) -> Answer:
    answer = Answer()
    match words:
        case ["read"]:
            answer = Answer(file=opensm.read())
        case ["replace"]:
            partitions.parse(given, "what was sent")
            opensm.replace(given)
        case ["hang-up"]:
            opensm.hang_up()
        case ["mark"]:
            answer = Answer(mark=opensm.mark()[0])
        case ["since", inode, size] if re.fullmatch(r"[0-9]{1,18} [0-9]{1,18}", f"{inode} {size}"):
            (said,) = opensm.since((Mark(int(inode), int(size)),))
            lines = (line for line in said.split(b"\n") if any(word in line for word in (SWEPT, *COMPLAINTS)))
            answer = Answer(said=b"\n".join(list(lines)[:MAX_SAID]))
        case ["check"]:
            opensm.check()
        case _:
            raise FabricError(
                f"{' '.join(words)[:80]!r} is nothing to do",
                cure="one of: read, replace, hang-up, mark, since INODE SIZE, check",
            )
    return answer


def words_of_ssh() -> list[str]:
    """The words that an SSH client asked for, where sshd was told to run one command only."""
    return os.environ.get("SSH_ORIGINAL_COMMAND", "").split()
