# SPDX-License-Identifier: Apache-2.0
"""A login shell's locale that the image lacks: perl and bash in guests do not warn."""

from __future__ import annotations

import pytest
from cluster import IMAGE, Job, Lab

pytestmark = pytest.mark.lab

SCRIPT = """
printenv LANG LC_ALL LC_TIME
perl -e 'print "perl\\n"'; bash -c 'echo bash'; bash -lc 'echo a login shell'
srun -n1 bash -c 'printenv LANG; perl -e 1'
"""


def finished(lab: Lab, image: str, *options: str) -> Job:
    """A job of a user with a German locale, French messages and plain times."""
    locale = ("LANG=de_DE.UTF-8", "LC_ALL=fr_FR.utf8", "LC_TIME=C")
    words = ("sbatch", "--parsable", "-w", "n1", f"--vhpc-image={image}", *options)
    script = f"#!/bin/bash\n{SCRIPT}"
    done = lab.run("login", "env", *locale, *words, user="alice", stdin=script)
    job = Job(lab, int(done.out), "alice")
    assert job.wait() == "COMPLETED", job.output()
    return job


@pytest.mark.promise("env.locale")
def test_programs_do_not_warn_of_a_locale_that_the_image_lacks(lab: Lab) -> None:
    job = finished(lab, IMAGE, "--vhpc-console=%j.console")
    expected = ["C.UTF-8", "C.UTF-8", "C", "perl", "bash", "a login shell", "C.UTF-8"]
    assert job.output().splitlines() == expected
    console = lab.read("alice", f"{job.id}.console")
    said = [line.strip() for line in console.splitlines() if "locale" in line]
    assert said == [
        "vhpc-agent: this image has no locale de_DE.UTF-8, the job's LANG: C.UTF-8 is used",
    ]
    lab.run("login", "rm", f"{job.id}.console", user="alice")


@pytest.mark.promise("env.locale")
def test_images_without_glibcs_locales_keep_the_variables(lab: Lab) -> None:
    """As images with musl, which has no such files and warns of none."""
    made = lab.finish("sudo rm -r /usr/lib/locale", "-w", "n1", "--vhpc-save=own/plain")
    assert made.show()["JobState"] == "COMPLETED", made.output()
    try:
        lines = finished(lab, "own/plain").output().splitlines()
        assert [line for line in lines if line.startswith(("de_DE", "fr_FR", "C."))] == [
            "de_DE.UTF-8",
            "fr_FR.utf8",
            "de_DE.UTF-8",
        ]
    finally:
        lab.run("login", "rm", "-rf", "/scratch/alice")
        lab.run("n1", "rm", "-rf", "/var/lib/vhpc/images/own/2001")
