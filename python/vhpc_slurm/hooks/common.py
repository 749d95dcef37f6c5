# SPDX-License-Identifier: Apache-2.0
"""What all hooks share: Slurm's environment, logging, and errors turned into exit codes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.config import Config, load
from vhpc_slurm.errors import NodeError, UserError, VhpcError
from vhpc_slurm.terminal import one_line

log = logging.getLogger("vhpc")
SCONTROL = "/usr/bin/scontrol"
SACCTMGR = "/usr/bin/sacctmgr"
COMMENT_MAX = 1024


@dataclass(frozen=True)
class HookEnv:
    """What Slurm tells a hook.

    ``restart`` counts the job's requeues; ``uid`` is the job's user, None where
    a hook is called by hand.
    """

    job_id: int
    restart: int
    node: str
    uid: int | None = None

    @classmethod
    def read(cls) -> HookEnv:
        """Read it; NodeError when Slurm did not set what every version sets."""
        restart = os.environ.get("SLURM_JOB_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT")
        try:
            return cls(
                job_id=int(os.environ["SLURM_JOB_ID"]),
                restart=int(restart or 0),
                node=os.environ.get("SLURMD_NODENAME", ""),
                uid=int(os.environ["SLURM_JOB_UID"]) if "SLURM_JOB_UID" in os.environ else None,
            )
        except (KeyError, ValueError) as err:
            raise NodeError("this is a hook for Slurm to call", f"{err!r} in the environment") from err


def check_user(env: HookEnv, uid: int) -> None:
    """See that a job's user is the one whom Slurm named to this very hook; UserError when he is not.

    Whoever else that uid came from has read it between texts of the user's.
    """
    if env.uid is not None and env.uid != uid:
        raise UserError(
            f"job {env.job_id} is of uid {env.uid} and says that it is of uid {uid}",
            "a text of the job passes for fields of Slurm's own",
        )


def spank(name: str) -> str | None:
    """A value that our SPANK plugin sent along, None when absent or empty.  User input: check it."""
    return os.environ.get(f"SPANK_VHPC_{name}") or None


def main(name: str, hook: Callable[[Config], int]) -> int:
    """Run a hook: configuration, log, and one line on stderr for what it raises."""
    try:
        config = load()
        _open_log(config, name)
        return hook(config)
    except VhpcError as err:
        log.error("%s", err.line())
        print(f"vhpc {name}: {err.line()}", file=sys.stderr)
        return 1
    except Exception as err:  # the last line of defence: slurmd shows what a hook printed
        log.exception("%s failed", name)
        print(f"vhpc {name}: internal error: {err!r}", file=sys.stderr)
        return 1


def scontrol(*args: str) -> bool:
    """Best effort call of scontrol, for the rare failure path; False when it did not work."""
    return scontrol_says(*args) is not None


def scontrol_says(*args: str) -> str | None:
    """What such a call printed; None when it did not work."""
    return _says(SCONTROL, *args)


def comment_ended(job_id: int, line: str) -> None:
    """Best effort: write a line into the AdminComment that sacct shows of a job.

    slurmctld changes nothing of a job that has ended ("Job has already
    finished"), also while its Epilogs run; slurmdbd does.
    """
    _says(
        SACCTMGR,
        "-i",
        "modify",
        "job",
        "where",
        f"jobid={job_id}",
        "set",
        f"AdminComment={line[:COMMENT_MAX]}",
    )


def _says(command: str, *args: str) -> str | None:
    name = Path(command).name
    try:
        done = subprocess.run(
            [command, *args],
            timeout=10,
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        log.warning("%s %s: %s", name, args[0], err)
        return None
    if done.returncode != 0:
        log.warning("%s %s: %s", name, " ".join(args), (done.stderr or done.stdout).strip())
        return None
    return done.stdout


def drain(node: str, error: VhpcError) -> None:
    """Drain this node with a reason an operator can act on (Slurm's own says only "Prolog error")."""
    scontrol("update", f"NodeName={node}", "State=DRAIN", f"Reason=vhpc: {error.line()[:200]}")


class _OneLine(logging.Formatter):
    """Messages as one line each: a directory's name must not forge another or drive a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        record.message = one_line(record.message)
        return super().formatMessage(record)


def _open_log(config: Config, name: str) -> None:
    """Append to the node's log, root's alone to read; a hook must work even when it cannot be written."""
    path = Path(config.paths.log) / "hooks.log"
    handler: logging.Handler
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        handler = logging.StreamHandler(os.fdopen(os.open(path, flags, 0o640), "a"))
    except OSError:
        handler = logging.StreamHandler()
    job = os.environ.get("SLURM_JOB_ID", "-")
    handler.setFormatter(_OneLine(f"%(asctime)s {name}[{os.getpid()}] job {job}: %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
