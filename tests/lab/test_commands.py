# SPDX-License-Identifier: Apache-2.0
"""Slurm's commands in a batch script in a guest, against the same script without a guest."""

from __future__ import annotations

import re

import pytest
from cluster import IMAGE, Job, Lab
from twins import SOURCES, WHERE, Twins, sections, submit

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("probes")]

COMMANDS = (SOURCES / "commands.job").read_text()


@pytest.fixture(scope="module")
def commands(lab: Lab, probes: None) -> Twins:
    typed = (SOURCES / "typed.py").read_text()
    lab.run("login", "sh", "-c", f"cat > {WHERE}/typed.py", user="alice", stdin=typed)
    twins = submit(lab, COMMANDS, "-n1").wait()
    for job in twins:
        assert job.show()["JobState"] == "COMPLETED", f"{job.told()}\n{job.output()}"
        for follower in followers(job):
            follower.wait(timeout=300)
    return twins


@pytest.fixture(scope="module")
def answers(commands: Twins) -> list[dict[str, str]]:
    """The sections of both outputs."""
    return [sections(text) for text in commands.outputs()]


def followers(job: Job) -> list[Job]:
    """The jobs that a job has submitted."""
    return [Job(job.lab, int(line), job.user) for line in job.output("same/here-{id}/followers").split()]


@pytest.mark.promise("job.commands")
@pytest.mark.results
@pytest.mark.parametrize("name", re.findall(r"^section ([\w-]+)", COMMANDS, re.M))
def test_commands_in_a_script_do_the_same(answers: list[dict[str, str]], name: str) -> None:
    # sorted: the order of what srun says and of what its tasks say is no promise; the terminal of a task says
    # ^C before a line of srun or after it
    ours, theirs = (sorted(parts[name].replace("^C", "").splitlines()) for parts in answers)
    assert ours == theirs
    assert len({parts[name].count("^C") for parts in answers}) == 1
    assert ours or name == "end"


@pytest.mark.promise("job.commands")
def test_jobs_submitted_from_a_guest_are_the_same(lab: Lab, commands: Twins) -> None:
    said: list[list[str]] = []
    for job in commands:
        assert len(followers(job)) == 7
        rows = []
        for number, follower in enumerate(followers(job), 1):
            row = follower.accounted("JobName,State,ExitCode,AllocCPUS,WorkDir")
            rows += ["|".join(row), job.output(f"same/here-{job.id}/follow-{number}")]
        said.append(rows)
    assert said[0] == said[1]
    text = "\n".join(said[0])
    for name in ("follow.sh", "named", "other", "sbatch"):
        assert f"{name}|FAILED|7:0" in text
    assert "wrap|COMPLETED|0:0" in text
    assert "4 arguments: a  b  --help *\n" in text
    assert f"follow.sh in {WHERE}, line 4, no image, 0 variables\n" in text


IMAGES = """
submit() { sbatch --parsable -n1 -t4 -o ~/image-%j --wrap 'uname -r; echo $VHPC_JOB_IMAGE' "$@"; }
uname -r
submit
submit --vhpc-image=$VHPC_JOB_IMAGE
export VHPC_IMAGE=$VHPC_JOB_IMAGE
submit
VHPC_IMAGE= submit
"""


@pytest.mark.promise("job.inherit")
def test_a_submitted_job_has_an_image_only_if_it_is_asked_for(lab: Lab) -> None:
    """As with other options of sbatch: those of the command line are for one job, variables for all."""
    guest, *ids = lab.finish(f"exec bash <<'EOF'{IMAGES}EOF", "-n1").output().split()
    host = lab.run("n1", "uname", "-r").out.strip()
    assert guest != host
    jobs = [Job(lab, int(number), "alice") for number in ids]
    assert [job.wait(timeout=300) for job in jobs] == ["COMPLETED"] * 4
    image = [guest, f"{IMAGE}:latest"]
    assert [job.output("image-{id}").split() for job in jobs] == [[host], image, image, [host]]


@pytest.mark.promise("job.commands")
def test_a_script_can_cancel_its_own_job(lab: Lab) -> None:
    # The shell waits without a command: proctrack/linuxproc would end that first, and the shell might
    # continue.
    wait = "f=$(mktemp -u); mkfifo $f; exec 3<>$f; rm $f; scancel $SLURM_JOB_ID; read line <&3"
    twins = submit(lab, f"echo before; {wait}; echo after", "-n1").wait()
    assert twins.inside.accounted() == twins.outside.accounted()
    assert twins.inside.accounted()[0].startswith("CANCELLED")
    ours, theirs = twins.outputs()
    assert ours == theirs
    assert "before\n" in ours
    assert "after\n" not in ours


LOCAL = {
    "srun -o /tmp/x true": "--output=/tmp/x: this path is local to the guest",
    "srun --multi-prog /tmp/conf": "/tmp/conf: this path is local to the guest",
    "sbatch --export-file=/tmp/conf /tmp/conf": "--export-file=/tmp/conf: this path is local to the guest",
    "cd /tmp; srun -e err-%j true": "--error=err-%j: this path is local to the guest",
    "sacctmgr -i delete user alice": "delete: in a guest sacctmgr only shows",
}


@pytest.mark.promise("job.paths")
def test_paths_that_only_the_guest_has_are_refused_in_one_line(lab: Lab) -> None:
    script = "touch /tmp/conf\n" + "\n".join(f"({command}) 2>&1; echo $?" for command in LOCAL)
    lines = lab.finish(f"exec bash <<'EOF'\n{script}\nEOF", "-n1").output().splitlines()
    assert lines[1::2] == ["1"] * len(LOCAL)
    for line, expected in zip(lines[::2], LOCAL.values(), strict=True):
        assert expected in line


@pytest.mark.promise("job.commands")
@pytest.mark.slow
def test_many_short_steps_and_many_at_once_do_the_same(lab: Lab) -> None:
    twins = submit(lab, (SOURCES / "many.job").read_text(), "-n1", "-t", "30")
    for job in twins:
        job.wait(timeout=1500)
    ours, theirs = twins.outputs()
    assert ours == theirs
    assert ours.splitlines()[:6] == ["1", "1", "2", "2", "3", "0"]
    assert len(ours.splitlines()) == 2 * 200 + 2 * 32
