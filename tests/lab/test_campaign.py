# SPDX-License-Identifier: Apache-2.0
"""Random jobs and random faults: every end is explained, nothing is left, users' mistakes drain no node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from campaign import report
from campaign.attack import Attacks, Start
from campaign.faults import FAULTS, JOB
from campaign.findings import carry_out
from campaign.judge import End, differs, drained_by, judge, touches, without_processes
from campaign.kinds import KINDS
from campaign.plan import Plan, PlannedFault, PlannedJob, draw
from campaign.record import Injected, Submitted
from campaign.watch import Seen, Track, Trouble, exit_code, node_names
from cluster import ROOT, Lab

pytestmark = pytest.mark.lab

LONG = (300, 100)


def run(lab: Lab, plan: Plan, file: Path) -> None:
    record, found = carry_out(lab, plan)
    text = report.markdown(plan, record, found)
    print(text)
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    assert found.passed, text


@pytest.mark.promise("campaign.short")
@pytest.mark.timeout(2400)
def test_a_short_campaign_leaves_nothing_unexplained(lab: Lab, tmp_path: Path) -> None:
    run(lab, draw(1, 20, 8, short=True), tmp_path / "campaign.md")


@pytest.mark.promise("campaign.long")
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_long_campaign_leaves_nothing_unexplained(lab: Lab) -> None:
    run(lab, draw(1, *LONG), ROOT / "build/campaign.md")


@pytest.mark.promise("campaign.attacked")
@pytest.mark.slow
@pytest.mark.timeout(9000)
def test_an_attacker_harms_no_other_user_in_a_long_campaign(lab: Lab) -> None:
    run(lab, draw(3, *LONG, attacked=True), ROOT / "build/campaign-attacked.md")


# --- of the campaign itself: it must be able to find something -------------------------------


@pytest.mark.vlab_itself
def test_a_seed_gives_one_plan_and_a_long_one_holds_every_kind() -> None:
    plan = draw(7, *LONG)
    assert plan == draw(7, *LONG)
    assert plan.jobs != draw(8, *LONG).jobs
    assert {job.kind for job in plan.jobs} == set(KINDS)
    others = plan.without_nat().jobs
    assert {KINDS[job.kind] for job in others} == {
        kind for kind in KINDS.values() if "nat" not in str(kind.options)
    }
    assert len(others) == len(plan.jobs)
    assert {fault.kind for fault in plan.faults} == set(FAULTS)
    assert {job.kind for job in plan.without_pmix().jobs} == set(KINDS) - {"pmix"}


@pytest.mark.vlab_itself
def test_a_light_campaign_needs_no_guest_and_spares_daemons() -> None:
    plan = draw(7, 900, 300, light=True)
    assert {job.kind for job in plan.jobs} == {name for name, kind in KINDS.items() if not kind.needs_guest}
    assert {fault.kind for fault in plan.faults} == {
        name for name, fault in FAULTS.items() if not fault.needs_guest
    }
    enders = [fault for fault in plan.faults if FAULTS[fault.kind].ends_daemon]
    assert len(enders) == 50
    assert max(fault.after for fault in enders) < 300
    assert [fault.after for fault in plan.faults] == sorted(fault.after for fault in plan.faults)
    # what would power off or crash this machine without a guest around it
    assert not {"powers-off", "panics"} & {job.kind for job in plan.jobs}


@pytest.mark.vlab_itself
def test_an_attacked_campaign_judges_the_other_user_alone() -> None:
    assert {job.user for job in draw(7, *LONG).jobs} == {"alice", "bob"}
    assert {job.user for job in draw(7, *LONG, attacked=True).jobs} == {"bob"}


@pytest.mark.vlab_itself
def test_a_start_that_takes_seconds_longer_was_delayed() -> None:
    usual = [Start(number, 0.4, attacked=False) for number in range(9)]
    slow, fair = Start(10, 6.0, attacked=True), Start(11, 2.0, attacked=True)
    assert Attacks(starts=[*usual, slow, fair]).delayed == [slow]
    assert Attacks().delayed == []


def seen(state: str, code: str = "0:0", at: float = 100.0, nodes: tuple[str, ...] = ("n1",)) -> Seen:
    return Seen(at, 5, state, 0, code, nodes, "")


def ended(kind: str, state: str, code: str, output: str) -> End:
    track = Track([seen("RUNNING"), seen(state, code, 110.0)], 110.0)
    end = End(f"c000-{kind}.0", KINDS[kind], track, output, "", ("", ""))
    return replace(end, wrong=differs(end))


def injected(kind: str, begin: float, end: float, node: str = "n1") -> Injected:
    return Injected(PlannedFault(0, kind, 0, 0, 0, 0, 0), begin, end, node)


JOB_5 = Submitted(PlannedJob(0, "script", "alice", 0, 0), 99.0, 5)
NOBODY: frozenset[int] = frozenset()


@pytest.mark.vlab_itself
def test_exit_codes_of_every_release_are_read_alike() -> None:
    assert [exit_code(text) for text in ("0:0", "7:0", "0:9")] == ["0:0", "7:0", "0:9"]
    assert [exit_code(text) for text in ("0", "1792", "9")] == ["0:0", "7:0", "0:9"]


@pytest.mark.vlab_itself
def test_lists_of_nodes_are_read_as_squeue_prints_them() -> None:
    assert node_names("") == ()
    assert node_names("n3") == ("n3",)
    assert node_names("n[1-2]") == ("n1", "n2")
    assert node_names("n[2,4-6]") == ("n2", "n4", "n5", "n6")


@pytest.mark.vlab_itself
def test_tasks_must_run_on_the_nodes_that_slurm_names() -> None:
    def end(nodes: tuple[str, ...]) -> End:
        track = Track([seen("COMPLETED", nodes=nodes)], 110.0)
        output = "up in a guest\ntask 0 on n2\ntask 1 on n4\ndone\n"
        return End("c000-two-nodes.0", KINDS["two-nodes"], track, output, "", ("", ""))

    assert differs(end(("n2", "n4"))) == ""
    for others in (("n1", "n2"), ("n2", "n3"), ("n4", "n2"), ("n2",), ()):
        assert "output lacks" in differs(end(others)), others


@pytest.mark.vlab_itself
def test_a_job_that_no_fault_touched_must_end_as_its_kind_says() -> None:
    good = ended("script", "COMPLETED", "0:0", "up in a guest\ndone\n")
    assert judge(good, (), NOBODY).own
    for bad in (
        ended("script", "COMPLETED", "0:0", "up in a guest\n"),
        ended("script", "COMPLETED", "0:0", "up on the host\ndone\n"),
        ended("script", "FAILED", "1:0", "vhpc: the guest of job 5 on n1 is gone (x)\n"),
        ended("exit-7", "FAILED", "1:0", "up in a guest\n"),
        ended("cancelled", "COMPLETED", "0:0", ""),
    ):
        assert judge(bad, (), NOBODY).why == ""


@pytest.mark.vlab_itself
def test_a_fault_explains_only_what_it_can_have_caused() -> None:
    line = ended("script", "FAILED", "1:0", "up in a guest\nvhpc: the guest of job 5 on n1 is gone (x)\n")
    silent = ended("script", "FAILED", "1:0", "up in a guest\n")
    kill, cancel = injected("qemu-kill", 105, 105), injected("scancel", 105, 105)
    assert judge(line, (kill,), NOBODY).why == "qemu-kill: vhpc: the guest of job 5 on n1 is gone (x)"
    assert judge(silent, (kill,), NOBODY).why == ""
    assert judge(line, (cancel,), NOBODY).why == ""
    assert judge(ended("script", "CANCELLED", "0:15", ""), (cancel,), NOBODY).why == "scancel: cancelled"
    escaped = ended("script", "FAILED", "1:0", "up on the host\nvhpc: the guest of job 5 on n1 is gone (x)\n")
    assert judge(escaped, (kill,), NOBODY).why == ""


@pytest.mark.vlab_itself
def test_an_srun_that_misses_the_end_needs_a_cut_network() -> None:
    """Without a guest it waits as well: the node tells it once, and it may hear nothing of the job's end."""
    cut, paused = injected("network-cut", 105, 113), injected("qemu-pause", 105, 109)
    waited = ended("srun", "TIMEOUT", "0:0", "up in a guest\ndone\n")
    assert (
        judge(waited, (cut,), NOBODY).why
        == "network-cut: Slurm: TIMEOUT; its task had ended, and srun was not told"
    )
    assert judge(waited, (paused,), NOBODY).why == ""
    assert judge(ended("srun", "TIMEOUT", "0:0", "up in a guest\n"), (cut,), NOBODY).why == ""
    assert judge(ended("script", "TIMEOUT", "0:0", "up in a guest\ndone\n"), (cut,), NOBODY).why == ""


@pytest.mark.vlab_itself
def test_an_srun_without_its_slurmstepd_waits_to_its_time_limit() -> None:
    """As seen without a guest."""
    kill, says = injected("step-kill", 105, 105), "srun: error: Timed out waiting for job step to complete\n"
    assert judge(ended("srun", "TIMEOUT", "0:0", says), (kill,), NOBODY).why.startswith("step-kill: srun:")
    assert judge(ended("srun", "TIMEOUT", "0:0", "up in a guest\n"), (kill,), NOBODY).why == ""
    assert judge(ended("script", "TIMEOUT", "0:0", says), (kill,), NOBODY).why == ""
    assert judge(ended("srun", "TIMEOUT", "0:0", says), (injected("shim-kill", 105, 105),), NOBODY).why == ""


@pytest.mark.vlab_itself
def test_a_script_without_its_slurmstepd_runs_to_its_time_limit() -> None:
    """As seen without a guest: slurmctld does not learn of its end."""
    kill, began = injected("stepd-kill", 105, 105), "n1: [5.batch] task 0 (71) started"
    for batch, explained in ((began, True), ("n1: [5.batch] done with step", False), ("", False)):
        end = replace(ended("plain", "TIMEOUT", "0:0", "up on the host\ndone\n"), batch=batch)
        assert bool(judge(end, (kill,), NOBODY).why) is explained, batch
        assert judge(end, (injected("qemu-kill", 105, 105),), NOBODY).why == ""


@pytest.mark.vlab_itself
def test_an_srun_may_explain_missing_output_and_end_with_0() -> None:
    """As seen without a guest: the step's slurmstepd was killed before a task had started."""
    kill, says = injected("step-kill", 105, 105), "srun: error: step_launch_notify_io_failure: aborting\n"
    begun = "up in a guest\n"
    assert judge(ended("two-guests", "COMPLETED", "0:0", f"{begun}{says}done\n"), (kill,), NOBODY).why
    assert judge(ended("two-guests", "COMPLETED", "0:0", f"{begun}done\n"), (kill,), NOBODY).why == ""
    assert judge(ended("two-guests", "COMPLETED", "0:0", f"{begun}{says}done\n"), (), NOBODY).why == ""


@pytest.mark.vlab_itself
def test_tasks_wait_for_one_that_was_killed_until_the_time_limit() -> None:
    """As without a guest, unless srun has --kill-on-bad-exit."""
    kill, says = injected("run-kill", 105, 105), "up in a guest\nsrun: error: n2: task 1: Killed\n"
    assert judge(ended("network", "TIMEOUT", "0:0", says), (kill,), NOBODY).why.startswith("run-kill: srun:")
    assert judge(ended("network", "TIMEOUT", "0:0", "up in a guest\n"), (kill,), NOBODY).why == ""
    assert judge(ended("network", "TIMEOUT", "0:0", says), (), NOBODY).why == ""


@pytest.mark.vlab_itself
def test_a_crash_of_qemu_needs_no_fault_when_qemu_says_so_itself() -> None:
    says = "vhpc: QEMU crashed on n1 while image i booted: x.c:7: f: Assertion `x < y' failed. (again)\n"
    assert judge(ended("script", "FAILED", "1:0", says), (), NOBODY).why.startswith("by itself: vhpc: QEMU")
    killed = "vhpc: the guest ended on n1 while image i booted: QEMU crashed or was killed, or (again)\n"
    assert judge(ended("script", "FAILED", "1:0", killed), (), NOBODY).why == ""


def of_peer(line: str) -> str:
    """The same line in the output of a job with a network, on another node than the guest."""
    return line.replace("vhpc: ", "vhpc: node n1: ")


@pytest.mark.vlab_itself
def test_a_failed_boot_is_not_blamed_on_unrelated_findings() -> None:
    slow = "vhpc: image i:latest did not get ready within 120 s on n1: its console ended with: {} (longer)\n"
    stall = slow.format("[   31.0] rcu: rcu_preempt kthread starved for 5250 jiffies! g5 f0x0")
    cut, libvirt = injected("network-cut", 105, 105.4), injected("libvirtd-kill", 105, 110)
    for fault, line in ((cut, stall), (libvirt, stall), (cut, of_peer(stall))):
        why = judge(ended("script", "FAILED", "1:0", line), (fault,), NOBODY).why
        assert why == f"by itself, under the machine's load: {line.partition(' for 5250')[0]}", line
    other = slow.format("[    3.1] Run /init as init process")
    for line in (other, of_peer(other)):
        assert judge(ended("script", "FAILED", "1:0", line), (cut,), NOBODY).why == ""
    assert judge(ended("script", "FAILED", "1:0", other), (libvirt,), NOBODY).why.startswith("libvirtd-kill:")
    lease = "vhpc: cannot reach vhpcd at ctl:6860: timed out (x)\n"
    assert judge(ended("script", "FAILED", "1:0", lease), (cut,), NOBODY).why.startswith("network-cut: vhpc:")


@pytest.mark.vlab_itself
def test_a_job_in_the_way_was_in_the_way_for_a_reason() -> None:
    held = "vhpc: CPUs 0 are held by guests of 3.0.0123abcd: x (submit it again)\n"
    end = ended("no-requeue", "FAILED", "1:0", held)
    kill = replace(injected("epilog-kill", 101, 101), target=("c000-plain", 0))
    assert judge(end, touches(end, JOB_5, [kill], NOBODY, ("c000-plain", 0)), NOBODY).why.startswith(
        "epilog-kill"
    )
    assert judge(end, touches(end, JOB_5, [kill], NOBODY, ("c001-plain", 0)), NOBODY).why == ""
    assert judge(end, touches(end, JOB_5, [kill], NOBODY), NOBODY).why == ""


@pytest.mark.vlab_itself
def test_a_lost_start_ends_only_jobs_that_may_not_be_requeued() -> None:
    kill = replace(injected("prolog-kill", 105, 105), target=("c000-no-requeue", 0))
    for kind, output, explained in (
        ("no-requeue", "", True),
        ("no-requeue", "up in a guest\n", False),
        ("script", "", False),
    ):
        assert bool(judge(ended(kind, "FAILED", "1:0", output), (kill,), NOBODY).why) is explained
    assert (
        judge(ended("no-requeue", "FAILED", "1:0", ""), (injected("qemu-kill", 105, 105),), NOBODY).why == ""
    )


@pytest.mark.vlab_itself
def test_an_end_that_slurmctld_forgot_was_seen_before() -> None:
    kill = injected("slurmctld-kill", 105, 105, "")
    for seen_states, explained in (
        (("PENDING", "CANCELLED", "PENDING", "RUNNING", "TIMEOUT"), True),
        (("RUNNING", "COMPLETING", "RUNNING", "TIMEOUT"), True),
        (("PENDING", "RUNNING", "PENDING", "TIMEOUT"), True),
        (("PENDING", "RUNNING", "COMPLETING", "TIMEOUT"), False),
    ):
        track = Track([seen(state, at=100.0 + i) for i, state in enumerate(seen_states)], 110.0)
        end = End("c000-cancelled.0", KINDS["cancelled"], track, "up in a guest\n", "", ("", ""), "TIMEOUT")
        assert bool(judge(end, (kill,), NOBODY).why) is explained
    for node, explained in (("n2", True), ("n1", False)):  # it was started again, as if for the first time
        moved = [seen("RUNNING"), seen("RUNNING", at=101.0, nodes=(node,)), seen("FAILED", "1:0", 102.0)]
        end = End("c000-srun.0", KINDS["srun"], Track(moved, 110.0), "", "", ("", ""), "FAILED")
        assert bool(judge(end, (kill,), NOBODY).why) is explained


@pytest.mark.vlab_itself
def test_ends_that_a_run_of_thousands_of_jobs_has_shown() -> None:
    """Each was found in the logs of slurmctld and slurmd."""
    forked = injected("stepd-kill", 105, 105)  # between fork and exec the task is named slurmstepd
    assert (
        judge(ended("exit-7", "FAILED", "0:9", ""), (forked,), NOBODY).why == "stepd-kill: killed by signal 9"
    )
    rebooted, says = injected("reboot", 105, 106), "srun: error: Timed out waiting for job step to complete\n"
    assert judge(ended("srun", "TIMEOUT", "0:0", says), (rebooted,), NOBODY).why == f"reboot: {says.strip()}"
    restarted = injected("slurmctld-kill", 105, 106, "")
    complete, begun = "up in a guest\ndone\n", "up in a guest\n"
    assert judge(ended("srun", "CANCELLED", "0:0", complete), (restarted,), NOBODY).why
    assert judge(ended("srun", "CANCELLED", "0:0", begun), (restarted,), NOBODY).why == ""


@pytest.mark.vlab_itself
def test_a_database_that_was_locked_is_named_in_the_comment() -> None:
    locked, why = injected("database-busy", 105, 113, ""), "vhpc: vhpcd cannot use its database (x)"
    end = replace(ended("srun", "CANCELLED", "0:0", ""), comment=why)
    assert judge(end, (locked,), NOBODY).why == f"database-busy: {why}"
    assert judge(replace(end, comment=""), (locked,), NOBODY).why == ""


@pytest.mark.vlab_itself
@pytest.mark.parametrize(
    ("fault", "hit"),
    [
        (injected("libvirtd-kill", 105, 106), True),
        (injected("libvirtd-kill", 105, 106, "n2"), False),
        (injected("libvirtd-kill", 70, 80), False),
        (injected("libvirtd-kill", 115, 120), False),
        (injected("vhpcd-kill", 105, 106, ""), True),
        (injected("vhpcd-kill", 70, 80, ""), False),
        (injected("qemu-kill", 105, 106), False),
        (replace(injected("qemu-kill", 105, 106), target=("c000-script", 0)), True),
    ],
)
def test_faults_touch_what_was_in_their_reach(fault: Injected, hit: bool) -> None:
    end = ended("script", "COMPLETED", "0:0", "up in a guest\ndone\n")
    assert bool(touches(end, JOB_5, [fault], NOBODY)) is hit


@pytest.mark.vlab_itself
def test_a_drained_node_needs_a_fault_that_drains_in_these_words() -> None:
    kill = injected("epilog-kill", 100, 100)
    assert drained_by(Trouble(101, "n1", "drained", "Epilog error"), [kill]) is kill
    assert drained_by(Trouble(101, "n2", "drained", "Epilog error"), [kill]) is None
    assert drained_by(Trouble(99, "n1", "drained", "Kill task failed"), [kill]) is None
    assert drained_by(Trouble(300, "n1", "drained", "Epilog error"), [kill]) is None
    qemu, munge = injected("qemu-kill", 100, 100), injected("ctl-munged-kill", 100, 104, "")
    broken = "vhpc: cannot start the guest: internal error: qemu unexpectedly closed the monitor (x)"
    assert drained_by(Trouble(101, "n1", "drained", broken), [qemu, munge]) is qemu
    assert drained_by(Trouble(101, "n1", "drained", broken), [munge]) is None
    prolog = injected("prolog-kill", 100, 100)
    again = Trouble(300, "n1", "draining", "Prolog error")
    assert drained_by(again, [replace(prolog, target=("c000-script", 0))]) is None
    assert drained_by(again, [repeated := replace(prolog, target=("c000-no-requeue", 0))]) is repeated
    assert drained_by(replace(again, at=600), [repeated]) is None
    for fault in FAULTS.values():
        assert fault.reach == JOB or not fault.role or fault.act == "cut"


@pytest.mark.vlab_itself
def test_an_extern_step_that_does_not_end_had_processes_or_not() -> None:
    """Lines of slurmd.log of Slurm 24.11.5."""
    sends = "[2076.extern] proctrack/linuxproc: _kill_proclist: Sending signal {} to pid 4318 (sleep)\n"
    given_up = (
        "[2076.extern] error: *** EXTERN STEP FOR 2076 STEPD TERMINATED ON n5 AT 2026-11-26T17:00:16 "
        "DUE TO JOB NOT ENDING WITH SIGNALS ***\n"
    )
    log = f"{sends.format(15)}[2076.extern] Sent SIGKILL signal to StepId=2076.extern\n{given_up}"
    assert without_processes(log) == [2076]
    assert without_processes(sends.format(9) + log) == []
    assert without_processes(log.replace("EXTERN STEP FOR 2076", "JOB 2076")) == []
