# SPDX-License-Identifier: Apache-2.0
"""The command line of hwlab."""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import subprocess
import sys
import tarfile
import time

from vlablib import hardware, hwchannel, hwfiles, mtty
from vlablib.hardware import Machine
from vlablib.hwarch import ARCHS, DEFAULT
from vlablib.report import LabError, say, step
from vlablib.settings import CHECKOUT, Lab, deadline, slower

_DESCRIPTION = """\
One emulated node with systemd, cgroup v2, Slurm, libvirt, an IOMMU, two NUMA
nodes, two SR-IOV adapters and simulated GPUs, for tests that need real kernel
interfaces of devices. Needs root.
"""
_BOOT_S = 300
_ASK_S = 15
_NO_ANSWER = 125


def main() -> int:
    """Run hwlab; return its exit status."""
    arguments = _parser().parse_args()
    try:
        return int(arguments.run(Machine.of(Lab.from_environment()), arguments))
    except LabError as err:
        say(str(err))
        # different from exit statuses of commands in the machine
        return _NO_ANSWER if arguments.run is _exec else 1


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("hwlab", description=_DESCRIPTION, formatter_class=raw)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    command = commands.add_parser("up", help="boot the machine with this checkout installed")
    command.add_argument("--selinux", action="store_true", help="with SELinux, enforcing")
    command.add_argument("--arch", choices=ARCHS, default=DEFAULT, help=f"default: {DEFAULT}")
    command.set_defaults(run=_up)
    command = commands.add_parser("exec", help="run a command in it; output comes at its end")
    command.add_argument("-u", "--user", default="root")
    command.add_argument("-t", "--timeout", type=float, default=60, metavar="SECONDS")
    command.add_argument("command", nargs=argparse.REMAINDER)
    command.set_defaults(run=_exec)
    command = commands.add_parser("qmp", help="send its QEMU a command; arguments are JSON")
    command.add_argument("name")
    command.add_argument("arguments", nargs="?", default="{}")
    command.set_defaults(run=_qmp)
    command = commands.add_parser("status", help="show whether it runs")
    command.set_defaults(run=_status)
    command = commands.add_parser("console", help="show the output of its serial port")
    command.set_defaults(run=_console)
    command = commands.add_parser("deploy", help="install the checkout into the running machine")
    command.set_defaults(run=_deploy)
    command = commands.add_parser("mtty", help=f"let {mtty.PARENT} offer mediated devices, by mtty")
    command.set_defaults(run=_mtty)
    command = commands.add_parser("down", help="switch it off")
    command.set_defaults(run=_down)
    return parser


def _up(machine: Machine, arguments: argparse.Namespace) -> int:
    arch = ARCHS[arguments.arch]
    environment = {**os.environ, "VHPC_CATALOG": str(machine.catalog)}
    publish = [str(CHECKOUT / "scripts/publish-image"), "debian-minimal", f"--arch={arch.guest.name}"]
    subprocess.run(publish, check=True, env=environment, stdout=2)
    hardware.start(machine, arch, selinux=arguments.selinux)
    with step("booting the machine"):
        _await_answer(machine, _BOOT_S * arch.slowness)
    with step("waiting for Slurm"):
        for _pause in deadline(_BOOT_S * arch.slowness):
            said = hwchannel.execute(machine.port, ["sinfo", "-h", "-o", "%T"], "root", "", slower(60))
            if said.out.strip() == "idle":
                return 0
    raise LabError(f"slurmd did not register: {said.out}{said.err}")


def _await_answer(machine: Machine, timeout_s: int) -> None:
    """Ask until the machine answers: a question that comes before its system is lost, as UEFI reads the port.

    Raises:
        LabError: it does not answer, or has ended.
    """
    for _pause in deadline(timeout_s):
        try:
            hwchannel.execute(machine.port, ["true"], "root", "", slower(_ASK_S))
        except LabError as err:
            if not isinstance(err.__cause__, TimeoutError):
                raise
        else:
            return
    raise LabError(f"the machine did not answer within {slower(timeout_s):g} s; see: hwlab console")


def _exec(machine: Machine, arguments: argparse.Namespace) -> int:
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    stdin = "" if sys.stdin.isatty() else sys.stdin.read()
    done = hwchannel.execute(machine.port, words, arguments.user, stdin, arguments.timeout)
    sys.stdout.write(done.out)
    sys.stderr.write(done.err)
    return done.code & 0xFF


def _qmp(machine: Machine, arguments: argparse.Namespace) -> int:
    answer = hwchannel.monitor(machine.monitor, arguments.name, json.loads(arguments.arguments))
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    return 0


def _status(machine: Machine, _: argparse.Namespace) -> int:
    pid = machine.pid()
    say(f"the hardware lab's machine runs: {pid}" if pid else "the hardware lab's machine is off")
    return 0 if pid else 3


def _console(machine: Machine, _: argparse.Namespace) -> int:
    sys.stdout.write(machine.console.read_text(encoding="utf-8", errors="replace"))
    return 0


def _deploy(machine: Machine, _: argparse.Namespace) -> int:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for target, data, mode in hwfiles.installed(hardware.tree(machine), hardware.running_arch(machine)):
            member = tarfile.TarInfo(target)
            member.size, member.mode, member.mtime = len(data), mode, int(time.time())
            tar.addfile(member, io.BytesIO(data))
    unpack = "base64 -d | tar -xz --unlink-first -C / && systemctl restart vhpcd"
    _send(machine, unpack, packed.getvalue(), 120, "cannot install into the machine")
    return 0


def _mtty(machine: Machine, _: argparse.Namespace) -> int:
    if hardware.running_arch(machine).toolchain:
        raise LabError("mtty is built for machines of this host's architecture only")
    module = mtty.module(machine.lab.cache, hardware.tree(machine))
    load = "modprobe -a mdev vfio_iommu_type1 && base64 -d > /run/mtty.ko && insmod /run/mtty.ko"
    _send(machine, load, module.read_bytes(), 60, "cannot load mtty")
    return 0


def _send(machine: Machine, script: str, data: bytes, limit_s: int, problem: str) -> None:
    """Run a script in the machine, with data in base64 as its input; LabError begins with the problem."""
    text = base64.b64encode(data).decode()
    done = hwchannel.execute(machine.port, ["sh", "-c", script], "root", text, slower(limit_s))
    if done.code:
        raise LabError(f"{problem}: {done.err}")


def _down(machine: Machine, _: argparse.Namespace) -> int:
    hardware.stop(machine)
    return 0
