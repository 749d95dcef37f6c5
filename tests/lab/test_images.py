# SPDX-License-Identifier: Apache-2.0
"""Images as users have them: pinned by a digest, and in sacct afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from cluster import IMAGE, Lab
from injection import boots, let_go, runs, settled
from variants import MINE, OWN, PRELUDE

pytestmark = pytest.mark.lab

COPY, MOVED, GONE = "test-copy", "test-moved", "test-gone"


@pytest.fixture(scope="module")
def digests(lab: Lab) -> Iterator[dict[str, str]]:
    """A second name of the image, and a name that points to an image that cannot boot."""
    script = f"""
base = load("{IMAGE}")
broken = publish("{MOVED}", base | {{"min_cpus": 4096}})
publish("{COPY}", base)
print(json.dumps({{"broken": broken}}))
"""
    found = json.loads(lab.run("ctl", "python3", "-", stdin=PRELUDE + script).out)
    name = lab.run("ctl", "cat", f"/shared/vhpc/catalog/names/{IMAGE}/latest").out.strip()
    yield {"sound": name, **{key: f"sha256:{value}" for key, value in found.items()}}
    lab.run("ctl", "vhpc", "image", "rm", COPY, MOVED)
    lab.run("ctl", "vhpc", "image", "gc", "--days", "0")


@pytest.mark.promise("image.digest")
def test_a_digest_gives_its_image_if_the_name_moves(lab: Lab, digests: dict[str, str]) -> None:
    refused = lab.finish("true", "-w", "n1", image=MOVED)
    assert "needs 4096 CPUs" in refused.output()
    pin = f"{MOVED}@{digests['sound']}"
    job = lab.finish("echo $VHPC_JOB_IMAGE; srun hostname", "-w", "n1", image=pin)
    comment = f"vhpc: image {MOVED}:latest@{digests['sound']}"
    assert job.accounted("State,AdminComment") == ["COMPLETED", comment]
    assert job.output().splitlines() == [f"{MOVED}:latest@{digests['sound']}", "n1"]
    absent = lab.finish("true", "-w", "n1", image=f"{IMAGE}@sha256:{'0' * 64}")
    assert f"image {IMAGE}:latest@sha256:{'0' * 64} is unknown" in absent.output()


def test_users_read_the_catalogue_and_only_its_owner_changes_it(lab: Lab, digests: dict[str, str]) -> None:
    for command in (("verify", COPY), ("show", f"any@{digests['sound']}"), ("ls",)):
        lab.run("login", "vhpc", "image", *command, "--json", user="alice")
    done = lab.run("login", "vhpc", "image", "rm", COPY, user="alice", check=False)
    assert done.code == 1
    assert done.err.startswith("vhpc: cannot change the image catalogue")


@pytest.mark.promise("image.gc")
def test_gc_and_a_moved_name_do_not_disturb_jobs(lab: Lab, digests: dict[str, str]) -> None:
    """An image loses its name and its root while one job runs in it, and another one boots."""
    script = f"""
base = load("{IMAGE}")
data = (top / "blobs/sha256" / base["root"]["sha256"]).read_bytes() + bytes(4096)
root = hashlib.sha256(data).hexdigest()
(top / "blobs/sha256" / root).write_bytes(data)
base["root"] |= {{"sha256": root, "size": len(data)}}
for key in ("chunks", "verity"):  # they are of a root without the bytes more
    base.pop(key, None)
print(publish("{GONE}", base), root)
"""
    digest, root = lab.run("ctl", "python3", "-", stdin=PRELUDE + script).out.split()
    options = ("-n1", "--mem=512")
    waiting = (
        "echo up; until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.2; done; srun hostname; cat /usr/bin/* | wc -c"
    )
    running = lab.submit(waiting, "-w", "n1", *options, image=GONE)
    runs(lab, running)
    booting = lab.submit(waiting, "-w", "n2", *options, image=GONE)
    boots(lab, booting, "n2")
    lab.run("ctl", "vhpc", "image", "tag", f"{COPY}@{digests['sound']}", GONE)
    removed = {item["name"] for item in lab.vhpc("ctl", "image", "gc", "--days", "0")["removed"]}
    assert removed >= {f"{digest}", root}
    for job, node in ((running, "n1"), (booting, "n2")):
        let_go(lab, job)
        assert job.wait() == "COMPLETED", job.told()
        assert job.accounted("AdminComment") == [f"vhpc: image {GONE}:latest@sha256:{digest}"]
        assert job.output().splitlines()[1] == node
        assert int(job.output().splitlines()[2]) > 1_000_000, "programs of the root can be read"
    lab.run("ctl", "vhpc", "image", "rm", GONE)
    settled(lab)


@pytest.fixture
def _mine(lab: Lab) -> Iterator[None]:
    lab.run("login", "sh", "-c", MINE, user="alice")
    yield
    lab.run("login", "rm", "-rf", "/scratch/alice", user="alice")


@pytest.mark.usefixtures("_mine")
def test_a_user_runs_an_image_of_a_catalogue_of_their_own(lab: Lab, digests: dict[str, str]) -> None:
    lab.run("n1", "rm", "-rf", "/var/lib/vhpc/images/own/2001")  # images of other tests
    job = lab.finish("echo $VHPC_JOB_IMAGE; hostname", "-w", "n1", image="own/mine")
    comment = f"vhpc: image own/mine:latest@{digests['sound']}"
    assert job.accounted("State,AdminComment") == ["COMPLETED", comment]
    assert job.output().splitlines() == ["own/mine:latest", "n1"]
    stored = lab.run("n1", "find", "/var/lib/vhpc/images/own/2001", "-type", "f", "!", "-name", ".*").out
    assert len(stored.splitlines()) == 3
    assert lab.run("n1", "ls", "/var/lib/vhpc/images/own/2001/sha256", user="alice", check=False).code != 0
    (row,) = lab.vhpc("login", "image", "ls", "--catalog", OWN)
    assert (row["image"], row["digest"]) == ("mine:latest", digests["sound"])


@pytest.mark.promise("user.catalogue")
@pytest.mark.usefixtures("_mine")
def test_a_bad_own_image_fails_its_users_job_and_no_node(lab: Lab) -> None:
    """Whose catalogue it is, what vhpcd may not read, and what the user may not read on the node."""
    cases = (
        ("bob", "own/mine", "true", "bob has no image catalogue of their own"),
        ("alice", "own/none", "true", r"own/none:latest is unknown \(.*vhpc image import SOURCE own/none"),
        ("alice", "own/mine", f"chmod 700 {OWN}/names", "cannot read .*Permission denied .*chmod a.rX"),
        ("alice", "own/mine", f"chmod 755 {OWN}/names && rm -r {OWN}/blobs", "kernel cannot be read"),
        (
            "alice", "own/mine", f"rm {OWN}/names/mine/latest && ln -s /etc/shadow {OWN}/names/mine/latest",
            "a part of it is a link",
        ),
    )  # fmt: skip
    lab.run("n1", "rm", "-rf", "/var/lib/vhpc/images/own/2001")
    for user, image, change, says in cases:
        lab.run("login", "sh", "-c", change, user="alice")
        job = lab.finish("echo ran", "-w", "n1", user=user, image=image)
        lines = [line for line in job.output().splitlines() if line.startswith("vhpc")]
        assert len(lines) == 1, job.output()
        assert re.search(says, lines[0]), lines[0]
        assert "ran" not in job.output().splitlines()
    lab.quiet()
    assert lab.node_state("n1")[0] == "IDLE"
