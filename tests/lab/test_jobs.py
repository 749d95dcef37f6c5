# SPDX-License-Identifier: Apache-2.0
"""Jobs in guests, seen from outside: who they are, where they run, how they end."""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import partial

import pytest
from cluster import IMAGE, NODES, Lab
from injection import configured, runs, until

pytestmark = pytest.mark.lab

POWEROFF_TIMEOUT_S = 60  # not the default: on a busy machine a guest may take as long


def kernel(lab: Lab) -> str:
    return lab.run("n1", "uname", "-r").out.strip()


@pytest.mark.promise("job.guest")
def test_a_two_node_job_runs_in_the_guests_of_its_nodes(lab: Lab) -> None:
    lab.run("login", "rm", "-rf", "/home/alice/made", user="alice")
    job = lab.finish(
        "cd ~; mkdir made; echo hello > made/file\n"
        'echo "script $(hostname) $(uname -r) $(id -u) $(id -g) $(id -un) $(pwd) $COLOUR"\n'
        "srun -N2 -n4 sh -c 'echo task $SLURM_PROCID $(hostname) $(uname -r) $(id -u) $(pwd)'\n",
        "-N2",
        "--ntasks-per-node=2",
        "--chdir=/home/alice",
        "--export=ALL,COLOUR=blue",
    )
    out = job.output()
    script = re.search(r"^script (\S+) (\S+) (.*)$", out, re.M)
    assert script is not None, out
    assert script[1] == "n1"
    assert script[2] != kernel(lab)
    assert script[3] == "2001 2001 alice /home/alice blue"
    tasks = sorted(re.findall(r"^task (\d) (\S+) (\S+) (\d+) (\S+)$", out, re.M))
    assert [t[:2] for t in tasks] == [("0", "n1"), ("1", "n1"), ("2", "n2"), ("3", "n2")], out
    assert {t[2] for t in tasks} == {script[2]}
    assert {t[3:] for t in tasks} == {("2001", "/home/alice")}
    assert job.accounted() == ["COMPLETED", "0:0"]
    owner = lab.run("n2", "stat", "-c", "%u:%g %F", "/home/alice/made", "/home/alice/made/file").out
    assert owner == "2001:2001 directory\n2001:2001 regular file\n"


def test_users_leave_shared_folders_out(lab: Lab) -> None:
    script = "for d in ~ /scratch; do findmnt -no FSTYPE -T $d; done"
    where = ("-w", "n1", "-D", "/scratch", "-o", "/scratch/shares.out")
    job = lab.finish(script, *where, "--vhpc-shares=work_dir")
    seen = lab.run("login", "cat", "/scratch/shares.out", user="alice").out
    lab.run("login", "rm", "-f", "/scratch/shares.out")
    assert seen.splitlines() == ["overlay", "virtiofs"], "no home, but the working directory"
    assert lab.vhpc("ctl", "report", str(job.id))["shares"] == "work_dir"


@pytest.mark.promise("job.env-option")
def test_variables_of_the_user_win(lab: Lab) -> None:
    script = "export B=script; echo $A $B; srun -n1 sh -c 'echo $A $B' </dev/null"
    job = lab.finish(script, "-w", "n1", "--export=ALL,A=slurm", "--vhpc-env=A=own,B=own")
    assert job.output() == "own script\nown script\n"
    assert lab.vhpc("ctl", "report", str(job.id))["env"] == "A=own,B=own"


@pytest.mark.promise("job.workdir-option")
def test_programs_start_in_a_directory_of_the_guest(lab: Lab) -> None:
    script = "pwd; cd /usr; srun -n1 pwd </dev/null"
    job = lab.finish(script, "-w", "n1", "--vhpc-workdir=/opt")
    assert job.output() == "/opt\n/usr\n"
    failed = lab.finish("pwd", "-w", "n1", "--vhpc-workdir=/none")
    assert "couldn't start in /none: No such file or directory" in failed.output()


@pytest.mark.promise("job.environment-file")
def test_a_group_shares_options_in_a_file(lab: Lab) -> None:
    def write(text: str) -> None:
        lab.run("login", "tee", "/scratch/lab.toml", user="alice", stdin=text)

    write('image = "debian-minimal"\nworkdir = "/opt"\nbatch = "guest"\nenv.A = "file"\n')
    where = ("-w", "n1", "--vhpc-environment=/scratch/lab.toml", "--vhpc-workdir=/usr")
    job = lab.finish("pwd; echo $A; uname -r", *where, image=None)
    assert job.output().splitlines()[:2] == ["/usr", "file"]
    assert job.output().splitlines()[2] != kernel(lab)
    report = lab.vhpc("ctl", "report", str(job.id))
    assert report["environment"] == "/scratch/lab.toml"
    assert report["from_file"] == ["image", "batch", "env"]
    write("image = 1\n")
    refused = lab.run("login", "sbatch", *where, "--wrap=true", user="alice", check=False)
    lab.run("login", "rm", "/scratch/lab.toml", user="alice")
    assert "line 1: image: a string is expected" in refused.err
    assert "no job was created" in refused.err


@pytest.mark.promise("mount.folder")
def test_a_folder_of_a_share_is_at_a_second_place(lab: Lab) -> None:
    lab.run("login", "mkdir", "-p", "/home/alice/set/deep", user="alice")
    lab.run("login", "ln", "-sfn", "/etc", "/home/alice/elsewhere", user="alice")
    script = "exec 2>&1; echo new >/data/a/file; cat ~/set/file; echo x >/opt/set/file; ls -d /opt/set/deep"
    mounts = "--vhpc-mount=/home/alice/set:/data/a,/home/alice/set:/opt/set:ro"
    job = lab.finish(script, "-w", "n1", mounts)
    assert job.output().splitlines()[-1] == "/opt/set/deep"
    assert "new" in job.output().splitlines()
    assert "Read-only file system" in job.output()
    assert lab.vhpc("ctl", "report", str(job.id))["mounts"] == mounts.partition("=")[2]
    for source, why in (("elsewhere", "it is in no shared folder"), ("none", "No such file or directory")):
        failed = lab.finish("true", "-w", "n1", f"--vhpc-mount=/home/alice/{source}:/x")
        assert why in failed.output()
    assert "DRAIN" not in lab.node_state("n1")[0]


@pytest.mark.promise("job.exit")
@pytest.mark.parametrize(
    ("script", "row"),
    [
        ("exit 0", ["COMPLETED", "0:0"]),
        ("exit 7", ["FAILED", "7:0"]),
        ("exit 255", None),  # 127:0 before Slurm 25.11, which took 128 away; 255:0 since
        ("kill -SEGV $$", ["FAILED", "0:11"]),
    ],
)
def test_accounting_has_the_exit_status_of_the_script(lab: Lab, script: str, row: list[str] | None) -> None:
    inside, outside = lab.submit(script), lab.submit(script, image=None)
    inside.wait()
    outside.wait()
    assert inside.accounted() == outside.accounted()
    if row is not None:
        assert inside.accounted() == row
    assert inside.accounted(step=".batch") == outside.accounted(step=".batch")


def test_accounting_has_the_exit_status_of_a_step(lab: Lab) -> None:
    job = lab.finish("srun sh -c 'exit 7'; echo step said $?; srun sh -c 'kill -9 $$'; exit 0")
    assert "step said 7" in job.output()
    assert job.accounted() == ["COMPLETED", "0:0"]
    assert job.accounted(step=".0") == ["FAILED", "7:0"]
    assert job.accounted(step=".1") in (["FAILED", "0:9"], ["CANCELLED", "0:9"])


def test_streams_land_where_slurms_options_say(lab: Lab) -> None:
    job = lab.finish(
        "echo to-out; echo to-err >&2; srun -o step-%j-%t.out -n2 sh -c 'echo rank $SLURM_PROCID'",
        "-n2",
        "-o",
        "out-%j",
        "-e",
        "err-%j",
    )
    assert job.output("out-{id}") == "to-out\n"
    assert "to-err\n" in job.output("err-{id}")
    assert job.output("step-{id}-0.out") == "rank 0\n"
    assert job.output("step-{id}-1.out") == "rank 1\n"


@pytest.mark.promise("job.environment")
def test_the_environment_is_the_one_a_job_without_guest_has(lab: Lab) -> None:
    """Names that differ by nature (where the script is spooled, ids) are compared without their values."""
    script = "env -0 | sort -z | tr '\\0\\n' '\\n '"
    inside = lab.finish(script, "-w", "n1")
    outside = lab.finish(script, "-w", "n1", image=None)

    def names(text: str) -> dict[str, str]:
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    theirs, ours = names(outside.output()), names(inside.output())
    ignore = {"_", "VHPC_SESSION", "VHPC_MEM_MB", "SLURM_TASK_PID"}
    assert set(ours) - set(theirs) - ignore == {
        "SLURM_SPANK_VHPC_IMAGE",
        "SLURM_SPANK__SLURM_SPANK_OPTION_vhpc_vhpc_image",
        "VHPC_JOB_GENERATION",
        "VHPC_JOB_IMAGE",
    }
    assert set(theirs) - set(ours) == set()
    differ = {k for k in theirs if k not in ignore and theirs[k] != ours[k]}
    assert differ <= {
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_JOB_START_TIME",
        "SLURM_JOB_END_TIME",
        "SLURM_JOB_SLUID",
    }


@pytest.mark.promise("job.pty")
def test_srun_pty_gives_a_terminal_of_the_right_size(lab: Lab) -> None:
    inner = f"srun --vhpc-image={IMAGE} --pty sh -c 'tty; stty size; uname -r'"
    done = lab.run("login", "script", "-qec", f"stty rows 33 cols 101; {inner}", "/dev/null", user="alice")
    lines = [line.strip() for line in done.out.splitlines() if line.strip()]
    assert any("/dev/pts/" in line for line in lines), done
    assert "33 101" in lines
    assert lines[-1] != kernel(lab)


def test_salloc_with_srun_enters_the_guest(lab: Lab) -> None:
    done = lab.run(
        "login",
        "salloc",
        f"--vhpc-image={IMAGE}",
        "-N2",
        "srun",
        "sh",
        "-c",
        "echo $(hostname) $(uname -r)",
        user="alice",
    )
    lines = sorted(done.out.split("\n"))[1:]
    assert [line.split()[0] for line in lines] == ["n1", "n2"], done
    assert kernel(lab) not in {line.split()[1] for line in lines}


def test_sallocs_own_shell_is_in_the_guest_and_can_start_steps(lab: Lab) -> None:
    typed = "echo shell $(hostname) $(uname -r)\nsrun sh -c 'echo step $(hostname)' </dev/null\nexit 3\n"
    done = lab.run(
        "login",
        "script",
        "-qec",
        f"salloc --vhpc-image={IMAGE} -N1 -w n2",
        "/dev/null",
        user="alice",
        stdin=typed,
        check=False,
    )
    shell = re.search(r"shell (n\d) (\S+)", done.out)
    assert shell is not None, done
    assert shell[1] == "n2"
    assert shell[2] != kernel(lab)
    assert "step n2" in done.out
    assert done.code == 3


def test_srun_alone_gets_a_job_and_a_guest_of_its_own(lab: Lab) -> None:
    done = lab.run(
        "login", "srun", f"--vhpc-image={IMAGE}", "-n2", "-l", "sh", "-c", "cat; exit 5", user="alice",
        stdin="typed\n", check=False,
    )  # fmt: skip
    assert sorted(done.out.splitlines()) == ["0: typed", "1: typed"], done
    assert done.code == 5


def test_scancel_ends_the_processes_in_the_guest_and_the_guest(lab: Lab) -> None:
    job = lab.submit("trap 'echo got-term; exit 1' TERM; echo up; sleep 300 & wait", "-w", "n1")
    runs(lab, job)
    lab.run("login", "scancel", str(job.id), user="alice")
    assert job.wait() == "CANCELLED"
    lab.quiet()
    assert "got-term" in job.output()


@pytest.mark.promise("clean.poweroff")
def test_guests_power_off_and_no_epilog_waits_for_its_deadline(lab: Lab) -> None:
    with ExitStack() as stack:
        for node in NODES:
            line = f"poweroff_timeout_s = {POWEROFF_TIMEOUT_S}"
            stack.enter_context(configured(lab, node, "guests", line))
        jobs = [lab.submit("srun true", "-N2") for _ in range(4)]
        for job in jobs:
            assert job.wait(timeout=400) == "COMPLETED"
        lab.quiet()
    for job in jobs:
        nodes = lab.vhpc("ctl", "timeline", str(job.id))["nodes"]
        took = {
            node["node"]: stage["took_s"]
            for node in nodes
            for stage in node["stages"]
            if stage["name"] == "power off"
        }
        assert took.keys() == {"n1", "n2"}
        assert max(took.values()) < POWEROFF_TIMEOUT_S, took


@pytest.mark.promise("job.signals")
def test_the_time_limit_ends_the_job_and_its_guest(lab: Lab) -> None:
    job = lab.submit("trap 'echo got-term; exit 1' TERM; sleep 600 & wait", "--time=1")
    assert job.wait(timeout=200) == "TIMEOUT"
    assert "got-term" in job.output()


def has_lines(lab: Lab, path: str, number: int) -> bool:
    return lab.run("login", "grep", "-c", "", path, check=False).out == f"{number}\n"


@pytest.mark.promise("place.cores")
def test_two_users_side_by_side_on_one_node_have_their_own_cores(lab: Lab) -> None:
    script = "uname -r; nproc; until [ -e /scratch/go ]; do sleep 0.5; done"
    lab.run("ctl", "rm", "-f", "/scratch/go")
    try:
        jobs = [
            lab.submit(script, "-n1", "-w", "n1", "-o", "side-%j", user=user) for user in ("alice", "bob")
        ]
        for job in jobs:
            until(partial(has_lines, lab, f"/home/{job.user}/side-{job.id}", 2), f"job {job.id} to run", 240)
        cpus = []
        for job in jobs:
            plan = lab.vhpc("n1", "plan", str(job.id))
            guest = plan["guests"][0]
            pinned = {pin["os_cpu"] for pin in guest["pins"]}
            assert pinned == {int(job.show()["CPU_IDs"])}  # one socket, no SMT: abstract = OS ids
            cpus.append(pinned)
        assert not cpus[0] & cpus[1]
        uids = {lab.run("n1", "sh", "-c", "ps -eo uid,args | grep '[q]emu-system' | awk '{print $1}'").out}
        assert len(set("".join(uids).split())) == 2, "each QEMU has a uid of its own"
    finally:
        lab.run("ctl", "touch", "/scratch/go")
    for job in jobs:
        job.wait()
        assert job.accounted() == ["COMPLETED", "0:0"]
        assert job.output("side-{id}").splitlines()[1] == "1"
    lab.run("ctl", "rm", "-f", "/scratch/go")


@pytest.mark.promise("job.native")
def test_a_job_without_an_image_is_untouched(lab: Lab) -> None:
    job = lab.finish("uname -r; srun -n1 uname -r", image=None)
    assert job.output().splitlines() == [kernel(lab)] * 2


def test_with_batch_on_the_host_only_tasks_are_in_guests(lab: Lab) -> None:
    job = lab.finish("uname -r; srun -n1 uname -r", "--vhpc-batch=host")
    script, task = job.output().splitlines()
    assert script == kernel(lab)
    assert task != kernel(lab)


def test_a_step_with_another_image_than_its_job_is_refused(lab: Lab) -> None:
    job = lab.finish("srun --vhpc-image=other-image true; echo step said $?")
    out = job.output()
    assert "step said 0" not in out
    assert re.search(r"vhpc.*other-image", out), out


def test_the_console_is_written_to_the_users_path(lab: Lab) -> None:
    talk = "sudo sh -c 'echo hello-from-the-guest > /dev/console'"
    job = lab.finish(talk, "--vhpc-console=con-%j-%N", "-w", "n2")
    lab.quiet()
    assert "hello-from-the-guest" in job.output("con-{id}-n2")


@pytest.mark.promise("user.console-file")
def test_an_unwritable_console_is_named_and_the_job_runs(lab: Lab) -> None:
    """At once where it can be known, in the job's stderr; later in AdminComment."""
    option = "--vhpc-console=/root/con-%j"
    lines = r"^vhpc: --vhpc-console: /root/con-%d cannot be written on n\d: Permission denied; .*$"
    batch = lab.submit("echo ran; srun -N2 true; srun true", option, "-N2", "-o", "out", "-e", "err")
    alone = lab.run("login", "srun", f"--vhpc-image={IMAGE}", option, "-n2", "echo", "ran", user="alice")
    assert batch.wait() == "COMPLETED"
    assert batch.output("out") == "ran\n"
    assert len(re.findall(lines % batch.id, batch.output("err"), re.M)) == 1
    assert alone.out == "ran\nran\n"
    assert len(re.findall(lines.replace("%d", r"\d+"), alone.err, re.M)) == 1, alone
    late = lab.finish("rm sub; mkdir sub", "-w", "n1", "--vhpc-console=sub", "-o", "late")
    try:
        lab.quiet()
        assert late.accounted() == ["COMPLETED", "0:0"]
        assert lab.read("alice", "late") == ""
        (comment,) = late.accounted("AdminComment")
        # the last words are dd's, and differ from release to release
        said = "; a console could not be written: /home/alice/sub on n1: is a directory"
        assert comment.startswith("vhpc: image debian-minimal:latest@sha256:")
        assert comment.lower().endswith(said)
    finally:
        lab.run("login", "rm", "-rf", "/home/alice/sub", user="alice")
