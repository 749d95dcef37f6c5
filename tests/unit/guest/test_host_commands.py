# SPDX-License-Identifier: Apache-2.0
"""Slurm commands called in a guest, through the real agent, shim and vhpc-run; only Slurm is a fake.

No folder is shared with a host here, so that each file is one that only the guest has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]

NAMES = "srun sbatch salloc sacctmgr scancel scontrol squeue"

# Records how it was called, and what it could read; as salloc, then runs its command.
FAKE = """#!PYTHON -IS
import json, os, pathlib, subprocess, sys
record = {"argv": sys.argv[1:], "null": os.fstat(0).st_rdev == os.makedev(1, 3)}
record["cwd"] = [os.getcwd(), os.environ.get("VHPC_CWD")]
found = [pathlib.Path(word) for word in sys.argv[1:] if word.startswith("/tmp/vhpc-")]
record["scripts"] = [[path.read_text(), oct(path.parent.stat().st_mode & 0o777)] for path in found]
with open(WHERE, "a") as file:
    file.write(json.dumps(record) + "\\n")
if sys.argv[0].endswith("salloc"):
    relay = next((i for i, word in enumerate(sys.argv) if word.endswith("/vhpc-run")), None)
    if relay:
        env = {**os.environ, "SLURM_JOB_ID": "77"}
        sys.exit(subprocess.run(sys.argv[relay:], env=env).returncode)
"""


class Commands:
    """Fakes of Slurm's commands on the host, and scripts in the guest that call them."""

    def __init__(self, guest: Guest, folder: Path) -> None:
        self.guest, self.folder = guest, folder
        self.calls_file = folder / "calls"
        bin_host, bin_guest = folder / "host", folder / "guest"
        for place in (bin_host, bin_guest):
            place.mkdir()
        for name in NAMES.split():
            (bin_host / name).write_text(
                FAKE.replace("WHERE", repr(str(self.calls_file))).replace("PYTHON", sys.executable)
            )
            (bin_host / name).chmod(0o755)
            (bin_guest / name).symlink_to(guest.bin / "vhpc-agent")
        self.env = {
            "VHPC_RUN_COMMANDS": NAMES.replace(" ", ":"),
            "VHPC_RUN_COMMAND_PATH": str(bin_host),
            "PATH": f"{bin_guest}:{os.environ['PATH']}",
        }

    def run(self, script: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """A batch script in the guest, whose working directory is the test's folder."""
        return self.guest.run("sh", "-c", f"cd {self.folder}; {script}", stdin=stdin, **self.env)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Calls of the host's commands."""
        if not self.calls_file.exists():
            return []
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]


@pytest.fixture
def commands(guest: Guest, tmp_path: Path) -> Commands:
    return Commands(guest, tmp_path)


def _script(folder: Path, name: str = "job.sh", text: str = "#!/bin/sh\necho $1\n") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# --- sbatch -------------------------------------------------------------------


@pytest.mark.promise("attack.host-command")
def test_a_script_of_the_guest_reaches_the_hosts_sbatch(commands: Commands, tmp_path: Path) -> None:
    text = "#!/bin/sh\n#SBATCH --job-name=other\necho \xe4 $1\n"
    script = _script(tmp_path, text=text)
    done = commands.run(f"sbatch -N 2 --time=1 --parsable {script} 'a b' --not-an-option '' '*'")
    assert (done.returncode, done.stderr) == (0, b"")
    (call,) = commands.calls
    copy = Path(call["argv"][4])
    assert call["argv"] == ["-N", "2", "--time=1", "--parsable", str(copy), "a b", "--not-an-option", "", "*"]
    assert copy.name == "job.sh"
    assert call["scripts"] == [[text, "0o700"]]
    assert not copy.parent.exists()


@pytest.mark.parametrize(
    "options",
    [
        "",
        "-Hn4",
        "-n 4",
        "-n4 -J name",
        "--job-na name",
        "--wait",
        "-W",
        "--nice --exclusive -k",
        "--dependency afterok:1 --export ALL",
        "--vhpc-image debian",
        "--other=value",
        "--other",
        "--other value",
        "--",
        "-N1 : -N2",
    ],
)
def test_the_script_is_found_among_the_options(commands: Commands, tmp_path: Path, options: str) -> None:
    _script(tmp_path)
    assert commands.run(f"sbatch {options} job.sh 1").returncode == 0
    argv = commands.calls[0]["argv"]
    assert argv[:-2] == options.split()
    assert argv[-1] == "1"
    assert argv[-2].startswith("/tmp/vhpc-")


def test_a_script_is_searched_as_sbatch_searches_it(commands: Commands, tmp_path: Path) -> None:
    places = {"here": tmp_path, "chdir": tmp_path / "chdir", "path": tmp_path / "guest"}
    for name, folder in places.items():
        folder.mkdir(exist_ok=True)
        _script(folder, text=f"#!/bin/sh\n# {name}\n")
    commands.run(
        "sbatch job.sh; sbatch -D chdir job.sh; sbatch --chdir=chdir ./job.sh; rm job.sh; sbatch job.sh"
    )
    assert [call["scripts"][0][0].split()[-1] for call in commands.calls] == ["here", "chdir", "here", "path"]


def test_a_script_may_come_from_a_pipe_or_a_descriptor(commands: Commands) -> None:
    commands.run("mkfifo pipe.sh; printf '#!/bin/sh\\n:\\n' > pipe.sh & sbatch pipe.sh")
    commands.run("printf '#!/bin/sh\\n:\\n' | sbatch /dev/stdin 5")
    assert [call["scripts"][0][0] for call in commands.calls] == ["#!/bin/sh\n:\n"] * 2
    assert Path(commands.calls[1]["argv"][0]).name == "stdin"


def test_without_a_script_sbatch_reads_its_input(commands: Commands) -> None:
    commands.run("sbatch -N1", stdin=b"#!/bin/sh\n")
    commands.run("sbatch --wrap 'echo hi' -N1", stdin=b"not read")
    assert [(call["argv"], call["null"]) for call in commands.calls] == [
        (["-N1"], False),
        (["--wrap", "echo hi", "-N1"], True),
    ]


@pytest.mark.promise("job.paths")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sbatch no.sh", b"sbatch: error: Unable to open file no.sh: No such file or directory\n"),
        ("sbatch /etc", b"sbatch: error: Unable to open file /etc: No such file or directory\n"),
        ("sbatch --export-file=3 job.sh", b"a descriptor of the guest does not reach the host"),
        ("sbatch --nodefile nodes job.sh", b"--nodefile=nodes: this path is local to the guest"),
        ("sbatch -w ./nodes job.sh", b"--nodelist=./nodes: this path is local to the guest"),
        ("sbatch huge.sh", b"huge.sh: the script is larger than 4 MiB\n"),
        ("srun -o out-%j.txt true", b"srun: error: --output=out-%j.txt: this path is local"),
        ("srun -i nodes cat", b"srun: error: --input=nodes: this path is local"),
        ("srun --multi-prog nodes", b"srun: error: nodes: this path is local"),
        ("srun --bcast=/tmp/x ./job.sh", b"srun: error: --bcast: ./job.sh: this path is local"),
        ("srun --task-prolog=./job.sh true", b"srun: error: --task-prolog=./job.sh: this path is local"),
        ("scontrol write batch_script 5", b"scontrol: error: the working directory: this path is local"),
        ("scontrol write batch_script 5 ./x", b"scontrol: error: ./x: this path is local"),
        ("sacctmgr -i add user bob", b"sacctmgr: error: add: in a guest sacctmgr only shows"),
        ("sacctmgr mod user bob", b"sacctmgr: error: modify: in a guest sacctmgr only shows"),
    ],
)
def test_impossible_host_commands_are_refused_in_one_line(
    commands: Commands, tmp_path: Path, command: str, said: bytes
) -> None:
    _script(tmp_path)
    (tmp_path / "nodes").write_text("n1\n")
    (tmp_path / "huge.sh").write_bytes(b"#!/bin/sh\n" + bytes(4 << 20))
    done = commands.run(command)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert commands.calls == []


@pytest.mark.parametrize(
    "command",
    ["srun -o none -e /dev/null -i 0 true", "srun -o /no/such/folder/x true", "srun -w n1 true",
     "scontrol write batch_script 5 -", "sbatch -o /tmp/x job.sh", "srun true -o out"],
)  # fmt: skip
def test_possible_host_commands_are_not_refused(commands: Commands, tmp_path: Path, command: str) -> None:
    _script(tmp_path)
    assert commands.run(command).returncode == 0
    assert len(commands.calls) == 1


def test_the_copy_of_a_script_goes_when_its_caller_is_killed(commands: Commands, tmp_path: Path) -> None:
    _script(tmp_path)
    seen = tmp_path / "seen"
    (tmp_path / "host" / "sbatch").write_text(f"#!/bin/sh\necho $1 > {seen}\nexec sleep 1000\n")
    wait = f"until [ -s {seen} ]; do sleep 0.1; done"
    for script in (f"sbatch job.sh & {wait}; kill -9 $!; sleep 1", f"sbatch job.sh & {wait}"):
        commands.run(script)
        assert not Path(seen.read_text().strip()).parent.exists()
        seen.unlink()


# --- salloc -------------------------------------------------------------------


@pytest.mark.promise("attack.host-command")
def test_the_command_of_salloc_runs_in_the_guest(commands: Commands, tmp_path: Path) -> None:
    inner = "ps -o comm= -p $PPID; pwd; echo $SLURM_JOB_ID; env | grep VHPC_RUN_; squeue; exit 6"
    done = commands.run(f"salloc -N1 sh -c '{inner}'; echo $?")
    lines = done.stdout.decode().split("\n")
    assert lines == ["vhpc-agent", str(tmp_path), "77", "6", ""], done
    salloc, squeue = commands.calls
    assert salloc["argv"][0] == "-N1"
    assert salloc["argv"][1].endswith("/vhpc-run")
    assert salloc["argv"][2:5] == ["--", "sh", "-c"]
    assert squeue["argv"] == []


def test_the_last_component_of_salloc_has_the_command(commands: Commands) -> None:
    commands.run("salloc -N1 : -N2 -J mine /bin/true; salloc -N1 --no-shell")
    first, second = (call["argv"] for call in commands.calls)
    assert first[:5] == ["-N1", ":", "-N2", "-J", "mine"]
    assert first[5].endswith("/vhpc-run")
    assert first[6:] == ["--", "/bin/true"]
    assert second == ["-N1", "--no-shell"]


def test_a_signal_to_salloc_goes_to_the_hosts_salloc(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "host" / "salloc").write_text(
        "#!/bin/sh\ntrap 'echo term; exit 3' TERM\necho up\nwhile :; do sleep 0.1; done\n"
    )
    done = commands.run(
        "salloc true > out & until grep -q up out; do sleep 0.1; done; kill $!; wait $!; echo $?"
    )
    assert done.stdout == b"3\n"
    assert (tmp_path / "out").read_text() == "up\nterm\n"


def test_a_step_begins_in_a_folder_that_only_the_guest_has(commands: Commands, tmp_path: Path) -> None:
    commands.run("srun true; salloc true; srun -D / true; srun -D sub true; squeue")
    assert [call["cwd"] for call in commands.calls] == [
        ["/tmp", str(tmp_path)],
        ["/tmp", str(tmp_path)],
        ["/tmp", None],
        [str(tmp_path), None],
        [str(tmp_path), None],
    ]
    done = commands.guest.run("sh", "-c", "pwd; env | grep VHPC_CWD", VHPC_CWD=str(tmp_path))
    assert done.stdout.decode() == f"{tmp_path}\n"


# --- the others ---------------------------------------------------------------


@pytest.mark.promise("attack.sacctmgr")
def test_the_hosts_sacctmgr_only_reads(commands: Commands) -> None:
    assert commands.run("sacctmgr -n list user; sacctmgr").returncode == 0
    assert [call["argv"] for call in commands.calls] == [["--readonly", "-n", "list", "user"], ["--readonly"]]


def test_input_that_a_command_does_not_read_is_left_to_the_next(commands: Commands, tmp_path: Path) -> None:
    """As in `while read job; do scancel $job; done < list`."""
    _script(tmp_path)
    words = ["scancel 1", "squeue", "scontrol show job", "sbatch job.sh"]
    done = commands.run(
        f"while read word; do for command in {' '.join(repr(w) for w in words)}; do $command; done; "
        "echo $word; done",
        stdin=b"1\n2\n",
    )
    assert done.stdout == b"1\n2\n"
    assert all(call["null"] for call in commands.calls)
    assert len(commands.calls) == 2 * len(words)


def test_commands_that_read_their_input_get_it(commands: Commands) -> None:
    for command in ("srun cat", "scancel -i 5", "scontrol -M c1", "sacctmgr -n"):
        commands.run(command, stdin=b"x")
    assert [call["null"] for call in commands.calls] == [False] * 4


def test_more_commands_at_once_than_a_session_may_have_all_run(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "host" / "srun").write_text("#!/bin/sh\nsleep 1\necho done $1\n")
    done = commands.run("for i in $(seq 50); do srun $i & done; wait")
    assert done.stderr == b""
    assert sorted(done.stdout.split()[1::2], key=int) == [str(i).encode() for i in range(1, 51)]
    assert done.stderr == b""
