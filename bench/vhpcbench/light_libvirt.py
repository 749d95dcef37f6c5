# SPDX-License-Identifier: Apache-2.0
"""The module `libvirt` on nodes of a light lab: libvirt's test driver, with a stand-in for each guest.

bench/cluster installs this file there under that name. It is libvirt's own module, except that a
connection to the test driver does with a domain what libvirt's QEMU driver does, as far as vhpc sees it:

- libvirt reads the domain's whole XML, as one of type `test`, the only type that this driver has;
- a socket listens at the path of the agent's channel when ``createXML`` returns;
- the guest's agent answers there. It is vhpc's own agent with --no-system, as in the unit tests of the
  guest channel (tests/unit/guest_rig.py): it runs the job's programs on the node itself.

There is no QEMU, so what a guest costs to boot and to run is missing. Domains of the test driver end with
the process that has made them: Epilog finds none, and the agent ends when it is told to power off.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

AGENT = "/shared/light/vhpc-agent"
PORT_NAME = "org.vhpc.agent.0"
WAIT_S = 60
MOST_FILES = 4096


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


def start_agent(path: str) -> None:
    """Start the agent of a guest; it has its first connection at the socket ``path``, and no other."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        child = os.fork()
        if not child:
            try:
                os.setsid()
                if not os.fork():  # the parent is then PID 1 of the node, as that of a QEMU is
                    _become_agent(listener, path)
            finally:
                os._exit(1)
        os.waitpid(child, 0)


def _become_agent(listener: socket.socket, path: str) -> None:
    # the locks and pipes of Prolog must not stay open while this process waits
    os.closerange(3, listener.fileno())
    os.closerange(listener.fileno() + 1, MOST_FILES)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    listener.settimeout(WAIT_S)
    host, _ = listener.accept()
    host.setblocking(True)
    host.set_inheritable(True)
    options = [f"--fd={host.fileno()}", f"--call-socket={path}.call", f"--topology-file={path}.topology"]
    os.execve(AGENT, [AGENT, "--no-system", *options], {"PATH": "/usr/bin:/bin"})  # noqa: S606 - a fixed path


class Connection:
    """A connection to the test driver."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def createXML(self, xml: str, flags: int = 0) -> Any:  # noqa: N802 - libvirt's own name
        """Create a domain, and start what stands for its guest."""
        domain = self._real.createXML(as_test_domain(xml), flags)
        start_agent(agent_socket(xml))
        return domain


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
