# SPDX-License-Identifier: Apache-2.0
"""The ready barrier, host files and ssh of jobs with a network, and what goes wrong with them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster import NODES, Job, Lab, publish
from injection import (
    ask_again,
    in_boot,
    kill_qemu,
    let_go,
    ours,
    paused,
    qemu_killer,
    runs,
    said,
    settled,
    until,
    waits,
)

pytestmark = pytest.mark.lab

JOB = "--vhpc-network=job"
PORT = 7634
SSH_IMAGE = "debian-hpc"


@contextmanager
def cut(lab: Lab, node: str) -> Iterator[None]:
    """Nothing of any job network arrives at a node; all other traffic does."""
    chain = "add chain inet cut input { type filter hook input priority -300; }"
    rules = f"add table inet cut; {chain}; add rule inet cut input udp dport {PORT} drop"
    lab.run(node, "nft", rules)
    try:
        yield
    finally:
        lab.run(node, "nft", "delete table inet cut")


def logged(lab: Lab, node: str, job: Job) -> list[str]:
    """Lines of the hooks' log about a job."""
    out = lab.run(node, "cat", "/var/log/vhpc/hooks.log", check=False).out
    return [line for line in out.splitlines() if f"job {job.id}:" in line]


# --- jobs that start --------------------------------------------------------------------------------


@pytest.mark.promise("net.barrier")
def test_the_script_starts_when_all_guests_answer(lab: Lab) -> None:
    job = lab.submit("echo up; ping -c1 -W20 -M do -s 1400 n2 | grep -c ' 0% '", "-N2", JOB)
    paused(lab, job, "n2")
    waits(lab, job, "n1")
    time.sleep(3)
    assert said(lab, job) == "", "the script has started before n2's guest was ready"
    kill_qemu(lab, job, "n2", "CONT")
    assert job.wait() == "COMPLETED"
    assert job.output() == "up\n1\n"
    lines = {one["node"]: one["stages"] for one in lab.vhpc("ctl", "timeline", str(job.id))["nodes"]}
    took = {node: [s["took_s"] for s in lines[node] if s["name"] == "barrier"] for node in NODES}
    assert took["n1"][0] > 3.0, took
    print("seconds at the barrier:", took)


@pytest.mark.promise("net.barrier")
def test_the_first_step_of_an_allocation_waits_too(lab: Lab) -> None:
    script = "ping -c1 -W20 $(echo $VHPC_NODELIST | cut -d, -f$((2 - SLURM_NODEID))) | grep -c ' 0% '"
    for command in (("srun",), ("salloc", "srun")):
        options = ("-N2", "--vhpc-image=debian-minimal", JOB)
        words = (*command[:1], *options, *command[1:], "sh", "-c", script)
        done = lab.run("login", *words, user="alice", timeout=180)
        assert done.out == "1\n1\n", done


@pytest.mark.promise("net.ssh")
def test_host_files_name_all_guests_and_their_cpus(lab: Lab) -> None:
    job = lab.finish(
        "echo $VHPC_HOSTFILE $VHPC_MACHINEFILE; cat $VHPC_HOSTFILE $VHPC_MACHINEFILE; nproc\n"
        "srun -n4 --ntasks-per-node=2 cat $VHPC_HOSTFILE | sort | uniq -c | tr -s ' '",
        "-N2",
        "--ntasks-per-node=2",
        "--vhpc-guests-per-node=2",
        JOB,
    )
    names = [f"{node}-g{index}" for node in NODES for index in (0, 1)]
    first, *lines = job.output().splitlines()
    cpus = int(lines[8])
    assert first == "/run/vhpc/hostfile /run/vhpc/machinefile"
    assert lines[:4] == [f"{name} slots={cpus}" for name in names]
    assert lines[4:8] == [f"{name}:{cpus}" for name in names]
    assert lines[9:] == [f" 4 {name} slots={cpus}" for name in names], "each guest has the file"


@pytest.mark.promise("net.ssh")
def test_an_image_without_ssh_has_no_keys_and_no_port(lab: Lab) -> None:
    job = lab.finish("ls /run/vhpc; ls /etc/ssh 2>&1; ss -Hltn", "-N2", JOB)
    assert "ssh" not in job.output().replace("'/etc/ssh'", ""), job.output()
    assert ":22" not in job.output()


# --- jobs that cannot start -------------------------------------------------------------------------


@pytest.mark.promise("net.barrier-fails")
def test_a_guest_that_does_not_come_up_fails_the_whole_job(lab: Lab) -> None:
    """The script does not start on the first node, whose own guest is well."""
    job = lab.submit("echo up", "-N2", JOB)
    in_boot(lab, job, "n2", qemu_killer(job))
    assert job.wait() == "FAILED"
    (line,) = ours(job.output())
    assert re.match(r"vhpc: node n2: the guest ended on n2 while image .* booted", line), line
    assert "up" not in job.output().splitlines()
    settled(lab)


@pytest.mark.promise("net.barrier-fails")
def test_one_of_four_guests_that_does_not_come_up_is_named(lab: Lab) -> None:
    """The second guest of the second node; none of the other three is left."""
    four = ("-N2", "--ntasks-per-node=2", "--vhpc-guests-per-node=2", "--mem=1400", JOB)
    job = lab.submit("echo up", *four)
    # a shim is started when all guests of its node have been
    in_boot(lab, job, "n2", qemu_killer(job, guest="-g1"), sign="pgrep -x vhpc-shim >/dev/null")
    assert job.wait() == "FAILED"
    (line,) = ours(job.output())
    assert re.match(r"vhpc: node n2: the guest ended on n2 \(guest n2-g1\) while image .* booted", line), line
    assert "up" not in job.output().splitlines()
    settled(lab)


@pytest.mark.promise("net.barrier-fails")
@pytest.mark.parametrize("node", [pytest.param("n1", marks=pytest.mark.slow), "n2"])
def test_a_cut_underlay_names_the_pair_and_drains_no_node(lab: Lab, node: str) -> None:
    """A job that may not be requeued shows the line to its user."""
    with cut(lab, node):
        job = lab.submit("echo up", "-N2", "--no-requeue", JOB)
        assert job.wait(timeout=240) == "FAILED"
    (line,) = ours(job.output())
    assert re.search(
        r"guest (n1 on n1 does not reach guest n2 on n2|n2 on n2 does not reach guest n1 on n1) "
        rf"with packets of \d+ bytes: .*: no answer.*UDP port {PORT} between 10\.77\.0\.1[12] and 10\.77",
        line,
    ), line
    assert "up" not in job.output().splitlines()
    settled(lab)


@pytest.mark.promise("net.barrier-fails")
def test_a_job_starts_again_when_the_underlay_is_repaired(lab: Lab) -> None:
    with cut(lab, "n2"):
        job = lab.submit("echo up; ping -c1 -W20 n2 | grep -c ' 0% '", "-N2", "--requeue", JOB)
        until(lambda: job.show()["Restarts"] == "1", "the job to be requeued", 240)
        lines = [line for node in NODES for line in logged(lab, node, job)]
        assert any("does not reach guest" in line and "requeueing" in line for line in lines), lines
    assert said(lab, job) == ""
    ask_again(lab, job)
    assert job.wait(timeout=300) == "COMPLETED"
    assert job.output() == "up\n1\n"
    settled(lab)


@pytest.mark.promise("attack.echo")
def test_a_user_who_breaks_the_own_network_fails_one_job(lab: Lab) -> None:
    """Root of a guest drops echo requests before the other guest is ready."""
    job = lab.submit("echo up", "-N2", "--no-requeue", JOB)
    paused(lab, job, "n1")
    waits(lab, job, "n2")
    drop = "echo 1 > /proc/sys/net/ipv4/icmp_echo_ignore_all"
    socket = f"/run/vhpc/jobs/{job.id}/g0/run.sock"
    run = ("/usr/libexec/vhpc/vhpc-run", "--socket", socket, "--", "sudo", "sh", "-c", drop)
    lab.run("n2", "sh", "-c", 'cd /; exec "$@"', "sh", *run, user="alice")
    kill_qemu(lab, job, "n1", "CONT")
    assert job.wait(timeout=240) == "FAILED"
    (line,) = ours(job.output())
    assert "guest n1 on n1 does not reach guest n2 on n2" in line, line
    settled(lab)


@pytest.mark.promise("net.barrier-fails")
def test_a_job_that_is_cancelled_at_the_barrier_frees_its_nodes(lab: Lab) -> None:
    job = lab.submit("echo up", "-N2", JOB)
    paused(lab, job, "n2")
    waits(lab, job, "n1")
    lab.run("login", "scancel", str(job.id), user="alice")
    kill_qemu(lab, job, "n2", "CONT")
    assert job.wait() == "CANCELLED"
    assert said(lab, job) == ""
    settled(lab)


@pytest.mark.promise("net.barrier-fails")
def test_vhpcd_may_restart_while_a_job_is_at_the_barrier(lab: Lab) -> None:
    job = lab.submit("echo up", "-N2", JOB)
    paused(lab, job, "n2")
    waits(lab, job, "n1")
    lab.service("ctl", "kill", "vhpcd")
    kill_qemu(lab, job, "n2", "CONT")
    time.sleep(1)
    lab.service("ctl", "start", "vhpcd")
    assert job.wait() == "COMPLETED"
    assert job.output() == "up\n"


# --- ssh --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ssh_image() -> str:
    publish(SSH_IMAGE)
    return SSH_IMAGE


# Slurm 24.11 sets HYDRA_LAUNCHER_EXTRA_ARGS for srun, whatever the launcher is.
MPI = (
    "echo openmpi ssh; mpirun.openmpi --prtemca plm ssh --hostfile $VHPC_HOSTFILE -n 4 hostname | sort\n"
    "echo openmpi srun; mpirun.openmpi -n 4 hostname | sort\n"
    "echo mpich ssh; HYDRA_LAUNCHER_EXTRA_ARGS= mpirun.mpich -launcher ssh -f $VHPC_MACHINEFILE -n 4 hostname"
    " | sort\n"
    "echo mpich srun; mpirun.mpich -launcher slurm -n 4 hostname | sort\n"
)
LAUNCHERS = ("openmpi ssh", "openmpi srun", "mpich ssh", "mpich srun")


@pytest.mark.promise("net.ssh")
@pytest.mark.slow
@pytest.mark.timeout(3900)
def test_ssh_works_between_guests_without_a_question(lab: Lab, ssh_image: str) -> None:
    lab.run("login", "rm", "-rf", "/home/alice/.ssh", user="alice")
    job = lab.finish(
        "for name in n2 n1; do ssh $name 'echo $(hostname) $(id -un) $PWD' </dev/null; done\n"
        "ssh n2 ssh n1 hostname </dev/null\n"
        "echo data > ~/there; scp -q ~/there n2:/tmp/here && ssh n2 cat /tmp/here </dev/null\n"
        "sudo ssh -o BatchMode=yes n2 true </dev/null 2>&1 | grep -o 'Permission denied'\n"
        "ls -d ~/.ssh 2>&1 | grep -c 'No such file'\n"
        "ss -Hltn 'sport = 22' | tr -s ' ' | cut -d' ' -f4 | sort\n"
        "stat -c '%a %U' /run/vhpc/ssh/id_ed25519 /run/vhpc/ssh/host_key; ssh -n n2 ulimit -l\n" + MPI,
        "-N2",
        "--ntasks-per-node=2",
        "--mem=900",
        JOB,
        "--chdir=/home/alice",
        image=ssh_image,
    )
    assert job.output().splitlines() == [
        "n2 alice /home/alice",
        "n1 alice /home/alice",
        "n1",
        "data",
        "Permission denied",
        "1",
        "10.200.0.1:22",
        "[fd76:6870:6300::1]:22",
        "600 alice",
        "600 root",
        "unlimited",
        *(line for name in LAUNCHERS for line in (name, "n1", "n1", "n2", "n2")),
    ], job.output()


@pytest.mark.promise("attack.ssh")
@pytest.mark.slow
@pytest.mark.timeout(3900)
def test_keys_of_another_job_and_users_of_nodes_do_not_get_in(lab: Lab, ssh_image: str) -> None:
    options = ("-N2", "-n2", "--mem=900", JOB)
    wait = "until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.3; done"
    lab.run("login", "sh", "-c", "rm -f /scratch/bobs-key; mkdir -p -m 1777 /scratch", check=False)
    bob = lab.submit(
        f"cp /run/vhpc/ssh/id_ed25519 /scratch/bobs-key; chmod 644 /scratch/bobs-key; echo up; {wait}",
        *options,
        user="bob",
        image=ssh_image,
    )
    runs(lab, bob)
    try:
        known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o IdentitiesOnly=yes"
        alice = lab.submit(
            "cp /scratch/bobs-key /tmp/key; chmod 600 /tmp/key\n"
            f"try='ssh -n -F none {known}'\n"
            "$try -i /tmp/key alice@n2 hostname 2>&1 | grep -o 'Permission denied'\n"
            "$try -i /run/vhpc/ssh/id_ed25519 alice@n2 hostname 2>/dev/null\n"
            f"echo up; {wait}",
            *options,
            image=ssh_image,
        )
        runs(lab, alice)
        assert said(lab, alice) == "Permission denied\nn2\nup\n"
        reach = "exec 3<>/dev/tcp/10.200.0.1/22"
        for host in (*NODES, "login", "ctl"):
            for user in ("root", "alice"):
                done = lab.run(host, "timeout", "3", "bash", "-c", reach, user=user, check=False)
                assert done.code != 0, f"{user} on {host} reached a guest"
        # no node stores a key; in images the words are part of OpenSSH's programs
        find = (
            "grep -rls --exclude-dir=blobs 'OPENSSH PRIVATE KEY' /run/vhpc /var/lib/vhpc /var/log/vhpc /tmp"
        )
        for node in NODES:
            assert lab.run(node, "sh", "-c", f"{find} 2>/dev/null; true").out == ""
        let_go(lab, alice)
        assert alice.wait() == "COMPLETED"
    finally:
        let_go(lab, bob)
        lab.run("login", "rm", "-f", "/scratch/bobs-key")
    assert bob.wait() == "COMPLETED"
