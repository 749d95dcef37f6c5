# SPDX-License-Identifier: Apache-2.0
"""vhpc doctor: what it says about the programs, folders and mounts of a node."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from doctor_rig import executable, one

from vhpc_slurm import __version__
from vhpc_slurm.cli.host.checks import CheckResult, Level, node
from vhpc_slurm.config import Config, Guests
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.node.resource import uid


def test_the_old_virtiofsd_is_distinguished_from_the_new(tmp_path: Path) -> None:
    # what virtiofsd 1.13 of Debian 13 and that of QEMU 7.2 of Debian 12 print
    new = executable(tmp_path / "new", "echo virtiofsd 1.13.0")
    old = executable(
        tmp_path / "old",
        "echo 'virtiofsd version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)'\n"
        "echo 'using FUSE kernel interface version 7.36'",
    )
    assert node.virtiofsd(str(new)).level is Level.OK
    assert node.virtiofsd(str(old)).what == f"{old} is QEMU's old virtiofsd in C"
    assert node.virtiofsd(str(tmp_path / "absent")).what.endswith("No such file or directory")


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("passwd: files systemd", Level.OK),
        ("passwd: files slurm sss # cached", Level.OK),
        ("passwd: slurm [NOTFOUND=continue] ldap", Level.OK),
        ("group: files slurm", Level.OK),
        ("passwd:\tslurm files", Level.WARN),
        ("  passwd: files [SUCCESS=return] slurm systemd", Level.WARN),
    ],
)
def test_users_that_only_steps_can_look_up_are_reported(tmp_path: Path, line: str, level: Level) -> None:
    file = tmp_path / "nsswitch.conf"
    file.write_text(f"# of the site\n{line}\nhosts: files dns\n")
    assert node.name_service(file).level is level
    assert node.name_service(tmp_path / "absent").level is Level.OK


def test_programs_of_another_version_are_errors(tmp_path: Path) -> None:
    same = executable(tmp_path / "vhpc-run", f"echo vhpc-run {__version__}")
    other = executable(tmp_path / "vhpc-shim", "echo vhpc-shim 0.0.9")
    assert node.guest_program(same) == CheckResult("node.vhpc-run", Level.OK, f"{same} {__version__}")
    assert node.guest_program(other).what == f"{other} has version 0.0.9, this package {__version__}"
    mute = executable(tmp_path / "mute", "exit 2")
    assert node.guest_program(mute).level is Level.ERROR


def test_uids_of_users_and_of_rootless_containers_are_not_free(tmp_path: Path) -> None:
    subuid = tmp_path / "subuid"
    subuid.write_text("alice:100000:65536\nbob:700500:65536\n")
    (finding,) = uid.uid_range(Config(), subuid)
    assert (finding.level, finding.what) == (
        Level.ERROR,
        f"uids 700000-708191 overlap {subuid}: bob:700500:65536",
    )
    (finding,) = uid.uid_range(Config(guests=Guests(uid_base=708192, uid_count=10)), tmp_path / "absent")
    assert finding.level is Level.OK
    highest = max(entry.pw_uid for entry in pwd.getpwall())
    if highest >= 1000:
        (finding,) = uid.uid_range(Config(guests=Guests(uid_base=highest - 1, uid_count=2)), subuid)
        assert pwd.getpwuid(highest).pw_name in finding.what


MOUNTS = """\
/dev/vda1 / ext4 rw 0 0
tmpfs /run tmpfs rw 0 0
/dev/vdb /var/lib/vhpc\\040x xfs rw 0 0
/dev/vdc /run/vhpcx ext4 rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/run/vhpc", "tmpfs"),
        ("/run", "tmpfs"),
        ("/running", "ext4"),
        ("/var/lib/vhpc x/journal", "xfs"),
        ("/", "ext4"),
    ],
)
def test_a_path_lies_on_the_innermost_mount(path: str, kind: str) -> None:
    assert node.filesystem_of(path, MOUNTS) == kind


def test_folders_on_wrong_file_systems_are_reported(tmp_path: Path) -> None:
    assert node.run_folder("/run/vhpc", MOUNTS).level is Level.OK
    assert node.run_folder("/var/vhpc", MOUNTS).level is Level.WARN
    (finding,) = node.state_folder("/run/state", MOUNTS, root=False)
    assert finding.what == "/run/state is on tmpfs: journals would be lost at a reboot"
    (finding,) = node.state_folder(str(tmp_path / "absent"), MOUNTS, root=False)
    assert finding.what == f"{tmp_path}/absent does not exist"


def test_apparmor_without_a_rule_for_sockets_is_a_warning(tmp_path: Path) -> None:
    assert node.apparmor(Config(), tmp_path).what == "AppArmor is not in use"
    enabled = tmp_path / "sys/module/apparmor/parameters/enabled"
    enabled.parent.mkdir(parents=True)
    enabled.write_text("Y\n")
    finding = node.apparmor(Config(), tmp_path)
    assert finding.level is Level.WARN
    rule = tmp_path / "etc/apparmor.d/abstractions/libvirt-qemu.d/vhpc"
    rule.parent.mkdir(parents=True)
    rule.write_text(finding.hint.split('"', 2)[1] + "\n")
    assert node.apparmor(Config(), tmp_path).level is Level.OK


def test_a_folder_of_libvirt_that_qemu_cannot_search_is_an_error(tmp_path: Path) -> None:
    config = Config(guests=Guests(qemu_group="daemon"))
    for mode, level in ((0o750, Level.ERROR), (0o751, Level.OK), (0o755, Level.OK)):
        tmp_path.chmod(mode)
        (finding,) = node.libvirt_folder(config, tmp_path)
        assert finding.level is level
    assert list(node.libvirt_folder(config, tmp_path / "absent")) == []


def test_a_machine_without_guests_is_an_error() -> None:
    (finding,) = node.architecture("riscv64")
    assert (finding.check, finding.level) == ("node.architecture", Level.ERROR)
    assert finding.what == "guests run on x86_64 and aarch64, not on 'riscv64'"
    assert [*node.architecture("x86_64"), *node.architecture("aarch64")] == []


def test_software_emulation_is_a_warning() -> None:
    found = list(node.topology(Config(guests=Guests(accelerator="tcg")), "n1", root=True))
    finding = one(found, "node.kvm")
    assert finding.level is Level.WARN
    assert finding.what.startswith("NO KVM: ")
    assert one(found, "node.topology").what.startswith(f"{os.cpu_count()} CPUs, ")


def test_a_missing_libvirt_is_an_error(tmp_path: Path) -> None:
    config = Config(
        guests=Guests(libvirt_uri=f"qemu+unix:///system?socket={tmp_path}/none", stage_timeout_s=5),
        controller=Controller(),
    )
    (finding,) = node.hypervisor(config)
    assert (finding.check, finding.level) == ("node.libvirt", Level.ERROR)
