# SPDX-License-Identifier: Apache-2.0
"""A node with other state and run folders than usual: jobs run, and a health check finishes what waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Lab
from injection import until

pytestmark = pytest.mark.lab

NODE = "n1"
STATE, RUN = "/var/lib/vhpc-other", "/run/vhpc-other"
CONF = "/etc/vhpc/vhpc.toml"


@pytest.fixture
def moved(lab: Lab) -> Iterator[str]:
    """The node has other folders; the value is its plugstack.conf."""
    plugstack = f"{lab.slurm_conf.rpartition('/')[0]}/plugstack.conf"
    lab.quiet()
    files = (CONF, plugstack)
    for file in files:
        lab.run(NODE, "cp", "-p", file, f"{file}.before")
    try:
        table = f'\n[paths]\nstate = "{STATE}"\nrun = "{RUN}"\n'
        lab.run(NODE, "sh", "-c", f"cat >> {CONF}; mkdir -p {STATE}", stdin=table)
        yield plugstack
        lab.quiet()
    finally:
        for file in files:
            lab.run(NODE, "mv", f"{file}.before", file)
        lab.run(NODE, "rm", "-rf", STATE, RUN)


def finding(lab: Lab, check: str) -> str:
    found = lab.vhpc(NODE, "doctor", check=False)
    return next(str(one["level"]) for one in found if one["check"] == check)


def waiting(lab: Lab) -> int:
    """How many acknowledgements wait on the node."""
    return len(lab.run(NODE, "ls", f"{STATE}/outbox", check=False).out.split())


@pytest.mark.promise("hooks.paths")
def test_jobs_and_health_checks_use_other_folders(lab: Lab, moved: str) -> None:
    assert finding(lab, "slurm.plugstack") == "error", "the plugin looks into the usual run folder"
    lab.run(NODE, "sed", "-i", f"s|^required vhpc.so.*|required vhpc.so run_dir={RUN}|", moved)
    assert [finding(lab, name) for name in ("slurm.plugstack", "hooks.paths")] == ["ok", "ok"]
    job = lab.submit("hostname; sleep 5", "-w", NODE)
    job.wait("RUNNING")
    assert lab.run(NODE, "ls", f"{RUN}/jobs").out.split() == [str(job.id)]
    lab.service("ctl", "stop", "vhpcd")
    try:
        assert job.wait() == "COMPLETED"
        until(lambda: waiting(lab) == 1, "the acknowledgement")
    finally:
        lab.service("ctl", "start", "vhpcd")
    lab.run(NODE, "/usr/libexec/vhpc/healthcheck")
    until(lambda: waiting(lab) == 0, "vhpcd to have it")
    assert job.output() == f"{NODE}\n"
