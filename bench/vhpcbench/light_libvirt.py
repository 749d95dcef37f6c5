# SPDX-License-Identifier: Apache-2.0
"""The module `libvirt` on nodes of a light lab: libvirt's test driver, with a stand-in for each guest.

bench/cluster installs this file there under that name. It is libvirt's own module, except that a
connection to the test driver does with a domain what libvirt's QEMU driver does, as far as vhpc sees it:

- libvirt reads the domain's whole XML, as one of type `test`, the only type that this driver has;
- a socket listens at the path of the agent's channel when ``createXML`` returns;
- the guest's agent answers there. It is vhpc's own agent with --no-system, as in the unit tests of the
  guest channel (tests/unit/support/guest_rig.py): it runs the job's programs on the node itself.

There is no QEMU, so what a guest costs to boot and to run is missing. Domains of the test driver end with
the process that has made them, so this module keeps a file for each in REGISTRY; a domain runs while its
agent does, and can be ended as one of QEMU.

As with a guest, all processes of the job end with it: they are in a PID namespace, whose PID 1 is a shell
that waits for the agent; LABEL and the domain's name are in its command line. `uname -r` says 2.6 there, so
that a script sees whether it runs in a guest or on the node.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

AGENT = "/shared/light/vhpc-agent"
PORT_NAME = "org.vhpc.agent.0"
WAIT_S = 60
MOST_FILES = 4096
REGISTRY = Path("/run/vhpc-light")
LABEL = "light-guest="
# of sched.h, sys/mount.h and sys/personality.h
CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
MS_REC, MS_SLAVE, MNT_DETACH = 0x4000, 0x80000, 2
UNAME26 = 0x20000
_LIBC = ctypes.CDLL(None, use_errno=True)


def agent_socket(xml: str) -> str:
    """Path of the socket that QEMU would make for the agent's port."""
    for channel in ET.fromstring(xml).iterfind("devices/channel"):  # noqa: S314 - vhpc's own text
        target, source = channel.find("target"), channel.find("source")
        if target is not None and source is not None and target.get("name") == PORT_NAME:
            return source.attrib["path"]
    raise ValueError(f"the domain has no channel {PORT_NAME}")


def as_test_domain(xml: str) -> str:
    """The same domain for the test driver."""
    domain = ET.fromstring(xml)  # noqa: S314 - vhpc's own text
    domain.set("type", "test")
    return ET.tostring(domain, encoding="unicode")


def name_of(xml: str) -> str:
    """Name of the domain."""
    return ET.fromstring(xml).findtext("name", "")  # noqa: S314 - vhpc's own text


def start_agent(path: str, name: str) -> None:
    """Start the agent of a guest; it has its first connection at the socket ``path``, and no other."""
    REGISTRY.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        child = os.fork()
        if not child:
            try:
                os.setsid()
                _call("unshare", CLONE_NEWPID)
                guest = os.fork()  # its parent is then PID 1 of the node, as that of a QEMU is
                if not guest:
                    _become_guest(listener, path, name)
                REGISTRY.joinpath(name).write_text(f"{guest} {_started(guest)}", encoding="ascii")
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
    if status:
        raise OSError(f"the stand-in of {name} has not started")


def _call(name: str, *arguments: int | bytes | None) -> None:
    if getattr(_LIBC, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _become_guest(listener: socket.socket, path: str, name: str) -> None:
    # the locks and pipes of Prolog must not stay open while this process waits
    os.closerange(3, listener.fileno())
    os.closerange(listener.fileno() + 1, MOST_FILES)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    _call("unshare", CLONE_NEWNS)
    # what is mounted here is not seen outside, and mounts of the node are seen here
    _call("mount", None, b"/", None, MS_REC | MS_SLAVE, None)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    # agents name their control groups by their pids, which are the same in all guests of the node
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            _call("umount2", os.fsencode(place), MNT_DETACH)
    _call("personality", UNAME26)
    listener.settimeout(WAIT_S)
    host, _ = listener.accept()
    host.setblocking(True)
    host.set_inheritable(True)
    options = [f"--fd={host.fileno()}", f"--call-socket={path}.call", f"--topology-file={path}.topology"]
    # the agent would not read its options as PID 1
    shell = ["/bin/sh", "-c", '"$@"; exit $?', f"{LABEL}{name}", AGENT, "--no-system", *options]
    os.execve(shell[0], shell, {"PATH": "/usr/bin:/bin"})  # noqa: S606 - fixed paths


def _started(pid: int) -> str:
    """When a process has started, in ticks since boot: field 22 of proc(5)'s stat; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class Domain:
    """A domain that runs, by the PID 1 of its namespace."""

    def __init__(self, name: str, pid: int) -> None:
        self._name, self._pid = name, pid

    def name(self) -> str:
        """Its name."""
        return self._name

    def destroy(self) -> None:
        """End all processes of the guest."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def domains() -> list[Domain]:
    """All domains that run; the files of others are removed."""
    found = []
    for file in sorted(REGISTRY.glob("*")):
        try:
            pid, _, started = file.read_text(encoding="ascii").partition(" ")
        except FileNotFoundError:
            continue
        if started and _started(int(pid)) == started:
            found.append(Domain(file.name, int(pid)))
        elif started:
            file.unlink(missing_ok=True)
    return found


class Connection:
    """A connection to the test driver."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def createXML(self, xml: str, flags: int = 0) -> Any:  # noqa: N802 - libvirt's own name
        """Create a domain, and start what stands for its guest."""
        domain = self._real.createXML(as_test_domain(xml), flags)
        start_agent(agent_socket(xml), name_of(xml))
        return domain

    def listAllDomains(self, flags: int = 0) -> list[Domain]:  # noqa: N802, ARG002 - libvirt's own names
        """All domains that run."""
        return domains()

    def lookupByName(self, name: str) -> Any:  # noqa: N802 - libvirt's own name
        """The domain of that name; libvirt's own error if it does not run."""
        for domain in domains():
            if domain.name() == name:
                return domain
        return self._real.lookupByName(f"{name} has ended")


def _real_module() -> Any:
    """libvirt's own module, which Debian has in a folder behind the one of this file."""
    here = Path(__file__).resolve()
    for folder in sys.path:
        path = Path(folder, "libvirt.py")
        if folder and path.is_file() and path.resolve() != here:
            spec = importlib.util.spec_from_file_location("vhpc_bench_real_libvirt", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ImportError("python3-libvirt is not installed")


if __name__ == "libvirt":
    _REAL = _real_module()
    globals().update({name: value for name, value in vars(_REAL).items() if not name.startswith("__")})

    def open(name: str | None = None) -> Any:  # noqa: A001 - libvirt's own name
        """Connect as libvirt does; domains of the test driver get stand-ins for their guests."""
        connection = _REAL.open(name)
        return Connection(connection) if name is not None and name.startswith("test:") else connection
