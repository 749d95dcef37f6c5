# SPDX-License-Identifier: Apache-2.0
"""The installed libvirt turns every golden domain into a QEMU command line.

Lab hosts have no ``/dev/kvm``, and libvirt refuses KVM domains where QEMU's
probe finds none.  KVM domains are therefore shown to a libvirtd of their own,
in namespaces of its own, that is given the machine's device; what the device
can do does not matter, nothing is started.  Every user may open the device: a
libvirt that may open it as root and not as QEMU's user asks QEMU for its
capabilities again at every call, which takes 15 s.

Domains of aarch64 are shown to the same libvirt as emulated ones: all else in them stays. A libvirt of an x86
host has no KVM for them, and so no host's CPU.

A domain of more vCPUs than the installed QEMU can have (288 before 8.1) is
refused here, and by ``vhpc`` before.
"""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lab

GOLDEN = Path(__file__).parent.parent / "data" / "domain"
FILES = sorted(GOLDEN.glob("*.xml"))
NO_KVM = 77
ARM = 'arch="aarch64"'

# Domains on stdin, each after a line "@@ NAME"; command lines, or errors, on stdout in the same form.
CONVERT = """
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
awk '/^@@ /{f=$2 ".xml"; next} {print >f}'
for f in *.xml; do
    printf '\\n@@ %s\\n' "${f%.xml}"
    virsh -q -c qemu:///system domxml-to-native qemu-argv --xml "$f" 2>&1
done
printf '\\n@@ %s\\n' version; virsh --version
printf '\\n@@ %s\\n' most
virsh -q -c qemu:///system domcapabilities --machine q35 | sed -n "s/.*<vcpu max=.\\([0-9]*\\).*/\\1/p"
"""
# A private /dev with a kvm node, private folders of libvirt, a daemon of its own that ends with the shell.
WITH_KVM = f"""
exec unshare --mount --net --pid --fork --mount-proc sh -eu -c '
    mkdir -p /run/libvirt && mount -t tmpfs none /run/libvirt && mkdir /run/libvirt/dev
    mount -t tmpfs none /run/libvirt/dev
    cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /run/libvirt/dev/
    mknod -m 666 /run/libvirt/dev/kvm c 10 232
    # libvirt makes a tap even for a command line that it only prints
    mkdir /run/libvirt/dev/net && mknod -m 666 /run/libvirt/dev/net/tun c 10 200
    # libvirt 12 looks for VFIO and an IOMMU before it says how it would pass a device through
    mkdir /run/libvirt/dev/vfio && mknod -m 666 /run/libvirt/dev/vfio/vfio c 10 196
    mount -t tmpfs none /sys/kernel && mkdir -p /sys/kernel/iommu_groups/1
    mount --move /run/libvirt/dev /dev
    (: <>/dev/kvm) 2>/dev/null || exit {NO_KVM}
    for folder in /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do mount -t tmpfs none "$folder"; done
    libvirtd --daemon --pid-file /run/libvirt/own.pid
    for _ in $(seq 300); do virsh -q -c qemu:///system uri >/dev/null 2>&1 && break; sleep 0.1; done
    exec sh -c "$0"
' {shlex.quote(CONVERT)}
"""


def on_this_machine(xml: str) -> str:
    """The domain with host CPUs and NUMA cells that exist here; libvirt refuses others even in a dry run."""
    if ARM in xml:
        xml = xml.replace('<domain type="kvm">', '<domain type="qemu">')
        xml = xml.replace('mode="host-passthrough"', 'mode="maximum"')
    return re.sub(r'(nodeset|cpuset)="[0-9,-]+"', r'\1="0"', xml)


def convert(lab: Any, script: str, files: list[Path]) -> dict[str, str]:
    """libvirt's output for each domain, by name; "skip" for all if there is no device."""
    stdin = "".join(f"@@ {path.stem}\n{on_this_machine(path.read_text())}" for path in files)
    done = lab.run("n1", "sh", "-c", script, stdin=stdin, check=False)
    if done.code == NO_KVM:
        return dict.fromkeys((path.stem for path in files), "skip")
    parts = re.split(r"^@@ (.*)\n", done.out, flags=re.MULTILINE)[1:]
    assert parts, f"{done.code}: {done.err}"
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.fixture(scope="module")
def native(lab: Any) -> dict[str, dict[str, str]]:
    """libvirt's output, by the domains' type and name; ``version`` and ``most`` (vCPUs) are there too."""
    kvm = [path for path in FILES if 'type="kvm"' in (text := path.read_text()) and ARM not in text]
    tcg = [path for path in FILES if path not in kvm]
    return {"kvm": convert(lab, WITH_KVM, kvm), "qemu": convert(lab, CONVERT, tcg)}


def values(words: list[str], option: str) -> list[str]:
    return [value for word, value in pairwise(words) if word == option]


def interrupts(domain: ET.Element, words: list[str], made: list[dict[str, Any]], version: str) -> None:
    """QEMU's I/O APIC and IOMMU are those of the domain."""
    apic = domain.find("features/ioapic")
    (machine,) = values(words, "-machine")
    irqchip = {"qemu": "split", "kvm": "on"}.get(apic.attrib["driver"] if apic is not None else "")
    assert re.findall(r"kernel_irqchip=(\w+)", machine) == [irqchip] * (irqchip is not None)
    iommus = [device for device in made if device["driver"] == "intel-iommu"]
    assert len(iommus) == len(domain.findall("devices/iommu"))
    for device, driver in zip(iommus, domain.iterfind("devices/iommu/driver"), strict=True):
        assert (device["intremap"], device["eim"]) == ("on", "on")
        assert device.get("caching-mode", False) == (driver.get("caching_mode") == "on")
        # libvirt 9.0 knows no dma_translation, and ignores it
        if not version.startswith("9."):
            assert device.get("dma-translation", True) == (driver.get("dma_translation") != "off")


@pytest.mark.promise("place.many-vcpus")
@pytest.mark.parametrize("hypervisor", ["kvm", "qemu"])
def test_libvirt_converts_golden_domains_with_their_settings(
    native: dict[str, dict[str, str]], hypervisor: str
) -> None:
    """One test for many files: what every test of the lab does at its end takes seconds."""
    of_type = native[hypervisor]
    files = [path for path in FILES if path.stem in of_type]
    assert files
    if "version" not in of_type:
        pytest.skip("this machine has no /dev/kvm to show to libvirt")
    for path in files:
        if ARM in path.read_text():
            compare_arm(path, of_type)
        else:
            compare(path, of_type)


def compare(path: Path, of_type: dict[str, str]) -> None:
    """See that a command line, or a refusal, is what a golden file calls for."""
    domain = ET.parse(path).getroot()
    said = of_type[path.stem]
    most = int(of_type["most"])
    if int(domain.findtext("vcpu", "")) > most:
        assert "-accel" not in said
        assert str(most) in said, said
        return
    assert "-accel" in said, said
    words = shlex.split(said)
    kvm = domain.get("type") == "kvm"
    assert values(words, "-accel") == ["kvm" if kvm else "tcg"]

    (cpu,) = values(words, "-cpu")
    wanted = {"svm=off", "vmx=off"}
    if kvm:
        # QEMU saves a guest only if it is migratable and has no invariant TSC
        saveable = path.stem == "kvm-saveable"
        wanted.add(f"migratable={'on' if saveable else 'off'}")
        assert ("invtsc=on" in cpu.split(",")) != saveable, cpu
        wanted |= {"host", "host-phys-bits=on", "host-cache-info=on"}
        wanted |= {"kvm-hint-dedicated=on", "kvm-poll-control=on"}
    else:
        wanted |= {"erms=off", "fsrm=off"}
    assert wanted <= set(cpu.split(",")), cpu
    amd = domain.find("cpu/feature[@name='topoext']") is not None
    assert ("topoext=on" in cpu.split(",")) == amd

    (smp,) = values(words, "-smp")
    topology = domain.find("cpu/topology")
    assert topology is not None
    assert {f"{key}={count}" for key, count in topology.attrib.items()} <= set(smp.split(","))

    common(domain, words)
    interrupts(domain, words, objects(words), of_type["version"])


def compare_arm(path: Path, of_type: dict[str, str]) -> None:
    """See that QEMU gets the machine of docs/system/arm/virt.rst as the golden file has it."""
    domain = ET.parse(path).getroot()
    said = of_type[path.stem]
    assert "-accel tcg" in said, said
    words = shlex.split(said)
    assert "qemu-system-aarch64" in " ".join(words[:12])
    (machine,) = values(words, "-machine")
    parts = machine.split(",")
    assert parts[0].startswith("virt-")
    uefi = domain.find("os/loader") is not None
    assert {"gic-version=3", f"acpi={'on' if uefi else 'off'}"} <= set(parts)
    assert ("pflash0=libvirt-pflash0-format" in parts) == uefi
    assert "pflash1" not in machine  # no file for the variables of UEFI
    assert values(words, "-cpu")[0].split(",")[0] == "max"
    topology = domain.find("cpu/topology")
    assert topology is not None
    (smp,) = values(words, "-smp")
    assert {f"{key}={count}" for key, count in topology.attrib.items()} <= set(smp.split(","))
    made = objects(words)
    assert [device["addr"] for device in made if device["driver"] == "pvpanic-pci"] == ["0x1e"]
    assert not [device for device in made if "iommu" in device["driver"]]
    assert values(words, "-serial") == ["chardev:charserial0"]
    common(domain, words)


def objects(words: list[str]) -> list[dict[str, Any]]:
    return [json.loads(value) for value in values(words, "-device") if value.startswith("{")]


def common(domain: ET.Element, words: list[str]) -> None:
    """Check the devices that guests of all architectures have."""
    backends = [value for value in values(words, "-object") if "memory-backend-memfd" in value]
    assert len(backends) == len(domain.findall("cpu/numa/cell"))
    huge = domain.find("memoryBacking/hugepages") is not None
    assert all('"share":true' in backend for backend in backends)
    assert all(('"hugetlb":true' in backend) == huge for backend in backends)

    made = objects(words)
    expanders = [device["bus_nr"] for device in made if device["driver"] == "pxb-pcie"]
    assert expanders == [
        int(target.attrib["busNr"]) for target in domain.iterfind("devices/controller/target[@busNr]")
    ]
    buses = [device["bus"] for device in made if device["driver"] == "vfio-pci"]
    planned = [address.attrib["bus"] for address in domain.iterfind("devices/hostdev/address")]
    assert buses == [f"pci.{int(bus, 16)}" for bus in planned]

    shares = [value for value in values(words, "-device") if "vhost-user-fs-pci" in value]
    assert len(shares) == len(domain.findall("devices/filesystem"))
    ports = [device["name"] for device in made if device["driver"] == "virtserialport"]
    assert ports == [target.attrib["name"] for target in domain.iterfind("devices/channel/target")]
    (sandbox,) = values(words, "-sandbox")
    assert {"on", "elevateprivileges=deny", "spawn=deny", "resourcecontrol=deny"} <= set(sandbox.split(","))
