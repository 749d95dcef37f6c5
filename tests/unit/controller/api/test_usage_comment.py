# SPDX-License-Identifier: Apache-2.0
"""The sum of what a job has used in its AdminComment, and what `vhpc seff` shows."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
from controller_lab import allocation, identity, request

from pace import limit
from vhpc_slurm import slurm
from vhpc_slurm.cli import options
from vhpc_slurm.cli.jobs import seff
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.controller.api.usage_messages import SoFarWire, UsagePage
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.leases import rules
from vhpc_slurm.errors import FabricError, UserError, VhpcError
from vhpc_slurm.model import (
    Figures,
    Generation,
    GuestUsage,
    JobUsage,
    LeaseRecord,
    LeaseState,
    NetworkIdentity,
    NodeUsage,
    SharedIo,
    Stage,
    StepUsage,
    Timeline,
)
from vhpc_slurm.node.store import outbox
from vhpc_slurm.node.store.outbox import Acknowledgement
from vhpc_slurm.reconcile import acknowledging

G = Generation(7, 0, "0123abcd")
IMAGE = f"vhpc: image debian:latest@sha256:{'a' * 64}"
WHOLE = Figures(
    cpu_us=6_020_000, user_us=5_900_000, system_us=120_000, peak_bytes=220_200_960, rss_bytes=110_000_000
)
STEPS = (StepUsage("batch", WHOLE, 1), StepUsage("0", Figures(oom_kills=2), 2))
GUEST = GuestUsage(0, WHOLE, STEPS, 1 << 20, shared=SharedIo(1572864, 3145728))
NODES = (NodeUsage(G, "n1", (GUEST,)), NodeUsage(G, "n2", (GuestUsage(0, missing="the guest had ended"),)))
WORDS = (
    "usage cpu_s=6.02 user_s=5.90 system_s=0.12 peak_bytes=220200960 "
    "largest_process_bytes=110000000 shared_read_bytes=1572864 shared_written_bytes=3145728 guests=1/2"
)


@pytest.fixture
def site(tmp_path: Path) -> Config:
    """Stand-ins for sacct, which prints the file `sacct.out`, and sacctmgr; their calls are noted."""
    for command in ("sacct", "sacctmgr"):
        path = tmp_path / command
        path.write_text(
            f'#!/bin/sh\necho "{command} $*" >> {tmp_path}/calls\n'
            f"cat {tmp_path}/{command}.out 2>/dev/null || true\n"
        )
        path.chmod(0o755)
    return Config(controller=Controller(slurm_bin=str(tmp_path)))


def record(tmp_path: Path, *rows: str) -> None:
    (tmp_path / "sacct.out").write_text("".join(f"{row}\n" for row in rows))


def changes(tmp_path: Path) -> list[str]:
    lines = (tmp_path / "calls").read_text().splitlines()
    return [line for line in lines if line.startswith("sacctmgr")]


@dataclass
class Vhpcd(ControllerClient):
    """A client without a vhpcd: it notes what it is told, in order."""

    complete: bool = True
    refuses: bool = False
    told: list[object] = field(default_factory=list)
    known: list[LeaseRecord] = field(default_factory=list)

    def report_usage(self, usage: NodeUsage) -> bool:
        if self.refuses:
            raise FabricError("vhpcd cannot read the request")
        self.told.append(usage)
        return self.complete

    def acknowledge(self, ack: object) -> None:
        self.told.append(ack)

    def report_and_acknowledge(self, usage: NodeUsage, ack: object) -> bool | VhpcError:
        if self.refuses:
            self.told.append(ack)
            return FabricError("vhpcd cannot read the request")
        self.told += [usage, ack]
        return self.complete

    def usage(self, job_id: int, *, so_far: bool = False) -> tuple[UsagePage, tuple[NodeUsage, ...]]:
        assert (job_id, so_far) == (7, False), "the comment has the figures of the end only"
        page = UsagePage(
            generation=str(G), user="alice", state=LeaseState.RELEASED, nodes=2, memory_mib=4096,
            taken=2, reported=(), more=None,
        )  # fmt: skip
        return page, NODES

    def leases(self, **_: object) -> list[LeaseRecord]:
        return self.known


def booted(*nodes: str, seconds: float = 4.26) -> LeaseRecord:
    """The lease of a job on n1 and n2 whose nodes, except those named, have booted; n2 has a slow clock."""
    lines = [
        Timeline(G, "n1", (Stage("plan", 100.0, 100.1), Stage("setup g0", 101.0, 102.0))),
        Timeline(G, "n2", (Stage("plan", 50.0, 50.1), Stage("setup g0", 51.0, 50.0 + seconds))),
    ]
    found = rules.reserve(G, request(7), allocation("n1", "n2"), identity(), NetworkIdentity(), 1.0)
    kept = tuple(line for line in lines if line.node not in nodes)
    return replace(found, taken=("n1", "n2"), timelines=kept)


ACK = Acknowledgement(G, "n2", clean=True, usage=NODES[1])


def deliver(site: Config, vhpcd: Vhpcd, folder: Path, *acks: Acknowledgement) -> None:
    for ack in acks:
        outbox.put(folder / "outbox", ack)
    assert acknowledging.deliver(site, vhpcd, folder / "outbox") == 0
    assert outbox.pending(folder / "outbox") == []


# --- AdminComment -------------------------------------------------------------------


@pytest.mark.promise("usage.seff")
def test_the_last_node_appends_the_sum_to_the_comment(site: Config, tmp_path: Path) -> None:
    there = f"{IMAGE}; a console could not be written: |x|"
    record(tmp_path, f"7|7|COMPLETED|12|4|alice|{there}")
    vhpcd = Vhpcd()
    deliver(site, vhpcd, tmp_path, ACK)
    assert vhpcd.told == [NODES[1], ACK]
    assert changes(tmp_path) == [f"sacctmgr -i modify job where jobid=7 set AdminComment={there}; {WORDS}"]


@pytest.mark.parametrize(
    ("known", "more"),
    [
        ([booted()], " boot_s=4.3"),
        ([booted("n2")], ""),
        ([booted("n1", "n2")], ""),
        ([replace(booted(), taken=())], ""),
    ],
    ids=["slowest", "one-failed", "none", "no-node"],
)
def test_the_comment_has_the_boot_of_the_slowest_node(
    site: Config, tmp_path: Path, known: list[LeaseRecord], more: str
) -> None:
    record(tmp_path, f"7|7|COMPLETED|12|4|alice|{IMAGE}")
    deliver(site, Vhpcd(known=known), tmp_path, ACK)
    assert changes(tmp_path) == [
        f"sacctmgr -i modify job where jobid=7 set AdminComment={IMAGE}; {WORDS}{more}"
    ]


@pytest.mark.parametrize("vhpcd", [Vhpcd(complete=False), Vhpcd(refuses=True)], ids=["others", "refused"])
def test_a_node_that_is_not_the_last_changes_no_comment(
    site: Config, tmp_path: Path, vhpcd: Vhpcd, caplog: pytest.LogCaptureFixture
) -> None:
    """And a vhpcd that knows no reports still gets the acknowledgement."""
    deliver(site, vhpcd, tmp_path, ACK)
    assert vhpcd.told[-1] == ACK
    assert not (tmp_path / "calls").exists()
    assert ("job 7 has used is not reported" in caplog.text) == vhpcd.refuses


def test_comments_wait_for_no_acknowledgement(
    site: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a comment waits for accounting, nothing that vhpcd has received is left in the outbox."""
    seen: list[list[Path]] = []
    monkeypatch.setattr(
        acknowledging, "_comment", lambda *_: seen.append(outbox.pending(tmp_path / "outbox"))
    )
    later = Acknowledgement(Generation(8, 0, "0123abcd"), "n2", clean=True)
    deliver(site, Vhpcd(), tmp_path, ACK, later)
    assert seen == [[]]


def test_a_hook_that_holds_a_node_does_not_wait_for_accounting(site: Config, tmp_path: Path) -> None:
    go, sacct = tmp_path / "go", tmp_path / "sacct"
    record(tmp_path, f"7|7|COMPLETED|12|4|alice|{IMAGE}")
    waiting = f"#!/bin/sh\nwhile [ ! -e {go} ]; do sleep 0.02; done\n"
    sacct.write_text(sacct.read_text().replace("#!/bin/sh\n", waiting))
    outbox.put(tmp_path / "outbox", ACK)
    assert acknowledging.deliver(site, Vhpcd(), tmp_path / "outbox", hold=False) == 0
    assert outbox.pending(tmp_path / "outbox") == []
    assert not (tmp_path / "calls").exists()
    go.touch()
    end = time.monotonic() + limit(30)
    while not (tmp_path / "calls").exists() or not changes(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert changes(tmp_path) == [f"sacctmgr -i modify job where jobid=7 set AdminComment={IMAGE}; {WORDS}"]


def test_without_guests_there_is_nothing_to_report(site: Config, tmp_path: Path) -> None:
    vhpcd = Vhpcd()
    plain = Acknowledgement(G, "n2", clean=True)
    deliver(site, vhpcd, tmp_path, plain)
    assert vhpcd.told == [plain]


def test_only_the_job_itself_gets_the_comment(site: Config, tmp_path: Path) -> None:
    """sacct and sacctmgr apply the id of an array's last task to the whole array."""
    rows = ("6|7_0|COMPLETED|1|1|alice|", "7|7_1|FAILED|1|1|alice|vhpc: x", "8|7_2|COMPLETED|1|1|alice|")
    record(tmp_path, *rows)
    deliver(site, Vhpcd(), tmp_path, ACK)
    assert changes(tmp_path) == [f"sacctmgr -i modify job where jobid=7_1 set AdminComment=vhpc: x; {WORDS}"]


@pytest.mark.parametrize("row", ["7|7|REQUEUED|0|1|alice|", "7|7|RUNNING|5|1|alice|", ""])
def test_a_record_without_an_end_is_not_changed(
    site: Config, tmp_path: Path, row: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vhpc")
    monkeypatch.setattr(acknowledging, "RECORD_S", 0.1)
    record(tmp_path, row)
    vhpcd = Vhpcd()
    deliver(site, vhpcd, tmp_path, ACK)
    assert vhpcd.told[-1] == ACK
    assert changes(tmp_path) == []
    assert "the accounting database does not have its end" in caplog.text


def test_an_accounting_that_fails_is_asked_once(
    site: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vhpc")
    # as sacct 24.11 prints it
    (tmp_path / "sacct").write_text(
        f"#!/bin/sh\necho sacct >> {tmp_path}/calls\n"
        "echo 'Slurm accounting storage is disabled' >&2\nexit 1\n"
    )
    vhpcd = Vhpcd()
    other = Generation(8, 0, "0123abcd")
    acks = (ACK, Acknowledgement(other, "n2", clean=True, usage=replace(NODES[1], generation=other)))
    deliver(site, vhpcd, tmp_path, *acks)
    assert [one for one in vhpcd.told if isinstance(one, Acknowledgement)] == list(acks)
    assert (tmp_path / "calls").read_text() == "sacct\n"
    assert "AdminComment of job 7 has no usage: sacct" in caplog.text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "vhpc: usage guests=0/0"),
        ("vhpc: image x", "vhpc: image x; usage guests=0/0"),
        ("vhpc: image x; usage cpu_s=1.00 guests=1/1 boot_s=2.5", "vhpc: image x; usage guests=0/0"),
        ("vhpc: usage cpu_s=1.00 guests=1/1", "vhpc: usage guests=0/0"),
        ("an operator's words", "an operator's words"),
        ('vhpc: image x // {"class": 7}', 'vhpc: image x // {"class": 7}'),
        ("JS1:" + "H4sI" * 1000, "JS1:" + "H4sI" * 1000),
        ("vhpc:" + "y" * 5000, "vhpc:" + "y" * 1001 + "; usage guests=0/0"),
    ],
    ids=["none", "image", "again", "again-alone", "other", "beside", "statistics", "long"],
)
def test_figures_replace_earlier_ones_and_nothing_else(before: str, after: str) -> None:
    words = acknowledging.words(JobUsage(Figures(), (), 0))
    assert acknowledging.with_usage(before, words) == after
    assert len(after) <= max(1024, len(before) if before == after else 0)


# --- vhpc seff ----------------------------------------------------------------------


@pytest.fixture
def asked(site: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(ControllerClient, "usage", lambda _, job_id, **__: Vhpcd().usage(job_id))
    monkeypatch.setattr(options, "config", lambda: site)
    return site


def test_seff_compares_usage_with_the_request(
    asked: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, "7|7|COMPLETED|12|4|alice|")
    assert seff.seff(7) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = dict(line.split("  ", 1) for line in lines[:12])
    shown = {name: value.strip() for name, value in facts.items()}
    assert shown["CPU Efficiency"] == "12.54% of 00:00:48.00 core-walltime"
    assert shown["CPU Utilized"] == "00:00:06.02 (user 00:00:05.90, system 00:00:00.12)"
    assert shown["Memory Efficiency"] == "5.13% of 4.0 GiB"
    assert shown["Nodes"] == "2 (1 of 2 guests have figures)"
    assert (shown["Figures"], shown["Shared folders"]) == ("in all", "read 1.5 MiB, written 3.0 MiB")
    rows = [line.split() for line in lines if line.startswith(("batch", "0 "))]
    assert rows[0][:3] == ["batch", "1", "00:00:06.02"]
    assert rows[1] == ["0", "2", *["-"] * 7, "2"]
    assert lines[-1] == "no figures of guest 0 on n2: the guest had ended"


def test_core_time_of_a_running_job_ends_with_its_figures(
    site: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten minutes on two nodes; one was measured now and one 4 minutes ago: 16 node-minutes."""
    record(tmp_path, "7|7|RUNNING|600|4|alice|")
    so_far = tuple(
        SoFarWire(node=node, age_s=age_s, guests=(GuestUsage(0, Figures(cpu_us=480_000_000)),))
        for node, age_s in (("n1", 0.0), ("n2", 240.0))
    )
    page = msgspec.structs.replace(Vhpcd().usage(7)[0], so_far=so_far)
    monkeypatch.setattr(ControllerClient, "usage", lambda *_, **__: (page, ()))
    monkeypatch.setattr(options, "config", lambda: site)
    assert seff.seff(7) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "State RUNNING Figures so far, 4m00s ago" in text
    assert "CPU Efficiency 50.00% of 00:32:00.00 core-walltime" in text


def test_seff_prints_json(asked: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path)
    assert seff.seff(7, as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["total"]["cpu_us"] == 6_020_000
    assert shown["total"]["read_bytes"] is None
    assert shown["cpu_efficiency_percent"] is None
    assert [step["step"] for step in shown["steps"]] == ["batch", "0"]
    assert [guest["missing"] for guest in shown["guests"]] == [None, "the guest had ended"]
    shared = {"read_bytes": 1572864, "written_bytes": 3145728}
    assert [guest["shared_folders"] for guest in shown["guests"]] == [shared, None]
    assert (shown["shared_folders"], shown["so_far"]) == (shared, None)


def test_seff_says_when_nodes_report(site: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControllerClient, "usage", lambda *_, **__: (Vhpcd().usage(7)[0], ()))
    monkeypatch.setattr(options, "config", lambda: site)
    with pytest.raises(
        UserError, match="no node has reported what job 7 has used: nodes report in each health check"
    ):
        seff.seff(7)


def test_an_invalid_row_of_sacct_is_an_error(site: Config, tmp_path: Path) -> None:
    record(tmp_path, "7|7|COMPLETED|x|4|alice|")
    with pytest.raises(FabricError, match="cannot read sacct's record of job 7"):
        slurm.accounting(site).job(7)
    record(
        tmp_path, "7|7; rm|COMPLETED|1|4|alice|", "70|7|COMPLETED|1|4|alice|", "7|7|CANCELLED by 0|1|4|alice|"
    )
    found = slurm.accounting(site).job(7)
    assert found is not None
    assert (found.name, found.state, found.ended) == ("7", "CANCELLED", True)
