# SPDX-License-Identifier: Apache-2.0
"""A session of the app for Open OnDemand: Slurm takes its options, and only the portal reaches its guest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Job, Lab
from injection import settled, until

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parents[2]
APP, BATCH = ROOT / "contrib/ondemand/template", ROOT / "tests/data/ondemand/batch.sh"
FOLDER = "/home/alice/ondemand-session"
OPTIONS = (
    "--nodes=1",
    "--ntasks=1",
    "--cpus-per-task=1",
    "--mem=768",
    "--vhpc-batch=host",
)
"""Those of submit.yml.erb, with less memory."""
JUPYTER = """#!/usr/bin/env python3
import http.server, os, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.path == options["ServerApp.base_url"] + "lab?token=" + os.environ["JUPYTER_TOKEN"]
        self.send_response(200 if right else 403)
        self.end_headers()
        self.wfile.write(os.uname().nodename.encode() if right else b"no")

address = options["ServerApp.ip"], int(options["ServerApp.port"])
http.server.HTTPServer(address, Handler).serve_forever()
"""
ASK = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())
except urllib.error.HTTPError as err:
    print("HTTP", err.code)
except OSError:
    print("no connection")
"""


def address(lab: Lab) -> str:
    """From which the login host, the portal of this test, connects to n1."""
    route = "ip -4 route get $(getent ahostsv4 n1 | head -n 1 | cut -d' ' -f1)"
    found = re.search(r" src (\S+)", lab.run("login", "sh", "-c", route).out)
    assert found is not None
    return found[1]


@pytest.fixture
def session(lab: Lab) -> Iterator[Job]:
    """A session on n1 whose program is a small server with Jupyter's options."""
    lab.run("login", "mkdir", "-p", f"{FOLDER}/bin", user="alice")
    values = f"kind=jupyter\nportal=https://portal.example\nadmitted=(--from {address(lab)})\n"
    files = {path.name: path.read_text() for path in APP.glob("*.sh")}
    files |= {"values.sh": values, "bin/jupyter": JUPYTER}
    try:
        for name, text in files.items():
            write = f"cat >{FOLDER}/{name}; chmod 755 {FOLDER}/{name}"
            lab.run("login", "sh", "-ec", write, user="alice", stdin=text)
        body = BATCH.read_text().replace("export host port", f"PATH={FOLDER}/bin:$PATH\nexport host port", 1)
        where = ("-w", "n1", "-D", FOLDER, "-o", f"{FOLDER}/output.log")
        script = f"exec bash <<'EOF'\n{body}EOF"
        job = lab.submit(script, *OPTIONS, *where)
        yield job
        lab.run("login", "scancel", str(job.id), user="alice", check=False)
        job.wait()
        settled(lab)
    finally:
        lab.run("login", "rm", "-rf", FOLDER, user="alice")


def ask(lab: Lab, host: str, url: str) -> str:
    return lab.run(host, "python3", "-c", ASK, url).out.strip()


def test_only_the_portal_reaches_a_session(lab: Lab, session: Job) -> None:
    def read(name: str) -> str:
        return lab.run("login", "cat", f"{FOLDER}/{name}", user="alice", check=False).out

    until(lambda: "password" in read("connection.yml") or "ended" in read("output.log"), "the session", 300)
    assert "password" in read("connection.yml"), read("output.log")
    found = dict(line.split(": ", 1) for line in read("connection.yml").splitlines())
    url = f"http://n1:{found['port']}/node/{found['host']}/{found['port']}/lab?token={found['password']}"
    assert ask(lab, "login", url) == "n1", "the guest's own host name"
    assert ask(lab, "login", url[:-1]) == "HTTP 403"
    assert ask(lab, "ctl", url) == "no connection", "another host is not admitted"
    assert ask(lab, "n1", url) == "no connection", "nor is the node itself"
    lab.run("login", "scancel", str(session.id), user="alice")
    session.wait()
    assert ask(lab, "login", url) == "no connection"
