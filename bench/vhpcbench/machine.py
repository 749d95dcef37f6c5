# SPDX-License-Identifier: Apache-2.0
"""The machine on which benchmarks run: its description, its lab, and what it lacks for a benchmark."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.node.host.inventory import cpu_model, decide_kvm
from vhpcbench.catalogue import IMAGE, Needs
from vhpcbench.common import CHECKOUT, VLAB

LAB_NODES = 2
"""Nodes of the lab of `make lab-up`."""
MIB_KIB = 1024
COMMAND_S = 60.0
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class LabState:
    """A running lab: nodes that have guests, names of its published images; ``whole``: all daemons run."""

    nodes: int
    images: frozenset[str]
    whole: bool = True


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that benchmarks need."""

    root: bool
    cpus: int
    available_mib: int
    lab: LabState | None

    def lacks(self, needs: Needs) -> str | None:
        """The first need that the machine does not meet, and what to do; None: it meets all but the load."""
        if needs.root and not self.root:
            return "needs root: run bench/all as root"
        if self.cpus < needs.cpus:
            return f"needs {needs.cpus} CPUs, the machine has {self.cpus}: use a larger one"
        if self.available_mib < needs.memory_mib:
            return f"needs {needs.memory_mib} MiB of memory, {self.available_mib} are available: end programs"
        missing = [name for name in needs.programs if shutil.which(name, path=PATH) is None]
        missing += [name for name in needs.modules if importlib.util.find_spec(name) is None]
        if missing:
            return f"needs {', '.join(missing)}: `make deps` installs it"
        return self._lacks_lab(needs.lab_nodes, needs.image) if needs.lab_nodes else None

    def _lacks_lab(self, nodes: int, image: str) -> str | None:
        publish = "scripts/publish-image" if image == IMAGE else f"scripts/publish-image {image}"
        if self.lab is None:
            up = "make lab-up" if nodes <= LAB_NODES else f"lab/vlab up --nodes {nodes}` and `{publish}"
            return f"needs a lab of {nodes} or more nodes: run `{up}`"
        if not self.lab.whole:
            return "some daemons of the lab do not run: see `lab/vlab status`"
        if self.lab.nodes == 0:
            return "the nodes of this lab have no guests: run `lab/vlab down`, then `make lab-up`"
        if self.lab.nodes < nodes:
            return f"needs {nodes} nodes, the lab has {self.lab.nodes}: run `lab/vlab up --nodes {nodes}`"
        return None if image in self.lab.images else f"the lab has no image {image}: run `{publish}`"


def found() -> Machine:
    """This machine."""
    return Machine(os.geteuid() == 0, os.cpu_count() or 1, _memory_mib("MemAvailable"), _lab())


def describe() -> dict[str, object]:
    """Hardware and versions of this machine and its lab."""
    kvm, _ = decide_kvm("auto", Path("/proc/cpuinfo").read_text(encoding="utf-8"), arch=platform.machine())
    emulator = f"qemu-system-{platform.machine()}"
    return {
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "memory_mib": _memory_mib("MemTotal"),
        "kernel": platform.release(),
        "virtualization": (_output("systemd-detect-virt", "--vm").text or "unknown").strip(),
        "guests": "KVM" if kvm else "emulated",
        "qemu": _version(_host("n1", emulator, "--version") or _first(emulator, "--version")),
        "slurm": _version(_host("ctl", "slurmctld", "-V") or _first("slurmctld", "-V")),
        "commit": _first("git", "-C", str(CHECKOUT), "rev-parse", "HEAD"),
        "dirty": bool(_first("git", "-C", str(CHECKOUT), "status", "--porcelain")),
    }


def _lab() -> LabState | None:
    said = _output(str(VLAB), "status", "--json")
    try:
        status = json.loads(said.text)
    except ValueError:
        return None
    if not status["up"]:
        return None
    nodes = [host for host in status["hosts"].values() if "libvirtd" in host["units"]]
    names = Path(status["paths"]["shared"]) / "vhpc/catalog/names"
    images = frozenset(path.name for path in names.iterdir()) if names.is_dir() else frozenset[str]()
    return LabState(len(nodes), images, said.succeeded)


def _memory_mib(key: str) -> int:
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    match = re.search(rf"^{key}:\s*([0-9]+) kB$", text, re.MULTILINE)
    return int(match[1]) // MIB_KIB if match else 0


def _host(host: str, *argv: str) -> str | None:
    """First line of a command on a host of the lab; None without a lab."""
    return _first(str(VLAB), "exec", host, "--", *argv)


def _first(*argv: str) -> str | None:
    """First line that a command prints; None if it does not exist or fails."""
    said = _output(*argv)
    return said.text.partition("\n")[0].strip() if said.succeeded else None


@dataclass(frozen=True)
class _Said:
    text: str
    succeeded: bool


def _output(*argv: str) -> _Said:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=COMMAND_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return _Said("", False)
    return _Said(done.stdout, done.returncode == 0)


def _version(line: str | None) -> str | None:
    match = re.search(r"[0-9]+\.[0-9.]*[0-9]", line or "")
    return match[0] if match else None
