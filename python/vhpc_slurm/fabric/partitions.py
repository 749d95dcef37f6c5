# SPDX-License-Identifier: Apache-2.0
"""OpenSM's partitions file: rendered whole from the key assignments, and a strict linter for it.  Pure.

OpenSM reads this file leniently and fails open: after any error, and for a file
that is empty or absent, all ports become full members of the default partition
and every other key is gone.  Some input that it accepts is worse: words match
by prefix (``A`` is ``ALL``, ``=ful`` is full), a key that occurs twice is one
partition, a key of more than 16 bits is cut, a line of more than 4095 bytes is
cut as well (opensm 3.3.23, osm_prtn_config.c, and seen on a fabric).  So the
linter knows one way to write each thing, and refuses every other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.fabric.numbers import DEFAULT_PKEY, FULL, PKEYS, KeyPool, port_guid

MAX_LINE = 4000
"""Bytes of a line; opensm reads 4095 at a time."""
MEMBERS_A_LINE = 64
MAX_DEFECTS = 1000
"""The linter stops after so many defects."""
MAX_STATEMENT = 1 << 18
"""The most lines of a statement; vhpcd writes shorter ones."""

_LONG = re.compile(rb"^[^\n]{%d,}+" % (MAX_LINE + 1), re.MULTILINE)
_UNPRINTABLE = re.compile(rb"[^\t\n\x20-\x7e]")
_LINE = re.compile(rb"^[ \t]*+[^\s#][^\n]*+", re.MULTILINE)
"""A line with a statement. Empty lines and comments are skipped in one match, however many there are."""
_EPOCH = re.compile(rb"^# vhpcd epoch ([0-9]{1,18}) tag ([0-9a-f]{0,32})$", re.MULTILINE)
_HEAD = re.compile(r"^(?P<name>[^=:,\s]*)=(?P<pkey>[^=:,\s]*)(?P<flags>[^:]*):(?P<rest>.*)$", re.ASCII)
_NAME = re.compile(r"^[A-Za-z][A-Za-z0-9_]{0,62}\Z", re.ASCII)
_PKEY = re.compile(r"^0x[0-9a-f]{4}\Z", re.ASCII)
_FLAG = re.compile(r"^(indx0|ipoib|defmember=(limited|full)|(rate|mtu|sl|scope)=[0-9]{1,3})\Z", re.ASCII)
_GUID = re.compile(r"^0x[0-9a-f]{16}\Z", re.ASCII)
_GROUPS = ("ALL", "ALL_CAS", "ALL_SWITCHES", "ALL_ROUTERS", "SELF")
_DEFAULT_MEMBERS = (("ALL", False), ("SELF", True))


@dataclass(frozen=True)
class IbPartition:
    """One statement of the file; ``members`` are words or GUIDs as written, each full or limited."""

    name: str
    pkey: int
    members: tuple[tuple[str, bool], ...]
    flags: tuple[str, ...] = ()


DEFAULT = IbPartition("Default", DEFAULT_PKEY, _DEFAULT_MEMBERS, ("ipoib",))


@dataclass(frozen=True)
class Defect:
    """Why a file must not be given to OpenSM; lines count from 1."""

    line: int
    reason: str


def of_snapshot(snapshot: KeySnapshot, *, ipoib: bool = True) -> tuple[IbPartition, ...]:
    """The default partition, and one for each key that the snapshot carries."""
    members: dict[int, list[tuple[str, bool]]] = {}
    for assignment in snapshot.carried():
        if not PKEYS.has(assignment.pkey):
            continue  # assigned under another backend, which the site used before
        members.setdefault(assignment.pkey, []).extend(
            (_guid(guid), True) for guid in assignment.port_guids()
        )
    return _with_default(members, ipoib=ipoib)


def common_entries(partitions: Iterable[IbPartition], guids: Iterable[int]) -> tuple[int, ...]:
    """The entries that the tables of all these ports have because of the partitions, besides the default."""
    wanted = {_guid(guid) for guid in guids}
    found = []
    for one in partitions:
        members = dict(one.members)
        if one.pkey == DEFAULT_PKEY or not wanted <= members.keys():
            continue
        memberships = {members[guid] for guid in wanted}
        if len(memberships) == 1:
            found.append(one.pkey | (FULL if memberships.pop() else 0))
    return tuple(found)


def of_pool(
    pool: KeyPool, *, ranks: int, rails: int, vfs: int, ipoib: bool = True
) -> tuple[IbPartition, ...]:
    """The default partition, and every key of the pool with all GUIDs that it can have."""
    places = [(rail, rank, vf) for rank in range(ranks) for rail in range(rails) for vf in range(vfs)]
    members = {pkey: [(_guid(port_guid(pkey, *place)), True) for place in places] for pkey in pool.numbers()}
    return _with_default(members, ipoib=ipoib)


def _with_default(members: dict[int, list[tuple[str, bool]]], *, ipoib: bool) -> tuple[IbPartition, ...]:
    flags = ("indx0", "ipoib") if ipoib else ("indx0",)
    return (
        DEFAULT,
        *(
            IbPartition(f"key_{pkey:04x}", pkey, tuple(ports), flags)
            for pkey, ports in sorted(members.items())
        ),
    )


def render(partitions: Iterable[IbPartition], epoch: int, tag: str = "") -> bytes:
    """The whole file, in the form that the linter accepts."""
    lines = [
        "# Written by vhpcd; changes to this file are lost.",
        f"# vhpcd epoch {epoch} tag {tag}",
    ]
    for one in partitions:
        lines.append(", ".join((f"{one.name}={one.pkey:#06x}", *one.flags)) + " :")
        words = [f"{member}={'full' if full else 'limited'}" for member, full in one.members]
        rows = [words[first : first + MEMBERS_A_LINE] for first in range(0, len(words), MEMBERS_A_LINE)]
        lines += ["    " + ", ".join(row) + "," for row in rows[:-1]]
        lines.append("    " + ", ".join(rows[-1]) + " ;")
    return ("\n".join(lines) + "\n").encode()


def origin(data: bytes) -> tuple[int, str] | None:
    """Epoch and tag of the snapshot that a file was rendered from; None when the file has none."""
    match = _EPOCH.search(data)
    return (int(match[1]), match[2].decode()) if match else None


def lint(data: bytes) -> tuple[Defect, ...]:
    """All defects of a file; empty when OpenSM reads it as it is written."""
    return tuple(_Reader(data).defects)


def parse(data: bytes, name: str = "the partitions file") -> tuple[IbPartition, ...]:
    """The partitions of a file.

    Raises:
        FabricError: the linter refuses it; the first reason is in the error.
    """
    reader = _Reader(data)
    if reader.defects:
        first = reader.defects[0]
        raise FabricError(
            f"{name} is refused, line {first.line}",
            first.reason,
            f"{len(reader.defects)} defects in all; see: vhpc fabric lint",
        )
    return tuple(reader.partitions)


def _guid(number: int) -> str:
    return f"{number:#018x}"


@dataclass
class _Statement:
    """Lines up to a ``;``, each with its number."""

    lines: list[tuple[int, str]] = field(default_factory=list)


class _TooManyError(Exception):
    """The limit of defects is reached."""


class _Reader:
    """Reads a file once; an invalid statement becomes a defect, and reading continues with the next one."""

    def __init__(self, data: bytes) -> None:
        self.partitions: list[IbPartition] = []
        self.defects: list[Defect] = []
        self._names: dict[str, int] = {}
        self._pkeys: dict[int, int] = {}
        self._full: dict[str, int] = {}
        with suppress(_TooManyError):
            self._read(data)
        self.defects.sort(key=lambda defect: defect.line)

    def _read(self, data: bytes) -> None:
        last = data.count(b"\n") + 1
        if data and not data.endswith(b"\n"):
            self._refuse(last, "the last line has no newline: the file is incomplete")
        for statement in self._statements(data):
            self._statement(statement)
        if not self.partitions and not self.defects:
            self._refuse(last, "there is no partition: OpenSM would let every port talk to every other")
        elif not self.defects and self.partitions[0].name != "Default":
            self._refuse(1, "the first partition must be Default")

    def _refuse(self, line: int, reason: str) -> None:
        self.defects.append(Defect(line, reason))
        if len(self.defects) >= MAX_DEFECTS:
            raise _TooManyError

    def _statements(self, data: bytes) -> Iterator[_Statement]:
        refused = self._odd_lines(data)
        statement = _Statement()
        number, end = 1, 0
        for match in _LINE.finditer(data):
            comment = data.find(b"#", end, match.start()) if statement.lines else -1
            if comment >= 0:
                statement.lines.append((number + data.count(b"\n", end, comment), "#"))
            number += data.count(b"\n", end, match.start())
            end = match.end()
            if number in refused:
                continue
            statement.lines.append((number, match[0].decode("ascii").strip()))
            if b";" in match[0]:
                yield statement
                statement = _Statement()
            elif len(statement.lines) > MAX_STATEMENT:
                break
        if statement.lines:
            self._refuse(statement.lines[0][0], "the statement that begins here has no ';'")

    def _odd_lines(self, data: bytes) -> set[int]:
        """Lines that OpenSM would read differently from what is written; each is refused."""
        found: set[int] = set()
        for pattern, reason in (
            (_LONG, "{} bytes in one line: OpenSM cuts after 4095"),
            (_UNPRINTABLE, "a byte that is not a printable ASCII character"),
        ):
            number, end = 1, 0
            for match in pattern.finditer(data):
                number += data.count(b"\n", end, match.start())
                end = match.start()
                if number not in found:
                    found.add(number)
                    self._refuse(number, reason.format(len(match[0])))
        return found

    def _statement(self, statement: _Statement) -> None:
        number, text = statement.lines[-1]
        before, _, after = text.partition(";")
        if after:
            self._refuse(number, f"{after.strip()[:60]!r} after ';': one statement a line")
            return
        lines = [*statement.lines[:-1], (number, before.strip())]
        for number, text in lines:
            if "#" in text:
                self._refuse(number, "a comment within a statement")
                return
        first, head = lines[0]
        match = _HEAD.match(head)
        if match is None:
            self._refuse(first, f"{head[:60]!r} is not NAME=0xPKEY, FLAGS :")
            return
        before_members = len(self.defects)
        pkey = self._key(first, match["name"], match["pkey"])
        flags = self._flags(first, match["flags"])
        members = self._members([(first, match["rest"].strip()), *lines[1:]], default=pkey == DEFAULT_PKEY)
        if len(self.defects) == before_members:
            self.partitions.append(IbPartition(match["name"], pkey, tuple(members), tuple(flags)))

    def _key(self, line: int, name: str, text: str) -> int:
        if not _NAME.match(name):
            self._refuse(line, f"{name[:70]!r} is not a name: a letter, then letters, digits and '_'")
        elif name in self._names:
            self._refuse(line, f"{name} is also the name of the partition in line {self._names[name]}")
        elif name != "Default" and "default".startswith(name.lower()):
            self._refuse(line, f"{name} would be taken for Default")
        self._names.setdefault(name, line)
        if not _PKEY.match(text):
            self._refuse(line, f"{text[:20]!r} is not a key: 0x and four digits in lower case are expected")
            return 0
        pkey = int(text, 16)
        if pkey & 0x8000:
            self._refuse(line, f"{text} has the membership bit: OpenSM takes it for {pkey & 0x7FFF:#06x}")
        elif pkey == 0:
            self._refuse(line, "0x0000 is not a key: OpenSM would choose one")
        elif (pkey == DEFAULT_PKEY) != (name == "Default"):
            self._refuse(line, f"{name}={text}: the default partition is Default=0x7fff, and only it")
        elif pkey in self._pkeys:
            self._refuse(line, f"{text} is also the key of line {self._pkeys[pkey]}: OpenSM joins the two")
        self._pkeys.setdefault(pkey, line)
        return pkey

    def _flags(self, line: int, text: str) -> list[str]:
        if not text.strip():
            return []
        words = [word.strip() for word in text.split(",")]
        if words[0]:
            self._refuse(line, f"{words[0][:40]!r} between the key and the first ','")
        found = words[1:]
        for word in found:
            if not _FLAG.match(word):
                self._refuse(line, f"{word[:40]!r} is not a flag; OpenSM would ignore it or guess")
            elif "=" in word and not word.startswith("defmember") and "ipoib" not in found:
                self._refuse(line, f"{word} means nothing without ipoib")
        if len({word.partition("=")[0] for word in found}) != len(found):
            self._refuse(line, "a flag occurs twice")
        return found

    def _members(self, lines: list[tuple[int, str]], *, default: bool) -> list[tuple[str, bool]]:
        words = [
            (number, word.strip())
            for place, (number, text) in enumerate(lines)
            for word in self._words(number, text, last=place == len(lines) - 1)
        ]
        if not words:
            self._refuse(lines[0][0], "a partition without members")
        found: list[tuple[str, bool]] = []
        seen: set[str] = set()
        for number, word in words:
            member, _, share = word.partition("=")
            if share not in ("full", "limited"):
                self._refuse(
                    number,
                    f"{word[:60]!r} is not a member: it needs =full or =limited",
                )
            elif member in seen:
                self._refuse(number, f"{member} is a member twice: OpenSM takes the last")
            elif member in _GROUPS:
                if not default:
                    self._refuse(number, f"{member} adds ports that are not named")
            elif not _GUID.match(member):
                self._refuse(
                    number, f"{member[:60]!r} is not a port GUID: 0x and 16 digits in lower case are expected"
                )
            elif int(member, 16) in (0, (1 << 64) - 1):
                self._refuse(number, f"{member} is not the GUID of a port")
            elif share == "full" and member in self._full:
                self._refuse(number, f"{member} is a full member in line {self._full[member]} already")
            if share == "full" and member not in _GROUPS:
                self._full.setdefault(member, number)
            seen.add(member)
            found.append((member, share == "full"))
        if default and words and set(found) != set(_DEFAULT_MEMBERS):
            self._refuse(
                words[0][0],
                "Default must be ALL=limited, SELF=full: a full member of it can be reached by every guest",
            )
        return found

    def _words(self, number: int, text: str, *, last: bool) -> Iterator[str]:
        """Members in one line; a line before the last one ends with ``,`` or is empty."""
        if not text:
            return
        words = text.split(",")
        if not last:
            if words[-1].strip():
                self._refuse(number, "the line ends without ',' or ';'")
            else:
                words.pop()
        for word in words:
            if ":" in word:
                self._refuse(number, f"{word.strip()[:60]!r} begins a partition; the previous one has no ';'")
                return
            yield word
