# SPDX-License-Identifier: Apache-2.0
"""Access to the pages of vhpc web: tokens, cookies, host names, the proxy's header, rates."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="vhpc web needs it: pip install 'vhpc-slurm[web]' httpx")
pytest.importorskip("httpx", reason="starlette's test client needs it: pip install httpx")

from starlette.testclient import TestClient

from vhpc_slurm.cli.web import guard, sockets
from vhpc_slurm.cli.web.asking import KEPT, Asker
from vhpc_slurm.errors import FabricError, UserError

BASE = "http://127.0.0.1:8000"
NEEDED = {
    "x-frame-options": "DENY",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


async def pages(scope: guard.Scope, receive: guard.Receive, send: guard.Send) -> None:
    body = f"viewer {scope[guard.VIEWER]}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def client(access: guard.Access, base: str = BASE, **more: Any) -> TestClient:
    return TestClient(guard.Guard(pages, access), base_url=base, follow_redirects=False, **more)


def test_a_token_becomes_a_cookie() -> None:
    access = guard.TokenAccess(8000)
    browser = client(access)
    assert browser.get("/").status_code == 403
    first = browser.get("/jobs/42", params={"token": access.token, "x": "1"})
    assert (first.status_code, first.headers["location"]) == (303, "./42?x=1")
    flags = {part.strip().lower() for part in first.headers["set-cookie"].split(";")[1:]}
    assert flags == {"path=/", "httponly", "samesite=strict"}
    assert access.token not in first.headers["set-cookie"]
    assert browser.get("/").text == "viewer None"


@pytest.mark.promise("attack.web-page")
@pytest.mark.parametrize("query", ["token=x", "token=", "token=%00%ff", "token={0}&token=x", "Token={0}"])
def test_another_token_opens_nothing(query: str) -> None:
    access = guard.TokenAccess(8000)
    answer = client(access).get("/?" + query.format(access.token))
    assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)


def test_the_cookie_of_another_vhpc_web_opens_nothing() -> None:
    first, second = guard.TokenAccess(8000), guard.TokenAccess(8001)
    cookie = client(first).get("/", params={"token": first.token}).headers["set-cookie"].split(";")[0]
    assert client(first).get("/", headers={"cookie": cookie}).status_code == 200
    assert client(second).get("/", headers={"cookie": cookie}).status_code == 403
    renamed = cookie.replace("8000", "8001")
    assert client(second).get("/", headers={"cookie": renamed}).status_code == 403


@pytest.mark.promise("attack.web-page")
@pytest.mark.parametrize(
    "host", ["evil.example:8000", "127.0.0.1.evil.example", "", "127.0.0.1@evil", "[::2]"]
)
def test_names_of_other_hosts_are_refused(host: str) -> None:
    access = guard.TokenAccess(8000)
    answer = client(access).get("/", params={"token": access.token}, headers={"host": host})
    assert answer.status_code == 421
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1", "LOCALHOST:80", "[::1]:8000"])
def test_a_tunnel_to_another_port_works(host: str) -> None:
    access = guard.TokenAccess(8000)
    assert client(access).get("/", params={"token": access.token}, headers={"host": host}).status_code == 303


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_reading_is_possible(method: str) -> None:
    access = guard.TokenAccess(8000)
    assert client(access).request(method, f"/?token={access.token}").status_code == 405


@pytest.mark.promise("attack.web-page")
def test_every_answer_has_the_headers() -> None:
    access = guard.TokenAccess(8000)
    browser = client(access)
    answers = [browser.get("/"), browser.get(f"/?token={access.token}"), browser.get("/"), browser.post("/")]
    assert [answer.status_code for answer in answers] == [403, 303, 200, 405]
    for answer in answers:
        assert NEEDED.items() <= dict(answer.headers).items()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy


@pytest.mark.promise("attack.web-page")
def test_requests_that_other_sites_cause_are_refused() -> None:
    access = guard.ProxyAccess("X-Remote-User", frozenset({"hpc.example"}))
    browser = client(access, "https://hpc.example", headers={"x-remote-user": "root"})
    assert browser.get("/", headers={"sec-fetch-site": "same-origin"}).status_code == 200
    assert browser.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert browser.get("/", headers=link).status_code == 200


def test_the_proxy_names_the_user() -> None:
    access = guard.ProxyAccess("X-Remote-User", frozenset({"HPC.example"}))
    browser = client(access, "http://hpc.example")
    games = pwd.getpwnam("games").pw_uid
    assert browser.get("/", headers={"x-remote-user": "games"}).text == f"viewer {games}"
    assert browser.get("/", headers={"X-REMOTE-USER": "games"}).text == f"viewer {games}"


@pytest.mark.promise("attack.web-proxy")
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("x-remote-user", "")],
        [("x-remote-user", "no-such-user")],
        [("x-remote-user", "games"), ("x-remote-user", "root")],
        [("x-remote-user", "games,root")],
        [("x-remote-user", "../root")],
        [("x-remote-user", "5")],
        [("x_remote_user", "games")],
        [("x-forwarded-user", "games")],
    ],
)
def test_without_exactly_one_user_name_nothing_is_shown(headers: list[tuple[str, str]]) -> None:
    access = guard.ProxyAccess("X-Remote-User", frozenset({"hpc.example"}))
    assert client(access, "http://hpc.example").get("/", headers=headers).status_code == 403


def test_a_viewer_has_a_rate() -> None:
    access = guard.ProxyAccess("X-Remote-User", frozenset({"hpc.example"}))
    guarded = guard.Guard(pages, access, clock=lambda: 1.0)
    browser = TestClient(guarded, base_url="http://hpc.example")
    codes = [browser.get("/", headers={"x-remote-user": "games"}).status_code for _ in range(102)]
    assert codes == [200] * 100 + [429] * 2
    assert browser.get("/", headers={"x-remote-user": "root"}).status_code == 200, "others are served"


# --- questions ----------------------------------------------------------------------------


@pytest.mark.promise("attack.web-load")
def test_fifty_tabs_ask_once() -> None:
    asked: list[int] = []

    def question() -> int:
        asked.append(1)
        time.sleep(0.05)
        return len(asked)

    async def tabs() -> list[int | None]:
        asker = Asker()
        answers = await asyncio.gather(*(asker.ask((7, "overview"), question) for _ in range(50)))
        answers += await asyncio.gather(*(asker.ask((7, "overview"), question) for _ in range(50)))
        asker.close()
        return [answer.value for answer in answers]

    assert asyncio.run(tabs()) == [1] * 100
    assert len(asked) == 1


def test_answers_of_a_viewer_are_not_given_to_another() -> None:
    async def both() -> tuple[str | None, str | None]:
        asker = Asker()
        first = await asker.ask((1, "overview"), lambda: "of 1")
        second = await asker.ask((2, "overview"), lambda: "of 2")
        asker.close()
        return first.value, second.value

    assert asyncio.run(both()) == ("of 1", "of 2")


def test_a_vhpcd_that_is_down_leaves_the_last_answer() -> None:
    now = [100.0]
    down: list[bool] = []

    def question() -> str:
        if down:
            raise FabricError("vhpcd at c port 1 does not answer")
        return "jobs"

    async def look() -> None:
        asker = Asker(clock=lambda: now[0])
        fresh = await asker.ask(("u",), question)
        assert (fresh.value, fresh.problem) == ("jobs", "")
        down.append(True)
        now[0] += 60
        old = await asker.ask(("u",), question)
        assert (old.value, old.age_s, old.problem) == ("jobs", 60.0, "vhpcd at c port 1 does not answer")
        down.clear()
        now[0] += 60
        assert (await asker.ask(("u",), question)).problem == ""
        asker.close()

    asyncio.run(look())


def test_a_vhpcd_that_hangs_delays_no_page_for_long() -> None:
    release = threading.Event()

    def question() -> str:
        release.wait(30)
        return "late"

    async def look() -> None:
        asker = Asker(wait_s=0.2)
        began = time.monotonic()
        answer = await asker.ask(("u",), question)
        assert (answer.value, answer.problem) == (None, "vhpcd has not answered for 0.2 s")
        assert time.monotonic() - began < 10
        release.set()
        while (late := await asker.ask(("u",), question)).value is None:
            await asyncio.sleep(0.01)
        assert (late.value, late.problem) == ("late", "")
        asker.close()

    asyncio.run(look())


def test_remembered_answers_are_bounded() -> None:
    async def fill() -> int:
        asker = Asker()
        for number in range(KEPT + 50):
            await asker.ask((number,), lambda: number)  # noqa: B023 - awaited at once
        asker.close()
        return len(asker._entries)

    assert asyncio.run(fill()) <= KEPT


# --- sockets ------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Any:
    if os.geteuid() != 0:
        pytest.skip("makes a folder in /run: run it as root")
    path = Path(f"/run/vhpc-web-test-{os.getpid()}")
    path.mkdir(mode=0o755)
    yield path
    for entry in path.iterdir():
        entry.unlink()
    path.rmdir()


@pytest.mark.promise("attack.web-proxy")
def test_the_socket_is_closed_to_others_before_it_listens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    listen = socket.socket.listen

    def look(self: socket.socket, backlog: int) -> None:
        found = Path(self.getsockname()).stat()
        seen.append((stat.S_IMODE(found.st_mode), found.st_gid))
        listen(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", look)
    sockets.unix(folder / "socket", "www-data").close()
    assert seen == [(0o660, grp.getgrnam("www-data").gr_gid)]
    sockets.unix(folder / "other", None).close()
    assert seen[1][0] == 0o600


def test_a_socket_that_a_kill_left_is_replaced(folder: Path) -> None:
    first = sockets.unix(folder / "socket", None)
    with pytest.raises(UserError, match="another program listens"):
        sockets.unix(folder / "socket", None)
    first.close()
    sockets.unix(folder / "socket", None).close()
    (folder / "file").write_text("mine")
    with pytest.raises(UserError, match="is not a socket"):
        sockets.unix(folder / "file", None)
    assert (folder / "file").read_text() == "mine"


def test_a_folder_that_others_may_change_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(UserError, match="others may change the folder"):
        sockets.unix(folder / "socket", None)
    folder.chmod(0o755)
    os.chown(folder, 65534, -1)
    with pytest.raises(UserError, match="it belongs to uid 65534"):
        sockets.unix(folder / "socket", None)
    os.chown(folder, 0, -1)
    with pytest.raises(UserError, match="not an absolute path"):
        sockets.unix(Path("socket"), None)
    with pytest.raises(UserError, match="there is no group"):
        sockets.unix(folder / "socket", "no-such-group")
