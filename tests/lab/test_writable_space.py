# SPDX-License-Identifier: Apache-2.0
"""Files of a job outside of shared folders: on a disk of its guest, gone with it, or saved as an image."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from cluster import IMAGE, Lab
from injection import configured, let_go, one_line, runs, settled, until

pytestmark = pytest.mark.lab

DISKS = "/var/lib/vhpc/disks"
SIZE_MIB = 700
MIRROR = "203.0.113.7"
"""Address of the login host, of a documentation network (RFC 5737), as a mirror outside of the site."""
PACKAGE = "vhpc-lab-hello"


@pytest.mark.promise("disk.size")
def test_a_job_writes_more_to_its_disk_than_its_guest_has_memory(lab: Lab) -> None:
    script = """
    df -B1M --output=size,target / /tmp | tail -n +2
    free -m | awk '/Mem:/ { print "memory " $2 }'
    dd if=/dev/zero of=/tmp/half bs=1M count=450 2>&1 | grep -c copied
    sudo sh -c 'echo mine > /usr/bin/own; cat /usr/bin/own'
    dd if=/dev/zero of=/var/tmp/rest bs=1M 2>&1 | grep -o 'No space left on device'
    rm /var/tmp/rest && echo again > /var/tmp/new && cat /var/tmp/new
    echo up; until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.2; done
    """
    job = lab.submit(script, "-w", "n1", "--mem=768", f"--vhpc-disk={SIZE_MIB}M")
    runs(lab, job)
    (file,) = lab.run("n1", "ls", DISKS).out.split()
    owner, mode, size, blocks = lab.run("n1", "stat", "-c", "%u %a %s %b", f"{DISKS}/{file}").out.split()
    pid = lab.run("n1", "pgrep", "-f", f"qemu-system.* guest=vhpc-{job.id}-").out.strip()
    assert owner == lab.run("n1", "stat", "-c", "%u", f"/proc/{pid}").out.strip() != "0"
    assert (mode, int(size)) == ("600", SIZE_MIB << 20)
    assert int(blocks) * 512 >= SIZE_MIB << 20
    assert lab.run("n1", "cat", f"{DISKS}/{file}", user="alice", check=False).code != 0
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    (root, tmp, memory, *rest) = job.output().splitlines()
    (available, on), (_, also) = root.split(), tmp.split()
    assert (on, also) == ("/", "/")
    assert SIZE_MIB * 0.9 < int(available) <= SIZE_MIB
    assert int(memory.split()[1]) < 512, "the guest could not have kept it in memory"
    assert rest == ["1", "mine", "No space left on device", "again", "up"]
    settled(lab)
    assert lab.run("n1", "ls", DISKS).out == ""


@pytest.mark.promise("disk.mount")
def test_a_disk_is_mounted_where_the_job_asks_for_it(lab: Lab) -> None:
    script = """
    stat -c '%U %G %a' /local/own
    ls -A /local/own | wc -l
    awk '$2 == "/local/own" { print $1, $3 }' /proc/mounts
    df -B1M --output=size /local/own | tail -n 1
    df -B1M --output=size,target / /tmp | tail -n +2
    free -m | awk '/Mem:/ { print $2 }'
    used=$(df -B1M --output=used / | tail -n 1)
    dd if=/dev/zero of=/local/own/all bs=1M 2>&1 | grep -o 'No space left on device'
    du -m /local/own/all | cut -f 1
    [ "$(df -B1M --output=used / | tail -n 1)" -le $((used + 8)) ] && echo the root is as it was
    rm /local/own/all && echo again > /local/own/new && cat /local/own/new
    sudo sh -c 'echo mine > /usr/bin/own; cat /usr/bin/own'
    echo up; until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.2; done
    """
    job = lab.submit(script, "-w", "n1", "--mem=768", f"--vhpc-disk={SIZE_MIB}M:/local/own")
    runs(lab, job)
    (file,) = lab.run("n1", "ls", DISKS).out.split()
    assert file.startswith(f"vhpc-{job.id}-")
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    (owner, entries, mount, size, root, tmp, memory, *rest) = job.output().splitlines()
    assert (owner, entries, mount) == ("alice alice 700", "0", "/dev/vdb ext4")
    assert SIZE_MIB * 0.9 < int(size) <= SIZE_MIB
    assert [line.split()[1] for line in (root, tmp)] == ["/", "/"]
    assert int(root.split()[0]) <= int(memory) // 2 + 1, "the root's changes are in memory"
    assert int(memory) < 512
    (full, written, *rest) = rest
    assert full == "No space left on device"
    assert int(memory) < int(written) <= SIZE_MIB, "more than the guest could have kept in memory"
    assert rest == ["the root is as it was", "again", "mine", "up"]
    settled(lab)
    assert lab.run("n1", "ls", DISKS).out == ""


def test_each_guest_has_its_own_disk_for_all_of_its_users(lab: Lab) -> None:
    script = """
    srun -l sh -c 'stat -c "%U %a" /tmp; grep -c " /tmp ext4 " /proc/mounts; hostname > /tmp/name
        cat /tmp/name; sudo -u nobody touch /tmp/of-nobody; ls /tmp'
    """
    options = ("-w", "n1", "-n2", "--mem=1G", "--vhpc-guests-per-node=2", "--vhpc-disk=64M:/tmp")
    job = lab.finish(script, *options)
    assert job.show()["JobState"] == "COMPLETED", job.output()
    lines = sorted(job.output().splitlines())
    expected = ["root 1777", "1", "n1-g{}", "name", "of-nobody"]
    assert lines == sorted(f"{task}: {line.format(task)}" for task in (0, 1) for line in expected)
    settled(lab)
    assert lab.run("n1", "ls", DISKS).out == ""


@pytest.mark.promise("disk.mount")
def test_a_disk_is_not_mounted_over_folders_of_the_guest(lab: Lab) -> None:
    for place, says in (("/etc/x", "belongs to the guest's system"), ("/a/../etc", "an absolute path")):
        option = f"--vhpc-disk=64M:{place}"
        words = ("sbatch", "--vhpc-image=x", option, "--wrap=:")
        done = lab.run("login", *words, user="alice", check=False)
        assert done.code != 0
        (line,) = [line for line in done.err.splitlines() if "vhpc: " in line]
        assert option in line
        assert says in line
    job = lab.finish("echo up", "-w", "n1", "--vhpc-disk=64M:/var/run/own")
    assert job.show()["JobState"] == "FAILED"
    one_line(
        job, "could not be set up on n1: .*: links of the image lead from /var/run/own to /run/own: choose"
    )
    for place in ("/scratch", "/scratch/alice"):
        job = lab.finish("echo up", "-w", "n1", f"--vhpc-disk=64M:{place}")
        assert job.show()["JobState"] == "FAILED"
        one_line(job, rf"^vhpc: a disk cannot be mounted at {place}, because guests have the shared folder /")
    settled(lab)


@pytest.mark.promise("disk.refuse")
def test_a_disk_that_cannot_be_had_fails_the_job_in_one_line(lab: Lab) -> None:
    done = lab.run(
        "login", "sbatch", "--vhpc-image=x", "--vhpc-disk=63M", "--wrap=:", user="alice", check=False
    )
    assert done.code != 0
    assert "--vhpc-disk=63M: a size from 64M to 16T is expected" in done.err
    job = lab.finish("echo up", "-w", "n1", "--vhpc-disk=1025")
    assert job.show()["JobState"] == "FAILED"
    one_line(
        job, r"^vhpc: --vhpc-disk=1025M is larger than a guest's disk may be here: 1024 MiB \(ask for less"
    )
    with configured(lab, "n1", "disks", "keep_free_mib = 16777216"):
        job = lab.finish("echo up", "-w", "n1", "--vhpc-disk=64")
    assert job.show()["JobState"] == "FAILED"
    one_line(
        job, r"^vhpc: n1 has no space for the disks of the guests: 0 MiB .* the job needs 64 \(ask for less"
    )
    settled(lab)


@pytest.fixture
def mirror(lab: Lab) -> Iterator[str]:
    """A package mirror on the login host: one package, which says hello."""
    if "--vhost-user" not in (said := lab.run("n1", "passt", "--help", check=False)).out + said.err:
        pytest.skip(
            "nat needs passt 2024_11_27 or newer: use the lab of Debian 13 (lab/vlab up --suite trixie)"
        )
    make = f"""
    set -e
    mkdir -p tree/DEBIAN tree/usr/bin
    printf '#!/bin/sh\\necho hello from a package\\n' > tree/usr/bin/{PACKAGE}
    chmod 755 tree/usr/bin/{PACKAGE}
    printf 'Package: {PACKAGE}\\nVersion: 1\\nArchitecture: all\\nMaintainer: lab\\nDescription: hello\\n' \\
        > tree/DEBIAN/control
    dpkg-deb --root-owner-group --build tree {PACKAGE}.deb >/dev/null
    {{ cat tree/DEBIAN/control; echo "Filename: ./{PACKAGE}.deb"; stat -c 'Size: %s' {PACKAGE}.deb
       sha256sum < {PACKAGE}.deb | sed 's/^/SHA256: /; s/ *-$//'; }} > Packages
    """
    lab.run(
        "login", "sh", "-c", f"rm -rf /tmp/mirror; mkdir /tmp/mirror; cd /tmp/mirror; {make}", user="alice"
    )
    lab.run("login", "ip", "address", "replace", f"{MIRROR}/32", "dev", "lo")
    lab.run("n1", "ip", "route", "replace", f"{MIRROR}/32", "via", "10.77.0.3")
    serve = f"setsid python3 -m http.server -b {MIRROR} -d /tmp/mirror 8098"
    start = f"{serve} </dev/null >/tmp/mirror.log 2>&1 & echo $!"
    pid = lab.run("login", "sh", "-c", start, user="alice").out.strip()
    asked = f"import urllib.request as r; r.urlopen('http://{MIRROR}:8098/Packages')"
    until(lambda: lab.run("login", "python3", "-c", asked, check=False).code == 0, "the mirror", 20)
    yield f"http://{MIRROR}:8098"
    lab.run("login", "kill", pid, check=False)
    lab.run("login", "rm", "-rf", "/tmp/mirror", "/tmp/mirror.log", check=False)
    lab.run("n1", "ip", "route", "del", f"{MIRROR}/32", check=False)
    lab.run("login", "ip", "address", "del", f"{MIRROR}/32", "dev", "lo", check=False)


def installing(mirror: str) -> str:
    """A script that installs the mirror's package and runs it."""
    return f"""
    sudo rm -f /etc/apt/sources.list /etc/apt/sources.list.d/*
    echo 'deb [trusted=yes] {mirror} ./' | sudo tee /etc/apt/sources.list >/dev/null
    sudo apt-get -qq update && sudo apt-get -qq install {PACKAGE} >/dev/null && {PACKAGE}
    """


@pytest.mark.promise("tools.save")
def test_files_that_a_job_has_installed_become_an_image(lab: Lab, mirror: str) -> None:
    script = f"{installing(mirror)}\necho up; until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.2; done"
    job = lab.submit(script, "-w", "n1", "--vhpc-network=nat", "--vhpc-disk=256M")
    runs(lab, job)
    assert job.output().splitlines()[-2:] == ["hello from a package", "up"], job.output()
    denied = lab.run("login", "vhpc", "save", str(job.id), "own/stolen", user="bob", check=False)
    assert denied.code != 0
    words = ("vhpc", "save", str(job.id), "own/saved", "--json")
    saved = json.loads(lab.run("login", *words, user="alice", timeout=300).out)
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    shown = json.loads(lab.run("login", "vhpc", "image", "show", "own/saved", "--json", user="alice").out)
    assert (
        shown["provenance"]["parent"] == saved["parent"] == job.accounted("AdminComment")[0].partition("@")[2]
    )
    script = f"{PACKAGE}; dpkg -s {PACKAGE} | grep Status; id -un; hostname; ls /tmp /etc/resolv.conf; true"
    again = lab.finish(script, "-w", "n1", image="own/saved")
    assert again.show()["JobState"] == "COMPLETED"
    lines = again.output().splitlines()
    assert lines[:4] == ["hello from a package", "Status: install ok installed", "alice", "n1"]
    assert "/etc/resolv.conf" not in lines
    settled(lab)
    lab.run("login", "rm", "-rf", "/scratch/alice", "/scratch/bob")
    lab.run("n1", "rm", "-rf", "/var/lib/vhpc/images/own/2001")


@pytest.mark.promise("tools.save-option")
def test_a_script_is_a_recipe_of_an_image(lab: Lab) -> None:
    options = ("--vhpc-save=own/made", "--vhpc-disk=64M:/local")
    script = "echo of this job > /local/file && sudo sh -c 'echo made by a script > /etc/made'"
    job = lab.finish(script, "-w", "n1", *options)
    assert job.accounted("State,ExitCode") == ["COMPLETED", "0:0"], job.output()
    assert re.search(r"^own/made:latest sha256:[0-9a-f]{64}$", job.output(), re.M)
    again = lab.finish("cat /etc/made; ls -A /local && echo empty", "-w", "n1", image="own/made")
    assert again.output() == "made by a script\nempty\n"
    failed = lab.finish("exit 3", "-w", "n1", "--vhpc-save=own/not-made")
    assert failed.accounted("ExitCode") == ["3:0"]
    assert "vhpc: the guest is not saved as own/not-made:latest, because the script failed" in failed.output()
    names = lab.run("login", "vhpc", "image", "ls", "--own", user="alice").out
    assert "own/made" in names
    assert "not-made" not in names
    settled(lab)
    lab.run("login", "rm", "-rf", "/scratch/alice")
    lab.run("n1", "rm", "-rf", "/var/lib/vhpc/images/own/2001")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("sbatch", "--vhpc-save=made", "--wrap=:"), "own/NAME[:TAG] is expected"),
        (("sbatch", "--vhpc-save=own/made", "--vhpc-batch=host", "--wrap=:"), "remove one of the two"),
        (("srun", "--vhpc-save=own/made", "true"), "it is for sbatch only"),
    ],
)
def test_a_failed_save_creates_no_job(lab: Lab, command: tuple[str, ...], says: str) -> None:
    program, *rest = command
    done = lab.run("login", program, f"--vhpc-image={IMAGE}", *rest, user="alice", check=False)
    assert done.code != 0
    assert says in done.err
