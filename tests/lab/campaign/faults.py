# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults: what each hits, and which ends of jobs and reasons of nodes it explains."""

from __future__ import annotations

from dataclasses import dataclass

# How the end of a job can be explained by a fault that touched it.
LINE = "line"  # our one line in its output
COMMENT = "comment"  # our line in its AdminComment
SLURM = "slurm"  # a line of Slurm's own in its output
LOST_START = "lost-start"  # of a job whose time limit is shorter than the health check's interval
KILLED = "killed"  # its script ended by SIGKILL
CANCELLED = "cancelled"  # Slurm's state
NODE_FAIL = "node-fail"  # Slurm's state
FORGOTTEN = "forgotten"  # slurmctld was killed before it saved the job
UNSAVED = "unsaved"  # slurmctld was killed before it saved that the job had started, or ended
HELD = "held"  # our line: what it was given is still held by the job that was hit
FINAL = "final"  # it had not begun, Slurm or vhpcd would have requeued it, and it may not be requeued
UNHEARD = "unheard"  # its srun was not told that the task had ended, and waits for good
# its srun, or slurmctld, waits for a slurmstepd that is gone, until its time limit: without a guest too
NO_STEPD = "no-stepd"
# its other tasks wait for one that was killed, until its time limit: without guests too
PEER_KILLED = "peer-killed"
ID_REUSED = "id-reused"  # the id of a forgotten job, whose Prolog slurmd believes to have run

JOB, NODE, CLUSTER = "job", "node", "cluster"


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    ``reach`` says whom it can touch: the job that it hit, all jobs of a node,
    or all jobs.  ``role`` names the processes that are hit (find.py), or the
    one whose node loses its network; ``unit`` names the daemon.  ``ends`` are
    the explanations that are right for jobs it touched (that a job ended as its
    kind says always is one), ``drains`` is what the reason of a node drained by
    it may say.
    """

    name: str
    reach: str
    act: str
    role: str = ""
    unit: str = ""
    ctl: bool = False
    ends: tuple[str, ...] = ()
    drains: str = ""
    delay_s: float = 0.0
    hold_s: float = 0.0
    weight: int = 1
    long: bool = False
    needs_guest: bool = False
    """Not for a light lab, whose guests are processes without QEMU."""

    @property
    def ends_daemon(self) -> bool:
        """Whether a daemon that lives for years starts again."""
        return bool(self.unit) or self.act == "reboot"

    @property
    def stops_boots(self) -> bool:
        """Whether it can keep a guest from coming up, so that our line speaks of it and its console."""
        parts = ("qemu", "virtiofsd", "locks", "shim", "passt", "prolog")
        return self.role in parts or self.unit in ("libvirtd", "slurmd") or self.act == "reboot"


ANY = (LINE, COMMENT, SLURM, NODE_FAIL)
"""A daemon that was away: the job says it, Slurm says it, or Slurm gives it up."""
LOST = (LOST_START, FINAL)
"""The start of a job did not reach its node, or its Prolog's end did not reach slurmctld."""
BROKEN_BOOT = r"vhpc: .*"
"""A Prolog that fails for the node's fault drains the node in words of its own."""
HOOK = r"Prolog error|Epilog error|vhpc: .*"

_ALL = (
    # parts of one job
    Fault("qemu-kill", JOB, "KILL", "qemu", ends=(LINE,), delay_s=4, weight=3, drains=BROKEN_BOOT),
    Fault("qemu-pause", JOB, "STOP", "qemu", ends=(), delay_s=4, hold_s=4, weight=2, needs_guest=True),
    Fault("qemu-reset", JOB, "reset", "qemu", ends=(LINE,), delay_s=4, weight=2, needs_guest=True),
    Fault("qemu-destroy", JOB, "destroy", "qemu", ends=(LINE,), delay_s=4, drains=BROKEN_BOOT,
          needs_guest=True),
    Fault("virtiofsd-kill", JOB, "KILL", "virtiofsd", ends=(LINE,), delay_s=4, weight=2, drains=BROKEN_BOOT),
    Fault("locks-kill", JOB, "KILL", "locks", ends=(LINE,), delay_s=4, drains=BROKEN_BOOT),
    Fault("shim-kill", JOB, "KILL", "shim", ends=(LINE,), delay_s=3, weight=2, drains=BROKEN_BOOT),
    Fault("passt-kill", JOB, "KILL", "passt", ends=(LINE,), delay_s=3, weight=2, drains=BROKEN_BOOT,
          needs_guest=True),
    Fault("run-kill", JOB, "KILL", "run", ends=(KILLED, SLURM, PEER_KILLED), delay_s=1, weight=2),
    Fault("stepd-kill", JOB, "KILL", "stepd", ends=(NODE_FAIL, SLURM, COMMENT, NO_STEPD, KILLED),
          delay_s=1, weight=2, long=True),
    # the step's server of PMI-2 or PMIx goes away
    Fault("step-kill", JOB, "KILL", "step-stepd", ends=(SLURM, LINE, NO_STEPD), delay_s=2, weight=2),
    Fault("prolog-kill", JOB, "KILL", "prolog", ends=(LINE, SLURM, FINAL), delay_s=4, weight=3,
          drains="Prolog error"),
    Fault("epilog-kill", JOB, "KILL", "epilog", ends=(HELD,), delay_s=0.5, weight=3, drains="Epilog error"),
    Fault("ctld-hook-kill", JOB, "KILL", "slurmctld-hook", ctl=True, ends=(LINE,), weight=2),
    # what users and operators do at the wrong moment
    Fault("scancel", JOB, "scancel", ends=(CANCELLED,), weight=4),
    Fault("requeue", JOB, "requeue", ends=(), weight=3),
    # daemons of a node
    Fault("libvirtd-kill", NODE, "kill", unit="libvirtd", ends=(LINE, SLURM), hold_s=5, weight=2,
          drains=BROKEN_BOOT, needs_guest=True),
    Fault("libvirtd-restart", NODE, "restart", unit="libvirtd", ends=(LINE, SLURM), drains=BROKEN_BOOT,
          needs_guest=True),
    Fault("slurmd-kill", NODE, "kill", unit="slurmd", ends=(*ANY, *LOST), hold_s=5, weight=2, long=True,
          drains=HOOK),
    Fault("slurmd-restart", NODE, "restart", unit="slurmd", ends=(*ANY, *LOST), long=True, drains=HOOK),
    Fault("munged-kill", NODE, "kill", unit="munged", ends=ANY, hold_s=5, drains=HOOK),
    Fault("network-cut", NODE, "cut", ends=(*ANY, UNHEARD), hold_s=8, weight=2, drains=HOOK),
    # of a node with a guest on a job's network, while it boots, waits for the others, or runs
    Fault("job-network-cut", NODE, "cut", "networked-qemu", ends=(*ANY, UNHEARD), delay_s=10, hold_s=12,
          weight=3, drains=HOOK, needs_guest=True),
    Fault("reboot", NODE, "reboot", ends=(*ANY, *LOST, NO_STEPD), weight=2, long=True,
          drains=r"Node unexpectedly rebooted"),
    # daemons of the cluster
    Fault("vhpcd-kill", CLUSTER, "kill", unit="vhpcd", ctl=True, ends=(SLURM, LINE), hold_s=5, weight=2),
    Fault("vhpcd-stop", CLUSTER, "stop", unit="vhpcd", ctl=True, ends=(SLURM, LINE), hold_s=5),
    # another connection holds the lock of vhpcd's database, as that of a backup does
    Fault("database-busy", CLUSTER, "lock", ctl=True, ends=(LINE, COMMENT), hold_s=8, weight=2),
    # hooks start a Python of their own
    Fault("hookd-kill", CLUSTER, "kill", unit="vhpc-hookd", ctl=True, hold_s=5),
    Fault("hookd-restart", CLUSTER, "restart", unit="vhpc-hookd", ctl=True),
    Fault("slurmctld-kill", CLUSTER, "kill", unit="slurmctld", ctl=True, hold_s=5, weight=2, long=True,
          ends=(FORGOTTEN, UNSAVED, ID_REUSED, *ANY, *LOST), drains=r"Duplicate jobid|Prolog error"),
    Fault("slurmctld-restart", CLUSTER, "restart", unit="slurmctld", ctl=True, weight=2, long=True,
          ends=(*ANY, *LOST), drains=r"Duplicate jobid|Prolog error"),
    Fault("slurmdbd-kill", CLUSTER, "kill", unit="slurmdbd", ctl=True, hold_s=5),
    Fault("ctl-munged-kill", CLUSTER, "kill", unit="munged", ctl=True, ends=ANY, hold_s=4, drains=HOOK),
)  # fmt: skip
FAULTS = {fault.name: fault for fault in _ALL}
