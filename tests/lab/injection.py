# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tests of faults: waiting for moments in a job's life, and checks after a fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import TypeVar

from cluster import NODES, Job, Lab

import pace

T = TypeVar("T")

ASKED_EVERY = 10
"""Looks at a job's output after which Slurm is asked once whether the job has ended."""
# A script that says that it runs, and ends when its user lets it go.
WAITING = "echo up on $(hostname); until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.2; done; echo done"


def until(condition: Callable[[], T], what: str, timeout: float = 120) -> T:
    """Wait for a condition of the lab to be true; returns what it gave."""
    return pace.until(condition, what, timeout, every=0.2)


def said(lab: Lab, job: Job) -> str:
    """The job's output so far; empty when there is none yet."""
    return lab.run("login", "cat", f"/home/{job.user}/slurm-{job.id}.out", check=False).out


def output_meets(
    job: Job, condition: Callable[[str], T], what: str, timeout: float = 120, name: str = "slurm-{id}.out"
) -> T:
    """Wait until a file of the job's user, by default the job's output, meets a condition; returns its value.

    Raises:
        AssertionError: the job has left the queue before, or the time is over; with the end of the file.
    """
    turns, path, text = count(1), f"/home/{job.user}/{name.format(id=job.id)}", ""

    def met() -> T:
        nonlocal text
        ended = next(turns) % ASKED_EVERY == 0 and left_queue(job)
        text = job.lab.run("login", "cat", path, check=False).out
        found = condition(text)
        assert found or not ended, f"the job has ended without {what}"
        return found

    try:
        return until(met, what, timeout)
    except AssertionError as err:
        raise AssertionError(f"{err}: {job.told()}; {path}: {text[-2000:]}") from err


def left_queue(job: Job) -> bool:
    """Whether Slurm says that the job is in the queue no longer; a slurmctld that is away says nothing."""
    try:
        return not job.queued()
    except AssertionError:
        return False


def prints(job: Job, text: str, timeout: float = 120) -> None:
    """Wait for a text in the job's output, as ``output_meets``."""
    output_meets(job, lambda output: text in output, f"{text!r} of job {job.id}", timeout)


def runs(lab: Lab, job: Job, times: int = 1) -> None:
    """Wait until the job's script says (for the n-th time) that it runs in its guest."""
    output_meets(job, lambda output: output.count("up") >= times, f"job {job.id} to run", 180)


def boots(lab: Lab, job: Job, node: str, what: str = "domain") -> None:
    """Wait until the job's Prolog on a node has announced a resource of that kind in its journal."""
    script = f'cat /var/lib/vhpc/journal/{job.id}.* 2>/dev/null | grep -q \'"kind":"{what}"\''
    until(lambda: lab.run(node, "sh", "-c", script, check=False).code == 0, f"job {job.id} to boot", 180)


def let_go(lab: Lab, job: Job) -> None:
    """Let a WAITING script end."""
    lab.run("login", "touch", f"/home/{job.user}/go-{job.id}", user=job.user)


def admin_comment(lab: Lab, job: Job) -> str:
    shown = lab.run("ctl", "scontrol", "show", "job", str(job.id)).out
    found = re.search(r"^ *AdminComment=(.*?)\s*$", shown, re.M)
    return found[1] if found else ""


def kill_qemu(lab: Lab, job: Job, node: str, signal: str = "KILL") -> None:
    """Signal the QEMU of a job's guest."""
    lab.run(node, "sh", "-c", qemu_killer(job, signal))


def qemu_killer(job: Job, signal: str = "KILL", guest: str = "") -> str:
    """A shell command that signals the QEMU of a job's guest (``-g1``: of that one)."""
    return f"pkill -{signal} -f '^[^ ]*qemu-system.* guest=vhpc-{job.id}-.*{guest},'"


def in_boot(lab: Lab, job: Job, node: str, act: str, sign: str = "") -> None:
    """Run a shell command on a node when libvirt has just started the job's guest, until it succeeds.

    A guest boots in seconds, so the node itself waits: a command of the test may take as long to start.
    ``sign`` is another command that succeeds when it is time.
    """
    started = sign or f"virsh -q list --name --state-running | grep -q '^vhpc-{job.id}-'"
    script = f"for i in $(seq 1500); do {started} && {act} && exit; sleep 0.1; done; exit 1"
    done = lab.run(node, "sh", "-c", script, check=False, timeout=600)
    assert done.code == 0, f"waited in vain for a guest on {node} ({job.told()})"


@contextmanager
def unplugged(lab: Lab, node: str) -> Iterator[float]:
    """The only interface of a node is down since this time; commands reach it through its namespace."""
    try:
        yield float(lab.run(node, "sh", "-ec", "ip link set eth0 down; date +%s.%N").out)
    finally:
        lab.run(node, "ip", "link", "set", "eth0", "up")


@contextmanager
def slurm_conf(lab: Lab, edit: str, *, restart: bool = False) -> Iterator[None]:
    """All hosts have a slurm.conf changed by a sed script (-E); ``restart``: daemons load its plugins."""
    hosts, conf = ("ctl", "login", *NODES), lab.slurm_conf

    def read_again() -> None:
        if not restart:
            lab.run("ctl", "scontrol", "reconfigure")
            return
        for host, unit in (("ctl", "slurmctld"), *((node, "slurmd") for node in NODES)):
            lab.service(host, "restart", unit)
        lab.all_idle()

    try:
        for host in hosts:
            lab.run(host, "sh", "-ec", f'cp {conf} {conf}.kept; sed -E -i "$0" {conf}', edit)
        read_again()
        yield
    finally:
        for host in hosts:
            lab.run(host, "sh", "-c", f"[ ! -e {conf}.kept ] || mv {conf}.kept {conf}")
        read_again()


def silent_nodes_are_down(lab: Lab) -> AbstractContextManager[None]:
    """A slurmctld that takes a silent node for down after 20 s, not 300."""
    return slurm_conf(lab, "$a SlurmdTimeout=20")


def paused(lab: Lab, job: Job, node: str) -> None:
    """Stop the job's QEMU on a node as soon as there is one."""
    in_boot(lab, job, node, qemu_killer(job, "STOP"))


def waits(lab: Lab, job: Job, node: str) -> None:
    """Wait until the job's guest on a node is set up: its Prolog has connected to it for the barrier."""
    script = (
        "import sqlite3\n"
        "db = sqlite3.connect('file:/var/lib/vhpc/vhpcd/leases.sqlite?mode=ro', uri=True)\n"
        "query = 'SELECT node FROM readiness JOIN lease ON lease.id = lease WHERE job_id = ?'\n"
        f"for (node,) in db.execute(query, ({job.id},)): print(node)\n"
    )

    def reported() -> bool:
        said(lab, job)  # has the fault of an emulated guest that does not boot: after the boot timeout
        return node in lab.run("ctl", "python3", "-", stdin=script).out.split()

    until(reported, f"{node} to report its guest", 180)


@contextmanager
def configured(lab: Lab, host: str, table: str, line: str) -> Iterator[None]:
    """A host has a line in a table of its vhpc.toml, in place of the one with the same key, if any."""
    file, key = "/etc/vhpc/vhpc.toml", line.partition("=")[0].strip()
    lab.run(host, "cp", "-p", file, f"{file}.before")
    edit = (
        f"sed -i -e '/^\\[{table}\\]$/,/^\\[/{{/^{key} *=/d}}' -e 's/^\\[{table}\\]$/&\\n{line}/' {file}; "
        f"grep -qx '{line}' {file}"
    )
    try:
        lab.run(host, "sh", "-ec", edit)
        yield
    finally:
        lab.run(host, "mv", f"{file}.before", file)


def ours(text: str) -> list[str]:
    """Our lines of a user's output; Slurm may add its own."""
    return [line for line in text.splitlines() if line.startswith("vhpc")]


def one_line(job: Job, pattern: str) -> None:
    """The job's output has exactly one line of ours, and it says this."""
    lines = ours(job.output())
    assert len(lines) == 1, job.output()
    assert re.search(pattern, lines[0]), lines[0]


def settled(lab: Lab, timeout: float = 120) -> None:
    """Wait until no job is left, the nodes are idle and hold nothing; none was drained."""
    lab.quiet(timeout)

    def idle() -> bool:
        states = {node: lab.node_state(node) for node in NODES}
        assert not any("DRAIN" in state for state, _ in states.values()), states
        return all(state == "IDLE" for state, _ in states.values())

    until(idle, "idle nodes", timeout)
    until(lambda: not lab.leaks(), "clean nodes", timeout)


def ask_again(lab: Lab, job: Job, times: int = 1) -> None:
    """Have a requeued job start soon and not after Slurm's pause, unless the pause is over."""
    await_requeue(job, times)
    start_soon(lab, job.id)


def await_requeue(job: Job, times: int = 1) -> None:
    """Wait until a job was requeued so often, and its run before is over."""
    until(lambda: requeued(job, times), f"requeue {times} of job {job.id}", 180)


def start_soon(lab: Lab, job: int | str) -> None:
    """Have a pending job start in three seconds; one that runs already is left alone.

    Not now: in the second in which a node has revoked the credential of a job's last run it takes that of
    the next one for it, and the job fails (slurmd: "Job credential revoked").
    """
    lab.run("ctl", "scontrol", "update", f"JobId={job}", "StartTime=now+3", check=False)


def requeued(job: Job, times: int = 1) -> bool:
    """Whether a job was requeued and its run before is over: it is pending again, or runs again, or has."""
    show = job.show()
    return show["JobState"] != "COMPLETING" and int(show["Restarts"]) >= times
