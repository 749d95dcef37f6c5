# SPDX-License-Identifier: Apache-2.0
"""The Debian packages: built, read by lintian, installed, upgraded and purged in a tree of each suite."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from debs import LIMIT_S, NAMES, STAYS, USED, Suite, newer, run

DAEMONS = ("vhpc-hookd", "vhpc-web", "vhpcd")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture(scope="session")
def packages(suite: Suite, built: Callable[[Suite], Path]) -> Path:
    return built(suite)


@pytest.fixture(scope="session")
def report(packages: Path, suite: Suite) -> Path:
    """The output of life.sh."""
    (packages / "newer").mkdir()
    for package in packages.glob("*.deb"):
        newer(package, packages / "newer")
    run("packaging/trial", packages, "tests/packages/life.sh", "newer", VHPC_PACKAGES_SUITE=suite.name)
    return packages / "report"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def files(report: Path, package: str) -> set[str]:
    return set(lines(report / f"files.{package}"))


def test_all_packages_are_built(packages: Path) -> None:
    assert {path.name.split("_")[0] for path in packages.glob("*.deb")} == NAMES


def test_lintian_has_no_complaint(packages: Path) -> None:
    assert [line for line in lines(packages / "lintian.txt") if re.match("[EW]:", line)] == []


def test_each_file_is_where_slurm_and_systemd_look(report: Path) -> None:
    assert "/usr/lib/x86_64-linux-gnu/slurm-wlm/vhpc.so" in files(report, "vhpc-spank-plugin")
    node = {f"/usr/libexec/vhpc/{name}" for name in ("prolog", "epilog", "healthcheck", "hook-paths")}
    node |= {f"/usr/libexec/vhpc/vhpc-{name}" for name in ("confine", "locks", "run", "shim")}
    assert node <= files(report, "vhpc-node")
    controller = {"/usr/sbin/vhpcd", "/usr/lib/systemd/system/vhpcd.service"}
    hooks = {f"/usr/libexec/vhpc/{name}" for name in ("prolog-slurmctld", "epilog-slurmctld", "vhpc-hookd")}
    hooks |= {"/usr/lib/systemd/system/vhpc-hookd.service"}
    assert controller | hooks <= files(report, "vhpc-controller")
    assert {"/usr/bin/vhpc", "/usr/libexec/vhpc/vhpc-sbcast"} <= files(report, "vhpc-client")
    assert {"/usr/libexec/vhpc/vhpc-agent", "/usr/libexec/vhpc/vhpc-init"} <= files(
        report, "vhpc-image-tools"
    )


def test_no_file_is_in_two_packages(packages: Path) -> None:
    owners: dict[str, str] = {}
    twice = []
    for package in packages.glob("*.deb"):
        for line in run("dpkg-deb", "-c", package).splitlines():
            name = line.split()[5]
            if not name.endswith("/"):
                twice += [name] if name in owners else []
                owners[name] = package.name
    assert twice == []
    assert len(owners) > 300


def test_the_plugin_depends_on_its_release_of_slurm(packages: Path, suite: Suite) -> None:
    (plugin,) = packages.glob("vhpc-spank-plugin_*.deb")
    depends = run("dpkg-deb", "-f", plugin, "Depends")
    # Slurm's loader refuses plugins of other releases
    name = "slurm-wlm-basic-plugins"
    assert f"{name} (>= {suite.slurm}), {name} (<< {suite.beyond})" in depends


def test_installed_programs_run(report: Path) -> None:
    said = (report / "used").read_text()
    for text in (*USED, "units: valid"):
        assert text in said
    assert (report / "audit").read_text() == ""
    account = (report / "account").read_text().split(":")
    assert (account[0], account[6].strip()) == ("vhpc", "/usr/sbin/nologin")


def test_installing_starts_nothing(report: Path) -> None:
    assert lines(report / "services.install") == []


@pytest.mark.promise("install.scripts")
def test_an_upgrade_restarts_the_daemons_and_nothing_else(report: Path) -> None:
    assert sorted(lines(report / "services.upgrade")) == [f"{name}.service try-restart" for name in DAEMONS]
    upgraded = [line.split() for line in lines(report / "upgraded")]
    assert {name for name, version, state in upgraded if "newer" in version and state == "installed"} == NAMES


@pytest.mark.promise("install.scripts")
def test_a_node_whose_job_has_guests_keeps_its_package(report: Path) -> None:
    said = (report / "refused").read_text()
    assert "job 7 has guests on this node" in said
    assert "\nremoved\n" not in said


def test_removing_stops_daemons_and_nothing_else(report: Path) -> None:
    assert sorted(lines(report / "services.remove")) == [f"{name}.service stop" for name in DAEMONS]


@pytest.mark.promise("install.scripts")
def test_purged_packages_leave_nothing(report: Path) -> None:
    before, after = set(lines(report / "before")), set(lines(report / "purged"))
    assert len(before) > 3000
    assert {line.split()[-1] for line in before ^ after} <= STAYS
    assert lines(report / "before.names") == lines(report / "purged.names")
