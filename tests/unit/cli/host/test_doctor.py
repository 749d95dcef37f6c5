# SPDX-License-Identifier: Apache-2.0
"""`vhpc doctor` on settings of real Slurms, and on nodes that lack something."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_rig import DATA, executable, levels, one, settings

import vhpc_slurm.slurm
from vhpc_slurm.cli.host.checks import Level, boottime, services, slurm
from vhpc_slurm.cli.host.checks.boottime import NodeSize
from vhpc_slurm.config import Config, Devices, Guests, Paths, Placement
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.database import Database
from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.config.network import Network
from vhpc_slurm.model import Generation
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.timeline import Recorder
from vhpc_slurm.slurm import commands
from vhpc_slurm.slurm.hosts import parse_node_resources, parse_partitions
from vhpc_slurm.slurm.settings import SlurmSettings

RELEASES = ("22.05.8", "24.11.5", "26.05.5")


def changed(key: str, value: str) -> SlurmSettings:
    """The recommended settings of 24.11 with one line changed."""
    lines = (DATA / "24.11.5-recommended.txt").read_text().splitlines()
    assert any(line.split()[:1] == [key] for line in lines)
    return SlurmSettings.parse(
        "\n".join(f"{key} = {value}" if line.split()[:1] == [key] else line for line in lines)
    )


# --- Slurm's settings --------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
def test_the_recommended_settings_pass_in_every_release(release: str) -> None:
    found = list(slurm.check(settings(f"{release}-recommended"), Config()))
    assert [finding for finding in found if finding.level is not Level.OK] == []
    assert one(found, "slurm.version").what == f"Slurm {release}"


@pytest.mark.parametrize("release", RELEASES)
def test_slurms_defaults_have_findings(release: str) -> None:
    found = list(slurm.check(settings(f"{release}-default"), Config()))
    assert levels(found) == {
        "version": "ok",
        "PrologFlags": "error",
        "BatchStartTimeout": "error",
        "PrologEpilogTimeout": "warn",
        "LaunchParameters": "warn",
        "SelectTypeParameters": "ok",
        "PreemptMode": "ok",
        "MpiDefault": "ok",
        "SlurmUser": "ok",
        "Prolog": "error",
        "Epilog": "error",
        "PrologSlurmctld": "error",
        "EpilogSlurmctld": "error",
        "HealthCheckProgram": "warn",
    }
    assert all(finding.hint for finding in found if finding.level is not Level.OK)


@pytest.mark.parametrize(
    ("key", "value", "level", "says"),
    [
        ("PrologFlags", "Alloc,Contain,DeferBatch,RunInJob", "error", "no Epilog ends the guests"),
        ("PrologFlags", "Contain,DeferBatch", "error", "lacks Alloc"),
        ("LaunchParameters", "use_interactive_step,test_exec", "warn", "programs that only images have"),
        ("PrologFlags", "Alloc,Contain,DeferBatch,X11", "ok", ""),
        ("BatchStartTimeout", "600 sec", "warn", "gives up a job"),
        ("BatchStartTimeout", "200 sec", "error", "gives up a job"),
        ("PrologEpilogTimeout", "100", "error", "a boot may take (300 s)"),
        ("PrologEpilogTimeout", "65534", "warn", "no limit"),
        ("SelectTypeParameters", "CR_CORE", "error", "Slurm allocates no memory"),
        ("SelectTypeParameters", "CR_MEMORY", "ok", ""),
        ("PreemptMode", "GANG,SUSPEND", "warn", "gang, suspend"),
        ("PreemptMode", "REQUEUE", "ok", ""),
        ("MpiDefault", "pmix_v5", "ok", ""),
        ("PMIxEnv", "UCX_TLS=tcp;PMIX_MCA_psec=munge", "warn", "can only use native"),
        ("PMIxEnv", "PMIX_MCA_psec=munge,native;UCX_TLS=tcp", "ok", ""),
        ("TmpFS", "/local/scratch", "warn", "session directories in /local/scratch"),
        ("PMIxCliTmpDirBase", "/ssd/%n", "warn", "session directories in /ssd/%n"),
        ("PMIxCliTmpDirBase", "/var/tmp/", "ok", ""),
        ("SlurmUser", "batch(990)", "error", "controller.slurm_user is slurm"),
        ("SlurmUser", "slurm(64030)", "ok", ""),
        ("SLURM_VERSION", "21.08.8", "error", "too old"),
        ("HealthCheckInterval", "0 sec", "warn", "only when slurmd starts"),
    ],
)
def test_one_wrong_setting_is_one_finding(key: str, value: str, level: str, says: str) -> None:
    name = {
        "SLURM_VERSION": "version",
        "HealthCheckInterval": "HealthCheckProgram",
        "PMIxEnv": "MpiDefault",
        "PMIxCliTmpDirBase": "MpiDefault",
        "TmpFS": "MpiDefault",
    }.get(key, key)
    found = list(slurm.check(changed(key, value), Config()))
    assert one(found, f"slurm.{name}").level.value == level
    assert says in one(found, f"slurm.{name}").what
    others = [finding.check for finding in found if finding.level is not Level.OK]
    assert others == ([] if level == "ok" else [f"slurm.{name}"])


def test_sites_with_fixed_ports_must_not_make_jobs_smaller() -> None:
    config = Config(fabric=Fabric(port_map="/etc/vhpc/ports"))
    for value, level in (("bf_interval=3", "error"), ("bf_interval=3,disable_job_shrink", "ok")):
        settings = SlurmSettings.parse(f"SchedulerParameters = {value}\n")
        found = {one.check: one.level for one in slurm.check(settings, config)}
        assert found["slurm.SchedulerParameters"] == level
        assert "slurm.SchedulerParameters" not in {one.check for one in slurm.check(settings, Config())}


@pytest.mark.parametrize(
    ("backup", "hosts", "level", "says"),
    [
        ("", "localhost", None, ""),
        ("SlurmctldHost[1] = ctl2(10.0.0.2)\n", "localhost", Level.ERROR, "look for vhpcd on their own host"),
        ("SlurmctldHost[1] = ctl2(10.0.0.2)\n", "ctl1", Level.WARN, "without ctl1 running jobs go on"),
        ("SlurmctldHost[1] = ctl2(10.0.0.2)\n", "ctl1 ctl2", Level.OK, "vhpcd ctl1, ctl2"),
        ("SlurmctldHost[1] = ctl2(10.0.0.2)\n", "::1 ctl2", Level.ERROR, "for vhpcd on their own host"),
    ],
)
def test_a_backup_of_slurmctld_needs_one_of_vhpcd(
    backup: str, hosts: str, level: Level | None, says: str
) -> None:
    settings = SlurmSettings.parse(f"SlurmctldHost[0] = ctl1(10.0.0.1)\n{backup}")
    host, *others = hosts.split()
    config = Config(
        controller=Controller(host=host, backup_hosts=tuple(others)),
        database=Database(engine="mariadb" if others else "sqlite"),
    )
    found = list(slurm.check(settings, config))
    about = [one for one in found if one.check == "slurm.SlurmctldHost"]
    assert [one.level for one in about] == ([] if level is None else [level])
    assert all(says in one.what for one in about)


def test_the_topology_of_a_node_is_not_for_its_guests() -> None:
    text = (DATA / "26.05.5-recommended.txt").read_text()
    for value, level in (("yes", Level.WARN), ("no", Level.OK)):
        settings_of = SlurmSettings.parse(f"{text}PMIxShareServerTopology = {value}\n")
        assert one(list(slurm.check(settings_of, Config())), "slurm.MpiDefault").level is level


def test_separate_timeouts_of_newer_releases_are_checked() -> None:
    text = (DATA / "26.05.5-recommended.txt").read_text()
    text += "PrologTimeout = 300\nEpilogTimeout = 30\n"
    found = list(slurm.check(SlurmSettings.parse(text), Config()))
    assert one(found, "slurm.PrologTimeout").level is Level.OK
    assert one(found, "slurm.EpilogTimeout").level is Level.ERROR
    assert "PrologEpilogTimeout" not in levels(found)


def test_a_longer_boot_timeout_needs_longer_limits_of_slurm() -> None:
    config = Config(guests=Guests(boot_timeout_s=900))
    found = levels(list(slurm.check(settings("24.11.5-recommended"), config)))
    assert {check for check, level in found.items() if level == "error"} == {
        "BatchStartTimeout",
        "PrologEpilogTimeout",
    }


def test_the_longest_boot_and_each_gpu_count() -> None:
    recommended = settings("24.11.5-recommended")
    patient = Config(guests=Guests(boot_timeout_max_s=181))
    assert one(list(slurm.check(recommended, patient)), "slurm.PrologEpilogTimeout").level is Level.ERROR
    networks = Config(network=Network(allowed=("none", "job"), ready_timeout_s=100, reach_timeout_s=10))
    found = one(list(slurm.check(recommended, networks)), "slurm.PrologEpilogTimeout")
    assert "a boot may take (450 s)" in found.what, "with the wait for guests of other nodes"
    network = Network(ready_timeout_s=100, reach_timeout_s=10)
    checked = Config(guests=Guests(check=("/usr/bin/check",), check_timeout_s=30), network=network)
    found = one(list(slurm.check(recommended, checked)), "slurm.PrologEpilogTimeout")
    assert "a boot may take (480 s)" in found.what, "with the check, also without networks"
    found = one(list(slurm.check(recommended, Config(), [NodeSize(gpus=8)])), "slurm.PrologEpilogTimeout")
    assert found.level is Level.ERROR
    assert f"({60 + 180 + 8 * 60 + 60} s)" in found.what


@pytest.mark.parametrize(
    ("line", "config", "per_gib"),
    [
        ("Gres=gpu:h200:8(S:0-1) RealMemory=2097152 AllocMem=0", Config(), 0.7),
        ("Gres=ibvf:8 RealMemory=2097152", Config(), 0.7),
        ("Gres=(null) RealMemory=2097152", Config(), 0.0),
        (
            "Gres=(null) RealMemory=2097152",
            Config(devices=Devices(virtual_functions=("0000:3b:00.0=8",))),
            0.7,
        ),
        ("Gres=gpu:8 RealMemory=2097152", Config(placement=Placement(hugepages="1G")), 0.25),
        ("Gres=gpu:8 RealMemory=2097152", Config(placement=Placement(hugepages="auto")), 0.7),
        ("Gres=(null) RealMemory=2097152", Config(placement=Placement(hugepages="auto")), 0.25),
    ],
)
def test_the_largest_nodes_memory_counts_as_documented(line: str, config: Config, per_gib: float) -> None:
    """Of a guest that has all of a node of 2 TiB."""
    first, second = parse_node_resources(
        f"NodeName=n1 Arch=x86_64 {line}\nNodeName=n2 Gres=(null) RealMemory=1024\n"
    )
    largest, small = NodeSize.of(first, config), NodeSize.of(second, config)
    budget = 60 + 180 + 60 + 60 * (8 if "gpu" in line else 0) + round(2048 * per_gib)
    found = one(
        list(slurm.check(settings("24.11.5-recommended"), config, [small, largest])),
        "slurm.PrologEpilogTimeout",
    )
    assert (found.level is Level.ERROR) == (budget > 300)
    assert budget <= 300 or f"({budget} s)" in found.what


def test_boots_longer_than_slurms_message_timeout_are_reported(tmp_path: Path) -> None:
    layout = Layout(Config(paths=Paths(state=str(tmp_path))))
    assert boottime.longest_boot_s(layout) is None
    assert boottime.message_timeout(10, None).level is Level.OK
    for job, ready, last in ((1, 12.4, "setup g0"), (2, 3.0, "setup g0"), (3, 99.0, "agent g0")):
        generation = Generation.parse(f"{job}.0.0123abcd")
        recorder = Recorder(layout.timeline(generation), generation, "n1")
        recorder.note("python", 1000.0, 1000.1)
        recorder.note("start g0", 1000.1, 1001.0)
        recorder.note(last, 1001.0, 1000.0 + ready)
    longest = boottime.longest_boot_s(layout)
    assert longest == pytest.approx(12.4)  # the third got never ready
    found = boottime.message_timeout(10, longest)
    assert found.level is Level.WARN
    assert "after 8 s" in found.what
    assert "12.4 s" in found.what
    assert found.hint.startswith("MessageTimeout=30")
    assert boottime.message_timeout(30, longest).level is Level.OK


def test_slurms_sbcast_before_vhpcs_in_path_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(paths=Paths(libexec=str(tmp_path)), controller=Controller(slurm_bin=f"{tmp_path}/slurm"))
    (tmp_path / "local").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(vhpc_slurm.slurm, "USERS_PATH", f"{tmp_path}/local:{tmp_path}/bin")
    assert list(services.sbcast(config)) == []
    executable(tmp_path / "bin" / "sbcast", "exit 0")
    (found,) = services.sbcast(config)
    assert found.level is Level.WARN
    ours = executable(tmp_path / "vhpc-sbcast", "exit 0")
    (tmp_path / "local" / "sbcast").symlink_to(ours)
    (found,) = services.sbcast(config)
    assert found.level is Level.OK


def test_an_sbcast_that_is_only_in_slurms_own_prefix_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vhpc_slurm.slurm, "USERS_PATH", f"{tmp_path}/local")
    (tmp_path / "slurm").mkdir()
    executable(tmp_path / "slurm/sbcast", "exit 0")
    (found,) = services.sbcast(Config(controller=Controller(slurm_bin=f"{tmp_path}/slurm")))
    assert (found.level, found.what.split()[0]) == (Level.WARN, f"{tmp_path}/slurm/sbcast")


def test_a_site_script_that_replaces_a_hook_is_reported(tmp_path: Path) -> None:
    executable(tmp_path / "prolog", "exit 0")
    scripts = tmp_path / "prolog.d"
    scripts.mkdir()
    config = Config(paths=Paths(libexec=str(tmp_path)))
    pattern = SlurmSettings.parse(f"Prolog[0] = /site/first\nProlog[1] = {scripts}/*\n")
    before = one(list(slurm.hooks(pattern, config)), "slurm.Prolog")
    assert (before.level, before.what) == (
        Level.WARN,
        f"Prolog=/site/first,{scripts}/* is not {tmp_path}/prolog",
    )
    (scripts / "50-vhpc").symlink_to(tmp_path / "prolog")
    assert one(list(slurm.hooks(pattern, config)), "slurm.Prolog").level is Level.OK


CAREFUL = 'for job in $(squeue -h -u "$SLURM_JOB_UID"); do :; done; pkill -u "$SLURM_JOB_UID"'
SIMPLE = 'pkill -KILL -u "$SLURM_JOB_UID"'


@pytest.mark.parametrize(
    ("order", "text", "says"),
    [
        ("vs", CAREFUL, []),
        ("sv", CAREFUL, ["before the Epilog of vhpc"]),
        ("vs", SIMPLE, ["asks squeue for no other job"]),
        ("vs", "killall -u $USER", ["asks squeue for no other job"]),
        ("sv", 'loginctl terminate-user "$SLURM_JOB_UID"', ["before the Epilog of vhpc", "asks squeue"]),
        ("sv", f"# no {SIMPLE}", []),
        ("sv", "rm -rf /scratch/$SLURM_JOB_ID", []),
        ("s", f"OURS || exit\n{CAREFUL}", []),
        ("s", f"{CAREFUL}\nOURS", ["before the Epilog of vhpc"]),
    ],
)
def test_a_sites_epilog_that_kills_is_reported(
    tmp_path: Path, order: str, text: str, says: list[str]
) -> None:
    ours = executable(tmp_path / "epilog", "exit 0")
    site = executable(tmp_path / "site", text.replace("OURS", str(ours)))
    paths = {"v": ours, "s": site}
    lines = [f"Epilog[{place}] = {paths[letter]}" for place, letter in enumerate(order)]
    config = Config(paths=Paths(libexec=str(tmp_path)))
    found = list(slurm.other_epilogs(SlurmSettings.parse("\n".join(lines)), config))
    assert len(found) == len(says), found
    for finding, words in zip(found, says, strict=True):
        assert (finding.check, finding.level) == ("slurm.Epilog", Level.WARN)
        assert words in finding.what
        assert str(site) in finding.what


@pytest.mark.parametrize(
    ("user", "sacctmgr", "level", "says"),
    [
        ("slurm", "exit 9", "ok", "vhpcd runs as slurm"),
        ("root", "exit 9", "ok", "vhpcd runs as root"),
        # rows as sacctmgr 24.11 prints them
        ("vhpc", "echo 'vhpc|Operator'", "ok", "vhpc is Operator"),
        ("vhpc", "echo 'vhpc|Administrator'", "ok", "vhpc is Administrator"),
        ("vhpc", "echo 'vhpc|None'", "warn", "vhpcd's user vhpc is not an operator"),
        ("vhpc", "echo 'vhpc2|Operator'", "warn", "vhpcd's user vhpc is not an operator"),
        ("vhpc", "exit 0", "warn", "vhpcd's user vhpc is not an operator"),
        (
            "vhpc",
            "echo 'You are not running a supported accounting_storage plugin' >&2; exit 1",
            "warn",
            "You are",
        ),
    ],
)
def test_a_vhpcd_that_may_not_requeue_jobs_is_a_warning(
    tmp_path: Path, user: str, sacctmgr: str, level: str, says: str
) -> None:
    executable(tmp_path / "sacctmgr", sacctmgr)
    config = Config(controller=Controller(user=user, slurm_bin=str(tmp_path)))
    finding = slurm.operator(commands(config), changed("SlurmUser", "slurm(64030)"), config)
    assert finding.level.value == level
    assert says in finding.what
    assert (finding.hint == "") == (level == "ok")


@pytest.mark.parametrize(
    ("sacctmgr", "level"), [("echo 'vhpc|None'", "error"), ("echo 'vhpc|Operator'", "ok")]
)
def test_private_jobs_require_vhpcds_user_to_be_an_operator(
    tmp_path: Path, sacctmgr: str, level: str
) -> None:
    executable(tmp_path / "sacctmgr", sacctmgr)
    config = Config(controller=Controller(user="vhpc", slurm_bin=str(tmp_path)))
    finding = slurm.operator(commands(config), changed("PrivateData", "accounts,jobs"), config)
    assert finding.level.value == level
    assert ("PrivateData hides them" in finding.what) == (level == "error")


def test_a_partition_with_suspension_is_named() -> None:
    text = (
        "PartitionName=main AllowGroups=ALL PreemptMode=OFF\n"
        "PartitionName=low AllowGroups=ALL PreemptMode=GANG,SUSPEND\n"
    )
    (finding,) = slurm.partitions(parse_partitions(text))
    assert finding.what.startswith("partition low has PreemptMode=GANG,SUSPEND")


def test_hooks_that_cannot_be_run_are_errors(tmp_path: Path) -> None:
    executable(tmp_path / "prolog", "exit 0")
    (tmp_path / "epilog").write_text("#!/bin/sh\n")
    (tmp_path / "epilog").chmod(0o644)
    found = slurm.executable_hooks(
        Config(paths=Paths(libexec=str(tmp_path))), ("prolog", "epilog", "healthcheck")
    )
    assert [(finding.check, finding.level.value) for finding in found] == [
        ("hooks.prolog", "ok"),
        ("hooks.epilog", "error"),
        ("hooks.healthcheck", "error"),
    ]
