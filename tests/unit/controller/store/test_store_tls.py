# SPDX-License-Identifier: Apache-2.0
"""TLS to the database server: the right name by the right authority, or no connection and no password."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import mariadb_server
import msgspec
import pytest
from controller_lab import free_port
from mariadb_server import Server
from store_backends import ME

from vhpc_slurm.config.database import Database
from vhpc_slurm.controller.store.mariastore import MariaStore
from vhpc_slurm.errors import FabricError

pytestmark = [
    pytest.mark.skipif(not mariadb_server.HAVE_SERVER, reason=mariadb_server.WHY_NOT),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl: apt install openssl"),
]


def certificate(folder: Path, name: str) -> Path:
    """A self-signed certificate for localhost, with its key in the same folder."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem"), "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return folder / f"{name}.pem"


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A user's database on a server that listens on TCP with TLS."""
    folder = tmp_path_factory.mktemp("tls")
    certificate(folder, "other")
    with mariadb_server.mariadb_server() as server:
        yield secured(server, folder)


def secured(server: Server, folder: Path) -> Database:
    pem, port = certificate(folder, "server"), free_port()
    (folder / "password").write_text("secret\n")
    (folder / "password").chmod(0o600)
    server.stop()
    listening(server, pem, port)
    settings = server.database()
    server.query("CREATE USER 'vhpc'@'%' IDENTIFIED BY 'secret' REQUIRE SSL")
    server.query(f"GRANT ALL ON {settings.name}.* TO 'vhpc'@'%'")
    return msgspec.structs.replace(
        settings,
        host="localhost",
        port=port,
        user="vhpc",
        password_file=str(folder / "password"),
        tls_ca=str(pem),
    )


def listening(server: Server, pem: Path, port: int) -> None:
    server.start(
        "--skip-networking=0",
        "--bind-address=127.0.0.1",
        f"--port={port}",
        f"--ssl-cert={pem}",
        f"--ssl-key={pem.with_suffix('.key')}",
    )


def test_the_server_with_the_right_certificate_is_used(remote: Database) -> None:
    MariaStore(remote, ME).close()


@pytest.mark.promise("attack.database-server")
def test_another_authority_or_name_is_refused(remote: Database) -> None:
    other = str(Path(remote.tls_ca).with_name("other.pem"))
    with pytest.raises(FabricError, match="CERTIFICATE_VERIFY_FAILED"):
        MariaStore(msgspec.structs.replace(remote, tls_ca=other), ME)
    with pytest.raises(FabricError, match=r"CERTIFICATE_VERIFY_FAILED.*127\.0\.0\.1"):
        MariaStore(msgspec.structs.replace(remote, host="127.0.0.1"), ME)


@pytest.mark.promise("keys.renew")
def test_a_renewed_certificate_is_used_by_the_next_connection(tmp_path: Path) -> None:
    """vhpcd continues: its connection is lost with the server, and a new one reads the file."""
    with mariadb_server.mariadb_server() as server:
        settings = secured(server, tmp_path)
        store = MariaStore(settings, ME)
        pem, before = Path(settings.tls_ca), Path(settings.tls_ca).read_bytes()
        server.stop()
        certificate(tmp_path, "server")
        listening(server, pem, settings.port)
        new = pem.read_bytes()
        pem.write_bytes(before)
        with pytest.raises(FabricError, match="CERTIFICATE_VERIFY_FAILED"):
            MariaStore(settings, ME)
        pem.write_bytes(new)
        with store.transaction():
            store.renew()
        store.close()


def test_a_server_that_wants_tls_gets_no_clear_text(remote: Database) -> None:
    with pytest.raises(FabricError, match="Access denied"):
        MariaStore(msgspec.structs.replace(remote, tls_ca=""), ME)


@pytest.mark.promise("attack.database-server")
def test_a_server_without_tls_gets_no_password(remote: Database) -> None:
    """A false server asks for the password in clear text, and offers no TLS."""
    got: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    plugin = b"mysql_clear_password\0"
    # Protocol version, name, thread, half of a nonce, capabilities without CLIENT_SSL, the other half, plugin
    greeting = b"\x0a5.5.5-false\0" + b"\1\0\0\0" + b"12345678\0" + (0xF7DF).to_bytes(2, "little")
    greeting += (
        b"\x2d\2\0" + (0x0008).to_bytes(2, "little") + b"\x15" + bytes(10) + b"123456789012\0" + plugin
    )

    def serve() -> None:
        link, _ = listener.accept()
        with link:
            link.settimeout(10)
            link.sendall(len(greeting).to_bytes(3, "little") + b"\0" + greeting)
            try:
                got.append(link.recv(4096))
            except ConnectionResetError:  # the greeting was looked at, and left unread
                got.append(b"")

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(FabricError, match=r"TLS|SSL"):
        MariaStore(msgspec.structs.replace(remote, port=listener.getsockname()[1]), ME)
    thread.join(15)
    listener.close()
    assert got == [b""], "nothing is sent to it"


def test_tls_needs_a_host_and_a_file(remote: Database) -> None:
    with pytest.raises(FabricError, match=r"a socket has no TLS"):
        MariaStore(msgspec.structs.replace(remote, host=""), ME)
    with pytest.raises(FabricError, match=r"cannot read database\.tls_ca"):
        MariaStore(msgspec.structs.replace(remote, tls_ca="/nonexistent"), ME)
