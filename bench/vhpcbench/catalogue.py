# SPDX-License-Identifier: Apache-2.0
"""All benchmarks: the needs of each, its limit of time, and its targets."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from vhpcbench.targets import Target

QUIET = 2.0
"""Load average below which a machine is quiet; the idle lab itself takes 0.5."""
CALM = 8.0
"""The same for results far from their targets."""
IMAGE = "debian-minimal"
MINUTE_S = 60.0


@dataclass(frozen=True)
class Needs:
    """Requirements of a benchmark.

    Attributes:
        lab_nodes: nodes of a running lab with guests; 0: it needs no lab.
        load: the 1-minute load average must be below it; None: other work does not matter.
        memory_mib: memory that must be available.
        modules: Python modules of optional packages.
        image: published image of the lab.
    """

    root: bool = False
    lab_nodes: int = 0
    cpus: int = 1
    load: float | None = None
    memory_mib: int = 0
    programs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    image: str = IMAGE

    @property
    def text(self) -> str:
        """All in one line."""
        parts = ["root"] if self.root else []
        parts += [f"a lab of {self.lab_nodes} or more nodes"] if self.lab_nodes else []
        parts += [f"the image {self.image}"] if self.image != IMAGE else []
        parts += [f"{self.cpus} CPUs"] if self.cpus > 1 else []
        parts += [f"{self.memory_mib} MiB of memory"] if self.memory_mib else []
        parts += [*self.programs, *self.modules]
        parts += [f"a load below {self.load:g}"] if self.load is not None else []
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class Benchmark:
    """A program in bench/, and its arguments; ``own_lab``: it starts a lab of its own and ends it."""

    name: str
    needs: Needs
    limit_s: float
    program: str
    arguments: tuple[str, ...] = ()
    own_lab: bool = False
    targets: tuple[Target, ...] = field(default=())

    @property
    def command(self) -> str:
        """The command line, as README.md has it."""
        return " ".join((f"bench/{self.program}", *self.arguments))


def lab(nodes: int = 1, *, quiet: bool = True, cpus: int = 1, image: str = IMAGE) -> Needs:
    """Needs of a benchmark with real guests."""
    return Needs(root=True, lab_nodes=nodes, cpus=cpus, load=QUIET if quiet else None, image=image)


def local(*programs: str, quiet: bool = True, root: bool = False, modules: tuple[str, ...] = ()) -> Needs:
    """Needs of a benchmark without a lab."""
    return Needs(root=root, load=QUIET if quiet else None, programs=programs, modules=modules)


MUNGE = "munged"
FABRIC = (MUNGE, "opensm", "ibsim", "smpquery")
ENTRIES: dict[str, tuple[Needs, float]] = {
    "plan": (Needs(load=CALM), 5),
    "inventory": (Needs(load=CALM), 5),
    "prolog-off": (local(quiet=False), 5),
    "image-peers": (local(MUNGE, quiet=False, root=True), 15),
    "scale": (local(MUNGE, quiet=False), 30),
    "checkpoint-requests": (local(MUNGE), 15),
    "barrier": (local(MUNGE), 15),
    "store": (local("mariadbd", "mariadb-install-db", modules=("pymysql",)), 15),
    "fabric": (local(*FABRIC), 45),
    "cluster-grow": (local(MUNGE), 30),
    "enter": (lab(), 10),
    "step": (lab(), 10),
    "hooks": (lab(quiet=False), 15),
    "boot": (lab(), 15),
    "guest": (lab(image="debian-cloud"), 40),
    "stdio": (lab(), 20),
    "files": (lab(), 20),
    "image": (lab(), 20),
    "checkpoint": (lab(), 20),
    "mpi": (lab(2, cpus=2), 15),
    "collectives": (lab(2, cpus=2, image="debian-hpc"), 30),
    "vhost": (Needs(root=True, cpus=2, load=QUIET, memory_mib=4096), 40),
    "end": (lab(2), 40),
    "start": (lab(8), 30),
    "cluster-grow-lab": (lab(2), 40),
    # its load takes minutes to fall
    "tasks": (lab(), 10),
    "cluster": (Needs(root=True, cpus=16, load=QUIET, memory_mib=16384), 60),
}
"""Needs, and minutes after which a benchmark is ended, in the order in which they run."""
COMMANDS = {"cluster-grow-lab": ("cluster-grow", "--lab"), "end": ("end", "--rounds", "100")}
"""Command lines that are not just the name."""


def known() -> tuple[Benchmark, ...]:
    """All benchmarks with their targets, in the order in which they run."""
    return tuple(_entry(name, *entry) for name, entry in ENTRIES.items())


def _entry(name: str, needs: Needs, minutes: float) -> Benchmark:
    program, *arguments = COMMANDS.get(name, (name,))
    module = importlib.import_module(f"vhpcbench.{program.replace('-', '_')}")
    targets: tuple[Target, ...] = module.LAB_TARGETS if "--lab" in arguments else module.TARGETS
    own_lab = name == "cluster"
    return Benchmark(name, needs, minutes * MINUTE_S, program, tuple(arguments), own_lab, targets)
