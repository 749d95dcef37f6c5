# SPDX-License-Identifier: Apache-2.0
"""A stand-in for NVIDIA UFM: the endpoints for partitions, over real HTTPS, with effects.

Modelled after the UFM Enterprise REST API Guide (6.10 to 6.22), chapters "PKey
GUIDs Rest API" and "Access Tokens API": addresses, bodies, the token's header
and the shape of answers.  Details that the guide leaves open follow NVIDIA's
own clients and stand-in in its infra-controller and config-manager: keys in
answers are hexadecimal without leading zeros, names ``api_pkey_0x1012``, a key
vanishes with its last port, a key that is not there is 404, no token is 401.

Ports need not exist to be members.  With a simulated fabric behind it, what it
was told becomes OpenSM's partitions file, so that ports really get their keys.
"""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fabric_lab import DEFAULT, SimulatedFabric

TOKEN = "czQYeCfKIeXqlwSqtorunOPysaSp2r"
_PKEY = re.compile(r"0x[0-9a-f]{1,4}\Z")
_GUID = re.compile(r"[0-9a-f]{16}\Z")


@dataclass
class Key:
    """UFM's data about a key: ports with membership and index0."""

    ip_over_ib: bool = True
    ports: dict[str, tuple[str, bool]] = field(default_factory=dict)


@dataclass
class Fault:
    """A fault of the next requests of a method.

    ``kind`` is an HTTP status, or one of: cut (the connection, before anything
    is done), cut-after (when it is done), accept (200, and nothing is done), half
    (200, and only half of the ports), slow (the answer comes byte by byte), html
    (a login page), late (it arrives when ``FakeUfm.arrives`` is set).  With ``pkey``
    it is only for requests about that key.
    """

    method: str
    kind: int | str
    times: int = 1
    pkey: int | None = None

    def hits(self, method: str, path: str, body: Any) -> bool:
        said = f"{path} {body}"
        return self.method == method and self.times > 0 and (self.pkey is None or f"{self.pkey:#x}" in said)


class FakeUfm:
    """The server; ``keys`` is its memory."""

    def __init__(
        self, folder: Path, fabric: SimulatedFabric | None = None, *, host: str = "127.0.0.1"
    ) -> None:
        self.keys: dict[int, Key] = {}
        self.faults: list[Fault] = []
        self.asked: list[tuple[str, str]] = []
        self.token = TOKEN
        self.second_token: str | None = None
        """Another one that is accepted."""
        self.writers: list[str] = []
        """The tokens of all changes, in their order."""
        self.on_the_way = 0
        """Requests that are late and have not arrived."""
        self.arrives = threading.Event()
        self.reaches_fabric = True
        self.settings = {
            "subnet_prefix": "0xfe80000000000000",
            "m_key": "0x0",
            "sm_key": "0x1",
            "sa_key": "0x1",
            "m_key_per_port": False,
        }
        self.default: dict[str, str] = {"membership": "limited"}  # said since UFM 6.19
        self._fabric = fabric
        self._lock = threading.Lock()
        self.ca = folder / "ca.pem"
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.ufm = self
        self.renew(host)
        self.url = f"https://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def renew(self, host: str = "127.0.0.1") -> None:
        """Have a new CA, in the file of the old one, and a certificate of it."""
        folder = self.ca.parent
        make_certificates(folder, host)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
        self._server.context = context

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def fail(self, method: str, kind: int | str, times: int = 1, pkey: int | None = None) -> None:
        self.faults.append(Fault(method, kind, times, pkey))

    def members(self, pkey: int) -> set[int]:
        return {int(guid, 16) for guid in self.keys[pkey].ports} if pkey in self.keys else set()

    def writes(self) -> list[tuple[str, str]]:
        return [one for one in self.asked if one[0] != "GET"]

    def fault(self, method: str, path: str, body: Any) -> int | str:
        with self._lock:
            for one in self.faults:
                if one.hits(method, path, body):
                    one.times -= 1
                    return one.kind
        return ""

    def do(self, method: str, path: str, body: Any, *, half: bool = False) -> tuple[int, Any]:
        """Carry a request out: status and answer."""
        with self._lock:
            self.asked.append((method, path))
            status, answer = self._route(method, path, body, half=half)
            if method != "GET" and status == 200 and self._fabric is not None and self.reaches_fabric:
                self._fabric.replace(self._file())
                self._fabric.sweep()
            return status, answer

    def _route(self, method: str, path: str, body: Any, *, half: bool) -> tuple[int, Any]:
        place, _, query = path.partition("?")
        answer: tuple[int, Any] = 404, {"error": f"no such resource: {place}"}
        match method, place.strip("/").split("/"):
            case "GET", ["app", "ufm_version"]:
                answer = 200, {"ufm_release_version": "6.22.1-3"}
            case "GET", ["app", "smconf"]:
                answer = 200, self.settings
            case "GET", ["resources", "pkeys", "0x7fff"]:
                answer = 200, {"partition": "management", "ip_over_ib": True, "guids": []} | self.default
            case "GET", ["resources", "pkeys"]:
                answer = 200, {f"{pkey:#x}": self._shown(pkey, query) for pkey in self.keys}
            case "POST", ["resources", "pkeys"]:
                answer = self._add(body, half=half)
            case "DELETE", ["resources", "pkeys", pkey, "guids", guids] if _PKEY.match(pkey):
                answer = self._remove(int(pkey, 16), guids.split(","), half=half)
            case "DELETE", ["resources", "pkeys", pkey] if _PKEY.match(pkey):
                found = self.keys.pop(int(pkey, 16), None)
                answer = (200, {}) if found else (404, {"error": "no such pkey"})
        return answer

    def _shown(self, pkey: int, query: str) -> dict[str, Any]:
        key = self.keys[pkey]
        shown: dict[str, Any] = {"partition": f"api_pkey_{pkey:#x}", "ip_over_ib": key.ip_over_ib}
        if "guids_data=true" in query:
            shown["guids"] = [
                {"guid": guid, "index0": index0, "membership": membership}
                for guid, (membership, index0) in key.ports.items()
            ]
        return shown

    def _add(self, body: Any, *, half: bool) -> tuple[int, Any]:
        pkey, guids = body.get("pkey"), body.get("guids")
        good = isinstance(pkey, str) and _PKEY.match(pkey) and 0 < int(pkey, 16) < 0x7FFF
        if not good or not guids or not all(_GUID.match(guid) for guid in guids):
            return 400, {"error": f"bad parameters: {json.dumps(body)}"}
        key = self.keys.setdefault(int(pkey, 16), Key(body.get("ip_over_ib", True)))
        for guid in guids[: len(guids) // 2] if half else guids:
            key.ports[guid] = (body.get("membership", "full"), body.get("index0", False))
        return 200, {}

    def _remove(self, pkey: int, guids: list[str], *, half: bool) -> tuple[int, Any]:
        key = self.keys.get(pkey)
        if key is None:
            return 404, {"error": "no such pkey"}
        for guid in guids[: len(guids) // 2] if half else guids:
            key.ports.pop(guid, None)
        if not key.ports:
            del self.keys[pkey]
        return 200, {}

    def _file(self) -> bytes:
        lines = [DEFAULT.decode()]
        for pkey, key in self.keys.items():
            first = any(index0 for _, index0 in key.ports.values())
            flags = ", indx0" * first + ", ipoib" * key.ip_over_ib
            ports = ", ".join(f"0x{guid}={membership}" for guid, (membership, _) in key.ports.items())
            if ports:
                lines.append(f"api_pkey_{pkey:#x}={pkey:#06x}{flags} : {ports} ;\n")
        return "".join(lines).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    ufm: FakeUfm
    context: ssl.SSLContext

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(10)
        with self.context.wrap_socket(request, server_side=True) as secure:
            _Handler(secure, client_address, self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections break here on purpose."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Nothing."""

    def _serve(self) -> None:
        ufm = self.server.ufm
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        prefix, _, path = self.path.partition("/ufmRestV3")
        token = (self.headers.get("Authorization") or "").removeprefix("Basic ")
        if prefix or token not in (ufm.token, ufm.second_token):
            self._say(401, b'{"error": "invalid token"}')
            return
        if self.command != "GET":
            ufm.writers.append(token)
        kind = ufm.fault(self.command, path, body)
        if kind == "late":
            ufm.on_the_way += 1
            ufm.arrives.wait(60)
            ufm.on_the_way -= 1
        if isinstance(kind, int):
            self._say(kind, b'{"error": "injected"}', location="https://elsewhere.invalid/")
        elif kind == "accept":
            self._say(200, b"{}")
        elif kind == "html":
            self._say(200, b"<html>log in</html>")
        elif kind != "cut":
            status, answer = ufm.do(self.command, path, body, half=kind == "half")
            if kind != "cut-after":
                self._say(status, json.dumps(answer).encode(), slow=kind == "slow")

    def _say(self, status: int, body: bytes, *, slow: bool = False, location: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) + 1000 * slow))
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(body)
        for _ in range(1000 * slow):
            self.wfile.write(b" ")
            time.sleep(0.05)


def settings_of(ufm: FakeUfm, folder: Path, token: str = TOKEN) -> dict[str, Any]:
    """The keys of [fabric] for a vhpcd of this UFM, with its token in a folder."""
    file = folder / "token"
    file.write_text(token)
    file.chmod(0o600)
    return {
        "backend": "ufm-rest",
        "ufm_url": ufm.url,
        "ufm_token_file": str(file),
        "ufm_ca": str(ufm.ca),
    }


@contextmanager
def fake_ufm(
    folder: Path, fabric: SimulatedFabric | None = None, *, host: str = "127.0.0.1"
) -> Iterator[FakeUfm]:
    ufm = FakeUfm(folder, fabric, host=host)
    try:
        yield ufm
    finally:
        ufm.stop()


def make_certificates(folder: Path, host: str) -> None:
    """A CA (ca.pem) and a server's certificate of it, for an address or a name."""
    name = f"IP:{host}" if host[0].isdigit() else f"DNS:{host}"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    make += ["-days", "2"]
    ca = [*make, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test CA"]
    server = [*make, "-keyout", "server.key", "-out", "server.pem", "-subj", "/CN=UFM"]
    server += ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", f"subjectAltName={name}"]
    server += ["-addext", "basicConstraints=critical,CA:FALSE"]
    for command in (ca, server):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
