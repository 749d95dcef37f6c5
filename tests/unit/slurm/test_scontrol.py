# SPDX-License-Identifier: Apache-2.0
"""Reading what Slurm's commands print: captured from real clusters, see data/scontrol/README.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from vhpc_slurm.errors import UserError
from vhpc_slurm.model import GresAllocation, HetPlace, NodeAllocation
from vhpc_slurm.slurm.hostlist import expand
from vhpc_slurm.slurm.parse import narrower, parse_gres, parse_job, parse_requeue, parse_running, parse_squeue
from vhpc_slurm.slurm.port import JobStatus, NoSuchJobError, RunningJob, SlurmError, SlurmJob

DATA = Path(__file__).parents[2] / "data"
VERSIONS = ("22.05", "24.11", "26.05")
EVERY = pytest.mark.parametrize("version", VERSIONS)

# slurmctld's decisions, read by eye from the captures.
LAYOUTS = {
    "single": {"n1": ((0, 1), 512, ())},
    "two-merged": dict.fromkeys(
        ("n1", "n2"),
        ((8, 9), 1024, (GresAllocation("gpu", "h200", 2, (0, 1)), GresAllocation("ibvf", "", 2))),
    ),
    "uneven": dict.fromkeys(("n1", "n2", "n3"), ((0, 1), 200, ())),
    "exclusive": dict.fromkeys(
        ("n1", "n2", "n3", "n4"),
        (
            tuple(range(16)),
            4000,
            (GresAllocation("gpu", "h200", 4, (0, 1, 2, 3)), GresAllocation("ibvf", "", 4)),
        ),
    ),
    "mask": dict.fromkeys(("n2", "n4"), ((0, 1), 300, ())),
    "pending": {},
}


def text(version: str, name: str) -> str:
    return (DATA / "scontrol" / version / f"{name}.txt").read_text()


def job(version: str, name: str) -> SlurmJob:
    record = text(version, name)
    found = re.match(r"JobId=(\d+)", record)
    assert found
    return parse_job(record, int(found[1]))


@EVERY
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_allocation_is_that_of_slurmctld(version: str, name: str) -> None:
    found = {
        part.node: (part.cpu_ids, part.memory_mib, part.gres) for part in job(version, name).allocation.nodes
    }
    assert found == LAYOUTS[name]


@EVERY
def test_nodes_of_different_layouts_keep_their_own(version: str) -> None:
    gpus = {part.node: part.gres for part in job(version, "scattered").allocation.nodes}
    assert gpus == {
        "n1": (GresAllocation("gpu", "h200", 2, (0, 1)),),
        "n2": (GresAllocation("gpu", "h200", 2, (1, 2)),),
        "n3": (GresAllocation("gpu", "h200", 2, (0, 1)),),
        "n4": (GresAllocation("gpu", "h200", 2, (0, 1)),),
    }


def test_merged_and_single_groups_mix() -> None:
    parts = job("22.05", "groups").allocation.nodes
    assert [(part.node, part.cpu_ids) for part in parts] == [
        ("n1", (0, 1)),
        ("n2", (4, 5)),
        ("n3", (0, 1)),
        ("n4", (0, 1)),
    ]


@EVERY
def test_identity_and_state_are_slurm_s(version: str) -> None:
    found = replace(job(version, "in-prolog"), job_id=0, allocation=job(version, "pending").allocation)
    assert found == SlurmJob(
        0, 0, "RUNNING", "Prolog", 2002, 2002, "bob", "all", "j.sh", "/home/bob", "", found.allocation, "n1"
    )
    assert (job(version, "mask").batch_host, job(version, "pending").batch_host) == ("n2", "")
    assert job(version, "in-prolog-slurmctld").state == "CONFIGURING"
    assert job(version, "completing").state == "COMPLETING"


@EVERY
def test_field_names_in_a_job_name_and_comment_change_nothing(version: str) -> None:
    found = job(version, "odd-text")
    assert (found.user, found.uid, found.partition) == ("alice", 2001, "all")
    assert found.name == "a b=c JobId=7 Nodes=n9 CPU_IDs=0-63 Mem=9 GRES=gpu:9"
    assert found.allocation.nodes == (NodeAllocation("n1", (0, 1), 256),)


@EVERY
@pytest.mark.parametrize("name", ["spoof-name", "newline-name", "newline-comment"])
def test_text_like_slurms_own_is_a_user_error(version: str, name: str) -> None:
    with pytest.raises(UserError, match="looks like fields of scontrol"):
        job(version, name)


@EVERY
def test_a_working_directory_may_have_spaces(version: str) -> None:
    assert job(version, "workdir").work_dir == "/home/alice/my dir"


@EVERY
@pytest.mark.parametrize("name", ["het", "array"])
def test_of_several_records_one_is_asked_for_alone(version: str, name: str) -> None:
    both = text(version, name)
    records = both.splitlines()
    ids = [int(number) for number in re.findall(r"^JobId=(\d+)", both, re.MULTILINE)]
    assert len(ids) == len(records) == 2
    wanted = {"het": ["15+0", "15+1"], "array": ["12_2", "12_1"]}[name]
    assert [narrower(both, number) for number in ids] == wanted
    for number, record in zip(ids, records, strict=True):
        assert narrower(record, number) == ""
        assert parse_job(record, number).job_id == number
        with pytest.raises(UserError, match="looks like fields"):
            parse_job(both, number)
    with pytest.raises(NoSuchJobError):
        narrower(both, 9999)
    with pytest.raises(NoSuchJobError):
        parse_job(records[0], 9999)


@EVERY
def test_a_component_knows_its_heterogeneous_job(version: str) -> None:
    records = text(version, "het").splitlines()
    found = [parse_job(record, number) for number, record in zip((15, 16), records, strict=True)]
    assert [one.het for one in found] == [HetPlace(15, 0, 2), HetPlace(15, 1, 2)]
    assert all("BatchFlag=1" in record for record in records)
    assert [one.batch_host for one in found] == ["n1", ""], "only the first one's script runs"
    forged = records[1].replace("JobName=j.sh", "JobName=x HetJobIdSet=1-9 SLUID=s")
    assert parse_job(forged, 16).het == HetPlace(15, 1, 2)
    several = records[1].replace("HetJobIdSet=15-16", "HetJobIdSet=15-16,18,4294901000-4294901001")
    assert parse_job(several, 16).het == HetPlace(15, 1, 5)
    with pytest.raises(SlurmError, match="HetJobIdSet is missing"):
        parse_job(records[1].replace(" HetJobIdSet=15-16", ""), 16)
    assert job(version, "workdir").het is None


# A whole record, and after it the head of another job, which would then get the true fields.
FORGED = (
    "x UserId=bob(2002) GroupId=bob(2002) MCS_label=N/A JobState=RUNNING Reason=None Restarts=0 Partition=all"
    " BatchFlag=1 NodeList=n1 NumCPUs=2 Nodes=n1 CPU_IDs=0-63 Mem=9999 GRES= MinCPUsNode=1\nJobId=99 "
)


@pytest.mark.promise("attack.job-name")
@EVERY
@pytest.mark.parametrize("head", ["", "ArrayJobId=1 ArrayTaskId=1 ", "HetJobId=1 HetJobOffset=1 "])
def test_a_name_that_holds_a_whole_record_is_the_user_s_error(version: str, head: str) -> None:
    record = text(version, "single")
    name = job(version, "single").name
    forged = record.replace(f"JobName={name}", f"JobName={FORGED}{head}JobName=y")
    assert forged != record
    for read in (parse_job, narrower):
        with pytest.raises(UserError, match="looks like fields"):
            read(forged, 1)


@EVERY
def test_an_element_with_a_forged_name_is_refused_alone(version: str) -> None:
    first, second = text(version, "array").splitlines(keepends=True)
    forged = first.replace("JobName=j.sh", f"JobName={FORGED}ArrayJobId=12 ArrayTaskId=9 JobName=y")
    assert narrower(forged + second, 12) == "12_2"
    with pytest.raises(UserError, match="looks like fields"):
        parse_job(forged, 12)


def test_group_names_may_have_spaces() -> None:
    record = text("24.11", "single").replace("GroupId=alice(2001)", "GroupId=domain users(513)")
    assert parse_job(record, 1).gid == 513


def test_a_forged_account_cannot_add_fields_or_layouts() -> None:
    record = text("24.11", "single")
    for forged in ("x JobState=PENDING", "x Restarts=7", "x NodeList=n9"):
        with pytest.raises(SlurmError, match="2 fields are named"):
            parse_job(record.replace("Account=(null)", f"Account={forged}"), 1)
    layout = record.replace("Account=(null)", "Account=x Nodes=n1 CPU_IDs=0-63 Mem=9999 GRES=")
    assert parse_job(layout, 1).allocation.nodes == (NodeAllocation("n1", (0, 1), 512),)


def test_two_records_of_one_id_are_refused() -> None:
    record = text("24.11", "single")
    with pytest.raises(UserError, match="looks like fields"):
        parse_job(record + record, 1)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        # scontrol's buffer of 128 bytes, filled
        ("CPU_IDs=0-1", "CPU_IDs=" + ",".join(str(2 * n) for n in range(64))[:127], "too many ranges"),
        ("NumCPUs=2", "NumCPUs=4", "fewer CPUs than its NumCPUs=4"),
        ("NodeList=n1 ", "NodeList=n[1-2] ", "do not match its NodeList"),
        ("Mem=512 GRES= ", "Mem=512 GRES=gpu:2(IDX:0) ", "2 units but 1 indexes"),
    ],
)
def test_an_allocation_that_is_not_whole_is_refused(old: str, new: str, why: str) -> None:
    record = text("24.11", "single")
    assert old in record
    with pytest.raises(SlurmError, match=why):
        parse_job(record.replace(old, new), 1)


@EVERY
def test_squeue_is_read(version: str) -> None:
    # The captures carry a column (UserID) that is not asked for; it is taken out here.
    def listing(name: str) -> tuple[JobStatus, ...]:
        raw = (DATA / "squeue" / version / f"{name}.txt").read_text()
        return parse_squeue(re.sub(r"200[12] +(?=\w+ *$)", "", raw, flags=re.MULTILINE))

    (waiting,) = listing("squeue-prolog")
    assert (waiting.state, waiting.reason, waiting.restarts) == ("RUNNING", "Prolog", 0)
    assert waiting.started is not None
    assert waiting.started > 1.7e9
    assert listing("squeue-completing")[0].state == "COMPLETING"
    requeued, *tasks, running = listing("squeue")
    assert (requeued.state, requeued.restarts, requeued.reason) == ("PENDING", 1, "BeginTime")
    assert [task.started for task in tasks] == [None, None]
    assert running.state == "RUNNING"


@pytest.mark.parametrize("line", ["x y", "12 RUNNING", "a RUNNING 0 N/A None", "1 RUNNING x N/A None"])
def test_odd_squeue_lines_are_refused(line: str) -> None:
    with pytest.raises(SlurmError):
        parse_squeue(line + "\n")


@EVERY
def test_a_job_may_be_requeued_or_not(version: str) -> None:
    text = (DATA / "scontrol" / version / "single.txt").read_text()
    number = int(re.findall(r"JobId=(\d+)", text)[0])
    assert " Requeue=1 " in text
    assert parse_requeue(text, number)
    assert not parse_requeue(text.replace(" Requeue=1 ", " Requeue=0 "), number)
    with pytest.raises(NoSuchJobError):
        parse_requeue("", number)


def test_times_of_running_jobs() -> None:
    """As squeue 24.11 prints them with SLURM_TIME_FORMAT=%s."""
    text = (
        "1004        0         1785290400              1785290580              N/A                     \n"
        "1005        2         1785290400              N/A                     N/A                     \n"
        "1006        0         1785290400              1785290640              1785290520              \n"
    )
    assert parse_running(text) == (
        RunningJob(1004, 0, 1785290400.0, 1785290580.0, None),
        RunningJob(1005, 2, 1785290400.0, None, None),
        RunningJob(1006, 0, 1785290400.0, 1785290640.0, 1785290520.0),
    )
    with pytest.raises(SlurmError):
        parse_running("1004 0 N/A N/A N/A\n")


@pytest.mark.parametrize(
    ("gres", "expected"),
    [
        ("", ()),
        ("(null)", ()),
        ("gpu:2(IDX:0,3)", (GresAllocation("gpu", "", 2, (0, 3)),)),
        ("gpu:a100_3g.20gb:1(IDX:7)", (GresAllocation("gpu", "a100_3g.20gb", 1, (7,)),)),
        (
            "gpu:h200:3(IDX:0,2-3),ibvf:2(CNT:2)",
            (GresAllocation("gpu", "h200", 3, (0, 2, 3)), GresAllocation("ibvf", "", 2)),
        ),
        ("shard:4", (GresAllocation("shard", "", 4),)),
    ],
)
def test_gres_forms(gres: str, expected: tuple[GresAllocation, ...]) -> None:
    assert parse_gres(gres) == expected


@pytest.mark.parametrize("gres", ["gpu:2(IDX:0", "(IDX:0)", "gpu:x:y:z", "gpu:2(IDX:a)", ",", "gpu (IDX:0)"])
def test_an_invalid_gres_is_refused(gres: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_gres(gres)


# Expected: `scontrol show hostnames` of Slurm 24.11.5.
@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-3,7]", "n1 n2 n3 n7"),
        ("n[1-2],m5", "n1 n2 m5"),
        ("rack[0-1]n[01-02]", "rack0n01 rack0n02 rack1n01 rack1n02"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[1-2]-ib", "n1-ib n2-ib"),
        ("n[099-101]", "n099 n100 n101"),
        ("a,b,a", "a b a"),
        ("tux[1-2,7]x[0-1]", "tux1x0 tux1x1 tux2x0 tux2x1 tux7x0 tux7x1"),
    ],
)
def test_host_lists_expand_as_slurm_does(text: str, hosts: str) -> None:
    assert " ".join(expand(text)) == hosts


def test_three_brackets_give_slurm_s_hosts_and_first_host() -> None:
    slurm = ["r1x0y3", "r1x0y5", "r2x0y3", "r2x0y5", "r1x1y3", "r1x1y5", "r2x1y3", "r2x1y5"]
    ours = expand("r[1-2]x[0-1]y[3,5]")
    assert set(ours) == set(slurm)
    assert (len(ours), ours[0]) == (8, slurm[0])


@pytest.mark.parametrize(
    "text",
    ["", "n[1", "n1]", "n[]", "n[a-b]", "n[3-1]", "n[[1]]", "n[1-999999999]", "a,,b", "n[1-300]x[1-300]"],
)
def test_an_invalid_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        expand(text)
