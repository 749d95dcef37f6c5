# SPDX-License-Identifier: Apache-2.0
"""Slurm in /opt with its slurm.conf there: hooks, vhpcd, doctor and guests find it through vhpc.toml alone.

On n1 nothing is left in the usual places, as on a site that builds Slurm
itself.  A lab whose tree has such a Slurm (`vlab up --tree`) is tested as it
is; in other labs the fixture moves Slurm.  On ctl, slurmctld then keeps its own
slurm.conf, and the tests reach the moved commands through /usr/local/bin, which
vhpc never searches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from cluster import Lab
from injection import ask_again, requeued, settled, until

pytestmark = pytest.mark.lab

PREFIX = "/opt/slurm"
COMMANDS = "scontrol squeue sinfo scancel sacctmgr"
TOML = "/etc/vhpc/vhpc.toml"
NODE = "n1"

CONFIGURE = f"""set -e
cp {TOML} {TOML}.kept
sed -i 's|^\\[controller\\]$|&\\nslurm_bin = "{PREFIX}/bin"\\nslurm_conf = "{PREFIX}/etc/slurm.conf"|' {TOML}
grep -q '^slurm_bin' {TOML}
mkdir -p {PREFIX}/bin {PREFIX}/sbin
for command in {COMMANDS}; do mv /usr/bin/$command {PREFIX}/bin/; done
"""
ON_CTL = f"""
cp -a /etc/slurm {PREFIX}/etc
for command in {COMMANDS}; do ln -s {PREFIX}/bin/$command /usr/local/bin/$command; done
"""
ON_NODE = f"""
mv /etc/slurm {PREFIX}/etc
sed -i 's|=/etc/slurm/|={PREFIX}/etc/|' {PREFIX}/etc/slurm.conf
grep -q '^TaskProlog={PREFIX}/etc/' {PREFIX}/etc/slurm.conf
mv /usr/sbin/slurmd {PREFIX}/sbin/slurmd
{{
  echo '#!/bin/sh'
  echo 'exec {PREFIX}/sbin/slurmd -f {PREFIX}/etc/slurm.conf "$@"'
}} > /usr/sbin/slurmd
chmod 755 /usr/sbin/slurmd
"""
# Each line restores one thing and may run again: the fixture may have failed half way.
RESTORE = f"""set -e
[ ! -e {TOML}.kept ] || mv {TOML}.kept {TOML}
for command in {COMMANDS}; do
  [ ! -e {PREFIX}/bin/$command ] || mv {PREFIX}/bin/$command /usr/bin/$command
  [ ! -h /usr/local/bin/$command ] || rm /usr/local/bin/$command
done
[ ! -e {PREFIX}/sbin/slurmd ] || mv {PREFIX}/sbin/slurmd /usr/sbin/slurmd
[ -e /etc/slurm ] || mv {PREFIX}/etc /etc/slurm
sed -i 's|={PREFIX}/etc/|=/etc/slurm/|' /etc/slurm/slurm.conf
rm -rf {PREFIX}
"""


@pytest.fixture
def prefix(lab: Lab) -> Iterator[None]:
    """Slurm's commands, slurmd and slurm.conf of n1, and the commands of ctl, in /opt/slurm."""
    if lab.slurm_conf.startswith(f"{PREFIX}/"):
        yield
        return
    lab.service(NODE, "stop", "slurmd")
    try:
        lab.run(NODE, "sh", "-c", CONFIGURE + ON_NODE)
        lab.run("ctl", "sh", "-c", CONFIGURE + ON_CTL)
        lab.service("ctl", "restart", "vhpcd")
        lab.service(NODE, "start", "slurmd")
        until(lambda: lab.node_state(NODE)[0] == "IDLE", f"{NODE} to be idle", 60)
        yield
    finally:
        for host in (NODE, "ctl"):
            lab.run(host, "sh", "-c", RESTORE)
        lab.service("ctl", "restart", "vhpcd")
        lab.service(NODE, "restart", "slurmd")
        until(lambda: lab.node_state(NODE)[0] == "IDLE", f"{NODE} to be idle again", 60)


@pytest.mark.usefixtures("prefix")
def test_nothing_of_slurm_is_in_the_usual_places(lab: Lab) -> None:
    """The other tests' conditions, and doctor's result about them."""
    usual = "PATH=/usr/local/bin:/usr/bin:/bin; command -v scontrol squeue scancel"
    assert lab.run(NODE, "sh", "-c", usual, check=False).out == ""
    assert lab.run(NODE, "test", "-e", "/etc/slurm", check=False).code == 1
    found = {one["check"]: one for one in lab.vhpc(NODE, "doctor", check=False)}
    assert found["slurm.version"]["level"] == "ok"
    assert "slurm" not in found, "doctor could not ask slurmctld"
    assert found["slurm.plugstack"]["level"] == "ok"
    assert lab.vhpc(NODE, "reconcile", "--check") == []


@pytest.mark.usefixtures("prefix", "no_health_check")  # a health check would drain the node too
def test_prolog_drains_its_node_with_slurm_in_opt(lab: Lab) -> None:
    lab.service(NODE, "kill", "libvirtd")
    lab.service(NODE, "kill", "libvirtd")
    try:
        job = lab.submit("hostname", "-w", NODE)
        until(lambda: "DRAIN" in lab.node_state(NODE)[0], f"{NODE} to be drained")
        # Slurm's own reason would be "Prolog error"
        until(lambda: re.search(r"vhpc: .*libvirt", lab.node_state(NODE)[1]), "the reason of vhpc", 10)
    finally:
        lab.service(NODE, "start", "libvirtd")
        lab.resume(NODE)
    lab.run("ctl", "scontrol", "release", str(job.id))
    ask_again(lab, job)
    assert job.wait(timeout=200) == "COMPLETED"
    assert job.output() == f"{NODE}\n"
    settled(lab)


@pytest.mark.usefixtures("prefix")
def test_prolog_requeues_its_job_with_slurm_in_opt(lab: Lab) -> None:
    lab.service("ctl", "stop", "vhpcd")
    try:
        job = lab.submit("hostname", "-w", NODE)
        until(lambda: requeued(job), "the job to be requeued")
        assert "DRAIN" not in lab.node_state(NODE)[0]
    finally:
        lab.service("ctl", "start", "vhpcd")
    ask_again(lab, job)
    assert job.wait(timeout=300) == "COMPLETED"
    assert job.output() == f"{NODE}\n"
    settled(lab)


@pytest.mark.usefixtures("prefix")
def test_a_refused_job_gets_its_admin_comment_with_slurm_in_opt(lab: Lab) -> None:
    job = lab.finish("true", "-w", NODE, image="no-such-image")
    assert "AdminComment=vhpc: " in lab.run("ctl", "scontrol", "show", "job", str(job.id)).out
    assert job.show()["JobState"] == "FAILED"
    settled(lab)


@pytest.mark.usefixtures("prefix")
def test_programs_in_guests_run_commands_of_slurm_in_opt(lab: Lab) -> None:
    """Also where PATH does not name the folder: vhpc knows it."""
    job = lab.finish(
        "PATH=/usr/bin:/bin; squeue --noheader --jobs=$SLURM_JOB_ID --format='%i %T'", "-w", NODE
    )
    assert job.output() == f"{job.id} RUNNING\n"
    settled(lab)
