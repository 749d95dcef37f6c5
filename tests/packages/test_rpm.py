# SPDX-License-Identifier: Apache-2.0
"""The RPM packages: built by Debian's rpmbuild, read by rpmlint, installed, upgraded and erased by its rpm.

There are no packages of RHEL here, so dependencies are read and not resolved.  Python is Debian's 3.13 in the
place of RHEL's 3.12, and python3 refuses to run, as one that is too old.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from debs import LIMIT_S, ROOT, USED, run

PARTS = {"client", "common", "controller", "image-tools", "node", "selinux", "spank-plugin"}
DAEMONS = ("vhpc-hookd.service", "vhpc-web.service", "vhpcd.service")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages, and in newer/ those of their next release."""
    folder = tmp_path_factory.mktemp("rpms")
    run("packaging/rpm/build", "--output", folder / "newer", VHPC_RPM_RELEASE="2")
    run("packaging/rpm/build", "--output", folder)
    shutil.copy(ROOT / "build/rpm.log", folder / "build.log")
    return folder


@pytest.fixture(scope="module")
def report(packages: Path) -> Path:
    """The output of rpm.sh."""
    run("packaging/trial", packages, "tests/packages/rpm.sh", "newer", VHPC_PACKAGES_TREE="rpm")
    return packages / "report"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_all_rpm_packages_are_built_without_complaint(packages: Path) -> None:
    names = {path.name for path in packages.glob("*.rpm")}
    found = {match[1] for name in names if (match := re.match(r"vhpc-(.*)-0\.\d+\.\d+", name))}
    assert found == PARTS
    assert len(names) == len(PARTS)
    last = lines(packages / "build.log")[-1]
    assert "7 packages and 1 specfiles checked; 0 errors, 0 warnings" in last


def test_programs_of_rpms_run_with_the_python_they_name(report: Path) -> None:
    said = (report / "used").read_text()
    for text in (
        *USED,
        "vhpc_slurm.hooks.healthcheck: imported",
        "/var/lib/vhpc\n/run/vhpc\n",
        "libvirt: TEST",
        # bundled libraries are vhpc's alone
        "ModuleNotFoundError: No module named 'msgspec'",
        "vhpc-web.service",
    ):
        assert text in said, said
    assert "this is Python 3.9" not in said
    account = (report / "account").read_text().split(":")
    assert (account[0], Path(account[6].strip()).name) == ("vhpc", "nologin")


def test_rpms_name_dependencies_by_capability(report: Path) -> None:
    needs = {part: lines(report / f"requires.vhpc-{part}") for part in PARTS}
    assert "/usr/bin/python3.13" in needs["common"]
    assert {"/usr/bin/setpriv", "/usr/sbin/ip", "virtiofsd", "qemu-kvm-core"} <= set(needs["node"])
    (policy,) = (need for need in needs["node"] if "selinux" in need)
    assert re.fullmatch(r"\(vhpc-selinux = \S+ if selinux-policy-default\)", policy)
    # Slurm's loader refuses plugins of other releases; Debian 13 has 24.11
    assert "(slurm(x86-64) >= 24.11 with slurm(x86-64) < 24.12~)" in needs["spank-plugin"]
    assert not [need for found in needs.values() for need in found if "dist(" in need]
    # only nodes need libvirt
    assert [part for part in sorted(PARTS) if "libvirt.so.0()(64bit)" in needs[part]] == ["node"]


@pytest.mark.promise("install.scripts")
def test_an_upgrade_of_rpms_restarts_the_daemons_alone(report: Path) -> None:
    assert {line for line in lines(report / "services.install") if line != "daemon-reload"} <= {
        "try-restart vhpc-hookd.service vhpcd.service",
        "try-restart vhpc-web.service",
    }
    done = lines(report / "services.upgrade")
    restarted = sorted(word for line in done if line.startswith("try-restart") for word in line.split()[1:])
    assert restarted == sorted(DAEMONS)
    assert not [line for line in done if line.split()[0] in ("stop", "start", "disable", "enable")]
    # hooks wait while files are replaced, and not afterwards
    assert "hooks wait" in done
    assert "vhpc-upgrading" not in lines(report / "run")
    assert {line.split()[1][0] for line in lines(report / "upgraded")} == {"2"}


@pytest.mark.promise("install.scripts")
def test_a_node_whose_job_has_guests_keeps_its_rpm(report: Path) -> None:
    said = (report / "refused").read_text()
    assert "job 7 has guests on this node" in said
    assert "erased" not in said


@pytest.mark.promise("install.scripts")
def test_erased_rpms_leave_only_state_and_logs(report: Path) -> None:
    stopped = {word for line in lines(report / "services.erase") if "--now" in line for word in line.split()}
    assert set(DAEMONS) <= stopped
    left = set(lines(report / "after")) - set(lines(report / "before"))
    assert left <= {"/run/vhpc", "/run/vhpc/jobs", "/var/lib/vhpc", "/var/lib/vhpc/journal", "/var/log/vhpc"}
    assert "vhpc" in lines(report / "modules")
    assert "vhpc" not in lines(report / "modules.after")


def rules(report: Path, name: str) -> str:
    return (report.parent / "policy" / name).read_text()


def test_the_policy_lets_qemu_reach_its_helpers_alone(packages: Path, report: Path) -> None:
    """In the policy of Debian, whose services without a domain are initrc_t."""
    run("packaging/trial", packages, "tests/packages/policy.sh", VHPC_PACKAGES_TREE="rpm")
    connects = re.findall(r"allow \S+ (\S+):unix_stream_socket", rules(report, "connects"))
    assert "vhpc_helper_t" in connects
    assert not {"initrc_t", "unconfined_t", "domain"} & set(connects)
    assert "vhpc_run_t:sock_file { append getattr open write };" in rules(report, "sockets")
    # libvirt gives kernels, disks and sockets another label before QEMU opens them
    assert "vhpc_run_t:file" not in rules(report, "sockets")
    assert "read" in rules(report, "root")
    assert " map" in rules(report, "root")
    assert "write" not in rules(report, "root")
    assert rules(report, "disk") == ""
    assert ":file " not in rules(report, "state")
    assert "vhpc_helper_t;" in rules(report, "starts")
    assert {"virt_content_t", "virt_image_t"} <= set(re.findall(r"virt_\w+_t", rules(report, "folders")))
    assert "append" in rules(report, "console")
    assert "relabelto" in rules(report, "labels")
    assert "map" in rules(report, "memory")
