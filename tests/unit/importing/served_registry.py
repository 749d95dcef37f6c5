# SPDX-License-Identifier: Apache-2.0
"""A registry in memory, by the words of the OCI distribution specification 1.1, that tests let misbehave.

Its parts by the names of the specification: pull (end-2, end-3) and push in one PATCH (end-4 to
end-7). ``answers`` replaces the answer to requests whose path has a text.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import ssl
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Answer = Callable[["Handler"], None]
BYTES = "application/octet-stream"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Served:
    """Content of the registry, and the requests to it."""

    def __init__(self) -> None:
        self.address = ""
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.uploads: dict[str, bytes] = {}
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []

    def blob(self, data: bytes, kind: str) -> dict[str, Any]:
        """Store a blob; returns its descriptor."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return {"mediaType": kind, "digest": digest, "size": len(data)}

    def manifest(self, tag: str, raw: bytes | dict[str, Any], kind: str = OCI_MANIFEST) -> str:
        """Store a manifest under a tag and its digest; returns the digest."""
        data = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.manifests[tag] = self.manifests[digest] = (kind, data)
        return digest

    def fetched(self, digest: str) -> bool:
        """Whether somebody has fetched a blob."""
        return any(line.startswith("GET ") and line.endswith(digest) for line in self.asked)


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    served: Served

    def handle_any(self) -> None:
        self.served.asked.append(f"{self.command} {self.path}")
        path = urllib.parse.urlsplit(self.path).path
        with contextlib.suppress(OSError):
            for text, answer in self.served.answers.items():
                if text in f"{self.command} {path}":
                    answer(self)
                    return
            getattr(self, f"_{self.command.lower()}")(path)

    do_GET = do_HEAD = do_POST = do_PATCH = do_PUT = handle_any  # noqa: N815 - http.server's names

    def send(
        self, code: int, data: bytes = b"", kind: str = "application/octet-stream", **fields: str
    ) -> None:
        """Answer with a status, a body and header fields (a dash for each underscore)."""
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, text in fields.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def fail(self, code: int, error: str) -> None:
        """Answer with an error in the form of the specification ("Error Codes")."""
        body = {"errors": [{"code": error, "message": error.lower().replace("_", " ")}]}
        self.send(code, json.dumps(body).encode(), "application/json")

    def body(self) -> bytes:
        """The client's body: with a length, or in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _get(self, path: str) -> None:
        name = path.rpartition("/")[2]
        if path == "/v2/":
            self.send(200, b"{}", "application/json")
        elif "/manifests/" in path and name in self.served.manifests:
            kind, data = self.served.manifests[name]
            self.send(200, data, kind)
        elif "/blobs/" in path and name in self.served.blobs:
            self.send(200, self.served.blobs[name])
        else:
            self.fail(404, "MANIFEST_UNKNOWN" if "/manifests/" in path else "BLOB_UNKNOWN")

    _head = _get

    def _post(self, path: str) -> None:
        upload = f"{path.rstrip('/')}/{len(self.served.uploads)}"
        self.served.uploads[upload] = b""
        self.send(202, Location=upload)

    def _patch(self, path: str) -> None:
        self.served.uploads[path] += self.body()
        self.send(202, Location=path, Range=f"0-{len(self.served.uploads[path]) - 1}")

    def _put(self, path: str) -> None:
        if "/manifests/" in path:
            self.served.manifest(path.rpartition("/")[2], self.body(), self.headers["Content-Type"])
            self.send(201, Location=path)
            return
        data = self.served.uploads.pop(path) + self.body()
        (digest,) = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)["digest"]
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            self.fail(400, "DIGEST_INVALID")
            return
        self.served.blobs[digest] = data
        self.send(201, Location=path, Docker_Content_Digest=digest)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Serve on a free port of 127.0.0.1 with TLS; ``folder/cert.pem`` is the certificate."""
    found = Served()
    made = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    files: list[str | Path] = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run(["openssl", *made.split(), *files], check=True, capture_output=True)
    handler = type("Handler", (Handler,), {"served": found})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found.address = f"127.0.0.1:{server.server_address[1]}"
        yield found
        server.shutdown()


def refusing(code: int, error: str) -> Answer:
    """Answer with an error."""
    return lambda request: request.fail(code, error)


def sending(data: bytes, kind: str = BYTES) -> Answer:
    """Answer with these bytes."""
    return lambda request: request.send(200, data, kind)


def redirecting(location: str) -> Answer:
    """Answer with another place."""
    return lambda request: request.send(307, Location=location)


def endless(request: Handler) -> None:
    """Send without end."""
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(bytes(1 << 16))


def silent(request: Handler) -> None:
    """Send a head and then nothing."""
    request.send_response(200)
    request.end_headers()
    time.sleep(30)


def stalled(_request: Handler) -> None:
    """Send nothing at all."""
    time.sleep(30)


def dripping(request: Handler) -> None:
    """Send a byte at a time."""
    request.send_response(200)
    request.end_headers()
    for _ in range(300):
        request.wfile.write(b"x")
        request.wfile.flush()
        time.sleep(0.1)
