# SPDX-License-Identifier: Apache-2.0
"""vhpc cluster: what it asks vhpcd for, and what it prints."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from vhpc_slurm.cli import leases, options
from vhpc_slurm.cli.main import main
from vhpc_slurm.config import Config
from vhpc_slurm.model import Cluster, ClusterJob, ClusterMember, Generation, Segment, SegmentPart

ME = pwd.getpwuid(os.geteuid()).pw_name
DASK = Cluster(7, "dask", os.geteuid(), 1_700_000_000.0, jobs=2, guests=5)
KEPT = Cluster(8, "later", os.geteuid(), 1_700_000_000.0, kept=True)
OTHERS = Cluster(9, "dask", 1, 1_700_000_000.0, jobs=1, guests=1)


def job(job_id: int, first: int, *nodes: str, gone: tuple[int, ...] = (), joined: bool = True) -> ClusterJob:
    generation = Generation(job_id, 0, "0123abcd")
    segment = Segment(5000 + job_id, "10.200.0.0/16", "fd76:6870:6300::/64", 7634, 0, (), first=first)
    part = SegmentPart(generation, nodes, (2,) * len(nodes), 2)
    return ClusterJob(ClusterMember(generation, segment, (part,), gone=gone), joined)


@dataclass
class Vhpcd:
    """A vhpcd that knows these clusters."""

    known: tuple[Cluster, ...] = (DASK, KEPT)
    asked: list[object] = field(default_factory=list)

    def clusters(self) -> tuple[Cluster, ...]:
        return self.known

    def cluster_jobs(self, serial: int) -> tuple[ClusterJob, ...]:
        self.asked.append(("jobs", serial))
        return (job(1000, 0, "n1", "n2", gone=(1,)), job(1001, 300, "n3", joined=False))

    def keep_cluster(self, name: str, for_s: float | None) -> Cluster:
        self.asked.append((name, for_s))
        return KEPT

    def remove_cluster(self, serial: int) -> Cluster:
        self.asked.append(serial)
        return KEPT


Serve = Callable[[Vhpcd], Vhpcd]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """A function that lets the commands ask this vhpcd."""
    monkeypatch.setattr(options, "config", Config)

    def ask(vhpcd: Vhpcd) -> Vhpcd:
        monkeypatch.setattr(leases, "client", lambda _: vhpcd)
        return vhpcd

    return ask


def test_the_list_has_clusters_with_jobs(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serve(Vhpcd())
    assert main(["cluster", "ls"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "USER", "JOBS", "GUESTS", "CREATED", "KEPT"]
    assert line.split()[:4] == ["dask", ME, "2", "5"]
    assert main(["cluster", "ls", "--all"]) == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert (last[0], last[-2:]) == ("later", ["until", "rm"])
    assert main(["cluster", "ls", "--all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["kept"], one["until"]) for one in found] == [
        ("dask", False, None),
        ("later", True, None),
    ]


def test_members_have_addresses_of_their_guests(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    vhpcd = serve(Vhpcd())
    assert main(["cluster", "show", "dask"]) == 0
    assert vhpcd.asked == [("jobs", 7)]
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.split()[:7] == ["1000", ME, "joined", "n[1-2]", "10.200.0.1", "to", "10.200.0.4"]
    assert second.split()[:7] == ["1001", ME, "booting", "n3", "10.200.1.45", "to", "10.200.1.46"]
    assert main(["cluster", "show", "dask", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["members"][0]["guests"] == [
        {"host": "n1-g0-j1000", "ipv4": "10.200.0.1", "ipv6": "fd76:6870:6300::1"},
        {"host": "n2-g0-j1000", "ipv4": "10.200.0.3", "ipv6": "fd76:6870:6300::3"},
        {"host": "n2-g1-j1000", "ipv4": "10.200.0.4", "ipv6": "fd76:6870:6300::4"},
    ]
    assert (found["members"][1]["job"], found["members"][1]["state"]) == (1001, "booting")


def test_a_cluster_of_an_account_has_jobs_of_several_users(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    class Shared(Vhpcd):
        def cluster_jobs(self, serial: int) -> tuple[ClusterJob, ...]:
            return tuple(
                replace(one, uid=uid) for one, uid in zip(super().cluster_jobs(serial), (0, 1), strict=True)
            )

    serve(Shared((replace(DASK, name="physics/dask"), DASK)))
    assert main(["cluster", "show", "physics/dask"]) == 0
    users = [pwd.getpwuid(uid).pw_name for uid in (0, 1)]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[-2:]] == users
    assert main(["cluster", "show", "physics/dask", "--json"]) == 0
    assert [one["user"] for one in json.loads(capsys.readouterr().out)["members"]] == users


def test_a_name_can_be_kept_and_removed(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    vhpcd = serve(Vhpcd())
    assert main(["cluster", "create", "later"]) == 0
    assert main(["cluster", "create", "later", "--for", "12h"]) == 0
    assert main(["cluster", "rm", "later"]) == 0
    assert vhpcd.asked == [("later", None), ("later", 43200.0), 8]
    assert capsys.readouterr().out == ""


def test_mistakes_are_one_line(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serve(Vhpcd((DASK, OTHERS)))
    for words, said in (
        (("rm", "ray"), "vhpc: there is no cluster 'ray' (see: vhpc cluster ls --all)\n"),
        (("create", "a", "--for", "soon"), "vhpc: 'soon' is not a time: minutes (30m), hours (12h) or days"),
        (("show", "dask"), f"vhpc: 2 users have a cluster 'dask': {ME}, "),
    ):
        assert main(["cluster", *words]) == 1
        assert capsys.readouterr().err.startswith(said)
    assert main(["cluster", "show", "dask", "--user", ME]) == 0
