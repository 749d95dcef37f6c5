# SPDX-License-Identifier: Apache-2.0
"""Golden domains use only what QEMU of RHEL has (tests/data/rhel).

The devices of an element are those that libvirt makes of it (src/qemu/qemu_command.c).
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import rhel_qemu

DATA = Path(__file__).parents[2] / "data"
DEVICES = set((DATA / "rhel/devices.txt").read_text().split())
# by element, and by its model or type if libvirt makes other devices of others
MADE = {
    "channel": "virtserialport",
    "controller/pci/pcie-expander-bus": "pxb-pcie",
    "controller/pci/pcie-root-port": "pcie-root-port",
    "controller/pci/pcie-switch-downstream-port": "xio3130-downstream",
    "controller/pci/pcie-switch-upstream-port": "x3130-upstream",
    "controller/virtio-serial": "virtio-serial-pci",
    "disk/virtio": "virtio-blk-pci",
    "filesystem/virtiofs": "vhost-user-fs-pci",
    "hostdev": "vfio-pci",
    "interface/virtio": "virtio-net-pci",
    "iommu/intel": "intel-iommu",
    "panic/isa": "pvpanic",
    "rng/virtio": "virtio-rng-pci",
    "serial": "isa-serial",
}
# the machine has it, or there is none
NONE = {"controller/pci/pcie-root", "controller/usb/none", "memballoon/none", "emulator"}


def kind(element: ET.Element) -> str:
    """An element of <devices> as above."""
    model = element.find("model")
    target, driver = element.find("target"), element.find("driver")
    parts = {
        "controller": (element.get("type"), element.get("model")),
        "disk": (None if target is None else target.get("bus"),),
        "filesystem": (None if driver is None else driver.get("type"),),
        "interface": (None if model is None else model.get("type"),),
        "iommu": (element.get("model"),),
        "panic": (element.get("model"),),
        "rng": (element.get("model"),),
        "memballoon": (element.get("model"),),
    }.get(element.tag, ())
    return "/".join([element.tag, *(part for part in parts if part)])


# the list of devices is that for x86_64
OF_X86 = sorted(path for path in (DATA / "domain").glob("*.xml") if not path.stem.startswith("aarch64-"))


@pytest.mark.parametrize("path", OF_X86, ids=lambda path: path.stem)
def test_golden_domains_need_no_device_that_rhel_lacks(path: Path) -> None:
    domain = ET.parse(path).getroot()
    kinds = {kind(element) for element in domain.iterfind("devices/*")}
    assert {MADE[one] for one in kinds - NONE} <= DEVICES
    # an alias that each build of QEMU has
    assert domain.find("os/type[@machine='q35']") is not None


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (
            [
                "-machine",
                "pc-q35-rhel9.6.0,usb=off",
                "-device",
                '{"driver":"vfio-pci","host":"0000:3b:00.4"}',
            ],
            "",
        ),
        (["-device", "vhost-user-fs-pci,tag=home", "-netdev", '{"type":"tap","fd":"3"}'], ""),
        (["-object", '{"qom-type":"memory-backend-memfd","id":"m"}'], ""),
        (["-machine", "pc-q35-10.0,usb=off"], "pc-q35-10.0"),
        (["-device", '{"driver":"pvpanic-pci"}'], "pvpanic-pci"),
        (["-device", "virtio-9p-pci,fsdev=a"], "virtio-9p-pci"),
        (["-netdev", "user,id=n"], "user"),
        (["-blockdev", '{"node-name":"n","driver":"vvfat"}'], "vvfat"),
    ],
)
def test_the_imitation_refuses_what_rhel_lacks(words: list[str], refused: str) -> None:
    why = rhel_qemu.refusal(words, DEVICES)
    assert (f"'{refused}' is not in this build" in why) if refused else why == ""


def test_answers_to_libvirt_name_machines_of_rhel_only() -> None:
    machines = [
        {"name": "pc-q35-10.0", "alias": "q35", "cpu-max": 4096},
        {"name": "pc-i440fx-10.0", "alias": "pc", "cpu-max": 255},
        {"name": "none", "cpu-max": 1},
    ]
    found = rhel_qemu.edited({"return": machines, "id": "1"})["return"]
    assert [one["name"] for one in found] == ["pc-q35-rhel9.6.0", "none"]
    types = [{"name": "nvme", "parent": "pci-device"}, {"name": "vfio-pci", "parent": "pci-device"}]
    assert rhel_qemu.edited({"return": types})["return"] == types[1:]
    assert rhel_qemu.translated(["-machine", "pc-q35-rhel9.6.0,usb=off"]) == ["-machine", "q35,usb=off"]
