# SPDX-License-Identifier: Apache-2.0
"""The site's check of guests in a Prolog: what Slurm, vhpcd and the user are told."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from boot_rig import GENERATION, boot_layout
from prolog_rig import Node, prolog_node
from stepd import needs_root

from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.wire_types import ReadyState
from vhpc_slurm.errors import FabricError, UserError, VhpcError
from vhpc_slurm.model import Generation, LeaseState, Resume
from vhpc_slurm.node.guest import check
from vhpc_slurm.node.store.layout import Layout

layout, node = boot_layout, prolog_node
pytestmark = needs_root

BAD = check.UnhealthyError(
    "the check of guest n1 failed", "exit code 226: GPU 3: FAIL", "/usr/bin/dcgmi diag"
)


@dataclass
class Checks:
    """The check of each start, and what vhpcd counts."""

    outcome: VhpcError | None = None
    lines: tuple[str, ...] = ()
    waits: int = 0
    calls: list[dict[str, str]] = field(default_factory=list)
    reported: list[tuple[str, tuple[str, str]]] = field(default_factory=list)
    failed_starts: int = 1
    silent: bool = False

    def run(
        self, _settings: Any, _lease: Any, _guests: Any, env: Any
    ) -> Generator[None, None, tuple[str, ...]]:
        self.calls.append(dict(env))
        for _ in range(self.waits):
            yield
        if self.outcome is not None:
            raise self.outcome
        return self.lines

    def ready(self, _generation: Any, node: str, state: str, **more: Any) -> ReadyState:
        if self.silent:
            raise FabricError("vhpcd does not answer")
        self.reported.append((f"{node} {state}", more["error"]))
        return ReadyState(over=False, failed_starts=self.failed_starts)


@pytest.fixture
def checks(node: Node, monkeypatch: pytest.MonkeyPatch) -> Checks:
    made = Checks()
    config = node.layout.config
    guests = msgspec.structs.replace(config.guests, check=("/usr/bin/dcgmi", "diag"))
    node.layout = Layout(msgspec.structs.replace(config, guests=guests))
    monkeypatch.setattr(check, "run", made.run)
    monkeypatch.setattr(ControllerClient, "ready", made.ready)
    return made


@pytest.mark.promise("check.before")
def test_the_job_starts_after_its_check(node: Node, checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.lines = ("guest n1 was not checked",)
    assert node.run() == 0
    assert node.state["status"] == "ready"
    (env,) = checks.calls
    assert (env["SLURM_JOB_ID"], env["SLURMD_NODENAME"], env["HOME"]) == ("42", "n1", "/root")
    assert "guest n1 was not checked" in node.reports[0].lines
    assert (node.drained, node.requeued, checks.reported) == ([], [], [])


@pytest.mark.promise("check.drain")
def test_a_failed_check_drains_the_node_and_requeues(node: Node, checks: Checks) -> None:
    checks.outcome = BAD
    assert node.run() == 0, "Slurm adds no reason of its own"
    assert node.drained == ["the check of guest n1 failed: exit code 226: GPU 3: FAIL (/usr/bin/dcgmi diag)"]
    assert node.requeued == [42]
    assert node.held == []
    assert checks.reported == [("n1 failed", ("fabric", node.drained[0]))]
    assert node.drained[0] in node.reports[0].lines


@pytest.mark.promise("check.once")
@pytest.mark.parametrize("silent", [False, True])
def test_a_second_failure_fails_the_job_and_drains_nothing(
    node: Node, checks: Checks, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if silent:
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    checks.outcome, checks.failed_starts, checks.silent = BAD, 2, silent
    assert node.run() == 0
    assert (node.drained, node.requeued) == ([], [])
    assert (node.state["status"], node.state["kind"]) == ("failed", "user")
    message = node.state["message"]
    assert message.startswith(
        "the check of guest n1 failed: exit code 226: GPU 3: FAIL (it failed in an earlier"
    )
    assert node.state["alarm"] == (
        "the check of guests failed in two starts of a job: exit code 226: GPU 3: FAIL"
    )
    assert node.held == ["rundir"]


def test_a_job_that_may_not_be_requeued_fails_with_the_line(node: Node, checks: Checks) -> None:
    checks.outcome, node.may_requeue = BAD, False
    assert node.run() == 0
    assert len(node.drained) == 1
    assert node.state["status"] == "failed"
    assert "GPU 3: FAIL" in node.state["message"]
    assert "the job may not be requeued: submit it again" in node.state["message"]


def test_a_fault_of_the_job_drains_nothing(node: Node, checks: Checks) -> None:
    checks.outcome = UserError("the check of guest n1 failed", "exit code 78: no driver")
    assert node.run() == 0
    assert node.state["message"].startswith("the check of guest n1 failed: exit code 78: no driver")
    assert "alarm" not in node.state
    assert (node.drained, node.requeued, checks.reported) == ([], [], [])


def test_a_job_that_ends_meanwhile_leaves_nothing(node: Node, checks: Checks) -> None:
    checks.waits = 1
    node.answers = [node.lease, replace(node.lease, state=LeaseState.ENDING)]
    assert node.run() == 0
    assert node.held == []
    assert (node.drained, node.requeued) == ([], [])


def test_restored_guests_are_not_checked(node: Node, checks: Checks) -> None:
    node.lease = replace(node.lease, resume=Resume(7, "ck", Generation(41, 0, "89abcdef"), (), bytes(32)))
    assert node.run() == 0
    assert checks.calls == []
    assert node.lease.generation == GENERATION


def test_the_check_needs_an_absolute_path() -> None:
    with pytest.raises(msgspec.ValidationError, match="absolute path"):
        msgspec.convert({"guests": {"check": ["dcgmi", "diag"]}}, Config)
