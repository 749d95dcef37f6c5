# SPDX-License-Identifier: Apache-2.0
"""Sites have Epilogs and programs around tasks of their own, and a private /tmp for each job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import IMAGE, NODES, Job, Lab
from injection import WAITING, let_go, one_line, runs, said, settled, slurm_conf, until

pytestmark = pytest.mark.lab

FOLDER, LOG, PRIVATE = "/opt/site", "/scratch/site.log", "/var/lib/slurm/private"
HOSTS = ("ctl", "login", *NODES)
FOREIGN = '{"class": 7}'
PROGRAMS = {
    "task-prolog": r"""
echo "export SITE_USER=$(id -un)"
echo 'export SITE_QUOTED=a  "b" $HOME ='
echo 'export SITE_EMPTY='
echo 'unset SITE_UNSET'
echo 'print said by the site'
echo 'something else'
""",
    "task-epilog": f'echo "task-epilog $(id -un) $SLURM_NTASKS $SLURM_PROCID" >>{LOG}',
    "srun-prolog": f'echo "srun-prolog $(id -un) $SLURM_NNODES" >>{LOG}',
    "srun-epilog": f'echo "srun-epilog $(id -un) $SLURM_NNODES" >>{LOG}',
    # the example of Slurm's documentation: only after the user's last job on the node
    "epilog-careful": """
/usr/libexec/vhpc/epilog || exit
for job in $(squeue --noheader --format=%A --user="$SLURM_JOB_UID" --nodelist="$SLURMD_NODENAME"); do
    [ "$job" = "$SLURM_JOB_ID" ] || exit 0
done
pkill -KILL -u "$SLURM_JOB_UID"
exit 0
""",
    "epilog-simple": '/usr/libexec/vhpc/epilog || exit\npkill -KILL -u "$SLURM_JOB_UID"\nexit 0',
}
SETTINGS = f"""
s|^TaskProlog=.*|TaskProlog={FOLDER}/task-prolog|
s|^Epilog=.*|Epilog={FOLDER}/epilog|
$a TaskEpilog={FOLDER}/task-epilog
$a SrunProlog={FOLDER}/srun-prolog
$a SrunEpilog={FOLDER}/srun-epilog
$a PropagateResourceLimitsExcept=MEMLOCK,NOFILE
$a JobContainerType=job_container/tmpfs
"""
"""For sed, in the lab's slurm.conf."""
# Linux 6.18 hands out ids of namespaces to each CPU by the thousand, and refuses to hold a mount namespace
# whose id is below that of its holder (EINVAL): after this each CPU has higher ids than slurmd's.
HIGHER_IDS = """
import os
for cpu in os.sched_getaffinity(0):
    if os.fork() == 0:
        os.sched_setaffinity(0, {cpu})
        for _ in range(4096):
            os.unshare(os.CLONE_NEWUTS)
        os._exit(0)
    os.wait()
"""
SCRIPT = """
export SITE_UNSET=here
echo own >/tmp/own
head -c 9 /dev/zero >~/cast.$SLURM_JOB_ID
sbcast ~/cast.$SLURM_JOB_ID /tmp/cast
srun -l sh -c 'env | grep ^SITE_; echo $(ulimit -n) $(ulimit -s) $(stat -c %s /tmp/cast) $TMPDIR' | sort
srun -N1 -n1 -r1 sh -c 'echo there >/tmp/there'
srun -l sh -c 'ls /tmp' | sort
echo ended
"""

SALLOC = "echo own >from-salloc; sbcast from-salloc /tmp/from-salloc; srun cat /tmp/from-salloc"


@pytest.fixture(scope="module")
def site(lab: Lab) -> Iterator[None]:
    """Programs of a site in a slurm.conf that all hosts have."""
    container = f"{lab.slurm_conf.rpartition('/')[0]}/job_container.conf"
    write = "".join(
        f"cat >{FOLDER}/{name} <<'END'\n#!/bin/sh\n{text.strip()}\nEND\n" for name, text in PROGRAMS.items()
    )
    set_it = (
        f"mkdir {FOLDER}; {write}chmod 755 {FOLDER}/*; ln -s epilog-careful {FOLDER}/epilog; touch {LOG}; "
        f"chmod 666 {LOG}; printf 'AutoBasePath=true\\nBasePath={PRIVATE}\\n' >{container}"
    )
    for host in HOSTS:
        lab.run(host, "sh", "-e", stdin=set_it)
    with slurm_conf(lab, SETTINGS, restart=True):
        for node in NODES:
            lab.run(node, "python3", "-", stdin=HIGHER_IDS)
        yield
    for host in HOSTS:
        lab.run(host, "sh", "-c", f"rm -rf {FOLDER} {container} {LOG}")


def log_of(lab: Lab) -> set[str]:
    """Lines of the site's programs, which then begin again: without those of steps that copy a file."""
    lines = lab.run("login", "sh", "-c", f"cat {LOG}; : >{LOG}").out.splitlines()
    return {line for line in lines if not line.endswith("alice ")}


def plain(job: Job) -> list[str]:
    """The job's output without what only guests have."""
    return [line for line in job.output().splitlines() if "vhpc" not in line]


@pytest.mark.promise("site.programs")
def test_programs_around_tasks_and_a_private_tmp(lab: Lab, site: None) -> None:
    options = ("-N2", "-n2", "--chdir=/home/alice")
    inside = lab.finish(SCRIPT, *options)
    inside.leave_queue()
    logged = log_of(lab)
    outside = lab.finish(SCRIPT, *options, image=None)
    outside.leave_queue()
    assert logged == log_of(lab)
    assert len(logged) == 5, logged
    assert plain(inside) == plain(outside)
    text = inside.output()
    assert '0: SITE_QUOTED=a  "b" $HOME =\n' in text, text
    assert "SITE_UNSET" not in text
    assert {"0: cast", "0: own", "1: cast", "1: there", "ended"} <= {*text.splitlines()}, text
    salloc = lab.run("login", "salloc", "-Q", f"--vhpc-image={IMAGE}", "sh", "-c", SALLOC, user="alice")
    assert salloc.out.splitlines() == ["said by the site", "own"], salloc
    assert inside.accounted() == outside.accounted() == ["COMPLETED", "0:0"]
    settled(lab)
    for node in NODES:
        left = lab.run(node, "sh", "-c", f"ls {PRIVATE}/{node}; grep {PRIVATE}/ /proc/mounts", check=False)
        assert left.out == ""


@pytest.mark.promise("daemons.restart")
def test_a_running_step_does_not_notice_scontrol_reconfigure(lab: Lab, site: None) -> None:
    """The job has an AdminComment of another program, as a job_submit plugin sets one."""
    job = lab.submit(f"srun sh -c '{WAITING}'; srun echo another; echo ended", "-n1", "--hold")
    lab.run("ctl", "scontrol", "update", f"JobId={job.id}", f"AdminComment={FOREIGN}")
    lab.run("ctl", "scontrol", "release", str(job.id))
    runs(lab, job)
    copied = lab.run("login", "vhpc", "cp", f"{job.id}:/etc/hostname", "-", user="alice")
    assert copied.out in ("n1\n", "n2\n"), "without the text of the task prolog"
    lab.run("ctl", "scontrol", "reconfigure")
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    assert job.output().splitlines()[-3:] == ["said by the site", "another", "ended"]
    (comment,) = job.accounted("AdminComment")
    assert comment.startswith("vhpc: image ")
    assert comment.endswith(f" // {FOREIGN}")
    # a tool for job statistics then replaces it
    lab.run("ctl", "sacctmgr", "-i", "modify", "job", "where", f"jobid={job.id}", "set", "AdminComment=JS1:x")
    assert "CPU Utilized" in lab.run("login", "vhpc", "seff", str(job.id), user="alice").out
    settled(lab)


@pytest.mark.promise("site.epilog")
def test_an_epilog_that_kills_ends_guests_with_a_line(lab: Lab, site: None) -> None:
    daemons = ("pgrep", "-u", "alice", "-x", "virtiofsd")
    script = f"{WAITING}; srun -N1 -n1 -r1 echo step; echo ended with $?"
    job = lab.submit(script, "-N2", "-n2", "--chdir=/home/alice")
    runs(lab, job)
    assert "up on n1" in said(lab, job)
    other = "n2"
    lab.finish("echo plain", "-w", other, "-n1", image=None).leave_queue()
    assert len(lab.run(other, *daemons).out.split()) >= 2
    lab.run(other, "ln", "-sf", "epilog-simple", f"{FOLDER}/epilog")
    lab.finish("echo plain", "-w", other, "-n1", image=None).leave_queue()
    until(lambda: not lab.run(other, *daemons, check=False).out, "the end of the guest's daemons")
    let_go(lab, job)
    job.wait()
    assert "ended with 125" in job.output()
    one_line(job, rf"the guest of job {job.id} on {other} is gone")
    settled(lab)
