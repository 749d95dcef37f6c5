# SPDX-License-Identifier: Apache-2.0
"""`vlab exec`: runs a command in a host, with stdio, signals and exit status as of a local command."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import struct
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vlablib import cgroups, kernel
from vlablib.report import LabError, say

_FORWARDED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
_EOT = b"\x04"


@dataclass(frozen=True)
class Account:
    """A row of the host's passwd file, and the user's groups on the host."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str
    # more folders of a login's PATH
    search: tuple[str, ...] = ()

    @classmethod
    def find(cls, root: Path, user: str) -> Account:
        """Look up a user by name in the host's files, not in this machine's.

        Raises:
            LabError: the host has no such user.
        """
        for line in (root / "etc/passwd").read_text(encoding="utf-8").splitlines():
            name, _, uid, gid, _, home, shell = line.split(":")
            if name == user:
                groups = {int(gid)}
                for row in (root / "etc/group").read_text(encoding="utf-8").splitlines():
                    _, _, group, members = row.split(":")
                    if user in members.split(","):
                        groups.add(int(group))
                return cls(name, int(uid), int(gid), tuple(sorted(groups)), home, shell)
        raise LabError(f"there is no user {user} in the lab")

    def environment(self) -> dict[str, str]:
        """Return the environment of a login; only TERM is copied from the caller."""
        path = "/usr/local/bin:/usr/bin:/bin"
        if not self.uid:
            path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {
            "PATH": ":".join((path, *self.search)),
            "HOME": self.home,
            "USER": self.name,
            "LOGNAME": self.name,
            "SHELL": self.shell,
            "LANG": "C.UTF-8",
            "TERM": os.environ.get("TERM", "dumb"),
        }


def execute(init: int, account: Account, command: list[str], *, cwd: str = "", terminal: bool = False) -> int:
    """Run a command in the host whose PID 1 is `init`; return its exit status, 128+n for signal n."""
    # blocked before the fork, so that no signal is lost between the processes
    watched = {*_FORWARDED, signal.SIGCHLD, signal.SIGWINCH}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    cgroups.join_host(init)
    fd = os.pidfd_open(init)
    kernel.setns(fd, kernel.HOST_NAMESPACES)
    os.close(fd)
    # the host's own /dev/pts: this process has entered its mount namespace
    master, slave = os.openpty() if terminal else (-1, -1)
    child = os.fork()
    if not child:
        try:
            _become(account, command, cwd or account.home, slave)
        except OSError as err:
            say(f"{command[0]}: {err.strerror}")
            os._exit(127 if err.errno == errno.ENOENT else 126)
    if terminal:
        os.close(slave)
        with _raw_terminal():
            return _relay(master, child)
    while True:
        info = signal.sigwaitinfo(watched)
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return _exit_status(status)
        elif info.si_signo in _FORWARDED and info.si_code <= 0:
            # sent by a process; the child itself gets signals of the terminal (code > 0)
            os.kill(child, info.si_signo)


def _become(account: Account, command: list[str], cwd: str, slave: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Python ignores these two, and the program would inherit this
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if slave >= 0:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        os.fchown(slave, account.uid, -1)
        for fd in (0, 1, 2):
            os.dup2(slave, fd)
    os.umask(0o022)
    os.setgroups(account.groups)
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    # after the change of user, which resets it; ends the command if vlab is killed
    kernel.die_with_parent(signal.SIGKILL)
    try:
        os.chdir(cwd)
    except OSError as err:
        say(f"cannot enter {cwd}: {err.strerror}; using / instead")
        os.chdir("/")
    os.execvpe(command[0], command, account.environment())  # noqa: S606


def _exit_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Pass every key through; the host's terminal does the line editing."""
    if not sys.stdin.isatty():
        yield
        return
    saved = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, saved)


def _relay(master: int, child: int) -> int:
    """Copy between stdio and the host's terminal until the child has ended and its output is written."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (*_FORWARDED, signal.SIGWINCH, signal.SIGCHLD):
        # without a handler nothing is written to the wakeup descriptor
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _copy_window_size(master)
    sources = [0, master, reader]
    status: int | None = None
    while True:
        # after the child's end, only the rest of the terminal's buffer is copied
        ready = select.select(sources, (), (), None if status is None else 0)[0]
        if status is not None and master not in ready:
            return status
        if reader in ready:
            _pass_on(os.read(reader, 64), master, child)
        if master in ready:
            try:
                output = os.read(master, 65536)
            except OSError:  # EIO: the last process with this terminal has ended
                output = b""
            if output:
                _write_all(1, output)
            else:
                return _exit_status(os.waitpid(child, 0)[1]) if status is None else status
        if 0 in ready:
            typed = os.read(0, 65536)
            _write_all(master, typed or _EOT)
            if not typed:
                sources.remove(0)
        if status is None:
            ended, raw = os.waitpid(child, os.WNOHANG)
            if ended:
                status = _exit_status(raw)


def _pass_on(numbers: bytes, master: int, child: int) -> None:
    for number in numbers:
        if number == signal.SIGWINCH:
            _copy_window_size(master)
        elif number != signal.SIGCHLD:
            os.kill(child, number)


def _copy_window_size(master: int) -> None:
    size = struct.pack("HHHH", 24, 80, 0, 0)
    if sys.stdin.isatty():
        size = fcntl.ioctl(0, termios.TIOCGWINSZ, size)
    fcntl.ioctl(master, termios.TIOCSWINSZ, size)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
