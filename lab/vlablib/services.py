# SPDX-License-Identifier: Apache-2.0
"""The daemons of the lab's hosts: lists, starts, ends and watches them.

A unit's process is found in /proc: a child of its host's PID 1 with the unit's
program as argv[0] (argv[1] or argv[2] for a script).  Pid files are not used.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vlablib import cgroups, fabric
from vlablib.hosts import SYSTEM_ENVIRONMENT, enter
from vlablib.report import LabError
from vlablib.settings import Lab, Record, deadline

CONSOLE_LOGS = "/var/log/vlab"
_OPENSM_LOG = f"{fabric.RUN}/opensm.log"
# systemd's default; a clean end of libvirtd took more than 20 s just after guests had ended
_STOP_TIMEOUT_S = 90
# OpenSM may wait without end for an answer that ibsim has lost on a busy machine; then it is killed
_SIMULATED_STOP_TIMEOUT_S = 20
_READY_TIMEOUT_S = 60
_DGRAM = 2


@dataclass(frozen=True)
class Unit:
    """One daemon, run in the foreground under the host's PID 1."""

    name: str
    command: tuple[str, ...]
    # the unit is ready when it listens on "tcp:PORT", "udp:PORT" or a unix socket's path (@: abstract),
    # or with "log:TEXT" when it has logged this text
    ready: str
    user: str = "root"
    log: str = ""
    # a file without which the unit is not installed and not started
    needs: str = ""
    # options after a reboot of its host, which the machine's own uptime does not show
    rebooted: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    # working directory
    folder: str = "/"
    # pid file for other programs
    pidfile: str = ""

    @property
    def console(self) -> str:
        """File with its stdout and stderr."""
        return f"{CONSOLE_LOGS}/{self.name}.log"

    def current_log(self, root: Path) -> Path:
        """Return its own log, or the file with its stdout and stderr if it has no log yet."""
        own = root / self.log.lstrip("/")
        return own if self.log and own.exists() else root / self.console.lstrip("/")


_ALL = (
    Unit("munged", ("/usr/sbin/munged", "--foreground"), "/run/munge/munge.socket.2", "munge"),
    Unit("mariadbd", ("/usr/sbin/mariadbd",), "/run/mysqld/mysqld.sock", "mysql"),
    Unit("slurmdbd", ("/usr/sbin/slurmdbd", "-D"), "tcp:6819", "slurm", "/var/log/slurm/slurmdbd.log"),
    Unit("slurmctld", ("/usr/sbin/slurmctld", "-D"), "tcp:6817", "slurm", "/var/log/slurm/slurmctld.log"),
    Unit("libvirtd", ("/usr/sbin/libvirtd",), "/run/libvirt/libvirt-sock"),
    Unit("slurmd", ("/usr/sbin/slurmd", "-D"), "tcp:6818", log="/var/log/slurm/slurmd.log", rebooted=("-b",)),
    Unit("ibsim", ("/usr/bin/ibsim", "-s", "-n", fabric.NET), "@sim:ctl@"),
    Unit(
        "opensm",
        ("/usr/sbin/opensm", "-F", "/etc/opensm/opensm.conf", "-P", fabric.PARTITIONS, "-f", _OPENSM_LOG),
        "log:SUBNET UP",
        "vhpc",  # so that vhpcd may send it signals
        _OPENSM_LOG,
        environment=(*fabric.CLIENT.items(), ("OSM_CACHE_DIR", fabric.RUN), ("OSM_TMP_DIR", fabric.RUN)),
        folder=fabric.RUN,
        pidfile=f"{fabric.RUN}/opensm.pid",
    ),
    Unit(
        "fabric-manager",
        (
            "/usr/bin/socat",
            f"TCP-LISTEN:{fabric.MANAGER_PORT},fork,reuseaddr",
            "EXEC:/usr/bin/vhpc fabric manager",
        ),
        f"tcp:{fabric.MANAGER_PORT}",
        "vhpc",
    ),
    Unit("vhpcd", ("/usr/sbin/vhpcd",), "tcp:7633", "vhpc", needs="controller/server.py"),
    Unit(
        "vhpc-hookd",
        ("/usr/libexec/vhpc/vhpc-hookd",),
        "/run/vhpc-hookd/socket",
        "slurm",
        needs="hooks/hookd.py",
    ),
)
UNITS = {unit.name: unit for unit in _ALL}
FABRIC_UNITS = ("ibsim", "opensm")
ALL_FABRIC_UNITS = (*FABRIC_UNITS, "fabric-manager")
# with two controllers, which reach the fabric from other hosts
_REMOTE_UNITS = {
    "ibsim": replace(
        UNITS["ibsim"],
        command=("/usr/bin/ibsim", "-s", "-n", "-r", "-l", str(fabric.SERVER_PORT), fabric.NET),
        ready=f"udp:{fabric.SERVER_PORT}",
    ),
    "opensm": replace(
        UNITS["opensm"],
        environment=(
            *fabric.remote_client("127.0.0.1").items(),
            ("OSM_CACHE_DIR", fabric.RUN),
            ("OSM_TMP_DIR", fabric.RUN),
        ),
    ),
}


_CONTROLLER = ("vhpcd", "vhpc-hookd", "slurmctld")
_OF_SLURM = ("slurmdbd", "slurmctld", "slurmd")


def unit_in(unit: Unit, prefix: str) -> Unit:
    """The unit on hosts whose Slurm has this prefix, such as /usr."""
    if unit.name not in _OF_SLURM:
        return unit
    return replace(unit, command=(f"{prefix}/sbin/{unit.name}", *unit.command[1:]))


def units_of(
    host: str, *, fabric: bool, prefix: str = "/usr", controllers: int = 1, light: bool = False
) -> tuple[Unit, ...]:
    """Return the units of a host in start order; ``prefix`` is that of its Slurm."""
    node = ("munged", "slurmd") if light else ("munged", "libvirtd", "slurmd")
    databases = ("mariadbd", *(FABRIC_UNITS if fabric else ()), "slurmdbd")
    names = {
        "login": ("munged",),
        "ctl": ("munged", *(databases if controllers == 1 else ()), *_CONTROLLER),
        "ctl2": ("munged", *_CONTROLLER),
        "db": ("munged", *databases, *(("fabric-manager",) if fabric else ())),
    }.get(host, node)
    units = UNITS if controllers == 1 else {**UNITS, **_REMOTE_UNITS}
    return tuple(unit_in(units[name], prefix) for name in names)


def installed(unit: Unit, lab: Lab, init: int | None) -> bool:
    """Whether a unit can run: those of vhpc only if they are deployed, or in the host's packages.

    ``init`` is the PID 1 of its host: with ``--bare`` an administrator installs what it lacks.
    """
    record = Record.read(lab)
    if record is not None and (record.bare or (record.packages and unit.needs)):
        return init is not None and os.path.lexists(f"/proc/{init}/root{unit.command[0]}")
    return not unit.needs or (lab.deployed / "python" / unit.needs).exists()


@dataclass(frozen=True)
class HostProcesses:
    """Snapshot of the running daemons of one host: argv by pid."""

    children: dict[int, tuple[str, ...]]

    @classmethod
    def look(cls, init: int) -> HostProcesses:
        """Read the children of a host's PID 1."""
        children = {}
        try:
            pids = Path(f"/proc/{init}/task/{init}/children").read_text(encoding="ascii").split()
        except OSError:
            return cls({})
        for pid in pids:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
            except OSError:
                continue
            children[int(pid)] = tuple(os.fsdecode(word) for word in words)
        return cls(children)

    def pid_of(self, unit: Unit) -> int | None:
        """Return the pid of a unit, None when it is not running."""
        program = Path(unit.command[0]).name
        for pid, words in self.children.items():
            # the second word of a script, or the third one if its interpreter has an option
            if program in (Path(word).name for word in words[: 2 + words[1:2].count("-I")]):
                return pid
        return None


def pid_of(init: int, unit: Unit) -> int | None:
    """Return the pid of a unit on a host, None when it is not running."""
    return HostProcesses.look(init).pid_of(unit)


def is_ready(init: int, unit: Unit) -> bool:
    """Whether the unit's socket listens in the host's network namespace."""
    net = Path(f"/proc/{init}/net")
    kind, _, port = unit.ready.partition(":")
    if kind == "log":
        log = Path(f"/proc/{init}/root{unit.log}")
        return log.exists() and port.encode() in log.read_bytes()
    if kind in ("tcp", "udp"):
        # states TCP_LISTEN and TCP_CLOSE, which an unconnected UDP socket has
        suffix, listening = f":{int(port):04X}", "0A" if kind == "tcp" else "07"
        for table in (kind, f"{kind}6"):
            for line in (net / table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(suffix) and fields[3] == listening:
                    return True
        return False
    # column Flags: __SO_ACCEPTCON, a listening socket
    for line in (net / "unix").read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
        fields = line.split()
        # datagram sockets (type 2) do not listen
        if fields[-1] == unit.ready and (int(fields[3], 16) & 0x10000 or int(fields[4], 16) == _DGRAM):
            return True
    return False


def start(init: int, unit: Unit, *, rebooted: bool = False) -> bool:
    """Start a unit unless it runs; do not wait for it. Return whether it was started."""
    if pid_of(init, unit) is not None:
        return False
    if unit.ready.startswith("/"):  # a killed predecessor leaves its socket
        Path(f"/proc/{init}/root{unit.ready}").unlink(missing_ok=True)
    if unit.ready.startswith("log:"):
        Path(f"/proc/{init}/root{unit.log}").unlink(missing_ok=True)
    command = [*unit.command, *(unit.rebooted if rebooted else ())]
    if unit.environment:
        command = ["env", *(f"{name}={value}" for name, value in unit.environment), *command]
    if unit.user != "root":
        command = ["setpriv", f"--reuid={unit.user}", f"--regid={unit.user}", "--init-groups", "--", *command]
    shell = f'cd {unit.folder} && exec "$@" < /dev/null >> "$0" 2>&1'
    if unit.pidfile:
        shell = f"echo $$ > {unit.pidfile} && {shell}"
    # setsid --fork: the daemon becomes a child of the host's PID 1
    line = [*enter(init), "setsid", "--fork", "sh", "-c", shell, unit.console, *command]
    ended = subprocess.run(
        line,
        check=False,
        env=SYSTEM_ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        preexec_fn=partial(cgroups.join_host, init),
    )
    if ended.returncode:
        raise LabError(f"cannot start {unit.name}: nsenter ended with {ended.returncode}")
    return True


def wait_ready(host: str, init: int, unit: Unit) -> None:
    """Wait until a started unit listens.

    Raises:
        LabError: it ended or did not listen in time; contains the end of its log.
    """
    seen = False
    for turn, _ in enumerate(deadline(_READY_TIMEOUT_S)):
        running = pid_of(init, unit) is not None
        if running and is_ready(init, unit):
            return
        if not running and (seen or turn > 20):
            break
        seen = seen or running
    raise LabError(f"{unit.name} on {host} did not start; its log ends with:\n{log_tail(init, unit)}")


def state(init: int, unit: Unit) -> str:
    """Return "ready", "starting" (or hanging) or "dead"."""
    if pid_of(init, unit) is None:
        return "dead"
    return "ready" if is_ready(init, unit) else "starting"


def stop(host: str, init: int, unit: Unit) -> None:
    """End a unit cleanly if it runs, and wait until it has ended."""
    if unit.name not in FABRIC_UNITS:
        _end(host, init, unit, signal.SIGTERM)
        return
    try:
        _end(host, init, unit, signal.SIGTERM, _SIMULATED_STOP_TIMEOUT_S)
    except LabError:
        _end(host, init, unit, signal.SIGKILL)


def kill(host: str, init: int, unit: Unit) -> None:
    """Kill a unit's main process like a crash."""
    _end(host, init, unit, signal.SIGKILL)


def _end(host: str, init: int, unit: Unit, signal_number: int, timeout_s: float = _STOP_TIMEOUT_S) -> None:
    pid = pid_of(init, unit)
    if pid is None:
        return
    os.kill(pid, signal_number)
    for _ in deadline(timeout_s):
        if pid_of(init, unit) != pid:
            return
    raise LabError(f"{unit.name} on {host} (pid {pid}) did not end within {timeout_s:g} s")


def log_tail(init: int, unit: Unit, lines: int = 15) -> str:
    """Return the last lines of a unit's log, indented."""
    try:
        text = unit.current_log(Path(f"/proc/{init}/root")).read_text(encoding="utf-8", errors="replace")
    except OSError as err:
        return f"  ({err})"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (nothing)"
