# SPDX-License-Identifier: Apache-2.0
"""The lab itself: hosts, commands in them, Slurm with accounting, and a clean end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
VLAB = str(CHECKOUT / "lab/vlab")

VERSION = "include/slurm/slurm_version.h"

# Builds the plugin for a tree as `vlab deploy` does, and says where it is.
COLLECT = """
import sys
from pathlib import Path
from vlablib.deploy import collect
programs, failures = collect(Path(sys.argv[1]))
assert not failures, failures
print(programs["vhpc.so"])
"""

pytestmark = [
    pytest.mark.lab,
    pytest.mark.vlab_itself,
    pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root"),
]


def vlab(*words: str, state: str = "", text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"VLAB_STATE": state} if state else {})}
    return subprocess.run(
        [VLAB, *words], check=False, input=text, capture_output=True, text=True, env=environment
    )


def status(state: str = "") -> dict[str, Any]:
    result: dict[str, Any] = json.loads(vlab("status", "--json", state=state).stdout)
    return result


@pytest.fixture(scope="module", autouse=True)
def _lab() -> None:
    result = vlab("up")
    assert result.returncode == 0, result.stderr


def test_exit_status_comes_back() -> None:
    assert vlab("exec", "n1", "--", "sh", "-c", "exit 42").returncode == 42


def test_death_by_a_signal_comes_back_as_128_and_its_number() -> None:
    assert vlab("exec", "n1", "--", "sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL


def test_an_unknown_command_gives_127_as_in_a_shell() -> None:
    result = vlab("exec", "n1", "--", "no-such-command")
    assert result.returncode == 127
    assert "no-such-command: No such file or directory" in result.stderr


def test_stdin_stdout_and_stderr_are_those_of_the_caller() -> None:
    result = vlab("exec", "n2", "--", "sh", "-c", "cat; echo problem >&2", text="some text")
    assert (result.stdout, result.stderr) == ("some text", "problem\n")


def test_a_user_has_uid_groups_and_home() -> None:
    result = vlab("exec", "-u", "bob", "login", "--", "sh", "-c", "id -u; id -Gn; pwd; hostname; umask")
    assert result.stdout.split() == ["2002", "bob", "project", "/home/bob", "login", "0022"]


def test_a_signal_to_vlab_reaches_the_command() -> None:
    script = 'trap "echo caught; exit 3" TERM; echo ready; while sleep 0.1; do :; done'
    with subprocess.Popen([VLAB, "exec", "n1", "--", "sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.stdout.read() == b"caught\n"
        assert process.wait(60) == 3


def test_a_killed_vlab_takes_its_command_along() -> None:
    with subprocess.Popen(
        [VLAB, "exec", "-u", "alice", "n1", "--", "sh", "-c", "echo $$; exec sleep 600"],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        pid = process.stdout.readline().decode().strip()
        process.kill()
    for _ in range(50):
        if vlab("exec", "n1", "--", "test", "-d", f"/proc/{pid}").returncode:
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} lives on")


def test_a_terminal_is_given_on_demand() -> None:
    result = vlab("exec", "--tty", "-u", "alice", "login", "--", "sh", "-c", "tty; stty size")
    assert result.stdout.split() == ["/dev/pts/0", "24", "80"]


def test_hosts_share_homes_but_not_their_own_disks() -> None:
    vlab("exec", "-u", "alice", "n1", "--", "sh", "-c", "echo shared > lab-test; echo own > /tmp/lab-test")
    seen = vlab("exec", "-u", "alice", "n2", "--", "sh", "-c", "cat lab-test; rm lab-test; ls /tmp/lab-test")
    assert seen.stdout == "shared\n"
    assert vlab("exec", "n1", "--", "rm", "/tmp/lab-test").returncode == 0


def test_the_catalogue_folder_is_for_ctl_to_write() -> None:
    assert vlab("exec", "n1", "--", "touch", "/shared/vhpc/x").returncode != 0
    assert vlab("exec", "ctl", "--", "sh", "-c", "touch /shared/vhpc/x && rm /shared/vhpc/x").returncode == 0


def test_no_host_has_a_kvm_device_that_no_guest_could_boot_on() -> None:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    present = vlab("exec", "n1", "--", "test", "-e", "/dev/kvm").returncode == 0
    assert present == (Path("/dev/kvm").exists() and bool({"svm", "vmx"} & set(flags)))


def made_for(plugin: str) -> int:
    """The number of the Slurm that a plugin was built for, by which Slurm takes it or not."""
    symbols = subprocess.run(["nm", "-D", plugin], capture_output=True, text=True, check=True).stdout
    (place,) = re.findall(r"^([0-9a-f]+) \w plugin_version$", symbols, re.MULTILINE)
    words = [
        "objdump",
        "-s",
        "-j.rodata",
        f"--start-address=0x{place}",
        f"--stop-address={int(place, 16) + 4}",
        plugin,
    ]
    dump = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    (raw,) = re.findall(r"^ [0-9a-f]+ ([0-9a-f]{8}) ", dump, re.MULTILINE)
    return int.from_bytes(bytes.fromhex(raw), "little")


def test_each_tree_has_a_plugin_for_its_own_slurm(tmp_path: Path) -> None:
    """Two caches of one checkout hold trees of the same name, perhaps of another Slurm."""
    tree = Path(status()["rootfs"])
    (headers,) = (path.parent for top in ("usr", "opt/*") for path in tree.glob(f"{top}/{VERSION}"))
    versions: list[int] = []
    built = set()
    for number in ("0x180b05", "0x180b06", "0x180b07"):  # the third in the place of the second
        copy = tmp_path / ("first" if not versions else "second") / tree.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(headers, copy / headers.relative_to(tree))
        header = copy / headers.relative_to(tree) / "slurm_version.h"
        text, found = re.subn(
            r"(SLURM_VERSION_NUMBER\s+)0x[0-9a-fA-F]+", rf"\g<1>{number}", header.read_text()
        )
        assert found == 1
        header.write_text(text)
        os.utime(header, (0, 0))  # a package's files are as old as its release
        done = subprocess.run(
            [sys.executable, "-c", COLLECT, str(copy)],
            cwd=CHECKOUT / "lab",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        versions.append(made_for(done.stdout.strip()))
        built.add(Path(done.stdout.strip()).parents[1])
    assert versions == [0x180B05, 0x180B06, 0x180B07]
    for folder in built:
        shutil.rmtree(folder)


def test_nothing_of_the_lab_shows_in_the_network_of_the_machine() -> None:
    assert "vlab" not in subprocess.run(["ip", "link"], check=True, capture_output=True, text=True).stdout


def test_a_second_up_leaves_processes_alone() -> None:
    assert vlab("up").returncode == 0  # takes in what may have changed in the checkout meanwhile
    before = status()
    assert vlab("up").returncode == 0
    assert status()["hosts"] == before["hosts"]


def test_up_restarts_a_dead_daemon_and_nothing_else() -> None:
    before = status()["hosts"]
    # no other daemon notices that munged of the login host is away
    assert vlab("service", "login", "kill", "munged").returncode == 0
    assert vlab("service", "login", "status", "munged").stdout == "dead\n"
    assert vlab("status").returncode == 1
    assert vlab("up").returncode == 0
    after = status()["hosts"]
    assert before["login"]["units"].pop("munged")["pid"] != after["login"]["units"].pop("munged")["pid"]
    assert after == before


def test_foreign_entries_survive_on_a_fabric_that_restarts() -> None:
    before = status()["hosts"]
    if "opensm" in before["ctl"]["units"]:
        pytest.skip("this lab was brought up with a fabric; `vlab up --no-fabric` lets this test run")
    assert vlab("up", "--fabric").returncode == 0
    try:
        during = status()["hosts"]
        assert {during["ctl"]["units"][name]["state"] for name in ("ibsim", "opensm")} == {"ready"}
        assert vlab("exec", "ctl", "--", "vhpc", "fabric", "audit").returncode == 0
        # vhpcd reads another configuration; a plain `up` keeps the fabric
        assert before["ctl"]["units"].pop("vhpcd") != during["ctl"]["units"].pop("vhpcd")
        assert vlab("up").returncode == 0
        assert "opensm" in status()["hosts"]["ctl"]["units"]
    finally:
        assert vlab("up", "--no-fabric").returncode == 0
    after = status()["hosts"]
    after["ctl"]["units"].pop("vhpcd")
    assert after == before
    assert vlab("exec", "ctl", "--", "pgrep", "-x", "ibsim|opensm").returncode == 1


def test_a_two_node_job_runs_and_is_accounted() -> None:
    script = "#!/bin/sh\nsrun -N2 -n2 hostname | sort\nexit 7\n"
    submit = "sbatch --parsable --wait -N2 -o lab-test.%j"
    result = vlab("exec", "-u", "alice", "login", "--", *submit.split(), text=script)
    assert result.returncode == 7, result.stderr
    job = result.stdout.strip()
    output = vlab("exec", "-u", "alice", "login", "--", "sh", "-c", f"cat lab-test.{job}; rm lab-test.{job}")
    assert output.stdout == "n1\nn2\n"
    row = ""
    for _ in range(60):  # slurmctld sends records in bundles
        query = f"sacct -nPX -j {job} -o user,account,nodelist,state,exitcode".split()
        row = vlab("exec", "-u", "alice", "login", "--", *query).stdout.strip()
        if "FAILED" in row:
            break
        time.sleep(0.5)
    assert row == "alice|users|n[1-2]|FAILED|7:0"


def test_salloc_opens_its_shell_on_the_first_node() -> None:
    result = vlab(
        "exec", "--tty", "-u", "bob", "login", "--", "salloc", "-N1", "-w", "n2", text="hostname\nexit 9\n"
    )
    assert "n2" in result.stdout.split()
    assert result.returncode == 9


@pytest.fixture
def other_lab(tmp_path: Path) -> Iterator[str]:
    state = f"/run/vhpc-lab-test-{os.getpid()}-{tmp_path.name[:8]}"
    yield state
    vlab("down", state=state)


def _namespaces(pid: int) -> set[str]:
    return {str((Path(f"/proc/{pid}/ns") / kind).readlink()) for kind in ("mnt", "net", "pid", "uts", "ipc")}


def _all_namespaces() -> set[str]:
    found: set[str] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found |= _namespaces(int(entry.name))
        except OSError:
            continue
    return found


def _leftovers(state: str) -> list[str]:
    places = (Path("/run"), Path("/var/tmp"))
    digests = {path.name for place in places for path in place.glob("vhpc-lab*")}
    mounts = [
        line
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
        if "vhpc-lab" in line
    ]
    return sorted(digests) + mounts + [state] * Path(state).exists()


@pytest.mark.slow
def test_down_leaves_nothing_even_of_a_lab_whose_up_was_killed(other_lab: str) -> None:
    before = _leftovers(other_lab)
    with subprocess.Popen([VLAB, "up"], env={**os.environ, "VLAB_STATE": other_lab}) as process:
        while not Path(other_lab, "n1.started").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    assert vlab("up", "--nodes", "3", state=other_lab).returncode == 0
    own = _namespaces(os.getpid())
    used = set[str]()
    for host in status(other_lab)["hosts"].values():
        used |= _namespaces(host["pid"])
    assert len(used) == 5 * 5, "five namespaces of its own for each of five hosts"
    assert not used & own
    assert vlab("down", state=other_lab).returncode == 0
    assert not used & _all_namespaces()
    assert _leftovers(other_lab) == before
    assert vlab("status", state=other_lab).returncode == 3
    assert vlab("down", state=other_lab).returncode == 0
