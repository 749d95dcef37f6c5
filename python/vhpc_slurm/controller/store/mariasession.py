# SPDX-License-Identifier: Apache-2.0
"""Connections to a MariaDB or MySQL server: password, TLS, deadlines, and settings of the session."""

from __future__ import annotations

import math
import os
import pwd
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vhpc_slurm.config.database import Database as Settings
from vhpc_slurm.controller.store.errors import EngineError, EngineTakenError
from vhpc_slurm.errors import FabricError

if TYPE_CHECKING:
    import pymysql

MAX_PACKET = 16 << 20
"""Bytes of a statement that the server must accept; a lease of thousands of nodes has some MiB."""
IDLE_S = 60
"""After so many idle seconds the server ends a session, and frees what it has locked."""
_SSL = 0x0800
_MODE = "ANSI_QUOTES,STRICT_ALL_TABLES,NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION"
_GONE = frozenset({0, 1047, 1053, 1152, 1158, 1159, 1160, 1161, 1317, 1927, 4031})
_UNDONE = frozenset({1020, 1040, 1205, 1213})
_TAKEN = frozenset({1022, 1062, 1451, 1452, 1557, 3819, 4025})


def passes(code: int) -> bool:
    """Whether an error undoes its transaction for a reason that passes: deadlock, lock wait, lost connection.

    The numbers of the client library, from 2000, mean a connection that is lost or cannot be made.
    """
    return code in _GONE or code in _UNDONE or 2000 <= code < 3000


def gone(code: int) -> bool:
    """Whether an error says that the connection is lost, and nothing about what was last sent."""
    return code in _GONE or 2000 <= code < 3000


def password(path: str, owner: str) -> str:
    """The password in a file that only root and ``owner`` may read and write.

    FabricError: it cannot be read, belongs to another user, is readable by others, or has not one line.
    """
    if not path:
        return ""
    what = f"cannot use database.password_file {path}"
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), "rb") as opened:
            found = os.fstat(opened.fileno())
            raw = opened.read(4096)
    except OSError as err:
        raise FabricError(what, err.strerror or str(err), "create it for vhpcd's user, mode 600") from err
    try:
        owners = {0, os.geteuid(), pwd.getpwnam(owner).pw_uid}
    except KeyError:
        owners = {0, os.geteuid()}
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
        raise FabricError(what, "other users may read it, or it is no file", f"chmod 600 {path}")
    if found.st_uid not in owners:
        raise FabricError(what, "it belongs to another user", f"chown {owner} {path}")
    try:
        text = raw.decode().removesuffix("\n")
    except UnicodeDecodeError as err:
        raise FabricError(what, "it is not UTF-8", "write the password into it, as one line") from err
    if not text or "\n" in text or "\0" in text or len(raw) == 4096:
        raise FabricError(what, "it does not have one line", "write the password into it, as one line")
    return text


def where(settings: Settings) -> str:
    """The database in one clause, for messages."""
    at = f"{settings.host}:{settings.port}" if settings.host else settings.socket
    return f"database {settings.name} of {settings.user} at {at}"


def translated(err: Exception) -> EngineError:
    """An error of the client library, or of a socket, as one of the engine."""
    code, text = 0, str(err)
    if len(err.args) >= 2 and isinstance(err.args[0], int) and not isinstance(err, OSError):
        code, text = err.args[0], str(err.args[1])
    return (EngineTakenError if code in _TAKEN else EngineError)(code, text or type(err).__name__)


def connect(settings: Settings, owner: str) -> pymysql.Connection[Any]:
    """A session with this module's settings, in autocommit.

    Raises:
        EngineError: the server cannot be reached, or refuses.
        FabricError: the library or the password file cannot be used.
    """
    try:
        import pymysql
        from pymysql.constants import CLIENT
    except ModuleNotFoundError as err:
        raise FabricError(
            'database.engine = "mariadb" cannot be used', str(err), "install Debian's python3-pymysql"
        ) from err
    secret = password(settings.password_file, owner)
    options: dict[str, Any] = (
        {"host": settings.host, "port": settings.port} if settings.host else {"unix_socket": settings.socket}
    )
    if settings.tls_ca:
        if not settings.host:
            raise FabricError("database.tls_ca is set without database.host", "a socket has no TLS")
        if not Path(settings.tls_ca).is_file():
            raise FabricError(f"cannot read database.tls_ca {settings.tls_ca}", "there is no such file")
        options |= {"ssl_ca": settings.tls_ca, "ssl_verify_cert": True, "ssl_verify_identity": True}
    else:
        options["ssl_disabled"] = True
    connection = None
    try:
        connection = pymysql.Connection(
            **options,
            user=settings.user,
            password=secret.encode(),  # the library would use Latin-1
            database=settings.name,
            charset="utf8mb4",
            autocommit=True,
            client_flag=CLIENT.FOUND_ROWS,
            connect_timeout=settings.timeout_s,
            read_timeout=settings.timeout_s,
            write_timeout=settings.timeout_s,
            max_allowed_packet=MAX_PACKET,
            defer_connect=True,
        )
        connection.connect(_to_tls(settings) if settings.tls_ca else None)
        with connection.cursor() as cursor:
            _settle(cursor, settings.timeout_s)
    except (pymysql.Error, OSError, RuntimeError, EngineError) as err:
        if connection is not None:
            drop(connection)
        raise err if isinstance(err, EngineError) else translated(err) from err
    return connection


def drop(connection: pymysql.Connection[Any]) -> None:
    """Close a connection, whatever its state."""
    import pymysql

    with suppress(pymysql.Error, OSError):
        connection.close()


def _to_tls(settings: Settings) -> socket.socket:
    """A socket to a server that offers TLS; without this check PyMySQL before 1.2 continues in clear text.

    Raises:
        EngineError: the server does not.
        OSError: it cannot be reached.
    """
    found = socket.create_connection((settings.host, settings.port), timeout=settings.timeout_s)
    # A packet's head, the version of the protocol, the server's name, a thread and half of a nonce,
    # then the lower half of its capabilities.
    greeting, until = b"", time.monotonic() + settings.timeout_s
    while time.monotonic() < until:
        greeting = found.recv(4096, socket.MSG_PEEK)
        place = greeting.find(b"\0", 5) + 14
        if not greeting or (place > 14 and len(greeting) >= place + 2):
            break
        time.sleep(0.01)
    if len(greeting) > 16 and place > 14 and int.from_bytes(greeting[place : place + 2], "little") & _SSL:
        return found
    found.close()
    raise EngineError(2026, "the server offers no TLS, and database.tls_ca asks for it")


def _settle(cursor: Any, timeout_s: int) -> None:
    lock_s = max(
        1, math.floor(timeout_s * 0.75)
    )  # so that the server's own error arrives before the deadline
    cursor.execute(
        f"SET SESSION sql_mode = '{_MODE}', SESSION wait_timeout = {IDLE_S},"
        f" SESSION innodb_lock_wait_timeout = {lock_s}, SESSION lock_wait_timeout = {lock_s}"
    )
    cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    cursor.execute("SHOW VARIABLES LIKE 'wsrep_on'")
    if (cursor.fetchone() or ("", "OFF"))[1] == "ON":
        # A cluster of Galera: reads wait for what other members have committed.
        cursor.execute("SET SESSION wsrep_sync_wait = 7")


def variables(execute: Any) -> dict[str, str]:
    """The server's settings that ``trouble`` judges."""
    names = (
        "innodb_flush_log_at_trx_commit",
        "log_bin",
        "max_allowed_packet",
        "read_only",
        "sync_binlog",
        "version",
    )
    listed = ", ".join(f"'{name}'" for name in names)
    return {
        name.lower(): str(value)
        for name, value in execute(f"SHOW VARIABLES WHERE variable_name IN ({listed})")
    }


def trouble(found: dict[str, str]) -> tuple[str, str] | None:
    """Why a server must not keep leases, and what to do; None if it may."""
    if found.get("innodb_flush_log_at_trx_commit") != "1":
        return (
            f"innodb_flush_log_at_trx_commit is {found.get('innodb_flush_log_at_trx_commit', 'unknown')}: "
            "a power loss would lose leases that vhpcd has confirmed",
            "set innodb_flush_log_at_trx_commit = 1 in the server's configuration",
        )
    if found.get("log_bin") == "ON" and found.get("sync_binlog") != "1":
        return (
            f"log_bin is ON and sync_binlog is {found.get('sync_binlog', 'unknown')}: "
            "a power loss would lose leases that vhpcd has confirmed",
            "set sync_binlog = 1 in the server's configuration",
        )
    if int(found.get("max_allowed_packet", "0")) < MAX_PACKET:
        return (
            f"max_allowed_packet is {found.get('max_allowed_packet', 'unknown')}, too small for leases",
            f"set max_allowed_packet = {MAX_PACKET >> 20}M in the server's configuration",
        )
    if found.get("read_only") not in ("OFF", "0", "NO_LOCK"):
        return "the server is read-only", "use the server that accepts changes"
    return None
