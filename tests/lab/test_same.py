"""Jobs with guests against the same jobs without: whatever a user can see is the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import IMAGE, Job, Lab
from twins import WHERE, Twins, says, submit, until

pytestmark = [pytest.mark.lab, pytest.mark.slow]

SOURCES = Path(__file__).with_name("same")

# Put beside the probe: what a task's prolog may say, and programs that cannot be found or run as they are.
FILES = {
    "probe.py": (SOURCES / "probe.py").read_text(),
    "task-prolog": "\n".join(
        [
            "#!/bin/sh",
            "echo 'export FROM_TASK_PROLOG=a  b=c'",
            "echo unset LANG",
            "echo print said by the task prolog",
            "",
        ]
    ),
    "arg0": '#!/bin/sh\necho "arg0 is $0, $# more: $1,$2"\n',
    "catch.py": (SOURCES / "catch.py").read_text(),
    "bad-interpreter": "#!/no/such/thing\n",
}

# Each probe is a process whose attributes are compared; each `say` line an end that is.
FIELDS = (SOURCES / "fields.job").read_text()
PROBES = re.findall(
    r"probe\.py (\w[\w-]*)|probe (\w[\w-]*)", FIELDS.replace("python3 ~/same/probe.py $n", "")
)

# What must differ, or may: ids, times, ports, and our own.
OWN = {"VHPC_JOB_GENERATION", "VHPC_JOB_IMAGE", "VHPC_SESSION", "SLURM_SPANK_VHPC_IMAGE"} | {
    "SLURM_SPANK__SLURM_SPANK_OPTION_vhpc_vhpc_image"
}
BY_NATURE = {"HOSTNAME", "SLURMD_NODENAME", "SLURM_TOPOLOGY_ADDR", "SLURM_LAUNCH_NODE_IPADDR"} | {
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SLURM_TASK_PID",
    "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST", "SLURM_STEP_LAUNCHER_PORT",
    "SLURM_SRUN_COMM_PORT", "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_SRUN_COMM_HOST",
    "SLURM_STEPID", "SLURM_STEP_ID", "SLURM_JOB_SLUID",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _folder(lab: Lab) -> Iterator[None]:
    lab.run("login", "mkdir", "-p", WHERE, user="alice")
    for name, text in FILES.items():
        lab.run(
            "login", "sh", "-c", f"cat > {WHERE}/{name}; chmod 755 {WHERE}/{name}", user="alice", stdin=text
        )
    yield
    lab.run("login", "rm", "-rf", WHERE, user="alice")


@pytest.fixture(autouse=True)
def _nothing_left(lab: Lab, request: pytest.FixtureRequest) -> Iterator[None]:
    """As for all tests, but for those that only read what the two jobs before them left behind."""
    yield
    if not {"fields", "steps"} & set(request.fixturenames):
        lab.assert_clean()


# --- what a process is ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fields(lab: Lab, _folder: None) -> Twins:
    twins = submit(lab, FIELDS, before="ulimit -Ss 7000; ulimit -Sc 0; umask 027")
    return twins.wait()


@pytest.mark.parametrize("name", sorted({first or second for first, second in PROBES}))
def test_a_process_finds_itself_to_be_the_same(fields: Twins, name: str) -> None:
    ours, theirs = fields.found(name)
    assert ours.pop("kernel") != theirs.pop("kernel")
    if name == "script":  # files are relayed through pipes; /dev/null is what it is
        assert (ours.pop("kinds"), theirs.pop("kinds")) == (
            ["/dev/null", "pipe", "pipe"],
            ["/dev/null", "file", "file"],
        )
    ours_env, theirs_env = (found.pop("environ") for found in (ours, theirs))
    assert set(ours_env) - set(theirs_env) <= OWN
    assert set(theirs_env) - set(ours_env) == set()
    differ = {k: (ours_env[k], v) for k, v in theirs_env.items() if ours_env[k] != v and k not in BY_NATURE}
    assert differ == {}
    assert ours == theirs


def test_the_probes_have_seen_what_they_were_to_see(fields: Twins) -> None:
    """Lest two jobs be equal because nothing of what was asked for came about in either."""
    found = {name: fields.found(name)[0] for name in ("script", "nofile", "limits", "umask", "nice", "nulls")}
    assert found["script"]["umask"] == "0o27"
    assert found["script"]["limits"]["RLIMIT_STACK"][0] == 7000 << 10
    assert found["script"]["ids"] == [[2001] * 3, [2001] * 3, [2001, 3001]]
    assert found["nofile"]["limits"]["RLIMIT_NOFILE"] == [500, 900]
    assert found["limits"]["limits"]["RLIMIT_STACK"][0] == 4096 << 10
    assert found["umask"]["umask"] == "0o77"
    assert found["nulls"]["kinds"] == ["/dev/null"] * 3
    args: list[str] = fields.found("args")[0]["argv"]
    assert args[3:6] == ["", "a b", "tab\there\nnew"]
    assert (args[6], len(args[7]), args[-1]) == ("\xff\xfe", 100000, ";")
    task_prolog = fields.found("task-prolog")[0]["environ"]
    assert task_prolog["FROM_TASK_PROLOG"] == "a  b=c"
    assert "LANG" not in task_prolog
    odd = fields.found("export-odd")[0]["environ"]
    assert [odd[name] for name in "ABCD"] == ["multi\nline", "", "\xff", "a=b"]


def test_output_and_ends_of_steps_are_the_same(fields: Twins) -> None:
    ours, theirs = fields.outputs()
    assert ours == theirs
    for line in ("7 of sh -c exit 7", "255 of", "139 of", "137 of", "2 of no-such", "13 of /etc/passwd"):
        assert line in ours
    for line in (
        "to-dev-stderr\nto-dev-stdout\ntyped\nagain\n1\n2\n3\n",
        f"arg0 is {WHERE}/./arg0, 2 more: a  b,\n",
    ):
        assert line in ours
    assert "said by the task prolog\n" in ours
    assert ours.endswith("I am /var/lib/slurm/slurmd/jobID/slurm_script\n")


def test_what_slurm_says_about_the_ends_of_steps_is_the_same(fields: Twins) -> None:
    """Whose message it is that a program cannot be executed differs: ours names vhpc-run."""
    ours, theirs = (sorted(text.splitlines()) for text in fields.outputs("same/ends-{id}.err"))
    theirs = sorted(line.replace("slurmstepd-NODE: error: execve", "vhpc-run: execve") for line in theirs)
    assert ours == theirs


SACCT = (
    "JobName,User,Group,Account,Partition,QOS,AllocCPUS,AllocNodes,ReqCPUS,ReqMem,ReqTRES,AllocTRES,NTasks,"
    "State,ExitCode,DerivedExitCode,Timelimit,Flags,Reason,WorkDir,Layout,NNodes,Priority"
)


def test_accounting_of_job_and_steps_is_the_same(lab: Lab, fields: Twins) -> None:
    def rows(job: Job) -> list[list[str]]:
        out = lab.run("ctl", "sacct", "-nP", "-j", str(job.id), "-o", f"JobID,{SACCT}").out
        return [line.replace(f"{job.id}", "ID", 1).split("|") for line in out.splitlines()]

    ours, theirs = (rows(job) for job in fields)
    assert len(ours) > 25
    assert ours == theirs


SHOWN_BY_NATURE = {
    "JobId", "Priority", "RunTime", "SubmitTime", "EligibleTime", "AccrueTime", "StartTime", "EndTime",
    "LastSchedEval", "NodeList", "BatchHost", "Nodes", "StdOut", "StdErr", "Deadline", "SubmitLine",
    "CPU_IDs", "AdminComment", "Command", "SegmentSize", "Scheduler", "ResvTime", "PreemptTime",
}  # fmt: skip


def test_scontrol_shows_the_same_job(fields: Twins) -> None:
    ours, theirs = (job.show() for job in fields)
    assert set(ours) == set(theirs)
    assert {k: ours[k] for k in ours if k not in SHOWN_BY_NATURE} == {
        k: theirs[k] for k in theirs if k not in SHOWN_BY_NATURE
    }


def test_an_array_gives_each_task_a_guest_and_each_script_its_own_end(lab: Lab) -> None:
    ends = ["exit 7", "exit 255", "kill -SEGV $$", "kill -TERM $$", "exec sh -c 'exit 3'", "exit 0"]
    cases = " ".join(f"{i}) {end} ;;" for i, end in enumerate(ends))
    script = f"cat /proc/sys/kernel/random/boot_id; case $SLURM_ARRAY_TASK_ID in {cases} esac"
    twins = submit(lab, script, "--array=0-5", "-o a%A-%a")
    rows: list[list[str]] = []
    for job in twins:
        until(lambda job=job: not in_queue(lab, job), f"the end of array {job.id}", 200)  # type: ignore[misc]
        until(lambda job=job: len(ended(lab, job)) == 12 + 6, f"all rows of {job.id}", 30)  # type: ignore[misc]
        rows.append(ended(lab, job))
    assert rows[0] == rows[1]
    assert "ID_3.batch|CANCELLED|0:15" in rows[0]
    boots = {lab.read("alice", f"same/a{twins.inside.id}-{i}") for i in range(6)}
    assert len(boots) == 6


def in_queue(lab: Lab, job: Job) -> bool:
    return bool(lab.run("ctl", "squeue", "-h", "-j", str(job.id), check=False).out.strip())


def ended(lab: Lab, job: Job) -> list[str]:
    out = lab.run("ctl", "sacct", "-nP", "-j", str(job.id), "-o", "JobID,State,ExitCode").out
    rows = [line.replace(str(job.id), "ID", 1) for line in out.splitlines()]
    return sorted(row for row in rows if not re.search("RUNNING|PENDING|COMPLETING", row))


# --- steps -----------------------------------------------------------------------------------------

STEPS = (SOURCES / "steps.job").read_text()


@pytest.fixture(scope="module")
def steps(lab: Lab, _folder: None) -> Twins:
    return submit(lab, STEPS, "-N2", "-n3", "--mem-per-cpu=600").wait()


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^== (\S+)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


SECTIONS = re.findall(r"^section ([\w-]+)", STEPS, re.M)


@pytest.mark.parametrize("name", SECTIONS)
def test_steps_do_the_same(steps: Twins, name: str) -> None:
    ours, theirs = (sorted(sections(text)[name].splitlines()) for text in steps.outputs())
    assert ours == theirs
    assert ours or name == "end"
    assert not any(re.search("Unable|syntax|failed on", line) for line in ours), ours


# --- signals -----------------------------------------------------------------------------------------


# On the login node, for a job: each signal, and the line that says that it came.
SEND = r"""
job=$1; shift
cd ~/same
says() {
    for i in $(seq 300); do grep -qxF "$2" $1 2>/dev/null && return; sleep 0.1; done
    echo "job $job: waited in vain for '$2' in $1"; exit 1
}
script=/home/alice/slurm-$job.out
says $script up
for name; do scancel -s $name $job.0; says signals-$job SIG$name; done
for name in USR1 USR2; do scancel -b -s $name $job; says $script "script got $name"; done
scancel -s TSTP $job.1; says $script stopped
scancel -s CONT $job.1; says $script continued
scancel -s TERM $job.0; says $script "step ended with 5"
scancel -s INT $job.1; says $script "other ended with 130"
says $script waiting
"""


def test_signals_reach_steps_and_scripts_as_without_a_guest(lab: Lab) -> None:
    names = re.findall("[A-Z0-9]+", FILES["catch.py"].split("NAMES = ")[1].split("\n")[0])
    twins = submit(lab, (SOURCES / "signals.job").read_text(), "-n1", "-t 10", "--signal=B:HUP@300")
    for job in twins:
        job.wait("RUNNING")
        done = lab.run("login", "bash", "-s", "-", str(job.id), *names, user="alice", stdin=SEND, check=False)
        assert done.code == 0, done
    for job in twins:  # the signal before the limit is due now
        lab.run("ctl", "scontrol", "update", f"JobId={job.id}", "TimeLimit=6")
    twins.wait()
    ours, theirs = twins.outputs()
    assert ours == theirs
    assert "script got HUP" in ours, ours
    assert twins.inside.accounted() == twins.outside.accounted() == ["FAILED", "6:0"]
    first, second = twins.outputs("same/signals-{id}")
    assert first == second


def test_a_window_changes_its_size_and_control_c_interrupts(lab: Lab) -> None:
    lab.run(
        "login",
        "sh",
        "-c",
        f"cat > {WHERE}/window.py",
        user="alice",
        stdin=(SOURCES / "window.py").read_text(),
    )
    done = [
        lab.run("login", "python3", f"{WHERE}/window.py", *options, user="alice", check=False)
        for options in ([f"--vhpc-image={IMAGE}"], [])
    ]
    for one in done:
        assert "33 101" in one.out, one
        assert "44 101" in one.out, one
    assert done[0].code == done[1].code


def test_a_suspended_job_stops_and_goes_on_where_it_was(lab: Lab) -> None:
    """What is promised: programs that do not catch SIGTSTP stop, script and steps; nothing is lost."""
    script = (
        "cd ~/same; srun -Q -n1 sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i+1)); echo $i;"
        " echo $i > step-now; sleep 0.1; [ -e go-on ] && exit 4; done' > step-all & "
        "i=0; while [ ! -e go-on ]; do i=$((i+1)); echo $i > script-now; sleep 0.1; done;"
        " wait $!; echo step said $?"
    )
    job = lab.submit(script, "-t4")

    def now() -> list[str]:
        names = [f"{WHERE}/step-now", f"{WHERE}/script-now"]
        return lab.run("login", "cat", *names, check=False).out.split()

    until(lambda: len(now()) == 2, "both to count")
    lab.run("ctl", "scontrol", "suspend", str(job.id))
    job.wait("SUSPENDED")
    seen = [now()]

    def rests() -> bool:
        seen.append(now())
        return len(seen) > 5 and all(one == seen[-1] for one in seen[-5:])

    until(rests, "the counters to rest", 30)
    lab.run("ctl", "scontrol", "resume", str(job.id))
    until(lambda: all(a != b and b for a, b in zip(now(), seen[-1], strict=False)), "the counters to go on")
    lab.run("login", "touch", f"{WHERE}/go-on", user="alice")
    job.wait()
    assert job.accounted() == ["COMPLETED", "0:0"]
    assert job.output().endswith("step said 4\n")
    lines = [int(line) for line in lab.read("alice", "same/step-all").splitlines()]
    assert lines == list(range(1, len(lines) + 1))


def test_a_suspended_job_can_be_cancelled(lab: Lab) -> None:
    job = lab.submit("echo up; srun sleep 600", "-t4")
    says(job, "up")
    lab.run("ctl", "scontrol", "suspend", str(job.id))
    job.wait("SUSPENDED")
    lab.run("login", "scancel", str(job.id), user="alice")
    assert job.wait() == "CANCELLED"


# --- jobs of two parts ---------------------------------------------------------------------------------


def test_both_components_of_a_het_job_have_guests(lab: Lab) -> None:
    option = f"#SBATCH --vhpc-image={IMAGE} -n1 -w"
    job = lab.submit(
        f"{option} n1\n#SBATCH hetjob\n{option} n2\n"
        "uname -r; srun -Q -l --het-group=0,1 sh -c 'echo $SLURM_PROCID $(hostname) $(uname -r)' | sort\n"
        "srun -Q --het-group=1 sh -c 'hostname; exit 3'; echo $?",
        "-t4",
        image=None,
    )
    until(lambda: not in_queue(lab, job), f"the end of job {job.id}", 120)
    lines = job.output().splitlines()
    guest = lines[0]
    assert guest != lab.run("n1", "uname", "-r").out.strip()
    said = "srun: error: n2: task 0: Exited with exit code 3"
    assert lines == [guest, f"0: 0 n1 {guest}", f"1: 1 n2 {guest}", "n2", said, "3"]


# --- streams -------------------------------------------------------------------------------------------


def through(lab: Lab, mib: int) -> None:
    """Pseudo-random bytes through srun's stdin and stdout and, apart from them, its stderr."""
    lab.run("login", "sh", "-c", f"cat > {WHERE}/through", user="alice", stdin=THROUGH)
    done = lab.run("login", "bash", f"{WHERE}/through", str(mib << 20), IMAGE, user="alice", timeout=280)
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


@pytest.mark.slow
def test_a_quarter_gibibyte_passes_each_stream_intact(lab: Lab) -> None:
    through(lab, 256)
