# SPDX-License-Identifier: Apache-2.0
"""One contract for every adapter of the Slurm port.

``replayed`` runs the scontrol adapter against stand-ins for Slurm's commands
that print what the real ones printed (data/scontrol); ``scontrol`` and
``pyslurm`` run against the cluster of this host where there is one.  With a
pyslurm, both must say the same of each job of that cluster, field by field;
lab/test_slurm_adapters.py makes the jobs for it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.database import Database
from vhpc_slurm.slurm import commands
from vhpc_slurm.slurm.port import NoSuchJobError, NotRequeueableError, Slurm, SlurmError
from vhpc_slurm.slurm.pyslurm_adapter import PySlurm
from vhpc_slurm.slurm.pyslurm_client import UnusableError
from vhpc_slurm.slurm.scontrol import Scontrol

DATA = Path(__file__).parents[2] / "data"
GONE = 99999
ADAPTERS = ("replayed-22.05", "replayed-24.11", "replayed-26.05", "scontrol", "pyslurm")

# Exit codes and messages of the commands for a job that is unknown: as captured.
SCONTROL = """#!/bin/sh
here=$(dirname "$0")
echo "$0 $*" >> "$here/calls"
env >> "$here/env"
case "$*" in
"-o show job -d 99999") echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
"-o show job -d 2") cat "$here/job";;
"show config") echo "PrivateData             = $(cat "$here/private")"
    echo "BOOT_TIME               = $(cat "$here/boot")"
    echo "SlurmUser               = slurm(64030)"
    echo "SlurmctldHost[0]        = ctl(10.77.0.2)";;
"show assoc_mgr"*) cat "$here/users";;
"requeue 98") echo "Only batch jobs are accepted or processed for job 98" >&2; exit 1;;
"requeue 97") echo "Requested operation is presently disabled for job 97" >&2; exit 1;;
"requeue 99999"|"update jobid=99999"*) echo "Invalid job id specified for job 99999" >&2; exit 1;;
esac
"""
SQUEUE = """#!/bin/sh
here=$(dirname "$0")
job=$(echo "$*" | sed -n 's/.*--jobs \\([0-9]*\\) .*/\\1/p')
case "$job" in
"") ;;
99999) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
*) cat "$here/refs" 2>/dev/null || echo "$job $job N/A N/A N/A"; exit;;
esac
printf '2           RUNNING             0         1795200394              None\\n'
printf '3           PENDING             1         N/A                     BeginTime\\n'
"""

SINFO = """#!/bin/sh
test "$*" = "--all --local --Node --noheader --format=%N|%n|%o" || exit 1
printf 'n1|n1|10.77.0.11\\nn1|n1|10.77.0.11\\nn2|n2|10.77.0.12\\n'
"""


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def replay(folder: Path, version: str) -> Scontrol:
    script(folder / "scontrol", SCONTROL)
    script(folder / "squeue", SQUEUE)
    script(folder / "sinfo", SINFO)
    script(folder / "scancel", '#!/bin/sh\necho "$0 $*" >> "$(dirname "$0")/calls"\n')
    (folder / "private").write_text("none")
    (folder / "boot").write_text("2026-11-22T07:33:47")
    (folder / "users").write_text(
        "Current Association Manager state\n\nNo users currently cached in Slurm.\n\n"
    )
    shutil.copy(DATA / "scontrol" / version / "two-merged.txt", folder / "job")
    return Scontrol(str(folder))


def live_version() -> str:
    """Version of the Slurm whose controller answers on this host; empty when there is none."""
    if shutil.which("scontrol") is None:
        return ""
    try:
        ping = subprocess.run(["scontrol", "ping"], capture_output=True, timeout=5, check=False)
    except subprocess.TimeoutExpired:
        return ""
    if ping.returncode:
        return ""
    version = subprocess.run(["scontrol", "--version"], capture_output=True, text=True, check=True)
    return version.stdout.split()[1]


def live_scontrol() -> Scontrol:
    if not live_version():
        pytest.skip("no slurmctld answers here: run in a cluster, such as lab/vlab exec ctl")
    return Scontrol(str(Path(shutil.which("scontrol") or "").parent))


def live_pyslurm(request: pytest.FixtureRequest) -> PySlurm:
    live_scontrol()
    found = PySlurm(str(Path(shutil.which("scontrol") or "").parent))
    request.addfinalizer(found.close)
    try:
        found.check()
    except UnusableError as err:
        pytest.skip(f"{err.why}; install the pyslurm of Slurm's release, 25.05 or newer")
    return found


@pytest.fixture(params=ADAPTERS)
def slurm(request: pytest.FixtureRequest, tmp_path: Path) -> Slurm:
    kind, _, version = str(request.param).partition("-")
    if kind == "replayed":
        return replay(tmp_path, version)
    return live_pyslurm(request) if kind == "pyslurm" else live_scontrol()


def test_a_missing_job_has_its_own_error(slurm: Slurm) -> None:
    with pytest.raises(NoSuchJobError):
        slurm.load(GONE)
    with pytest.raises(NoSuchJobError):
        slurm.requeue(GONE)
    with pytest.raises(NoSuchJobError):
        slurm.set_admin_comment(GONE, "vhpc: hello")


def test_cancelling_a_missing_job_succeeds(slurm: Slurm) -> None:
    slurm.cancel(GONE)


def test_every_listed_job_has_its_own_name(slurm: Slurm) -> None:
    jobs = slurm.jobs()
    assert all(job.job_id > 0 and job.restarts >= 0 and job.state.isupper() for job in jobs)
    assert all(job.started is None or job.started > 1e9 for job in jobs)


def test_each_node_is_there_once_and_has_an_address(slurm: Slurm) -> None:
    nodes = slurm.nodes()
    assert nodes
    assert len({node.name for node in nodes}) == len(nodes)
    assert all(node.address and node.hostname for node in nodes)


def test_hosts_of_slurmctld_are_known(slurm: Slurm) -> None:
    assert slurm.controllers()
    assert all(host and not set(host) & set(" ()=") for host in slurm.controllers())


def test_a_running_job_has_its_nodes_cpus_and_memory(slurm: Slurm) -> None:
    running = [job for job in slurm.jobs() if job.state == "RUNNING"]
    if not running:
        pytest.skip("no job runs")
    job = slurm.load(running[0].job_id)
    assert job.job_id == running[0].job_id
    assert job.user
    assert all(part.cpu_ids and part.memory_mib for part in job.allocation.nodes)
    assert job.allocation.nodes


def test_pyslurm_shows_each_job_as_scontrol(request: pytest.FixtureRequest) -> None:
    commands, pyslurm = live_scontrol(), live_pyslurm(request)
    listed = commands.jobs()
    assert set(pyslurm.jobs()) == set(listed)
    for job_id in sorted({job.job_id for job in listed if job.state in ("RUNNING", "SUSPENDED")}):
        assert pyslurm.load(job_id) == commands.load(job_id)


@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
@pytest.mark.parametrize(
    ("refs", "job_id", "whole", "alone"),
    [
        ("started", 1, "1_3", "1_3"),
        ("started", 2, "1_0", "1_0"),
        ("het", 5, "5", "5+0"),
        ("het", 6, "5", "5+1"),
        ("plain", 7, "7", "7"),
    ],
)
def test_a_change_of_a_job_changes_no_other(
    tmp_path: Path, version: str, refs: str, job_id: int, whole: str, alone: str
) -> None:
    """``scontrol requeue 1`` requeues all elements of array 1; so do update and scancel."""
    slurm = replay(tmp_path, version)
    shutil.copy(DATA / "squeue" / version / f"refs-{refs}.txt", tmp_path / "refs")
    slurm.requeue(job_id)
    slurm.set_admin_comment(job_id, "why")
    slurm.cancel(job_id)
    calls = (tmp_path / "calls").read_text().replace(f"{tmp_path}/", "").splitlines()
    assert calls == [
        f"scontrol requeue {whole}",
        f"scontrol update jobid={alone} AdminComment=why",
        f"scancel {whole}",
    ]


def test_the_id_of_waiting_elements_is_not_a_job(tmp_path: Path) -> None:
    slurm = replay(tmp_path, "24.11")
    shutil.copy(DATA / "squeue" / "24.11" / "refs-waiting.txt", tmp_path / "refs")
    for act in (slurm.requeue, slurm.cancel, lambda job: slurm.set_admin_comment(job, "x")):
        with pytest.raises(SlurmError, match="job 1 is an array with 2 tasks that have not started"):
            act(1)
    assert not (tmp_path / "calls").exists()
    assert slurm.ref(3).whole == "1_1"


# --- what is the scontrol adapter's own ------------------------------------------


@pytest.mark.parametrize("job_id", [98, 97])
def test_jobs_that_cannot_be_requeued_have_their_own_error(tmp_path: Path, job_id: int) -> None:
    with pytest.raises(NotRequeueableError):
        replay(tmp_path, "24.11").requeue(job_id)


def test_commands_get_a_clean_environment_and_no_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = replay(tmp_path, "24.11")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("SECRET", "1")
    slurm.set_admin_comment(7, "a; touch /tmp/x\n $(id) 'q'")
    assert (tmp_path / "calls").read_text() == (
        f"{tmp_path}/scontrol update jobid=7 AdminComment=a; touch /tmp/x $(id) 'q'\n"
    )
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert names <= {"LC_ALL", "PATH", "SLURM_TIME_FORMAT", "PWD", "_", "OLDPWD", "SHLVL"}


def test_a_slurmctld_that_hangs_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    script(tmp_path / "scontrol", "#!/bin/sh\nexec sleep 60\n")
    began = time.monotonic()
    with pytest.raises(SlurmError, match=r"no answer within 0\.3 s"):
        Scontrol(str(tmp_path), timeout_s=0.3).load(1)
    assert time.monotonic() - began < 30


def test_a_host_of_slurmctld_that_is_off_has_its_time(tmp_path: Path) -> None:
    """Each command asks it first: two connections of TCPTimeout, which is 2 s in slurm.conf(5)."""
    script(tmp_path / "scontrol", "#!/bin/sh\nexec sleep 60\n")
    controller = Controller(slurm_bin=str(tmp_path), backup_hosts=("ctl2",))
    config = Config(controller=controller, database=Database(engine="mariadb"))
    with pytest.raises(SlurmError, match=r"no answer within 4\.3 s"):
        commands(config, 0.3).load(1)


def test_missing_commands_are_reported(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="slurm_bin"):
        Scontrol(str(tmp_path)).load(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: run as root")
def test_hidden_jobs_are_not_taken_for_ended_ones(public_dir: Path) -> None:
    from controller_lab import NOBODY, ChildError, as_uid

    slurm = replay(public_dir, "24.11")
    for path in public_dir.iterdir():
        path.chmod(0o755)
    (public_dir / "calls").touch(mode=0o666)
    (public_dir / "private").write_text("accounts,jobs")
    assert len(slurm.jobs()) == 2
    with pytest.raises(ChildError, match="does not show all jobs"):
        as_uid(NOBODY, slurm.jobs)
    (public_dir / "private").write_text("accounts")
    assert len(as_uid(NOBODY, slurm.jobs)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: run as root")
@pytest.mark.parametrize(
    ("level", "sees"), [("Operator", True), ("Administrator", True), ("None", False), ("Not Set", False)]
)
def test_operators_see_jobs_that_private_data_hides(public_dir: Path, level: str, sees: bool) -> None:
    from controller_lab import NOBODY, ChildError, as_uid

    slurm = replay(public_dir, "24.11")
    (public_dir / "private").write_text("accounts,jobs,users")
    # as scontrol 24.11 prints it; another user's record is not ours
    (public_dir / "users").write_text(
        "Current Association Manager state\n\nUser Records\n\n"
        "UserName=root(0) DefAccount=users DefWckey= AdminLevel=Administrator\n"
        f"UserName=nobody({NOBODY}) DefAccount=users DefWckey= AdminLevel={level}\n"
    )
    for path in public_dir.iterdir():
        path.chmod(0o755)
    (public_dir / "calls").touch()
    (public_dir / "calls").chmod(0o666)
    if sees:
        assert len(as_uid(NOBODY, slurm.jobs)) == 2
        assert f"users={pwd.getpwuid(NOBODY).pw_name} flags=users" in (public_dir / "calls").read_text()
        return
    with pytest.raises(ChildError, match=r"hides jobs of other users from nobody.*adminlevel=operator"):
        as_uid(NOBODY, slurm.jobs)


def test_a_slurmctld_restarted_in_a_listing_is_asked_again(tmp_path: Path) -> None:
    """It may have come up without slurmdbd, and then not know who its operators are."""
    slurm = replay(tmp_path, "24.11")
    text = (tmp_path / "squeue").read_text()
    script(tmp_path / "squeue", text.replace("#!/bin/sh\n", f"#!/bin/sh\necho later > {tmp_path}/boot\n"))
    with pytest.raises(SlurmError, match="restarted while squeue ran"):
        slurm.jobs()
    assert len(slurm.jobs()) == 2


def test_slurm_knows_a_job_or_says_that_it_does_not(tmp_path: Path) -> None:
    slurm = replay(tmp_path, "24.11")
    assert slurm.knows(7)
    assert not slurm.knows(GONE)
    shutil.copy(DATA / "squeue" / "24.11" / "refs-waiting.txt", tmp_path / "refs")
    assert slurm.knows(1)  # elements that wait
    assert not slurm.knows(4)
