# SPDX-License-Identifier: Apache-2.0
"""A start that fails: the user's line is the only one, but for what srun itself says of every failure."""

from __future__ import annotations

import re

import pytest
from cluster import NODES, Lab

pytestmark = pytest.mark.lab

UNKNOWN = "--vhpc-image=no-such-image"
OURS = re.compile(r"vhpc: image no-such-image:latest is unknown \(.*vhpc image ls\)")
# Lines of srun and salloc, as of each job that fails, with guests and without.
CLIENTS = re.compile(
    r"srun: error: n\d: tasks? [\d,-]+: Exited with exit code 1"
    r"|salloc: (?!error).*"
    r"|srun: job \d+ (queued and waiting for|has been allocated) resources"
)


def clean(lab: Lab) -> None:
    lab.quiet()
    states = [lab.node_state(node)[0] for node in NODES]
    assert not any("DRAIN" in state for state in states), states


@pytest.mark.promise("job.one-line")
@pytest.mark.parametrize(
    ("command", "refused"),
    [
        (("srun", UNKNOWN, "true"), 1),
        (("srun", "-N2", "--ntasks-per-node=2", UNKNOWN, "true"), 2),
        (("salloc", UNKNOWN, "srun", "true"), 1),
        (("srun", "-N1", UNKNOWN, "true", ":", "-N1", UNKNOWN, "true"), 2),
    ],
    ids=["srun", "nodes", "salloc", "het"],
)
def test_only_sruns_own_lines_follow_the_users(lab: Lab, command: tuple[str, ...], refused: int) -> None:
    done = lab.run("login", *command, user="alice", check=False)
    lines = done.err.splitlines()
    ours = [line for line in lines if line.startswith("vhpc: image")]
    assert done.code == 1, done
    assert len(ours) == refused, done.err
    assert all(OURS.fullmatch(line) for line in ours), done.err
    assert [line for line in lines if line not in ours and not CLIENTS.fullmatch(line)] == []
    clean(lab)


@pytest.mark.promise("job.one-line")
def test_each_element_of_an_array_has_the_users_line_only(lab: Lab) -> None:
    script = "sbatch --parsable --wait --array=0-1 --output=refused-%a.out --wrap=true"
    done = lab.run("login", *script.split(), UNKNOWN, user="alice", check=False)
    assert done.code == 1, done
    job = done.out.strip()
    for element in (0, 1):
        output = lab.run("login", "cat", f"refused-{element}.out", user="alice").out.splitlines()
        assert len(output) == 1, output
        assert OURS.fullmatch(output[0])
    states = lab.run("login", "sacct", "-XPno", "State,ExitCode", "-j", job).out.splitlines()
    assert states == ["FAILED|1:0"] * 2
    clean(lab)
