# SPDX-License-Identifier: Apache-2.0
"""Only the package slurm runs commands of Slurm, and it runs the configured ones."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest

from vhpc_slurm import slurm
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.errors import NodeError
from vhpc_slurm.hooks import common
from vhpc_slurm.slurm.hosts import parse_node_resources, parse_partitions
from vhpc_slurm.slurm.port import NodeResources, SlurmError, Standing

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "python/vhpc_slurm"
COMMANDS = (
    *("salloc", "sacct", "sacctmgr", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag"),
    *("sinfo", "sprio", "squeue", "sreport", "srun", "sshare", "sstat", "strigger"),
)
# The whole text, or the end of a path: what a program could run.  Hints such as "see: sinfo -N" are not.
RUNNABLE = re.compile(rf"(?:\S*/)?(?:{'|'.join(COMMANDS)})")
SETTINGS = {"slurm_bin", "slurm_conf"}
# Declares both settings, the name of the adapter, and the commands that guests may call on their host.
DECLARES = {"config/__init__.py", "config/controller.py"}


def offences(source: str) -> list[str]:
    """Places in a module's source that look like running a command of Slurm."""
    found = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if RUNNABLE.fullmatch(node.value):
                found.append(f"line {node.lineno}: {node.value!r}")
        elif isinstance(node, ast.Attribute) and node.attr in SETTINGS:
            found.append(f"line {node.lineno}: reads {node.attr}")
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [f"{names[0]}.{alias.name}" if names else alias.name for alias in node.names]
            adapters = ("slurm.scontrol", "slurm.pyslurm_adapter")
            if any(name.endswith(adapters) for name in names):
                found.append(f"line {node.lineno}: imports an adapter instead of the port")
    return found


@pytest.mark.parametrize(
    "source",
    [
        'run(["scontrol", "update"])',
        'SCONTROL = "/usr/bin/scontrol"',
        'run([f"{folder}/squeue"])',
        'run([f"{config.controller.slurm_bin}/{command}"])',
        "env = {'SLURM_CONF': settings.slurm_conf}",
        "from vhpc_slurm.slurm.scontrol import Scontrol",
        "from vhpc_slurm.slurm import scontrol",
        "import vhpc_slurm.slurm.pyslurm_adapter",
    ],
)
def test_the_check_finds_commands(source: str) -> None:
    assert offences(source)


def test_the_check_allows_hints() -> None:
    assert not offences('error("no such node", hint="see: sinfo -N")\nport.drain(node, "x")')


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE / "slurm"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_only_the_port_runs_commands_of_slurm(path: Path) -> None:
    if str(path.relative_to(PACKAGE)) not in DECLARES:
        assert offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "path",
    [path for folder in ("prolog", "epilog", "systemd") for path in sorted((ROOT / folder).iterdir())],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_hook_scripts_and_units_run_no_command_of_slurm(path: Path) -> None:
    code = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    words = re.findall(r"[\w.-]+", " ".join(code))
    assert not set(words) & set(COMMANDS)


# --- what the commands are told -------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Config:
    """A site with Slurm's commands in another prefix and another slurm.conf."""
    for command in ("scontrol", "sacctmgr", "sacct"):
        path = tmp_path / command
        path.write_text(
            f'#!/bin/sh\necho "{command} $*" >> {tmp_path}/calls\necho "$SLURM_CONF" > {tmp_path}/conf\n'
            f"if [ -e {tmp_path}/fails ]; then cat {tmp_path}/fails >&2; exit 1; fi\n"
            f"cat {tmp_path}/prints 2>/dev/null || true\n"
        )
        path.chmod(0o755)
    return Config(controller=Controller(slurm_bin=str(tmp_path), slurm_conf="/srv/slurm/slurm.conf"))


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_a_hook_drains_through_the_configured_commands(site: Config, tmp_path: Path) -> None:
    common.drain(site, "n1", NodeError("the disk\nis full", "no space", "remove something"))
    assert calls(tmp_path) == [
        "scontrol update NodeName=n1 State=DRAIN Reason=vhpc: the disk is full: no space (remove something)"
    ]
    assert (tmp_path / "conf").read_text() == "/srv/slurm/slurm.conf\n"


def test_a_failed_drain_is_an_error_in_the_log(
    site: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # as scontrol 24.11 prints it
    (tmp_path / "fails").write_text("slurm_update error: Access/permission denied\n")
    common.drain(site, "n1", NodeError("the disk is full"))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "node n1 is not drained: scontrol update NodeName=n1 failed: slurm_update error" in record.message


@pytest.mark.parametrize(
    ("present", "written"),
    [
        ("", "vhpc: one line"),
        ("vhpc: image x@sha256:1; usage cpu_s=1.00 guests=1/1", "vhpc: one line"),
        ('vhpc: image x@sha256:1 // {"class": 7}', ""),
        ("JS1:H4sIAAAAAAAAA6", ""),
    ],
)
def test_a_comment_of_an_ended_job_goes_to_slurmdbd(
    site: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture, present: str, written: str
) -> None:
    (tmp_path / "prints").write_text(f"7|5_2|COMPLETED|1|4|alice|{present}\n")
    common.comment_ended(site, 7, "vhpc: one\nline")
    told = [line for line in calls(tmp_path) if line.startswith("sacctmgr")]
    change = f"sacctmgr -i modify job where jobid=5_2 set AdminComment={written}"
    assert told == ([change] if written else [])
    assert ("another program's text: not set: vhpc: one" in caplog.text) == (not written)


def test_a_comment_that_cannot_be_written_is_logged(
    site: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    common.comment_ended(site, 7, "vhpc: one line")
    assert "AdminComment of job 7 is not set: the accounting database has no such job" in caplog.text
    (tmp_path / "fails").write_text("sacct: error: no\n")
    common.comment_ended(site, 7, "vhpc: one line")
    assert re.search("AdminComment of job 7 is not set: sacct .*failed", caplog.text)


@pytest.mark.parametrize(
    ("tail", "asked", "found"),
    [
        ("", False, ""),
        (" AdminComment=set by job_submit ", True, "set by job_submit"),
        (" Comment=x AdminComment=forged ", True, ""),
    ],
)
def test_a_job_is_loaded_with_its_admin_comment(
    site: Config, tmp_path: Path, tail: str, asked: bool, found: str
) -> None:
    """A user's comment looks like one for scontrol; squeue prints the real one, as 24.11 does."""
    line = (ROOT / "tests/data/scontrol/24.11/single.txt").read_text().rstrip("\n")
    (tmp_path / "prints").write_text(line + tail + "\n")
    job_id = int(line.partition("=")[2].split()[0])
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho squeue >>{tmp_path}/calls\nprintf '%-12s%s\n' {job_id} '{found}'\n")
    squeue.chmod(0o755)
    job, comment = slurm.commands(site).load_with_comment(job_id)
    assert (job.job_id, comment) == (job_id, found)
    assert ("squeue" in calls(tmp_path)) == asked


def test_a_command_that_is_missing_names_the_setting(tmp_path: Path) -> None:
    port = slurm.commands(Config(controller=Controller(slurm_bin=str(tmp_path / "absent"))))
    with pytest.raises(SlurmError, match=r"scontrol update NodeName=n1 failed.*controller\.slurm_bin"):
        port.drain("n1", "x")


def test_settings_are_asked_of_slurmctld(site: Config, tmp_path: Path) -> None:
    (tmp_path / "prints").write_text("Prolog[0] = /a\nProlog[1] = /b\nSlurmctldHost[0] = ctl(10.0.0.1)\n")
    settings = slurm.commands(site).settings()
    assert (settings.values["Prolog"], settings.control_hosts) == (("/a", "/b"), ("ctl",))
    assert calls(tmp_path) == ["scontrol show config"]


@pytest.mark.parametrize(
    ("rows", "level"),
    [
        ("vhpc|Operator\n", "Operator"),
        ("vhpc2|Operator\n", "None"),
        ("", "None"),
        ("other|None\nvhpc|Administrator\n", "Administrator"),
    ],
)
def test_the_admin_level_is_the_users_own(site: Config, tmp_path: Path, rows: str, level: str) -> None:
    (tmp_path / "prints").write_text(rows)
    assert slurm.commands(site).admin_level("vhpc") == level


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("", Standing()),
        ("vhpc|None|\n", Standing("None", ())),
        ("vhpc|Operator|\n", Standing("Operator", ())),
        ("other|Administrator|all\nvhpc|None|physics,optics\n", Standing("None", ("physics", "optics"))),
        ("vhpc|Administrator\n", Standing()),
    ],
)
def test_the_standing_of_a_user_is_the_users_own(
    site: Config, tmp_path: Path, rows: str, expected: Standing
) -> None:
    (tmp_path / "prints").write_text(rows)
    assert slurm.commands(site).standing("vhpc") == expected


ASSOCIATIONS = """Current Association Manager state

Association Records

ClusterName=vhpc Account=root UserName= Partition= Priority=0 ID=1
    SharesRaw/Norm/Level/Factor=1/0.00/1/0.00
ClusterName=vhpc Account=users UserName= Partition= Priority=0 ID=3
    ParentAccount=root(1) Lineage=/users/ DefAssoc=Yes
ClusterName=vhpc Account=users UserName=alice(2001) Partition= Priority=0 ID=4
    ParentAccount= Lineage=/users/0-alice/ DefAssoc=Yes
    Comment=ClusterName=vhpc Account=comment UserName=alice(2001)
ClusterName=vhpc Account=physics.2 UserName=alice(2001) Partition=main Priority=0 ID=9
ClusterName=vhpc Account=physics.2 UserName=alice(2001) Partition=gpu Priority=0 ID=10
ClusterName=vhpc Account=bio UserName=malice(2002) Partition= Priority=0 ID=11
"""


def test_the_accounts_of_a_user_are_those_of_associations(site: Config, tmp_path: Path) -> None:
    (tmp_path / "prints").write_text(ASSOCIATIONS)
    commands = slurm.commands(site)
    assert commands.accounts("alice") == ("users", "physics.2")
    assert commands.accounts("lice") == commands.accounts("root") == ()


@pytest.mark.parametrize(
    ("gres", "name", "count"),
    [
        ("gpu:h200:2(S:0-1),ibvf:4", "ibvf", 4),
        ("gpu:h200:2,ibvf:hdr:3(S:0)", "ibvf", 3),
        ("ibvf:1,ibvf:2,nic:9", "ibvf", 3),
        ("gpu:h200:8(S:0,2-3),ibvf:8", "gpu", 8),
        ("(null)", "gpu", None),
        ("gpu:4", "ibvf", None),
    ],
)
def test_gres_of_a_node_are_counted_by_name(gres: str, name: str, count: int | None) -> None:
    text = f"NodeName=n1 Arch=x86_64 CoresPerSocket=8 Gres={gres} RealMemory=4000 AllocMem=0\n"
    (node,) = parse_node_resources(text)
    assert (node.name, node.memory_mib, node.gres_count(name)) == ("n1", 4000, count)
    assert node.arch == "x86_64"


def test_every_node_and_partition_has_one_line() -> None:
    text = "NodeName=n1 Gres=gpu:1 RealMemory=5\nNodeName=n2 Gres=(null) RealMemory=6\n\n"
    assert parse_node_resources(text) == (NodeResources("n1", 5, (("gpu", 1),)), NodeResources("n2", 6, ()))
    (a, b) = parse_partitions("PartitionName=a X=1 PreemptMode=GANG,SUSPEND\nPartitionName=b X=1\n")
    assert (a.name, a.preempt_mode, b.name, b.preempt_mode) == ("a", "GANG,SUSPEND", "b", "")
