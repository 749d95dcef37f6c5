# SPDX-License-Identifier: Apache-2.0
"""A module ``libvirt`` with a few domains, which are suspended, saved, restored and ended."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from libvirt_ends import Restored, header, snapshot, state

from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.guest import libvirtd

RUNNING, PAUSED, NO_DOMAIN, INTERNAL, OTHER = 1, 3, 42, 1, 38
XML = (
    "<domain><devices><disk><target dev='vda'/></disk><disk><target dev='vdb'/></disk>"
    "<interface><target dev='tap0'/></interface></devices></domain>"
)


class LibvirtError(Exception):
    """As libvirt.libvirtError."""

    def __init__(self, text: str, code: int = OTHER) -> None:
        super().__init__(text)
        self.code = code

    def get_error_message(self) -> str:
        return str(self)

    def get_error_code(self) -> int:
        return self.code


@dataclass
class FakeDomain:
    """A domain; ``failing`` names the call that fails."""

    site: FakeLibvirt
    domain: str
    now: int = RUNNING
    failing: str = ""
    snapshots: list[str] = field(default_factory=list)
    data: bytes = state(300_000)

    def _do(self, call: str) -> None:
        self.site.note(f"{call} {self.domain}")
        if self.failing == call:
            raise LibvirtError(f"{call} fails")

    def name(self) -> str:
        return self.domain

    def state(self) -> list[int]:
        return [self.now, 0]

    def suspend(self) -> None:
        self._do("suspend")
        self.now = PAUSED

    def resume(self) -> None:
        self._do("resume")
        self.now = RUNNING

    def destroy(self) -> None:
        self._do("destroy")
        del self.site.domains[self.domain]

    def XMLDesc(self, _flags: int) -> str:  # noqa: N802 - libvirt's name
        return XML

    def snapshotCreateXML(self, xml: str, flags: int) -> None:  # noqa: N802 - libvirt's name
        assert flags == 16
        self._do("save")
        self.snapshots.append(xml)
        path = xml.partition('file="')[2].partition('"')[0]
        try:
            snapshot(path, self.data, header())
        except NodeError as err:
            raise LibvirtError(err.line()) from err


class FakeLibvirt(ModuleType):
    """The module and its one connection."""

    VIR_DOMAIN_PAUSED = PAUSED
    VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA = 16
    VIR_DOMAIN_SAVE_RUNNING = 2
    VIR_ERR_NO_DOMAIN = NO_DOMAIN
    VIR_ERR_INTERNAL_ERROR = INTERNAL
    libvirtError = LibvirtError  # noqa: N815 - libvirt's name

    def __init__(self) -> None:
        super().__init__("libvirt")
        self.domains: dict[str, FakeDomain] = {}
        self.restored: list[tuple[Restored, str]] = []
        self.refusal = ""
        self.calls: list[str] = []
        self._lock = threading.Lock()

    def add(self, name: str) -> FakeDomain:
        self.domains[name] = FakeDomain(self, name)
        return self.domains[name]

    def note(self, call: str) -> None:
        with self._lock:
            self.calls.append(call)

    def registerErrorHandler(self, *_: object) -> None:  # noqa: N802 - libvirt's name
        pass

    def open(self, _uri: str) -> FakeLibvirt:
        return self

    def close(self) -> None:
        pass

    def getLibVersion(self) -> int:  # noqa: N802 - libvirt's name
        return 11_003_000

    def getVersion(self) -> int:  # noqa: N802 - libvirt's name
        return 10_000_003

    def lookupByName(self, name: str) -> FakeDomain:  # noqa: N802 - libvirt's name
        if name not in self.domains:
            raise LibvirtError("no domain", NO_DOMAIN)
        return self.domains[name]

    def restoreFlags(self, path: str, xml: str, flags: int) -> None:  # noqa: N802 - libvirt's name
        assert flags == 2
        assert Path(path).is_fifo()
        if self.refusal:
            raise LibvirtError(self.refusal, INTERNAL)
        reader = Restored()
        reader.load(path)
        self.restored.append((reader, xml))


def installed(monkeypatch: pytest.MonkeyPatch) -> FakeLibvirt:
    """This libvirt is the node's."""
    made = FakeLibvirt()
    monkeypatch.setitem(__import__("sys").modules, "libvirt", made)
    assert libvirtd.PREFIX == "vhpc-"
    return made
