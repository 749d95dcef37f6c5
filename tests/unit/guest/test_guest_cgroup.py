# SPDX-License-Identifier: Apache-2.0
"""Cgroups of sessions: they are their user's, and what is moved below one ends with its session."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pace import until

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]

# as container engines make them
NESTED = """
for top in /sys/fs/cgroup/unified /sys/fs/cgroup; do [ -e $top/cgroup.procs ] && break; done
own=$top$(sed -n s/^0:://p /proc/self/cgroup)
stat -c '%u %a' $own/cgroup.procs
mkdir -p $own/a/b/c || exit
sleep 1000 & echo $! > $own/a/b/c/cgroup.procs && echo $! $own
"""


def test_processes_in_nested_cgroups_end_with_the_session(guest: Guest) -> None:
    done = guest.run("sh", "-c", NESTED)
    assert done.returncode == 0, done.stderr
    access, left = done.stdout.decode().splitlines()
    pid, own = left.split()
    assert access == f"{os.getuid()} 644"
    until(lambda: not Path(f"/proc/{pid}").exists(), "the end of a process in a nested cgroup")
    until(lambda: not Path(own).exists(), "the removal of the session's cgroup with those below it")
