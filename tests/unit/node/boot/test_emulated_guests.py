# SPDX-License-Identifier: Apache-2.0
"""guests.emulated: guests of another architecture than the node's, for tests only."""

from __future__ import annotations

import grp
import os
from dataclasses import replace

import msgspec
import pytest
from domain_cases import GENERATION, HOST, guest
from placement_rig import MANIFEST

from vhpc_slurm.cli.host.checks import Level, node
from vhpc_slurm.config import Config, Guests
from vhpc_slurm.model import GuestTopology, ImageIdentity, ImageRef, NodePlan, RunningGuest
from vhpc_slurm.node.boot.spec import domain_spec

GROUP = grp.getgrgid(os.getgid() or 1).gr_name
GUEST = guest([2, 3], GuestTopology(1, 1, 2, 1))
LIBVIRT = 11_003_000


@pytest.mark.parametrize("accelerator", ["auto", "kvm"])
def test_only_a_site_without_kvm_may_emulate(accelerator: str) -> None:
    raw = {"guests": {"accelerator": accelerator, "emulated": ["aarch64"]}}
    with pytest.raises(msgspec.ValidationError, match=r'needs guests\.accelerator = "tcg"'):
        msgspec.convert(raw, Config)
    raw["guests"]["accelerator"] = "tcg"
    assert msgspec.convert(raw, Config).guests.emulated == ("aarch64",)
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value 'arm64'"):
        msgspec.convert({"guests": {"accelerator": "tcg", "emulated": ["arm64"]}}, Config)


def test_doctor_warns_of_a_node_that_emulates() -> None:
    config = Config(guests=Guests(accelerator="tcg", emulated=("aarch64",)))
    (finding,) = [one for one in node.topology(config, "n1", root=True) if one.check == "node.emulated"]
    assert finding.level is Level.WARN
    assert finding.what.startswith("n1 starts images for aarch64 in software")
    assert not [one for one in node.topology(Config(), "n1", root=True) if one.check == "node.emulated"]


@pytest.mark.parametrize(("arch", "emulator"), [("x86_64", "/opt/qemu"), ("aarch64", "")])
def test_the_sites_qemu_is_for_the_nodes_architecture(arch: str, emulator: str) -> None:
    config = Config(guests=Guests(emulator="/opt/qemu", qemu_group=GROUP))
    manifest = replace(MANIFEST, arch=arch)
    image = ImageIdentity(ImageRef("base"), "sha256:" + "ab" * 32, manifest)
    plan = NodePlan(GENERATION, "n1", (GUEST,), 4096, 256)
    running = RunningGuest(GUEST, 700042, ())
    spec = domain_spec(config, plan, running, replace(HOST, kvm=False), image, LIBVIRT)
    assert (spec.architecture.name, spec.emulator) == (arch, emulator)
