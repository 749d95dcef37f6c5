# SPDX-License-Identifier: Apache-2.0
"""libvirt's sockets are closed to users by setup, and doctor sees sockets that are open."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from doctor_rig import executable

from vhpc_slurm.cli.host.checks import Level, libvirtsockets
from vhpc_slurm.cli.host.setup import Place, Role, steps
from vhpc_slurm.config import Config
from vhpc_slurm.node.devices.setup import SetupStep, State

# as libvirt 11.3 of Debian 13, and as the modular daemons of other distributions
UNIT = (
    "[Unit]\nDescription=libvirt\n[Socket]\nListenStream=/run/libvirt/{}\nService={}.service\nSocketMode={}\n"
)
UNITS = {
    "libvirtd.socket": ("libvirt-sock", "0666"),
    "libvirtd-ro.socket": ("libvirt-sock-ro", "0666"),
    "libvirtd-admin.socket": ("libvirt-admin-sock", "0600"),
    "virtqemud.socket": ("virtqemud-sock", "0666"),
    "virtqemud-ro.socket": ("virtqemud-sock-ro", "0666"),
    "virtlogd.socket": ("virtlogd-sock", "0600"),
}
OPEN = ("libvirtd-ro.socket", "libvirtd.socket", "virtqemud-ro.socket", "virtqemud.socket")


@pytest.fixture
def host(run_dir: str) -> Iterator[Place]:
    root = Path(run_dir)
    folder = root / "usr/lib/systemd/system"
    for one in (folder, root / "run/libvirt", root / "run/systemd/system", root / "etc/systemd/system"):
        one.mkdir(parents=True)
    with ExitStack() as opened:
        for name, (path, mode) in UNITS.items():
            (folder / name).write_text(UNIT.format(path, name.partition(".")[0], mode))
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{root}/run/libvirt/{path}")
            (root / "run/libvirt" / path).chmod(int(mode, 8))
        executable(root / "systemctl", f'echo "$*" >> {root}/calls')
        yield Place(
            root=root,
            libvirt=root / "absent",
            slurm=root / "etc",
            sbcast=root / "sbcast",
            systemd=root / "run/systemd/system",
            systemctl=f"{root}/systemctl",
        )


def step(host: Place, *, dry_run: bool = False) -> SetupStep:
    (found,) = [
        one
        for one in steps(Config(), Role.NODE, dry_run=dry_run, place=host)
        if one.kind == "libvirt sockets"
    ]
    return found


def doctor(host: Place) -> tuple[Level, str]:
    (found,) = libvirtsockets.check(host.root)
    return found.level, found.hint


@pytest.mark.promise("libvirt.closed")
def test_setup_closes_libvirts_sockets_for_good(host: Place) -> None:
    assert doctor(host) == (Level.ERROR, "vhpc setup node")
    assert step(host, dry_run=True).state is State.MISSING
    assert step(host).state is State.DONE
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (host.root / "run/libvirt").iterdir()}
    assert modes == dict.fromkeys((path for path, _ in UNITS.values()), 0o600)
    drop_ins = sorted((host.root / "etc/systemd/system").glob("*/*"))
    assert [str(path.relative_to(host.root)) for path in drop_ins] == [
        f"etc/systemd/system/{name}.d/vhpc.conf" for name in OPEN
    ]
    assert all(path.read_text().endswith("\n[Socket]\nSocketMode=0600\n") for path in drop_ins)
    assert (host.root / "calls").read_text() == "daemon-reload\n"
    assert step(host).state is State.OK
    assert doctor(host) == (Level.OK, "")


def test_sockets_that_systemd_opens_again_are_reported(host: Place) -> None:
    for path in (host.root / "run/libvirt").iterdir():
        path.chmod(0o600)
    assert doctor(host) == (Level.WARN, "vhpc setup node")


def test_units_do_not_count_where_systemd_does_not_run(host: Place) -> None:
    for path in (host.root / "run/libvirt").iterdir():
        path.chmod(0o600)
    host.systemd.rmdir()
    assert doctor(host) == (Level.OK, "")
    (host.root / "run/libvirt/libvirt-sock-ro").chmod(0o777)
    assert doctor(host)[1].startswith("libvirtd.conf: unix_sock_ro_perms")


@pytest.mark.promise("libvirt.closed")
def test_modes_that_a_site_has_closed_stay(host: Place) -> None:
    for name in OPEN:
        folder = host.root / f"etc/systemd/system/{name}.d"
        folder.mkdir()
        (folder / "site.conf").write_text("[Socket]\nSocketMode=0660\n")
    for path in (host.root / "run/libvirt").iterdir():
        path.chmod(0o660)
    assert step(host).state is State.OK
    assert doctor(host) == (Level.OK, "")


def test_drop_in_of_a_site_that_opens_a_socket_is_reported(host: Place) -> None:
    folder = host.root / "etc/systemd/system/libvirtd-ro.socket.d"
    folder.mkdir()
    (folder / "zz-site.conf").write_text("[Socket]\nSocketMode=0666\n")
    found = step(host)
    assert (found.state, "opens a socket again" in found.error) == (State.FAILED, True)
    assert doctor(host)[0] is Level.WARN


def test_masked_units_are_not_changed(host: Place) -> None:
    for name in OPEN[2:]:
        (host.root / "etc/systemd/system" / name).symlink_to("/dev/null")
    step(host)
    assert sorted(path.name for path in (host.root / "etc/systemd/system").glob("*.d")) == [
        f"{name}.d" for name in OPEN[:2]
    ]


def test_sockets_that_libvirtd_has_made_are_closed_in_its_conf(host: Place) -> None:
    for path in (host.root / "usr/lib/systemd/system").iterdir():
        path.unlink()
    modes = 'unix_sock_ro_perms = "0700", unix_sock_rw_perms = "0700"'
    both = f"libvirtd.conf, virtqemud.conf: {modes}; restart libvirtd virtqemud"
    assert doctor(host) == (Level.ERROR, both)
    for path in (host.root / "run/libvirt").glob("libvirt-sock*"):
        path.chmod(0o600)
    assert doctor(host) == (Level.ERROR, f"virtqemud.conf: {modes}; restart virtqemud")
