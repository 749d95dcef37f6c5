# SPDX-License-Identifier: Apache-2.0
"""Carrying out a plan: users who submit, an injector of faults, and an operator who looks after the queue."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import NODES, VLAB, Done, Lab

from campaign.attack import Attacker
from campaign.faults import FAULTS, JOB
from campaign.kinds import FOLDER, KINDS, Kind
from campaign.plan import USERS, Plan, PlannedFault
from campaign.record import Injected, Record, Submitted
from campaign.watch import ENDED, Watch, is_trouble

FIND = Path(__file__).with_name("find.py").read_text(encoding="utf-8")
IN_FLIGHT = 8
"""Jobs that are submitted and have not ended, at most."""
TARGET_WAIT_S = 40.0
RESUME_AFTER_S = 5.0
TIME_LIMIT = "--time=5"
SRUN_S = 900
"""Longest wait for an srun: in the queue, and for its time limit."""


class Campaign:
    """One campaign on a lab."""

    def __init__(self, lab: Lab, plan: Plan, say: Callable[[str], None]) -> None:
        self.lab, self.plan = lab, plan
        self.record = Record()
        self.watch = Watch()
        self._began = time.monotonic()
        self._say = say
        self._over = threading.Event()
        self._failures: list[str] = []
        self._holds: list[threading.Thread] = []
        self._held: set[tuple[str, str]] = set()
        self._users: list[threading.Thread] = []
        self._kernel = lab.run("n1", "uname", "-r").out.strip()

    def run(self) -> None:
        """All jobs and all faults, until the queue is empty.

        Raises:
            AssertionError: the queue does not become empty, or the campaign itself broke.
        """
        for user in USERS:
            folder = f"/home/{user}/{FOLDER}"
            self.lab.run("login", "sh", "-c", f"rm -rf {folder}; mkdir {folder}", user=user)
        threads = [self._thread(self._inject), self._thread(self._operate)]
        attacker = Attacker(self.lab, self.plan.seed, self.log) if self.plan.attacked else None
        if attacker is not None:
            self.record.attacks = attacker.attacks
            attacks = self._thread(attacker.run)
        try:
            self._submit()
            threads[0].join()
            for thread in (*self._holds, *self._users):
                thread.join(600)
            if attacker is not None:
                attacker.stop()
                attacks.join(120)
            self._drained_queue()
        finally:
            self._over.set()
            if attacker is not None:
                attacker.stop()
            for thread in threads:
                thread.join(60)
            self.watch.close()
        assert not self._failures, self._failures

    def log(self, text: str) -> None:
        """One line with the time since the beginning."""
        self._say(f"{time.monotonic() - self._began:7.1f}  {text}")

    def _thread(self, work: Callable[..., None], *args: object) -> threading.Thread:
        def safely() -> None:
            try:
                work(*args)
            except Exception as err:  # a thread that ends unheard would make the campaign look good
                self._failures.append(f"{work.__name__}{args}: {err!r}")
                self.log(f"BROKEN {self._failures[-1]}")

        thread = threading.Thread(target=safely, daemon=True)
        thread.start()
        return thread

    # --- users --------------------------------------------------------------

    def _submit(self) -> None:
        for planned in self.plan.jobs:
            time.sleep(planned.pause_s)
            while self._in_flight() >= IN_FLIGHT:
                time.sleep(0.3)
            job = Submitted(planned, time.monotonic())
            self.record.submitted.append(job)
            if job.kind.act == "interactive":
                self._users.append(self._thread(self._interactive, job))
                continue
            self._sbatch(job)
            if job.kind.act in ("cancel", "requeue"):
                self._users.append(self._thread(self._act, job))

    def _in_flight(self) -> int:
        """Jobs that were submitted and not yet seen to end."""
        tracks = self.watch.tracks
        count = 0
        for job in list(self.record.submitted):
            if job.kind.act == "refused" or (job.kind.act == "interactive" and job.answer is not None):
                continue
            known = [tracks.get(key) for key in job.keys]
            if all(track is not None and track.ended for track in known):
                continue
            count += not self._forgotten(job)
        return count

    def _forgotten(self, job: Submitted) -> bool:
        """Whether slurmctld should know of a job by now, and does not."""
        return self.watch.heard > job.at + 30 and not any(key in self.watch.queue for key in job.keys)

    def _script(self, kind: Kind) -> str:
        up = f'[ "$(uname -r)" = {self._kernel} ] && echo "up on the host" || echo "up in a guest"'
        return f"#!/bin/sh\n{up}\n{kind.script}\n"

    def _options(self, job: Submitted) -> list[str]:
        name, kind = job.plan.name, job.kind
        time_limit = [] if any(option.startswith("--time") for option in kind.options) else [TIME_LIMIT]
        image = [f"--vhpc-image={kind.image}"] if kind.image is not None else []
        return [f"--job-name={name}", *time_limit, *image, *kind.options]

    def _sbatch(self, job: Submitted) -> None:
        name = job.plan.name
        out = f"/home/{job.plan.user}/{FOLDER}/{name}.{'%a' if job.kind.tasks > 1 else 0}"
        words = ["sbatch", "--parsable", "--open-mode=append", f"--output={out}", *self._options(job)]
        until = time.monotonic() + 180
        while True:
            job.at = time.monotonic()
            done = self.lab.run(
                "login", *words, user=job.plan.user, stdin=self._script(job.kind), check=False, timeout=180
            )
            if done.code == 0 or job.kind.act == "refused":
                break
            self.log(f"{name}: sbatch: {done.err.strip()}")
            assert time.monotonic() < until, f"{name} cannot be submitted: {done}"
            time.sleep(2)
            self.watch.fresh(time.monotonic(), 180)
            if job.keys[0] in self.watch.tracks:
                break  # it had been taken, and only the answer was lost
        job.answer = done
        job.id = int(done.out) if done.out.strip().isdigit() else 0
        self.log(f"{name}: job {job.id or 'refused'} of {job.plan.user}")

    def _interactive(self, job: Submitted) -> None:
        words = ["srun", *self._options(job), "sh"]
        self.log(f"{job.plan.name}: srun of {job.plan.user}")
        script = self._script(job.kind)
        try:
            job.answer = self.lab.run(
                "login", *words, user=job.plan.user, stdin=script, check=False, timeout=SRUN_S
            )
        except subprocess.TimeoutExpired as err:
            self.log(f"{job.plan.name}: srun does not end")
            out, said = ((text or b"").decode(errors="replace") for text in (err.stdout, err.stderr))
            job.answer = Done(124, out, said)

    def _act(self, job: Submitted) -> None:
        """Cancel, at whatever moment; or requeue, once it runs."""
        act, key = job.kind.act, job.keys[0]
        while act == "requeue" and not (key in self.watch.tracks and self._runs(key)):
            if self._over.wait(0.5) or self._gone(job) or self._forgotten(job):
                return
        time.sleep(job.plan.delay_s)
        command = ["scancel"] if act == "cancel" else ["scontrol", "requeue"]
        for _ in range(20):
            done = self.lab.run("login", *command, str(job.id), user=job.plan.user, check=False)
            if done.code == 0 or self._gone(job) or "nvalid job id" in done.err:
                break
            time.sleep(2)
        self.log(f"{job.plan.name}: {act} by its user: {done.err.strip() or 'done'}")

    def _runs(self, key: tuple[str, int]) -> bool:
        return self.watch.tracks[key].now.state == "RUNNING"

    def _gone(self, job: Submitted) -> bool:
        track = self.watch.tracks.get(job.keys[0])
        return track is not None and track.now.state in ENDED

    # --- faults -------------------------------------------------------------

    def _inject(self) -> None:
        for planned in self.plan.faults:
            while len(self.record.submitted) < planned.after:
                time.sleep(0.3)
            time.sleep(planned.pause_s)
            fault = FAULTS[planned.kind]
            if fault.reach == JOB:
                done = self._hit_user(planned) if fault.act in ("scancel", "requeue") else self._hit(planned)
            elif fault.act == "reboot":
                done = self._reboot(planned)
            else:
                done = self._hit_daemon(planned)
            if done is None:
                self.record.missed.append(planned)
                self.log(f"FAULT {planned.number} {planned.kind}: nothing to hit")
            else:
                where = done.node or "the cluster"
                self.log(f"FAULT {planned.number} {planned.kind} on {where}: {done.target or ''} {done.note}")

    def _note(self, injected: Injected) -> Injected:
        injected.end = injected.end or time.monotonic()
        self.record.injected.append(injected)
        return injected

    def _node(self, planned: PlannedFault) -> str:
        return NODES[int(planned.pick * len(NODES))]

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
        hosts = ["ctl"] if fault.ctl else [first, *(node for node in NODES if node != first)]
        inner = f"{(planned.pick * len(NODES)) % 1.0:.3f}"
        found: dict[str, Any] = {}
        for host in hosts:
            words = (fault.role, act, inner, str(planned.delay_s), str(TARGET_WAIT_S / len(hosts)))
            found = json.loads(self.lab.run(host, "python3", "-", *words, stdin=FIND).out)
            if found:
                break
        return host, found

    def _key_of(self, job_id: int) -> tuple[str, int] | None:
        """Whose job it is; a job that slurmctld has just taken is seen a little later."""
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
                if act == "scancel" or (seen.state == "RUNNING" and KINDS[key[0][5:]].act != "interactive")
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
        """What Slurm calls just this job; the id of an array's last element is that of the whole array."""
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
        else:
            self._service(host, "stop" if fault.act == "restart" else fault.act, fault.unit)

        def undo() -> None:
            if fault.act == "cut":
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
            time.sleep(planned.hold_s)
            undo()

        self._holds.append(self._thread(later))

    def _service(self, host: str, act: str, unit: str) -> None:
        command = [VLAB, "service", host, act, unit]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, f"{act} {unit} on {host}: {done.stderr}"

    def _reboot(self, planned: PlannedFault) -> Injected:
        for thread in self._holds:
            thread.join(300)  # a host that comes up waits for daemons of others
        node = self._node(planned)
        injected = Injected(planned, time.monotonic(), node=node)
        subprocess.run([VLAB, "reboot", node], check=True, capture_output=True, timeout=180)
        return self._note(injected)

    # --- the operator -------------------------------------------------------

    def _operate(self) -> None:
        """Spare the campaign Slurm's pauses, and take drained nodes back."""
        since: dict[str, float] = {}
        while not self._over.wait(2):
            for node, (state, reason) in list(self.watch.nodes.items()):
                if not is_trouble(state):
                    since.pop(node, None)
                elif time.monotonic() - since.setdefault(node, time.monotonic()) > RESUME_AFTER_S:
                    self._help("update", f"NodeName={node}", "State=RESUME", note=f"{state}: {reason}")
                    since.pop(node)
            for key, seen in self.watch.alive():
                if seen.state != "PENDING":
                    continue
                if "held" in seen.reason.lower():
                    self._help("release", str(seen.job), note=f"{key[0]}: {seen.reason}")
                elif seen.reason == "BeginTime":
                    self._help("update", f"JobId={seen.job}", "StartTime=now", note=key[0])

    def _help(self, *words: str, note: str) -> None:
        done = self.lab.run("ctl", "scontrol", *words, check=False)
        line = f"scontrol {' '.join(words)} ({note})"
        self.record.helped.append(line)
        self.log(f"{line} {done.err.strip()}")

    def _drained_queue(self) -> None:
        """Wait until no job is left; a slurmctld that lost a start keeps one until BatchStartTimeout."""
        until = time.monotonic() + 1500
        while True:
            self.watch.fresh(time.monotonic())
            left = self.watch.alive()
            if not left:
                return
            assert time.monotonic() < until, f"the queue does not become empty: {left}"
