# SPDX-License-Identifier: Apache-2.0
"""The command line of vlab."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from vlablib import execcli, services, slurmtree, status, up
from vlablib.recipe import DEFAULT_SUITE, SUITES
from vlablib.report import LabError, say
from vlablib.running import find_host
from vlablib.services import UNITS, Unit, units_of
from vlablib.settings import Lab, Record

_DESCRIPTION = """\
A Slurm cluster on one machine, built from namespaces and overlays: hosts login,
ctl (slurmctld, slurmdbd, MariaDB, vhpcd) and n1, n2, ... (slurmd, libvirtd),
users alice and bob, shared /home and /scratch. Needs root.
"""
_EPILOG = """\
environment:
  VLAB_STATE   state of the lab, also its identity (default /run/vhpc-lab)
  VLAB_DATA    disks of the hosts, homes; not on tmpfs (default /var/tmp/vhpc-lab...)
  VLAB_CACHE   system trees by suite and recipe (default /var/cache/vhpc-lab);
               remove a tree to bootstrap it again
  VHPC_MIRROR, VHPC_SECURITY_MIRROR
               mirrors of Debian packages (default: the mirrors of this host's
               APT configuration)
"""
_PROGRAMS = ("mmdebstrap", "unshare", "nsenter", "ip", "cmake")


def main() -> int:
    """Run vlab; return its exit status."""
    arguments = _parser().parse_args()
    return execcli.guarded(lambda lab: int(arguments.run(lab, arguments)))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("vlab", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    _add_up(commands.add_parser("up", help="start the lab's missing parts, and deploy"))

    command = commands.add_parser("exec", help=execcli.HELP)
    execcli.add_arguments(command)
    command.set_defaults(run=execcli.run)

    command = commands.add_parser(
        "status", help="show what runs; exit status 0: all, 1: not all, 3: the lab is down"
    )
    command.add_argument("--json", action="store_true", help="print JSON, with the lab's paths")
    command.set_defaults(run=status.show)

    command = commands.add_parser("logs", help="show the end of a host's logs")
    command.add_argument("-n", "--lines", type=int, default=50, help="lines per file (default 50)")
    command.add_argument("-f", "--follow", action="store_true", help="follow the logs")
    command.add_argument("host")
    command.add_argument("unit", nargs="?", choices=sorted(UNITS), help="only this daemon")
    command.set_defaults(run=_logs)

    command = commands.add_parser(
        "service", help="start, stop (SIGTERM), kill (SIGKILL) a daemon or show its state"
    )
    command.add_argument("host")
    command.add_argument("action", choices=("start", "stop", "kill", "restart", "status"))
    command.add_argument("unit", choices=sorted(UNITS))
    command.set_defaults(run=_service)

    command = commands.add_parser(
        "deploy", help="install the checkout (or its packages) into the running hosts"
    )
    command.set_defaults(run=_deploy)

    command = commands.add_parser("reboot", help="end a host like a power cut, and start it again")
    command.add_argument("host")
    command.set_defaults(run=_reboot)

    command = commands.add_parser("poweroff", help="end a host like a power cut; `vlab up` starts it again")
    command.add_argument("host")
    command.set_defaults(run=_poweroff)

    command = commands.add_parser("down", help="end the lab and remove everything except the cache")
    command.set_defaults(run=_down)
    return parser


def _add_up(command: argparse.ArgumentParser) -> None:
    command.add_argument("--suite", choices=sorted(SUITES), help=f"Debian suite (default {DEFAULT_SUITE})")
    command.add_argument("--nodes", type=int, metavar="N", help="number of compute nodes (default 2)")
    command.add_argument(
        "--controllers",
        type=int,
        choices=(1, 2),
        help="with 2: slurmctld and vhpcd on ctl, their standbys on ctl2, and the databases on db",
    )
    command.add_argument(
        "--fabric",
        action=argparse.BooleanOptionalAction,
        help="simulate an InfiniBand fabric (ibsim, opensm) on ctl, on which vhpcd allocates keys",
    )
    command.add_argument(
        "--packages",
        type=Path,
        metavar="DIR",
        help="a new lab, or one that was started so: hosts get vhpc from the Debian packages in DIR",
    )
    command.add_argument(
        "--tree",
        type=Path,
        metavar="DIR",
        help="a new lab: hosts have the Debian system in DIR, which has any Slurm in any prefix and is not "
        "changed; what it must hold: docs/contributing.md",
    )
    command.add_argument(
        "--bare",
        action="store_true",
        help="a new lab: hosts have Slurm (of trixie or bookworm), and nothing that vhpc needs; for the "
        "first day by docs/install.md",
    )
    command.add_argument(
        "--light",
        action="store_true",
        help="a new lab: compute nodes have no libvirtd, so that many fit on a machine; libvirt's test "
        "driver takes the guests of jobs, and nothing boots; bench/cluster has a stand-in for guests",
    )
    command.set_defaults(run=_up)


def _up(lab: Lab, arguments: argparse.Namespace) -> int:
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        raise LabError(f"{', '.join(missing)}: not installed; run: make deps")
    system = up.System(arguments.suite, arguments.packages, arguments.tree, arguments.bare, arguments.light)
    up.up(lab, system, arguments.nodes, fabric=arguments.fabric, controllers=arguments.controllers)
    return 0


def _deploy(lab: Lab, _: argparse.Namespace) -> int:
    up.redeploy(lab)
    return 0


def _reboot(lab: Lab, arguments: argparse.Namespace) -> int:
    up.reboot(lab, arguments.host)
    return 0


def _poweroff(lab: Lab, arguments: argparse.Namespace) -> int:
    up.poweroff(lab, arguments.host)
    return 0


def _down(lab: Lab, _: argparse.Namespace) -> int:
    up.down(lab)
    return 0


def _logs(lab: Lab, arguments: argparse.Namespace) -> int:
    root = Path(f"/proc/{find_host(lab, arguments.host)}/root")
    units = [UNITS[arguments.unit]] if arguments.unit else _units_of(lab, arguments.host)
    files = [unit.current_log(root) for unit in units]
    if not arguments.unit:
        files += sorted((root / "var/log/vhpc").glob("**/*.log"))
    present = [str(file) for file in files if file.exists() and (file.stat().st_size or arguments.follow)]
    if not present:
        say("nothing has been logged")
        return 0
    follow = ["-F"] if arguments.follow else []
    command = ["tail", "-n", str(arguments.lines), *follow, "--", *present]
    return subprocess.run(command, check=False).returncode


def _service(lab: Lab, arguments: argparse.Namespace) -> int:
    host, action = arguments.host, arguments.action
    own = {each.name: each for each in _units_of(lab, host)}
    unit = own.get(arguments.unit)
    if unit is None:
        raise LabError(f"{host} has no daemon {arguments.unit}; it has: {', '.join(own)}")
    init = find_host(lab, host)
    if action == "status":
        pid = services.pid_of(init, unit)
        sys.stdout.write(f"{services.state(init, unit)}{f' {pid}' if pid else ''}\n")
        return 0 if pid else 3
    with lab.locked():
        if action in ("stop", "restart"):
            services.stop(host, init, unit)
        if action == "kill":
            services.kill(host, init, unit)
        if action in ("start", "restart"):
            if not services.installed(unit, lab, init):
                raise LabError(f"{unit.name} is not installed; run: vlab deploy")
            services.start(init, unit)
            services.wait_ready(host, init, unit)
    return 0


def _units_of(lab: Lab, host: str) -> tuple[Unit, ...]:
    record = Record.read(lab)
    if record is None:
        return units_of(host, fabric=False)
    prefix = slurmtree.place_in_hosts(Path(record.rootfs))
    return units_of(
        host, fabric=record.fabric, prefix=prefix, controllers=record.controllers, light=record.light
    )
