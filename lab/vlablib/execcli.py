# SPDX-License-Identifier: Apache-2.0
"""The command `vlab exec`, which starts without the modules of the other commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vlablib.enter import Account, execute
from vlablib.report import LabError, say
from vlablib.running import find_host
from vlablib.settings import Lab, Record
from vlablib.slurmtree import search

HELP = "run a command in a host"


def main() -> int:
    """Run `vlab exec`; return its exit status."""
    parser = argparse.ArgumentParser("vlab exec")
    add_arguments(parser)
    arguments = parser.parse_args(sys.argv[2:])
    return guarded(lambda lab: run(lab, arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vlab exec`."""
    parser.add_argument("-u", "--user", default="root", help="root (default), alice or bob")
    parser.add_argument("-t", "--tty", action="store_true", help="allocate a terminal even if vlab has none")
    parser.add_argument("--cwd", default="", metavar="DIR", help="working directory (default: home)")
    parser.add_argument("host")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="default: a shell")


def run(lab: Lab, arguments: argparse.Namespace) -> int:
    """Run the command in the host; return its exit status."""
    words: list[str] = arguments.command
    if words[:1] == ["--"]:
        words = words[1:]
    terminal = arguments.tty or (sys.stdin.isatty() and sys.stdout.isatty())
    init = find_host(lab, arguments.host)
    account = Account.find(Path(f"/proc/{init}/root"), arguments.user)
    record = Record.read(lab)
    if record is not None:
        account = replace(account, search=search(Path(record.rootfs)))
    return execute(init, account, words or ["bash", "-l"], cwd=arguments.cwd, terminal=terminal)


def guarded(command: Callable[[Lab], int]) -> int:
    """Run a command on the lab that the environment names; report its error; return the exit status."""
    if os.geteuid():
        say("vlab creates namespaces, mounts and devices; run it as root")
        return 1
    try:
        return command(Lab.from_environment())
    except LabError as err:
        say(str(err))
        return 1
    except KeyboardInterrupt:
        say("interrupted; run `vlab up` to continue or `vlab down` to remove the lab")
        return 130
