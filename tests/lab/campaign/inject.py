# SPDX-License-Identifier: Apache-2.0
"""The injector of a campaign's faults."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import AS_VHPCD, VLAB, Lab

from campaign.background import Background
from campaign.faults import FAULTS, JOB
from campaign.kinds import KINDS
from campaign.plan import Plan, PlannedFault
from campaign.record import Injected, Record
from campaign.watch import Watch

FIND = Path(__file__).with_name("find.py").read_text(encoding="utf-8")
TARGET_WAIT_S = 40.0
SERVICE_TRIES = 5
HANDS = 3
"""So many faults wait for processes of jobs at once on a light lab, where jobs are short."""
LOCK_SCRIPT = """
import sqlite3, sys, time
db = sqlite3.connect("/var/lib/vhpc/vhpcd/leases.sqlite", timeout=60, isolation_level=None)
db.execute("BEGIN IMMEDIATE")
time.sleep(float(sys.argv[1]))
db.execute("ROLLBACK")
"""


class Injector:
    """Carries out the faults of a plan, one after the other."""

    def __init__(self, lab: Lab, plan: Plan, record: Record, watch: Watch, background: Background) -> None:
        self.lab, self.plan, self.record, self.watch = lab, plan, record, watch
        self.nodes = lab.nodes
        self.holds: list[threading.Thread] = []
        """Threads that undo faults."""
        self._background = background
        self._held: set[tuple[str, str]] = set()

    def run(self) -> None:
        """All faults of the plan, each when so many jobs were submitted."""
        hits: list[threading.Thread] = []
        hands = threading.Semaphore(HANDS)
        for planned in self.plan.faults:
            if not self._wait_for(planned):
                break
            if self.plan.light and FAULTS[planned.kind].reach == JOB:
                hands.acquire()
                hits.append(self._background.thread(self._carry_out, planned, hands))
            else:
                self._carry_out(planned)
        for thread in hits:
            thread.join(2 * TARGET_WAIT_S)

    def _wait_for(self, planned: PlannedFault) -> bool:
        """Whether its time has come before the campaign was stopped."""
        stop = self._background.stop
        while len(self.record.submitted) < planned.after:
            if stop.wait(0.3):
                return False
        return not stop.wait(planned.pause_s)

    def _carry_out(self, planned: PlannedFault, hands: threading.Semaphore | None = None) -> None:
        fault = FAULTS[planned.kind]
        try:
            if fault.reach == JOB:
                done = self._hit_user(planned) if fault.act in ("scancel", "requeue") else self._hit(planned)
            elif fault.act == "reboot":
                done = self._reboot(planned)
            else:
                done = self._hit_daemon(planned)
        finally:
            if hands is not None:
                hands.release()
        if done is None:
            self.record.missed.append(planned)
            self._background.log(f"FAULT {planned.number} {planned.kind}: nothing to hit")
        else:
            where = done.node or "the cluster"
            self._background.log(
                f"FAULT {planned.number} {planned.kind} on {where}: {done.target or ''} {done.note}"
            )

    def _note(self, injected: Injected) -> Injected:
        injected.end = injected.end or time.monotonic()
        self.record.injected.append(injected)
        return injected

    def _node(self, planned: PlannedFault) -> str:
        return self.nodes[int(planned.pick * len(self.nodes))]

    def _hit(self, planned: PlannedFault) -> Injected | None:
        """A signal, or what libvirt does, to one process of a job."""
        fault = FAULTS[planned.kind]
        host, found = self._find(planned, fault.act)
        if not found:
            return None
        begin = time.monotonic()
        target = self._key_of(found["job"])
        injected = Injected(planned, begin, node="" if fault.ctl else host, target=target)
        injected.note = f"job {found['job']}, process {found['pid']}"
        if fault.act == "STOP":
            injected.end = begin + planned.hold_s + 1
            wake = ("kill", "-CONT", str(found["pid"]))
            self._hold(planned, lambda: self.lab.run(host, *wake, check=False))
        return self._note(injected)

    def _find(self, planned: PlannedFault, act: str) -> tuple[str, dict[str, Any]]:
        """Wait for a process of the fault's role and act on it; the host, and what find.py says."""
        fault = FAULTS[planned.kind]
        first = "ctl" if fault.ctl else self._node(planned)
        hosts = ["ctl"] if fault.ctl else [first, *(node for node in self.nodes if node != first)]
        inner = f"{min(planned.pick * len(self.nodes) % 1.0, 0.999):.3f}"
        found: dict[str, Any] = {}
        for host in hosts:
            words = (fault.role, act, inner, str(planned.delay_s), str(TARGET_WAIT_S / len(hosts)))
            done = self.lab.run(host, "python3", "-", *words, stdin=FIND, check=False)
            if done.code == 128 + signal.SIGKILL:
                continue  # another fault has rebooted the host
            assert done.code == 0, done
            found = json.loads(done.out)
            if found:
                break
        return host, found

    def _key_of(self, job_id: int) -> tuple[str, int] | None:
        """The campaign's key of a job; a job that slurmctld has just accepted is seen a little later."""
        for _ in range(20):
            key = self.watch.of_job(job_id)
            if key is not None:
                return key
            time.sleep(0.5)
        return None

    def _hit_user(self, planned: PlannedFault) -> Injected | None:
        act = FAULTS[planned.kind].act
        until = time.monotonic() + TARGET_WAIT_S
        while time.monotonic() < until:
            some = [
                (key, seen)
                for key, seen in self.watch.alive()
                if act == "scancel"
                or (seen.state == "RUNNING" and KINDS[key[0].partition("-")[2]].act != "interactive")
            ]
            if some:
                key, seen = some[int(planned.pick * len(some))]
                words = ("scancel",) if act == "scancel" else ("scontrol", "requeue")
                begin = time.monotonic()
                done = self.lab.run("ctl", *words, self._element(key, seen.job), check=False)
                if done.code == 0:
                    return self._note(
                        Injected(planned, begin, target=key, note=f"job {seen.job} {seen.state}")
                    )
            time.sleep(0.5)
        return None

    def _element(self, key: tuple[str, int], job_id: int) -> str:
        """Slurm's name for just this job; the id of an array's last element is that of the whole array."""
        of_array = [job.id for job in self.record.submitted if job.plan.name == key[0] and job.kind.tasks > 1]
        return f"{of_array[0]}_{key[1]}" if of_array else str(job_id)

    def _hit_daemon(self, planned: PlannedFault) -> Injected | None:
        """A daemon, or the network of a node, which is undone later."""
        fault = FAULTS[planned.kind]
        host = "ctl" if fault.ctl else self._node(planned)
        note = f"for {planned.hold_s} s"
        if fault.role:
            host, found = self._find(planned, "look")
            if not found:
                return None
            note += f", job {found['job']}"
        what = (host, fault.unit or fault.act)
        for _ in range(60):
            if what not in self._held:
                break
            time.sleep(0.5)
        injected = Injected(planned, time.monotonic(), node="" if fault.ctl else host)
        injected.end = injected.begin + 600
        self._held.add(what)
        if fault.act == "cut":
            self.lab.run(host, "ip", "link", "set", "eth0", "down")
        elif fault.act != "lock":
            self._service(host, "stop" if fault.act == "restart" else fault.act, fault.unit)

        def undo() -> None:
            if fault.act == "lock":
                self.lab.run(host, *AS_VHPCD, "python3", "-", str(planned.hold_s), stdin=LOCK_SCRIPT)
            elif fault.act == "cut":
                self.lab.run(host, "ip", "link", "set", "eth0", "up")
            else:
                self._service(host, "start", fault.unit)
            injected.end = time.monotonic()
            self._held.discard(what)

        self._hold(planned, undo)
        self._note(injected)
        injected.note = note
        return injected

    def _hold(self, planned: PlannedFault, undo: Callable[[], object]) -> None:
        def later() -> None:
            if FAULTS[planned.kind].act != "lock":  # whose program holds it as long
                time.sleep(planned.hold_s)
            undo()

        self.holds.append(self._background.thread(later))

    def _service(self, host: str, act: str, unit: str) -> None:
        command = [VLAB, "service", host, act, unit]
        # on a busy machine a daemon may take longer to start than vlab waits
        for left in reversed(range(SERVICE_TRIES if act in ("start", "restart") else 1)):
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)
            if done.returncode == 0:
                return
            command[3] = "start"
            assert left, f"{act} {unit} on {host}: {done.stderr}"

    def _reboot(self, planned: PlannedFault) -> Injected:
        for thread in self.holds:
            thread.join(300)  # a host that comes up waits for daemons of others
        node = self._node(planned)
        injected = Injected(planned, time.monotonic(), node=node)
        subprocess.run([VLAB, "reboot", node], check=True, capture_output=True, timeout=180)
        return self._note(injected)
