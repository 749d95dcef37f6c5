# SPDX-License-Identifier: Apache-2.0
"""Clusters of jobs in vhpc web and vhpc ps: who sees which, and what their pages have."""

from __future__ import annotations

import json
import os
import pwd
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_process import allow_clusters, member
from controller_lab import HAVE_MUNGED, allocation, munged, request, stop
from vhpcd_process import Vhpcd, make
from web_site import Web, behind_a_proxy

from html_page import Page
from vhpc_slurm.cli.main import main

pytest.importorskip("uvicorn", reason="vhpc web needs it: pip install 'vhpc-slurm[web]'")
httpx = pytest.importorskip("httpx", reason="asks the pages: pip install httpx")

pytestmark = [
    pytest.mark.skipif(
        not HAVE_MUNGED or os.geteuid() != 0,
        reason="needs munged (apt install munge), and root to become users",
    ),
    pytest.mark.long,
]


@pytest.fixture(scope="module")
def vhpcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vhpcd]:
    """Clusters of two users: games has one with three jobs, one of which boots; the other user has two."""
    folder = tmp_path_factory.mktemp("site")
    for path in (folder, folder.parent):
        path.chmod(0o755)
    with munged() as daemon:
        found = make(folder, daemon)
        sacctmgr = folder / "bin/sacctmgr"
        sacctmgr.write_text("#!/bin/sh\ncase \"$*\" in *news*) echo 'news|Operator|';; esac\n")
        sacctmgr.chmod(0o755)
        allow_clusters(found, "n1", "n2", "n3")
        found.start()
        member(found, 4301, "games", "dask", "n1", "n2")
        member(found, 4302, "games", "dask", "n2")
        member(found, 4303, "games", "dask", "n3", joins=False)
        member(found, 4304, "nobody", "dask", "n3")
        found.client.open_generation(request(4305), allocation("n1"))
        yield found
        assert found.process is not None
        stop(found.process)


def browser(vhpcd: Vhpcd, user: str) -> Iterator[Any]:
    web = Web(vhpcd, uid=pwd.getpwnam(user).pw_uid)
    try:
        with httpx.Client(base_url=web.address.split("/?")[0], timeout=30) as client:
            client.get("/", params={"token": web.address.partition("token=")[2]})
            yield client
    finally:
        web.end()


@pytest.fixture(scope="module")
def games(vhpcd: Vhpcd) -> Iterator[Any]:
    yield from browser(vhpcd, "games")


@pytest.fixture(scope="module")
def news(vhpcd: Vhpcd) -> Iterator[Any]:
    """Of an operator of Slurm."""
    yield from browser(vhpcd, "news")


def clusters(client: Any) -> list[tuple[str, int, int]]:
    found = client.get("/api/overview").json()["data"]["clusters"]
    return [(one["user"], one["jobs"], one["guests"]) for one in found]


@pytest.mark.promise("vhpcd.user-view")
def test_users_see_their_clusters_and_operators_all(games: Any, news: Any) -> None:
    assert clusters(games) == [("games", 3, 4)]
    assert clusters(news) == [("games", 3, 4), ("nobody", 1, 1)]
    for path in ("/clusters/2", "/api/clusters/2", "/clusters/3", "/clusters/99999999999999999999"):
        answer = games.get(path)
        assert (answer.status_code, "4304" in answer.text) == (404, False)
    assert [news.get(path).status_code for path in ("/clusters/2", "/api/clusters/2")] == [200, 200]


@pytest.mark.promise("attack.web-proxy")
def test_users_of_a_proxy_see_their_clusters(vhpcd: Vhpcd) -> None:
    expected = {"games": ([("games", 3, 4)], 200), "nobody": ([("nobody", 1, 1)], 404), "bin": ([], 404)}
    with behind_a_proxy(vhpcd) as client:
        for user, (seen, status) in expected.items():
            client.headers["X-Remote-User"] = user
            assert clusters(client) == seen
            assert client.get("/clusters/1").status_code == status


def test_a_cluster_has_its_jobs(games: Any) -> None:
    page = games.get("/clusters/1").text
    cells = [text.strip() for text in Page(page).texts if text.strip()]
    for number, state, addresses in (
        (4301, "joined", "10.200.0.1 to 10.200.0.2"),
        (4302, "joined", "10.200.0.3"),
        (4303, "booting", "10.200.0.4"),
    ):
        at = cells.index(str(number))
        assert (cells[at + 1], cells[at + 2]) == ("games", state)
        assert addresses in cells[at:]
        assert f'href="../jobs/{number}"' in page
    data = games.get("/api/clusters/1").json()["data"]
    assert (data["name"], data["jobs"], data["kept"]) == ("dask", 3, False)
    first = data["members"][0]
    assert (first["job"], first["user"], first["nodes"]) == (4301, "games", ["n1", "n2"])
    assert [one["host"] for one in first["guests"]] == ["n1-j4301", "n2-j4301"]
    assert abs(first["since"] - time.time()) < 300


def test_pages_lead_to_the_cluster_of_a_job(games: Any) -> None:
    assert 'href="clusters/1">dask<' in games.get("/").text
    assert 'href="../clusters/1">Cluster dask<' in games.get("/jobs/4302").text
    jobs = games.get("/api/overview").json()["data"]["jobs"]
    assert {job["cluster"] for job in jobs} == {"dask"}


def test_ps_has_a_column_if_a_job_is_in_a_cluster(
    vhpcd: Vhpcd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VHPC_CONFIG", str(vhpcd.folder / "vhpc.toml"))
    assert main(["ps", "--json"]) == 0
    known = {row["job"]: row["cluster"] for row in json.loads(capsys.readouterr().out)}
    assert known == {4301: "dask", 4302: "dask", 4303: "dask", 4304: "dask", 4305: None}
    assert main(["ps"]) == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    at = head.index("CLUSTER")
    assert head[at - 1] == "IMAGE"
    assert {row[0]: row[at] for row in rows} == {
        "4301": "dask",
        "4302": "dask",
        "4303": "dask",
        "4304": "dask",
        "4305": "-",
    }


def test_without_vhpcd_there_is_no_page_of_a_cluster(games: Any, tmp_path: Path) -> None:
    with munged() as daemon:
        vhpcd = make(tmp_path, daemon, request_timeout_s=1).start()
        web = Web(vhpcd)
        try:
            vhpcd.stop()
            with httpx.Client(base_url=web.address.split("/?")[0], timeout=30) as client:
                client.get("/", params={"token": web.address.partition("token=")[2]})
                assert (client.get("/clusters/1").status_code, client.get("/api/clusters/1").status_code) == (
                    200,
                    503,
                )
        finally:
            web.end()
