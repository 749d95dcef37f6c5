# SPDX-License-Identifier: Apache-2.0
"""An image that has a Slurm of its own: its jobs use the site's commands, and the image keeps its files."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cluster import Lab

pytestmark = pytest.mark.lab

OWN_SRUN = "#!/bin/sh\\necho the srun of the image; exit 9\\n"
RECIPE = f"""
printf '{OWN_SRUN}' | sudo tee /usr/local/bin/srun >/dev/null
printf '#!/bin/sh\\nexec /usr/local/bin/srun -n2 "$@"\\n' | sudo tee /usr/local/bin/mpirun >/dev/null
sudo chmod 755 /usr/local/bin/srun /usr/local/bin/mpirun
"""
USE = """
srun -n1 echo by name
/usr/local/bin/srun -n1 echo by path
mpirun echo by a launcher
bash -lc 'srun -n1 echo in a login shell'
rm -f /usr/local/bin/srun 2>/dev/null || echo it stays
"""
LOOK = "sudo umount /usr/local/bin/srun; cat /usr/local/bin/srun; srun echo again; echo $?"


@pytest.fixture(scope="module")
def image(lab: Lab) -> Iterator[str]:
    """An image with an srun, and with an mpirun that calls it by its path."""
    job = lab.finish(RECIPE, "-w", "n1", "--vhpc-save=own/slurm")
    assert job.show()["JobState"] == "COMPLETED", job.output()
    line = "vhpc: in guests the site's commands cover those of the image: /usr/local/bin/srun"
    assert line in job.output().splitlines()
    yield "own/slurm"
    lab.run("login", "rm", "-rf", "/scratch/alice")
    lab.run("n1", "rm", "-rf", "/var/lib/vhpc/images/own/2001")


@pytest.mark.promise("image.commands")
@pytest.mark.promise("tools.save")
def test_jobs_use_the_sites_srun_and_the_image_keeps_its_own(lab: Lab, image: str) -> None:
    shown = json.loads(lab.run("login", "vhpc", "image", "show", image, "--json", user="alice").out)
    assert shown["labels"]["vhpc/covered-commands"] == "/usr/local/bin/srun"
    job = lab.finish(USE, "-w", "n1", "-n2", "--vhpc-save=own/copy", image=image)
    said = job.output().splitlines()
    expected = ["by name", "by path", "by a launcher", "by a launcher", "in a login shell", "it stays"]
    assert [line for line in said if not line.startswith(("vhpc:", "own/"))] == expected
    copy = lab.finish(LOOK, "-w", "n1", image="own/copy")
    lines = copy.output().splitlines()
    assert lines[:2] == ["#!/bin/sh", "echo the srun of the image; exit 9"]
    assert lines[2:] == ["the srun of the image", "9"]
