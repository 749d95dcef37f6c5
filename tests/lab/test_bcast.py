# SPDX-License-Identifier: Apache-2.0
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


@pytest.mark.promise("job.bcast")
def test_a_program_sent_by_srun_runs_in_every_guest(lab: Lab) -> None:
    """From a script, with libraries of its own, and alone."""
    # 22.05 takes the first line of ldd for a library, with a guest and without
    libs = "no" if " 22.05" in lab.run("n1", "slurmd", "-V").out.replace("-wlm", "") else "yes"
    job = lab.submit(
        "mkdir -p ~/lib-sent; cp /bin/bash ~/sent-bash\n"
        "cp $(ldd /bin/bash | grep -o '/[^ ]*tinfo[^ ]*') ~/lib-sent\n"
        "export LD_LIBRARY_PATH=$HOME/lib-sent\n"
        f"srun -n4 -O --bcast=/tmp/sent-$SLURM_JOB_ID --send-libs={libs} ~/sent-bash -c "
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
    library = [f"/tmp/sent-{job.id}_libs/libtinfo.so.6"] if libs == "yes" else []
    kernels = {line.split()[0] for line in lines[:4]}
    assert kernels.isdisjoint({lab.run("n1", "uname", "-r").out.strip()})
    assert [line.split()[1:] for line in lines[:4]] == [["/tmp/sent", *library]] * 4
    assert set(alone.out.split()) == kernels


@pytest.mark.promise("job.bcast")
def test_a_host_program_not_of_the_job_is_refused(lab: Lab) -> None:
    lab.run("n1", "cp", "/bin/hostname", "/tmp/sent-before", user="alice")
    job = lab.finish("srun /tmp/sent-before 2>&1; echo exit $?", "-w", "n1", "-n1")
    said = job.output()
    assert "vhpc: /tmp/sent-before exists on the node n1 but not in the guest of this job\n" in said
    assert re.search(r"execve\(\): /tmp/sent-before: No such file", said)
    assert said.endswith("exit 2\n")


def test_a_program_without_its_interpreter_is_not_called_missing(lab: Lab) -> None:
    """A file of the home, which node and guest have; what neither has is its interpreter."""
    script = """
    cd; sed 's,/ld-linux,/no-linux,' /bin/true > needs-loader; echo '#!/no/such/sh' > needs-shell
    chmod +x needs-*; for name in shell loader; do srun ~/needs-$name 2>&1; echo exit $?; done
    """
    said = lab.finish(script, "-w", "n1", "-n1").output()
    assert "exists on the node" not in said
    assert "execve(): bad interpreter(/no/such/sh): No such file or directory\n" in said
    assert re.search(
        r"execve\(\): (\S+/needs-loader): No .* \(\1 needs /\S+/no-linux\S+, which is missing\)\n", said
    )
    assert said.count("exit 2\n") == 2


READ = "srun -l --overlap -n2 -N2 sh -c 'cat /tmp/sent-{0} && stat -c %a /tmp/sent-{0}' 2>&1 | sort"
EXPECTED = ["0: 640", "0: payload", "1: 640", "1: payload"]


def make_source(lab: Lab) -> None:
    """A file in the home of the user, who asks for it to be sent to each node."""
    lab.run("login", "sh", "-c", "echo payload > ~/sent-source; chmod 640 ~/sent-source", user="alice")


@pytest.mark.promise("job.bcast")
def test_sbcast_outside_of_the_guests_reaches_them(lab: Lab) -> None:
    """Salloc's command on the login node, a script on the host, and --jobid from elsewhere."""
    make_source(lab)
    salloc = lab.run(
        "login", "salloc", "-Q", f"--vhpc-image={IMAGE}", "-N2", "sh", "-c",
        f"sbcast sent-source /tmp/sent-salloc && {READ.format('salloc')}\n"
        "sbcast sent-source /tmp/sent-salloc; echo $?",
        user="alice",
    )  # fmt: skip
    assert salloc.out.splitlines() == [*EXPECTED, "1"]
    assert salloc.err.count("File exists") == 2, salloc
    job = lab.submit(
        f"cd; sbcast sent-source /tmp/sent-script; {READ.format('script')}\n"
        "sbcast -f sent-source ~/sent-shared; cat ~/sent-shared; ls /tmp | grep -c sent-script\n"
        "until [ -e /tmp/sent-go ]; do sleep 0.3; done; rm /tmp/sent-go\n" + READ.format("elsewhere"),
        "-N2",
        "--vhpc-batch=host",
    )
    job.wait("RUNNING")
    done = lab.run("login", "sbcast", f"--jobid={job.id}", "sent-source", "/tmp/sent-elsewhere", user="alice")
    assert done.out + done.err == ""
    refused = lab.run(
        "login", "sbcast", f"--jobid={job.id}", "--exclude=n2", "sent-source", "/tmp/sent-x",
        user="alice", check=False,
    )  # fmt: skip
    assert refused.code == 1
    assert "this folder is local to the guests: --nodelist, --exclude" in refused.err
    lab.run("n1", "touch", "/tmp/sent-go", user="alice")
    assert job.wait() == "COMPLETED"
    assert job.output().splitlines() == [*EXPECTED, "payload", "0", *EXPECTED]


def test_sbcast_of_jobs_without_guests_is_slurms_own(lab: Lab) -> None:
    make_source(lab)
    script = f"cd; sbcast sent-source /tmp/sent-plain; {READ.format('plain')}"
    job = lab.finish(f"{script}; sbcast /no/such /tmp/sent-x; echo $?", "-N2", image=None)
    *read, complaint, code = job.output().splitlines()
    assert read == EXPECTED
    assert "/no/such" in complaint
    assert code != "0"
    names = lab.run("ctl", "sacct", "-nP", "-j", str(job.id), "-o", "JobName").out.split()
    assert "sbcast" not in names
