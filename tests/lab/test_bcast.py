"""Files that Slurm sends to nodes, where guests do not see them: srun --bcast, sbcast."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from cluster import IMAGE, NODES, Lab

pytestmark = pytest.mark.lab


@pytest.fixture(autouse=True)
def _no_files_left(lab: Lab) -> Iterator[None]:
    """Slurm leaves on the nodes what it has sent there."""
    yield
    for node in NODES:
        lab.run(node, "sh", "-c", "rm -rf /tmp/sent-*")
    lab.run("login", "sh", "-c", "rm -rf /tmp/sent-* /home/alice/sent-* ~alice/lib-sent")


def test_a_program_sent_by_srun_runs_in_every_guest(lab: Lab) -> None:
    """From the script, from salloc's command and alone; with libraries of its own."""
    job = lab.submit(
        "mkdir -p ~/lib-sent; cp /bin/bash ~/sent-bash\n"
        "cp $(ldd /bin/bash | grep -o '/[^ ]*tinfo[^ ]*') ~/lib-sent\n"
        "export LD_LIBRARY_PATH=$HOME/lib-sent\n"
        "srun -n4 -O --bcast=/tmp/sent-$SLURM_JOB_ID --send-libs=yes ~/sent-bash -c "
        "'echo $(uname -r) $0 $(grep -o /tmp.*tinfo.* /proc/$$/maps | sort -u)' /tmp/sent 2>&1\n"
        "echo exit $?\n"
        "srun -n1 -N1 stat -c %a /tmp/sent-$SLURM_JOB_ID",
        "-N2",
    )
    alone = lab.run(
        "login", "srun", f"--vhpc-image={IMAGE}", "-n2", "--bcast=/tmp/sent-alone", "/bin/uname", "-r",
        user="alice",
    )  # fmt: skip
    assert job.wait() == "COMPLETED"
    lines = job.output().splitlines()
    assert lines[-2:] == ["exit 0", "755"]
    library = f"/tmp/sent-{job.id}_libs/libtinfo.so.6"
    kernels = {line.split()[0] for line in lines[:4]}
    assert kernels.isdisjoint({lab.run("n1", "uname", "-r").out.strip()})
    assert [line.split()[1:] for line in lines[:4]] == [["/tmp/sent", library]] * 4
    assert set(alone.out.split()) == kernels


def test_a_program_of_the_node_that_did_not_come_with_the_job_is_refused_with_a_line(lab: Lab) -> None:
    lab.run("n1", "cp", "/bin/hostname", "/tmp/sent-before", user="alice")
    job = lab.finish("srun /tmp/sent-before 2>&1; echo exit $?", "-w", "n1", "-n1")
    said = job.output()
    assert "vhpc: /tmp/sent-before is on the node n1 and not in the guest of this job\n" in said
    assert re.search(r"execve\(\): /tmp/sent-before: No such file", said)
    assert said.endswith("exit 2\n")
