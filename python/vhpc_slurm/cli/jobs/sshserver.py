# SPDX-License-Identifier: Apache-2.0
"""sshd in a guest for one connection, whose bytes are standard input and output of this process."""
# Decision: ssh goes through a step

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from vhpc_slurm.cli.jobs.forwarding import Forwarding
from vhpc_slurm.cli.jobs.jobguest import ONLY_TASK, JobGuest
from vhpc_slurm.cli.jobs.sshkeys import Keys
from vhpc_slurm.cli.jobs.steprelay import AGENT, ended, pipes, relay, too_old
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.slurm.hostlist import expand

NO_SSHD = "vhpc ssh: no sshd"
QUIET_S = 2.0
"""How long a step may take to end after its connection, and ssh after its step."""

# The keys are in memory: /tmp may be a folder of a node.  Sessions have the environment of the step, but the
# job's nodes and tasks and not the step's, which srun and mpirun would use; without variables of sshd and the
# client, and without values that need quoting, which older sshd cannot read.
SCRIPT = (
    ONLY_TASK
    + f"""
sshd=$(PATH=$PATH:/usr/sbin:/usr/local/sbin; command -v sshd) || {{ echo "{NO_SSHD}" >&2; exit 1; }}
"""
    + r"""
mask=$(umask)
umask 077
at=$(mktemp -d /dev/shm/vhpc-ssh.XXXXXXXX) || exit 1
child=
trap '[ -z "$child" ] || kill "$child" 2>/dev/null; rm -rf "$at"' EXIT
trap 'exit 1' HUP INT TERM
for file in host_key keys; do
    while IFS= read -r line && [ "$line" != . ]; do printf '%s\n' "$line"; done > "$at/$file"
    [ "$line" = . ] || exit 1
done
cat > "$at/config" <<END
HostKey $at/host_key
AuthorizedKeysFile $at/keys
AuthenticationMethods publickey
StrictModes no
UsePAM no
PidFile none
PrintMotd no
PrintLastLog no
LogLevel ERROR
MaxAuthTries 20
X11Forwarding yes
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
END
{ printf SetEnv
  env -0 | LC_ALL=C tr '\n\0' '\001\n' | LC_ALL=C sed -n '/["\\[:cntrl:]]/d
    /^\(HOME\|USER\|LOGNAME\|SHELL\|MAIL\|TERM\|LANG\|PWD\|OLDPWD\|SHLVL\|_\|DISPLAY\|XAUTHORITY\)=/d
    /^\(LC_\|SSH_\|XDG_\|DBUS_\|SRUN_\)/d
    s/^SLURM_JOB_CPUS_PER_NODE=\(.*\)/ "&" "SLURM_TASKS_PER_NODE=\1"/p
    /^SLURM_\(CONF\|CLUSTER_NAME\|JOB_ID\|JOBID\|JOB_USER\|JOB_UID\|JOB_PARTITION\|JOB_ACCOUNT\)=/!{
      /^SLURM_/d
    }
    s/^[A-Za-z_][A-Za-z0-9_]*=.*$/ "&"/p' | tr -d '\n'
  printf ' "%s=%s"' SLURM_JOB_NODELIST "$2" SLURM_NODELIST "$2" SLURM_JOB_NUM_NODES "$3" SLURM_NNODES "$3"
  echo
} >> "$at/config"
umask "$mask"
exec 3<&0
"$1" --forward-to "$sshd" -i -e -f "$at/config" <&3 3<&- &
child=$!
exec 3<&- </dev/null
wait "$child"
"""
)
"""Arguments: the agent, and nodes of the job and their number.

Standard input: host key, ".", authorized keys, ".", then frames of the relay.
"""


def serve(place: JobGuest, keys: Keys) -> int:
    """Connect standard input and output to an sshd in a guest, until one of both ends.

    Raises:
        UserError: there is no sshd, or it does not start.
        SlurmError: there is no srun.
    """
    _check(sys.stdin.fileno(), sys.stdout.fileno())
    rest = _hold(sys.stdin.fileno())
    words = ["/bin/sh", "-c", SCRIPT, "vhpc-ssh", str(place.task), AGENT]
    words += [place.nodes, str(len(expand(place.nodes)))]
    step = place.start("vhpc-ssh", words)
    try:
        with contextlib.suppress(BrokenPipeError):  # the step says why
            step.stdin.write(keys.server_input())
        forwarding = asyncio.run(relay(step, place, _client))
        if forwarding.answered:
            step.end()
            _hang_up(rest)
            return 0
        with contextlib.suppress(OSError):
            step.stdin.close()
        if step.wait(QUIET_S) is None:
            return 0  # the client has ended first
        return ended(step, place, lambda lines: _known(lines, place))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # SIGHUP of ssh, which ends
    finally:
        step.end()


def _check(*descriptors: int) -> None:
    for descriptor in descriptors:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode) and not os.isatty(descriptor):
            raise UserError("--stdio needs pipes", "", "it is for ssh's ProxyCommand; use: vhpc ssh JOBID")


def _hold(descriptor: int) -> int | None:
    """Another descriptor of a pipe that ssh writes to; None for others.

    When a session ends, ssh still writes its last message: without a reader it would tell its user of a
    broken pipe.
    """
    return os.dup(descriptor) if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else None


def _hang_up(rest: int | None) -> None:
    """Close standard output, and read what ssh still writes until it does the same, at most ``QUIET_S``."""
    if rest is None:
        return
    with Path(os.devnull).open("wb") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())
    until = time.monotonic() + QUIET_S
    while select.select([rest], [], [], max(0.0, until - time.monotonic()))[0]:
        if not os.read(rest, 65536):
            break


async def _client(forwarding: Forwarding, _listens: bool) -> None:
    """Relay standard input and output; sshd gives its programs one socket for both."""
    mode, other = os.fstat(sys.stdin.fileno()), os.fstat(sys.stdout.fileno())
    if stat.S_ISSOCK(mode.st_mode) and os.path.samestat(mode, other):
        streams = await asyncio.open_unix_connection(sock=socket.socket(fileno=os.dup(sys.stdin.fileno())))
    else:
        streams = await pipes(sys.stdin.buffer, sys.stdout.buffer)
    await forwarding.serve(*streams)
    with contextlib.suppress(OSError):
        await streams[1].wait_closed()  # the last bytes are on their way


def _known(lines: Sequence[str], place: JobGuest) -> VhpcError | None:
    if any(NO_SSHD in line for line in lines):
        return UserError(
            f"{place} has no sshd",
            f"the image of job {place.job_id} lacks it",
            "add it to the image (Debian: openssh-server), or use vhpc cp and vhpc forward",
        )
    return too_old(lines, "start sshd")
