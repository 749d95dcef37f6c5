# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a shared folder: jobs mount them from a disk, and keep the one that they have started with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Lab
from injection import output_meets, until
from saving import checkpoint, checkpoints_on

pytestmark = pytest.mark.lab

NODE, CATALOGUE_HOST, TOML = "n1", "ctl", "/etc/vhpc/vhpc.toml"
TREE = "/shared/software"
SCRIPT = f"""
echo "type $(findmnt -n -o FSTYPE,OPTIONS --target {TREE}/bin)"
echo "owner $(stat -c '%U %a' {TREE}/bin/tool)"
{TREE}/bin/tool
(flock 9 && echo locked) 9<{TREE}/bin/tool
touch {TREE}/mine 2>&1 || echo read-only
ls {TREE}/licence 2>&1 >/dev/null || echo no-licence
echo "bound $(cat /mnt/bin/version)"
srun --bcast=/tmp/tool {TREE}/bin/tool
: > ~/snapshot.looked
until [ -e ~/snapshot.go ]; do sleep 0.2; done
echo "later $({TREE}/bin/tool)"
"""
AGAIN = f'echo "type $(findmnt -n -o FSTYPE --target {TREE}/bin)"; {TREE}/bin/tool'


def snapshot(lab: Lab, *options: str, code: int = 0) -> str:
    done = lab.run(CATALOGUE_HOST, "vhpc", "share", "snapshot", TREE, *options, check=False)
    assert done.code == code, done.err
    return done.out + done.err


def version(lab: Lab, text: str) -> None:
    tool = f"printf '#!/bin/sh\\necho {text}\\n' >{TREE}/bin/tool; echo {text} >{TREE}/bin/version"
    lab.run(CATALOGUE_HOST, "sh", "-c", f"{tool}; chmod -R a+rX {TREE}/bin; chmod 755 {TREE}/bin/tool")


@pytest.fixture(scope="module")
def software(lab: Lab) -> Iterator[None]:
    """A software tree with a file that not all users can read; the node may mount its snapshot."""
    lab.run(
        CATALOGUE_HOST, "sh", "-c", f"mkdir -p {TREE}/bin; echo key >{TREE}/licence; chmod 600 {TREE}/licence"
    )
    version(lab, "old")
    keys = f'site = ["/scratch", "{TREE}"]\\nread_only = ["{TREE}"]\\nsnapshots = ["{TREE}"]'
    for host in (NODE, CATALOGUE_HOST):
        lab.run(host, "cp", TOML, f"{TOML}.kept")
        lab.run(host, "sed", "-i", f"s|^site = .*|{keys}|", TOML)
    try:
        yield
    finally:
        for host in (NODE, CATALOGUE_HOST):
            lab.run(host, "mv", f"{TOML}.kept", TOML)
        lab.run(CATALOGUE_HOST, "sh", "-c", f"rm -rf {TREE} /shared/vhpc/catalog/snapshots")
        lab.run("login", "sh", "-c", "rm -f /home/alice/snapshot.*")


@pytest.mark.usefixtures("software")
@pytest.mark.promise("shares.snapshots", "attack.snapshot")
def test_jobs_mount_the_snapshot_they_have_started_with(lab: Lab) -> None:
    assert "not all users can read what a guest's root could read then: licence" in snapshot(lab, code=1)
    assert f"{TREE}: " in snapshot(lab, "--exclude=licence")
    assert f"guests mount {TREE} as it was on " in lab.run(NODE, "vhpc", "doctor", check=False).out
    job = lab.submit(SCRIPT, "-w", NODE, f"--vhpc-mount={TREE}:/mnt")
    until(
        lambda: lab.run("login", "ls", "/home/alice/snapshot.looked", check=False).code == 0, "the guest", 300
    )
    version(lab, "new")
    snapshot(lab, "--exclude=licence", "--keep-days=0")
    lab.run("login", "touch", "/home/alice/snapshot.go")
    job.wait("COMPLETED", "FAILED")
    lines = job.output().splitlines()
    assert lines[0].split()[:2] == ["type", "erofs"]
    assert {"ro", "nosuid", "nodev"} <= set(lines[0].split()[2].split(","))
    assert lines[1:4] == ["owner root 755", "old", "locked"]
    assert "read-only" in lines
    assert "no-licence" in lines
    assert "bound old" in lines
    assert lines[-2:] == ["old", "later old"]  # the bcast, and after the refresh, although the file is gone

    second = lab.submit(AGAIN, "-w", NODE)
    second.wait("COMPLETED", "FAILED")
    assert second.output().splitlines() == ["type erofs", "new"]
    assert lab.leaks() == []


@pytest.mark.usefixtures("software")
@pytest.mark.promise("shares.snapshot-resume")
def test_a_resumed_job_has_the_snapshot_it_was_saved_with(lab: Lab) -> None:
    version(lab, "before")
    snapshot(lab, "--exclude=licence")
    loop = f"while sleep 0.3; do {TREE}/bin/tool; [ ! -e ~/snapshot.go ] || exit 0; done"
    lab.run("login", "rm", "-f", "/home/alice/snapshot.go")
    with checkpoints_on(lab):
        job = lab.submit(loop, "-w", NODE, "-n1", "--mem=600")
        output_meets(job, lambda text: "before" in text, "the job to run", 240)
        checkpoint(lab, str(job.id), "--stop", "--name", "with-snapshot")
        job.leave_queue()
        version(lab, "after")
        snapshot(lab, "--exclude=licence")
        lab.run("login", "touch", "/home/alice/snapshot.go")
        resume = ("-w", NODE, "-n1", "--mem=600", "--vhpc-resume=with-snapshot")
        second = lab.submit("echo never", *resume, image=None)
        assert second.wait("COMPLETED", "FAILED", timeout=300) == "COMPLETED"
        assert set(second.output().split()) == {"before"}
        # the file of the saved job's snapshot is removed: a resumed job would read other blocks
        snapshot(lab, "--exclude=licence", "--keep-days=0")
        third = lab.submit("echo never", *resume, image=None)
        third.wait("COMPLETED", "FAILED", timeout=300)
        assert "which is not there any more (resume a later checkpoint" in third.output()
    assert lab.leaks() == []


@pytest.mark.usefixtures("software")
@pytest.mark.promise("shares.snapshots")
def test_a_damaged_snapshot_fails_no_job(lab: Lab) -> None:
    snapshot(lab, "--exclude=licence")
    lab.run(CATALOGUE_HOST, "sh", "-c", "rm -f /shared/vhpc/catalog/snapshots/*.erofs")
    job = lab.submit(AGAIN, "-w", NODE)
    job.wait("COMPLETED", "FAILED")
    assert job.output().splitlines()[0] == "type virtiofs"
    assert "through virtiofsd" in lab.run(NODE, "vhpc", "doctor", check=False).out
