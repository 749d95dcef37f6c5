# SPDX-License-Identifier: Apache-2.0
"""Control groups of a generation: QEMU and its helper processes, limited and ended together.

Helpers run with the job user's ids, and the user controls processes with these
ids: a limit or an environment variable of such a process is not a boundary.
The control group is one, because only root can leave it.

With systemd and machined, a generation is a slice: libvirt has its guests put
there (``<resource><partition>``), and helpers are a delegated scope next to
them.  Otherwise they are directories with the names that libvirt uses for a
partition.  cgroup v1, v2 and both together are supported.

Layout: ``vhpc.slice/vhpc-GENERATION.slice`` or ``vhpc.partition/GENERATION``,
with ``helpers`` (or a scope) and libvirt's group of each guest below it.
"""
# Decision: The control group of a generation

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.errors import NodeError, TeardownError
from vhpc_slurm.node.host import fuse, process
from vhpc_slurm.node.host.limits import Limits
from vhpc_slurm.record import Record

MOUNTS = Path("/proc/self/mountinfo")
SYSTEMD = Path("/run/systemd/system")
MACHINED = Path("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service")
BUSCTL, SYSTEMD_RUN, SYSTEMCTL = "/usr/bin/busctl", "/usr/bin/systemd-run", "/usr/bin/systemctl"
TIMEOUT_S = 10.0
MIB = 1 << 20


class Hierarchy(Record, frozen=True):
    """A mounted cgroup file system; ``controllers`` of v1, empty for v2."""

    mount: Path
    controllers: frozenset[str]

    @property
    def unified(self) -> bool:
        """Whether it is cgroup v2."""
        return not self.controllers


class CgroupEntry(Record, frozen=True):
    """How a helper enters its control group: by an argv prefix, or by ``cgroup.procs`` files."""

    prefix: tuple[str, ...] = ()
    procs: tuple[Path, ...] = ()


def hierarchies(mountinfo: str | None = None) -> list[Hierarchy]:
    """The node's cgroup hierarchies, from ``/proc/self/mountinfo`` (proc(5))."""
    text = MOUNTS.read_text() if mountinfo is None else mountinfo
    found = []
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        mount = Path(fields.split(" ")[4])
        if kind == "cgroup2":
            found.append(Hierarchy(mount, frozenset()))
        elif kind == "cgroup":
            flags = {"rw", "ro", "xattr", "clone_children", "cpuset_v2_mode", "noprefix"}
            names = {name for name in options.split(",") if name not in flags and "=" not in name}
            if names:  # "name=systemd" has no controllers
                found.append(Hierarchy(mount, frozenset(names)))
    return found


class Cgroup:
    """The control group of one generation on this node.

    Args:
        generation: ``JOB.RESTART.NONCE``.
        found: the node's hierarchies.
        systemd: whether systemd and machined manage them.
    """

    def __init__(self, generation: str, found: Sequence[Hierarchy], *, systemd: bool) -> None:
        self.generation = generation
        self.systemd = systemd
        self._hierarchies = found
        self.name = f"vhpc-{generation}.slice" if systemd else generation
        self._scope = f"vhpc-{generation}-helpers.scope" if systemd else "helpers"

    @classmethod
    def of(cls, generation: str) -> Cgroup:
        """The control group of a generation on this node, whether it exists or not."""
        return cls(generation, hierarchies(), systemd=has_systemd())

    @property
    def partition(self) -> str:
        """Its name for libvirt: ``<resource><partition>``."""
        return f"/vhpc/{self.generation}" if self.systemd else f"/vhpc.partition/{self.generation}"

    @property
    def folders(self) -> list[Path]:
        """Its directory in each hierarchy."""
        return [top / self.name for top in tops(self._hierarchies, systemd=self.systemd)]

    def create(self, limits: Limits) -> None:
        """Create it with its limits.

        Raises:
            NodeError: the node has no control groups, or one cannot be created.
        """
        if not self._hierarchies:
            raise NodeError(
                "this node has no control groups", "no cgroup file system is mounted", "mount cgroup2"
            )
        try:
            if self.systemd:
                self._create_slice(limits)
            else:
                self._create_folders(limits)
        except OSError as err:
            raise NodeError(f"cannot create the control group {self.name}", str(err)) from err

    def entry(self, limits: Limits) -> CgroupEntry:
        """How the next helper enters it."""
        procs = tuple(folder / self._scope / "cgroup.procs" for folder in self.folders)
        procs = tuple(path for path in procs if path.exists())
        if procs or not self.systemd:
            return CgroupEntry(procs=procs)
        properties = [
            "Delegate=yes",
            f"MemoryMax={limits.helper_memory_mib}M",
            f"TasksMax={limits.helper_tasks}",
        ]
        return CgroupEntry(
            prefix=(
                SYSTEMD_RUN,
                "--scope",
                "--quiet",
                "--collect",
                f"--unit={self._scope}",
                f"--slice={self.name}",
                *(f"--property={one}" for one in properties),
                "--",
            )
        )

    def pids(self) -> set[int]:
        """Processes in it that have not ended."""
        return {
            pid
            for folder in self.folders
            for pid in _pids_below(folder)
            if process.start_time(pid) is not None
        }

    def add(self, pid: int) -> None:
        """Move QEMU into the partition in the hierarchies in which libvirt has not done it.

        libvirt does not use the pids controller and those missing in its cgroup_controllers.
        """
        for folder in self.folders:
            if not folder.exists() or pid in _pids_below(folder):
                continue
            target = folder / "guests"
            with contextlib.suppress(FileExistsError):
                target.mkdir()
            _inherit_cpuset(target)
            with contextlib.suppress(ProcessLookupError):  # its guest has ended already
                (target / "cgroup.procs").write_text(str(pid))

    def kill(self, timeout_s: float = TIMEOUT_S) -> None:
        """End all processes in it, whatever programs they run now.

        Raises:
            TeardownError: a process survives.
        """
        began, looked = time.monotonic(), set[int]()
        until = began + timeout_s
        while pids := self.pids():
            for folder in self.folders:
                _kill_below(folder)
            if time.monotonic() - began > process.FUSE_S:
                for pid in pids - looked:
                    fuse.end_waits(pid)
                looked |= pids
            if time.monotonic() >= until:
                raise TeardownError(
                    f"{len(pids)} processes of generation {self.generation} do not end",
                    f"process {min(pids)} is probably stuck in the kernel",
                    "check its kernel stack, or reboot the node",
                )
            time.sleep(0.02)

    def guest_memory_bytes(self) -> int:
        """Shared memory that is still charged to its guests: their memory, and their files on tmpfs.

        A guest's memory is a memfd.  If some of it remains after the last process
        of the generation has ended, another process holds it: mapped, open, or in
        an unreceived message between two processes, which only this shows.
        """
        held = 0
        for folder in self.folders:
            whole = _shared_memory(folder)
            if whole is not None:
                helpers = _shared_memory(folder / self._scope) or 0
                held = max(held, whole - helpers)
        return held

    def remove(self) -> None:
        """Remove it after its processes have ended.

        Raises:
            TeardownError: the kernel does not remove it.
        """
        if self.systemd:
            _systemctl("stop", self.name)
        for folder in self.folders:
            _remove_tree(folder)

    def _create_slice(self, limits: Limits) -> None:
        mask = bytearray(max(limits.cpus) // 8 + 1)
        for cpu in limits.cpus:
            mask[cpu // 8] |= 1 << cpu % 8
        properties: list[str] = [
            *("MemoryMax", "t", str(limits.memory_mib * MIB)),
            *("TasksMax", "t", str(limits.tasks)),
            *("AllowedCPUs", "ay", str(len(mask)), *map(str, mask)),
        ]
        manager = (
            "org.freedesktop.systemd1",
            "/org/freedesktop/systemd1",
            "org.freedesktop.systemd1.Manager",
        )
        call = ("StartTransientUnit", "ssa(sv)a(sa(sv))", self.name, "replace", "3", *properties, "0")
        _run([BUSCTL, "--system", "call", *manager, *call])
        until = time.monotonic() + TIMEOUT_S
        while not any(folder.exists() for folder in self.folders):
            if time.monotonic() >= until:
                raise OSError(f"systemd did not create {self.name} within {TIMEOUT_S:.0f} s")
            time.sleep(0.005)

    def _create_folders(self, limits: Limits) -> None:
        for hierarchy in self._hierarchies:
            top = hierarchy.mount / "vhpc.partition"
            own = top / self.name
            _make(hierarchy, top)
            _make(hierarchy, own)
            # before a group below exists, whose cpuset of v1 must be a subset
            _limit(own, limits.memory_mib, limits.tasks, limits.cpus)
            _make(hierarchy, own / self._scope)
            _limit(own / self._scope, limits.helper_memory_mib, limits.helper_tasks, ())


def _make(hierarchy: Hierarchy, folder: Path) -> None:
    if hierarchy.unified:
        _hand_on_controllers(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o755)
    _inherit_cpuset(folder)


def has_systemd() -> bool:
    """Whether libvirt uses systemd's machined for the control groups of guests."""
    return SYSTEMD.exists() and MACHINED.exists()


def tops(found: Sequence[Hierarchy], *, systemd: bool) -> list[Path]:
    """The directories that contain all generations' control groups."""
    return [one.mount / ("vhpc.slice" if systemd else "vhpc.partition") for one in found]


def generations() -> set[str]:
    """Generations that have a control group on this node."""
    names: set[str] = set()
    systemd = has_systemd()
    for top in tops(hierarchies(), systemd=systemd):
        with contextlib.suppress(FileNotFoundError):
            names.update(path.name for path in top.iterdir() if path.is_dir())
    if systemd:
        return {
            name.removeprefix("vhpc-").removesuffix(".slice") for name in names if name.endswith(".slice")
        }
    return names


def _limit(folder: Path, memory_mib: int, tasks: int, cpus: tuple[int, ...]) -> None:
    """Write the limits whose files this hierarchy has."""
    values = {
        "memory.max": str(memory_mib * MIB),
        "memory.limit_in_bytes": str(memory_mib * MIB),
        "pids.max": str(tasks),
        "cpuset.cpus": format_cpu_list(cpus),
    }
    for name, value in values.items():
        if value and (folder / name).exists():
            (folder / name).write_text(value)


def _hand_on_controllers(folder: Path) -> None:
    available = (folder / "cgroup.controllers").read_text().split()
    for controller in available:
        if controller in ("memory", "pids", "cpu", "cpuset"):
            with contextlib.suppress(OSError):  # a group with processes cannot delegate controllers
                (folder / "cgroup.subtree_control").write_text(f"+{controller}")


def _inherit_cpuset(folder: Path) -> None:
    """Fill a new cpuset of v1, which is empty and accepts no process."""
    if not (folder / "cpuset.memory_migrate").exists():  # only v1 has this file
        return
    for name in ("cpuset.cpus", "cpuset.mems"):
        if not (folder / name).read_text().strip():
            (folder / name).write_text((folder.parent / name).read_text())


def _pids_below(folder: Path) -> Iterator[int]:
    for below, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            yield from map(int, Path(below, "cgroup.procs").read_text().split())


def _kill_below(folder: Path) -> None:
    """Send SIGKILL to all; a v1 group is frozen meanwhile, so that no process can fork."""
    killer, freezer = folder / "cgroup.kill", folder / "freezer.state"
    with contextlib.suppress(OSError):
        if killer.exists():
            killer.write_text("1")
            return
        if freezer.exists():
            freezer.write_text("FROZEN")
    try:
        for pid in _pids_below(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    finally:
        with contextlib.suppress(OSError):
            if freezer.exists():
                freezer.write_text("THAWED")


def _shared_memory(folder: Path) -> int | None:
    """Bytes of shared memory, including huge pages, charged to a group and those below it.

    None if this hierarchy does not count memory.
    """
    total = None
    with contextlib.suppress(OSError):
        fields = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        total = int(fields.get("total_shmem", fields.get("shmem", "0")))
    for path in folder.glob("hugetlb.*.current") if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            total = (total or 0) + int(path.read_text())
    return total


def _remove_tree(folder: Path) -> None:
    until = time.monotonic() + TIMEOUT_S
    while True:
        error: OSError | None = None
        for below, _, _ in os.walk(folder, topdown=False):
            try:
                Path(below).rmdir()
            except FileNotFoundError:
                continue
            except OSError as err:
                error = err
        if error is None:
            return
        if time.monotonic() >= until:
            raise TeardownError(f"cannot remove the control group {folder}", str(error), "vhpc reconcile")
        time.sleep(0.02)


def _systemctl(*words: str) -> None:
    with contextlib.suppress(OSError):  # whether it is gone is read from the directories
        _run([SYSTEMCTL, "--no-ask-password", *words])


def _run(command: list[str]) -> None:
    """Run a systemd command; OSError with its stderr if it fails."""
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as err:
        raise OSError(f"{command[0]} did not answer within {TIMEOUT_S:.0f} s") from err
    if done.returncode != 0:
        raise OSError(f"{command[0]}: {done.stderr.strip() or done.returncode}")
