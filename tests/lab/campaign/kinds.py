# SPDX-License-Identifier: Apache-2.0
"""The kinds of jobs, and how a job of each kind ends without a disturbance.

The expectations come from Slurm's manual and from the same jobs without
guests, not from the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass

from pmi_client import CLIENT

IMAGE = "debian-minimal"
FOLDER = "campaign"
"""Folder of each user's home for outputs; the scripts run in the home."""


@dataclass(frozen=True)
class Kind:
    """One kind of job.

    ``weight`` is how many cards it has in the deck that jobs are drawn from.
    ``state`` and ``code`` are how it ends (code None: any), ``says`` what must
    be in its output (regular expressions over lines).  ``act`` is what its
    user does to it later.  ``long`` kinds have no place in a short campaign, and
    those that ``needs_guest`` none on a light lab, whose guests are processes
    of the node: they need root, a network or a console of the guest.
    """

    name: str
    script: str
    options: tuple[str, ...] = ()
    image: str | None = IMAGE
    state: str = "COMPLETED"
    code: str | None = "0:0"
    says: tuple[str, ...] = ()
    weight: int = 1
    tasks: int = 1
    act: str = ""
    mistake: bool = False
    long: bool = False
    needs_guest: bool = False

    @property
    def in_guest(self) -> bool:
        """Whether a line of a script of this kind may only ever come from a guest."""
        return self.image is not None and "--vhpc-batch=host" not in self.options


ONE = ("-n1",)
FIRST, SECOND = "<node 0>", "<node 1>"
"""In ``says``: nodes that Slurm names for the job, in their order."""
UP = r"^up in a guest$"
DONE = r"^done$"
GONE = r"^vhpc: the guest of job \d+ on n\d+ is gone"
STEP = "srun {} sh -c 'echo task $SLURM_PROCID on $SLURMD_NODENAME'"


# Task 0 waits for the others at its guest's address on the job's network, and talks to each for seconds.
EXCHANGE = """
import os, socket, time
if os.environ["SLURM_PROCID"] == "0":
    with socket.create_server(("", 7000)) as server:
        peers = [server.accept()[0] for _ in range(int(os.environ["SLURM_NTASKS"]) - 1)]
    for _ in range(15):
        for peer in peers:
            peer.sendall(b"?")
            assert peer.recv(1) == b"!"
        time.sleep(0.3)
    for peer in peers:
        peer.sendall(b".")
else:
    for _ in range(600):
        try:
            link = socket.create_connection((os.environ["VHPC_NODELIST"].split(",")[0], 7000), 60)
            break
        except OSError:
            time.sleep(0.1)
    link.settimeout(None)
    while (said := link.recv(1)) == b"?":
        link.sendall(b"!")
    print("the first task said", said.decode() or "nothing", "to", socket.gethostname())
"""


# Connects to its PMIx server, as a PMIx client does first, and keeps the connection for seconds.
PMIX = """
import os, socket, time
(port,) = {os.environ[name].rpartition(":")[2] for name in os.environ if name.startswith("PMIX_SERVER_URI")}
with socket.create_connection(("127.0.0.1", int(port)), 20) as link:
    time.sleep(4)
    link.setblocking(False)
    try:
        assert link.recv(1), "the server of PMIx is gone"
    except BlockingIOError:
        pass
print("rank", os.environ["PMIX_RANK"], "has a server")
"""


def _python(step: str, program: str, *arguments: str) -> str:
    """A step that runs a Python program, which is not in a file."""
    return f"program=$(cat <<'END'\n{program}\nEND\n)\n{step} python3 -c \"$program\" {' '.join(arguments)}"


_ALL = (
    Kind("script", "sleep 1; echo done", ONE, says=(UP, DONE), weight=3),
    Kind("no-requeue", "sleep 2; echo done", (*ONE, "--no-requeue"), says=(UP, DONE)),
    Kind(
        "steps",
        f"{STEP.format('-n2')} || exit 9; {STEP.format('-n1')} || exit 9; echo done",
        ("-N1", "-n2"),
        says=(UP, r"^task 0 on n\d+$", r"^task 1 on n\d+$", DONE),
        weight=2,
    ),
    Kind(
        "two-nodes",
        f"{STEP.format('-N2 -n2')} || exit 9; sleep 1; echo done",
        ("-N2", "-n2"),
        says=(UP, f"^task 0 on {FIRST}$", f"^task 1 on {SECOND}$", DONE),
        weight=3,
    ),
    Kind(
        "two-guests",
        "srun -n2 sh -c 'echo task $SLURM_PROCID in guest $VHPC_GUEST' || exit 9; echo done",
        ("-N1", "-n2", "--mem=1400", "--vhpc-guests-per-node=2"),
        says=(UP, r"^task 0 in guest 0$", r"^task 1 in guest 1$", DONE),
        weight=2,
    ),
    Kind(
        "network",
        f"{_python('srun -N2 -n2', EXCHANGE)} || exit 9; echo done",
        ("-N2", "-n2", "--vhpc-network=job"),
        says=(UP, r"^the first task said \. to n2$", DONE),
        weight=3,
        needs_guest=True,
    ),
    Kind(
        "pmi2",
        f"{_python('srun --mpi=pmi2 -N2 -n2', CLIENT, '2')} || exit 9; echo done",
        ("-N2", "-n2", "--vhpc-network=job"),
        says=(UP, r"^mapping \(vector,\(0,2,1\)\)$", r"^hosts n1 n2$", DONE),
        weight=3,
        needs_guest=True,
    ),
    Kind(
        "pmix",
        f"{_python('srun --mpi=pmix -N2 -n2', PMIX)} || exit 9; echo done",
        ("-N2", "-n2", "--vhpc-network=job"),
        says=(UP, r"^rank 0 has a server$", r"^rank 1 has a server$", DONE),
        weight=3,
        needs_guest=True,
    ),
    Kind(
        "nat",
        """awk '$2 == "00000000" {print "default route of", $1}' /proc/net/route; sleep 2; echo done""",
        (*ONE, "--vhpc-network=nat"),
        says=(UP, r"^default route of nat0$", DONE),
        weight=2,
        needs_guest=True,
    ),
    Kind(
        "both-networks",
        f"{STEP.format('-N2 -n2')} || exit 9; cut -f1 /proc/net/route | sort -u; echo done",
        ("-N2", "-n2", "--vhpc-network=job,nat"),
        says=(UP, r"^nat0$", r"^vhpc0$", r"^task 1 on n2$", DONE),
        needs_guest=True,
    ),
    Kind(
        "four-guests",
        f"{_python('srun --mpi=pmi2 -n4', CLIENT, '2')} || exit 9; "
        f"{_python('srun -n4', EXCHANGE)} || exit 9; echo done",
        ("-N2", "-n4", "--ntasks-per-node=2", "--mem=1400", "--vhpc-guests-per-node=2", "--vhpc-network=job"),
        says=(
            UP, r"^mapping \(vector,\(0,4,1\)\)$", r"^hosts n1-g0 n1-g1 n2-g0 n2-g1$",
            r"^the first task said \. to n1-g1$", r"^the first task said \. to n2-g1$", DONE,
        ),
        weight=3,
        needs_guest=True,
    ),
    Kind("array", "sleep 1; echo done", (*ONE, "--array=0-2"), says=(UP, DONE), weight=2, tasks=3),
    Kind(
        "exclusive", "nproc; echo done", ("-N1", "--exclusive"), says=(UP, r"^2$", DONE)
    ),
    Kind(
        "console",
        "sudo sh -c 'echo hello > /dev/console'; echo done",
        (*ONE, f"--vhpc-console={FOLDER}/%x.console"),
        says=(UP, DONE),
        needs_guest=True,
    ),
    Kind("batch-host", f"{STEP.format('-n1')} || exit 9; echo done", (*ONE, "--vhpc-batch=host"),
         says=(r"^up on the host$", r"^task 0 on n\d+$", DONE)),
    Kind("srun", "sleep 1; echo done", ONE, says=(UP, DONE), act="interactive", weight=2),
    # ends that the user brought about
    Kind("exit-7", "exit 7", ONE, state="FAILED", code="7:0", says=(UP,)),
    Kind("segv", "kill -SEGV $$", ONE, state="FAILED", code="0:11", says=(UP,)),
    Kind("step-fails", "srun sh -c 'exit 5'; exit $?", ONE, state="FAILED", code="5:0", says=(UP,)),
    Kind("time-limit", "sleep 300", (*ONE, "--time=1"), state="TIMEOUT", code=None, says=(UP,), long=True),
    Kind("cancelled", "sleep 300", ONE, state="CANCELLED", code=None, act="cancel", weight=3),
    Kind("ignores-term", "trap '' TERM; for i in $(seq 300); do sleep 1; done", ONE,
         state="CANCELLED", code=None, act="cancel"),
    Kind("cancelled-2", "srun sleep 300", ("-N2", "-n2"), state="CANCELLED", code=None, act="cancel"),
    Kind("requeued", "[ ${SLURM_RESTART_COUNT:-0} -gt 0 ] || sleep 300; echo done", ONE,
         says=(DONE,), act="requeue", weight=2),
    # mistakes
    Kind("bad-image", "echo ran", ONE, image="no-such-image", state="FAILED", code="1:0", mistake=True,
         says=(r"^vhpc: image no-such-image:latest is unknown",), weight=2),
    Kind("bad-option", "echo ran", (*ONE, "--vhpc-mem-reserve=much"), state="REFUSED", code=None,
         mistake=True, says=(r"--vhpc-mem-reserve",), act="refused"),
    Kind("small-memory", "echo ran", (*ONE, "--mem=300"), state="FAILED", code="1:0", mistake=True,
         says=(r"^vhpc: .*192 MiB",)),
    Kind("no-folder", "pwd; echo done", (*ONE, "--chdir=/home/never/was"), mistake=True,
         says=(UP, r"^/tmp$", DONE)),
    Kind("no-command", "srun no-such-command; exit $?", ONE, state="FAILED", code="2:0", mistake=True,
         says=(UP, r"no-such-command")),
    Kind("powers-off", "sudo sh -c 'echo o > /proc/sysrq-trigger'; sleep 300", ONE, state="FAILED", code=None,
         says=(UP, GONE), mistake=True, needs_guest=True, weight=2),
    Kind("panics", "sudo sh -c 'echo c > /proc/sysrq-trigger'; sleep 300", ONE, state="FAILED", code=None,
         says=(UP, GONE), mistake=True, needs_guest=True),
    # jobs that have nothing to do with vhpc
    Kind("plain", "sleep 1; echo done", ONE, image=None, says=(r"^up on the host$", DONE), weight=2),
    Kind("plain-2", f"{STEP.format('-N2 -n2')} || exit 9; echo done", ("-N2", "-n2"), image=None,
         says=(r"^up on the host$", f"^task 1 on {SECOND}$", DONE)),
    Kind("plain-fails", "exit 3", ONE, image=None, state="FAILED", code="3:0", says=(r"^up on the host$",)),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _ALL}
