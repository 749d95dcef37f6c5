# SPDX-License-Identifier: Apache-2.0
"""A change of an array's element, or of a heterogeneous job's component, changes no other.

The last element of an array to start has the array's own id, and to Slurm's
commands that number means all elements.  Hooks on nodes are told this number
and no other: there is no SLURM_ARRAY_TASK_ID in the environment of a Prolog.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from cluster import IMAGE, Lab
from injection import settled, start_soon, until

pytestmark = pytest.mark.lab

WAIT = "echo up; until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.2; done; echo done"
COMMENT = re.compile(r" AdminComment=(.*?) +(?:Comment|SystemComment|StdErr)=")
# vhpc's own port to Slurm, as vhpcd and the hooks use it: ACT JOBID [TEXT]
PORT = textwrap.dedent("""
    import sys
    from vhpc_slurm.config import load
    from vhpc_slurm.slurm import connect

    slurm, (act, job_id, *text) = connect(load()), sys.argv[1:]
    getattr(slurm, act)(int(job_id), *text)
""")


@dataclass(frozen=True)
class Part:
    """An element or a component as squeue and scontrol show it."""

    job_id: int
    state: str
    restarts: int
    comment: str


class Whole:
    """An array or a heterogeneous job."""

    def __init__(self, lab: Lab, script: str, *options: str) -> None:
        done = lab.run(
            "login", "sbatch", "--parsable", *options, user="alice", stdin=f"#!/bin/sh\n{script}\n"
        )
        self.lab, self.id = lab, int(done.out)

    def parts(self) -> dict[int, Part]:
        """By task of an array or offset of a component; those that have not started are none."""
        found = {}
        done = self.lab.run("ctl", "scontrol", "-o", "show", "job", str(self.id), check=False)
        for line in done.out.splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            number = fields.get("HetJobOffset", fields.get("ArrayTaskId", ""))
            if number.isdecimal():
                (comment,) = COMMENT.findall(line) or [""]
                found[int(number)] = Part(
                    int(fields["JobId"]), fields["JobState"], int(fields["Restarts"]), comment
                )
        return found

    def run(self, number: int) -> None:
        """Let an element start that was held, and wait until it runs."""
        self.lab.run("ctl", "scontrol", "release", f"{self.id}_{number}")
        self.runs(number)

    def runs(self, number: int) -> None:
        """Wait until the script of a part says that it runs."""
        what = f"{self.id} part {number} to run: {self.parts()}"
        until(lambda: "up" in self.said(number), what, 240)

    def said(self, number: int) -> str:
        part = self.parts().get(number)
        name = f"/home/alice/slurm-{self.id}_{number}.out"
        return self.lab.run("login", "cat", name, check=False).out if part else ""

    def state(self, number: int, *states: str) -> None:
        """Wait until a part is in one of these states."""
        until(lambda: self.parts()[number].state in states, f"{self.id} part {number} to be {states}", 180)

    def end(self) -> None:
        """Let all scripts end that wait."""
        names = " ".join(f"/home/alice/go-{part.job_id}" for part in self.parts().values())
        self.lab.run("login", "sh", "-c", f"touch {names}", user="alice")


def ask(lab: Lab, act: str, job_id: int, *text: str) -> None:
    """As vhpcd would: it may requeue and cancel; as root, who alone may comment."""
    lab.run("ctl", "/opt/vhpc/bin/python", "-", act, str(job_id), *text, stdin=PORT)


@contextmanager
def without_vhpcd(lab: Lab, node: str) -> Iterator[None]:
    """A node whose Prologs find no vhpcd, while slurmctld's does."""
    lab.run(node, "cp", "/etc/vhpc/vhpc.toml", "/etc/vhpc/vhpc.toml.kept")
    nobody = 's/^host = .*/host = "127.0.0.1"\\nrequest_timeout_s = 1\\nlease_wait_s = 1/'
    lab.run(node, "sed", "-i", nobody, "/etc/vhpc/vhpc.toml")
    try:
        yield
    finally:
        lab.run(node, "mv", "/etc/vhpc/vhpc.toml.kept", "/etc/vhpc/vhpc.toml")


@pytest.fixture
def array(lab: Lab) -> Iterator[Whole]:
    """Three elements that run, without guests: the last one has the array's own id."""
    found = Whole(lab, "echo up; sleep 300", "--array=0-2", "-n1", "--mem=50")
    for number in range(3):
        found.runs(number)
    yield found
    lab.run("ctl", "scancel", str(found.id))
    lab.quiet()


@pytest.fixture
def het(lab: Lab) -> Iterator[Whole]:
    """Two components that run, without guests."""
    script = "#SBATCH -n1 --mem=50 -o /dev/null\n#SBATCH hetjob\n#SBATCH -n1 --mem=60\nsleep 300"
    found = Whole(lab, script)
    for number in range(2):
        until(found.parts, "two components")
        found.state(number, "RUNNING")
    yield found
    lab.run("ctl", "scancel", str(found.id))
    lab.quiet()


@pytest.mark.promise("array.element")
def test_the_element_with_the_array_id_is_requeued_alone(lab: Lab, array: Whole) -> None:
    (own,) = [number for number, part in array.parts().items() if part.job_id == array.id]
    ask(lab, "requeue", array.id)
    until(lambda: array.parts()[own].restarts == 1, "the element to be requeued")
    array.state(own, "PENDING", "COMPLETING")
    assert {number: part.restarts for number, part in array.parts().items()} == {
        number: int(number == own) for number in range(3)
    }


@pytest.mark.promise("array.element")
def test_the_element_with_the_array_id_is_cancelled_alone(lab: Lab, array: Whole) -> None:
    (own,) = [number for number, part in array.parts().items() if part.job_id == array.id]
    ask(lab, "cancel", array.id)
    array.state(own, "CANCELLED")
    others = [part.state for number, part in array.parts().items() if number != own]
    assert others == ["RUNNING", "RUNNING"]


@pytest.mark.promise("array.element")
def test_each_element_has_a_comment_of_its_own(lab: Lab, array: Whole) -> None:
    for part in array.parts().values():
        ask(lab, "set_admin_comment", part.job_id, f"for {part.job_id}")
    # the array's own id last, so that it would be everybody's
    ask(lab, "set_admin_comment", array.id, "for the last")
    said = {part.job_id: part.comment for part in array.parts().values()}
    assert said == {number: f"for {number}" for number in said if number != array.id} | {
        array.id: "for the last"
    }


def test_a_het_component_has_its_own_comment_and_shares_the_end(lab: Lab, het: Whole) -> None:
    first, second = (part.job_id for part in het.parts().values())
    ask(lab, "set_admin_comment", second, "second")
    ask(lab, "set_admin_comment", first, "first")
    assert [part.comment for part in het.parts().values()] == ["first", "second"]
    ask(lab, "requeue", second)  # which Slurm refuses to do to one of them
    until(lambda: {part.restarts for part in het.parts().values()} == {1}, "both to be requeued")
    ask(lab, "cancel", second)
    until(lambda: {part.state for part in het.parts().values()} == {"CANCELLED"}, "both to be cancelled")


@pytest.mark.promise("array.element")
def test_a_prolog_without_vhpcd_requeues_only_its_element(lab: Lab) -> None:
    array = Whole(lab, WAIT, "--array=0-1", "-H", "-n1", "-w", "n1", f"--vhpc-image={IMAGE}")
    array.run(0)
    with without_vhpcd(lab, "n1"):
        lab.run("ctl", "scontrol", "release", f"{array.id}_1")
        until(lambda: array.parts().get(1, Part(0, "", 0, "")).restarts == 1, "element 1 to be requeued", 180)
    sibling, own = array.parts()[0], array.parts()[1]
    assert own.job_id == array.id
    assert (sibling.state, sibling.restarts) == ("RUNNING", 0)
    array.state(1, "PENDING")
    start_soon(lab, f"{array.id}_1")
    array.runs(1)
    array.end()
    settled(lab)  # with no node drained
    assert [array.said(number) for number in range(2)] == ["up\ndone\n", "up\ndone\n"]


def test_a_refusal_of_one_element_is_not_in_others_comments(lab: Lab) -> None:
    """The image's name goes away before the last element starts."""
    catalog = lab.vhpc("ctl", "config")["images"]["catalog"]
    lab.run("ctl", "cp", "-r", f"{catalog}/names/{IMAGE}", f"{catalog}/names/test-array")
    try:
        array = Whole(lab, WAIT, "--array=0-1", "-H", "-n1", "-w", "n1", "--vhpc-image=test-array")
        array.run(0)
    finally:
        lab.run("ctl", "rm", "-r", f"{catalog}/names/test-array")
    lab.run("ctl", "scontrol", "release", f"{array.id}_1")
    until(lambda: array.parts().get(1, Part(0, "", 0, "")).state == "FAILED", "element 1 to fail", 180)
    sibling, own = array.parts()[0], array.parts()[1]
    assert own.job_id == array.id
    assert "image test-array:latest is unknown" in own.comment
    assert sibling.state == "RUNNING"
    assert re.fullmatch(r"vhpc: image test-array:latest@sha256:[0-9a-f]{64}", sibling.comment)
    array.end()
    settled(lab)
    assert array.said(0) == "up\ndone\n"


@pytest.mark.promise("attack.reconcile-name")
def test_an_element_with_a_forged_name_is_cancelled_alone(lab: Lab) -> None:
    array = Whole(lab, WAIT, "--array=0-1", "-H", "-n1", "-w", "n1", f"--vhpc-image={IMAGE}")
    array.run(0)
    name = "x UserId=root(0) GroupId=root(0) MCS_label=N/A MinCPUsNode=1"
    lab.run("login", "scontrol", "update", f"JobId={array.id}_1", f"JobName={name}", user="alice")
    lab.run("ctl", "scontrol", "release", f"{array.id}_1")
    cancelled = ["sacct", "-nXP", "-j", f"{array.id}_1", "-o", "State,AdminComment"]
    until(lambda: "CANCELLED" in lab.run("ctl", *cancelled).out, "element 1 to be cancelled", 180)
    assert "looks like fields of scontrol" in lab.run("ctl", *cancelled).out
    assert array.parts()[0].state == "RUNNING"
    array.end()
    settled(lab)
    assert array.said(0) == "up\ndone\n"


@pytest.mark.promise("array.element")
def test_a_het_component_without_vhpcd_requeues_the_whole_job(lab: Lab) -> None:
    option = f"#SBATCH --vhpc-image={IMAGE} -n1 -w"
    script = f"{option} n1\n#SBATCH -o slurm-%A_0.out\n#SBATCH hetjob\n{option} n2\n{WAIT}"
    with without_vhpcd(lab, "n2"):
        het = Whole(lab, script)
        until(lambda: {part.restarts for part in het.parts().values()} == {1}, "both to be requeued", 240)
    het.state(0, "PENDING")
    start_soon(lab, het.id)
    until(
        lambda: "up" in lab.run("login", "cat", f"/home/alice/slurm-{het.id}_0.out", check=False).out,
        f"job {het.id} to run",
        240,
    )
    het.end()
    settled(lab)
    assert lab.read("alice", f"slurm-{het.id}_0.out") == "up\ndone\n"
