# SPDX-License-Identifier: Apache-2.0
"""Variables of the image against those of the submission: what --export names is the user's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Job, Lab

pytestmark = pytest.mark.lab

RECIPE = "sudo mkdir -p /etc/vhpc; printf 'RETRY=1\\nLEAKED=1\\n' | sudo tee /etc/vhpc/environment"
SHOW = "sh -c 'echo $0 $RETRY $LEAKED'"
SCRIPT = f"""
{SHOW} script
srun -n1 {SHOW} step
RETRY=3 srun -n1 {SHOW} changed
srun -n1 --export=ALL,RETRY=4 {SHOW} again
export RETRY=5; srun -n1 {SHOW} exported
"""


@pytest.fixture(scope="module")
def image(lab: Lab) -> Iterator[str]:
    """An image with two variables."""
    job = lab.finish(RECIPE, "-w", "n1", "--vhpc-save=own/variables")
    assert job.show()["JobState"] == "COMPLETED", job.output()
    yield "own/variables"
    lab.run("login", "rm", "-rf", "/scratch/alice")
    lab.run("n1", "rm", "-rf", "/var/lib/vhpc/images/own/2001")


def found(lab: Lab, image: str | None, *options: str) -> dict[str, list[str]]:
    """RETRY and LEAKED in a script and in its steps, by name; the shell of sbatch has LEAKED=7."""
    vhpc = [f"--vhpc-image={image}"] if image else []
    words = ("env", "LEAKED=7", "sbatch", "--parsable", "-w", "n1", *vhpc, *options)
    said = lab.run("login", *words, user="alice", stdin=f"#!/bin/sh\n{SCRIPT}")
    job = Job(lab, int(said.out), "alice")
    assert job.wait() == "COMPLETED", job.output()
    return {name: values for name, *values in map(str.split, job.output().splitlines())}


@pytest.mark.promise("image.export")
def test_what_export_names_is_as_without_a_guest(lab: Lab, image: str) -> None:
    """The same job with and without the image; LEAKED is not named, so the image has its say."""
    guest, host = (found(lab, one, "--export=ALL,RETRY=2000") for one in (image, None))
    assert {name: retry for name, (retry, _) in guest.items()} == {
        name: retry for name, (retry, _) in host.items()
    }
    assert guest["script"] == ["2000", "1"]
    assert host["script"] == ["2000", "7"]
    assert {leaked for _, leaked in guest.values()} == {"1"}


@pytest.mark.promise("image.export")
def test_steps_name_variables_in_their_own_option(lab: Lab, image: str) -> None:
    """srun lets its environment win over ALL,NAME=VALUE, but not if the value there is the image's."""
    guest = found(lab, image)
    assert guest == {
        "script": ["1", "1"],
        "step": ["1", "1"],
        "changed": ["3", "1"],
        "again": ["4", "1"],
        "exported": ["5", "1"],
    }
    host = found(lab, image, "--vhpc-batch=host")
    assert host["script"] == ["7"]
    assert host["again"] == ["4", "1"]
    assert host["step"] == ["1", "1"]
    asked = lab.run(
        "login", "env", "LEAKED=7", "srun", "-w", "n1", f"--vhpc-image={image}", "--export=RETRY=2,LEAKED",
        "/bin/sh", "-c", "echo $RETRY $LEAKED; env | grep -c SLURM_VHPC", user="alice", check=False,
    )  # fmt: skip
    assert asked.out.split() == ["2", "7", "0"]


@pytest.mark.promise("job.env-option")
def test_users_keep_variables_of_the_submission(lab: Lab, image: str) -> None:
    guest = found(lab, image, "--vhpc-env=LEAKED,RETRY")
    assert guest["script"] == ["1", "7"], "RETRY is not in the submission"
    assert guest["step"] == ["1", "7"]
