# SPDX-License-Identifier: Apache-2.0
"""A centre's first day: hosts with Slurm only get vhpc by the commands of docs/install.md alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import document
import firstday
import pytest
from debs import BOOKWORM, LIMIT_S, ROOT, Suite, until
from firstday import HOSTS, LAB, NODES, follow, on

# slow: for each suite four hosts get some 300 MB of packages, build an image and run a job without KVM
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]
HOME = "/home/alice"
# what a browser does with the address of `vhpc web`: it keeps the cookie
BROWSER = """
import http.cookiejar, sys, urllib.request
jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
browser = urllib.request.build_opener(jar)
browser.open(sys.argv[1], timeout=20).read()
place = sys.argv[1].split("/?")[0]
print(browser.open(place + sys.argv[2], timeout=20).read().decode())
"""
READ = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())"


@dataclass(frozen=True)
class Day:
    """What the hosts and the first job have left."""

    setups: dict[str, list[dict[str, str]]]
    job: str


@pytest.fixture(scope="module")
def day(suite: Suite, built: Callable[[Suite], Path]) -> Iterator[Day]:
    try:
        firstday.begin(suite, built(suite))
        install(suite)
        settings = "\n".join(document.blocks("slurm.conf")[0][1])
        for host in HOSTS:
            follow(host, "Configuration of every host")
            if suite == BOOKWORM:
                follow(host, "Debian 12", 1)
            on(host, "sh", "-c", 'printf "%s\\n" "$1" >> /etc/slurm/slurm.conf', "sh", settings)
        firstday.as_in_a_lab()
        follow("ctl", "Configuration of every host", 1)
        for node in NODES:
            follow(node, "Configuration of every host", 2)
        follow("login", "Configuration of every host", 3)
        follow("ctl", "Metrics")
        firstday.wait_for_nodes()
        roles = {"ctl": "controller", "login": "login", "n1": "node", "n2": "node"}
        setups = {
            host: json.loads(on(host, "vhpc", "setup", role, "--dry-run", "--json"))["steps"]
            for host, role in roles.items()
        }
        script = "\n".join([*document.commands("The first job")[0], "echo $job"])
        said = on("login", "bash", "-euc", script, user="alice", cwd=HOME)
        yield Day(setups, said.split()[-1])
    finally:
        firstday.end()


def install(suite: Suite) -> None:
    titles = {"ctl": "Controller", "login": "Login hosts", "n1": "Nodes", "n2": "Nodes"}
    for host in HOSTS:
        assert (
            on(host, "sh", "-c", "dpkg-query -W -f '${Package} ' 'vhpc-*' 'libvirt*' 'qemu*' || true") == ""
        )
        follow(host, "On every host")
        follow(host, titles[host])
    follow("ctl", "Controller", 1)
    if suite == BOOKWORM:
        for node in NODES:
            follow(node, "Debian 12")
            follow(node, "Debian 12", 2)


def test_apt_has_installed_the_dependencies_of_the_packages(day: Day, suite: Suite) -> None:
    needs = [("login", "python3-uvicorn"), ("n1", "python3-libvirt")]
    if suite == BOOKWORM:
        needs += [("ctl", "python3-click"), ("n1", "qemu-system-x86")]
    else:
        needs += [("ctl", "python3-msgspec"), ("n1", "virtiofsd")]
    for host, name in needs:
        assert on(host, "dpkg-query", "-W", "-f", "${db:Status-Status}", name) == "installed"
    look = "dpkg-query -W -f '${db:Status-Status}' vhpc-spank-plugin || true"
    assert on("ctl", "sh", "-c", look) in ("", "not-installed")


@pytest.mark.promise("install.first-day")
@pytest.mark.parametrize("host", HOSTS)
def test_setup_and_doctor_leave_nothing_to_repair(day: Day, host: str) -> None:
    assert {step["state"] for step in day.setups[host]} <= {"ok"}
    found = json.loads(on(host, "vhpc", "doctor", "--json"))
    assert [one for one in found if one["level"] == "error"] == []


def test_slurmctld_has_its_hooks_in_memory(day: Day) -> None:
    found = {one["check"]: one for one in json.loads(on("ctl", "vhpc", "doctor", "--json"))}
    assert found["hooks.hookd"]["level"] == "ok"


def as_user(job: str, command: str) -> str:
    """The output of a command on the first job, which users may give once nodes have reported."""
    (line,) = (one for one in document.commands("The first job")[1] if one.startswith(f"vhpc {command} "))
    words = ("bash", "-c", f"job={job}; {line} || echo failed")
    said = "failed"

    def succeeds() -> bool:
        nonlocal said
        said = on("login", *words, user="alice")
        return "failed" not in said

    until(succeeds, line, 60)
    return said


@pytest.mark.promise("install.first-day")
def test_the_first_job_runs_in_guests(day: Day) -> None:
    kernel, *lines = on("login", "cat", f"{HOME}/first.out").splitlines()
    # that of the image, which is not that of the machine
    assert kernel != on("n1", "uname", "-r").strip()
    assert sorted(line for line in lines if line in NODES) == list(NODES)
    accounted = ("sacct", "-nXP", "-j", day.job, "-o", "State")
    until(lambda: on("login", *accounted, user="alice") == "COMPLETED\n", "completed job in accounting", 60)


@pytest.mark.promise("install.first-day")
def test_a_user_sees_the_waterfall_and_the_report(day: Day) -> None:
    waterfall = as_user(day.job, "timeline")
    for word in (*NODES, "agent"):
        assert re.search(rf"\b{word}\b", waterfall)
    report = as_user(day.job, "report")
    for word in (*NODES, "alice", "debian-minimal"):
        assert word in report


def test_another_user_does_not(day: Day) -> None:
    said = on("login", "sh", "-c", f"vhpc report {day.job} 2>&1 || true", user="bob")
    assert "debian-minimal" not in said
    assert day.job in said


@pytest.mark.promise("install.first-day")
def test_seff_tells_of_cpu_time(day: Day) -> None:
    assert re.search(r"CPU Utilized +(?!0 s|00:00:00|-)\S", as_user(day.job, "seff"))
    figures = json.loads(on("login", "vhpc", "seff", day.job, "--json", user="alice"))
    # two guests have each made a megabyte of digits and its digest, in software
    assert figures["total"]["cpu_us"] > 10_000
    assert {guest["node"] for guest in figures["guests"]} == set(NODES)


@pytest.mark.promise("install.first-day")
def test_vhpc_web_answers_for_the_user(day: Day) -> None:
    words = ("lab/vlab", "exec", "-u", "alice", "login", "--", "timeout", "120", "vhpc", "web")
    with subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, **LAB}, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            found = on("login", "python3", "-c", BROWSER, address, f"/api/jobs/{day.job}", user="alice")
            # without the token there is no answer
            asked = ("python3", "-c", READ, f"{address.split('/?')[0]}/api/overview")
            refused = on("login", "sh", "-c", '"$@" 2>&1 || true', "sh", *asked, user="alice")
        finally:
            server.terminate()
    page = json.loads(found)
    assert page["problem"] is None
    assert "debian-minimal" in json.dumps(page["data"])
    assert "HTTPError" in refused


@pytest.mark.promise("install.first-day")
def test_metrics_have_data(day: Day) -> None:
    text = on("ctl", "python3", "-c", READ, "http://127.0.0.1:9633/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.split("\n") if line and line[0] != "#")
    assert float(values['vhpc_boots_total{result="ready"}']) >= len(NODES)
    stages = [name for name in values if name.startswith("vhpc_stage_seconds_count{")]
    assert len(stages) > 3
