# SPDX-License-Identifier: Apache-2.0
"""A user's own containers and file trees as guests, from files that umoci and skopeo wrote."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from busybox import BUSYBOX, docker_archive
from cluster import Job, Lab
from twins import nodes_in_zone

pytestmark = pytest.mark.lab

SOURCE = "docker-archive:box.tar:box:1"
OWN = "/scratch/alice/images"
ZONE = Path("/usr/share/zoneinfo/Asia/Kolkata")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return docker_archive(tmp_path_factory.mktemp("container"))


@pytest.fixture(scope="module")
def home(lab: Lab, archive: Path) -> Iterator[str]:
    """Alice's home has the archive, and a folder that is no system."""
    encoded = base64.b64encode(archive.read_bytes()).decode()
    lab.run("login", "sh", "-c", "base64 -d > box.tar", user="alice", stdin=encoded)
    yield "/home/alice"
    lab.run("login", "rm", "-rf", "/scratch/alice", "box.tar", "tree", user="alice")


SCRIPT = """
echo $GREETING; echo $PATH; tool; ls /removed 2>&1; stat -c %u:%g /owned; id -un; pwd; echo $HOME
grep -c . /etc/passwd > counted; cat counted
srun -n2 sh -c 'echo $GREETING on $(hostname)'
export GREETING=changed; srun -n1 sh -c 'echo $GREETING'
# as the script got it: a shell exports no such names
tr '\\n\\0' '|\\n' < /proc/$$/environ | grep -e '^com\\.' -e '^BASH_FUNC_m' | sort
"""


@pytest.mark.promise("import.container")
def test_a_container_runs_jobs_as_a_guest(lab: Lab, home: str) -> None:
    done = lab.run(
        "login",
        "vhpc",
        "image",
        "import",
        SOURCE,
        "own/box",
        user="alice",
        timeout=300,
    )
    name, digest = done.out.split()
    assert name == "own/box:latest"
    assert "vhpc: layer 2 of 2" in done.err.splitlines()
    job = lab.finish(SCRIPT, "-w", "n1", "-n2", image="own/box")
    assert job.accounted("State,AdminComment") == ["COMPLETED", f"vhpc: image own/box:latest@{digest}"]
    lines = job.output().splitlines()
    assert lines[:4] == [
        "hello from the image",
        "/opt/tool/bin:/usr/bin:/bin",
        "the tool of the container",
        "ls: /removed: No such file or directory",
    ]
    assert lines[4:8] == ["990:990", "alice", home, home]
    assert lines[9:] == [
        *["hello from the image on n1"] * 2,
        "changed",
        "BASH_FUNC_m%%=() {|}",
        "com.example.conf-dir=/etc/x",
    ]
    assert lab.read("alice", "counted").strip() == lines[8]
    (row,) = [
        row for row in lab.vhpc("login", "image", "ls", "--catalog", OWN) if row["image"] == "box:latest"
    ]
    assert row["digest"] == digest
    again = lab.run("login", "vhpc", "image", "import", SOURCE, "own/box", user="alice", timeout=300)
    assert again.out.split() == [name, digest]
    assert "the name pointed to the same image before" in again.err


@pytest.mark.promise("import.container")
def test_a_folder_and_a_tar_of_it_run_jobs(lab: Lab, home: str) -> None:
    encoded = base64.b64encode(BUSYBOX.read_bytes()).decode()
    script = (
        "mkdir -p tree/bin && cd tree/bin && base64 -d > busybox && chmod 755 busybox && "
        "for name in sh stat uname; do ln -sf busybox $name; done; tar -C .. -czf ../../tree.tar.gz ."
    )
    lab.run("login", "sh", "-c", script, user="alice", stdin=encoded)
    for source, name, owner in (("tree", "folder", "0:0"), ("tree.tar.gz", "tar", "2001:2001")):
        lab.run("login", "vhpc", "image", "import", source, f"own/{name}", user="alice", timeout=300)
        job = lab.finish("stat -c %u:%g /bin/busybox; uname -r", "-w", "n1", image=f"own/{name}")
        assert job.accounted("State") == ["COMPLETED"], job.output()
        kernel = lab.run("n1", "uname", "-r").out.strip()
        lines = job.output().splitlines()
        assert lines[0] == owner
        assert lines[1] != kernel


@pytest.mark.skipif(not ZONE.exists(), reason="needs time zones: apt install tzdata")
def test_links_of_an_image_lead_to_what_is_made(lab: Lab, home: str) -> None:
    """Images of ostree have no /var/home before their first boot. This one has no time zones either."""
    encoded = base64.b64encode(BUSYBOX.read_bytes()).decode()
    links = {
        "home": "var/home",
        "scratch": "/var/mnt/scratch",
        "tmp": "sysroot/tmp",
        "run": "/var/run",
        "etc/resolv.conf": "../run/systemd/resolve/stub-resolv.conf",
        "etc/passwd": "/store/passwd",
        "etc/localtime": "../usr/share/zoneinfo/UTC",
    }
    script = "mkdir -p ostree/bin ostree/etc && cd ostree/bin && base64 -d > busybox && chmod 755 busybox && "
    script += "for name in sh stat date id pwd ls; do ln -sf busybox $name; done; cd ..; "
    script += "; ".join(f"ln -s {target} {path}" for path, target in links.items())
    lab.run("login", "sh", "-c", script, user="alice", stdin=encoded)
    lab.run("login", "vhpc", "image", "import", "ostree", "own/ostree", user="alice", timeout=300)
    with nodes_in_zone(lab, ZONE):
        job = lab.finish(
            "id -un; pwd; : > from-the-guest; stat -c %a /tmp/.; : > /tmp/x; ls /scratch; date +%z",
            *("-w", "n1"),
            image="own/ostree",
        )
    user, where, mode, *folders, found = job.output().splitlines()
    assert (user, mode, found) == ("alice", "1777", "+0530")
    assert where in ("/home/alice", "/var/home/alice")
    assert "alice" in folders
    lab.run("login", "rm", "from-the-guest", user="alice")
    lab.run("login", "rm", "-r", "ostree", user="alice")


def test_a_shell_in_a_container_is_one_command(lab: Lab, home: str) -> None:
    typed = "echo $GREETING; hostname; exit 7\n"
    for word in ("now", "already"):
        command = ["vhpc", "shell", "docker-archive:./box.tar", "-w", "n1", "-n1"]
        done = lab.run("login", *command, user="alice", stdin=typed, check=False, timeout=300)
        assert done.code == 7, done
        for said in ("hello from the image", "n1"):
            assert re.search(rf"(^|[$#] ){said}$", done.out, re.M), done.out
        assert re.search(
            rf"^vhpc: docker-archive:/home/alice/box.tar is own/box.tar-[0-9a-f]{{8}}:latest {word}$",
            done.err,
            re.M,
        )
    unknown = lab.run("login", "vhpc", "shell", "debian-minimum", user="alice", check=False)
    assert unknown.code != 0
    assert "image debian-minimum:latest is unknown" in unknown.err


def test_a_bad_import_says_why_and_leaves_nothing(lab: Lab, home: str) -> None:
    cases = (
        ("docker-archive:box.tar:none", "it has no such image"),
        ("oci-archive:box.tar", "it has no file index.json"),
        ("docker-archive:cut.tar", "not a sound"),
        ("none.tar", "/home/alice/none.tar does not exist"),
        ("/etc/shadow.tar", "does not exist"),
        ("docker://", "it is not [REGISTRY/]NAME[:TAG|@DIGEST]"),
        ("dir:/root", "cannot import dir:/root"),
    )
    lab.run("login", "sh", "-c", "head -c 100000 box.tar > cut.tar", user="alice")
    for source, says in cases:
        done = lab.run(
            "login", "vhpc", "image", "import", source, "own/bad", user="alice", check=False, timeout=300
        )
        assert done.code == 1
        last = done.err.splitlines()[-1]
        assert last.startswith("vhpc: cannot ")
        assert says in last
    left = lab.run(
        "login", "find", OWN, "-name", ".import-*", "-o", "-name", "bad", user="alice", check=False
    )
    assert not left.out
    lab.run("login", "mkdir", "-p", "tree", user="alice")
    refused = lab.run("login", "vhpc", "image", "import", "tree", "box", user="alice", check=False)
    assert "cannot change the image catalogue /shared/vhpc/catalog" in refused.err


@pytest.mark.promise("import.cached")
def test_a_job_names_a_container_by_its_source(lab: Lab, home: str) -> None:
    source = "docker-archive:./box.tar:box:1"
    words = ("sbatch", "--parsable", f"--vhpc-image={source}", "-w", "n1", "-n1")
    script = "#!/bin/sh\necho $GREETING; echo $VHPC_JOB_IMAGE; srun -n1 sh -c 'echo a step; tool'\n"
    for word in ("now", "already"):
        done = lab.run("login", *words, user="alice", stdin=script, timeout=300)
        assert done.err.splitlines()[-1].endswith(f" {word}"), done.err
        job = Job(lab, int(done.out), "alice")
        assert job.wait() == "COMPLETED", job.output()
        greeting, image, *rest = job.output().splitlines()
        assert (greeting, rest) == ("hello from the image", ["a step", "the tool of the container"])
        assert re.fullmatch(r"own/box.tar-box-1-[0-9a-f]{8}:latest@sha256:[0-9a-f]{64}", image)
        assert job.accounted("AdminComment") == [f"vhpc: image {image}"]
    shell = ("srun", f"--vhpc-image={source}", "-w", "n1", "-n1", "sh", "-c", "echo $GREETING; tool")
    done = lab.run("login", *shell, user="alice", timeout=300)
    assert done.out.splitlines() == ["hello from the image", "the tool of the container"]


@pytest.mark.promise("import.cached")
def test_a_source_that_is_refused_creates_no_job(lab: Lab, home: str) -> None:
    before = lab.run("ctl", "sacct", "-nXa", "-S", "now-1hour", "-o", "JobID").out
    for command in (("sbatch", "--wrap=true"), ("salloc", "true"), ("srun", "true")):
        asked = (command[0], "--vhpc-image=docker-archive:./absent.tar", *command[1:])
        done = lab.run("login", *asked, user="alice", check=False)
        assert done.code != 0
        lines = [line for line in done.err.splitlines() if "vhpc: " in line]
        assert lines[0].startswith("vhpc: cannot import docker-archive:/home/alice/absent.tar: ")
        assert lines[0].endswith("/absent.tar does not exist")
        assert "there is no image of docker-archive:./absent.tar, so no job was created" in lines[1]
    assert lab.run("ctl", "sacct", "-nXa", "-S", "now-1hour", "-o", "JobID").out == before


FLIP = """
import glob
marker = bytes.fromhex("{marker}")
for path in glob.glob("/var/lib/vhpc/images/own/2001/**", recursive=True):
    try:
        data = open(path, "rb").read()
    except IsADirectoryError:
        continue
    if marker in data:
        with open(path, "r+b") as file:
            file.seek(data.index(marker) + 5000)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        print(path)
"""
"""Changes one byte of the file that begins with the marker, on the node's disk."""


def test_a_changed_block_is_an_error_in_the_guest(lab: Lab, home: str) -> None:
    encoded = base64.b64encode(BUSYBOX.read_bytes()).decode()
    script = (
        "mkdir -p marked/bin && cd marked/bin && base64 -d > busybox && chmod 755 busybox && "
        "for name in sh cat md5sum; do ln -sf busybox $name; done; "
        "head -c 65536 /dev/urandom > ../data; md5sum < ../data; od -An -v -tx1 -N64 ../data | tr -d ' \\n'"
    )
    done = lab.run("login", "sh", "-c", script, user="alice", stdin=encoded)
    (md5, _), marker = done.out.splitlines()[0].split(), done.out.splitlines()[1]
    lab.run("login", "vhpc", "image", "import", "marked", "own/marked", user="alice", timeout=300)
    job = lab.finish("md5sum < /data; cat /sys/block/dm-0/dm/name", "-w", "n1", image="own/marked")
    assert job.output().splitlines()[0].split()[0] == md5
    assert job.output().splitlines()[-1] == "vhpc-root"
    path = lab.run("n1", "python3", "-", stdin=FLIP.format(marker=marker)).out.strip()
    assert path.startswith("/var/lib/vhpc/images/own/2001/")
    words = "cat /data > /dev/null; echo status $?; cat /data | md5sum; echo still here"
    job = lab.finish(words, "-w", "n1", image="own/marked")
    lines = job.output().splitlines()
    assert "cat: read error: Input/output error" in lines
    assert lines[-1] == "still here"
    assert "status 1" in lines
    assert not any(md5 in line for line in lines)
    assert job.accounted("State") == ["COMPLETED"]
    lab.run("n1", "rm", path)
    job = lab.finish("md5sum < /data", "-w", "n1", image="own/marked")
    assert job.output().split()[0] == md5
    lab.run("login", "rm", "-rf", "marked", user="alice")
