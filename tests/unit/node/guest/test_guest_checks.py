# SPDX-License-Identifier: Apache-2.0
"""The site's check of guests: who is at fault, and all guests of a node at once (real agent and shim)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from boot_rig import finished
from guest_processes import CONTROL_OPERATIONS
from network_lab import lease_of, running_of

from vhpc_slurm.config import Guests
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import ImageIdentity, ImageRef, Lease, RunningGuest
from vhpc_slurm.node.guest import check
from vhpc_slurm.node.guest.program import ProgramEnd
from vhpc_slurm.node.store.journal import Stopped

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]

SETTINGS = Guests(check=("/usr/bin/dcgmi", "diag", "-r", "1"), check_timeout_s=90)
ENV = {"PATH": "/usr/bin:/bin"}


def lease(own: bool = False, **request: Any) -> Lease:
    made = lease_of(42, 5000, "n1")
    assert made.image is not None
    image = ImageIdentity(ImageRef("cuda", own=own), made.image.digest, made.image.manifest)
    return replace(made, image=image, request=replace(made.request, **request))


def ended(
    code: int | None = None, signal: int | None = None, *, oom: bool = False, said: bytes = b""
) -> ProgramEnd:
    return ProgramEnd(code, signal, oom, said)


# --- who is at fault ------------------------------------------------------------------------------------


@pytest.mark.promise("check.fault")
@pytest.mark.parametrize(
    ("end", "kind", "says"),
    [
        (ended(1, said=b"a\nb\nGPU 3: FAIL\n"), check.UnhealthyError, "exit code 1: b | GPU 3: FAIL"),
        (ended(226), check.UnhealthyError, "failed: exit code 226 (/usr/bin/dcgmi diag -r 1)"),
        (ended(signal=11), check.UnhealthyError, "it was ended by signal 11"),
        (ended(said=b"GPU 2 ...\n"), check.UnhealthyError, "it did not end within 90 s: GPU 2 ..."),
        (ended(78, said=b"no driver\n"), UserError, "exit code 78: no driver"),
        (ended(126), UserError, "exit code 126"),
        (ended(127), UserError, "exit code 127"),
        (ended(signal=9, oom=True), UserError, "had not enough memory: it was ended by signal 9"),
        (ended(1, oom=True), UserError, "ask for more: --mem"),
    ],
)
def test_the_end_of_the_check_decides_who_is_at_fault(
    end: ProgramEnd, kind: type[VhpcError], says: str
) -> None:
    found = check.judge(SETTINGS, "n1", end, "")
    assert type(found) is kind
    assert found.line().startswith("the check of guest n1 failed: ")
    assert says in found.line()


@pytest.mark.promise("check.own-image", "attack.check")
@pytest.mark.parametrize(
    ("own", "request_", "part"),
    [
        (True, {}, "image own/cuda:latest"),
        (False, {"env": "LD_PRELOAD=/home/alice/x.so"}, "--vhpc-env"),
        (False, {"mounts": "/home/alice/bin:/usr/local/bin"}, "--vhpc-mount"),
        (False, {"disk_mount": "/opt"}, "--vhpc-disk with a mount point"),
        (False, {"start_dir": "/home/alice"}, "--vhpc-workdir"),
    ],
)
def test_what_the_user_has_changed_drains_no_node(own: bool, request_: dict[str, str], part: str) -> None:
    users = check.users_part(lease(own, **request_))
    assert users == part
    for end in (ended(1), ended(78), ended(signal=11), ended()):
        found = check.judge(SETTINGS, "n1", end, users)
        assert type(found) is UserError
        assert part in found.line()
    assert check.judge(SETTINGS, "n1", ended(0), users) is None


def test_a_site_image_and_the_rest_are_trusted() -> None:
    assert check.users_part(lease(job_name="x", work_dir="/home/alice", network="job", shares="home")) == ""


# --- guests of a node -----------------------------------------------------------------------------------


@pytest.fixture
def alike(guest: Guest) -> Callable[[int], list[RunningGuest]]:
    """So many guests of a node; one agent stands for all of them."""
    (guest.folder / "root.sock").symlink_to(guest.socket)
    (plain,) = running_of(lease_of(42, 5000, "n1"), "n1").guests
    paths = replace(plain.plan.paths, run_dir=str(guest.folder))

    def made(count: int) -> list[RunningGuest]:
        names = [f"n1-g{number}" for number in range(count)]
        return [
            replace(plain, plan=replace(plain.plan, hostname=name, index=number, paths=paths))
            for number, name in enumerate(names)
        ]

    return made


def run(
    guests: Sequence[RunningGuest], *command: str, own: bool = False, wait_s: int = 30
) -> tuple[str, ...]:
    settings = Guests(check=command, check_timeout_s=wait_s)
    return finished(check.run(settings, lease(own), guests, ENV))


@CONTROL_OPERATIONS
def test_all_guests_of_a_node_are_checked_at_once(
    alike: Callable[[int], list[RunningGuest]], tmp_path: Path
) -> None:
    """Each waits for the others."""
    script = f'touch {tmp_path}/ok-$$; until [ "$(ls {tmp_path}/ok-* | wc -l)" = 3 ]; do sleep 0.05; done'
    assert run(alike(3), "/bin/sh", "-c", script) == ()


@CONTROL_OPERATIONS
def test_a_bad_node_counts_more_than_a_bad_job(
    alike: Callable[[int], list[RunningGuest]], tmp_path: Path
) -> None:
    script = f"mkdir {tmp_path}/first 2>/dev/null && exit 78; echo bad; exit 1"
    with pytest.raises(check.UnhealthyError, match=r"guest n1-g[01] failed: exit code 1: bad"):
        run(alike(2), "/bin/sh", "-c", script)


@CONTROL_OPERATIONS
def test_guests_without_the_program_are_reported(alike: Callable[[int], list[RunningGuest]]) -> None:
    (line,) = run(alike(1), "/nowhere/check")
    assert line.startswith("guest n1-g0 was not checked: its image has no /nowhere/check")
    with pytest.raises(UserError, match=r"guest n1-g0 could not be checked: .*[Pp]ermission denied"):
        run(alike(1), "/etc/passwd")


@CONTROL_OPERATIONS
def test_a_guest_that_ends_meanwhile_is_no_fault_of_the_node(
    guest: Guest, alike: Callable[[int], list[RunningGuest]]
) -> None:
    guests = alike(1)
    assert guest.agent is not None
    with pytest.raises(UserError, match="it does not answer its node any more"):
        run(guests, "/bin/sh", "-c", f"kill -9 {guest.agent.pid}; sleep 1000")


@CONTROL_OPERATIONS
def test_the_end_of_the_job_ends_the_check(
    alike: Callable[[int], list[RunningGuest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "ASK_S", 0.1)
    began = time.monotonic()
    settings = Guests(check=("/bin/sleep", "1000"), check_timeout_s=600)
    checks = check.run(settings, lease(), alike(1), ENV)
    next(checks)
    with pytest.raises(Stopped):
        checks.throw(Stopped("generation 42.0.89abcdef was ended"))
    assert time.monotonic() - began < 60
