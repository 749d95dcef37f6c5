# SPDX-License-Identifier: Apache-2.0
"""vhpcd and a client whose versions of the protocol are neighbours, each in a process of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from controller_lab import HAVE_MUNGED, Munged, allocation, request, stop
from vhpcd_process import SOURCES, Vhpcd, make

from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api import versions
from vhpc_slurm.controller.api.versions import Added
from vhpc_slurm.errors import FabricError

pytestmark = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
NEWER = versions.VERSION + 1
DISK = Added(NEWER, "lease", ("lease", "request", "disk_mib"))


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    found = make(tmp_path, daemon, request_timeout_s=10)
    yield found
    if found.process is not None:
        stop(found.process)


def of_version(vhpcd: Vhpcd, oldest: int) -> Vhpcd:
    """The same vhpcd, run by a copy of the package that has a newer protocol."""
    folder = vhpcd.folder / "newer"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    module = folder / "vhpc_slurm/controller/api/versions.py"
    text = module.read_text()
    for before, after in (
        (f"\nVERSION = {versions.VERSION}\n", f"\nVERSION = {NEWER}\n"),
        (f"\nOLDEST = {versions.OLDEST}\n", f"\nOLDEST = {oldest}\n"),
        ("\nADDED: tuple[Added, ...] = ()\n", f"\nADDED: tuple[Added, ...] = ({DISK!r},)\n"),
    ):
        assert before in text
        text = text.replace(before, after)
    module.write_text(text)
    return Vhpcd(vhpcd.folder, vhpcd.config, environment=vhpcd.environment | {"PYTHONPATH": str(folder)})


@pytest.mark.promise("protocol.versions")
def test_a_newer_vhpcd_answers_in_the_version_of_the_client(vhpcd: Vhpcd) -> None:
    newer = of_version(vhpcd, versions.VERSION).start()
    try:
        assert newer.client.status().protocol == NEWER
        lease = newer.client.open_generation(request(7), allocation())
        assert newer.client.lease(7, 0, "n1", 1.0) == lease
        # what this client would ignore: the job gets no lease that it cannot keep
        with pytest.raises(FabricError, match=r"does not know lease.request.disk_mib.*'512'") as raised:
            newer.client.open_generation(replace(request(8), disk_mib=512), allocation())
        assert "upgrade vhpc on all hosts" in raised.value.hint
    finally:
        newer.stop()


@pytest.mark.promise("protocol.versions")
def test_a_newer_client_speaks_the_version_of_vhpcd(vhpcd: Vhpcd, monkeypatch: pytest.MonkeyPatch) -> None:
    vhpcd.start()
    monkeypatch.setattr(versions, "VERSION", NEWER)
    monkeypatch.setattr(wire, "VERSION", NEWER)
    client = vhpcd.client
    assert client.status().protocol == NEWER - 1
    assert client.open_generation(request(7), allocation()).request.job_id == 7
    added = Added(NEWER, "open", ("request", "disk_mib"))
    monkeypatch.setattr(versions, "ADDED", (added,))
    with pytest.raises(FabricError, match=r"does not know request\.disk_mib"):
        client.open_generation(replace(request(8), disk_mib=512), allocation())


def test_distant_versions_get_one_line(vhpcd: Vhpcd) -> None:
    newer = of_version(vhpcd, NEWER).start()
    try:
        with pytest.raises(FabricError, match=f"does not speak protocol {NEWER - 1}") as raised:
            newer.client.status()
        assert raised.value.why.endswith(f"speaks protocol {NEWER}")
        assert raised.value.hint == "install one version of vhpc on all hosts"
    finally:
        newer.stop()


def test_newer_fields_are_left_out_or_stop_the_message() -> None:
    added = (
        Added(NEWER, "leases", ("records", versions.EACH, "lease", "colour")),
        Added(NEWER, "leases", ("weather",), needed=False),
        Added(NEWER, "status", ("uptime",), needed=False),
    )
    page = {
        "type": "leases",
        "records": [
            {"lease": {"id": 1, "colour": None}},
            {"lease": {"id": 2, "colour": ""}},
            {"lease": None},
        ],
        "weather": "fine",
        "uptime": 1,
    }
    raw = msgspec.json.encode(page)
    assert msgspec.json.decode(versions.rewrite(raw, NEWER - 1, added)) == {
        "type": "leases",
        "records": [{"lease": {"id": 1}}, {"lease": {"id": 2}}, {"lease": None}],
        "uptime": 1,
    }
    assert msgspec.json.decode(versions.rewrite(raw, NEWER, added)) == page
    red = msgspec.json.encode({"type": "leases", "records": [{"lease": {"colour": "red"}}]})
    with pytest.raises(FabricError, match=r"records.\*.lease.colour.*'red'"):
        versions.rewrite(red, NEWER - 1, added)


@pytest.mark.promise("disk.mount")
@pytest.mark.parametrize("tag", ["open", "lease", "leases"])
def test_a_peer_that_ignores_mount_points_gets_no_job_with_one(tag: str) -> None:
    """It would put the disk below the root; a list only shows the job.

    As if the next version had added the mount point of a disk.
    """
    paths = {
        "open": ("request",),
        "lease": ("lease", "request"),
        "leases": ("records", versions.EACH, "lease", "request"),
    }
    added = (Added(NEWER, tag, (*paths[tag], "disk_mount"), needed=tag != "leases"),)

    def as_sent(mount: str) -> bytes:
        asked = {"request": {"disk_mib": 64, "disk_mount": mount}}
        bodies: dict[str, dict[str, Any]] = {
            "open": asked,
            "lease": {"lease": asked},
            "leases": {"records": [{"lease": asked}]},
        }
        return msgspec.json.encode({"type": tag, **bodies[tag]})

    assert b"disk_mount" not in versions.rewrite(as_sent(""), NEWER - 1, added)
    assert b"disk_mount" in versions.rewrite(as_sent("/scratch"), NEWER, added)
    if tag == "leases":
        assert b"disk_mount" not in versions.rewrite(as_sent("/scratch"), NEWER - 1, added)
        return
    with pytest.raises(FabricError, match=r"does not know (lease\.)?request\.disk_mount.*'/scratch'"):
        versions.rewrite(as_sent("/scratch"), NEWER - 1, added)


def test_a_vhpcd_never_answers_in_an_unknown_version(vhpcd: Vhpcd) -> None:
    vhpcd.start()
    fields = {"message": "request", "version": 99, "nonce": os.urandom(16).hex(), "body": {"type": "status"}}
    frame = vhpcd.munge().encode(msgspec.json.encode(fields))
    answer = vhpcd.raw(len(frame).to_bytes(4, "big") + frame, end=False)
    envelope = wire.unwrap(vhpcd.munge().decode(answer[4:]).payload, "answer")
    assert envelope.version == versions.VERSION
