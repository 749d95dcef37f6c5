# SPDX-License-Identifier: Apache-2.0
"""The helper processes of one guest: a daemon for each shared folder, one for locks, passt, and the shim."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import Struct, field

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import GuestPlan, NatInterface, Share
from vhpc_slurm.node.checkpoint.facts import is_saveable
from vhpc_slurm.node.guest import locks, passt, shares
from vhpc_slurm.node.guest.channel import ROOT_SOCKET
from vhpc_slurm.node.host import confine, process, userlimits
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.node.host.confine import Confinement, ShareAbsentError, Started
from vhpc_slurm.node.host.limits import Limits
from vhpc_slurm.node.network import nat
from vhpc_slurm.node.resource.process import Process
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

NOBODY_GID = 65534
SHIM_LEFT = (0, 3)
"""Exit statuses of a shim whose guest closed the channel, or broke its protocol (guest/shim/shim.h)."""
NAMES = {passt.NAME: passt.NAME, locks.NAME: locks.CALLED}
KEYS = {passt.NAME: "network.passt", locks.NAME: "shares.locks"}
"""Daemons by their tag; any other tag is that of a share."""
LOG = "helpers.log"
LOG_BYTES = 256 * 1024
"""The shim writes the log of all helpers, and the kernel lets it write no more."""


class Helpers(Struct):
    """Helper processes of one guest.

    Attributes:
        layout: paths and configuration.
        journal: of the generation.
        guest: whose helpers.
        account: the job's user, whose rights the daemons have.
        qemu_uid: uid of the guest's QEMU and of its shim.
        cgroup: of the generation, None where the site has control groups switched off.
        limits: of that control group.
    """

    layout: Layout
    journal: Journal
    guest: GuestPlan
    account: Account
    qemu_uid: int
    cgroup: Cgroup | None
    limits: Limits
    shim: process.ProcessRef | None = None
    _daemons: dict[str, process.ProcessRef] = field(default_factory=dict)
    _begun: list[tuple[Share, str, Started]] = field(default_factory=list)
    _served: list[Share] = field(default_factory=list)
    _logs: dict[str, int] = field(default_factory=dict)
    _read: dict[str, bytes] = field(default_factory=dict)

    @property
    def share_daemons(self) -> tuple[process.ProcessRef, ...]:
        """The daemons of shared folders."""
        return tuple(ref for tag, ref in self._daemons.items() if tag not in NAMES)

    @property
    def run_dir(self) -> Path:
        """Run folder of the guest."""
        return Path(self.guest.paths.run_dir)

    def close(self) -> None:
        """Close what this process holds of them; they live on."""
        while self._logs:
            os.close(self._logs.popitem()[1])

    def start_daemons(self, wanted: Sequence[Share]) -> None:
        """Start the daemons of folders; ``served`` waits for them, so other work can be done meanwhile.

        Raises:
            UserError, NodeError: as ``served``.
        """
        migrates = is_saveable(self.layout.config, (self.guest,))
        for share in wanted:
            key = self._announce(f"virtiofsd:{share.tag}", "virtiofsd", path=share.path)
            command = partial(shares.command, self.layout.config.shares, share, migrates=migrates)
            own = shares.confined(self._confinement(self.account.credentials), share)
            daemon = self._listening(share.tag, key, command, own, self.socket_of(share))
            self._begun.append((share, key, daemon))
            if own.entry is not None and own.entry.prefix:
                self._wait()  # systemd makes the scope for this one; the others enter it

    def served(self) -> tuple[Share, ...]:
        """Wait until the daemons of folders run; returns the folders that the user can enter.

        Raises:
            UserError: a folder may not be shared, or the user has disturbed a daemon.
            NodeError: a daemon does not start.
        """
        self._wait()
        return tuple(self._served)

    def _wait(self) -> None:
        while self._begun:
            share, key, daemon = self._begun.pop(0)
            try:
                self._finish(share.tag, daemon)
            except ShareAbsentError:
                self.journal.released(key)
                os.close(self._logs.pop(share.tag))
            else:
                self._served.append(share)

    def start_locks(self, served: Sequence[Share]) -> None:
        """Start the lock daemon, unless locks in all folders that are served hold within the guest alone.

        Raises:
            UserError: the user has disturbed it.
            NodeError: it does not start.
        """
        wanted = [share for share in served if share.needs_lock_daemon]
        if not wanted:
            return
        key = self._announce(locks.NAME, locks.NAME)
        command = partial(locks.command, self.layout.config.paths.libexec, wanted)
        own = locks.confined(self._confinement(self.account.credentials))
        path = Path(self.guest.paths.locks_socket)
        self._finish(locks.NAME, self._listening(locks.NAME, key, command, own, path))

    def start_passt(self, found: NatInterface) -> None:
        """Start the guest's passt; its gid equals QEMU's uid, and a packet filter matches that gid.

        Raises:
            UserError: the user has disturbed it.
            NodeError: it does not start.
        """
        path = Path(self.guest.paths.nat_socket)
        passt.make_directory(path.parent, self.qemu_uid)
        key = self._announce(passt.NAME, passt.NAME)
        own = self._confinement(process.Credentials(self.account.uid, self.qemu_uid))
        own = replace(own, limits=(("nofile", passt.OPEN_FILES),))
        command = nat.command(self.layout.config.network, found, path)
        started = self._start(passt.NAME, key, command, own)
        timeout_s = self.layout.config.guests.stage_timeout_s
        self._daemons[passt.NAME] = started.finish(timeout_s)
        try:
            passt.hand_over(path, started.ref, self.account.uid, self.qemu_uid, timeout_s)
        except NodeError as err:
            raise self.disturbed() or self.exhausted() or self._explained(passt.NAME, err) from err

    def start_shim(self, agent: socket.socket) -> None:
        """Start the host's end of the guest's channel, connected to QEMU's socket for the agent.

        Raises:
            UserError: the user has disturbed a daemon.
            NodeError: it does not start.
        """
        config, run_dir = self.layout.config, self.run_dir
        listener = shares.listen(run_dir / "run.sock", self.account.uid)
        own = shares.listen(run_dir / ROOT_SOCKET, 0)
        key = self._announce("shim", "shim")
        console = (run_dir / "console.log").open("r+b", buffering=0)
        log = os.open(run_dir / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with agent, listener, own, console, process.watched(list(self._daemons.values())) as watched:
                sockets = (agent.fileno(), listener.fileno(), own.fileno())
                fds = (*sockets, console.fileno(), *watched, *self._logs.values())
                shim = confine.start(
                    [
                        f"{config.paths.libexec}/vhpc-shim",
                        f"--agent-fd={agent.fileno()}",
                        f"--listen-fd={listener.fileno()}",
                        f"--root-fd={own.fileno()}",
                        f"--uid={self.account.uid}",
                        f"--console-fd={console.fileno()}",
                        f"--console-keep={config.guests.console_limit_kib}",
                        *(f"--watch-fd={fd}" for fd in watched),
                        *(f"--log-fd={tag}:{fd}" for tag, fd in self._logs.items()),
                    ],
                    replace(
                        self._confinement(process.Credentials(self.qemu_uid, NOBODY_GID)),
                        limits=(("fsize", LOG_BYTES),),
                    ),
                    generation=str(self.journal.generation),
                    stderr=log,
                    pass_fds=fds,
                )
                Process().note(self.journal, key, shim.ref)
                self.shim = shim.finish(config.guests.stage_timeout_s)
        except process.EndedError as err:
            error = self.disturbed() or self.exhausted()
            raise error or NodeError("a daemon of the guest has ended", str(err)) from err
        finally:
            os.close(log)

    def disturbed(self, ending_s: float = 1.0) -> confine.DisturbedError | None:
        """Returns an error if the user has ended or stopped one of them.

        A shim closes its sockets before it has ended: after a failure, its end is awaited so long.
        """
        for tag, ref in self._daemons.items():
            if error := confine.disturbed(_called(tag), [ref]):
                return error
        if self.shim is None:
            return None
        process.wait_gone(self.shim, ending_s)
        return confine.disturbed("vhpc-shim", [self.shim])

    def exhausted(self) -> confine.DisturbedError | None:
        """Returns an error if a limit of the user explains why a daemon does not serve the guest.

        Call it only after a failure: it starts a process.
        """
        if not self._logs:
            return None
        alive = {tag for tag, ref in self._daemons.items() if process.alive(ref)}
        ended = [tag for tag in self._logs if tag not in alive]
        words = next(filter(None, map(self._said, ended)), "")  # they all say the same
        limit = userlimits.reached(words, self.account.credentials)
        if not limit:
            return None
        return confine.DisturbedError(
            f"{_called(ended[0] if ended else next(iter(self._logs)))}, which the guest needs, does not work",
            f"{limit}{': ' if words else ''}{words}",
            "end processes of yours on that node, or leave their limits alone; submit the job again",
        )

    def left_by_guest(self) -> bool:
        """Whether the shim has ended because of its guest, which closed the channel or broke its protocol."""
        return self.shim is not None and process.exit_status(self.shim) in SHIM_LEFT

    def ended(self) -> NodeError | None:
        """An error that says so, when a daemon has ended by itself."""
        for tag, ref in self._daemons.items():
            if not process.alive(ref):
                key = KEYS.get(tag, "shares.virtiofsd")
                return NodeError(f"{_called(tag)} ended", self._said(tag), f"see {key} in vhpc.toml(5)")
        return None

    def socket_of(self, share: Share) -> Path:
        """Where QEMU finds the daemon of a share."""
        return Path(self.guest.paths.share_socket(share.tag))

    def _confinement(self, who: process.Credentials) -> Confinement:
        paths = self.layout.config.paths
        return Confinement(
            program=f"{paths.libexec}/vhpc-confine",
            who=who,
            entry=None if self.cgroup is None else self.cgroup.entry(self.limits),
            cpus=self.limits.cpus,
            refuse=(paths.run, paths.state),
        )

    def _announce(self, name: str, role: str, path: str = "") -> str:
        """Announce a process of this guest in the journal; returns its key."""
        return Process().announce(self.journal, f"g{self.guest.index}:{name}", role, path)

    def _start(
        self, tag: str, key: str, command: Sequence[str], own: Confinement, pass_fds: Sequence[int] = ()
    ) -> Started:
        """Start a daemon that the journal announces, with a log, and note its process there."""
        with self._logged_to(tag) as stderr:
            started = confine.start(
                command, own, generation=str(self.journal.generation), stderr=stderr, pass_fds=pass_fds
            )
        Process().note(self.journal, key, started.ref)
        return started

    def _listening(
        self, tag: str, key: str, command: Callable[[int], list[str]], own: Confinement, path: Path
    ) -> Started:
        """Start a daemon with a socket that QEMU finds at the path, for QEMU's uid alone.

        ``command`` makes its command line from the descriptor of the socket.
        """
        with shares.listen(path, self.qemu_uid) as listener:
            return self._start(tag, key, command(listener.fileno()), own, (listener.fileno(),))

    def _finish(self, tag: str, started: Started) -> None:
        """Wait until a daemon runs; an error has its last lines, or the limit that it has reached."""
        try:
            self._daemons[tag] = started.finish(self.layout.config.guests.stage_timeout_s)
        except NodeError as err:
            raise self.exhausted() or self._explained(tag, err) from err

    @contextlib.contextmanager
    def _logged_to(self, tag: str) -> Iterator[int]:
        """A descriptor for the messages of a daemon that is started with it; the other end is kept."""
        self._logs[tag], stderr = os.pipe2(os.O_CLOEXEC)
        try:
            yield stderr
        finally:
            os.close(stderr)

    def _explained(self, tag: str, err: NodeError) -> NodeError:
        """The error of a daemon, with its last lines."""
        return NodeError(err.what, " | ".join(filter(None, (err.why, self._said(tag)))), err.hint)

    def _said(self, tag: str) -> str:
        """The last lines that a daemon wrote: those in its pipe, and those that the shim has logged."""
        fd = self._logs[tag]
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            self._read[tag] = self._read.get(tag, b"") + os.read(fd, 65536)
        return process.last_lines(self._logged(tag) + self._read.get(tag, b""))

    def _logged(self, tag: str) -> bytes:
        begin = f"vhpc-shim: {tag}: ".encode()
        try:
            lines = (self.run_dir / LOG).read_bytes()[-LOG_BYTES:].splitlines(keepends=True)
        except OSError:
            return b""
        return b"".join(line[len(begin) :] for line in lines if line.startswith(begin))


def _called(tag: str) -> str:
    """What messages call a daemon."""
    return NAMES.get(tag, f"the daemon of shared folder {tag}")
