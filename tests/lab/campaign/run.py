# SPDX-License-Identifier: Apache-2.0
"""Carries out a plan: users who submit, faults meanwhile, and an operator who looks after the queue."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable

from cluster import Done, Lab

from campaign.attack import Attacker
from campaign.background import Background
from campaign.endurance import Endurance
from campaign.inject import Injector
from campaign.kinds import FOLDER, Kind
from campaign.plan import USERS, Plan
from campaign.record import Record, Submitted
from campaign.watch import ENDED, Watch, is_trouble

IN_FLIGHT_PER_NODE = 4
"""Jobs that are submitted and have not ended, at most."""
RESUME_AFTER_S = 5.0
TIME_LIMIT, LIGHT_TIME_LIMIT = "--time=5", "--time=3"
"""No guest of a light lab boots; an srun whose slurmstepd was killed waits until then."""
SRUN_S = 900
"""Longest wait for an srun: in the queue, and for its time limit."""


class Campaign:
    """One campaign on a lab; when ``stop`` is set, it ends with the jobs that it has submitted."""

    def __init__(self, lab: Lab, plan: Plan, say: Callable[[str], None], stop: threading.Event) -> None:
        self.lab, self.plan = lab, plan
        self.record = Record()
        self.watch = Watch()
        self.background = Background(say, stop)
        self._over = threading.Event()
        self._users: list[threading.Thread] = []
        self._open: list[Submitted] = []
        self._most = IN_FLIGHT_PER_NODE * len(lab.nodes)
        self._kernel = lab.run("n1", "uname", "-r").out.strip()

    def run(self) -> None:
        """All jobs and all faults, until the queue is empty; ``record.broken`` says what failed of it."""
        for user in USERS:
            folder = f"/home/{user}/{FOLDER}"
            self.lab.run("login", "sh", "-c", f"rm -rf {folder}; mkdir {folder}", user=user)
        injector = Injector(self.lab, self.plan, self.record, self.watch, self.background)
        endurance = Endurance(self.lab, self.plan, self.record, self.background)
        threads = [self.background.thread(injector.run), self.background.thread(self._operate)]
        threads += [self.background.thread(endurance.run)] if self.plan.light else []
        attacker = Attacker(self.lab, self.plan.seed, self.background.log) if self.plan.attacked else None
        if attacker is not None:
            self.record.attacks = attacker.attacks
            attacks = self.background.thread(attacker.run)
        try:
            self.background.safely(self._submit)
            endurance.stop()
            threads[0].join()
            for thread in (*injector.holds, *self._users):
                thread.join(600)
            if attacker is not None:
                attacker.stop()
                attacks.join(120)
            self.background.safely(self._drained_queue)
        finally:
            self._over.set()
            endurance.stop()
            if attacker is not None:
                attacker.stop()
            for thread in threads:
                thread.join(60)
            self.watch.close()
        self.record.broken = self.background.failures

    # --- users --------------------------------------------------------------

    def _submit(self) -> None:
        for planned in self.plan.jobs:
            if self.background.stop.wait(planned.pause_s):
                break
            while self._in_flight() >= self._most and not self.background.stop.wait(0.3):
                pass
            job = Submitted(planned, time.monotonic())
            self.record.submitted.append(job)
            self._open.append(job)
            if job.kind.act == "interactive":
                self._users.append(self.background.thread(self._interactive, job))
                continue
            self._sbatch(job)
            if job.kind.act in ("cancel", "requeue"):
                self._users.append(self.background.thread(self._act, job))

    def _in_flight(self) -> int:
        """Jobs that were submitted and not yet seen to end."""
        self._open = [job for job in self._open if not self._over_with(job)]
        return sum(not self._forgotten(job) for job in self._open)

    def _over_with(self, job: Submitted) -> bool:
        if job.kind.act == "refused" or (job.kind.act == "interactive" and job.answer is not None):
            return True
        known = [self.watch.tracks.get(key) for key in job.keys]
        return all(track is not None and track.ended for track in known)

    def _forgotten(self, job: Submitted) -> bool:
        """Whether slurmctld should know of a job by now, and does not."""
        return self.watch.heard > job.at + 30 and not any(key in self.watch.queue for key in job.keys)

    def _script(self, kind: Kind) -> str:
        up = f'[ "$(uname -r)" = {self._kernel} ] && echo "up on the host" || echo "up in a guest"'
        return f"#!/bin/sh\n{up}\n{kind.script}\n"

    def _options(self, job: Submitted) -> list[str]:
        name, kind = job.plan.name, job.kind
        limit = LIGHT_TIME_LIMIT if self.plan.light else TIME_LIMIT
        time_limit = [] if any(option.startswith("--time") for option in kind.options) else [limit]
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
            self.background.log(f"{name}: sbatch: {done.err.strip()}")
            assert time.monotonic() < until, f"{name} cannot be submitted: {done}"
            time.sleep(2)
            self.watch.fresh(time.monotonic(), 180)
            if job.keys[0] in self.watch.tracks:
                break  # it had been taken, and only the answer was lost
        job.answer = done
        job.id = int(done.out) if done.out.strip().isdigit() else 0
        self.background.log(f"{name}: job {job.id or 'refused'} of {job.plan.user}")

    def _interactive(self, job: Submitted) -> None:
        words = ["srun", *self._options(job), "sh"]
        self.background.log(f"{job.plan.name}: srun of {job.plan.user}")
        script = self._script(job.kind)
        try:
            job.answer = self.lab.run(
                "login", *words, user=job.plan.user, stdin=script, check=False, timeout=SRUN_S
            )
        except subprocess.TimeoutExpired as err:
            self.background.log(f"{job.plan.name}: srun does not end")
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
        self.background.log(f"{job.plan.name}: {act} by its user: {done.err.strip() or 'done'}")

    def _runs(self, key: tuple[str, int]) -> bool:
        return self.watch.tracks[key].now.state == "RUNNING"

    def _gone(self, job: Submitted) -> bool:
        track = self.watch.tracks.get(job.keys[0])
        return track is not None and track.now.state in ENDED

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
                    self._help("update", f"JobId={seen.job}", "StartTime=now+3", note=key[0])

    def _help(self, *words: str, note: str) -> None:
        done = self.lab.run("ctl", "scontrol", *words, check=False)
        line = f"scontrol {' '.join(words)} ({note})"
        self.record.helped.append(line)
        self.background.log(f"{line} {done.err.strip()}")

    def _drained_queue(self) -> None:
        """Wait until no job is left; a slurmctld that lost a start keeps one until BatchStartTimeout."""
        until = time.monotonic() + 1500
        while True:
            self.watch.fresh(time.monotonic())
            left = self.watch.alive()
            if not left:
                return
            assert time.monotonic() < until, f"the queue does not become empty: {left}"
