# SPDX-License-Identifier: Apache-2.0
"""Control groups of the lab: each host sees only a subtree of its own.

A host has a cgroup namespace, so that its /sys/fs/cgroup begins with its
subtree, as on a real machine with the root.  If this machine does not allow
new cgroups (a container with a read-only /sys/fs/cgroup), the hosts have none,
and their vhpc.toml has the setting for that.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vlablib import kernel
from vlablib.settings import Lab

# controllers of hosts; they do not need hierarchies of others (v1)
_CONTROLLERS = ("memory", "pids", "cpu", "cpuset", "freezer")
_INSIDE = Path("sys/fs/cgroup")
# with cgroup v2, no process may be in a group that delegates controllers, except the real root
_LEAF = "host"


@dataclass(frozen=True)
class Hierarchy:
    """A mounted cgroup file system of this machine; `controllers` is empty for v2."""

    mount: Path
    controllers: tuple[str, ...] = ()


def hierarchies() -> list[Hierarchy]:
    """Return the hierarchies in which a host gets a subtree."""
    found = []
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.append(Hierarchy(Path(place)))
        elif kind == "cgroup":
            named = tuple(name for name in options.split(",") if name in _CONTROLLERS)
            if named:
                found.append(Hierarchy(Path(place), named))
    return found


def usable(lab: Lab) -> bool:
    """Whether the lab can create a subtree in each hierarchy."""
    try:
        for hierarchy in hierarchies():
            _make(hierarchy, _top(lab, hierarchy))
    except OSError:
        return False
    return bool(hierarchies())


def join(lab: Lab, host: str) -> None:
    """Move this process into the host's subtree; it may then create a cgroup namespace there."""
    for hierarchy in hierarchies():
        top = _top(lab, hierarchy)
        _make(hierarchy, top)
        if not hierarchy.controllers:
            # what is left of a host that was ended may delegate controllers, and then accepts no process
            _remove(top / host)
        _make(hierarchy, top / host)
        (top / host / "cgroup.procs").write_text("0", encoding="ascii")


def join_host(pid: int) -> None:
    """Move this process to the groups of a host's PID 1, so that its children belong to that host."""
    places = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
        _, names, path = line.split(":", 2)
        places[frozenset(filter(None, names.split(",")))] = path
    for hierarchy in hierarchies():
        ours = frozenset(hierarchy.controllers)
        for controllers, path in places.items():
            if ours <= controllers and bool(ours) == bool(controllers):
                procs = hierarchy.mount / path.lstrip("/") / "cgroup.procs"
                with contextlib.suppress(OSError):  # a host without own cgroups is in ours
                    procs.write_text("0", encoding="ascii")


def mount_inside(root: Path) -> None:
    """Mount the hierarchies below a host's root; this process must be in the host's cgroup namespace."""
    place = root / _INSIDE
    no_programs = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("tmpfs", str(place), "tmpfs", no_programs, "mode=755")
    for hierarchy in hierarchies():
        target = place / (",".join(hierarchy.controllers) or "unified")
        target.mkdir()
        kind = "cgroup" if hierarchy.controllers else "cgroup2"
        kernel.mount(kind, str(target), kind, 0, ",".join(hierarchy.controllers))
        if not hierarchy.controllers:
            (target / _LEAF).mkdir(exist_ok=True)
            (target / _LEAF / "cgroup.procs").write_text("0", encoding="ascii")


def remove(lab: Lab, host: str = "") -> None:
    """Remove the lab's subtrees, or those of one host, after their processes have ended."""
    for hierarchy in hierarchies():
        _remove(_top(lab, hierarchy) / host)


def _remove(top: Path) -> None:
    for folder in _bottom_up(top):
        for _ in range(100):  # the kernel may still remove the last process
            try:
                folder.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.02)
            else:
                break


def _top(lab: Lab, hierarchy: Hierarchy) -> Path:
    return hierarchy.mount / lab.data.name


def _make(hierarchy: Hierarchy, folder: Path) -> None:
    """Make a group with the controllers of its parent."""
    if not hierarchy.controllers:
        for controller in (folder.parent / "cgroup.controllers").read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                (folder.parent / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")
    folder.mkdir(exist_ok=True)
    if "cpuset" in hierarchy.controllers:
        # a new group's values are empty, and it accepts no process
        for name in ("cpuset.cpus", "cpuset.mems"):
            (folder / name).write_text((folder.parent / name).read_text(encoding="ascii"), encoding="ascii")


def _bottom_up(top: Path) -> Iterator[Path]:
    for folder, _, _ in os.walk(top, topdown=False):
        yield Path(folder)
