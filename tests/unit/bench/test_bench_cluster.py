# SPDX-License-Identifier: Apache-2.0
"""bench/cluster: CPU time by /proc, requests by sdiag, what its cases compare, its stand-in for guests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pace import limit
from vhpcbench import counted, light_libvirt
from vhpcbench.cluster import WAYS, Case, Sample, Usage, judged
from vhpcbench.common import BenchError, Report

DATA = Path(__file__).resolve().parents[2] / "data"


def test_a_name_with_blanks_and_parentheses_shifts_no_field() -> None:
    # proc(5): utime, stime, cutime and cstime are the fields 14 to 17
    text = "77 (a) b (c)) S 12 " + " ".join(map(str, range(5, 14))) + " 300 50 7 3 20 0 1 0"
    ticks = os.sysconf("SC_CLK_TCK")
    assert counted.ProcessTimes.parse(text) == counted.ProcessTimes(12, 350 / ticks, 10 / ticks)


def test_the_time_of_a_tree_includes_ended_children() -> None:
    times = counted.ProcessTimes
    found = {
        1: times(0, 100.0, 100.0),
        10: times(1, 1.0, 0.5),
        11: times(10, 2.0, 0.0),
        12: times(11, 4.0, 0.25),
        20: times(1, 50.0, 0.0),
    }
    assert counted.tree_s(found, [10, 99]) == 7.75


def test_cpu_time_of_a_child_is_counted_by_the_kernel() -> None:
    before = counted.all_processes()[os.getpid()]
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    after = counted.all_processes()[os.getpid()]
    assert after.children_s - before.children_s > 0.275  # the kernel counts ticks of 10 ms
    now, peak = counted.memory_mib(os.getpid())
    assert 1 < now <= peak


def test_requests_are_counted_by_type_and_not_by_user() -> None:
    found = counted.requests((DATA / "sdiag/24.11.5.txt").read_text())
    # counted by eye in the file
    assert found["REQUEST_COMPLETE_PROLOG"] == 14
    assert found["REQUEST_JOB_INFO_SINGLE"] == 3
    assert "root" not in found
    assert "slurm" not in found


def test_an_output_without_requests_is_an_error() -> None:
    with pytest.raises(BenchError, match="no requests"):
        counted.requests("sdiag: error: Unable to contact slurm controller\n")


def usage(cpu: float, **requests: int) -> Usage:
    return Usage(
        {"slurmctld": cpu, "vhpcd": cpu / 20, "hooks": cpu, "munged": cpu, "nodes": cpu}, Counter(requests)
    )


def case(name: str, later: float, more: int, jobs: int = 1) -> Case:
    """Two rounds of jobs that start after 1 s, and with vhpc ``later`` with so many more requests.

    Before, Slurm's scheduler lets them wait for so long that the targets would be met by chance, or missed.
    """
    made = Case(name, (), jobs)
    for way, wait, start, asked in ((WAYS[0], 1.5, 1.0, 0), (WAYS[1], 0.1, 1.0 + later, more)):
        whole = usage(1.0, REQUEST_COMPLETE_PROLOG=128, REQUEST_UPDATE_JOB=asked, REQUEST_JOB_INFO=asked)
        made.samples[way] = [Sample([wait + start] * jobs, wait, usage(0.5), whole)] * 2
    return made


def test_usage_is_the_difference_of_two_looks() -> None:
    found = usage(3.0, A=5, B=2).since(usage(1.0, A=3, B=2))
    assert found.cpu["nodes"] == 2.0
    assert found.requests == Counter(A=2)


def test_requests_of_others_are_not_counted() -> None:
    assert case("10 jobs", 0.5, 20, jobs=10).added() == {"REQUEST_UPDATE_JOB": 2.0}
    assert case("1 nodes", 0.5, 0).added() == {}


@pytest.mark.parametrize(
    ("later", "most", "met"), [(0.9, 2, True), (1.1, 2, False), (0.9, 130, False)], ids=str
)
def test_each_target_has_a_case_that_misses_it(later: float, most: int, met: bool) -> None:
    cases = [case("1 nodes", 0.1, 2), case("128 nodes", later, most), case("200 jobs", 9.0, 400, jobs=200)]
    report = judged(Report("cluster"), cases)
    assert report.met is met
    assert report.ratios["CPU, vhpcd to slurmctld"] == pytest.approx(0.05)


def test_the_stand_in_finds_the_channel_of_each_domain() -> None:
    for path in sorted((DATA / "domain").glob("*.xml")):
        xml = path.read_text()
        assert light_libvirt.agent_socket(xml).endswith("agent.sock"), path.name
        assert ElementTree.fromstring(light_libvirt.as_test_domain(xml)).get("type") == "test", path.name


def test_the_stand_in_hands_its_first_connection_to_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    agent = tmp_path / "agent"
    agent.write_text(
        f'#!/bin/sh\nls /proc/self/fd >{said}.new; echo "$@" >>{said}.new; mv {said}.new {said}\n'
    )
    agent.chmod(0o755)
    monkeypatch.setattr(light_libvirt, "AGENT", str(agent))
    monkeypatch.setattr(light_libvirt, "REGISTRY", tmp_path / "domains")
    path = str(tmp_path / "agent.sock")
    light_libvirt.start_agent(path, "vhpc-1-0-ab-g0")
    with socket.socket(socket.AF_UNIX) as host:
        host.connect(path)
        until = time.monotonic() + limit(60)
        while not said.exists() and time.monotonic() < until:
            time.sleep(0.01)
    *files, options = said.read_text().splitlines()
    assert options.startswith("--no-system --fd=")
    assert f"--call-socket={path}.call" in options
    # the three standard ones, the connection, and the one that ls uses to read the directory
    assert len(files) == 5


def test_the_stand_in_ends_all_processes_of_a_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, alive, kernel = (tmp_path / name for name in ("agent", "alive", "kernel"))
    # a program of the job that has left its session
    agent.write_text(f"#!/bin/sh\nuname -r >{kernel}\nmkfifo {alive}\nsetsid sleep 600 >{alive} &\nwait\n")
    agent.chmod(0o755)
    monkeypatch.setattr(light_libvirt, "AGENT", str(agent))
    monkeypatch.setattr(light_libvirt, "REGISTRY", tmp_path / "domains")
    path = str(tmp_path / "agent.sock")
    light_libvirt.start_agent(path, "vhpc-1-0-ab-g0")
    assert [domain.name() for domain in light_libvirt.domains()] == ["vhpc-1-0-ab-g0"]
    with socket.socket(socket.AF_UNIX) as host:
        host.connect(path)
        until = time.monotonic() + limit(60)
        while not alive.exists() and time.monotonic() < until:
            time.sleep(0.01)
        with alive.open("rb") as pipe:
            (domain,) = light_libvirt.domains()
            domain.destroy()
            assert pipe.read() == b""  # no process has it any more
    assert kernel.read_text().startswith("2.6.")
    while light_libvirt.domains() and time.monotonic() < until:
        time.sleep(0.01)
    assert not list((tmp_path / "domains").iterdir())
