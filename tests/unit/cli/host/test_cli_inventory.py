# SPDX-License-Identifier: Apache-2.0
"""vhpc inventory: the tree, the document and the picture of this node and of captured ones."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from captured import Trees, one_worker
from machine_tree import gpu_node
from vhpc_command import Vhpc

from vhpc_slurm.cli import context
from vhpc_slurm.cli.host import picture
from vhpc_slurm.model import Generation
from vhpc_slurm.node.store.journal import Journal

pytestmark = one_worker
ROOT = Path(__file__).parents[4]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "is_root", lambda: True)


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "is_root", lambda: False)


def reservation(vhpc: Vhpc, generation: Generation, **data: Any) -> Journal:
    journal = Journal(vhpc.folder / "state/journal", generation)
    built = {"generation": str(generation), "guest": 0, "cpus": [], "cells": [], "devices": []} | data
    journal.acquire("claim", "claim:g0", **built)
    return journal


def test_a_captured_machine_as_a_tree(vhpc: Vhpc, trees: Trees) -> None:
    out = vhpc("inventory", "--node", "ve", "--sysfs-root", str(trees("32intel64-2p8co2t+8ve")))
    lines = [line.strip(" │├└─") for line in out.splitlines()]
    assert lines[0] == "ve: 2 sockets, 16 cores, 32 CPUs, 2 NUMA cells, 93 GiB, GenuineIntel"
    for line in (
        "cores 0-7 of 2 threads: CPUs 0-7,16-23",
        "caches: 1 x L3 11 MiB, 8 x L2 1 MiB, 8 x L1i 32 KiB, 8 x L1d 32 KiB",
        "huge pages: 2048 of 2048 free of 2 MiB",
        "distance to cell 1: 21",
        "1a:00.0 InfiniBand, Mellanox 15b3:1013, driver mlx5_core, x16 8 GT/s",
        "60:00.0 Ethernet, Intel 8086:37d2, enp96s0f0, driver i40e, x1 2.5 GT/s of x1 8",
    ):
        assert line in lines
    assert max(map(len, lines)) < 120


def test_offline_cpus_and_cpus_of_an_offline_cell_are_shown(vhpc: Vhpc, trees: Trees) -> None:
    out = vhpc("inventory", "--sysfs-root", str(trees("offline-cpu0-node0")))
    assert "offline: CPUs 0-3,21-23" in out
    assert re.search(r"without a NUMA cell\n.*CPUs 4,6,8,10,12,14,16,18,20\n", out)


def test_devices_of_no_cell_are_shown_outside_the_cells(vhpc: Vhpc, trees: Trees) -> None:
    out = vhpc("inventory", "--sysfs-root", str(trees("40intel64-2g2n4c+pcilocality")))
    assert re.search(r"without a NUMA cell\n.*pci0000:00\n", out)
    assert "17 PCI functions of the platform itself are not shown" in out


def test_the_folder_may_be_the_sysfs_tree_itself(vhpc: Vhpc, trees: Trees) -> None:
    tree = trees("20em64t-hybrid-1p6c2t+2ca4co1t")
    assert vhpc("inventory", "--sysfs-root", str(tree / "sys")) == vhpc(
        "inventory", "--sysfs-root", str(tree)
    )


def test_a_folder_without_a_sysfs_tree_is_refused(vhpc: Vhpc) -> None:
    vhpc("inventory", "--sysfs-root", str(vhpc.folder / "nowhere"), code=1)
    assert "there is no sysfs tree" in vhpc.error


def test_this_nodes_proc_is_never_taken_for_another_machines(vhpc: Vhpc) -> None:
    assert vhpc.json("inventory", "--sysfs-root", str(vhpc.folder / "sys"))["cpu_vendor"] is None


def keys(value: Any, prefix: str = "") -> set[str]:
    if isinstance(value, list):
        return set().union(*(keys(item, prefix) for item in value))
    if not isinstance(value, dict):
        return set()
    return {f"{prefix}{key}" for key in value} | set().union(*(keys(v, f"{k}.") for k, v in value.items()))


def documented() -> set[str]:
    """Every field that docs/inventory.md names, with the heading it stands under."""
    found, prefix = set(), ""
    for line in (ROOT / "docs/inventory.md").read_text().splitlines():
        if line.startswith("## `"):
            prefix = line.strip("# `") + "."
        if line.startswith("- `"):
            names, text = line.split(": ", 1)
            found |= {prefix + name for name in re.findall(r"`(\w+)`", names)}
            for part in ("distances", "hugepages", "bars", "link", "cells", "mdev_types", "vgpus"):
                if f"`{part}`" in names and (prefix or part != "cells"):
                    found |= {f"{part}.{name}" for name in re.findall(r"`(\w+)`", text)}
    return found


def gpu_parts(sys: Path) -> tuple[str, list[str]]:
    """A captured GPU with an mdev, and another's virtual functions with types; their addresses."""
    gpus = sorted(
        path.parent for path in sys.glob("bus/pci/devices/*/class") if path.read_text().startswith("0x0302")
    )
    kind = gpus[0] / "mdev_supported_types/nvidia-474"
    (kind / "devices/83b8f4f2-509f-382f-3c1e-e6bfe0fa1001").mkdir(parents=True)
    (kind / "name").write_text("GRID A100-4C\n")
    (kind / "available_instances").write_text("9\n")
    (sys / "class/mdev_bus").mkdir(parents=True)
    (sys / "class/mdev_bus" / gpus[0].name).symlink_to(gpus[0])
    for gpu, now in zip(gpus[1:3], ("0", "1414"), strict=True):
        (gpu / "physfn").symlink_to(gpus[3])
        (gpu / "nvidia").mkdir()
        (gpu / "nvidia/current_vgpu_type").write_text(f"{now}\n")
        (gpu / "nvidia/creatable_vgpu_types").write_text("ID    : vGPU Name\n1414  : NVIDIA H200X-1-18C\n")
    return gpus[0].name, [gpu.name for gpu in gpus[1:4]]


def test_types_of_mdevs_and_vgpus_are_shown(vhpc: Vhpc) -> None:
    tree = gpu_node(vhpc.folder / "gpus", sockets=2, cores=2)
    parent, (free, used, physfn) = gpu_parts(tree.sys)
    out = vhpc("inventory", "--sysfs-root", str(vhpc.folder / "gpus"))
    for line in (
        f"{parent}: mdev type nvidia-474 (GRID A100-4C), 1 exist, 9 more can be created",
        f"{physfn}: VF {free.removeprefix('0000:')}: can become H200X-1-18C (1414)",
        f"{physfn}: VF {used.removeprefix('0000:')}: vGPU of type 1414",
    ):
        assert line in out.splitlines()


@pytest.mark.usefixtures("as_root")
def test_the_document_has_the_fields_that_its_description_names(vhpc: Vhpc) -> None:
    reservation(vhpc, Generation(7, 0, "0123abcd"), cpus=[0, 4], cells=[[0, 1024]])
    gpu_parts(gpu_node(vhpc.folder / "gpus", sockets=2, cores=2).sys)
    live = vhpc.json("inventory")
    other = vhpc.json("inventory", "--sysfs-root", str(vhpc.folder / "gpus"))
    known = {"creatable.number", "creatable.name"}  # as the driver shows them
    assert keys(live) | keys(other) == documented() | known
    assert live["schema"] == other["schema"] == 1
    assert (live["live"], other["live"]) == (True, False)


@pytest.mark.usefixtures("as_root")
def test_root_sees_the_holders_of_devices(vhpc: Vhpc) -> None:
    reservation(vhpc, Generation(42, 0, "0123abcd"), cpus=[0, 2, 4, 6], cells=[[0, 2048]], hugepage_kib=2048)
    reservation(vhpc, Generation(43, 1, "ffffffff"), cpus=[1, 5], cells=[[-1, 512]], devices=["0000:0b:00.0"])
    reservation(vhpc, Generation(44, 0, "00000000"), cpus=[3, 7]).released("claim:g0")
    out = vhpc("inventory")
    assert "42.0.0123abcd g0: CPUs 0,2,4,6, 2048 MiB in pages of 2 MiB of cell 0\n" in out
    assert "43.1.ffffffff g0: CPUs 1,5, 512 MiB, 0b:00.0\n" in out
    assert "44.0.00000000" not in out
    held = vhpc.json("inventory")["reservations"]
    assert [(c["generation"], c["cpus"]) for c in held] == [
        ("42.0.0123abcd", [0, 2, 4, 6]),
        ("43.1.ffffffff", [1, 5]),
    ]


@pytest.mark.usefixtures("as_root")
def test_a_damaged_journal_is_a_remark_and_not_an_empty_node(vhpc: Vhpc) -> None:
    reservation(vhpc, Generation(42, 0, "0123abcd"), cpus="what")
    assert vhpc.json("inventory")["reservations"] is None
    assert re.search(r"note: journal .*42\.0\.0123abcd\.jsonl is damaged", vhpc("inventory"))


@pytest.mark.usefixtures("as_user")
def test_others_read_that_holders_are_shown_to_root_only(vhpc: Vhpc) -> None:
    assert "note: only root can see the resources of guests" in vhpc("inventory")
    assert vhpc.json("inventory")["reservations"] is None


# --- the picture ---------------------------------------------------------------


def svg(text: str) -> ET.Element:
    return ET.fromstring(text)


def words(drawing: ET.Element) -> list[str]:
    return ["".join(text.itertext()) for text in drawing.iter(f"{SVG}text")]


def test_the_picture_has_every_cpu_cell_root_complex_and_device(vhpc: Vhpc, trees: Trees) -> None:
    drawing = svg(vhpc("inventory", "--sysfs-root", str(trees("32intel64-2p8co2t+8ve")), "--svg", "-"))
    found = words(drawing)
    assert {str(cpu) for cpu in range(32)} <= set(found)
    assert {"cell 0", "cell 1", "pci0000:17", "pci0000:3a", "pci0000:5d"} <= set(found)
    for address in ("1a", "1b", "1c", "1d", "1e", "3d", "3e", "3f", "40", "41", "60"):
        assert any(word.startswith(f"{address}:00.0 ") for word in found)


def test_nothing_is_drawn_outside_of_the_picture(vhpc: Vhpc) -> None:
    gpu_node(vhpc.folder / "gpus", sockets=4, cores=8)
    drawing = svg(vhpc("inventory", "--sysfs-root", str(vhpc.folder / "gpus"), "--svg", "-"))
    width, height = float(drawing.attrib["width"]), float(drawing.attrib["height"])
    boxes = [box for box in drawing.iter(f"{SVG}rect") if "x" in box.attrib]
    assert len(boxes) > 100
    for box in boxes:
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


@pytest.mark.usefixtures("as_root")
def test_devices_of_a_guest_have_its_colour(vhpc: Vhpc) -> None:
    reservation(vhpc, Generation(42, 0, "0123abcd"), cpus=[0, 4], cells=[[0, 1000]])
    drawing = svg(vhpc("inventory", "--svg", "-"))
    coloured = [box for box in drawing.iter(f"{SVG}rect") if picture.COLOURS[0] in box.get("style", "")]
    assert len(coloured) == 4  # the legend, two CPUs, a part of the bar of cell 0's memory
    assert any(word.startswith("42.0.0123abcd g0: CPUs 0,4") for word in words(drawing))


def test_the_picture_goes_to_a_file_and_the_tree_to_the_terminal(vhpc: Vhpc) -> None:
    target = vhpc.folder / "n1.svg"
    assert "socket 0" in vhpc("inventory", "--sysfs-root", str(vhpc.folder / "sys"), "--svg", str(target))
    assert svg(target.read_text()).tag == f"{SVG}svg"


def test_a_picture_that_cannot_be_written_is_the_users_mistake(vhpc: Vhpc) -> None:
    vhpc(
        "inventory", "--sysfs-root", str(vhpc.folder / "sys"), "--svg", str(vhpc.folder / "no/n1.svg"), code=1
    )
    assert "cannot write" in vhpc.error


def test_picture_and_document_do_not_mix_on_standard_output(vhpc: Vhpc) -> None:
    vhpc("inventory", "--svg", "-", "--json", code=2)
    assert "--svg -" in vhpc.error


def test_markup_in_names_from_sysfs_is_escaped(vhpc: Vhpc) -> None:
    tree = gpu_node(vhpc.folder / "gpus", sockets=1, cores=2, complexes=1, gpus=0, vfs=0)
    (tree.sys / "bus/pci/devices/0000:0b:00.0/net/<b> & \x1b[31m").mkdir()
    out = vhpc("inventory", "--sysfs-root", str(tree.root))
    assert "\x1b" not in out
    assert "<b> & ?[31m" in out
    drawing = svg(vhpc("inventory", "--sysfs-root", str(tree.root), "--svg", "-"))
    assert any("<b> & ?[31m" in word for word in words(drawing))


def test_equal_hosts_give_equal_pictures(vhpc: Vhpc, trees: Trees) -> None:
    argv = ("inventory", "--sysfs-root", str(trees("64amd64-4s2n4ca2co")), "--svg", "-")
    assert vhpc(*argv) == vhpc(*argv)
