# SPDX-License-Identifier: Apache-2.0
"""Isolation of the guests' helper processes from their own user: namespaces, control groups, the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.node.host import cgroup

NEEDED_KERNEL = (5, 12)
"""mount_setattr(2) needs 5.12; a /proc mount with its own hidepid needs 5.8."""
WANTED = {"memory", "pids", "cpuset"}


def check(config: Config, proc: Path = Path("/proc")) -> Iterator[CheckResult]:
    """Findings on this compute node."""
    yield kernel(os.uname().release)
    yield user_namespaces(proc / "sys/user/max_user_namespaces")
    yield control_groups(config, cgroup.hierarchies())


def kernel(release: str) -> CheckResult:
    """Whether the kernel has the system calls that vhpc-confine needs."""
    parts = release.split(".")
    try:
        version = int(parts[0]), int(parts[1].partition("-")[0])
    except (IndexError, ValueError):
        return warn("node.kernel", f"kernel {release} was not recognized", "vhpc needs Linux 5.12 or newer")
    if version < NEEDED_KERNEL:
        return error(
            "node.kernel", f"kernel {release} is too old for vhpc-confine", "install Linux 5.12 or newer"
        )
    return ok("node.kernel", f"kernel {release}")


def user_namespaces(limit: Path) -> CheckResult:
    """Whether root can create the user namespaces that helper processes run in."""
    try:
        most = int(limit.read_text())
    except (OSError, ValueError):
        return error(
            "node.userns",
            "this kernel has no user namespaces",
            "use a kernel with CONFIG_USER_NS: without it a user could trace the daemons of his guests",
        )
    if most == 0:
        return error(
            "node.userns",
            "user.max_user_namespaces is 0: no guest can start",
            "set it to 1000 or more on compute nodes; kernel.unprivileged_userns_clone = 0 or AppArmor can "
            "still forbid user namespaces to unprivileged users",
        )
    return ok("node.userns", f"up to {most} user namespaces")


def control_groups(config: Config, found: list[cgroup.Hierarchy]) -> CheckResult:
    """Whether guests and their helper processes can be limited."""
    if config.guests.cgroups == "off":
        return warn(
            "node.cgroups",
            "guests.cgroups is off: the helper processes of guests have no limits",
            "set it to required where the node has cgroup v2",
        )
    if not found:
        return error("node.cgroups", "no cgroup file system is mounted", "mount cgroup2 on /sys/fs/cgroup")
    controllers: set[str] = set().union(*(one.controllers for one in found))
    for one in found:
        if one.unified:
            controllers.update((one.mount / "cgroup.controllers").read_text().split())
    if missing := WANTED - controllers:
        return warn(
            "node.cgroups",
            f"the control group controllers {', '.join(sorted(missing))} are missing",
            "enable them on the kernel's command line; without them guests have no such limits",
        )
    how = "systemd slices" if cgroup.has_systemd() else "cgroup directories of vhpc"
    return ok("node.cgroups", f"guests are limited by {how}")
