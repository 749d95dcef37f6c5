# SPDX-License-Identifier: Apache-2.0
"""The only module that calls libvirt; it turns libvirt's errors into ours.

Domains are transient: libvirt forgets them when they end, so there is nothing
of theirs to clean but the process.  libvirt's calls have no deadline of their
own, so each runs in a thread that is given up when its time is over.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from vhpc_slurm.architecture import Architecture
from vhpc_slurm.errors import NodeError, TeardownError
from vhpc_slurm.node.host import threads

T = TypeVar("T")
PREFIX = "vhpc-"
CONNECT_S = 30.0
"""Longest wait for a connection; a health check, which Slurm ends after a minute, must still report it."""
UNIX_SOCKETS = Path("/proc/net/unix")
SEPARATE = Path("/run/libvirt/virtqemud-sock")
"""Where libvirt has a daemon for each driver; its clients look there first (remote_sockets.c of libvirt)."""
REFUSALS = (
    "VIR_ERR_ARGUMENT_UNSUPPORTED",
    "VIR_ERR_CONFIG_UNSUPPORTED",
    "VIR_ERR_CPU_INCOMPATIBLE",
    "VIR_ERR_INTERNAL_ERROR",  # also what QEMU said when it ended at once
    "VIR_ERR_INVALID_ARG",
    "VIR_ERR_NO_SUPPORT",
    "VIR_ERR_OPERATION_FAILED",  # likewise
    "VIR_ERR_OPERATION_UNSUPPORTED",
    "VIR_ERR_OVERFLOW",
    "VIR_ERR_XML_DETAIL",
    "VIR_ERR_XML_ERROR",
    "VIR_ERR_XML_INVALID_SCHEMA",
)
"""Codes of virterror.h that may mean the domain; the others mean libvirt, the connection or a file."""


class DomainRefusedError(NodeError):
    """libvirt, or the QEMU that it started, did not take a domain; whether it takes others is not known."""


class SilentError(NodeError):
    """libvirt did not answer in time."""


class BusyError(NodeError):
    """libvirt does not answer, but may later: it has too many clients, or the node too much to do."""


class Hypervisor:
    """A connection to the node's libvirt.

    Args:
        uri: libvirt connection URI.
        timeout_s: deadline of every call but ``create``.

    Raises:
        BusyError: libvirt takes no connection in time.
        NodeError: libvirt does not run, or refuses the connection.
    """

    def __init__(self, uri: str, timeout_s: float) -> None:
        try:
            import libvirt
        except ImportError as err:
            raise NodeError(
                "libvirt's Python module is not installed", str(err), "install python3-libvirt"
            ) from err

        self._libvirt: Any = libvirt
        self._timeout_s = timeout_s
        libvirt.registerErrorHandler(lambda *_: None, None)
        try:
            self._conn = self._call(
                "connect to libvirt", min(timeout_s, CONNECT_S), lambda: libvirt.open(uri)
            )
        except SilentError as err:
            hint = f"close its sockets to users: vhpc setup node; then restart {daemon()}"
            raise BusyError(err.what, f"{err.why}; {_clients()}", hint) from err

    def close(self) -> None:
        """Drop the connection; domains live on."""
        try:
            self._call("close libvirt", self._timeout_s, self._conn.close)
        except NodeError:
            return  # a daemon that died meanwhile has closed it for us

    def version(self) -> tuple[int, int]:
        """(libvirt, QEMU) as major * 1,000,000 + minor * 1,000 + release."""
        lib = self._call("ask libvirt's version", self._timeout_s, self._conn.getLibVersion)
        return int(lib), int(self._call("ask QEMU's version", self._timeout_s, self._conn.getVersion))

    def capabilities(self) -> str:
        """libvirt's capabilities XML."""
        return str(self._call("ask libvirt's capabilities", self._timeout_s, self._conn.getCapabilities))

    def most_vcpus(self, kind: Literal["kvm", "qemu"], architecture: Architecture, emulator: str = "") -> int:
        """How many vCPUs the installed QEMU, and with KVM this kernel, give a guest at most.

        Source: https://libvirt.org/formatdomaincaps.html, ``vcpu``.

        Raises:
            NodeError: libvirt does not say.
        """

        def ask() -> str:
            machine = architecture.name, architecture.machine
            return str(self._conn.getDomainCapabilities(emulator or None, *machine, kind, 0))

        xml = self._call("ask libvirt how many vCPUs a guest may have", self._timeout_s, ask)
        try:
            (vcpu,) = ET.fromstring(xml).findall("vcpu")  # noqa: S314 - libvirt's own answer, to root
            return int(vcpu.attrib["max"])
        except (ET.ParseError, KeyError, ValueError) as err:
            raise NodeError(
                "libvirt's domain capabilities cannot be read", repr(err), "see: virsh domcapabilities"
            ) from err

    def check(self, xml: str) -> None:
        """See that libvirt would know how to start a domain; nothing is started.

        Raises:
            NodeError: as ``create``.
        """
        self._call("check a guest", self._timeout_s, lambda: self._conn.domainXMLToNative("qemu-argv", xml))

    def create(
        self, xml: str, timeout_s: float, watch: Callable[[], None] | None = None, *, paused: bool = False
    ) -> None:
        """Define and start a transient guest.

        Args:
            xml: the domain.
            timeout_s: deadline.
            watch: called while libvirt is at it; what it raises ends the wait.
            paused: the guest executes nothing, and ends with this connection.

        Raises:
            DomainRefusedError: libvirt or QEMU refuses this domain, or perhaps all.
            NodeError: something else keeps libvirt from starting it, or it does not answer in time.
        """
        lib = self._libvirt
        flags = lib.VIR_DOMAIN_START_PAUSED | lib.VIR_DOMAIN_START_AUTODESTROY if paused else 0
        self._call("start the guest", timeout_s, lambda: self._conn.createXML(xml, flags), watch)

    def names(self) -> list[str]:
        """Names of our running domains."""
        domains = self._call("list domains", self._timeout_s, lambda: self._conn.listAllDomains(0))
        return sorted(name for name in (d.name() for d in domains) if name.startswith(PREFIX))

    def running(self, name: str) -> bool:
        """Whether a domain of that name exists."""
        return self._find(name) is not None

    def destroy(self, name: str) -> None:
        """End a domain; one that does not exist is already what was asked for.

        Raises:
            TeardownError: libvirt cannot end it.
        """
        domain = self._find(name)
        if domain is None:
            return
        try:
            self._call("destroy the guest", self._timeout_s, domain.destroy)
        except NodeError as err:
            if self._find(name) is not None:
                raise TeardownError(
                    f"guest {name} cannot be ended", err.why, "look at QEMU's process"
                ) from err

    def suspend(self, name: str) -> None:
        """Stop the vCPUs of a domain; one that is stopped already stays so.

        Raises:
            NodeError: libvirt cannot do it, or the domain does not exist.
        """
        domain = self._existing(name)
        if not self._is_suspended(domain):
            self._call("suspend the guest", self._timeout_s, domain.suspend)

    def resume(self, name: str) -> None:
        """Let the vCPUs of a suspended domain continue; errors as suspend()."""
        domain = self._existing(name)
        if self._is_suspended(domain):
            self._call("resume the guest", self._timeout_s, domain.resume)

    def suspended(self, name: str) -> bool:
        """Whether a domain exists whose vCPUs are stopped."""
        domain = self._find(name)
        return domain is not None and self._is_suspended(domain)

    def save_memory(self, name: str, path: str, timeout_s: float) -> None:
        """Write the memory and the devices of a domain without its disks, in libvirt's format.

        A suspended domain stays suspended.

        Args:
            name: of the domain.
            path: file or FIFO that libvirt opens twice: for everything, and for the final header.
            timeout_s: deadline.

        Raises:
            NodeError: libvirt cannot do it, or the path's reader has closed it.
        """
        domain = self._existing(name)
        xml = str(self._call("ask for a guest's XML", self._timeout_s, lambda: domain.XMLDesc(0)))
        flags = self._libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
        wanted = _memory_snapshot(xml, path)
        self._call("save the guest", timeout_s, lambda: domain.snapshotCreateXML(wanted, flags))

    def restore(self, path: str, xml: str, timeout_s: float, watch: Callable[[], None] | None = None) -> None:
        """Start a guest that continues a saved one.

        Args:
            path: file or FIFO with what ``save_memory`` has written; libvirt opens it twice.
            xml: the domain; its name, its uuid and what a guest can see of it are as in the saved head.
            timeout_s: deadline.
            watch: as of ``create``.

        Raises:
            DomainRefusedError: libvirt or QEMU refuses this domain or this state, or perhaps all.
            NodeError: as ``create``.
        """
        flags = self._libvirt.VIR_DOMAIN_SAVE_RUNNING
        self._call("restore the guest", timeout_s, lambda: self._conn.restoreFlags(path, xml, flags), watch)

    def _existing(self, name: str) -> Any:
        domain = self._find(name)
        if domain is None:
            raise NodeError(f"libvirt has no guest {name}", "it has ended")
        return domain

    def _is_suspended(self, domain: Any) -> bool:
        state, _ = self._call("ask for a guest's state", self._timeout_s, domain.state)
        return bool(state == self._libvirt.VIR_DOMAIN_PAUSED)

    def _find(self, name: str) -> Any | None:
        def lookup() -> Any | None:
            try:
                return self._conn.lookupByName(name)
            except self._libvirt.libvirtError as err:
                if err.get_error_code() == self._libvirt.VIR_ERR_NO_DOMAIN:
                    return None
                raise

        return self._call(f"look up {name}", self._timeout_s, lookup)

    def _call(
        self, what: str, timeout_s: float, action: Callable[[], T], watch: Callable[[], None] | None = None
    ) -> T:
        try:
            return threads.within(timeout_s, what, action, watch)
        except threads.OverdueError:
            raise SilentError(
                f"cannot {what}", f"libvirt did not answer within {timeout_s:.0f} s", f"restart {daemon()}"
            ) from None
        except self._libvirt.libvirtError as err:
            text = err.get_error_message() or str(err)
            codes = {getattr(self._libvirt, name, None) for name in REFUSALS}
            kind = DomainRefusedError if err.get_error_code() in codes else NodeError
            raise kind(f"cannot {what}", text, "see libvirt's and QEMU's logs") from err


def _memory_snapshot(xml: str, path: str) -> str:
    """XML of a snapshot with a domain's memory and none of its disks.

    Source: https://libvirt.org/formatsnapshot.html; a disk that is not named would be saved as well.
    """
    snapshot = ET.Element("domainsnapshot")
    ET.SubElement(snapshot, "memory", snapshot="external", file=path)
    disks = ET.SubElement(snapshot, "disks")
    for target in ET.fromstring(xml).findall("devices/disk/target"):  # noqa: S314 - libvirt's own answer
        ET.SubElement(disks, "disk", name=target.attrib["dev"], snapshot="no")
    return ET.tostring(snapshot, encoding="unicode")


def daemon() -> str:
    """The daemon that starts guests on this host."""
    return "virtqemud" if SEPARATE.exists() else "libvirtd"


def _clients() -> str:
    """How many connections libvirt's sockets have, as far as the kernel tells."""
    try:
        lines = UNIX_SOCKETS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "its connections cannot be counted"
    # the end of libvirt has the path and is connected or waits to be: states 2 and 3 of the kernel
    paths = [words[7] for line in lines if len(words := line.split()) == 8 and words[5] in ("02", "03")]
    count = sum("/libvirt/" in path and "-sock" in path for path in paths)
    return f"its sockets have {count} connections"


@contextmanager
def connect(uri: str, timeout_s: float) -> Iterator[Hypervisor]:
    """A connection for a while."""
    hypervisor = Hypervisor(uri, timeout_s)
    try:
        yield hypervisor
    finally:
        hypervisor.close()
