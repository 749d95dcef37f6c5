# SPDX-License-Identifier: Apache-2.0
"""vhpc web as a process with a vhpcd: the pages for users, in HTTP and in Chromium."""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from controller_lab import HAVE_MUNGED, Munged, free_port, munged, stop, wait_for
from vhpcd_process import Vhpcd, make
from web_site import HOSTILE, Web, behind_a_proxy, fill

from chromium import CHROMIUM, driven, in_chromium
from html_page import Page
from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.controller.api.status_messages import DeviceWire

pytest.importorskip("uvicorn", reason="vhpc web needs it: pip install 'vhpc-slurm[web]'")
httpx = pytest.importorskip("httpx", reason="asks the pages: pip install httpx")

pytestmark = [
    pytest.mark.skipif(
        not HAVE_MUNGED or os.geteuid() != 0,
        reason="needs munged (apt install munge), and root to become users",
    ),
    pytest.mark.long,
]
OWNER = pwd.getpwnam("games").pw_uid
STUCK = DeviceWire(
    address="0000:af:00.0", role="gpu", reason=f"no answer {HOSTILE}", since=time.time() - 7200
)
SHOWN = HOSTILE.replace("\u202e", "?")


@pytest.fixture(scope="module")
def key() -> Iterator[Munged]:
    with munged() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def vhpcd(key: Munged, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vhpcd]:
    folder = tmp_path_factory.mktemp("site")
    for path in (folder, folder.parent):
        path.chmod(0o755)
    found = make(folder, key, Fabric(backend="ethernet", vlan_first=100))
    sacctmgr = folder / "bin/sacctmgr"
    sacctmgr.write_text("#!/bin/sh\ncase \"$*\" in *news*) echo 'news|Operator|';; esac\n")
    sacctmgr.chmod(0o755)
    fill(found.start())
    found.client.report_quarantine("n9", [STUCK])
    yield found
    if found.process is not None:
        stop(found.process)


@pytest.fixture(scope="module")
def mine(vhpcd: Vhpcd) -> Iterator[Web]:
    web = Web(vhpcd, uid=OWNER)
    yield web
    web.end()


@pytest.fixture(scope="module")
def browser(mine: Web) -> Iterator[Any]:
    with httpx.Client(base_url=mine.address.split("/?")[0], timeout=30) as client:
        assert client.get("/", params={"token": mine.address.partition("token=")[2]}).status_code == 303
        yield client


def test_a_user_sees_the_own_jobs_only(browser: Any) -> None:
    found = browser.get("/api/overview").json()
    assert {job["job"] for job in found["data"]["jobs"]} == {4201, 4203, 4204, 4205, 4206, 4207}
    assert {job["user"] for job in found["data"]["jobs"]} == {"games"}
    assert {node["node"] for node in found["data"]["nodes"]} == {"n1", "n2", "n5", "n7", "n8"}
    assert (found["problem"], browser.get("/jobs/4202").status_code) == (None, 404)
    assert browser.get("/api/jobs/4202").status_code == 404
    assert browser.get("/jobs/4202/placement/0.svg").status_code == 404
    for text in (browser.get("/").text, browser.get("/jobs/4202").text):
        assert "md_equilibrate" not in text
        assert "nobody" not in text


def test_keys_and_devices_are_listed_by_node(browser: Any) -> None:
    data = browser.get("/api/overview").json()["data"]
    rows = {row["job"]: row for row in data["keys"]["rows"]}
    assert (rows[4201]["key"], rows[4201]["nodes"]) == ("VLAN 100", {"n1": "held", "n2": "held"})
    assert rows[4205]["nodes"] == {"n5": "not clean"}
    for _ in range(20):  # two jobs with each overview
        data = browser.get("/api/overview").json()["data"]
        if not data["jobs_without_devices_yet"]:
            break
        time.sleep(0.5)
    devices = {(one["node"], one["address"], one["role"], one["job"]) for one in data["devices"]}
    assert ("n2", "0000:3b:00.0", "gpu", 4201) in devices
    assert [one["text"] for one in data["attention"] if one["node"] == "n5"] == [
        "VF 0000:5e:00.2 does not come back from vfio-pci: Device or resource busy"
    ]


@pytest.mark.promise("attack.web-script")
@pytest.mark.parametrize("path", ["/", "/jobs/4203"])
def test_a_hostile_name_stays_text(browser: Any, path: str) -> None:
    answer = browser.get(path)
    page = Page(answer.text)
    assert page.tags.count("script") == 1
    assert not any(name.startswith("on") or name == "style" for name, _ in page.attributes)
    assert {value for name, value in page.attributes if name == "src"} <= {
        "assets/live.js",
        "../assets/live.js",
        "4203/placement/0.svg",
    }
    assert SHOWN in "".join(page.texts)
    assert "\u202e" not in answer.text


def test_a_job_has_its_placement_and_waterfall(browser: Any) -> None:
    text = browser.get("/jobs/4201").text
    assert ("<h2>Boot</h2>" in text, "n1 setup g0: from" in text) == (True, True)
    assert "debian-hpc has a newer tag" in text
    picture = browser.get("/jobs/4201/placement/0.svg")
    assert picture.headers["content-type"].startswith("image/svg+xml")
    assert "sandbox" in picture.headers["content-security-policy"]
    assert "script" not in picture.text
    report = browser.get("/api/jobs/4201").json()["data"]
    assert (report["job"], len(report["nodes"]), report["network"]["vlan"]) == (4201, 2, 100)


@pytest.mark.parametrize("path", ["/jobs/0", "/jobs/x", "/jobs/99999999999", "/assets/../overview.py", "/x"])
def test_unknown_pages_are_not_found(browser: Any, path: str) -> None:
    assert browser.get(path).status_code == 404


def test_a_number_leads_to_the_page_of_its_job(browser: Any) -> None:
    assert browser.get("/job?id=4201").headers["location"] == "jobs/4201"
    assert browser.get("/job?id=//evil.example").headers["location"] == "./"


def test_a_connection_without_a_request_is_closed(mine: Web) -> None:
    port = int(re.findall(r":(\d+)/", mine.address)[0])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        assert link.recv(100) == b""


def test_a_head_that_is_too_large_is_refused(mine: Web) -> None:
    port = int(re.findall(r":(\d+)/", mine.address)[0])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        # more than 16 KiB, and no end
        link.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"a" * 20_000)
        assert link.recv(100).startswith(b"HTTP/1.1 400 ")


@pytest.mark.promise("attack.web-proxy")
def test_each_user_of_a_proxy_sees_the_own_jobs(vhpcd: Vhpcd) -> None:
    with behind_a_proxy(vhpcd) as client:
        assert client.get("/api/overview").status_code == 403
        users = {}
        for user in ("games", "nobody", "bin", "games"):
            page = client.get("/", headers={"X-Remote-User": user}).text
            assert ("0000:af:00.0" in page, "shown to operators of Slurm" in page) == (False, True)
            data = client.get("/api/overview", headers={"X-Remote-User": user}).json()["data"]
            assert (data["operator"], data["quarantine"], data["fabric"]) == (False, [], None)
            users[user] = sorted(job["job"] for job in data["jobs"])
        assert users == {"games": [4201, 4203, 4204, 4205, 4206, 4207], "nobody": [4202], "bin": []}
        hidden = client.get("/api/jobs/4201", headers={"X-Remote-User": "nobody"})
        assert (hidden.status_code, "train" in hidden.text) == (404, False)


def test_an_operator_sees_devices_in_quarantine_behind_a_proxy(vhpcd: Vhpcd) -> None:
    with behind_a_proxy(vhpcd) as client:
        operator = {"X-Remote-User": "news"}
        data = client.get("/api/overview", headers=operator).json()["data"]
        text = client.get("/", headers=operator).text
    assert data["operator"] is True
    assert [(one["node"], one["address"]) for one in data["quarantine"]] == [("n9", "0000:af:00.0")]
    assert data["fabric"]["safe"] is True
    assert "device in quarantine" in [one["what"] for one in data["attention"]]
    assert {4201, 4202} <= {job["job"] for job in data["jobs"]}
    assert "Devices in quarantine</h2>" in text
    assert f"no answer {SHOWN}" in "".join(Page(text).texts)
    assert "on their node" not in text


def test_an_ordinary_user_serves_no_other_user(vhpcd: Vhpcd) -> None:
    options = ("--socket", "/run/x/socket", "--user-header", "X-User", "--host", "h")
    web = Web(vhpcd, *options, uid=OWNER, lines=1)
    assert "user games may not serve other users" in web.said
    assert web.process.wait(30) == 1


def test_a_stopped_vhpcd_is_shown_as_stopped(key: Munged, tmp_path: Path) -> None:
    vhpcd = make(tmp_path, key, request_timeout_s=1)
    vhpcd.start()
    web = Web(vhpcd)
    try:
        with httpx.Client(base_url=web.address.split("/?")[0], timeout=30) as client:
            client.get("/", params={"token": web.address.partition("token=")[2]})
            assert "shows you no jobs" in client.get("/").text
            vhpcd.stop()
            old = re.compile(r"does not answer.* The data on this page are \d+s old")
            # a slow answer is said in other words first
            wait_for(lambda: old.search(client.get("/").text), "the page shows no problem")
            wait_for(lambda: "does not answer" in client.get("/api/jobs/1").text, "no problem in JSON")
            page, report = client.get("/"), client.get("/api/jobs/1")
        assert (page.status_code, report.status_code) == (200, 503)
    finally:
        web.end()


def test_control_c_ends_it_without_an_error(vhpcd: Vhpcd) -> None:
    web = Web(vhpcd)
    assert httpx.get(web.address, timeout=30).status_code == 303
    web.process.send_signal(signal.SIGINT)
    assert web.process.wait(30) == 0
    assert web.rest() == ""


def test_a_port_in_use_is_one_line(vhpcd: Vhpcd) -> None:
    port = free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        web = Web(vhpcd, "--port", str(port), lines=1)
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in web.said
    assert web.process.wait(30) == 1


@pytest.mark.promise("attack.web-script")
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install --no-install-recommends chromium")
@pytest.mark.parametrize("path", ["/", "/jobs/4203", "/jobs/4201"])
def test_chromium_shows_the_page_without_complaints(mine: Web, tmp_path: Path, path: str) -> None:
    dom, console = in_chromium(tmp_path, mine.address.replace("/?", f"{path}?"))
    assert console == ""
    page = Page(dom)
    assert page.tags.count("script") == 1
    text = "".join(page.texts)
    expected = {
        "/": ("4201", "train-resnet", SHOWN, "VLAN 100"),
        "/jobs/4203": (SHOWN,),
        "/jobs/4201": ("n1 setup",),
    }
    assert [one for one in expected[path] if one not in text] == []
    shown = re.search(r'<button[^>]*id="pause"[^>]*>', dom)
    assert shown is not None
    assert "hidden" not in shown[0], "the script has run"


FOCUS = "document.activeElement"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install --no-install-recommends chromium")
def test_the_pages_are_used_by_keyboard(mine: Web, tmp_path: Path) -> None:
    with driven(tmp_path) as keys:
        keys.open(mine.address)
        keys.until("!document.getElementById('pause').hidden")
        keys.press("Tab")
        assert keys.value(f"{FOCUS}.textContent") == "Skip to content"
        seen: list[str] = []
        for _ in range(200):  # every link, field, button and table that scrolls gets its turn
            keys.press("Tab")
            name = keys.value(f"{FOCUS}.getAttribute('aria-label') || {FOCUS}.textContent")
            assert keys.value(f"getComputedStyle({FOCUS}).outlineStyle") != "none", f"{name}: no focus seen"
            seen.append(name)
            if keys.value(f"{FOCUS}.getAttribute('aria-label')") == "Keys":
                break
        wanted = ["Job number", "Open", "Pause updates", "Jobs", "Nodes", "Filter jobs", "4201", "Keys"]
        assert [name for name in wanted if name not in seen] == []
        keys.value("document.getElementById('filter').focus()")
        for letter in "4205":
            keys.press(letter)
        shown = "[...document.querySelectorAll('#jobs tbody tr')].filter((row) => !row.hidden).length"
        assert keys.value(shown) == 1
        # ages change, so this part is replaced soon; the focus stays
        keys.value("document.querySelector('#jobs a[href=\"jobs/4205\"]').focus()")
        keys.value("window.kept = document.getElementById('jobs'); true")
        keys.until("window.kept !== document.getElementById('jobs')")
        assert keys.value(f"{FOCUS}.getAttribute('href')") == "jobs/4205"
        keys.press("Enter")
        keys.until("location.pathname === '/jobs/4205' && document.readyState === 'complete'")
        keys.until("!document.getElementById('pause').hidden")
        keys.value("document.getElementById('pause').focus()")
        keys.press("Enter")
        assert keys.value("document.getElementById('pause').textContent") == "Resume updates"


def test_the_json_is_documented(browser: Any) -> None:
    document = (Path(__file__).parents[4] / "docs/web.md").read_text()
    data = browser.get("/api/overview").json()["data"]
    assert json.dumps(data)
    assert [name for name in data if f"`{name}`" not in document] == []
