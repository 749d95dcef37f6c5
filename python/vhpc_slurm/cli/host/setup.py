# SPDX-License-Identifier: Apache-2.0
"""vhpc setup: makes what a host needs in addition to its packages, and lists the rest for the administrator.

A step looks first, changes only what is missing, and never replaces what a site has set otherwise; so it may
be repeated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vhpc_slurm import files
from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.host import doctor
from vhpc_slurm.cli.host.checks import Level, libvirtsockets
from vhpc_slurm.cli.host.checks.node import LIBVIRT_FOLDER
from vhpc_slurm.cli.host.checks.plugstack import find_line, needed
from vhpc_slurm.cli.options import Json, ThisNode
from vhpc_slurm.config import Config
from vhpc_slurm.node.devices.setup import SetupStep, State
from vhpc_slurm.node.host.process import last_lines, run_briefly
from vhpc_slurm.slurm import USERS_SBCAST, conf_of_host, sbcast_of_users

EXIT_LEFT, EXIT_NODE = 1, 3
STATOVERRIDE, SYSTEMCTL = "/usr/bin/dpkg-statoverride", "/usr/bin/systemctl"
TIMEOUT_S = 60.0
_OWNER, _MODE = "libvirt-qemu", "0751"


class Role(StrEnum):
    """The purpose of a host; a host with several roles is set up for each."""

    NODE = "node"
    CONTROLLER = "controller"
    LOGIN = "login"


@dataclass(frozen=True)
class Place:
    """Paths of the host's files; tests use others."""

    libvirt: Path = LIBVIRT_FOLDER
    root: Path = Path("/")
    sbcast: Path = USERS_SBCAST
    slurm: Path = Path("/etc/slurm")
    systemd: Path = Path("/run/systemd/system")
    statoverride: str = STATOVERRIDE
    systemctl: str = SYSTEMCTL


def setup(
    role: Annotated[str, typer.Argument(metavar="node|controller|login", show_default=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; exit 1 when something is missing.")
    ] = False,
    node: ThisNode = None,
    as_json: Json = False,
) -> int:
    """Do what this host needs besides its packages, and show what is left (root).

    It may be repeated.  The exit status is 1 when something is left to do, 3 when a step failed.
    """
    if role not in [known.value for known in Role]:
        raise typer.BadParameter(f"{role!r} is not one of: node, controller, login")
    config, name = options.config(), context.node_name(node)
    context.need_root(f"setup {role}")
    done = list(steps(config, Role(role), dry_run=dry_run))
    left = [finding for finding in doctor.findings(config, name) if finding.level is not Level.OK]
    if as_json:
        output.write_json({"steps": [asdict(step) for step in done], "left": [asdict(one) for one in left]})
    else:
        rows = [(step.kind, step.what, step.state, step.error) for step in done]
        output.write_table(("STEP", "WHAT", "STATE", "ERROR"), rows)
        if left:
            print("\nleft for you (vhpc doctor):")
            output.write_table(("CHECK", "FOUND", "DO"), [(one.check, one.what, one.hint) for one in left])
    if any(step.state is State.FAILED for step in done):
        return EXIT_NODE
    is_left = any(step.state is State.MISSING for step in done) or any(
        one.level is Level.ERROR for one in left
    )
    return EXIT_LEFT if is_left else 0


def steps(config: Config, role: Role, *, dry_run: bool, place: Place | None = None) -> Iterator[SetupStep]:
    """The steps of a role, each done unless it is already, or only looked at with ``dry_run``."""
    place = place or Place()
    if role is not Role.CONTROLLER:
        yield from _plugstack(config, place, dry_run=dry_run)
        yield from _sbcast(config, place, dry_run=dry_run)
    if role is Role.NODE:
        yield from _libvirt_folder(place, dry_run=dry_run)
        yield from _libvirt_sockets(place, dry_run=dry_run)
        if (
            config.devices.virtual_functions
            or config.host.hugepages
            or Path(config.placement.gpu_map).exists()
        ):
            yield from _unit(place, "vhpc-node-setup.service", now=False, dry_run=dry_run)
    if role is Role.CONTROLLER:
        for unit in ("vhpcd.service", "vhpc-hookd.service"):
            yield from _unit(place, unit, now=True, dry_run=dry_run)


def _plugstack(config: Config, place: Place, *, dry_run: bool) -> Iterator[SetupStep]:
    """Slurm loads the plugin; where slurm.conf comes from the controller, the file is not this host's."""
    conf = conf_of_host(config, place.slurm)
    if not conf.is_file():
        return
    path = conf.with_name("plugstack.conf").resolve()
    line = " ".join(["required vhpc.so", *(f"{name}={folder}" for name, folder in needed(config).items())])
    kind, what = "plugstack", f"{path}: {line}"
    if find_line(path) is not None:
        yield SetupStep(kind, what, State.OK)
    elif dry_run:
        yield SetupStep(kind, what, State.MISSING)
    else:
        try:
            old = path.read_bytes() if path.exists() else b""
            newline = b"" if not old or old.endswith(b"\n") else b"\n"
            mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
            files.replace(path, old + newline + f"{line}\n".encode(), mode)
        except OSError as err:
            yield SetupStep(kind, what, State.FAILED, str(err))
        else:
            yield SetupStep(kind, what, State.DONE)


def _sbcast(config: Config, place: Place, *, dry_run: bool) -> Iterator[SetupStep]:
    """Users find vhpc-sbcast before Slurm's sbcast; a host without Slurm's needs none."""
    ours = Path(config.paths.libexec) / "vhpc-sbcast"
    found = sbcast_of_users(config)
    if found is None:
        return
    kind, what = "sbcast link", f"{place.sbcast} is {ours}"
    if Path(found).resolve() == ours.resolve():
        yield SetupStep(kind, what, State.OK)
    elif os.path.lexists(place.sbcast):
        yield SetupStep(kind, what, State.FAILED, f"{place.sbcast} is another program: rename it")
    elif dry_run:
        yield SetupStep(kind, what, State.MISSING)
    else:
        try:
            place.sbcast.symlink_to(ours)
        except OSError as err:
            yield SetupStep(kind, what, State.FAILED, str(err))
        else:
            yield SetupStep(kind, what, State.DONE)


def _libvirt_folder(place: Place, *, dry_run: bool) -> Iterator[SetupStep]:
    """QEMU, which has a uid of its own, may pass through libvirt's folder; Debian closes it."""
    kind, what = "libvirt", f"{place.libvirt} has mode {_MODE}"
    try:
        mode = place.libvirt.stat().st_mode
    except FileNotFoundError:
        return
    if mode & 0o001:
        yield SetupStep(kind, what, State.OK)
        return
    if not Path(place.statoverride).exists():
        return  # no Debian: vhpc doctor says what to do
    if dry_run:
        yield SetupStep(kind, what, State.MISSING)
        return
    add = ("--update", "--add", _OWNER, _OWNER, _MODE, str(place.libvirt))
    error = _failure((place.statoverride, *add))
    yield SetupStep(kind, what, State.FAILED if error else State.DONE, error)


def _libvirt_sockets(place: Place, *, dry_run: bool) -> Iterator[SetupStep]:
    """Users of jobs cannot connect to libvirt: at once, and when systemd makes the sockets again."""
    if not place.systemd.is_dir():
        return  # libvirtd.conf has the modes, and is the site's: vhpc doctor says what to do
    kind, found = "libvirt sockets", libvirtsockets.units(place.root)
    to_close = [unit for unit in found if unit.is_open]
    sockets = libvirtsockets.open_sockets(place.root) if found else []
    if not found:
        return
    what = f"users cannot connect to libvirt ({', '.join(unit.name for unit in to_close or found)})"
    if not to_close and not sockets:
        yield SetupStep(kind, what, State.OK)
        return
    if dry_run:
        yield SetupStep(kind, what, State.MISSING)
        return
    try:
        for unit in to_close:
            unit.drop_in.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            files.replace(unit.drop_in, libvirtsockets.DROP_IN.encode(), 0o644)
        # systemd gives a socket its mode when it makes it, which a running daemon does not allow
        for path in sockets:
            path.chmod(libvirtsockets.CLOSED_MODE)
    except OSError as err:
        yield SetupStep(kind, what, State.FAILED, str(err))
        return
    error = _failure((place.systemctl, "daemon-reload")) if to_close else ""
    if not error and any(unit.is_open for unit in libvirtsockets.units(place.root)):
        error = "a drop-in of the site's with a later name opens a socket again"
    yield SetupStep(kind, what, State.FAILED if error else State.DONE, error)


def _unit(place: Place, unit: str, *, now: bool, dry_run: bool) -> Iterator[SetupStep]:
    """A unit of systemd is enabled, and with ``now`` runs; no result on a host without systemd."""
    if not place.systemd.is_dir():
        return
    kind, what = "unit", f"{unit} is enabled" + (" and runs" if now else "")
    questions = ["is-enabled", *(["is-active"] if now else [])]
    if not any(_failure((place.systemctl, "--quiet", question, unit)) for question in questions):
        yield SetupStep(kind, what, State.OK)
    elif dry_run:
        yield SetupStep(kind, what, State.MISSING)
    else:
        error = _failure((place.systemctl, "enable", *(["--now"] if now else []), unit))
        yield SetupStep(kind, what, State.FAILED if error else State.DONE, error)


def _failure(argv: Sequence[str]) -> str:
    """Run a command; return why it failed, empty if it did not."""
    try:
        ended = run_briefly(argv, b"", TIMEOUT_S)
    except OSError as err:
        return f"cannot start {argv[0]}: {err.strerror}"
    if ended is None:
        return f"{argv[0]} did not end within {TIMEOUT_S:g} s"
    if ended.returncode == 0:
        return ""
    return last_lines(ended.stderr) or f"{argv[0]} ended with {ended.returncode}"
