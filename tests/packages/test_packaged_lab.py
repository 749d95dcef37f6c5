# SPDX-License-Identifier: Apache-2.0
"""A lab of its own whose hosts have vhpc from its Debian packages, as those of a site."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from debs import LIMIT_S, run, until

LAB = {"VLAB_STATE": "/run/vhpc-lab-packages"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]
JOB = "hostname; uname -r; srun -l hostname"


def on(host: str, *words: str, user: str = "root") -> str:
    return run("lab/vlab", "exec", "-u", user, host, "--", *words, **LAB)


@pytest.fixture(scope="module")
def lab(packages: Path) -> Iterator[None]:
    try:
        run("lab/vlab", "up", "--packages", packages, **LAB)
        run("scripts/publish-image", **LAB)
        yield
    finally:
        run("lab/vlab", "down", **LAB)


@pytest.mark.usefixtures("lab")
def test_hosts_have_packages_and_no_checkout() -> None:
    for host, name in (("ctl", "vhpc-controller"), ("login", "vhpc-client"), ("n1", "vhpc-node")):
        assert on(host, "dpkg-query", "-W", "-f", "${db:Status-Status}", name) == "installed"
        assert on(host, "sh", "-c", "ls /opt; readlink -f /usr/bin/vhpc") == "/usr/bin/vhpc\n"
        assert "/usr/libexec/vhpc" not in on(host, "cat", "/proc/self/mounts")


@pytest.mark.promise("install.slurmctld")
@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("host", ["ctl", "login", "n1", "n2"])
def test_doctor_finds_no_error_on_hosts_with_packages(host: str) -> None:
    found = json.loads(on(host, "vhpc", "doctor", "--json"))
    assert [one for one in found if one["level"] == "error"] == []
    assert len(found) > 15


@pytest.mark.usefixtures("lab")
def test_setup_of_a_host_with_packages_has_nothing_left_to_do() -> None:
    for host, role in (("ctl", "controller"), ("login", "login"), ("n1", "node")):
        said = json.loads(on(host, "vhpc", "setup", role, "--dry-run", "--json"))
        assert {step["state"] for step in said["steps"]} <= {"ok"}


@pytest.mark.usefixtures("lab")
def test_a_job_runs_in_guests_of_hosts_with_packages() -> None:
    wanted = ("sbatch", "-W", "-N2", "--vhpc-image=debian-minimal", "-o", "/home/alice/out", f"--wrap={JOB}")
    on("login", *wanted, user="alice")
    said = on("login", "cat", "/home/alice/out").splitlines()
    assert said[0] == "n1"
    # the kernel of the image, which is not that of the machine
    assert said[1] != on("n1", "uname", "-r").strip()
    assert sorted(said[2:]) == ["0: n1", "1: n2"]
    # sbatch ends with the script; the Epilog takes some seconds more
    look = ("sh", "-c", "vhpc reconcile --check || true")
    until(lambda: on("n1", *look) == "n1 is clean\n", "clean n1", 120)
