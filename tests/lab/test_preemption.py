# SPDX-License-Identifier: Apache-2.0
"""Jobs that must give way to others: what they are told, and that they come back, with guests and without."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from campaign.findings import step_logs
from campaign.judge import without_processes
from cluster import ENDED, IMAGE, Job, Lab, SlurmRaceError
from injection import ask_again, settled, until
from twins import WHERE, Twins, says

pytestmark = pytest.mark.lab

# Only Slurm ends its first run; script and step print the signals that they get.
SCRIPT = f"""
cd {WHERE}
run=${{SLURM_RESTART_COUNT:-0}}
cat /proc/sys/kernel/random/boot_id > boot-$SLURM_JOB_ID-$run
echo run $run up
[ $run = 0 ] || exit 0
trap 'echo script got CONT' CONT
trap 'echo script got TERM' TERM
srun -Q -n1 -o step-%j python3 ~/same/catch.py & step=$!
until grep -q ready step-$SLURM_JOB_ID; do kill -0 $step || exit; sleep 0.1; done 2>/dev/null
echo step up
while kill -0 $step 2>/dev/null; do wait $step; code=$?; done
echo step ended with $code
# no other process: Slurm, where it does not track processes by cgroups, signals children too
mkfifo fifo-$SLURM_JOB_ID; exec 9<> fifo-$SLURM_JOB_ID
while :; do read -r _ <&9; done
"""


@pytest.fixture
def pair(lab: Lab, probes: None) -> Iterator[Twins]:
    """A job with a guest on n1 and the same job without on n2, both in the partition that gives way."""
    options = ("-p", "spare", "--exclusive", "-n1", "-t", "10", "--requeue", "--open-mode=append")
    twins = Twins(
        lab.submit(SCRIPT, *options, "-w", "n1", image=IMAGE),
        lab.submit(SCRIPT, *options, "-w", "n2", image=None),
    )
    for job in twins:
        says(job, "step up")
    yield twins
    lab.run("ctl", "scontrol", "update", "PartitionName=spare", "PreemptMode=REQUEUE", "GraceTime=0")


def give_way(lab: Lab, pair: Twins) -> None:
    """Let a job of a higher tier need both nodes.

    Raises:
        SlurmRaceError: a node was drained by Slurm's race after jobs that ignore SIGTERM.
    """
    urgent = lab.submit("true", "-p", "urgent", "-N2", "--exclusive", image=None)

    def drained() -> bool:
        return any("Kill task failed" in lab.node_state(node)[1] for node in lab.nodes)

    until(lambda: not urgent.queued() or drained(), f"job {urgent.id} to end", 180)
    for node, log in step_logs(lab, "extern") if urgent.queued() else ():
        if {job.id for job in pair} & set(without_processes(log)):
            lab.resume(node)
            raise SlurmRaceError(f"{node}: an extern step without processes did not end")
    assert urgent.wait("PENDING", *ENDED) == "COMPLETED", urgent.told()


def ends_in_next_run(job: Job) -> None:
    """See a requeued job's next run end; a second requeue would begin with Slurm's pause of two minutes."""

    def over() -> bool:
        show = job.show()
        assert show["Restarts"] == "1", job.told()
        return show["JobState"] in ENDED

    until(over, f"the end of job {job.id}", 180)
    assert job.wait() == "COMPLETED"


def same(twins: Twins) -> list[str]:
    """Signals to script and step: the same in both; the script's lines.

    Two signals that wait at the same time are taken in no promised order, and SIGTERM ends the step. The
    end of srun is chance: where Slurm does not track processes by cgroups it has SIGTERM as well.
    """
    of_srun = re.compile(r"srun: .*|step ended .*|Terminated")
    ours, theirs = (
        sorted(line for line in text.splitlines() if not of_srun.fullmatch(line)) for text in twins.outputs()
    )
    assert ours == theirs
    steps = [set(text.splitlines()) - {"SIGCONT"} for text in twins.outputs("same/step-{id}")]
    assert steps[0] == steps[1]
    assert {"ready", "SIGTERM"} <= steps[0]
    return ours


def runs(lab: Lab, job: Job) -> list[str]:
    """All runs of a job and its steps, as accounting has them."""
    rows: list[str] = []

    def complete() -> bool:
        out = lab.run("ctl", "sacct", "-nPD", "-j", str(job.id), "-o", "JobID,State,ExitCode").out
        rows[:] = [row.replace(str(job.id), "ID", 1) for row in out.splitlines()]
        return not any("RUNNING" in row or "PENDING" in row for row in rows)

    until(complete, f"the accounting of job {job.id}", 30)
    return rows


@pytest.mark.promise("job.preempt")
def test_a_preempted_job_gets_signals_and_runs_in_a_new_guest(lab: Lab, pair: Twins) -> None:
    give_way(lab, pair)
    for job in pair:
        ask_again(lab, job)
    for job in pair:
        ends_in_next_run(job)
    assert {"run 1 up", "script got TERM"} <= set(same(pair))
    assert runs(lab, pair.inside) == runs(lab, pair.outside)
    boots = [lab.read("alice", f"same/boot-{pair.inside.id}-{run}") for run in (0, 1)]
    assert boots[0] != boots[1]
    settled(lab)


@pytest.mark.promise("job.preempt")
def test_a_preempted_job_has_its_grace_time(lab: Lab, pair: Twins) -> None:
    """Its steps are told when it begins, its script when it is over."""
    lab.run("ctl", "scontrol", "update", "PartitionName=spare", "PreemptMode=CANCEL", "GraceTime=8")
    give_way(lab, pair)
    for job in pair:
        assert job.wait("PREEMPTED") == "PREEMPTED"
    assert "script got TERM" in same(pair)
    assert all("step ended with 5" in text for text in pair.outputs())
    assert runs(lab, pair.inside) == runs(lab, pair.outside)
    settled(lab)
