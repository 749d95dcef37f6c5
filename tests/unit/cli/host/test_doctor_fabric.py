# SPDX-License-Identifier: Apache-2.0
"""`vhpc doctor` on a real OpenSM on a simulated fabric, with good and bad options, and on UFM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fabric_lab import DEFAULT, GUIDS, HAVE_SIMULATOR, NEEDED, PATH, SimulatedFabric
from fake_ufm import TOKEN, FakeUfm, fake_ufm

from vhpc_slurm.cli.host.checks import CheckResult, Level, fabric
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.fabric import Fabric, Manager, Subnet
from vhpc_slurm.fabric import opensm_options
from vhpc_slurm.fabric.opensm_options import OpensmOptions
from vhpc_slurm.fabric.smp import Port, Scan, Switch

simulated = pytest.mark.skipif(not HAVE_SIMULATOR, reason=NEEDED)

GOOD = """\
force_log_flush TRUE
sa_key 0x1234567812345678
sm_key 0x1234567812345678   # the same on the standby
m_key 0x8765432187654321
m_key_protection_level 2
"""
BAD = """\
force_log_flush TRUE
part_enforce off
m_key 0x8765432187654321
keep_pkey_indexes FALSE
allow_both_pkeys TRUE
"""
GOOD_LEVELS = {
    "fabric.file": "ok",
    "fabric.opensm": "ok",
    "fabric.writable": "ok",
    "fabric.partitions": "ok",
    "fabric.log": "ok",
    "fabric.enforcement": "ok",
    "fabric.sa_key": "ok",
    "fabric.sm_key": "ok",
    "fabric.m_key": "ok",
    "fabric.keep_pkey_indexes": "ok",
    "fabric.read": "ok",
    "fabric.master": "ok",
    "fabric.default": "ok",
    "fabric.room": "ok",
    "fabric.switches": "ok",
}


@pytest.fixture
def opensm(lasting: SimulatedFabric, monkeypatch: pytest.MonkeyPatch) -> SimulatedFabric:
    monkeypatch.chdir(lasting.folder)
    for name in ("IBSIM_SOCKNAME", "SIM_HOST", "LD_PRELOAD"):
        monkeypatch.setenv(name, lasting.environment[name])  # for the process that reads the fabric
    lasting.replace(DEFAULT)
    again(lasting, GOOD)
    return lasting


def again(one: SimulatedFabric, options: str) -> None:
    """Restart OpenSM with other options."""
    one.opensm.terminate()
    one.opensm.wait(60)
    (one.folder / "opensm.conf").write_text(options)
    one.start_opensm()


def config(one: SimulatedFabric, user: str = "root", **other: object) -> Config:
    keys: dict[str, object] = {
        "backend": "opensm-file",
        "partitions": str(one.partitions),
        "opensm_pidfile": str(one.pidfile),
        "opensm_log": str(one.log),
        "pkey_last": 0x1003,
    }
    return Config(fabric=Fabric(**keys | other), controller=Controller(user=user))  # type: ignore[arg-type]


def seen(found: Config) -> dict[str, CheckResult]:
    return {finding.check: finding for finding in fabric.check(found, root=True)}


def levels(found: Config) -> dict[str, str]:
    return {check: finding.level.value for check, finding in seen(found).items()}


@simulated
def test_a_correct_fabric_has_no_findings(opensm: SimulatedFabric) -> None:
    found = seen(config(opensm))
    assert {check: finding.level.value for check, finding in found.items()} == GOOD_LEVELS
    assert found["fabric.room"].what == "ports have room for 64 keys or more"
    assert found["fabric.read"].what == "17 ports and 1 switches were read"


@simulated
def test_each_bad_option_has_its_own_message(opensm: SimulatedFabric) -> None:
    again(opensm, BAD)
    assert levels(config(opensm)) == GOOD_LEVELS | {
        "fabric.enforcement": "warn",
        "fabric.sa_key": "warn",
        "fabric.sm_key": "warn",
        "fabric.m_key-protection": "warn",
        "fabric.keep_pkey_indexes": "warn",
        "fabric.allow_both_pkeys": "warn",
    }


@simulated
def test_a_fabric_that_is_open_is_an_error_with_its_ports(opensm: SimulatedFabric) -> None:
    opensm.replace(b"Default=0x7fff : ALL=full ;\n")
    opensm.sweep()
    found = seen(config(opensm))
    assert (found["fabric.file"].level, found["fabric.default"].level) == (Level.ERROR, Level.ERROR)
    assert found["fabric.default"].what.startswith("16 ports are full members of the default partition")
    assert f"{GUIDS[0]:#018x}" in found["fabric.default"].what


@simulated
def test_a_missing_partitions_file_is_an_error(opensm: SimulatedFabric) -> None:
    opensm.partitions.unlink()
    assert levels(config(opensm))["fabric.file"] == "error"


@simulated
def test_an_opensm_that_does_not_run_is_an_error(opensm: SimulatedFabric) -> None:
    pid = opensm.pidfile.read_text()
    opensm.pidfile.write_text(f"{os.getpid()}\n")
    found = seen(config(opensm))
    assert found["fabric.opensm"].level is Level.ERROR
    assert f"process {os.getpid()} of {opensm.pidfile} is" in found["fabric.opensm"].what
    assert "fabric.sa_key" not in found
    opensm.pidfile.write_text(pid)


@simulated
def test_files_that_opensm_does_not_use_are_errors(opensm: SimulatedFabric, tmp_path: Path) -> None:
    for name in ("partitions.conf", "osm.log"):
        shutil.copy(opensm.folder / name, tmp_path)
    other = {"partitions": str(tmp_path / "partitions.conf"), "opensm_log": str(tmp_path / "osm.log")}
    found = seen(config(opensm, **other))
    assert (found["fabric.partitions"].level, found["fabric.log"].level) == (Level.ERROR, Level.ERROR)
    assert str(opensm.partitions) in found["fabric.partitions"].what


@simulated
def test_missing_rights_on_file_or_opensm_are_reported(opensm: SimulatedFabric, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o755)
    shutil.copy(opensm.partitions, folder)
    away = {"partitions": str(folder / "partitions.conf")}
    assert levels(config(opensm, "nobody", **away))["fabric.writable"] == "error"
    os.chown(folder, 65534, 65534)
    found = seen(config(opensm, "nobody", **away))["fabric.writable"]
    assert (found.level, "AmbientCapabilities=CAP_KILL" in found.hint) == (Level.WARN, True)
    assert levels(config(opensm, "no-such-user"))["fabric.writable"] == "error"


@simulated
def test_a_master_on_another_host_is_reported(
    opensm: SimulatedFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIM_HOST", "H3")
    assert levels(config(opensm))["fabric.master"] == "warn"


@simulated
def test_nearly_full_tables_are_reported(opensm: SimulatedFabric) -> None:
    many = "".join(
        f"site_{pkey:04x}={pkey:#06x} : {GUIDS[0]:#018x}=limited ;\n" for pkey in range(0x10, 0x42)
    )
    opensm.replace(DEFAULT + many.encode())
    opensm.sweep()
    found = seen(config(opensm))["fabric.room"]
    assert (found.level, f"{GUIDS[0]:#018x} with 51 of 64" in found.what) == (Level.WARN, True)


@simulated
def test_the_command_shows_the_findings(opensm: SimulatedFabric, tmp_path: Path) -> None:
    fabric_keys = {
        "partitions": str(opensm.partitions),
        "opensm_pidfile": str(opensm.pidfile),
        "opensm_log": str(opensm.log),
    }
    lines = "".join(f'{key} = "{value}"\n' for key, value in fabric_keys.items())
    (tmp_path / "vhpc.toml").write_text(
        f'[controller]\nuser = "root"\n[fabric]\nbackend = "opensm-file"\n{lines}'
    )
    done = subprocess.run(
        [sys.executable, "-m", "vhpc_slurm.cli.main", "doctor", "--json"],
        env=opensm.environment | {"VHPC_CONFIG": str(tmp_path / "vhpc.toml")},
        cwd=opensm.folder,
        capture_output=True,
        check=False,
        timeout=120,
    )
    shown = {one["check"]: one["level"] for one in json.loads(done.stdout)}
    # The pool of 28656 keys that is the default has more IPoIB groups than a switch knows.
    assert {check: level for check, level in shown.items() if check.startswith("fabric.")} == GOOD_LEVELS | {
        "fabric.groups": "warn"
    }


@simulated
def test_the_defaults_are_those_that_opensm_itself_writes(tmp_path: Path) -> None:
    subprocess.run(
        ["opensm", "--create-config", tmp_path / "conf"],
        env={"PATH": PATH, "OSM_CACHE_DIR": str(tmp_path), "OSM_TMP_DIR": str(tmp_path)},
        capture_output=True,
        check=False,
        cwd=tmp_path,
        timeout=60,
    )
    written = opensm_options.parse_file((tmp_path / "conf").read_text())
    assert {name: written[name] for name in opensm_options.DEFAULTS} == opensm_options.DEFAULTS


# --- without a fabric ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("opensm -F /a -P /b -f /c -Z off -W", ("/a", "/b", "/c", "off", "TRUE")),
        ("opensm --config=/a --Pconfig=/b --log_file=/c --part_enforce=in", ("/a", "/b", "/c", "in", None)),
        ("opensm --config /a --Pconfig /b -f/c -Zout --allow_both_pkeys", ("/a", "/b", "/c", "out", "TRUE")),
        ("opensm -B -F", (None, None, None, None, None)),
    ],
)
def test_options_of_the_command_line_are_read(words: str, options: tuple[str | None, ...]) -> None:
    names = ("config", "partition_config_file", "log_file", "part_enforce", "allow_both_pkeys")
    found = opensm_options.parse_arguments(words.split())
    assert tuple(found.get(name) for name in names) == options


def test_a_log_that_is_kept_back_is_an_error() -> None:
    options = OpensmOptions(opensm_options.DEFAULTS, "")
    manager = Manager(
        partitions=options["partition_config_file"], pidfile="/run/opensm.pid", log=options["log_file"]
    )
    found = {finding.check: finding.level for finding in fabric._paths(manager, options)}
    assert found["fabric.log-flush"] is Level.ERROR


def test_an_opensm_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    subnet = Subnet(managers=(Manager(command=("false",)), Manager(partitions="/x")))
    monkeypatch.setattr(fabric, "_tables", lambda _: iter(()))
    found = list(fabric.check(Config(fabric=Fabric(backend="opensm-file", subnets=(subnet,))), root=True))
    assert [(one.check, one.level.value) for one in found] == [
        ("fabric.file", "error"),
        ("fabric.opensm", "error"),
        ("fabric.subnets", "error"),
    ]


def test_small_tables_and_unenforcing_switches_are_reported() -> None:
    scan = Scan((Port(1, True, True, (0xFFFF,), True, 1),), 0, (Switch(9, 0, 1024), Switch(8, 32, 3)))
    found = {one.check: one.level.value for one in fabric._room(Fabric(pkey_last=0x1003), scan)}
    assert found == {"fabric.room": "error", "fabric.switches": "warn", "fabric.groups": "warn"}


def test_without_root_nothing_is_claimed() -> None:
    (found,) = fabric.check(Config(fabric=Fabric(backend="opensm-file")), root=False)
    assert (found.level, found.what) == (Level.WARN, "the fabric was not checked")


@pytest.mark.parametrize("backend", ["none", "ethernet"])
def test_without_anything_to_check_there_is_no_result(backend: str) -> None:
    assert list(fabric.check(Config(fabric=Fabric(backend=backend)), root=True)) == []  # type: ignore[arg-type]


@pytest.fixture
def ufm(tmp_path: Path) -> Iterator[FakeUfm]:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    with fake_ufm(tmp_path) as started:
        yield started


def asked(ufm: FakeUfm, tmp_path: Path) -> dict[str, str]:
    keys = Fabric(
        backend="ufm-rest",
        ufm_url=ufm.url,
        ufm_token_file=str(tmp_path / "token"),
        ufm_ca=str(ufm.ca),
        ufm_proof="ufm",
    )
    return levels(Config(fabric=keys))


def test_a_ufm_with_default_settings_is_a_warning(ufm: FakeUfm, tmp_path: Path) -> None:
    assert asked(ufm, tmp_path) == {
        "fabric.ufm": "ok",
        "fabric.default": "ok",
        "fabric.sa_key": "warn",
        "fabric.sm_key": "warn",
        "fabric.m_key": "warn",
    }
    ufm.settings |= {"sa_key": "0x1234", "sm_key": "0x1234", "m_key_per_port": True}
    assert set(asked(ufm, tmp_path).values()) == {"ok"}


@pytest.mark.parametrize(("said", "level"), [({"membership": "full"}, "error"), ({}, "warn")])
def test_a_ufm_whose_ports_reach_each_other_is_an_error(
    ufm: FakeUfm, tmp_path: Path, said: dict[str, str], level: str
) -> None:
    ufm.default = said
    assert asked(ufm, tmp_path)["fabric.default"] == level


def test_a_ufm_that_refuses_the_token_is_an_error(ufm: FakeUfm, tmp_path: Path) -> None:
    ufm.token = "another"
    assert asked(ufm, tmp_path) == {"fabric.ufm": "error"}
