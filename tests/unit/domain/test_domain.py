# SPDX-License-Identifier: Apache-2.0
"""Domain XML: golden files of the whole result, and values that must not become markup.

``VHPC_REGENERATE=1 pytest tests/unit/domain/test_domain.py`` rewrites the golden files; read the diff.
``tests/lab/test_domain_libvirt.py`` shows them to a real libvirt.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from domain_cases import CASES, DEVICES, FLAT, RUN, SHARES, on_arm, spec
from hypothesis import given
from hypothesis import strategies as st

from vhpc_slurm.architecture import X86_64
from vhpc_slurm.device import PassthroughDevice
from vhpc_slurm.domain import iommu
from vhpc_slurm.domain.boot import kernel_cmdline
from vhpc_slurm.domain.render import render
from vhpc_slurm.domain.spec import DomainSpec, format_version
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import Generation, GuestTopology

GOLDEN = Path(__file__).parents[2] / "data" / "domain"


@pytest.mark.parametrize("case", CASES)
def test_the_whole_domain_is_as_committed(case: str) -> None:
    path = GOLDEN / f"{case}.xml"
    xml = render(CASES[case])
    if os.environ.get("VHPC_REGENERATE"):
        path.write_text(xml)
    assert xml == path.read_text()


def test_every_golden_file_has_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.xml")} == set(CASES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(shutil.which("virt-xml-validate") is None, reason="libvirt-clients is not installed")
def test_the_golden_files_match_libvirts_schema(case: str) -> None:
    said = subprocess.run(["virsh", "--version"], capture_output=True, text=True, check=False).stdout
    installed = [int(part) for part in said.split(".")]
    wanted = [int(part) for part in format_version(CASES[case].libvirt_version).split(".")]
    if installed < wanted:
        pytest.skip(f"a domain for libvirt {wanted[0]}.{wanted[1]}: install libvirt-clients of that release")
    done = subprocess.run(
        ["virt-xml-validate", str(GOLDEN / f"{case}.xml"), "domain"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_equal_specs_give_equal_bytes() -> None:
    assert render(spec(FLAT)) == render(spec(FLAT))


def test_guests_of_other_generations_have_other_uuids() -> None:
    def uuid(value: DomainSpec) -> str | None:
        return ET.fromstring(render(value)).findtext("uuid")

    others = [
        spec(FLAT),
        spec(FLAT, generation=Generation(42, 1, "9f3ac1d2")),
        spec(FLAT, generation=Generation(42, 0, "9f3ac1d3")),
        spec(replace(FLAT, index=1)),
    ]
    assert len({uuid(value) for value in others}) == len(others)


def test_nothing_that_needs_kvm_is_in_a_software_guest() -> None:
    domain = ET.fromstring(render(CASES["tcg"]))
    assert domain.get("type") == "qemu"
    for path in ("features/kvm", "features/ioapic", "features/pmu", "cpu/cache", "cpu/maxphysaddr"):
        assert domain.find(path) is None
    assert {timer.get("name") for timer in domain.iterfind("clock/timer")} == {"rtc", "hpet"}
    assert "invtsc" not in {feature.get("name") for feature in domain.iterfind("cpu/feature")}


def test_an_invariant_tsc_is_required_only_where_the_host_has_it() -> None:
    nested = ET.fromstring(render(spec(FLAT, invariant_tsc=False)))
    assert nested.get("type") == "kvm"
    assert "invtsc" not in {feature.get("name") for feature in nested.iterfind("cpu/feature")}


def test_only_amd_guests_have_topoext() -> None:
    def features(case: str) -> set[str | None]:
        return {feature.get("name") for feature in ET.fromstring(render(CASES[case])).iterfind("cpu/feature")}

    assert "topoext" in features("kvm-amd-smt2")
    assert "topoext" not in features("kvm-intel")


def test_the_shared_root_is_never_given_to_one_guests_uid() -> None:
    for value in CASES.values():
        disk = ET.fromstring(render(value)).find("devices/disk")
        assert disk is not None
        label = disk.find("source/seclabel")
        assert label is not None
        assert label.get("relabel") == "no"
        assert disk.find("readonly") is not None


def test_libvirt_is_never_asked_to_run_a_share_daemon() -> None:
    for value in CASES.values():
        for source in ET.fromstring(render(value)).iterfind("devices/filesystem/source"):
            assert set(source.attrib) == {"socket"}


@pytest.mark.parametrize(
    ("image", "result"),
    [
        ("", "console=ttyS0 panic=-1 quiet vhpc.root=/dev/vda vhpc.rootfstype=erofs"),
        (
            "quiet console=ttyS0 net.ifnames=0",
            "quiet console=ttyS0 net.ifnames=0 panic=-1 vhpc.root=/dev/vda vhpc.rootfstype=erofs",
        ),
    ],
)
def test_the_kernel_command_line_has_each_part_once(image: str, result: str) -> None:
    assert kernel_cmdline(image, "erofs") == result


@pytest.mark.parametrize(
    ("image", "last"),
    [
        ("", "intel_iommu=off"),
        ("intel_iommu=on iommu=pt", "vhpc.rootfstype=erofs"),  # the image's own word stands
        ("intel_iommu=off", "vhpc.rootfstype=erofs"),
    ],
)
def test_an_iommu_that_remaps_interrupts_translates_no_dma(image: str, last: str) -> None:
    assert kernel_cmdline(image, "erofs", remapping=True).split()[-1] == last
    assert "intel_iommu=off" not in kernel_cmdline("", "erofs")


def test_a_disk_is_below_the_root_or_for_the_agent() -> None:
    assert kernel_cmdline("", "erofs", disk=True).split()[-1] == "vhpc.disk=/dev/vdb"
    assert kernel_cmdline("", "erofs", disk=True, mounted=True).split()[-1] == "vhpc.agent.disk=/dev/vdb"
    assert "disk" not in kernel_cmdline("", "erofs", mounted=True)


# As QEMU 10.0 numbers them: the largest apic-id of its CPUs, by QMP.
APIC_IDS = {
    (1, 1, 255, 1): 254,
    (2, 1, 64, 2): 255,
    (2, 1, 72, 2): 399,
    (3, 1, 40, 2): 335,
    (3, 1, 65, 1): 320,
    (5, 1, 24, 2): 303,
    (2, 1, 33, 2): 193,
    (8, 1, 17, 1): 240,
    (4, 1, 63, 1): 254,
    (2, 1, 128, 1): 255,
    (2, 1, 128, 2): 511,
    (8, 1, 64, 2): 1023,
}


@pytest.mark.parametrize("shape", APIC_IDS)
def test_the_highest_apic_id_is_the_one_that_qemu_gives(shape: tuple[int, int, int, int]) -> None:
    assert iommu.highest_id(GuestTopology(*shape)) == APIC_IDS[shape]


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].architecture is X86_64])
def test_interrupts_are_remapped_only_with_wide_apic_ids(
    case: str,
) -> None:
    domain = ET.fromstring(render(CASES[case]))
    shape = CASES[case].guest.topology
    large = APIC_IDS.get((shape.sockets, shape.clusters, shape.cores, shape.threads), 0) >= 255
    driver = domain.find("devices/iommu/driver")
    assert (driver is not None) == large
    if driver is not None:
        assert (driver.get("intremap"), driver.get("eim")) == ("on", "on")
        assert (driver.get("caching_mode") == "on") == bool(CASES[case].guest.devices)
    ioapic = domain.find("features/ioapic")
    assert (None if ioapic is None else ioapic.get("driver")) == (
        "qemu" if large else "kvm" if CASES[case].kvm else None
    )


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("aarch64-")])
def test_arm_guests_have_nothing_of_a_pc(case: str) -> None:
    """libvirt refuses each of these on aarch64 (qemu_validate.c), and ACPI without UEFI."""
    domain = ET.fromstring(render(CASES[case]))
    kind = domain.find("os/type")
    assert kind is not None
    assert (kind.get("arch"), kind.get("machine")) == ("aarch64", "virt")
    for path in ("apic", "ioapic", "vmport", "kvm"):
        assert domain.find(f"features/{path}") is None
    for path in ("cpu/cache", "cpu/maxphysaddr", "cpu/feature", "clock/timer", "devices/iommu"):
        assert domain.find(path) is None
    assert domain.find("devices/controller/pcihole64") is None
    assert (domain.find("features/acpi") is None) == (domain.find("os/loader") is None)
    assert "console=ttyAMA0" in domain.findtext("os/cmdline", "").split()


def test_an_image_of_another_architecture_is_the_users_error() -> None:
    with pytest.raises(UserError, match="guests run on x86_64 and aarch64, not on 'riscv64'"):
        replace(spec(FLAT), manifest=replace(spec(FLAT).manifest, arch="riscv64"))


def test_arm_guests_need_a_newer_libvirt() -> None:
    with pytest.raises(NodeError, match=r"libvirt 9\.0\.0 is too old: guests of aarch64 need 9\.1\.0"):
        on_arm(FLAT, libvirt_version=9_000_000)


def test_arm_guests_with_devices_need_a_uefi() -> None:
    with pytest.raises(NodeError, match="no UEFI for guests with devices"):
        on_arm(DEVICES)


HOSTILE = ["a'/><x y='", 'a"b', "<x/>", "a&b", "a\nb", "a,b=c", "a b", "a\0", "", "\u00e9", "../a", "a" * 300]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("field", ["kernel", "initrd", "root", "agent_socket", "console_log"])
def test_hostile_paths_are_refused(field: str, text: str) -> None:
    with pytest.raises(NodeError):
        spec(FLAT, **{field: text})
    if text and text != "a" * 300:
        with pytest.raises(NodeError):
            spec(FLAT, **{field: f"/run/{text}"})


@pytest.mark.parametrize("text", [*HOSTILE, "0b:00.0", "0000:0b:00.8", "0000:0b:00.0\n"])
def test_hostile_pci_addresses_are_refused(text: str) -> None:
    with pytest.raises(NodeError):
        spec(replace(DEVICES, devices=(PassthroughDevice(text, "gpu", 0, "pci0000:08", 4),)))


def test_memory_for_device_writes_is_populated_before_the_run() -> None:
    for pages in (0, 2048):
        text = render(spec(replace(DEVICES, hugepage_kib=pages)))
        assert '<allocation mode="immediate" threads="4"/>' in text  # as many as vCPUs
    assert "<allocation" not in render(spec(FLAT))


def test_nothing_of_pci_is_in_a_guest_without_devices() -> None:
    for case in set(CASES) - {"devices", "256-vcpus-devices", "gpu-parts", "aarch64-devices"}:
        domain = ET.fromstring(render(CASES[case]))
        assert domain.find("devices/hostdev") is None
        assert domain.find("devices/controller[@type='pci']") is None


def test_each_device_is_unmanaged_and_in_its_planned_port() -> None:
    domain = ET.fromstring(render(CASES["devices"]))
    found = {}
    for hostdev in domain.iterfind("devices/hostdev"):
        source, port = hostdev.find("source/address"), hostdev.find("address")
        rom = hostdev.find("rom")
        assert source is not None
        assert port is not None
        assert rom is not None
        assert (hostdev.get("managed"), rom.get("enabled")) == ("no", "no")
        numbers = [int(source.attrib[part], 16) for part in ("domain", "bus", "slot", "function")]
        found["{:04x}:{:02x}:{:02x}.{:x}".format(*numbers)] = int(port.attrib["bus"], 16)
    assert found == {device.key: device.port for device in DEVICES.devices}


def test_several_preferred_cells_are_set_one_by_one() -> None:
    """libvirt refuses a <memory mode="preferred"> with more than one node."""
    domain = ET.fromstring(render(CASES["preferred-two-cells"]))
    assert domain.find("numatune/memory") is None
    assert [cell.get("nodeset") for cell in domain.iterfind("numatune/memnode")] == ["0", "1"]


@pytest.mark.parametrize("text", [*HOSTILE, "-a", "UPPER"])
def test_hostile_names_are_refused(text: str) -> None:
    with pytest.raises(NodeError):
        spec(FLAT, name=text)


@pytest.mark.parametrize("text", [*HOSTILE, "a/b"])
def test_hostile_share_tags_are_refused(text: str) -> None:
    with pytest.raises(NodeError):
        spec(FLAT, shares=(replace(SHARES[0], tag=text),))


def test_two_shares_with_one_tag_are_refused() -> None:
    with pytest.raises(NodeError, match="same tag"):
        spec(FLAT, shares=(SHARES[0], SHARES[0]))


def test_a_socket_path_that_is_too_long_is_refused() -> None:
    path = "/run/" + "a" * 102
    assert spec(FLAT, agent_socket=path).guest.paths.agent_socket == path
    with pytest.raises(NodeError, match="at most 107"):
        spec(FLAT, agent_socket=path + "a")


def test_a_share_whose_locks_leave_the_guest_gives_it_a_port() -> None:
    def channels(*policies: str) -> dict[str, tuple[str, str]]:
        shares = tuple(replace(SHARES[0], tag=f"site{n}", locks=policy) for n, policy in enumerate(policies))
        domain = ET.fromstring(render(spec(FLAT, shares=shares)))
        found = {}
        for channel in domain.iterfind("devices/channel"):
            target, source = channel.find("target"), channel.find("source")
            assert target is not None
            assert source is not None
            found[target.attrib["name"]] = (source.attrib["mode"], source.attrib["path"])
        controller = domain.find("devices/controller[@type='virtio-serial']")
        assert controller is not None
        assert controller.get("ports") == str(1 + len(found))  # port 0 is for consoles
        return found

    agent = {"org.vhpc.agent.0": ("bind", f"{RUN}/agent.sock")}
    both = agent | {"org.vhpc.locks.0": ("connect", f"{RUN}/locks.sock")}
    assert channels("guest", "cluster") == channels("refuse") == both
    assert channels("guest", "guest") == channels() == agent


def test_a_lock_daemons_socket_path_that_is_too_long_is_refused() -> None:
    run_dir = "/run/" + "a" * 92
    spec(FLAT, run_dir=run_dir[:-4])
    with pytest.raises(NodeError, match=r"socket of the lock daemon .* has a path of 108 characters"):
        spec(FLAT, run_dir=run_dir, shares=(replace(SHARES[0], tag="a"),))


@pytest.mark.parametrize("text", ["a\nb", "a\0", "\u00e9", "a" * 1801])
def test_a_kernel_command_line_must_be_plain_text(text: str) -> None:
    with pytest.raises(UserError):
        spec(FLAT, cmdline=text)


@pytest.mark.parametrize("ids", [{"uid": 0}, {"gid": 0}, {"uid": -1}])
def test_qemu_never_runs_as_root(ids: dict[str, int]) -> None:
    with pytest.raises(NodeError, match="root"):
        spec(FLAT, **ids)


def test_a_libvirt_that_is_too_old_is_a_node_error() -> None:
    with pytest.raises(NodeError, match=r"libvirt 8\.10\.0 is too old"):
        spec(FLAT, libvirt_version=8_010_000)


@pytest.mark.promise("attack.texts")
@given(st.text(alphabet=st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=200))
def test_any_printable_command_line_stays_text(cmdline: str) -> None:
    domain = ET.fromstring(render(spec(FLAT, cmdline=cmdline)))
    assert domain.findtext("os/cmdline") == kernel_cmdline(cmdline, "erofs")
    assert len(domain.findall(".//*")) == len(ET.fromstring(render(spec(FLAT))).findall(".//*"))
