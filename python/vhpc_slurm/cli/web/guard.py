# SPDX-License-Identifier: Apache-2.0
"""Decides who may read a page, and what browsers may do with it.

There are two ways: a token in the address that ``vhpc web`` prints, as the user who runs it; or the name
of a user in a header of the site's proxy, behind a Unix socket that only the proxy opens.
"""

from __future__ import annotations

import asyncio
import hmac
import pwd
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode

from vhpc_slurm.controller.api.attempts import Attempts

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
RATE, BURST = 20.0, 100.0
"""Pages per second of a viewer, and how many at once."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,99}")
NAMED_S, NAMES = 60.0, 4096
"""How long the uid of a name is remembered, and of how many names."""
VIEWER = "vhpc.viewer"
"""In the scope of a request: the uid to ask as; None: the user who runs this program."""


class RefusedError(Exception):
    """A request that is answered with a line of text."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


class RedirectError(Exception):
    """A request that is answered with another address and a cookie."""

    def __init__(self, target: str, cookie: str) -> None:
        super().__init__(target)
        self.target, self.cookie = target, cookie


class Access(Protocol):
    """How a viewer is known."""

    hosts: frozenset[str]
    """Names in the Host header that are accepted, in lower case."""

    async def viewer(self, scope: Scope) -> int | None:
        """The uid to ask as; RefusedError or RedirectError if the request names no user."""


class TokenAccess:
    """A request with the token sees what this process's user sees."""

    hosts = LOOPBACK

    def __init__(self, port: int) -> None:
        """Makes token and cookie; ``port`` tells the cookies of several programs on a host apart."""
        self.token = secrets.token_urlsafe(32)
        self._cookie = secrets.token_urlsafe(32)
        self._name = f"vhpc-web-{port}"

    async def viewer(self, scope: Scope) -> int | None:
        """None, this process's user."""
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        given = [value for name, value in query if name == "token"]
        if given:
            if len(given) != 1 or not _same(given[0], self.token):
                raise RefusedError(
                    403, "this is not the token of this vhpc web; use the address that it printed"
                )
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            cookie = f"{self._name}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"
            raise RedirectError(_own_address(scope) + (f"?{rest}" if rest else ""), cookie)
        cookies = (part.strip() for value in values(scope, "cookie") for part in value.split(";"))
        for cookie in cookies:
            name, _, value = cookie.partition("=")
            if name == self._name and _same(value, self._cookie):
                return None
        raise RefusedError(403, "open the address that vhpc web has printed, with its token")


class ProxyAccess:
    """Each user sees what vhpcd shows to that user; the proxy has authenticated the user."""

    def __init__(
        self, header: str, hosts: frozenset[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``header`` has the user's name; ``hosts`` are the names under which browsers know the proxy."""
        self.hosts = frozenset(name.lower() for name in hosts)
        self._header = header.lower()
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, int | None]] = OrderedDict()

    async def viewer(self, scope: Scope) -> int | None:
        """The uid of the user whom the proxy names."""
        given = values(scope, self._header)
        if len(given) != 1 or not NAME.fullmatch(given[0]):
            raise RefusedError(
                403, "the proxy has not sent the name of a user; its administrator can repair this"
            )
        uid = await self._uid(given[0])
        if uid is None:
            raise RefusedError(403, "this host has no user of your name")
        return uid

    async def _uid(self, name: str) -> int | None:
        until, uid = self._known.get(name, (0.0, None))
        if until < self._clock():
            try:
                async with asyncio.timeout(5):
                    uid = await asyncio.to_thread(_uid_of, name)
            except TimeoutError:
                raise RefusedError(503, "this host's database of users does not answer") from None
            self._known[name] = (self._clock() + NAMED_S, uid)
            while len(self._known) > NAMES:
                self._known.popitem(last=False)
        return uid


class Guard:
    """In front of all pages: refuses requests, and adds headers to every answer."""

    def __init__(
        self, pages: Application, access: Access, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pages = pages
        self._access = access
        self._rate = Attempts(RATE, BURST, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                set_already = {bytes(name).lower() for name, _ in message.get("headers", ())}
                message["headers"] = [
                    *message.get("headers", ()),
                    *(pair for pair in own if pair[0] not in set_already),
                ]
            await send(message)

        try:
            self._check(scope)
            scope[VIEWER] = viewer = await self._access.viewer(scope)
            if not self._rate.another(str(viewer)):
                raise RefusedError(429, f"no more than {RATE:g} pages per second; try again in a few seconds")
        except RefusedError as err:
            await _plain(guarded, err.status, f"{err}\n")
        except RedirectError as err:
            await _plain(guarded, 303, "", location=err.target, **{"set-cookie": err.cookie})
        else:
            await self._pages(scope, receive, guarded)

    def _check(self, scope: Scope) -> None:
        """Refuse what no browser of a viewer sends to this address."""
        if scope["method"] not in ("GET", "HEAD"):
            raise RefusedError(405, "vhpc web only shows")
        hosts = values(scope, "host")
        if len(hosts) != 1 or _host_name(hosts[0]) not in self._access.hosts:
            # the name of another site that resolves to this address (DNS rebinding)
            raise RefusedError(421, "vhpc web is not known under this host name; see its option --host")
        site = values(scope, "sec-fetch-site")
        if (
            site
            and site[0] in ("cross-site", "same-site")
            and values(scope, "sec-fetch-mode") != ["navigate"]
        ):
            raise RefusedError(403, "requests of other sites are refused")


def values(scope: Scope, name: str) -> list[str]:
    """All values of a header, whose name is in lower case."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key.decode("latin-1") == name]


def _host_name(host: str) -> str:
    return re.sub(r":[0-9]{1,5}$", "", host).lower()


def _own_address(scope: Scope) -> str:
    """The path of a request, relative to its folder, so that no other host can be meant."""
    return "./" + str(scope["path"]).rpartition("/")[2]


def _same(given: str, own: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), own.encode())


def _uid_of(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


async def _plain(send: Send, status: int, text: str, **more: str) -> None:
    body = text.encode()
    headers = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **more}
    pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
