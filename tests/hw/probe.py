# SPDX-License-Identifier: Apache-2.0
"""Runs in the hardware lab's machine: what its kernel, libvirt and processes say, as JSON. No code of vhpc.

probe.py node              what has to be the same before and after a job
probe.py guest NAME        the QEMU of a domain, while it runs
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

PCI = Path("/sys/bus/pci/devices")
POOLS = Path("/sys/devices/system/node")


def text(path: Path | str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def driver(device: Path) -> str:
    link = device / "driver"
    return link.readlink().name if link.exists() else ""


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def functions() -> dict[str, list[str]]:
    found = {}
    for device in sorted(PCI.iterdir()):
        override = text(device / "driver_override")
        methods = text(device / "reset_method")
        found[device.name] = [driver(device), "" if override == "(null)" else override, methods]
    return found


def virtual_functions() -> dict[str, list[list[Any]]]:
    """By adapter: [MAC address, VLAN, link state, spoof check, trust] of each function."""
    found: dict[str, list[list[Any]]] = {}
    for link in json.loads(said("ip", "-json", "link", "show")):
        device = Path("/sys/class/net", link["ifname"], "device")
        for vf in link.get("vfinfo_list", []):
            vlans = [entry["vlan"] for entry in vf.get("vlan_list", []) if entry]
            values = [vf["address"], vlans, vf["link_state"], vf["spoofchk"], vf["trust"]]
            found.setdefault(device.resolve().name, []).append(values)
    return found


def mediated() -> dict[str, str]:
    """Types of mediated devices by UUID."""
    return {
        device.name: (device / "mdev_type").resolve().name
        for device in sorted(Path("/sys/bus/mdev/devices").glob("*"))
    }


def pages(which: str) -> dict[int, int]:
    return {
        int(pool.parents[1].name[4:]): int(text(pool / which))
        for pool in POOLS.glob("node*/hugepages/hugepages-2048kB")
    }


def processes() -> list[str]:
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        words = text(proc / "cmdline").replace("\0", " ")
        if re.match(r"\S*(qemu-system|virtiofsd|vhpc-locks|vhpc-shim|vhpc-run)", words):
            found.append(f"{proc.name} {words[:80]}")
    return found


def node() -> dict[str, Any]:
    ours = ("/run/vhpc/jobs", "/run/vhpc/uids", "/var/lib/vhpc/journal", "/var/lib/vhpc/outbox")
    slices = ("machine.slice", "vhpc.slice")
    groups = [str(path) for name in slices for path in Path("/sys/fs/cgroup").glob(f"{name}/*/")]
    # slurmstepd waits a second for its step's cgroup to be empty, and then leaves the folders (cgroup_v2.c,
    # cgroup_p_step_destroy): on a slow machine an empty folder stays; a process in it would be one of the job
    jobs = Path("/sys/fs/cgroup").glob("system.slice/*slurmstepd.scope/job_*/")
    groups += [str(path) for path in jobs if "populated 1" in text(path / "cgroup.events")]
    return {
        "functions": functions(),
        "vfs": virtual_functions(),
        "mdevs": mediated(),
        "pages": pages("nr_hugepages"),
        "free": pages("free_hugepages"),
        "mounts": sorted(line.split()[1] for line in text("/proc/mounts").splitlines()),
        "domains": said("virsh", "-q", "list", "--all", "--name").split(),
        "processes": processes(),
        "files": sorted(str(path) for folder in ours for path in Path(folder).glob("*")),
        "groups": groups,
        "vfio": sorted(path.name for path in Path("/dev/vfio").glob("[0-9]*")),
    }


def guest(name: str) -> dict[str, Any]:
    (pid,) = (p.name for p in Path("/proc").glob("[0-9]*") if f"guest={name}," in text(p / "cmdline"))
    threads: dict[str, list[str]] = {}
    for task in Path("/proc", pid, "task").iterdir():
        allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", text(task / "status"), re.MULTILINE)
        threads.setdefault(text(task / "comm"), []).append(allowed[1] if allowed else "")
    opened = [str(fd.readlink()) for fd in Path("/proc", pid, "fd").iterdir()]
    status = dict(
        re.findall(r"^(Uid|CapEff|NoNewPrivs|Seccomp):\s*(\S+)", text(f"/proc/{pid}/status"), re.MULTILINE)
    )
    return {
        "pid": int(pid),
        "threads": threads,
        "maps": [line for line in text(f"/proc/{pid}/numa_maps").splitlines() if "huge" in line],
        "cgroup": text(f"/proc/{pid}/cgroup"),
        "status": status,
        "kvm": "/dev/kvm" in opened,
        "vhost": opened.count("/dev/vhost-net"),
        "free": pages("free_hugepages"),
        "functions": functions(),
        "vfs": virtual_functions(),
        "mdevs": mediated(),
    }


json.dump(node() if sys.argv[1] == "node" else guest(sys.argv[2]), sys.stdout)
