# SPDX-License-Identifier: Apache-2.0
"""A lab with the packages of the previous release is upgraded host by host while jobs run."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import previous
import pytest
from debs import LIMIT_S, ROOT, run

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.schema import SCHEMA_VERSION

LAB = {"VLAB_STATE": "/run/vhpc-lab-upgrade"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]
HOSTS = ("ctl", "login", "n1", "n2")
PACKAGES = {
    "ctl": ("common", "client", "spank-plugin", "controller", "image-tools"),
    "login": ("common", "client", "spank-plugin", "image-tools"),
    "n1": ("common", "client", "spank-plugin", "node"),
    "n2": ("common", "client", "spank-plugin", "node"),
}
GO = "/home/alice/go"
SCRIPTS = {
    # in a step when hosts are upgraded, and starts another one afterwards
    "running": f"srun -l sh -c 'until [ -e {GO} ]; do sleep 1; done; hostname'; srun -l hostname; echo end",
    # in its Prologs when hosts are upgraded
    "booting": "srun -l hostname; echo end",
    # pending until the others have ended
    "pending": "srun -l hostname; echo end",
    # submitted when some hosts have the new version only
    "between": "srun -l hostname; echo end",
}
STEP = ["0: n1", "1: n2"]
OUTPUTS = {name: [*STEP, "end"] for name in SCRIPTS} | {"running": [*STEP, *STEP, "end"]}


def on(host: str, *words: str, user: str = "root") -> str:
    return run("lab/vlab", "exec", "-u", user, host, "--", *words, **LAB)


def until(true: Callable[[], bool], what: str, limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"no {what} after {limit_s:g} s"
        time.sleep(0.5)


def submit(name: str) -> str:
    options = (
        "-N2",
        "-n2",
        "-c1",
        "--mem=900",
        "--vhpc-image=debian-minimal",
        f"--output=/home/alice/{name}",
    )
    return on("login", "sbatch", "--parsable", *options, f"--wrap={SCRIPTS[name]}", user="alice").strip()


def field(job: str, name: str) -> str:
    words = on("ctl", "scontrol", "--oneliner", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)[name]


def is_idle(node: str) -> bool:
    return on("ctl", "sinfo", "--noheader", "-n", node, "-o", "%T").split()[0] == "idle"


def upgrade(host: str) -> None:
    """As apt does: one dpkg for all packages; vhpcd is restarted as its postinst would with systemd."""
    on(host, "dpkg", "--install", *(f"/shared/newer/vhpc-{name}.deb" for name in PACKAGES[host]))
    if host == "ctl":
        run("lab/vlab", "service", "ctl", "restart", "vhpcd", **LAB)


@pytest.fixture(scope="module")
def old() -> Path:
    return previous.packages()


@pytest.fixture(scope="module", params=["controller first", "nodes first"])
def jobs(request: pytest.FixtureRequest, packages: Path, old: Path) -> Iterator[dict[str, str]]:
    """Jobs of an upgraded lab, by name, all of them ended."""
    order = HOSTS if request.param == "controller first" else HOSTS[::-1]
    try:
        run("lab/vlab", "up", "--nodes", "2", "--packages", old, **LAB)
        run("scripts/publish-image", **LAB)
        on("ctl", "mkdir", "-p", "/shared/newer")
        for package in packages.glob("*.deb"):
            stage(package)
        found = {"running": submit("running")}
        until(
            lambda: f"{found['running']}.0" in on("ctl", "squeue", "--steps", "--noheader", "-o", "%i"),
            "step",
        )
        found["booting"] = submit("booting")
        journals = ("find", "/var/lib/vhpc/journal", "-name", f"{found['booting']}.*")
        until(lambda: all(on(node, *journals) for node in ("n1", "n2")), "journal of a job that boots")
        found["pending"] = submit("pending")
        for host in order[:3]:
            upgrade(host)
        found["between"] = submit("between")
        upgrade(order[3])
        on("login", "touch", GO, user="alice")
        until(lambda: not on("ctl", "squeue", "--noheader"), "end of all jobs", 600)
        yield found
    finally:
        run("lab/vlab", "down", **LAB)


def stage(package: Path) -> None:
    """Copy a package of this checkout to where all hosts see it."""
    name = package.name.split("_")[0]
    data = package.read_bytes()
    command = ("lab/vlab", "exec", "ctl", "--", "sh", "-c", f"cat > /shared/newer/{name}.deb")
    subprocess.run(command, cwd=ROOT, env={**os.environ, **LAB}, input=data, check=True, timeout=60)


def test_all_hosts_have_the_newer_packages(jobs: dict[str, str], packages: Path) -> None:
    (common,) = packages.glob("vhpc-common_*.deb")
    wanted = run("dpkg-deb", "-f", common, "Version").strip()
    for host in HOSTS:
        assert on(host, "dpkg-query", "-W", "-f", "${Version} ${db:Status-Status}", "vhpc-common") == (
            f"{wanted} installed"
        )
        assert on(host, "find", "/run", "-maxdepth", "1", "-name", "vhpc-upgrading") == ""


def test_no_job_is_lost_or_started_again(jobs: dict[str, str]) -> None:
    for name, job in jobs.items():
        assert (field(job, "JobState"), field(job, "Restarts"), name) == ("COMPLETED", "0", name)
        # tasks of a step write in any order
        assert sorted(on("login", "cat", f"/home/alice/{name}").splitlines()) == sorted(OUTPUTS[name])


def test_nodes_stay_in_service_and_hold_nothing(jobs: dict[str, str]) -> None:
    for node in ("n1", "n2"):
        until(partial(is_idle, node), f"idle {node}", 60)
        assert on(node, "vhpc", "reconcile", "--check") == f"{node} is clean\n"
        assert on(node, "find", "/run/vhpc/jobs", "/var/lib/vhpc/journal", "-mindepth", "1") == ""


def test_new_jobs_run_after_the_upgrade(jobs: dict[str, str]) -> None:
    words = ("sbatch", "-W", "-N2", "-o", "/home/alice/new", "--vhpc-image=debian-minimal")
    on("login", *words, "--wrap=srun -l hostname", user="alice")
    assert sorted(on("login", "cat", "/home/alice/new").splitlines()) == STEP


def test_the_database_has_the_newer_schema(jobs: dict[str, str]) -> None:
    script = (
        "import sqlite3\ndb = sqlite3.connect('/var/lib/vhpc/vhpcd/leases.sqlite')\n"
        "for row in ('PRAGMA user_version', 'SELECT count(*) FROM lease WHERE state <> \"released\"'):\n"
        "    print(*db.execute(row).fetchone())"
    )
    assert on("ctl", "python3", "-c", script).splitlines() == [str(SCHEMA_VERSION), "0"]


def test_the_old_vhpcd_refuses_a_newer_database(old: Path, tmp_path: Path) -> None:
    (common,) = old.glob("vhpc-common_*.deb")
    run("dpkg-deb", "-x", common, tmp_path / "old")
    database = tmp_path / "leases.sqlite"
    SqliteStore(database).close()
    newer = sqlite3.connect(database)
    newer.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    newer.close()
    before = database.read_bytes()
    script = (
        "from vhpc_slurm.controller.store.database import SqliteStore\n"
        "from vhpc_slurm.errors import VhpcError\n"
        f"try: SqliteStore({str(database)!r})\nexcept VhpcError as err: print(err.line())"
    )
    said = run(sys.executable, "-c", script, PYTHONPATH=str(tmp_path / "old/usr/lib/python3/dist-packages"))
    assert f"it has schema {SCHEMA_VERSION + 1}" in said
    assert "was it downgraded?" in said
    assert database.read_bytes() == before
    shutil.rmtree(tmp_path / "old")
