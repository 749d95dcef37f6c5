# SPDX-License-Identifier: Apache-2.0
"""vhpc web on the lab: in Chromium while a job runs, and for all users behind nginx."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT, Done, Job, Lab, vlab_status
from injection import WAITING, configured, let_go, runs, until

from chromium import CHROMIUM, in_chromium
from html_page import Page

pytestmark = pytest.mark.lab

HOST, PORT, PASSWORD = "hpc.example.org", 8081, "a word for the test"
FOLDER, SOCKET = "/run/vhpc-web", "/run/vhpc-web/socket"
GET = (
    "import base64, sys, urllib.error, urllib.request as web\n"
    "url, host, user, *extra = sys.argv[1:]\n"
    "request = web.Request(url, headers={'Host': host, **dict(word.split('=', 1) for word in extra)})\n"
    f"words = base64.b64encode(f'{{user}}:{PASSWORD}'.encode()).decode()\n"
    "if user: request.add_header('Authorization', 'Basic ' + words)\n"
    "try: answer = web.urlopen(request, timeout=60)\n"
    "except urllib.error.HTTPError as err: answer = err\n"
    "print(answer.status)\n"
    "print(answer.read().decode())\n"
)


def documented() -> str:
    """The block for nginx in docs/web.md."""
    found = re.search(r"```nginx\n(.*?)```", (ROOT / "docs/web.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def job(lab: Lab) -> Iterator[Job]:
    """A job of alice that runs on two nodes with a network."""
    found = lab.submit(WAITING, "-N2", "--vhpc-network=job", "--job-name=shown")
    runs(lab, found)
    yield found
    let_go(lab, found)
    found.wait()


@pytest.fixture
def web_uid(lab: Lab) -> Iterator[int]:
    """The uid of the user vhpc-web on both hosts: that of the packages, or a free one."""
    hosts = ("ctl", "login")
    there = {lab.run(host, "id", "-u", "vhpc-web", check=False).out.strip() for host in hosts}
    if there != {""}:
        (uid,) = there
        yield int(uid)
        return
    listed = "getent passwd; getent group"
    lines = [line for host in hosts for line in lab.run(host, "sh", "-c", listed).out.splitlines()]
    taken = {int(line.split(":")[2]) for line in lines}
    found = next(uid for uid in range(999, 100, -1) if uid not in taken)
    add = ("useradd", "--system", "--uid", str(found), "--user-group", "--no-create-home", "vhpc-web")
    try:
        for host in hosts:
            lab.run(host, *add)
        yield found
    finally:
        for host in hosts:
            lab.run(host, "userdel", "vhpc-web", check=False)


@pytest.fixture
def site(lab: Lab, web_uid: int) -> Iterator[None]:
    """nginx on the login host, as docs/web.md has it, in front of `vhpc web --socket`."""
    conf = (
        "daemon off; pid /run/nginx-test.pid; error_log stderr; user www-data;\n"
        "events {}\n"
        f"http {{ access_log off; server {{ listen 127.0.0.1:{PORT}; server_name {HOST};\n"
        f"{documented()}}} }}\n"
    )
    web = (
        f"exec setpriv --reuid=vhpc-web --regid=vhpc-web --groups=www-data vhpc web --socket {SOCKET} "
        f"--socket-group www-data --user-header X-Remote-User --host {HOST} >/tmp/web.log 2>&1 </dev/null"
    )
    try:
        lab.run("login", "install", "-d", "-o", "vhpc-web", "-m", "755", FOLDER)
        hashed = lab.run("login", "openssl", "passwd", "-apr1", PASSWORD).out.strip()
        passwords = "".join(f"{user}:{hashed}\n" for user in ("alice", "bob", "root"))
        lab.run("login", "sh", "-c", "mkdir -p /etc/nginx; cat >/etc/nginx/hpc.passwords", stdin=passwords)
        lab.run("login", "sh", "-c", "cat >/tmp/nginx.conf", stdin=conf)
        named = 'web_user = "vhpc-web"'
        with configured(lab, "ctl", "controller", named), configured(lab, "login", "controller", named):
            lab.service("ctl", "restart", "vhpcd")
            lab.run("login", "sh", "-c", f"setsid --fork sh -c '{web}'")
            until(lambda: lab.run("login", "test", "-S", SOCKET, check=False).code == 0, "vhpc web")
            lab.run("login", "sh", "-c", "setsid --fork nginx -c /tmp/nginx.conf >/tmp/n.log 2>&1 </dev/null")
            until(
                lambda: lab.run("login", "test", "-s", "/run/nginx-test.pid", check=False).code == 0, "nginx"
            )
            yield
    finally:
        ends = f"pkill -F /run/nginx-test.pid; pkill -u {web_uid}; rm -rf {FOLDER} /tmp/nginx.conf"
        lab.run("login", "sh", "-c", ends, check=False)
        until(
            lambda: lab.run("login", "pgrep", "-u", str(web_uid), check=False).code == 1,
            "the end of vhpc web",
        )
        lab.service("ctl", "restart", "vhpcd")


def get(lab: Lab, path: str, user: str, *headers: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{PORT}/vhpc/{path}"
    said = lab.run("login", "python3", "-", url, HOST, user, *headers, stdin=GET).out
    status, _, text = said.partition("\n")
    return int(status), text


def overview(lab: Lab, user: str, *headers: str) -> dict[str, Any]:
    status, text = get(lab, "api/overview", user, *headers)
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)["data"]
    return found


@pytest.mark.usefixtures("site")
def test_users_see_their_jobs_behind_nginx(lab: Lab, job: Job) -> None:
    """The name is that of the password, whatever header the browser sends."""
    mine = {one["job"]: one for one in overview(lab, "alice")["jobs"]}
    assert (mine[job.id]["user"], mine[job.id]["nodes"]) == ("alice", ["n1", "n2"])
    assert job.id not in {one["job"] for one in overview(lab, "bob")["jobs"]}
    forged = overview(lab, "bob", "X-Remote-User=alice")
    assert job.id not in {one["job"] for one in forged["jobs"]}
    assert job.id in {one["job"] for one in overview(lab, "root")["jobs"]}, "root sees all jobs"
    assert [get(lab, f"jobs/{job.id}", user)[0] for user in ("alice", "bob")] == [200, 404]
    assert get(lab, "", "", "X-Remote-User=alice")[0] == 401


@pytest.mark.usefixtures("site")
def test_the_pages_work_below_a_folder_of_the_server(lab: Lab, job: Job) -> None:
    """All links of the pages are relative, so that they work behind /vhpc/."""
    for path in ("", f"jobs/{job.id}"):
        status, text = get(lab, path, "alice")
        assert status == 200
        links = [value for name, value in Page(text).attributes if name in ("src", "href")]
        assert links
        assert [link for link in links if link is None or link.startswith("/") or ":" in link] == []
    assert get(lab, "assets/live.js", "alice")[0] == 200


def in_network_of(host: str) -> tuple[str, ...]:
    """Runs a command of this machine in the network of a host of the lab."""
    return ("nsenter", f"--net=/proc/{vlab_status()['hosts'][host]['pid']}/ns/net", "--")


def printed(lab: Lab) -> Done:
    return lab.run("login", "cat", "/tmp/alice-web.log", check=False)


@pytest.fixture
def mine(lab: Lab) -> Iterator[str]:
    """Address of `vhpc web`, run by alice on the login host."""
    start = "setsid --fork sh -c 'exec vhpc web >/tmp/alice-web.log 2>&1 </dev/null'"
    try:
        lab.run("login", "sh", "-c", start, user="alice")
        until(lambda: "token=" in printed(lab).out, "vhpc web")
        (address,) = re.findall(r"http://\S+", printed(lab).out.partition("\n")[0])
        yield address
    finally:
        lab.run("login", "pkill", "-u", "alice", "-f", "vhpc web", check=False)
        lab.run("login", "rm", "-f", "/tmp/alice-web.log")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install --no-install-recommends chromium")
def test_chromium_shows_a_running_job(lab: Lab, job: Job, mine: str, tmp_path: Path) -> None:
    """In a large and a small window; pictures are in pytest's temporary folder."""
    prefix = in_network_of("login")
    for name, size in (("wide", "1400,1000"), ("small", "400,800")):
        for page, path in (("overview", "/"), ("job", f"/jobs/{job.id}")):
            picture = f"--screenshot={tmp_path / f'{page}-{name}.png'}"
            address = mine.replace("/?", f"{path}?")
            dom, console = in_chromium(tmp_path, address, f"--window-size={size}", picture, prefix=prefix)
            assert console == ""
            text = "".join(Page(dom).texts)
            expected = ("shown", str(job.id), "alice") if page == "overview" else ("n1 agent", "n2 agent")
            assert [word for word in expected if word not in text] == [], text
            assert (tmp_path / f"{page}-{name}.png").stat().st_size > 10_000
