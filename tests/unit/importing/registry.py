# SPDX-License-Identifier: Apache-2.0
"""A registry on loopback: Debian's docker-registry with TLS and a password."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pace import limit

CONFIG = """
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: "127.0.0.1:{port}", tls: {{certificate: {folder}/cert.pem, key: {folder}/key.pem}}}}
auth: {{htpasswd: {{realm: test, path: {folder}/passwords}}}}
"""


@dataclass(frozen=True)
class Registry:
    address: str
    certificate: Path
    login: Path

    def push(self, source: str, name: str) -> None:
        certificates = self.certificate.parent / "certs"
        options = [f"--authfile={self.login}", f"--dest-cert-dir={certificates}"]
        subprocess.run(
            ["skopeo", "copy", "--quiet", *options, source, f"docker://{self.address}/{name}"], check=True
        )


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[Registry]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    files: list[str | Path] = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run(["openssl", *made.split(), *files], check=True, capture_output=True)
    (folder / "certs").mkdir()
    (folder / "certs/ca.crt").write_bytes((folder / "cert.pem").read_bytes())
    # the password "secret", by bcrypt
    (folder / "passwords").write_text("alice:$2b$05$tCUWww5ZeLjTAUNo6PpEoOT6L3OK/797I.GrUYnvcr2CuI43SUQW6\n")
    (folder / "config.yml").write_text(CONFIG.format(folder=folder, port=port))
    with subprocess.Popen(
        ["docker-registry", "serve", folder / "config.yml"], stderr=subprocess.DEVNULL
    ) as run:
        try:
            _wait(port)
            yield Registry(f"127.0.0.1:{port}", folder / "cert.pem", folder / "auth.json")
        finally:
            run.terminate()


def _wait(port: int) -> None:
    until = time.monotonic() + limit(30)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < until, "the registry does not start"
            time.sleep(0.05)
        else:
            return
