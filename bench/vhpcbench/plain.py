# SPDX-License-Identifier: Apache-2.0
"""The reference: plain QEMU with the kernel, initrd and root from which a job's guest boots.

It runs a shell script instead of the agent: an archive appended to the image's
initrd replaces the agent's file; everything else is from the image.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from vhpcbench.common import CHECKOUT, NODE, BenchError, Lab

sys.path.insert(0, str(CHECKOUT / "python"))
from vhpc_slurm.bootfiles.newc import Archive

ON_NODE = Path(__file__).with_name("on_node.py")


def _of(domain: ET.Element, path: str) -> ET.Element:
    found = domain.find(path)
    if found is None:
        raise BenchError(f"the guest's domain has no {path}")
    return found


@dataclass(frozen=True)
class GuestFacts:
    """Configuration of a job's guest, from libvirt while it runs; ``cpus``: CPUs on which QEMU may run."""

    machine: str
    accel: str
    cpu: str
    memory_mib: int
    vcpus: int
    cpus: str
    cmdline: str


def qemu(guest: GuestFacts) -> list[str]:
    """The beginning of a plain guest's command line: machine, CPUs and memory of the job's guest."""
    argv = ["qemu-system-x86_64", "-machine", f"{guest.machine},accel={guest.accel}", "-cpu", guest.cpu]
    argv += ["-smp", str(guest.vcpus), "-m", f"{guest.memory_mib}M"]
    return [*argv, "-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio"]


def on_node(lab: Lab, argv: list[str], *, cpus: str, marker: str, size: int = 0) -> dict[str, Any]:
    """Run a plain guest until ``marker`` is on its console, or ``size`` bytes came from its port.

    Raises:
        BenchError: the guest wrote neither.
    """
    order = {"argv": argv, "cpus": cpus, "marker": marker, "size": size}
    said = lab.run(NODE, "python3", "-I", "-c", ON_NODE.read_text(), json.dumps(order))
    result: dict[str, Any] = json.loads(said)
    if result["seconds"] is None:
        raise BenchError(f"the plain guest did not finish; its console: {result['console']}")
    return result


def facts(lab: Lab, image: str, node: str = NODE) -> GuestFacts:
    """Start a job and read the configuration of its guest."""
    job = lab.hold(f"--vhpc-image={image}", node=node)
    try:
        return running(lab, node)
    finally:
        lab.cancel(job)


def running(lab: Lab, node: str) -> GuestFacts:
    """Configuration of the guest that runs on a node."""
    xml = lab.run(node, "sh", "-c", "virsh dumpxml $(virsh -q list --name | head -1)")
    domain = ET.fromstring(xml)  # noqa: S314 - from libvirt
    tcg = domain.get("type") == "qemu"
    off = [f.get("name") for f in domain.iterfind("cpu/feature[@policy='disable']")]
    pins = {p.get("cpuset", "") for p in domain.iterfind("cputune/*[@cpuset]")}
    return GuestFacts(
        machine=_of(domain, "os/type").get("machine", ""),
        accel="tcg" if tcg else "kvm",
        cpu=",".join(["max" if tcg else "host", *(f"{name}=off" for name in off)]),
        memory_mib=int(_of(domain, "memory").text or 0) // 1024,
        vcpus=int(_of(domain, "vcpu").text or 0),
        cpus=",".join(sorted(pins)),
        cmdline=_of(domain, "os/cmdline").text or "",
    )


class Plain:
    """Plain guests on the node, each for one measurement.

    Args:
        lab: the lab.
        image: name of a published image that the node has already booted.
        guest: configuration of the guests.
        script: runs in them as PID 1.
    """

    def __init__(self, lab: Lab, image: str, guest: GuestFacts, script: str) -> None:
        self._lab, self._guest = lab, guest
        catalog = lab.paths["shared"] / "vhpc/catalog"
        digest = (catalog / "names" / image / "latest").read_text().split()[0].removeprefix("sha256:")
        self._manifest = json.loads((catalog / f"manifests/sha256/{digest}.json").read_text())
        archive = Archive()
        archive.file("vhpc-agent", script.encode(), 0o755)
        self._initrd = lab.paths["scratch"] / "bench-initrd"
        blob = catalog / "blobs/sha256" / self._manifest["initrd"]["sha256"]
        self._initrd.write_bytes(blob.read_bytes() + archive.to_bytes())

    def measure(self, *, pinned: bool, marker: str = "", size: int = 0) -> float:
        """Seconds from QEMU's start to ``marker`` on the console, or for ``size`` bytes from the port.

        Raises:
            BenchError: the guest wrote neither.
        """
        return float(self._run(pinned=pinned, marker=marker, size=size)["seconds"])

    def transfer(self, size: int) -> tuple[float, dict[str, float]]:
        """Seconds for ``size`` bytes from the port; CPU seconds of ``qemu`` (no vCPUs) and ``reader``."""
        result = self._run(pinned=True, marker="", size=size)
        return float(result["seconds"]), result["cpu"]

    def _run(self, *, pinned: bool, marker: str, size: int) -> dict[str, Any]:
        cpus = self._guest.cpus if pinned else ""
        return on_node(self._lab, self._argv(port=size > 0), cpus=cpus, marker=marker, size=size)

    def close(self) -> None:
        """Remove the guests' initrd."""
        self._initrd.unlink()

    def _argv(self, *, port: bool) -> list[str]:
        store = "/var/lib/vhpc/images/blobs/sha256"
        argv = qemu(self._guest)
        argv += ["-name", "bench,debug-threads=on"]
        argv += ["-kernel", f"{store}/{self._manifest['kernel']['sha256']}"]
        argv += ["-initrd", f"/scratch/{self._initrd.name}", "-append", self._guest.cmdline]
        root = f"file={store}/{self._manifest['root']['sha256']},if=none,id=root,format=raw,readonly=on"
        argv += ["-drive", root, "-device", "virtio-blk-pci,drive=root"]
        if port:
            argv += ["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=bench,name=bench"]
            argv += ["-chardev", "socket,id=bench,path=/run/vhpc-bench.sock,server=on,wait=on"]
        return argv
