# SPDX-License-Identifier: Apache-2.0
"""The table [database] of vhpc.toml: where vhpcd keeps its leases."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from vhpc_slurm.config.setting import documented


class Database(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine of vhpcd's database, and how vhpcd connects to a database server."""

    engine: Annotated[
        Literal["sqlite", "mariadb"],
        documented(
            "sqlite: the file controller.database; mariadb: a database of a MariaDB or MySQL server, which "
            "may be slurmdbd's server. vhpc database copy takes the leases from one to the other"
        ),
    ] = "sqlite"
    host: Annotated[str, documented("mariadb: host name or address of the server; empty: its socket")] = ""
    port: Annotated[int, documented("mariadb: TCP port of the server", ge=1, le=65535)] = 3306
    socket: Annotated[str, documented("mariadb: Unix socket of a server on vhpcd's host")] = (
        "/run/mysqld/mysqld.sock"
    )
    name: Annotated[
        str, documented("mariadb: name of the database, of vhpcd's own", pattern=r"^[0-9A-Za-z_]{1,64}$")
    ] = "vhpc"
    user: Annotated[str, documented("mariadb: user of the server")] = "vhpc"
    password_file: Annotated[
        str,
        documented(
            "mariadb: file with the password, of root or of controller.user, mode 600, read at each "
            "connection; empty: the server knows the user by the Unix socket (unix_socket, auth_socket)"
        ),
    ] = ""
    tls_ca: Annotated[
        str,
        documented(
            "mariadb: file with the certificates that sign the server's; the connection must then use TLS "
            "and the certificate must have the name in host. Empty: no TLS"
        ),
    ] = ""
    timeout_s: Annotated[
        int,
        documented(
            "mariadb: longest wait for a connection, a statement or a lock of the server; keep it below "
            "controller.request_timeout_s",
            ge=1,
            le=60,
        ),
    ] = 4
