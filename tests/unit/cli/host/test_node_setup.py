# SPDX-License-Identifier: Apache-2.0
"""vhpc node-setup: makes what is missing, reads back what came of it, and may be repeated."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from attribute_fs import Attribute, Folder
from device_rig import Rig, machine
from fake_hca import Port
from fake_pci import VFIO
from fake_pci_device import Device

from vhpc_slurm.cli import context
from vhpc_slurm.cli.main import main
from vhpc_slurm.node.devices import quarantine, setup
from vhpc_slurm.node.devices.setup import SetupStep, State
from vhpc_slurm.node.devices.vf import PARKED_GUID
from vhpc_slurm.node.store.layout import Layout

ROOT = Path(__file__).parents[4]
POOL = "devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with machine(tmp_path) as found:
        (tmp_path / "proc/devices").write_text(
            "Character devices:\n  1 mem\n240 vendor\n\nBlock devices:\n241 x\n"
        )
        (tmp_path / "proc/sys/vm").mkdir(parents=True)
        yield found


def configure(rig: Rig, *vfs: str, pages: tuple[str, ...] = ()) -> None:
    config = rig.layout.config
    rig.layout = Layout(
        msgspec.structs.replace(
            config,
            devices=msgspec.structs.replace(config.devices, virtual_functions=vfs),
            host=msgspec.structs.replace(config.host, hugepages=pages),
        )
    )


def run(rig: Rig, *, dry_run: bool = False, held: tuple[str, ...] = ()) -> list[SetupStep]:
    place = setup.Place(rig.root / "proc", rig.root / "nodes")
    return list(setup.steps(rig.layout, dict.fromkeys(held, "7.0.0123abcd"), dry_run=dry_run, place=place))


def states(steps: list[SetupStep], kind: str) -> list[State]:
    return [step.state for step in steps if step.kind == kind]


def none_yet(rig: Rig) -> Device:
    """A physical function as after a boot."""
    pf = rig.pfs[0]
    rig.pci._numvfs(pf, "0")
    interface = rig.kernel.interfaces[1]
    interface.ports.clear()
    rig.pci.on_vf = lambda pf, vf, number: interface.ports.update({number: Port()})
    rig.pci.log.clear()
    return pf


# --- virtual functions ------------------------------------------------------------------


def test_virtual_functions_are_made_without_drivers_and_parked(rig: Rig) -> None:
    pf = none_yet(rig)
    rig.pci.drivers["mlx5_core"].ids.add((pf.vendor, pf.device + 1))  # would take them
    configure(rig, f"{pf.address}=4")
    steps = run(rig)
    assert (states(steps, "autoprobe"), states(steps, "vfs")) == ([State.DONE], [State.DONE])
    assert states(steps, "park") == [State.DONE] * 4
    assert [vf.driver for vf in rig.vfs] == [""] * 4
    at = f"bus/pci/devices/{pf.address}"
    assert rig.pci.log[:2] == [(f"{at}/sriov_drivers_autoprobe", "0"), (f"{at}/sriov_numvfs", "4")]
    ports = rig.kernel.interfaces[1].ports.values()
    assert {(port.node_guid, port.port_guid, port.state) for port in ports} == {(PARKED_GUID, PARKED_GUID, 2)}


def test_a_driver_that_is_loading_yet_is_waited_for(rig: Rig) -> None:
    pf = none_yet(rig)
    rig.pci._detach(pf)
    configure(rig, f"{pf.address}=4")
    loading = threading.Timer(0.5, rig.pci._attach, (rig.pci.drivers["mlx5_core"], pf))
    loading.start()
    assert states(run(rig), "vfs") == [State.DONE]
    loading.join()


def test_a_missing_driver_is_reported(rig: Rig) -> None:
    pf = none_yet(rig)
    rig.pci._detach(pf)
    configure(rig, f"{pf.address}=4")
    config = rig.layout.config
    soon = msgspec.structs.replace(config.devices, timeout_s=1)
    rig.layout = Layout(msgspec.structs.replace(config, devices=soon))
    (step,) = [step for step in run(rig) if step.kind == "vfs"]
    assert step.state is State.FAILED
    assert f"{pf.address} has no driver: none was bound within 1 s" in step.error


@pytest.mark.promise("devices.node-setup")
def test_existing_functions_and_pools_are_not_changed(rig: Rig) -> None:
    configure(rig, f"{rig.pfs[0].address}=4", pages=("2M:0=512",))
    first = run(rig)
    assert State.FAILED not in {step.state for step in first}
    rig.pci.log.clear()
    second = run(rig)
    assert {step.state for step in second} == {State.OK}
    assert [(step.kind, step.what) for step in second] == [(step.kind, step.what) for step in first]
    assert rig.pci.log == []


def test_a_dry_run_lists_missing_steps_and_changes_nothing(rig: Rig) -> None:
    pf = none_yet(rig)
    configure(rig, f"{pf.address}=4", pages=("2M:0=600",))
    steps = run(rig, dry_run=True)
    assert {step.state for step in steps} == {State.MISSING}
    assert {step.kind for step in steps} == {"autoprobe", "vfs", "gpu", "hugepages"}
    assert rig.pci.log == []
    assert not (rig.root / "nodes").exists()


@pytest.mark.promise("devices.node-setup")
def test_another_number_is_set_through_zero_without_a_guest(rig: Rig) -> None:
    pf = rig.pfs[0]
    configure(rig, f"{pf.address}=2")
    steps = run(rig, held=(pf.virtfns[3],))
    assert states(steps, "vfs") == [State.FAILED]
    assert any("guests have" in step.error for step in steps)
    assert len(rig.vfs) == 4
    assert states(run(rig), "vfs") == [State.DONE]
    assert [text for path, text in rig.pci.log if path.endswith("numvfs")] == ["0", "2"]


def test_a_guests_virtual_function_keeps_its_guid(rig: Rig) -> None:
    pf = rig.pfs[0]
    port = rig.kernel.interfaces[1].ports[0]
    port.port_guid = 0x02CC123400000400
    configure(rig, f"{pf.address}=4")
    assert len(states(run(rig, held=(pf.virtfns[0],)), "park")) == 3
    assert port.port_guid == 0x02CC123400000400


def test_a_function_that_will_not_be_parked_is_quarantined(rig: Rig) -> None:
    pf = rig.pfs[0]
    rig.kernel.interfaces[1].refuse[11] = errno.EPERM
    configure(rig, f"{pf.address}=4")
    assert states(run(rig), "park") == [State.FAILED] * 4
    assert [record.key for record in quarantine.read_records(rig.layout)] == sorted(pf.virtfns)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("{pf}=9", "its limit is 8, which is a firmware setting"),
        ("0000:ff:00.0=2", "0000:ff:00.0 does not exist"),
        ("{pf}", "ADDRESS=COUNT is expected"),
        ("{pf}=many", "ADDRESS=COUNT is expected"),
        ("{gpu}=2", "no SR-IOV"),
    ],
)
def test_impossible_settings_are_reported(rig: Rig, wish: str, words: str) -> None:
    none_yet(rig)
    configure(rig, wish.format(pf=rig.pfs[0].address, gpu=rig.gpus[0].address))
    assert any(words in step.error for step in run(rig) if step.state is State.FAILED)


def test_mlx4_makes_them_by_its_modules_option(rig: Rig) -> None:
    pf = none_yet(rig)
    rig.give_to_host(pf, "mlx4_core")
    configure(rig, f"{pf.address}=4")
    (step,) = [step for step in run(rig) if step.kind == "vfs"]
    assert step.state is State.FAILED
    assert "mlx4_core by its option num_vfs" in step.error


# --- device files for gres.conf ----------------------------------------------------------------


def test_each_gpu_has_a_node_that_slurm_can_count_and_tell_apart(rig: Rig) -> None:
    assert states(run(rig), "gpu") == [State.DONE, State.DONE]
    found = [(rig.root / f"nodes/gpu{index}").lstat() for index in (0, 1)]
    assert all(stat.S_ISCHR(node.st_mode) for node in found)
    assert [os.minor(node.st_rdev) for node in found] == [0, 1]
    assert {os.major(node.st_rdev) for node in found} == {241}  # a driver has 240
    with pytest.raises(OSError, match="No such device"):
        os.open(rig.root / "nodes/gpu0", os.O_RDONLY)


def test_a_node_whose_drivers_use_the_usual_numbers_has_others(rig: Rig) -> None:
    taken = "".join(f"{major} driver\n" for major in (*range(240, 255), 120))
    (rig.root / "proc/devices").write_text(f"Character devices:\n{taken}\nBlock devices:\n121 x\n")
    assert states(run(rig), "gpu") == [State.DONE, State.DONE]
    assert os.major((rig.root / "nodes/gpu0").lstat().st_rdev) == 121
    assert states(run(rig), "gpu") == [State.OK, State.OK]


def test_a_gpu_without_a_driver_gets_its_iommu_group(rig: Rig) -> None:
    gpu, vfio = rig.gpus[0], rig.pci.drivers[VFIO]
    rig.give_to_host(gpu, "")
    rig.pci.regroup(gpu.address, None)
    assert states(run(rig), "iommu") == []  # a host without an IOMMU
    rig.pci.tree.put("class/iommu/smmu3.0x9050000", Folder())
    assert states(run(rig), "iommu") == [State.FAILED]
    assert gpu.override == ""
    usual = vfio.probe

    def probe(device: Device) -> None:  # Linux 6.12 on Arm: really_probe in drivers/base/dd.c
        rig.pci._join(device, 77)
        usual(device)

    vfio.probe = probe
    assert states(run(rig, dry_run=True), "iommu") == [State.MISSING]
    assert states(run(rig), "iommu") == [State.DONE]
    assert (gpu.group, gpu.driver, gpu.override) == (77, "", "")
    assert states(run(rig), "iommu") == []


def test_dangling_device_nodes_go_and_wrong_ones_are_replaced(rig: Rig) -> None:
    run(rig)
    nodes = rig.root / "nodes"
    (nodes / "gpu7").write_text("")
    (nodes / "gpu1").unlink()
    (nodes / "gpu1").symlink_to("/dev/null")
    (nodes / "other").write_text("")
    assert states(run(rig), "gpu") == [State.OK, State.DONE, State.DONE]
    assert sorted(path.name for path in nodes.iterdir()) == ["gpu0", "gpu1", "other"]
    assert stat.S_ISCHR((nodes / "gpu1").lstat().st_mode)


# --- huge pages -------------------------------------------------------------------------


def pool(rig: Rig, most: int, after_compaction: int | None = None) -> list[str]:
    """A pool with a limit of the pages that the kernel grants; returns the numbers that were written."""
    pages, asked = [0], list[str]()

    def store(text: str) -> None:
        asked.append(text.strip())
        compacted = (rig.root / "proc/sys/vm/compact_memory").exists()
        pages[0] = min(int(text), after_compaction if compacted and after_compaction else most)

    rig.pci.tree.put(POOL, Attribute(lambda: f"{pages[0]}\n", store))
    return asked


def test_fewer_pages_than_asked_for_are_found_out(rig: Rig) -> None:
    asked = pool(rig, 100)
    configure(rig, pages=("2M:0=512",))
    (step,) = [step for step in run(rig) if step.kind == "hugepages"]
    assert step.state is State.FAILED
    assert "the kernel granted 100 huge pages of 512" in step.error
    assert asked == ["512", "512"]


def test_memory_is_compacted_for_pages(rig: Rig) -> None:
    pool(rig, 100, after_compaction=600)
    configure(rig, pages=("2M:0=512",))
    assert states(run(rig), "hugepages") == [State.DONE]
    assert (rig.root / "proc/sys/vm/drop_caches").read_text() == "3"


@pytest.mark.parametrize("wish", ["512", "2M=512", "4K:0=5", "2M:0=-1"])
def test_an_invalid_pool_is_reported(rig: Rig, wish: str) -> None:
    configure(rig, pages=(wish,))
    (step,) = [step for step in run(rig) if step.kind == "hugepages"]
    assert (step.state, step.error) == (State.FAILED, "SIZE:CELL=COUNT is expected, like 1G:0=64")


def test_a_missing_cell_is_reported(rig: Rig) -> None:
    configure(rig, pages=("1G:5=1",))
    (step,) = [step for step in run(rig) if step.kind == "hugepages"]
    assert step.error.endswith("nr_hugepages does not exist")


# --- command and unit -------------------------------------------------------------------


def test_the_command_shows_the_result_of_each_step(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pf = none_yet(rig)
    (tmp_path / "vhpc.toml").write_text(
        f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n'
        f'[host]\nsysfs_root = "{tmp_path}/sys"\nhugepages = ["2M:0=512"]\n'
        f'[placement]\ngpu_map = "{tmp_path}/none"\n[devices]\nvirtual_functions = ["{pf.address}=2"]\n'
    )
    monkeypatch.setenv("VHPC_CONFIG", str(tmp_path / "vhpc.toml"))
    monkeypatch.setattr(context, "is_root", lambda: True)
    monkeypatch.setattr(setup, "GPU_NODES", tmp_path / "nodes")
    assert main(["node-setup", "--dry-run", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(step["kind"], step["state"]) for step in found] == [
        ("autoprobe", "missing"),
        ("vfs", "missing"),
        ("hugepages", "ok"),
    ]
    assert main(["node-setup"]) == 0
    assert f"2 virtual functions of {pf.address}" in capsys.readouterr().out
    assert main(["node-setup", "--dry-run"]) == 0
    pf.driver = "none-that-makes-them"
    (tmp_path / "vhpc.toml").write_text((tmp_path / "vhpc.toml").read_text().replace("=2", "=3"))
    assert main(["node-setup"]) == 3


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt install systemd"
)
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (ROOT / "systemd/vhpc-node-setup.service.in").read_text().replace("@VHPC_COMMAND@", "/bin/true")
    path = tmp_path / "vhpc-node-setup.service"
    path.write_text(unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "vhpc-node-setup" not in done.stderr
    assert {"Before=slurmd.service", "WantedBy=slurmd.service"} <= set(unit.splitlines())
