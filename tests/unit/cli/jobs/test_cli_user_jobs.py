# SPDX-License-Identifier: Apache-2.0
"""`vhpc ps`, `timeline` and `console` of a user, with a real vhpcd and vhpc-run; srun is a script."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from controller_lab import HAVE_MUNGED, NOBODY, Munged, allocation, request, stop
from forked_vhpc import Forked, run, run_json
from vhpcd_process import Vhpcd, make

from vhpc_slurm.cli.jobs import bootline
from vhpc_slurm.cli.jobs import console as console_verb
from vhpc_slurm.model import GuestPlacement, Lease, NodeReport, Stage, Timeline
from vhpc_slurm.node.guest import console

pytestmark = pytest.mark.skipif(
    not HAVE_MUNGED or os.geteuid() != 0, reason="needs munged (apt install munge), and root to become users"
)
pytest_plugins = ["guest_rig"]
OWNER = pwd.getpwnam("games").pw_uid


@dataclass
class Site:
    """A vhpcd whose configuration users can read."""

    vhpcd: Vhpcd

    @property
    def config(self) -> Path:
        return self.vhpcd.folder / "vhpc.toml"

    def run(self, uid: int, *argv: str, code: int = 0) -> str:
        return run(uid, self.config, *argv, code=code)

    def json(self, uid: int, *argv: str) -> Any:
        return run_json(uid, self.config, *argv)

    def opened(self, job_id: int, uid: int = OWNER, **more: Any) -> Lease:
        user = pwd.getpwuid(uid).pw_name
        return self.vhpcd.client.open_generation(request(job_id, uid=uid, user=user, **more), allocation())


@pytest.fixture
def site(daemon: Munged) -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="vhpcd-"))
    folder.chmod(0o755)
    vhpcd = make(folder, daemon)
    (folder / "bin/sacctmgr").write_text("#!/bin/sh\n")
    (folder / "bin/sacctmgr").chmod(0o755)
    try:
        yield Site(vhpcd.start())
    finally:
        if vhpcd.process is not None:
            stop(vhpcd.process)
        shutil.rmtree(folder)


@pytest.fixture
def node(site: Site, programs: Path) -> Path:
    """The run folder of job 42 on n1, with a console; srun starts its task here."""
    folder = site.vhpcd.folder
    guest = folder / "run/jobs/42/g0"
    guest.mkdir(parents=True)
    console.prepare(guest / "console.log", OWNER)
    with (guest / "console.log").open("wb") as log:
        log.write(b"\x1b[1mbooting\x1b[0m\r\n\x07two\r\n")
    program = folder / "bin/vhpc-run"  # users may have no access to the folder in which it was built
    shutil.copy(programs / "vhpc-run", program)
    (folder / "bin/srun").write_text(
        f"""#!/bin/sh
echo "$*" >> /tmp/srun-{os.getpid()}-$(id -u)
while [ "$1" != vhpc-console ]; do shift; done
VHPC_RUN_SOCKET={guest}/run.sock exec {program} -- "$@"
"""
    )
    (folder / "bin/srun").chmod(0o755)
    return guest


@pytest.fixture
def calls() -> Iterator[Path]:
    """How srun was called."""
    path = Path(f"/tmp/srun-{os.getpid()}-{OWNER}")
    yield path
    path.unlink(missing_ok=True)


def test_ps_lists_the_users_own_jobs(site: Site) -> None:
    site.opened(42)
    site.opened(43, NOBODY)
    assert [row["job"] for row in site.json(OWNER, "ps")] == [42]
    assert [row["job"] for row in site.json(NOBODY, "ps", "--all")] == [43]
    site.vhpcd.client.ending(42, None)
    assert site.json(OWNER, "ps") == []
    assert [row["state"] for row in site.json(OWNER, "ps", "--all")] == ["released"]


def test_a_timeline_is_the_owners_also_after_the_end(site: Site) -> None:
    lease = site.opened(42)
    assert "vhpcd has no timeline of job 42 yet" in site.run(OWNER, "timeline", "42", code=1)
    stages = (Stage("start g0", 1.0, 2.0), Stage("setup g0", 2.0, 4.0, "\x1b[2J"))
    site.vhpcd.client.report_timeline(Timeline(lease.generation, "n1", stages))
    site.vhpcd.client.ending(42, None)
    text = site.run(OWNER, "timeline", "42")
    assert "n1: ready after 3.000 s" in text
    assert "\x1b" not in text
    refused = site.run(NOBODY, "timeline", "42", code=1)
    assert refused == (
        "vhpc: vhpcd shows you no job 42: the job has no guests, it ended long ago, or it belongs to another "
        "user (see: vhpc ps --all)\n"
    )
    assert site.run(NOBODY, "timeline", "999", code=1) == refused.replace("42", "999")


@pytest.mark.promise("vhpcd.user-view")
def test_a_report_is_the_owners_also_after_the_end(site: Site) -> None:
    lease, client = site.opened(42), site.vhpcd.client
    report = NodeReport(lease.generation, "n1", None, (GuestPlacement(0, "n1", (3,), ((0, 512),)),), ("hm",))
    client.report_timeline(Timeline(lease.generation, "n1", (Stage("start g0", 1.0, 2.0),)), report)
    client.ending(42, None)
    document = site.json(OWNER, "report", "42")
    assert (document["state"], document["nodes"][0]["guests"][0]["os_cpus"]) == ("released", [3])
    assert document["lines"] == [{"from": "n1", "line": "hm"}]
    assert site.run(OWNER, "report", "42", "--html", "-").endswith("</html>\n")
    assert "vhpcd shows you no job 42" in site.run(NOBODY, "report", "42", code=1)
    assert site.run(0, "report", "41", code=1).startswith("vhpc: vhpcd has no job 41")


def test_a_console_is_read_by_a_step_of_the_job(site: Site, node: Path, calls: Path) -> None:
    site.opened(42)
    assert site.run(OWNER, "console", "42") == "booting\n?two\n"
    assert site.json(OWNER, "console", "42", "n1")["console"] == "booting\n?two\n"
    assert calls.read_text().splitlines()[-1] == (
        "--jobid 42 --overlap -N1 -n1 --nodelist=n1 --input=none vhpc-console 0"
    )
    assert "job 42 has no guest on n9: its nodes are n[1-2]" in site.run(OWNER, "console", "42", "n9", code=1)
    assert "has no guest 1" in site.run(OWNER, "console", "42", "--guest", "1", code=1)
    assert "vhpcd shows you no job 42" in site.run(NOBODY, "console", "42", code=1)
    site.vhpcd.client.ending(42, None)
    assert "job 42 has ended" in site.run(OWNER, "console", "42", code=1)


@pytest.mark.promise("tools.console")
def test_a_console_is_followed_until_the_epilog_removes_it(site: Site, node: Path, calls: Path) -> None:
    site.opened(42)
    process = Forked(OWNER, site.config, "console", "42", "--follow")
    process.read_until("booting\n?two\n")
    with (node / "console.log").open("ab") as log:
        log.write(b"three\r\n")
    process.read_until("three\n")
    (node / "console.log").unlink()
    assert process.end() == (0, "", "")


def test_a_console_shows_the_step_that_it_waits_for(site: Site, node: Path, calls: Path) -> None:
    """Slurm starts the step that reads it when the guests are ready; until then there is nothing to print."""
    site.opened(42)
    srun, go = site.vhpcd.folder / "bin/srun", site.vhpcd.folder / "go"
    begin = f"#!/bin/sh\nwhile [ ! -e {go} ]; do sleep 0.1; done\n"
    srun.write_text(srun.read_text().replace("#!/bin/sh\n", begin, 1))
    process = Forked(OWNER, site.config, "console", "42", "--follow")
    boots = "vhpc: job 42 boots, and its consoles can be read when all guests are ready: 0 of 2 guests ready"
    assert process.read_error_until("\n") == f"{boots}\n"
    site.vhpcd.client.look(42, 0, "n1", ("agent g0", 12.0))
    assert process.read_error_until("\n").startswith(f"{boots}, n1: agent for ")
    go.touch()
    process.read_until("two\n")
    (node / "console.log").unlink()
    assert process.end()[:2] == (0, "")


def test_empty_console_is_reported_once(
    site: Site, node: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quiet kernel writes nothing."""
    monkeypatch.setattr(console_verb, "ASK_S", 0.1)
    monkeypatch.setattr(bootline, "AGAIN_S", 0.1)
    lease = site.opened(42)
    for name in lease.allocation.node_names:
        stages = (Stage("setup g0", 1.0, 2.0),)
        site.vhpcd.client.report_timeline(Timeline(lease.generation, name, stages))
    (node / "console.log").write_bytes(b"")
    process = Forked(OWNER, site.config, "console", "42", "--follow")
    line = process.read_error_until("\n")
    assert line.startswith("vhpc: no text from job 42 yet: ")
    time.sleep(2)  # twenty times as long as until the next question
    (node / "console.log").unlink()
    assert process.end() == (0, "", "")


def test_following_succeeds_when_slurm_ends_the_step(site: Site, node: Path, calls: Path) -> None:
    site.opened(42)
    (site.vhpcd.folder / "bin/srun").write_text(
        "#!/bin/sh\necho last words\n"
        "echo 'slurmstepd: error: *** STEP 42.1 ON n1 CANCELLED AT 2026-11-23T10:00:00 ***' >&2\nexit 1\n"
    )
    # squeue knows no job 42
    assert site.run(OWNER, "console", "42", "--follow") == "last words\n"
    squeue = site.vhpcd.folder / "bin/squeue"
    squeue.write_text("#!/bin/sh\necho '42|RUNNING|None|n1'\n")
    assert "STEP 42.1 ON n1 CANCELLED" in site.run(OWNER, "console", "42", "--follow", code=1)
    squeue.write_text("#!/bin/sh\necho '42|CANCELLED|None|n1'\n")
    assert site.run(OWNER, "console", "42", "--follow") == "last words\n"
    assert "STEP 42.1 ON n1 CANCELLED" in site.run(OWNER, "console", "42", code=1)


def test_a_long_console_is_printed_with_its_gap(site: Site, node: Path, calls: Path) -> None:
    site.opened(42)
    with (node / "console.log").open("r+b") as log:
        log.truncate(0)
        log.write(b"begin\n".ljust(4096, b"."))
        log.seek(1 << 20)
        log.write(b"\nend\n")
    text = site.run(OWNER, "console", "42")
    assert text.startswith("begin\n")
    assert f"\n[{(1 << 20) - 4096} bytes left out]\n" in text
    assert text.endswith("\nend\n")


@pytest.mark.promise("attack.console-read")
def test_only_the_owner_can_read_a_console_file(site: Site, node: Path) -> None:
    read = ["cat", str(node / "console.log")]
    codes = {
        uid: subprocess.run(
            read, user=uid, group=60, extra_groups=[], capture_output=True, check=False
        ).returncode
        for uid in (OWNER, NOBODY, 1)
    }
    assert codes == {OWNER: 0, NOBODY: 1, 1: 1}
    write = ["sh", "-c", f"echo x >> {node}/console.log"]
    done = subprocess.run(write, user=OWNER, group=60, extra_groups=[], capture_output=True, check=False)
    assert done.returncode != 0


@pytest.mark.parametrize("arguments", [(), ("x",), ("-1",), ("0", "on"), ("0", "follow", "more"), ("99999",)])
def test_wrong_arguments_of_the_console_program(programs: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [programs / "vhpc-run", "--socket", "/nowhere/g0/run.sock", "--", "vhpc-console", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (64, "usage: vhpc-console GUEST [follow]\n")


def test_a_console_that_is_not_there_is_one_line(programs: Path) -> None:
    done = subprocess.run(
        [programs / "vhpc-run", "--socket", "/nowhere/g0/run.sock", "--", "vhpc-console", "3", "follow"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "vhpc: couldn't read the console of guest 3: /nowhere/g3/console.log: No such file or directory\n"
    )
