# SPDX-License-Identifier: Apache-2.0
"""A lab with packages is upgraded host by host while jobs run; ``previous`` says from what to what."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import previous
import pytest
from debs import LIMIT_S, ROOT, run, until
from previous import Packages

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.schema import SCHEMA_VERSION

LAB = {"VLAB_STATE": "/run/vhpc-lab-upgrade"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]
HOSTS = ("ctl", "login", "n1", "n2")
PACKAGES = {
    "ctl": ("common", "client", "controller", "image-tools"),
    "login": ("common", "client", "spank-plugin", "image-tools"),
    "n1": ("common", "client", "spank-plugin", "node"),
    "n2": ("common", "client", "spank-plugin", "node"),
}
STATE = "/var/lib/vhpc/vhpcd"
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


def is_free(node: str) -> bool:
    """Whether the last job has ended on the node; for some seconds afterwards its Epilog runs."""
    said = on("ctl", "sinfo", "--noheader", "-n", node, "-o", "%T").split()[0]
    return said == "idle" and on(node, "sh", "-c", "vhpc reconcile --check || true") == f"{node} is clean\n"


def upgrade(host: str) -> None:
    """As apt does: one dpkg for all packages; vhpcd is restarted as its postinst would with systemd."""
    on(host, "dpkg", "--install", *(f"/shared/newer/vhpc-{name}.deb" for name in PACKAGES[host]))
    if host == "ctl":
        run("lab/vlab", "service", "ctl", "restart", "vhpcd", **LAB)


@pytest.fixture(scope="module")
def old(packages: Path) -> Packages:
    return previous.older(packages)


@pytest.fixture(scope="module")
def new(packages: Path, old: Packages) -> Packages:
    return previous.newer(packages, old)


@pytest.fixture(scope="module", params=["controller first", "nodes first"])
def jobs(request: pytest.FixtureRequest, new: Packages, old: Packages) -> Iterator[dict[str, str]]:
    """Jobs of an upgraded lab, by name, all of them ended."""
    order = HOSTS if request.param == "controller first" else HOSTS[::-1]
    try:
        run("lab/vlab", "up", "--nodes", "2", "--packages", old.folder, **LAB)
        run("scripts/publish-image", **LAB)
        on("ctl", "mkdir", "-p", "/shared/newer")
        for package in new.folder.glob("*.deb"):
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
    """Copy a newer package to where all hosts see it."""
    name = package.name.split("_")[0]
    data = package.read_bytes()
    command = ("lab/vlab", "exec", "ctl", "--", "sh", "-c", f"cat > /shared/newer/{name}.deb")
    subprocess.run(command, cwd=ROOT, env={**os.environ, **LAB}, input=data, check=True, timeout=60)


def test_all_hosts_have_the_newer_packages(jobs: dict[str, str], new: Packages) -> None:
    (common,) = new.folder.glob("vhpc-common_*.deb")
    wanted = run("dpkg-deb", "-f", common, "Version").strip()
    for host in HOSTS:
        assert on(host, "dpkg-query", "-W", "-f", "${Version} ${db:Status-Status}", "vhpc-common") == (
            f"{wanted} installed"
        )
        assert on(host, "find", "/run", "-maxdepth", "1", "-name", "vhpc-upgrading") == ""


@pytest.mark.promise("upgrade.order")
def test_no_job_is_lost_or_started_again(jobs: dict[str, str]) -> None:
    for name, job in jobs.items():
        assert (field(job, "JobState"), field(job, "Restarts"), name) == ("COMPLETED", "0", name)
        # tasks of a step write in any order
        assert sorted(on("login", "cat", f"/home/alice/{name}").splitlines()) == sorted(OUTPUTS[name])


@pytest.mark.promise("upgrade.order")
def test_nodes_stay_in_service_and_hold_nothing(jobs: dict[str, str]) -> None:
    for node in ("n1", "n2"):
        until(partial(is_free, node), f"idle and clean {node}", 120)
        assert on(node, "find", "/run/vhpc/jobs", "/var/lib/vhpc/journal", "-mindepth", "1") == ""


@pytest.mark.promise("upgrade.order")
def test_new_jobs_run_after_the_upgrade(jobs: dict[str, str]) -> None:
    words = ("sbatch", "-W", "-N2", "-o", "/home/alice/new", "--vhpc-image=debian-minimal")
    on("login", *words, "--wrap=srun -l hostname", user="alice")
    assert sorted(on("login", "cat", "/home/alice/new").splitlines()) == STEP


def database(name: str, *questions: str) -> list[str]:
    """Answers of a database file in vhpcd's folder."""
    script = (
        "import sqlite3, sys\ndb = sqlite3.connect(f'file:{sys.argv[1]}?mode=ro', uri=True)\n"
        "for question in sys.argv[2:]:\n    print(*db.execute(question).fetchone())"
    )
    return on("ctl", "python3", "-c", script, f"{STATE}/{name}", *questions).splitlines()


@pytest.mark.promise("db.versions")
def test_the_database_is_migrated_and_holds_no_lease(jobs: dict[str, str], new: Packages) -> None:
    live = "SELECT count(*) FROM lease WHERE state <> 'released'"
    assert database("leases.sqlite", "PRAGMA user_version", live) == [str(new.schema), "0"]


@pytest.mark.promise("db.versions")
def test_the_older_database_is_kept_with_its_leases(jobs: dict[str, str], old: Packages) -> None:
    (name,) = on("ctl", "find", STATE, "-name", "leases.sqlite.schema-*", "-printf", "%f\n").split()
    assert name == f"leases.sqlite.schema-{old.schema}"
    live = "SELECT count(*) FROM lease WHERE state = 'ready'"
    version, ready = database(name, "PRAGMA user_version", live)
    # the job that ran when vhpcd was upgraded, and perhaps the one that booted
    assert (version, int(ready) >= 1) == (str(old.schema), True)


@pytest.mark.promise("db.versions")
def test_the_old_vhpcd_refuses_a_newer_database(old: Packages, tmp_path: Path) -> None:
    (common,) = old.folder.glob("vhpc-common_*.deb")
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
