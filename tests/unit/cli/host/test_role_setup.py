# SPDX-License-Identifier: Apache-2.0
"""vhpc setup: does what is missing on a host, leaves what a site has set, and may be repeated."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from vhpc_slurm.cli import context
from vhpc_slurm.cli.host.checks import error, warn
from vhpc_slurm.cli.host.setup import Place, Role, steps
from vhpc_slurm.cli.main import main
from vhpc_slurm.config import Config, Host, Paths
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.node.devices.setup import State

# as dpkg-statoverride(1), which changes the mode at once, and systemctl(1)
STATOVERRIDE = """#!/bin/sh
[ "$1 $2 $3 $4 $5" = "--update --add libvirt-qemu libvirt-qemu 0751" ] || { echo "wrong: $*" >&2; exit 2; }
chmod "$5" "$6"
"""
SYSTEMCTL = """#!/bin/sh
folder=$(dirname "$0")
case "$*" in
--quiet\\ is-*) [ -e "$folder/enabled.$3" ] ;;
"enable --now vhpcd.service"|"enable --now vhpc-hookd.service") touch "$folder/enabled.$3" ;;
"enable vhpc-node-setup.service") touch "$folder/enabled.vhpc-node-setup.service" ;;
*) echo "Failed: $*" >&2; exit 1 ;;
esac
"""


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def host(tmp_path: Path) -> Place:
    for folder in ("libvirt", "bin", "etc", "systemd", "slurm-bin", "libexec"):
        (tmp_path / folder).mkdir()
    (tmp_path / "libvirt").chmod(0o750)
    (tmp_path / "etc/slurm.conf").write_text("ClusterName=c\n")
    program(tmp_path / "slurm-bin/sbcast", "#!/bin/sh\n")
    program(tmp_path / "libexec/vhpc-sbcast", "#!/bin/sh\n")
    return Place(
        libvirt=tmp_path / "libvirt",
        sbcast=tmp_path / "bin/sbcast",
        slurm=tmp_path / "etc",
        systemd=tmp_path / "systemd",
        statoverride=program(tmp_path / "statoverride", STATOVERRIDE),
        systemctl=program(tmp_path / "systemctl", SYSTEMCTL),
    )


@pytest.fixture
def config(tmp_path: Path, host: Place, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr("vhpc_slurm.slurm.USERS_PATH", str(host.sbcast.parent))
    return Config(
        controller=Controller(slurm_bin=str(tmp_path / "slurm-bin")),
        paths=Paths(libexec=str(tmp_path / "libexec")),
        host=Host(hugepages=("2M:0=8",)),
    )


def line(config: Config) -> str:
    """The line of plugstack.conf, with the folder that is not the usual one."""
    return f"required vhpc.so libexec={config.paths.libexec}\n"


def states(config: Config, role: Role, host: Place, *, dry_run: bool = False) -> dict[str, State]:
    return {step.kind: step.state for step in steps(config, role, dry_run=dry_run, place=host)}


def test_a_node_is_set_up_once(config: Config, host: Place) -> None:
    kinds = ("plugstack", "sbcast link", "libvirt", "unit")
    assert states(config, Role.NODE, host) == dict.fromkeys(kinds, State.DONE)
    assert (host.slurm / "plugstack.conf").read_text() == line(config)
    assert host.sbcast.resolve() == Path(config.paths.libexec) / "vhpc-sbcast"
    assert stat.S_IMODE(host.libvirt.stat().st_mode) == 0o751
    assert states(config, Role.NODE, host) == dict.fromkeys(kinds, State.OK)
    assert (host.slurm / "plugstack.conf").read_text() == line(config)


def test_a_dry_run_changes_nothing(config: Config, host: Place) -> None:
    found = states(config, Role.NODE, host, dry_run=True)
    assert set(found.values()) == {State.MISSING}
    assert not os.path.lexists(host.sbcast)
    assert sorted(path.name for path in host.slurm.iterdir()) == ["slurm.conf"]
    assert stat.S_IMODE(host.libvirt.stat().st_mode) == 0o750


def test_a_controller_runs_vhpcd_and_hookd(config: Config, host: Place) -> None:
    for state in (State.DONE, State.OK):
        done = [(step.what, step.state) for step in steps(config, Role.CONTROLLER, dry_run=False, place=host)]
        assert done == [
            ("vhpcd.service is enabled and runs", state),
            ("vhpc-hookd.service is enabled and runs", state),
        ]


def test_a_login_host_gets_plugin_and_sbcast(config: Config, host: Place) -> None:
    assert states(config, Role.LOGIN, host) == {"plugstack": State.DONE, "sbcast link": State.DONE}


def test_the_conf_of_a_slurm_in_opt_is_asked_of_slurm(config: Config, host: Place, tmp_path: Path) -> None:
    (host.slurm / "slurm.conf").rename(tmp_path / "slurm.conf")
    scontrol = Path(config.controller.slurm_bin) / "scontrol"
    program(scontrol, f"#!/bin/sh\n[ \"$*\" = 'show config' ] && echo 'SLURM_CONF = {tmp_path}/slurm.conf'\n")
    assert states(config, Role.LOGIN, host)["plugstack"] is State.DONE
    assert (tmp_path / "plugstack.conf").read_text() == line(config)


def test_lines_of_other_plugins_stay(config: Config, host: Place) -> None:
    conf = host.slurm / "plugstack.conf"
    conf.write_text("optional pyxis.so")
    conf.chmod(0o640)
    states(config, Role.LOGIN, host)
    assert conf.read_text() == "optional pyxis.so\n" + line(config)
    assert stat.S_IMODE(conf.stat().st_mode) == 0o640


def test_the_plugin_gets_the_run_folder_of_vhpc_toml(config: Config, host: Place) -> None:
    moved = msgspec.structs.replace(config, paths=Paths(run="/run/site/vhpc"))
    states(moved, Role.NODE, host)
    assert (host.slurm / "plugstack.conf").read_text() == "required vhpc.so run_dir=/run/site/vhpc\n"


def test_settings_of_the_site_are_not_replaced(config: Config, host: Place) -> None:
    (host.slurm / "plugstack.conf").write_text("optional vhpc.so\n")
    host.sbcast.write_text("the site's own\n")
    assert states(config, Role.LOGIN, host) == {"plugstack": State.OK, "sbcast link": State.FAILED}
    assert (host.slurm / "plugstack.conf").read_text() == "optional vhpc.so\n"
    assert host.sbcast.read_text() == "the site's own\n"


def test_a_configless_host_has_no_plugstack_of_its_own(config: Config, host: Place) -> None:
    (host.slurm / "slurm.conf").unlink()
    assert "plugstack" not in states(config, Role.LOGIN, host)
    assert list(host.slurm.iterdir()) == []


def test_a_failed_step_has_its_reason(config: Config, host: Place) -> None:
    program(Path(host.statoverride), "#!/bin/sh\necho 'an override already exists' >&2\nexit 2\n")
    (failed,) = (
        step for step in steps(config, Role.NODE, dry_run=False, place=host) if step.kind == "libvirt"
    )
    assert (failed.state, failed.error) == (State.FAILED, "an override already exists")


def test_without_systemd_no_unit_is_enabled(config: Config, host: Place) -> None:
    host.systemd.rmdir()
    assert states(config, Role.CONTROLLER, host) == {}


@pytest.mark.parametrize(
    ("left", "status"), [((), 0), ((warn("a", "b", "c"),), 0), ((error("a", "b", "c"),), 1)]
)
def test_remaining_steps_decide_the_exit_status(
    left: tuple[object, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(context, "is_root", lambda: True)
    monkeypatch.setattr("vhpc_slurm.cli.host.setup.steps", lambda *_, **__: iter(()))
    monkeypatch.setattr("vhpc_slurm.cli.host.doctor.findings", lambda *_: iter(left))
    assert main(["setup", "login"]) == status
    assert ("left for you" in capsys.readouterr().out) == bool(left)


def test_another_role_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["setup", "storage"]) == 2
    assert "not one of: node, controller, login" in capsys.readouterr().err


def test_setup_needs_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(context, "is_root", lambda: False)
    assert main(["setup", "node"]) == 1
    assert "vhpc setup node needs root" in capsys.readouterr().err
