# SPDX-License-Identifier: Apache-2.0
"""Mistakes and faults: one clear line for whom it concerns, and the right thing happens to job and node."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from cluster import IMAGE, NODES, Job, Lab
from injection import ask_again, boots, requeued, settled, until
from variants import PRELUDE

pytestmark = pytest.mark.lab

# Variants of the real image: a manifest of its own for each way to be broken.
VARIANTS = f"""
base = load("{IMAGE}")
junk = b"no archive, so the kernel finds no init and no root"
digest = hashlib.sha256(junk).hexdigest()
(top / "blobs/sha256" / digest).write_bytes(junk)
publish("test-panic", base | {{"initrd": base["initrd"] | {{"sha256": digest, "size": len(junk)}}}})
publish("test-silent", base | {{"init": "/usr/bin/cat"}})
publish("test-huge", base | {{"min_memory_mib": 100000}})
publish("test-cpus", base | {{"min_cpus": 4096}})
publish("test-init", base | {{"cmdline": "init=/nowhere"}})
unhashed = {{key: value for key, value in base.items() if key != "verity"}}  # another root has another size
fake = b"not what the manifest says"
wrong = "0" * 64
(top / "blobs/sha256" / wrong).write_bytes(fake)
for name, digest, size in (("test-fifo", "1" * 64, base["root"]["size"]), ("test-sparse", "2" * 64, 2 << 40)):
    blob = top / "blobs/sha256" / digest
    blob.unlink(missing_ok=True)
    os.mkfifo(blob) if name == "test-fifo" else (blob.touch(), os.truncate(blob, size))
    publish(name, unhashed | {{"root": base["root"] | {{"sha256": digest, "size": size}}}})
publish("test-damaged", unhashed | {{"root": base["root"] | {{"sha256": wrong, "size": len(fake)}}}})
"""


@pytest.fixture(scope="module", autouse=True)
def _variants(lab: Lab) -> Iterator[None]:
    catalog = lab.vhpc("ctl", "config")["images"]["catalog"]
    lab.run("ctl", "python3", "-", stdin=PRELUDE + VARIANTS)
    yield
    names = "rm -rf names/test-*; rm -f blobs/sha256/0000* blobs/sha256/1111* blobs/sha256/2222*"
    lab.run("ctl", "sh", "-c", f"cd {catalog} && {names}")


def one_line(job: Job, pattern: str) -> None:
    """The job's output is one line of ours, and it says this."""
    lines = job.output().splitlines()
    assert len(lines) == 1, job.output()
    assert re.search(pattern, lines[0]), lines[0]


def failed_cleanly(lab: Lab, job: Job) -> None:
    assert job.accounted() == ["FAILED", "1:0"]
    lab.quiet()
    assert {lab.node_state(node)[0] for node in NODES} == {"IDLE"}


@pytest.mark.promise(
    "image.cpus", "user.image", "job.one-line", "attack.drain", "attack.manifest", "attack.blob"
)
@pytest.mark.parametrize(
    ("image", "options", "says"),
    [
        ("no-such-image", (), r"no-such-image.*vhpc image ls"),
        ("test-damaged", (), r"test-damaged.*root: it has sha256"),
        ("test-fifo", (), r"test-fifo.*root: it is not a regular file"),
        ("test-sparse", (), r"test-sparse.*too large for this node"),
        ("test-panic", (), r"test-panic.*did not boot on n[12].*[Kk]ernel panic"),
        ("test-silent", ("--vhpc-timeout=20",), r"test-silent.*within 20 s on n[12].*--vhpc-timeout"),
        ("test-huge", (), r"100000 MiB.*--mem"),
        (
            "test-cpus",
            (),
            r"test-cpus:latest needs 4096 CPUs: the job has \d+ on n[12] .*--cpus-per-task=4096",
        ),
        ("test-init", (), r"test-init.*unusable manifest: cmdline has 'init=/nowhere'"),
        (IMAGE, ("--vhpc-timeout=3600",), r"--vhpc-timeout=3600 is longer than a boot may take here: \d+ s"),
    ],
)
def test_a_bad_image_fails_the_job_with_one_line_and_no_node(
    lab: Lab, image: str, options: tuple[str, ...], says: str
) -> None:
    job = lab.finish("echo the script ran", *options, image=image)
    assert "the script ran" not in job.output()
    one_line(job, says)
    failed_cleanly(lab, job)


@pytest.mark.promise("user.image")
def test_the_console_of_a_failed_guest_is_next_to_the_output(lab: Lab) -> None:
    job = lab.finish("true", "-w", "n1", image="test-panic")
    assert "Kernel panic" in job.output("vhpc-{id}-n1.console")
    owner = lab.run("login", "stat", "-c", "%u %a", f"/home/alice/vhpc-{job.id}-n1.console").out
    assert owner == "2001 600\n"


@pytest.mark.promise("boot.cancel")
def test_a_cancelled_job_with_a_silent_guest_frees_its_node(
    lab: Lab,
) -> None:
    """slurmd runs no Epilog before the Prolog has ended, which here would be after 120 s."""
    job = lab.submit("echo ran", "-w", "n1", image="test-silent")
    boots(lab, job, "n1")
    lab.run("login", "scancel", str(job.id), user="alice")
    assert job.wait(timeout=100) == "CANCELLED"
    settled(lab)


def test_srun_says_the_line_on_the_users_terminal(lab: Lab) -> None:
    done = lab.run("login", "srun", "--vhpc-image=no-such-image", "true", user="alice", check=False)
    assert done.code != 0
    assert "no-such-image" in done.err


@pytest.mark.promise("user.options")
@pytest.mark.parametrize(
    "option",
    [
        "--vhpc-image=../../etc",
        "--vhpc-image=",
        "--vhpc-image=a b",
        "--vhpc-image=x<y>",
        "--vhpc-image=$(reboot)",
        "--vhpc-mem-reserve=much",
        "--vhpc-batch=moon",
        "--vhpc-timeout=-1",
        "--vhpc-timeout=1e9",
        "--vhpc-console=a\nb",
    ],
)
def test_a_bad_option_is_refused_before_there_is_a_job(lab: Lab, option: str) -> None:
    base = [] if option.startswith("--vhpc-image") else [f"--vhpc-image={IMAGE}"]
    done = lab.run("login", "sbatch", *base, option, "--wrap=true", user="alice", check=False)
    assert done.code != 0
    assert option.split("=", maxsplit=1)[0] in done.err
    assert "Submitted" not in done.out


@pytest.mark.promise("place.memory")
def test_memory_below_the_images_minimum_is_refused_with_numbers(lab: Lab) -> None:
    job = lab.finish("true", "--mem=300")
    one_line(job, r"192 MiB.* 300 MiB .*leaving 44 .*--mem=448M")
    failed_cleanly(lab, job)


def test_a_job_of_root_is_refused(lab: Lab) -> None:
    done = lab.run("login", "srun", f"--vhpc-image={IMAGE}", "true", check=False)
    assert done.code != 0
    assert "vhpc: jobs of root do not run in guests" in done.err


@pytest.mark.promise("libvirt.down")
@pytest.mark.usefixtures("no_health_check")  # which would drain the node too, perhaps before the job starts
def test_libvirtd_down_drains_the_node_and_requeues_the_job(lab: Lab) -> None:
    lab.service("n1", "kill", "libvirtd")
    try:
        job = lab.submit("hostname", "-w", "n1")
        until(lambda: "DRAIN" in lab.node_state("n1")[0], "the node to be drained")
        until(lambda: requeued(job), "the job to be requeued")
        state, reason = lab.node_state("n1")
        assert re.search(r"vhpc: cannot connect to libvirt", reason), (state, reason)
        show = job.show()
        assert (show["JobState"], show["Restarts"]) == ("PENDING", "1")
        assert lab.node_state("n2")[0] == "IDLE"
    finally:
        lab.service("n1", "start", "libvirtd")
        lab.resume("n1")
    lab.run("ctl", "scontrol", "release", str(job.id))
    ask_again(lab, job)
    assert job.wait(timeout=300) == "COMPLETED"
    assert job.output() == "n1\n"


@pytest.mark.promise("libvirt.busy")
@pytest.mark.usefixtures("no_health_check")
def test_silent_libvirtd_requeues_the_job_and_is_an_alarm(lab: Lab) -> None:
    """As one whose connections are used up; the node would be drained after five minutes."""
    lab.run("n1", "pkill", "-STOP", "-x", "libvirtd")
    try:
        job = lab.submit("hostname", "-w", "n1")
        until(lambda: requeued(job), "the job to be requeued", 120)
        assert job.show()["Restarts"] == "1"
        assert "DRAIN" not in lab.node_state("n1")[0]
    finally:
        lab.run("n1", "pkill", "-CONT", "-x", "libvirtd")
    alarms = [one["what"] for one in lab.vhpc("ctl", "doctor", check=False) if one["check"] == "alarms"]
    assert any("cannot connect to libvirt: libvirt did not answer" in what for what in alarms), alarms
    ask_again(lab, job)
    assert job.wait(timeout=300) == "COMPLETED"
    assert job.output() == "n1\n"


@pytest.mark.promise("vhpcd.down")
def test_vhpcd_down_requeues_the_job_and_drains_nothing(lab: Lab) -> None:
    lab.service("ctl", "stop", "vhpcd")
    try:
        job = lab.submit("hostname", "-w", "n2")
        until(lambda: requeued(job), "the job to be requeued")
        assert job.show()["Restarts"] == "1"
    finally:
        lab.service("ctl", "start", "vhpcd")
    ask_again(lab, job)
    assert job.wait(timeout=300) == "COMPLETED"
    assert job.output() == "n2\n"
    settled(lab)  # with no node drained
