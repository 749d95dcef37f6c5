"""Signals, suspension and terminals in jobs with guests, as in the same jobs without."""

from __future__ import annotations

import re

import pytest
from cluster import IMAGE, Lab
from twins import FILES, SOURCES, WHERE, says, submit, until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("probes")]

# On the login node, for a job: each signal, and the line that says that it came.
SEND = r"""
job=$1; shift
cd ~/same
says() {
    for i in $(seq 300); do grep -qxF "$2" $1 2>/dev/null && return; sleep 0.1; done
    echo "job $job: waited in vain for '$2' in $1"; exit 1
}
script=/home/alice/slurm-$job.out
says $script up
for name; do scancel -s $name $job.0; says signals-$job SIG$name; done
for name in USR1 USR2; do scancel -b -s $name $job; says $script "script got $name"; done
scancel -s TSTP $job.1; says $script stopped
scancel -s CONT $job.1; says $script continued
scancel -s TERM $job.0; says $script "step ended with 5"
scancel -s INT $job.1; says $script "other ended with 130"
says $script waiting
scancel -b -s HUP $job
"""


def test_signals_reach_steps_and_scripts_as_without_a_guest(lab: Lab) -> None:
    names = re.findall("[A-Z0-9]+", FILES["catch.py"].split("NAMES = ")[1].split("\n")[0])
    twins = submit(lab, (SOURCES / "signals.job").read_text(), "-n1", "-t 10")
    for job in twins:
        job.wait("RUNNING")
        done = lab.run("login", "bash", "-s", "-", str(job.id), *names, user="alice", stdin=SEND, check=False)
        assert done.code == 0, done
    twins.wait()
    ours, theirs = twins.outputs()
    assert ours == theirs
    assert "script got HUP" in ours, ours
    assert twins.inside.accounted() == twins.outside.accounted() == ["FAILED", "6:0"]
    first, second = twins.outputs("same/signals-{id}")
    assert first == second


def test_the_signal_before_the_time_limit_reaches_the_script_or_its_steps(lab: Lab) -> None:
    script = (SOURCES / "warned.job").read_text()
    to_script, to_step = pairs = [
        submit(lab, script, "-n1", "-t 10", option) for option in ("--signal=B:USR2@300", "--signal=USR2@300")
    ]
    jobs = [job for pair in pairs for job in pair]
    for job in jobs:
        says(job, "up")
    for job in jobs:  # the signal is due now
        lab.run("ctl", "scontrol", "update", f"JobId={job.id}", "TimeLimit=6")
    for job in to_script:
        says(job, "script got USR2")
    for job in to_step:
        says(job, "SIGUSR2", "same/warned-{id}")
    for job in jobs:
        lab.run("login", "scancel", "-s", "TERM", f"{job.id}.0", user="alice")
    for pair in pairs:
        ours, theirs = pair.wait().outputs()
        assert ours == theirs
        assert "step ended with 5" in ours
        expected = ["SIGTERM"] if pair is to_script else ["SIGUSR2", "SIGTERM"]
        for text in pair.outputs("same/warned-{id}"):
            assert re.findall("SIGUSR2|SIGTERM", text) == expected
        assert ("script got USR2" in ours) == (pair is to_script)


def test_a_window_changes_its_size_and_control_c_interrupts(lab: Lab) -> None:
    lab.run(
        "login",
        "sh",
        "-c",
        f"cat > {WHERE}/window.py",
        user="alice",
        stdin=(SOURCES / "window.py").read_text(),
    )
    done = [
        lab.run("login", "python3", f"{WHERE}/window.py", *options, user="alice", check=False)
        for options in ([f"--vhpc-image={IMAGE}"], [])
    ]
    for one in done:
        assert "33 101" in one.out, one
        assert "44 101" in one.out, one
    assert done[0].code == done[1].code


def test_a_suspended_job_stops_and_goes_on_where_it_was(lab: Lab) -> None:
    """Script and steps, also a step that does not care for SIGTSTP; nothing is lost."""
    script = (
        'cd ~/same; srun -Q -n1 sh -c \'trap "" TSTP; i=0; while [ $i -lt 100000 ]; do i=$((i+1)); echo $i;'
        " echo $i > step-now; sleep 0.1; [ -e go-on ] && exit 4; done' > step-all & "
        "i=0; while [ ! -e go-on ]; do i=$((i+1)); echo $i > script-now; sleep 0.1; done;"
        " wait $!; echo step said $?"
    )
    job = lab.submit(script, "-t4")

    def now() -> list[str]:
        names = [f"{WHERE}/step-now", f"{WHERE}/script-now"]
        return lab.run("login", "cat", *names, check=False).out.split()

    until(lambda: len(now()) == 2, "both to count")
    lab.run("ctl", "scontrol", "suspend", str(job.id))
    job.wait("SUSPENDED")
    seen = [now()]

    def rests() -> bool:
        seen.append(now())
        return len(seen) > 5 and all(one == seen[-1] for one in seen[-5:])

    until(rests, "the counters to rest", 30)
    lab.run("ctl", "scontrol", "resume", str(job.id))
    until(lambda: all(a != b and b for a, b in zip(now(), seen[-1], strict=False)), "the counters to go on")
    lab.run("login", "touch", f"{WHERE}/go-on", user="alice")
    job.wait()
    assert job.accounted() == ["COMPLETED", "0:0"]
    assert job.output().endswith("step said 4\n")
    lines = [int(line) for line in lab.read("alice", "same/step-all").splitlines()]
    assert lines == list(range(1, len(lines) + 1))


def test_a_suspended_job_can_be_cancelled(lab: Lab) -> None:
    job = lab.submit("echo up; srun sleep 600", "-t4")
    says(job, "up")
    lab.run("ctl", "scontrol", "suspend", str(job.id))
    job.wait("SUSPENDED")
    lab.run("login", "scancel", str(job.id), user="alice")
    assert job.wait() == "CANCELLED"
