# SPDX-License-Identifier: Apache-2.0
"""Jobs with guests against the same jobs without: whatever a user can see is the same."""

from __future__ import annotations

import re

import pytest
from cluster import IMAGE, Job, Lab
from twins import SOURCES, WHERE, Twins, sections, submit, until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("probes")]

# Each probe is a process whose attributes are compared; each `say` line an end that is.
FIELDS = (SOURCES / "fields.job").read_text()
PROBES = re.findall(
    r"probe\.py (\w[\w-]*)|probe (\w[\w-]*)", FIELDS.replace("python3 ~/same/probe.py $n", "")
)

# Values that must differ, or may: ids, times, ports, and vhpc's own.
OWN = {"VHPC_JOB_GENERATION", "VHPC_JOB_IMAGE", "VHPC_SESSION", "VHPC_MEM_MB"} | {
    "SLURM_SPANK_VHPC_IMAGE", "SLURM_SPANK__SLURM_SPANK_OPTION_vhpc_vhpc_image",
}  # fmt: skip
BY_NATURE = {"HOSTNAME", "SLURMD_NODENAME", "SLURM_TOPOLOGY_ADDR", "SLURM_LAUNCH_NODE_IPADDR"} | {
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SLURM_TASK_PID",
    "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST", "SLURM_STEP_LAUNCHER_PORT",
    "SLURM_SRUN_COMM_PORT", "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_SRUN_COMM_HOST",
    "SLURM_STEPID", "SLURM_STEP_ID", "SLURM_JOB_SLUID",
}  # fmt: skip


# --- what a process is ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fields(lab: Lab, probes: None) -> Twins:
    twins = submit(lab, FIELDS, before="ulimit -Ss 7000; ulimit -Sc 0; umask 027")
    return twins.wait()


@pytest.mark.promise("job.guest", "job.environment")
@pytest.mark.results
@pytest.mark.parametrize("name", sorted({first or second for first, second in PROBES}))
def test_a_process_finds_itself_to_be_the_same(fields: Twins, name: str) -> None:
    ours, theirs = fields.found(name)
    assert ours.pop("kernel") != theirs.pop("kernel")
    if name == "script":  # files are relayed through pipes; /dev/null is what it is
        assert (ours.pop("kinds"), theirs.pop("kinds")) == (
            ["/dev/null", "pipe", "pipe"],
            ["/dev/null", "file", "file"],
        )
    ours["limits"].pop("RLIMIT_MEMLOCK")  # unlimited in a guest
    theirs["limits"].pop("RLIMIT_MEMLOCK")
    ours_env, theirs_env = (found.pop("environ") for found in (ours, theirs))
    assert set(ours_env) - set(theirs_env) <= OWN
    assert set(theirs_env) - set(ours_env) == set()
    differ = {k: (ours_env[k], v) for k, v in theirs_env.items() if ours_env[k] != v and k not in BY_NATURE}
    assert differ == {}
    assert ours == theirs


@pytest.mark.promise("rdma.devices")
@pytest.mark.results
def test_the_probes_have_seen_all_cases(fields: Twins) -> None:
    """Lest two jobs be equal because nothing of what was asked for came about in either."""
    found = {name: fields.found(name)[0] for name in ("script", "nofile", "limits", "umask")}
    assert found["script"]["umask"] == "0o27"
    assert found["script"]["limits"]["RLIMIT_STACK"][0] == 7000 << 10
    assert found["script"]["ids"] == [[2001] * 3, [2001] * 3, [2001, 3001]]
    assert found["nofile"]["limits"]["RLIMIT_NOFILE"][0] == 500  # Slurm hands soft limits on
    assert found["limits"]["limits"]["RLIMIT_STACK"][0] == 4096 << 10
    assert found["limits"]["limits"]["RLIMIT_MEMLOCK"] == [-1, -1]
    assert found["umask"]["umask"] == "0o77"
    args: list[str] = fields.found("args")[0]["argv"]
    assert args[3:6] == ["", "a b", "tab\there\nnew"]
    assert (args[6], len(args[7]), args[-1]) == ("\xff\xfe", 100000, ";")
    assert fields.found("script")[0]["environ"]["SITE_TASK_PROLOG"] == "for alice"
    assert fields.found("step")[0]["environ"]["SITE_TASK_PROLOG"] == "for alice"
    task_prolog = fields.found("task-prolog")[0]["environ"]
    assert task_prolog["FROM_TASK_PROLOG"] == "a  b=c"
    assert "LANG" not in task_prolog
    odd = fields.found("export-odd")[0]["environ"]
    assert [odd[name] for name in "ABCD"] == ["multi\nline", "", "\xff", "a=b"]


@pytest.mark.results
def test_output_and_ends_of_steps_are_the_same(fields: Twins) -> None:
    ours, theirs = fields.outputs()
    assert ours == theirs
    for line in ("7 of sh -c exit 7", "255 of", "139 of", "137 of", "2 of no-such", "13 of /etc/passwd"):
        assert line in ours
    for line in (
        "to-dev-stderr\nto-dev-stdout\ntyped\nagain\n1\n2\n3\nout 1\nerr 1\nout 2\nerr 2\n",
        "err\nout\nI am",
        f"arg0 is {WHERE}/./arg0, 2 more: a  b,\n",
    ):
        assert line in ours
    assert "said by the task prolog\n" in ours
    assert ours.endswith("I am /var/lib/slurm/slurmd/jobID/slurm_script\n")


@pytest.mark.results
def test_slurms_messages_about_ends_of_steps_are_the_same(fields: Twins) -> None:
    """The sender of the message that a program cannot be executed differs: ours is vhpc-run."""
    ours, theirs = (sorted(text.splitlines()) for text in fields.outputs("same/ends-{id}.err"))
    theirs = sorted(line.replace("slurmstepd: error: execve", "vhpc-run: execve") for line in theirs)
    assert ours == theirs


SACCT = (
    "JobName,User,Group,Account,Partition,QOS,AllocCPUS,AllocNodes,ReqCPUS,ReqMem,ReqTRES,AllocTRES,NTasks,"
    "State,ExitCode,DerivedExitCode,Timelimit,Flags,Reason,WorkDir,Layout,NNodes"
)
"""Not Priority: priority/basic of Slurm 22.05 counts it down from job to job."""


@pytest.mark.promise("job.exit")
@pytest.mark.results
def test_accounting_of_job_and_steps_is_the_same(lab: Lab, fields: Twins) -> None:
    def rows(job: Job) -> list[list[str]]:
        # each step's end comes with a record of its own
        until(lambda: len(ended(lab, job)) == len(every(lab, job)) > 25, f"all rows of {job.id}", 60)
        out = lab.run("ctl", "sacct", "-nP", "-j", str(job.id), "-o", f"JobID,{SACCT}").out
        # which of Slurm's two schedulers came first is chance
        out = re.sub("Sched(Main|Backfill|Submit)", "Scheduler", out)
        return [line.replace(f"{job.id}", "ID", 1).split("|") for line in out.splitlines()]

    ours, theirs = (rows(job) for job in fields)
    assert ours == theirs


SHOWN_BY_NATURE = {
    "JobId", "Priority", "RunTime", "SubmitTime", "EligibleTime", "AccrueTime", "StartTime", "EndTime",
    "LastSchedEval", "SLUID", "NodeList", "BatchHost", "Nodes", "StdOut", "StdErr", "Deadline", "SubmitLine",
    "CPU_IDs", "AdminComment", "Command", "SegmentSize", "Scheduler", "ResvTime", "PreemptTime",
}  # fmt: skip


@pytest.mark.promise("job.exit")
@pytest.mark.results
def test_scontrol_shows_the_same_job(fields: Twins) -> None:
    ours, theirs = (job.show() for job in fields)
    assert ours["AdminComment"] == "vhpc:"  # its first word; the rest is tested where jobs pin images
    assert set(ours) - {"AdminComment"} == set(theirs) - {"AdminComment"}
    assert {k: ours[k] for k in ours if k not in SHOWN_BY_NATURE} == {
        k: theirs[k] for k in theirs if k not in SHOWN_BY_NATURE
    }


def test_an_array_gives_each_task_a_guest_and_an_end(lab: Lab) -> None:
    ends = ["exit 7", "exit 255", "kill -SEGV $$", "kill -TERM $$", "exec sh -c 'exit 3'", "exit 0"]
    cases = " ".join(f"{i}) {end} ;;" for i, end in enumerate(ends))
    script = f"cat /proc/sys/kernel/random/boot_id; case $SLURM_ARRAY_TASK_ID in {cases} esac"
    twins = submit(lab, script, "--array=0-5", "-o a%A-%a")
    rows: list[list[str]] = []
    for job in twins:
        job.leave_queue(600)
        until(lambda job=job: len(ended(lab, job)) == 12 + 6, f"all rows of {job.id}", 60)  # type: ignore[misc]
        rows.append(ended(lab, job))
    assert rows[0] == rows[1]
    assert "ID_3.batch|CANCELLED|0:15" in rows[0]
    boots = {lab.read("alice", f"same/a{twins.inside.id}-{i}") for i in range(6)}
    assert len(boots) == 6


def every(lab: Lab, job: Job) -> list[str]:
    """Rows of accounting."""
    out = lab.run("ctl", "sacct", "-nP", "-j", str(job.id), "-o", "JobID,State,ExitCode").out
    return sorted(line.replace(str(job.id), "ID", 1) for line in out.splitlines())


def ended(lab: Lab, job: Job) -> list[str]:
    """Rows of accounting that have their end."""
    return [row for row in every(lab, job) if not re.search("RUNNING|PENDING|COMPLETING", row)]


# --- steps -----------------------------------------------------------------------------------------

STEPS = (SOURCES / "steps.job").read_text()


@pytest.fixture(scope="module")
def steps(lab: Lab, probes: None) -> list[dict[str, str]]:
    """The sections of both outputs."""
    twins = submit(lab, STEPS, "-N2", "-n3", "--mem-per-cpu=600").wait()
    return [sections(text) for text in twins.outputs()]


SECTIONS = re.findall(r"^section ([\w-]+)", STEPS, re.M)


MULTI_PROG_REFUSED = r"\d: vhpc: this version of Slurm cannot run srun --multi-prog in guests; .*"


def has_multi_prog(lab: Lab) -> bool:
    """Slurm lets a plugin change the commands of such a step since 23.02.5 (docs/differences.md)."""
    version = lab.run("login", "srun", "--version").out.split()[-1]
    return tuple(int(part) for part in version.split(".")[:3]) >= (23, 2, 5)


@pytest.mark.results
@pytest.mark.parametrize("name", SECTIONS)
def test_steps_do_the_same(lab: Lab, steps: list[dict[str, str]], name: str) -> None:
    # slurmstepd may say of one end twice, when both slurmctld and srun ask for it
    cancelled = re.compile(r"(.* CANCELLED AT TIME .*\n)\1")
    texts = (cancelled.sub(r"\1", parts[name]) for parts in steps)
    ours, theirs = (sorted(text.splitlines()) for text in texts)
    if name == "multi-prog" and not has_multi_prog(lab):
        assert [line for line in ours if re.fullmatch(MULTI_PROG_REFUSED, line)], ours
        assert not any("first of" in line or "rest" in line for line in ours), ours
        return
    assert ours == theirs
    assert ours or name == "end"
    assert not any(re.search("Unable|syntax|failed on", line) for line in ours), ours


# --- jobs of two parts ---------------------------------------------------------------------------------


@pytest.mark.promise("array.guest")
def test_both_components_of_a_het_job_have_guests(lab: Lab) -> None:
    option = f"#SBATCH --vhpc-image={IMAGE} -n1 -w"
    job = lab.submit(
        f"{option} n1\n#SBATCH hetjob\n{option} n2\n"
        "uname -r; srun -Q -l --het-group=0,1 sh -c 'echo $SLURM_PROCID $(hostname) $(uname -r)' | sort\n"
        "srun -Q --het-group=1 sh -c 'hostname; exit 3'; echo $?",
        "-t4",
        image=None,
    )
    job.leave_queue()
    lines = job.output().splitlines()
    guest = lines[0]
    assert guest != lab.run("n1", "uname", "-r").out.strip()
    assert lines[:3] == [guest, f"0: 0 n1 {guest}", f"1: 1 n2 {guest}"]
    # srun has a task's output and its end from two connections: their order is no promise
    assert sorted(lines[3:5]) == ["n2", "srun: error: n2: task 0: Exited with exit code 3"]
    assert lines[5:] == ["3"]


# --- streams -------------------------------------------------------------------------------------------


def through(lab: Lab, mib: int) -> None:
    """Pseudo-random bytes through srun's stdin and stdout and, apart from them, its stderr."""
    lab.run("login", "sh", "-c", f"cat > {WHERE}/through", user="alice", stdin=THROUGH)
    done = lab.run("login", "bash", f"{WHERE}/through", str(mib << 20), IMAGE, user="alice", timeout=800)
    sums = [line.split()[0] for line in done.out.splitlines()]
    assert len(sums) == 3
    assert len(set(sums)) == 1, done


THROUGH = r"""
exec 4>&1
make() { openssl enc -aes-128-ctr -K 00 -iv 00 -nosalt </dev/zero 2>/dev/null | head -c $1; }
make $1 | sha256sum
{ make $1 | srun -Q --vhpc-image=$2 tee /dev/stderr 2>&3 | sha256sum >&4; } 3>&1 | sha256sum
"""


def test_bytes_pass_each_stream_intact(lab: Lab) -> None:
    through(lab, 32)


@pytest.mark.promise("job.streams")
@pytest.mark.slow
def test_a_quarter_gibibyte_passes_each_stream_intact(lab: Lab) -> None:
    through(lab, 256)
