# SPDX-License-Identifier: Apache-2.0
"""The lock daemon of a guest: its command line, its rights and its socket, and what messages say of it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from domain_cases import FLAT
from node_rig import account
from stepd import needs_root

from pace import until
from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation, GuestPaths, Share
from vhpc_slurm.node.boot.helpers import Helpers
from vhpc_slurm.node.guest import locks
from vhpc_slurm.node.host import confine, process
from vhpc_slurm.node.host.limits import Limits
from vhpc_slurm.node.resource.process import ProcessData
from vhpc_slurm.node.store.journal import Journal, read_entries
from vhpc_slurm.node.store.layout import Layout

CONFINE = Path(os.environ.get("VHPC_GUEST_BIN", "")).parent / "confine/vhpc-confine"
built = pytest.mark.skipif(not CONFINE.is_file(), reason="programs are not built: run by `make unit`")
GENERATION = Generation(42, 0, "0123abcd")
HOME = Share("home0", "/home/alice", read_only=False, why="home")
TREE = Share("site1", "/sw:old", read_only=True, why="site", locks="refuse")
ALONE = Share("site2", "/scratch", read_only=False, why="site", locks="guest")
# As vhpc-locks behaves: it has one connection, and ends with it.
STAND_IN = """#!/usr/bin/python3
import os, re, resource, socket, sys
fd = int(re.fullmatch("--listen-fd=([0-9]+)", sys.argv[1])[1])
print("open files", resource.getrlimit(resource.RLIMIT_NOFILE)[0], *sys.argv[2:], flush=True)
with socket.socket(fileno=fd) as listener:
    peer, _ = listener.accept()
peer.sendall(b"%d %d %s" % (os.getuid(), os.getgid(), repr(os.getgroups()).encode()))
while peer.recv(100):
    pass
"""


def test_the_command_line_has_the_shares_with_their_policies() -> None:
    wanted = [share for share in (HOME, TREE, ALONE) if share.needs_lock_daemon]
    assert locks.command("/usr/libexec/vhpc", wanted, 7) == [
        "/usr/libexec/vhpc/vhpc-locks",
        "--listen-fd=7",
        "--share=home0:cluster:/home/alice",
        "--share-read-only=site1:refuse:/sw:old",
    ]


@pytest.fixture
def libexec() -> Iterator[Path]:
    """Where vhpc-confine is, and a stand-in for vhpc-locks, in a path short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="vl-", dir="/tmp"))
    folder.chmod(0o755)
    if CONFINE.is_file():
        shutil.copy(CONFINE, folder)
    (folder / "vhpc-locks").write_text(STAND_IN)
    (folder / "vhpc-locks").chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def helpers(libexec: Path) -> Iterator[Helpers]:
    paths = {name: str(libexec / name) for name in ("state", "run", "log")} | {"libexec": str(libexec)}
    layout = Layout(msgspec.convert({"paths": paths}, Config))
    guest = replace(FLAT, paths=GuestPaths(str(libexec)))
    limits = Limits(memory_mib=512, helper_memory_mib=64, tasks=64, helper_tasks=32, cpus=(0,))
    journal = Journal(layout.journals, GENERATION)
    made = Helpers(layout, journal, guest, account(), 4_100_000, None, limits)
    yield made
    for ref in made._daemons.values():
        process.end(ref)
    made.close()
    journal.close()


def held(helpers: Helpers) -> dict[str, ProcessData]:
    """The processes in the journal, as another process finds them."""
    folder = helpers.layout.journals
    return {entry.key: entry.read(ProcessData) for entry in read_entries(folder, GENERATION)}


@needs_root
@built
def test_qemu_reaches_the_daemon_which_has_the_users_rights(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "OPEN_FILES", 4321)  # root of a container may not raise a limit
    helpers.start_locks((HOME, TREE, ALONE))
    path = Path(helpers.guest.paths.locks_socket)
    about = path.stat()
    assert (about.st_uid, stat.S_IMODE(about.st_mode)) == (4_100_000, 0o600)
    with socket.socket(socket.AF_UNIX) as qemu:
        qemu.connect(str(path))
        assert qemu.recv(100) == b"2001 2001 [2001]"
        words = "open files 4321 --share=home0:cluster:/home/alice"
        assert helpers._said(locks.NAME).startswith(f"{words} --share-read-only=site1:refuse:/sw:old")
        assert (helpers.disturbed(), helpers.ended()) == (None, None)
        (entry,) = held(helpers).values()
        assert (entry.role, entry.ref) == ("locks", helpers._daemons["locks"])
    until(lambda: helpers.ended() is not None, "the daemon's end")
    error = helpers.ended()
    assert error is not None
    assert error.what == "the lock daemon of the shared folders ended"
    assert error.hint == "see shares.locks in vhpc.toml(5)"


@needs_root
@pytest.mark.parametrize("served", [(), (ALONE,)])
def test_locks_that_hold_in_one_guest_need_no_daemon(helpers: Helpers, served: tuple[Share, ...]) -> None:
    helpers.start_locks(served)
    assert held(helpers) == {}
    assert not Path(helpers.guest.paths.locks_socket).exists()


@needs_root
def test_the_journal_has_the_daemon_before_it_starts(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, ProcessData]] = []

    def killed(*_: object, **__: object) -> None:
        found.append(held(helpers))
        raise NodeError("cannot start vhpc-locks")

    monkeypatch.setattr(confine, "start", killed)
    with pytest.raises(NodeError, match="cannot start"):
        helpers.start_locks((HOME,))
    assert found == [{"process:g0:locks": ProcessData("locks")}]


@needs_root
@built
def test_a_daemon_that_is_not_installed_is_the_nodes_fault(helpers: Helpers, libexec: Path) -> None:
    (libexec / "vhpc-locks").unlink()
    with pytest.raises(NodeError) as caught:
        helpers.start_locks((HOME,))
    assert caught.value.what == f"cannot start {libexec}/vhpc-locks"
    assert "No such file" in caught.value.why


@needs_root
@built
def test_a_daemon_that_ends_at_its_start_says_why(helpers: Helpers, libexec: Path) -> None:
    (libexec / "vhpc-locks").write_text("#!/bin/sh\necho 'home0: no such folder' >&2; exit 1\n")
    helpers.start_locks((HOME,))
    until(lambda: helpers.ended() is not None, "the daemon's end")
    assert (helpers.disturbed(), helpers.exhausted()) == (None, None)
    error = helpers.ended()
    assert error is not None
    assert error.why == "home0: no such folder"
    with socket.socket(socket.AF_UNIX) as qemu, pytest.raises(ConnectionRefusedError):
        qemu.connect(helpers.guest.paths.locks_socket)


@needs_root
@built
@pytest.mark.promise("user.limits")
def test_a_limit_of_the_user_at_the_daemons_start_is_named(helpers: Helpers, libexec: Path) -> None:
    (libexec / "vhpc-locks").write_text("#!/bin/sh\necho 'socket: Too many open files' >&2; exit 1\n")
    helpers.start_locks((HOME,))
    until(lambda: helpers.ended() is not None, "the daemon's end")
    error = helpers.exhausted()
    assert error is not None
    assert error.what == "the lock daemon of the shared folders, which the guest needs, does not work"
    assert "RLIMIT_NOFILE" in error.why


@needs_root
@built
@pytest.mark.promise("attack.daemon-signal")
@pytest.mark.parametrize(("sent", "word"), [(signal.SIGKILL, "ended"), (signal.SIGSTOP, "stopped")])
def test_a_signal_to_the_daemon_is_the_users_doing(helpers: Helpers, sent: int, word: str) -> None:
    helpers.start_locks((HOME,))
    os.kill(helpers._daemons[locks.NAME].pid, sent)
    error = until(helpers.disturbed, "the signal")
    assert error is not None
    said = f"the lock daemon of the shared folders, which the guest needs, was {word} by a signal"
    assert error.what == said
