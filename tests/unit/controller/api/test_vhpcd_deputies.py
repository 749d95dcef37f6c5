# SPDX-License-Identifier: Apache-2.0
"""A web server asks vhpcd for its users: it gets what these users see, and can do nothing else."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from controller_lab import HAVE_MUNGED, NOBODY, ChildError, Munged, allocation, as_uid, request, stop
from vhpcd_process import Vhpcd, make

from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api import useraccess
from vhpc_slurm.controller.api.protocol import LeasePage
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import UserError

pytestmark = pytest.mark.skipif(
    not HAVE_MUNGED or os.geteuid() != 0, reason="needs munged (apt install munge), and root to become users"
)
OWNER, WEB = pwd.getpwnam("games").pw_uid, pwd.getpwnam("www-data").pw_uid


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    tmp_path.chmod(0o755)
    found = make(tmp_path, daemon)
    path = tmp_path / "vhpc.toml"
    path.write_text(path.read_text().replace('web_user = ""', 'web_user = "www-data"'))
    sacctmgr = tmp_path / "bin/sacctmgr"
    sacctmgr.write_text("#!/bin/sh\ncase \"$*\" in *nobody*) echo 'nobody|Operator|';; esac\n")
    sacctmgr.chmod(0o755)
    yield found.start()
    if found.process is not None:
        stop(found.process)


def opened(vhpcd: Vhpcd, job_id: int, user: str) -> None:
    owner = pwd.getpwnam(user)
    job = request(job_id, uid=owner.pw_uid, user=user, account="")
    vhpcd.client.open_generation(job, allocation())


def jobs_of(vhpcd: Vhpcd, uid: int, asker: int = WEB) -> list[int]:
    """The jobs that vhpcd lists to ``asker``, who asks for ``uid``."""
    client = ControllerClient(vhpcd.config, as_uid=uid)
    found = as_uid(asker, lambda: client.leases(timelines=False))
    return [record.lease.generation.job_id for record in found]


def test_a_deputy_sees_the_same_as_each_user(vhpcd: Vhpcd) -> None:
    for job_id, user in ((42, "games"), (43, "nobody"), (44, "games")):
        opened(vhpcd, job_id, user)
    assert jobs_of(vhpcd, OWNER) == [42, 44]
    assert jobs_of(vhpcd, pwd.getpwnam("bin").pw_uid) == []
    assert jobs_of(vhpcd, NOBODY) == [42, 43, 44], "Slurm says that nobody is an operator"
    assert jobs_of(vhpcd, OWNER, asker=0) == [42, 44], "root may ask for others, too"
    client = vhpcd.client
    assert as_uid(WEB, client.leases) == [], "by itself it is an ordinary user"


def test_reports_and_usage_of_others_stay_hidden(vhpcd: Vhpcd) -> None:
    opened(vhpcd, 42, "games")
    client = ControllerClient(vhpcd.config, as_uid=pwd.getpwnam("bin").pw_uid)
    assert as_uid(WEB, lambda: client.reports(42)) == []
    assert as_uid(WEB, lambda: client.leases(job_id=42)) == []
    with pytest.raises(ChildError, match="no job 42 of yours"):
        as_uid(WEB, lambda: client.usage(42))


@pytest.mark.promise("attack.deputy")
@pytest.mark.parametrize("asker", [OWNER, NOBODY])
def test_no_other_user_asks_for_others(vhpcd: Vhpcd, asker: int) -> None:
    opened(vhpcd, 42, "games")
    with pytest.raises(ChildError, match=f"refuses uid {asker}"):
        jobs_of(vhpcd, OWNER, asker)


@pytest.mark.promise("attack.deputy")
@pytest.mark.parametrize("body", [wire.AskStatus(), wire.Fence(node="n1"), wire.TellFabric()])
def test_a_deputy_sends_nothing_else(vhpcd: Vhpcd, body: wire.Request) -> None:
    client = vhpcd.client
    with pytest.raises(ChildError, match=f"refuses uid {WEB}"):
        as_uid(WEB, lambda: client._ask(body, wire.Done))
    wrapped = msgspec.json.encode({"type": "as-user", "uid": 0, "request": msgspec.to_builtins(body)})
    with pytest.raises(ValueError, match=r"[Ii]nvalid value") as caught:
        wire.read_request(wire.Envelope("request", wire.VERSION, "0" * 32, msgspec.Raw(wrapped)))
    assert not isinstance(caught.value, msgspec.MsgspecError), "no ValueError in Debian 13's msgspec"


@pytest.mark.promise("attack.web-load")
def test_each_user_of_a_deputy_has_a_rate(vhpcd: Vhpcd) -> None:
    opened(vhpcd, 42, "games")
    client = ControllerClient(vhpcd.config, as_uid=OWNER)

    def flood() -> str:
        for _ in range(int(useraccess.BURST) * 3):
            try:
                client.leases(job_id=42, timelines=False)
            except UserError as err:
                return err.what
        return ""

    assert as_uid(WEB, flood) == f"uid {OWNER} asks vhpcd too often"
    assert jobs_of(vhpcd, NOBODY) == [42], "other users are answered"
    own = vhpcd.client
    assert len(as_uid(OWNER, lambda: own.leases(timelines=False))) == 1, "and the user's own commands, too"


def test_the_newest_jobs_come_first_page_by_page(vhpcd: Vhpcd) -> None:
    for job_id in range(100, 131):
        opened(vhpcd, job_id, "games")
    client = ControllerClient(vhpcd.config, as_uid=OWNER)
    first = as_uid(WEB, client.newest)
    assert job_ids(first) == list(range(130, 105, -1))
    assert len(first.progress) == 25, "all of them boot"
    rest = as_uid(WEB, lambda: client.newest(first.more))
    assert (job_ids(rest), rest.more) == (list(range(105, 99, -1)), None)


def job_ids(page: LeasePage) -> list[int]:
    return [record.unpack().lease.generation.job_id for record in page.records]


def test_a_missing_web_user_is_reported_at_the_start(tmp_path: Path, daemon: Munged) -> None:
    found = make(tmp_path, daemon)
    path = tmp_path / "vhpc.toml"
    path.write_text(path.read_text().replace('web_user = ""', 'web_user = "no-such"'))
    process = found.spawn()
    _, said = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "there is no user 'no-such': controller.web_user of vhpc.toml names it" in said
