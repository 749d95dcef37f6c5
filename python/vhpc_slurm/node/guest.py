"""The only module that calls libvirt; it turns libvirt's errors into ours.

Domains are transient: libvirt forgets them when they end, so there is nothing
of theirs to clean but the process.  libvirt's calls have no deadline of their
own, so each runs in a thread that is given up when its time is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from vhpc_slurm.errors import NodeError, TeardownError

T = TypeVar("T")
PREFIX = "vhpc-"
WATCH_S = 0.25


class Hypervisor:
    """A connection to the node's libvirt.

    Args:
        uri: libvirt connection URI.
        timeout_s: deadline of every call but ``create``.

    Raises:
        NodeError: libvirt does not answer.
    """

    def __init__(self, uri: str, timeout_s: float) -> None:
        try:
            import libvirt
        except ImportError as err:
            raise NodeError(
                "libvirt's Python module is not installed", str(err), "apt install python3-libvirt"
            ) from err

        self._libvirt: Any = libvirt
        self._timeout_s = timeout_s
        libvirt.registerErrorHandler(lambda *_: None, None)
        self._conn = self._call("connect to libvirt", timeout_s, lambda: libvirt.open(uri))

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

    def create(self, xml: str, timeout_s: float, watch: Callable[[], None] = lambda: None) -> None:
        """Define and start a transient guest.

        Args:
            xml: the domain.
            timeout_s: deadline.
            watch: called while libvirt is at it; what it raises ends the wait.

        Raises:
            NodeError: libvirt or QEMU refuses, or does not answer in time.
        """
        self._call("start the guest", timeout_s, lambda: self._conn.createXML(xml, 0), watch)

    def names(self) -> list[str]:
        """Names of our running domains."""
        domains = self._call("list domains", self._timeout_s, lambda: self._conn.listAllDomains(0))
        return sorted(name for name in (d.name() for d in domains) if name.startswith(PREFIX))

    def running(self, name: str) -> bool:
        """Whether a domain of that name exists."""
        return self._find(name) is not None

    def vcpu_affinity(self, name: str) -> list[list[int]]:
        """OS CPUs that each vCPU thread may run on, as libvirt reads them back."""
        domain = self._find(name)
        if domain is None:
            raise NodeError(f"guest {name} is not running")
        maps = self._call("read vCPU affinity", self._timeout_s, lambda: domain.vcpus()[1])
        return [[cpu for cpu, on in enumerate(row) if on] for row in maps]

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
        result: list[T] = []
        failure: list[BaseException] = []

        def work() -> None:
            try:
                result.append(action())
            except BaseException as err:
                failure.append(err)

        thread = threading.Thread(target=work, name=what, daemon=True)
        thread.start()
        until = time.monotonic() + timeout_s
        while thread.is_alive() and (left := until - time.monotonic()) > 0:
            thread.join(left if watch is None else min(left, WATCH_S))
            if watch is not None:
                watch()
        if thread.is_alive():
            raise NodeError(
                f"cannot {what}", f"libvirt did not answer within {timeout_s:.0f} s", "restart libvirtd"
            )
        if failure:
            err = failure[0]
            if isinstance(err, self._libvirt.libvirtError):
                text = err.get_error_message() or str(err)
                raise NodeError(f"cannot {what}", text, "see libvirt's and QEMU's logs") from err
            raise err
        return result[0]


@contextmanager
def connect(uri: str, timeout_s: float) -> Iterator[Hypervisor]:
    """A connection for a while."""
    hypervisor = Hypervisor(uri, timeout_s)
    try:
        yield hypervisor
    finally:
        hypervisor.close()
