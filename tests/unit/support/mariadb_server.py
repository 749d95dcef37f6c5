# SPDX-License-Identifier: Apache-2.0
"""A MariaDB server of the tests' own, and a proxy that cuts its connections."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pace import limit
from vhpc_slurm.config.database import Database

WHY_NOT = "needs a MariaDB server: apt install mariadb-server (make deps does it)"
HAVE_SERVER = bool(shutil.which("mariadbd") and shutil.which("mariadb-install-db"))
try:
    import pymysql
except ModuleNotFoundError:
    HAVE_SERVER = False
    WHY_NOT = "needs PyMySQL: make deps installs it into .venv"
STARTS_S = 60.0


class Server:
    """One mariadbd with its files in a folder of its own; it listens on a Unix socket only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "s"
        self.process: subprocess.Popen[bytes] | None = None
        self._user = pwd.getpwuid(os.geteuid()).pw_name
        self._numbers = itertools.count(1)
        # A mariadbd that starts removes the temporary tables of all others in the same folder.
        self._tmpdir = folder / "tmp"
        self._tmpdir.mkdir()
        subprocess.run(
            [
                "mariadb-install-db",
                "--no-defaults",
                f"--datadir={folder / 'data'}",
                f"--user={self._user}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
            ],
            check=True,
            capture_output=True,
            timeout=120,
            env=os.environ | {"TMPDIR": str(self._tmpdir)},
        )

    def start(self, *options: str) -> Server:
        """Start it, and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),  # it ends also if the tests are killed
                    "mariadbd",
                    "--no-defaults",
                    f"--datadir={self.folder / 'data'}",
                    f"--socket={self.socket}",
                    f"--pid-file={self.folder / 'pid'}",
                    f"--tmpdir={self._tmpdir}",
                    f"--user={self._user}",
                    "--skip-networking",
                    "--innodb-buffer-pool-size=32M",
                    "--innodb-log-file-size=16M",
                    "--performance-schema=OFF",
                    *options,
                ],
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + limit(STARTS_S)
        while True:
            try:
                self.root().close()
                return self
            except pymysql.Error:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError((self.folder / "log").read_text(errors="replace")[-2000:]) from None
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, like a crash."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def root(self, database: str | None = None, **options: Any) -> Any:
        """A connection as the server's root."""
        return pymysql.connect(
            unix_socket=str(self.socket), user="root", database=database, autocommit=True, **options
        )

    def query(self, statement: str, database: str | None = None) -> list[Any]:
        """Run one statement as root."""
        with self.root(database) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def database(self, **settings: Any) -> Database:
        """The settings of a new, empty database."""
        name = f"vhpc_{next(self._numbers)}"
        self.query(f"CREATE DATABASE {name}")
        mine: dict[str, Any] = {"engine": "mariadb", "socket": str(self.socket), "name": name, "user": "root"}
        return Database(**mine | {"timeout_s": 4} | settings)


@contextmanager
def mariadb_server() -> Iterator[Server]:
    """A running server; its files are in memory, where there is any, and its commits therefore fast."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="vhpc-db-", dir=memory) as folder:
        server = Server(Path(folder)).start()
        try:
            yield server
        finally:
            server.stop()


Tamper = Callable[[bytes], bool]


class Proxy:
    """Passes bytes between clients and the server, and cuts connections where a test wants it.

    ``before(data)`` and ``after(data)`` are asked for each packet of a client: true cuts its
    connection before the packet is sent to the server, or when the server answers it.
    """

    def __init__(self, folder: Path, server: Path) -> None:
        self.path = folder / "p"
        self.before: Tamper = lambda _data: False
        self.after: Tamper = lambda _data: False
        self.refuses = False
        self._server = server
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuses:
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        cut = threading.Event()
        with client, socket.socket(socket.AF_UNIX) as server:
            with suppress(OSError):
                server.connect(str(self._server))
                back = threading.Thread(target=self._back, args=(server, client, cut), daemon=True)
                back.start()
                while data := client.recv(1 << 16):
                    if self.before(data):
                        break
                    if self.after(data):
                        cut.set()
                    server.sendall(data)
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)

    def _back(self, server: socket.socket, client: socket.socket, cut: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                if cut.is_set():
                    break
                client.sendall(data)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


@functools.cache
def shared() -> Server:
    """The server of this process, which ends with it; a test takes a database of its own from it."""
    running = mariadb_server()
    server = running.__enter__()
    atexit.register(running.__exit__, None, None, None)
    return server


def emptied(settings: Database) -> Database:
    """The settings of a database whose rows were deleted: sooner done than a new database."""
    with shared().root(settings.name) as connection, connection.cursor() as cursor:
        cursor.execute("SET foreign_key_checks = 0")
        cursor.execute("SHOW TABLES")
        for (table,) in cursor.fetchall():
            if table not in ("vhpc_schema", "vhpc_writer"):
                cursor.execute(f"DELETE FROM `{table}`")
        cursor.execute("SET sql_mode = 'NO_AUTO_VALUE_ON_ZERO'")
        cursor.execute("INSERT INTO key_epoch VALUES (0, '')")
    return settings
