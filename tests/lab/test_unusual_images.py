# SPDX-License-Identifier: Apache-2.0
"""The root directory is not writable; the group tty has an unusual number."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest
from busybox import BUSYBOX
from cluster import Lab
from variants import PRELUDE

pytestmark = [pytest.mark.lab, pytest.mark.slow]

OWN = "/scratch/alice/images"
INIT = "/sbin/read-only"
TREE = f"""
mkdir -p tree/bin tree/sbin tree/etc tree/home tree/usr/bin tree/tmp
cd tree
base64 -d >bin/busybox
chmod 555 bin/busybox
for name in $(bin/busybox --list); do [ $name = busybox ] || ln -s busybox bin/$name; done
echo 'root:x:0:0:root:/root:/bin/sh' >etc/passwd
printf 'root:x:0:\\ntty:x:77:\\n' >etc/group
printf '#!/bin/sh\\nmount -o remount,ro /\\ntouch /etc/x 2>/run/tried\\nexec /run/vhpc/vhpc-agent\\n' >.{INIT}
chmod 555 .{INIT}
find . -type d -exec chmod 555 {{}} +
"""
OWN_INIT = f"""
publish("own-init", load("plain") | {{"init": "{INIT}"}})
"""
LOOK = """
id -un
grep -c "^$(id -un):" /etc/passwd
grep -c n1 /etc/hosts
touch ~/file-$SLURM_JOB_ID && rm ~/file-$SLURM_JOB_ID && echo home
touch /tmp/file && echo tmp
srun sh -c 'echo step'
[ ! -e /run/tried ] || cat /run/tried
"""
SEEN = ["alice", "1", "1", "home", "tmp", "step"]
REMOUNT = """
srun sudo mount -o remount,bind,ro /
export TMPDIR=/dev/shm
srun -l sh -c 'touch /etc/x /tmp/x 2>&1 || :' | grep -c 'Read-only file system'
srun -l hostname | sort
head -c 9 /dev/zero >~/cast; sbcast ~/cast /dev/shm/cast; srun -l stat -c %s /dev/shm/cast | sort; rm ~/cast
srun --mpi=pmi2 -l true; echo $?
"""


@pytest.fixture(scope="module")
def plain(lab: Lab) -> Iterator[str]:
    """Files of busybox in directories that nobody may write to."""
    encoded = base64.b64encode(BUSYBOX.read_bytes()).decode()
    lab.run("login", "sh", "-ec", TREE, user="alice", stdin=encoded)
    lab.run("login", "vhpc", "image", "import", "tree", "own/plain", user="alice", timeout=300)
    yield "own/plain"
    lab.run("login", "sh", "-c", "chmod -R u+w tree; rm -rf tree /scratch/alice", user="alice")


@pytest.fixture(scope="module")
def own_init(lab: Lab, plain: str) -> str:
    """The same files with an init that makes "/" read-only."""
    source = PRELUDE.replace("/shared/vhpc/catalog", OWN) + OWN_INIT
    lab.run("login", "python3", "-", user="alice", stdin=source)
    return "own/own-init"


def test_an_image_with_read_only_directories_runs_jobs(lab: Lab, plain: str) -> None:
    job = lab.finish(LOOK, "-n1", "--chdir=/home/alice", image=plain)
    assert job.output().splitlines() == SEEN
    assert job.accounted() == ["COMPLETED", "0:0"]


def test_a_root_that_the_images_init_makes_read_only_is_no_fault(lab: Lab, own_init: str) -> None:
    job = lab.finish(LOOK, "-n1", "--chdir=/home/alice", image=own_init)
    assert job.output().splitlines() == [*SEEN, "touch: /etc/x: Read-only file system"]
    assert job.accounted() == ["COMPLETED", "0:0"]


def test_a_job_may_make_its_root_read_only(lab: Lab) -> None:
    job = lab.finish(REMOUNT, "-N2", "--vhpc-network=job", "--chdir=/home/alice")
    lines = job.output().splitlines()
    assert lines == ["4", "0: n1", "1: n2", "0: 9", "1: 9", "0"], job.output()
    assert job.accounted() == ["COMPLETED", "0:0"]


def test_a_terminal_has_the_images_group_tty(lab: Lab, plain: str) -> None:
    words = ("srun", f"--vhpc-image={plain}", "-n1", "--pty", "stat", "-c", "%g", "/dev/pts/0")
    done = lab.run("login", "script", "-qec", " ".join(words), "/dev/null", user="alice")
    assert done.out.endswith("77\r\n")
