# SPDX-License-Identifier: Apache-2.0
"""Common code of all hooks: Slurm's environment, the log, and exit codes of errors."""

from __future__ import annotations

import logging
import os
import socket
import sys
import syslog
import time
from collections.abc import Callable
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.config import Config, load
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, NodeError, UserError, VhpcError
from vhpc_slurm.loglines import OneLine
from vhpc_slurm.model import Lease
from vhpc_slurm.record import Record

log = logging.getLogger("vhpc")

SYSLOG = "/dev/log"
SYSLOG_S = 1.0
"""Longest wait for syslog to take a message, in seconds."""
MAX_DATAGRAM = 8192
"""Bytes of a message to syslog."""
_SEVERITY = {
    logging.DEBUG: syslog.LOG_DEBUG,
    logging.INFO: syslog.LOG_INFO,
    logging.WARNING: syslog.LOG_WARNING,
}


class HookEnv(Record, frozen=True):
    """The environment variables of Slurm that hooks use.

    ``restart`` counts the job's requeues; ``uid`` is the job's user, None if
    a hook is run manually.
    """

    job_id: int
    restart: int
    node: str
    uid: int | None = None

    @classmethod
    def read(cls) -> HookEnv:
        """Read them; NodeError when one that every version of Slurm sets is missing."""
        restart = os.environ.get("SLURM_JOB_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT")
        try:
            return cls(
                job_id=int(os.environ["SLURM_JOB_ID"]),
                restart=int(restart or 0),
                node=os.environ.get("SLURMD_NODENAME", ""),
                uid=int(os.environ["SLURM_JOB_UID"]) if "SLURM_JOB_UID" in os.environ else None,
            )
        except (KeyError, ValueError) as err:
            raise NodeError(
                "this program is a hook that only Slurm can run", f"{err!r} in the environment"
            ) from err


class Asked(Record, frozen=True):
    """A job's lease, and when vhpcd was asked for it and had answered, in seconds since the host's boot."""

    lease: Lease
    began: float
    ended: float


def ask(config: Config, env: HookEnv) -> Asked:
    """Ask vhpcd for the lease of a job.

    Raises:
        FabricError: there is no lease, or vhpcd does not answer.
    """
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    wait_s = config.controller.lease_wait_s
    lease = ControllerClient(config).lease(env.job_id, env.restart, env.node, wait_s)
    return Asked(lease, began, time.clock_gettime(time.CLOCK_BOOTTIME))


def check_user(env: HookEnv, uid: int) -> None:
    """Check that ``uid`` is the uid that Slurm passed to this hook; UserError when it is not.

    ``uid`` was parsed from output that also contains text of the user.
    """
    if env.uid is not None and env.uid != uid:
        raise UserError(
            f"Slurm passed uid {env.uid} for job {env.job_id}, but scontrol shows uid {uid}",
            "the job's name, comment or a path looks like fields of scontrol",
            "remove 'UserId=' from them",
        )


def spank(name: str) -> str | None:
    """A value that the SPANK plugin set, None when absent or empty.  It is user input: check it."""
    return os.environ.get(f"SPANK_VHPC_{name}") or None


def main(name: str, hook: Callable[[Config], int], config: Config | None = None) -> int:
    """Run a hook: load the configuration, open the log, print each error as one line on stderr."""
    try:
        config = config or load()
        _open_log(config, name)
        return hook(config)
    except VhpcError as err:
        log.error("%s", err.line())
        print(f"vhpc {name}: {err.line()}", file=sys.stderr)
        return 1
    except Exception as err:  # slurmd logs the output of a hook
        log.exception("%s failed", name)
        print(f"vhpc {name}: internal error: {err!r}", file=sys.stderr)
        return 1


def drain(config: Config, node: str, error: VhpcError) -> None:
    """Drain this node with a reason that an operator can act on (Slurm's own says only "Prolog error").

    A drain that fails is an error in the log: Slurm still drains the node when the hook fails.
    """
    from vhpc_slurm import slurm
    from vhpc_slurm.slurm.port import REASON_PREFIX

    try:
        slurm.commands(config, slurm.HOOK_TIMEOUT_S).drain(node, f"{REASON_PREFIX}{error.line()[:200]}")
    except FabricError as err:
        log.error("node %s is not drained: %s", node, err.line())


def comment_ended(config: Config, job_id: int, line: str) -> None:
    """Set the AdminComment, which sacct shows, of a job that is ending; a failure only goes to the log.

    slurmctld refuses to change such a job ("Job has already finished"), also while its Epilogs run;
    slurmdbd accepts it. Text of another program stays as it is.
    """
    from vhpc_slurm import slurm
    from vhpc_slurm.slurm import comments

    try:
        accounting = slurm.accounting(config, slurm.HOOK_TIMEOUT_S)
        job = accounting.job(job_id)
        if job is None:
            log.warning("AdminComment of job %d is not set: the accounting database has no such job", job_id)
        elif comments.others(job.comment):
            log.warning("AdminComment of job %d has another program's text: not set: %s", job_id, line)
        else:
            accounting.set_comment(job, line)
    except FabricError as err:
        log.warning("AdminComment of job %d is not set: %s", job_id, err.line())


class _OrStderr(logging.Handler):
    """Sends messages to one place, and to stderr those that it does not take."""

    def __init__(self) -> None:
        super().__init__()
        self._stderr = logging.StreamHandler()

    def send(self, record: logging.LogRecord) -> None:
        """Send one message; OSError: it is not taken."""
        raise NotImplementedError

    def emit(self, record: logging.LogRecord) -> None:
        """Send one message."""
        try:
            self.send(record)
        except OSError:
            self._stderr.emit(record)

    def setFormatter(self, fmt: logging.Formatter | None) -> None:  # noqa: N802 - logging's own name
        """Also of stderr."""
        super().setFormatter(fmt)
        self._stderr.setFormatter(fmt)


class _File(_OrStderr):
    """Appends messages to a file, whose file system may be full."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def send(self, record: logging.LogRecord) -> None:
        """Append one line."""
        files.write(self._fd, f"{self.format(record)}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
        super().close()


class _Syslog(_OrStderr):
    """Sends messages to syslog, which may not take them in time."""

    def __init__(self, ident: str) -> None:
        """OSError: there is no syslog."""
        super().__init__()
        self._ident = ident
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._link.settimeout(SYSLOG_S)
        try:
            self._link.connect(SYSLOG)
        except OSError:
            self._link.close()
            raise

    def send(self, record: logging.LogRecord) -> None:
        """Send one datagram in the form of RFC 3164; syslog adds time and host."""
        severity = _SEVERITY.get(record.levelno, syslog.LOG_ERR)
        line = f"<{syslog.LOG_DAEMON | severity}>{self._ident}: {self.format(record)}"
        self._link.send(line.encode(errors="backslashreplace")[:MAX_DATAGRAM])

    def close(self) -> None:
        """Close the socket."""
        self._link.close()
        super().close()


def _open_log(config: Config, name: str) -> None:
    """Append to the host's log, readable only by root; a log that cannot be written stops no hook.

    SlurmUser, who runs the hooks of the controller, cannot write there, and their output goes nowhere:
    they use syslog. On a host without syslog messages go to stderr.
    """
    path = Path(config.paths.log) / "hooks.log"
    job = os.environ.get("SLURM_JOB_ID", "-")
    ident, message = f"{name}[{os.getpid()}]", f"job {job}: %(levelname)s %(message)s"
    full, short = OneLine(f"%(asctime)s {ident} {message}"), OneLine(message)
    handler: logging.Handler
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        handler = _File(os.open(path, flags, 0o640))
        handler.setFormatter(full)
    except OSError:
        try:
            handler = _Syslog(f"vhpc-{ident}")
            handler.setFormatter(short)
        except OSError:
            handler = logging.StreamHandler()
            handler.setFormatter(full)
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def close_log() -> None:
    """Close what ``main`` has opened: the next hook of this process opens its own log."""
    for handler in tuple(log.handlers):
        log.removeHandler(handler)
        handler.close()
