# SPDX-License-Identifier: Apache-2.0
"""Snapshots of shared folders in a boot: the guest gets a disk, and the folder has no daemon."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from boot_rig import SHARES, Agent, BootRig, boot_layout, connect, prepared, run
from stepd import needs_root

from vhpc_slurm.catalog import snapshots as catalogue
from vhpc_slurm.config.shares import Shares
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Share
from vhpc_slurm.node.guest import snapshots
from vhpc_slurm.node.store.layout import Layout

layout = boot_layout
pytestmark = needs_root
SW = Share("site0", "/sw", read_only=True, why="site", cache="auto", locks="cluster")


@pytest.fixture
def rig(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Iterator[BootRig]:
    """A boot on a site with snapshots of /sw, whose plan has this folder."""
    found = prepared(layout, monkeypatch, disk_mib=64)
    connect(monkeypatch, Agent())
    layout.run.parent.chmod(0o755)
    settings = Shares(site=("/sw",), read_only=("/sw",), snapshots=("/sw",))
    config = msgspec.structs.replace(layout.config, shares=settings)
    plan = replace(found.work.plan, shares=(SW, *SHARES))
    found.change(layout=replace(layout, config=config), plan=plan)
    yield found
    found.work.journal.close()


def publish(rig: BootRig, content: bytes) -> str:
    images = rig.work.layout.config.images
    new = catalogue.unfinished(images, "/sw", os.geteuid())
    new.write_bytes(content)
    made = catalogue.publish("/sw", new, (1, len(content)), 1e9)
    return str(catalogue.folder(images) / made.file)


def stages(rig: BootRig) -> dict[str, str]:
    return {stage.name: stage.detail for stage in rig.work.recorder.timeline().stages}


def test_a_folder_with_a_snapshot_is_a_disk(rig: BootRig) -> None:
    file = publish(rig, b"new")
    made = run(rig)
    (helpers,) = rig.helpers
    assert helpers.wanted == SHARES
    assert [share.path for share in helpers.with_locks if share.needs_lock_daemon] == ["/scratch/a"]
    (domain,) = rig.hypervisor.domains
    disks = {disk.findtext("serial"): disk for disk in ET.fromstring(domain).iterfind("devices/disk")}
    disk = disks["site0"]
    assert disk.find("source").get("file") == file  # type: ignore[union-attr]
    assert disk.find("readonly") is not None
    assert disk.find("target").get("dev") == "vdc"  # type: ignore[union-attr] # the guest's own disk stays vdb
    assert [share.path for share in made.guests[0].shares] == ["/sw", "/scratch/a"]
    assert stages(rig)["snapshots"] == f"/sw is {Path(file).name}"


def test_a_folder_without_a_snapshot_gets_a_daemon(rig: BootRig) -> None:
    run(rig)
    assert rig.helpers[0].wanted == (SW, *SHARES)
    assert stages(rig)["snapshots"] == "/sw has no snapshot"


def test_a_damaged_snapshot_fails_no_job(rig: BootRig) -> None:
    os.truncate(publish(rig, b"new"), 1)
    run(rig)
    assert rig.helpers[0].wanted == (SW, *SHARES)
    assert "has 1 bytes instead of 3" in stages(rig)["snapshots"]


def test_an_image_whose_kernel_may_lack_erofs_gets_a_daemon(rig: BootRig) -> None:
    publish(rig, b"new")
    manifest = replace(rig.work.image.manifest, root_format="ext4")
    rig.change(image=replace(rig.work.image, manifest=manifest))
    found, problems = snapshots.current(rig.work.layout.config, rig.work.plan.shares, rig.work.image)
    assert (found, problems) == ((SW, *SHARES), ())


@pytest.mark.promise("shares.snapshot-resume")
def test_a_resumed_guest_gets_the_snapshot_it_was_saved_with(rig: BootRig) -> None:
    old = publish(rig, b"old")
    config, shares = rig.work.layout.config, rig.work.plan.shares
    had, _ = snapshots.current(config, shares, rig.work.image)
    kept = dict(snapshots.kept(had))
    assert kept == {"/sw": old}
    newer = Path(old).with_name(Path(old).name.replace("Z.", "9Z."))
    newer.write_bytes(b"newer")
    assert snapshots.saved(config, shares, kept) == had
    assert snapshots.saved(config, shares, {}) == shares  # it had none, so it gets none
    Path(old).unlink()
    with pytest.raises(UserError, match=f"{old} of /sw, which is not there any more"):
        snapshots.saved(config, shares, kept)


@pytest.mark.parametrize("files", [{"/sw": "/etc/passwd"}, {"/other": "x"}])
def test_a_checkpoint_names_only_snapshots_of_the_site(rig: BootRig, files: dict[str, str]) -> None:
    with pytest.raises(UserError, match="the checkpoint cannot be resumed"):
        snapshots.saved(rig.work.layout.config, rig.work.plan.shares, files)
