# SPDX-License-Identifier: Apache-2.0
"""QEMU as RHEL builds it: a program in front of the installed QEMU, which refuses all that RHEL's has not.

    rhel_qemu.py [QEMU'S OPTIONS]

Installed as /usr/libexec/qemu-kvm.  tests/data/rhel says where the facts are from.  libvirt asks QEMU what it
has before it starts a guest; this program edits the answers as well.  Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

REAL = os.environ.get("RHEL_QEMU_REAL", "/usr/libexec/qemu-of-debian")
DEVICES = Path(os.environ.get("RHEL_QEMU_DEVICES", "/usr/libexec/qemu-kvm-devices"))
MACHINE = "pc-q35-rhel9.6.0"
MACHINES = {"none", "q35", MACHINE, "pc-q35-rhel9.4.0", "pc-q35-rhel9.2.0"}
OBJECTS = {
    *("iothread", "memory-backend-file", "memory-backend-memfd", "memory-backend-ram", "rng-builtin"),
    *("rng-random", "secret", "thread-context", "throttle-group", "tls-creds-x509"),
}
# built without slirp
NETDEVS = {"tap", "vhost-user", "vhost-vdpa", "stream", "dgram", "socket", "hubport"}
DRIVERS = {
    *("qcow2", "raw", "file", "host_device", "nbd", "rbd", "luks", "null-co", "nvme", "copy-on-read"),
    *("throttle", "compress", "io_uring", "vdi", "vmdk", "vhdx", "vpc", "https"),
}
# devices of other builds that libvirt looks for
ABSENT = {
    *("virtio-9p-pci", "pvpanic-pci", "nvme", "qxl", "qxl-vga", "cirrus-vga", "vmware-svga", "vmxnet3"),
    *(
        "virtio-pmem-pci",
        "virtio-crypto-pci",
        "sga",
        "isa-parallel",
        "megasas",
        "lsi53c895a",
        "ivshmem-plain",
    ),
    *("usb-bot", "ich9-usb-uhci6", "tpm-spapr", "virtio-sound-pci", "amd-iommu"),
}


def name_of(value: str, *keys: str) -> str:
    """The type that an option's value names, in JSON or in QEMU's older form."""
    if value.startswith("{"):
        found = json.loads(value)
        return str(next(found[key] for key in keys if key in found))
    first = value.partition(",")[0]
    return first.partition("=")[2] if first.partition("=")[0] in keys else first


def refusal(words: list[str], devices: set[str]) -> str:
    """Why RHEL's QEMU would refuse a command line; empty if it accepts it."""
    known = {
        "-device": (devices, ("driver",)),
        "-object": (OBJECTS, ("qom-type",)),
        "-netdev": (NETDEVS, ("type",)),
        "-blockdev": (DRIVERS, ("driver",)),
        "-machine": (MACHINES, ("type",)),
    }
    for option, value in pairwise(words):
        if option in known:
            names, keys = known[option]
            if (name := name_of(value, *keys)) not in names:
                return f"{option} {value}: '{name}' is not in this build of QEMU"
    return ""


def translated(words: list[str]) -> list[str]:
    """The command line for the installed QEMU, which has other names of machines."""
    found = list(words)
    for index, option in enumerate(found[:-1]):
        if option == "-machine" and not found[index + 1].startswith("none"):
            _, comma, rest = found[index + 1].partition(",")
            found[index + 1] = f"q35{comma}{rest}"
    return found


def edited(answer: Any) -> Any:
    """An answer of QMP without what RHEL's QEMU has not; query-machines and qom-list-types."""
    listed = answer.get("return") if isinstance(answer, dict) else None
    if not isinstance(listed, list) or not all(isinstance(one, dict) and "name" in one for one in listed):
        return answer
    if any("cpu-max" in one for one in listed):
        listed = [
            {**one, "name": MACHINE, "alias": "q35"} if one.get("alias") == "q35" else one
            for one in listed
            if one.get("alias") == "q35" or one["name"] == "none"
        ]
    else:
        listed = [one for one in listed if one["name"] not in ABSENT]
    return {**answer, "return": listed}


def serve(listener: socket.socket, monitor: str) -> None:
    """Pass one conversation of QMP on, with edited answers, until either end closes it."""
    ours, _ = listener.accept()
    theirs = socket.socket(socket.AF_UNIX)
    theirs.connect(monitor)

    def ask() -> None:
        while data := ours.recv(65536):
            theirs.sendall(data)
        theirs.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=ask, daemon=True).start()
    with theirs.makefile("rb") as lines:
        for line in lines:
            ours.sendall(json.dumps(edited(json.loads(line))).encode() + b"\r\n")


def probe(words: list[str]) -> int:
    """Start QEMU for libvirt's questions, and a process that edits the answers."""
    index = words.index("-qmp") + 1
    path, _, rest = words[index].removeprefix("unix:").partition(",")
    monitor = f"{path}.real"
    words[index] = f"unix:{monitor},{rest}"
    done = subprocess.run([REAL, *words], check=False)
    if done.returncode != 0:
        return done.returncode
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    if os.fork() == 0:
        os.setsid()
        for fd in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        serve(listener, monitor)
        os._exit(0)
    return 0


def main(words: list[str]) -> int:
    why = refusal(words, set(DEVICES.read_text(encoding="utf-8").split()))
    if why:
        print(f"qemu-kvm: {why}", file=sys.stderr)
        return 1
    words = translated(words)
    if "-qmp" in words and "-daemonize" in words:
        return probe(words)
    os.execv(REAL, ["qemu-kvm", *words])
    raise AssertionError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
