# SPDX-License-Identifier: Apache-2.0
"""Signals, suspension and terminals in jobs with guests, as in the same jobs without."""

from __future__ import annotations

import re
import time
from functools import partial

import pytest
from cluster import IMAGE, NODES, Job, Lab
from twins import FILES, SOURCES, WHERE, says, submit, until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("probes")]

# On the login node, for a job: each signal, and the line that says that it came.
SEND = r"""
job=$1; shift
cd ~/same
says() {
    for i in $(seq 2400); do grep -qxF "$2" $1 2>/dev/null && return; sleep 0.1; done
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


@pytest.mark.promise("job.signals")
@pytest.mark.timeout(900)
def test_signals_reach_steps_and_scripts_as_without_a_guest(lab: Lab) -> None:
    names = re.findall("[A-Z0-9]+", FILES["catch.py"].split("NAMES = ")[1].split("\n")[0])
    twins = submit(lab, (SOURCES / "signals.job").read_text(), "-n1", "-t 10")
    for job in twins:
        job.wait("RUNNING")
        words = ("bash", "-s", "-", str(job.id), *names)
        done = lab.run("login", *words, user="alice", stdin=SEND, check=False, timeout=600)
        assert done.code == 0, (done.out, job.output(), told_to_slurmd(lab, job))
    twins.wait()
    ours, theirs = twins.outputs()
    assert ours == theirs
    assert "script got HUP" in ours, ours
    assert twins.inside.accounted() == twins.outside.accounted() == ["FAILED", "6:0"]
    # slurmstepd's line about the step's end comes before or after what the step writes at its last signal
    (first, told), (second, told_too) = (apart(text) for text in twins.outputs("same/signals-{id}"))
    assert first == second
    assert len(told) == len(told_too) == 1


def told_to_slurmd(lab: Lab, job: Job) -> list[str]:
    """The last lines about a job in the logs of slurmd: which signals came to its node, and where it is."""
    words = ("sh", "-c", f"grep -h '\\[{job.id}\\.' /var/log/slurm/slurmd.log | tail -n 15")
    return [lab.run(node, *words, check=False).out for node in NODES]


def apart(text: str) -> tuple[list[str], list[str]]:
    """A step's own lines, and those of slurmstepd."""
    lines = text.splitlines()
    theirs = [line for line in lines if line.startswith("slurmstepd: ")]
    return [line for line in lines if line not in theirs], theirs


def test_the_signal_before_the_time_limit_arrives(lab: Lab) -> None:
    script = (SOURCES / "warned.job").read_text()
    to_script, to_step = pairs = [
        submit(lab, script, "-n1", "-t 10", option) for option in ("--signal=B:USR2@300", "--signal=USR2@300")
    ]
    jobs = [job for pair in pairs for job in pair]
    for job in jobs:
        says(job, "up")
    for job in jobs:  # the signal is due now
        lab.run("ctl", "scontrol", "update", f"JobId={job.id}", "TimeLimit=5")
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


def counter(lab: Lab, name: str) -> str:
    """The number that a job has counted to in a file; empty at the moment when it writes it."""
    return lab.run("login", "cat", f"{WHERE}/{name}", user="alice", check=False).out.strip()


def rests(lab: Lab, name: str) -> str:
    """Wait until a counter rests, and say where; its file may be empty, if it was stopped just then."""
    seen: list[str] = []

    def stands() -> bool:
        seen.append(counter(lab, name))
        return len(seen) > 8 and len(set(seen[-8:])) == 1

    until(stands, f"{name} to rest")
    return seen[-1]


def goes_on(lab: Lab, name: str, was: str) -> bool:
    """Whether a counter has counted on."""
    return counter(lab, name) not in ("", was)


@pytest.mark.promise("job.stop")
def test_sigstop_by_scancel_stops_until_sigcont(lab: Lab) -> None:
    """SIGSTOP cannot be caught, so what relays a program to its guest is stopped itself."""
    count = (
        "i=0; while [ ! -e go-$SLURM_JOB_ID ]; do i=$((i+1)); echo $i > {0}-$SLURM_JOB_ID; sleep 0.1; done"
    )
    step, batch = count.format("step"), count.format("script")
    script = f"cd ~/same; srun -Q -n1 sh -c '{step}; exit 4' & {batch}; wait $!; echo step said $?"
    for job in (twins := submit(lab, script, "-n1")):
        for kind, target in (("step", [f"{job.id}.0"]), ("script", ["-b", str(job.id)])):
            name = f"{kind}-{job.id}"
            until(partial(counter, lab, name), f"{name} to count")
            lab.run("login", "scancel", "-s", "STOP", *target, user="alice")
            there = rests(lab, name)
            lab.run("login", "scancel", "-s", "CONT", *target, user="alice")
            until(partial(goes_on, lab, name, there), f"{name} to go on")
        lab.run("login", "touch", f"{WHERE}/go-{job.id}", user="alice")
        job.wait()
    ours, theirs = twins.outputs()
    assert ours == theirs
    assert "step said 4" in ours


FULL = r"""
cd ~/same
for name in USR1 USR2 HUP; do trap "echo script got $name >> full-$SLURM_JOB_ID" $name; done
python3 tell.py background &
setsid python3 tell.py session &
srun -Q -n1 python3 tell.py step &
until [ -e go-$SLURM_JOB_ID ]; do sleep 0.2; done
"""
TELL = """
import os, signal, sys, time
def tell(number, frame):
    with open(f"full-{os.environ['SLURM_JOB_ID']}", "a") as file:
        file.write(f"{sys.argv[1]} got {signal.Signals(number).name[3:]}\\n")
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP"):
    signal.signal(getattr(signal, name), tell)
# srun ends its step at SIGHUP
for word in ("up", "1", "2", "3")[: 3 if sys.argv[1] == "step" else 4]:
    while word != "up" and not os.path.exists(f"round-{word}-{os.environ['SLURM_JOB_ID']}"):
        time.sleep(0.1)
    with open(f"full-{os.environ['SLURM_JOB_ID']}", "a") as file:
        file.write(f"{sys.argv[1]} {word}\\n")
while True:
    signal.pause()
"""
FULL_ROUNDS = [
    (["--full", "-s", "USR1"], "background got USR1"),
    (["-b", "-s", "USR2"], "script got USR2"),
    (["--full", "-s", "HUP"], "background got HUP"),
]
"""Options of scancel, and the line that says that a signal has come which comes without a guest too."""


@pytest.mark.promise("job.stop")
def test_scancel_full_reaches_background_commands(lab: Lab) -> None:
    """Processes that left the process group, and steps, only as far as without a guest."""
    lab.run("login", "sh", "-c", f"cat > {WHERE}/tell.py", user="alice", stdin=TELL)
    twins = submit(lab, FULL, "-n1")
    tellers = ("background", "session", "step")
    for job in twins:
        for name in tellers:
            says(job, f"{name} up", "same/full-{id}")
        for number, (options, first) in enumerate(FULL_ROUNDS, 1):
            lab.run("login", "scancel", *options, str(job.id), user="alice")
            says(job, first, "same/full-{id}")
            time.sleep(1)
            # who says his number has told of each signal that had come before
            lab.run("login", "touch", f"{WHERE}/round-{number}-{job.id}", user="alice")
            for name in tellers[: 2 if number == 3 else 3]:
                says(job, f"{name} {number}", "same/full-{id}")
            lab.run("login", "sh", "-c", f"echo -- >> {WHERE}/full-{job.id}", user="alice")
        lab.run("login", "touch", f"{WHERE}/go-{job.id}", user="alice")
    ours, theirs = (
        [sorted(part.splitlines()) for part in text.split("--\n")]
        for text in twins.wait().outputs("same/full-{id}")
    )
    assert ours == theirs
    assert "background got USR1" in ours[0]
    assert ours[1] == ["background 2", "script got USR2", "session 2", "step 2"]
    assert "background got HUP" in ours[2]


@pytest.mark.promise("job.pty")
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
        lab.run("login", "python3", f"{WHERE}/window.py", *options, user="alice", check=False, timeout=600)
        for options in ([f"--vhpc-image={IMAGE}"], [])
    ]
    for one in done:
        assert "33 101" in one.out, one
        assert "44 101" in one.out, one
    assert done[0].code == done[1].code


@pytest.mark.promise("job.suspend")
def test_a_suspended_job_stops_and_continues_where_it_was(lab: Lab) -> None:
    """Script and steps, also a step that does not care for SIGTSTP; nothing is lost."""
    script = (
        'cd ~/same; srun -Q -n1 sh -c \'trap "" TSTP; i=0; while [ $i -lt 100000 ]; do i=$((i+1)); echo $i;'
        " echo $i > step-now; sleep 0.1; [ -e go-on ] && exit 4; done' > step-all & "
        "i=0; while [ ! -e go-on ]; do i=$((i+1)); echo $i > script-now; sleep 0.1; done;"
        " wait $!; echo step said $?"
    )
    job = lab.submit(script, "-t15")

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

    until(rests, "the counters to rest")
    lab.run("ctl", "scontrol", "resume", str(job.id))
    until(lambda: all(a != b and b for a, b in zip(now(), seen[-1], strict=False)), "the counters to go on")
    lab.run("login", "touch", f"{WHERE}/go-on", user="alice")
    job.wait()
    assert job.accounted() == ["COMPLETED", "0:0"]
    assert job.output().endswith("step said 4\n")
    lines = [int(line) for line in lab.read("alice", "same/step-all").splitlines()]
    assert lines == list(range(1, len(lines) + 1))


@pytest.mark.promise("job.suspend")
def test_a_suspended_job_can_be_cancelled(lab: Lab) -> None:
    job = lab.submit("echo up; srun sleep 600", "-t4")
    says(job, "up")
    lab.run("ctl", "scontrol", "suspend", str(job.id))
    job.wait("SUSPENDED")
    lab.run("login", "scancel", str(job.id), user="alice")
    assert job.wait() == "CANCELLED"
