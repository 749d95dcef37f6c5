# SPDX-License-Identifier: Apache-2.0
"""Resources of daemons and sizes of files during a run on a light lab, and events of months at a site.

Samples come from /proc of this machine and ask no daemon.  Meanwhile a "day"
passes with every hundredth job: logrotate runs with the configuration of
vhpc's package, and records become old enough for vhpc's own rules to remove them.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster import AS_VHPCD, ROOT, Lab, vlab_status

from campaign.background import Background
from campaign.plan import Plan
from campaign.record import Record
from campaign.trends import DATABASE, Sample
from vhpcbench.counted import all_processes, descendants

SAMPLE_S, PROGRESS_S = 15.0, 60.0
DAY_JOBS = 100
YOUNG_MIN = 5
"""Records of jobs that ended in the last minutes stay as young as they are."""
OF_CONTROLLER = ("vhpcd", "vhpc-hookd", "slurmctld", "slurmdbd")
ROTATE = (ROOT / "debian/vhpc-node.logrotate").read_text(encoding="utf-8")
# sweep() in node/store/joblock.py removes what is older than a day
NODE_DAY = f"""
cat > /etc/logrotate.vhpc && logrotate --force --state /var/lib/logrotate.vhpc /etc/logrotate.vhpc
for folder in tombstones locks; do
    [ ! -d /run/vhpc/$folder ] ||
        find /run/vhpc/$folder -type f -mmin +{YOUNG_MIN} -exec touch -c -d '2 days ago' {{}} +
done
"""
# 31 days: controller.history_days is 30
LEASES = f"""
import sqlite3
db = sqlite3.connect("/var/lib/vhpc/vhpcd/leases.sqlite", timeout=60)
old = "state = 'released' AND updated BETWEEN unixepoch() - 86400 AND unixepoch() - {60 * YOUNG_MIN}"
with db:
    db.execute(f"UPDATE lease SET updated = updated - 31 * 86400 WHERE {{old}}")
print(*db.execute("SELECT count(*) FROM lease").fetchone())
"""
_AWAY = (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError)


class Endurance:
    """The thread that takes samples, has days pass, and tells how far the run is."""

    def __init__(self, lab: Lab, plan: Plan, record: Record, background: Background) -> None:
        self.lab, self.plan, self.record = lab, plan, record
        self._background = background
        self._over = threading.Event()
        self._began = time.monotonic()
        self._days = 0
        self._told = self._began

    def stop(self) -> None:
        """Have ``run`` return soon: what is left in the queue is no steady load."""
        self._over.set()

    def run(self) -> None:
        """Until ``stop``."""
        while not self._over.wait(SAMPLE_S):
            try:
                self._pass_days()
                self.record.samples.append(self._sample())
            except _AWAY as err:  # a fault has taken a host or a daemon away
                self._background.log(f"no sample: {err!r}")
            if time.monotonic() - self._told > PROGRESS_S:
                self._tell()

    def _pass_days(self) -> None:
        days = len(self.record.submitted) // DAY_JOBS
        if days > self._days:
            self._days = days
            for node in self.lab.nodes:
                self.lab.run(node, "sh", "-c", NODE_DAY, stdin=ROTATE, check=False)

    def _tell(self) -> None:
        self._told = time.monotonic()
        took = (self._told - self._began) / 60
        done, all_ = len(self.record.submitted), len(self.plan.jobs)
        faults = len(self.record.injected) + len(self.record.missed)
        rate = done / took
        self._background.log(
            f"PROGRESS {took:.0f} min: {done} of {all_} jobs, {faults} of {len(self.plan.faults)} faults; "
            f"{rate:.0f} jobs/min, about {(all_ - done) / max(rate, 0.1):.0f} min left"
        )

    def _sample(self) -> Sample:
        """The present values.

        Raises:
            _AWAY: a daemon or a host is not there.
        """
        hosts, processes = vlab_status()["hosts"], all_processes()
        held: dict[tuple[str, str], float] = {}
        cpu_s, pids = {}, {}
        for name, found in _daemons(hosts):
            if all(found):
                held[name, "MiB"] = sum(map(_memory_mib, found))
                held[name, "descriptors"] = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in found)
                cpu_s[name], pids[name] = sum(processes[pid].own_s for pid in found), found
        nodes = [int(hosts[node]["pid"]) for node in self.lab.nodes]
        held |= _files(int(hosts["ctl"]["pid"]), nodes)
        for name, roots in (("controller", [int(hosts["ctl"]["pid"])]), ("nodes", nodes)):
            held[name, "processes"] = len(descendants(processes, roots))
        leases = self.lab.run("ctl", *AS_VHPCD, "python3", "-", stdin=LEASES, check=False)
        if leases.code == 0:
            held[DATABASE, "leases"] = float(leases.out)
        at = time.monotonic() - self._began
        return Sample(at, len(self.record.submitted), held, cpu_s, pids)


def _daemons(hosts: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of daemons, with the pids of those of this name; 0 for one that does not run."""

    def pid(host: str, unit: str) -> int:
        return int(hosts[host]["units"][unit]["pid"] or 0)

    nodes = [host for host, what in hosts.items() if "slurmd" in what["units"]]
    for unit in OF_CONTROLLER:
        yield unit, (pid("ctl", unit),)
    yield "munged of ctl", (pid("ctl", "munged"),)
    for unit in ("slurmd", "munged"):
        yield f"{unit} of {len(nodes)} nodes", tuple(pid(node, unit) for node in nodes)


def _files(ctl: int, nodes: list[int]) -> dict[tuple[str, str], float]:
    """Files, by the pids of the hosts' PID 1."""
    roots = [Path(f"/proc/{pid}/root") for pid in nodes]
    top = Path(f"/proc/{ctl}/root")
    of_jobs = ("journal", "outbox", "disks", "images/pins")
    logs = [root / "var/log/vhpc" for root in (top, *roots)]
    kept = [len(_all(root / "var/lib/vhpc" / name)) for root in roots for name in ("timeline", "usage")]
    spool = [path for root in roots for path in _all(root / "var/lib/slurm/slurmd")]
    # killed slurmstepds leave them; extern steps, also of jobs without guests, cannot remove theirs
    of_steps = [path for path in spool if path.is_socket() or path.name.startswith("hwloc_topo_")]
    return {
        (DATABASE, "KiB"): _kib(top / "var/lib/vhpc/vhpcd"),
        ("Slurm's state", "KiB"): _kib(top / "var/lib/slurm/slurmctld"),
        ("journals, outboxes, disks, pins", "files"): sum(
            len(_all(root / "var/lib/vhpc" / name)) for root in roots for name in of_jobs
        ),
        ("run folders of nodes", "files"): sum(len(_all(root / "run/vhpc")) for root in roots),
        ("slurmd's spool", "files"): len(spool) - len(of_steps),
        ("sockets, topologies of steps there", "files of Slurm"): len(of_steps),
        ("logs of hooks", "KiB"): sum(map(_kib, logs)),
        ("timelines, usage: most on a node", "kept"): max(kept, default=0),
        ("output of vhpcd", "KiB of logs"): _size(top / "var/log/vlab/vhpcd.log") / 1024,
        ("slurmctld.log", "KiB of logs"): _size(top / "var/log/slurm/slurmctld.log") / 1024,
    }


def _all(folder: Path) -> list[Path]:
    return [Path(at, name) for at, _, names in os.walk(folder) for name in names]


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # removed meanwhile
        return 0


def _kib(folder: Path) -> float:
    return sum(map(_size, _all(folder))) / 1024


def _memory_mib(pid: int) -> float:
    """Resident memory; proc(5), statm."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
