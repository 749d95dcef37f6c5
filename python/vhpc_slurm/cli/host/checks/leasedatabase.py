# SPDX-License-Identifier: Apache-2.0
"""Whether vhpcd's database server can be reached from its host, and writes each commit to the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def check(config: Config, *, root: bool) -> Iterator[CheckResult]:
    """Results where the leases are in a database server; only root and vhpcd's user can read the password."""
    settings = config.database
    if settings.engine != "mariadb":
        return
    if settings.host and settings.host not in LOOPBACK and not settings.tls_ca:
        yield warn(
            "database.tls",
            f"vhpcd and the database server {settings.host} exchange leases and keys without encryption",
            "set database.tls_ca in vhpc.toml, or use a network that only they have",
        )
    if settings.timeout_s >= config.controller.request_timeout_s:
        yield warn(
            "database.timeout",
            f"database.timeout_s ({settings.timeout_s}) is not below controller.request_timeout_s: clients "
            "of vhpcd give up before it can say that the server does not answer",
            "set a smaller database.timeout_s",
        )
    if config.controller.backup_hosts and not settings.host:
        yield warn(
            "database.shared",
            "there are several vhpcd, and database.host is empty: each uses the server behind its own "
            f"host's {settings.socket}",
            "set database.host, unless these sockets lead to one server",
        )
    if not root:
        yield warn("database", "the database server was not asked", "run vhpc doctor as root")
        return
    if not settings.password_file:
        # The server knows vhpcd's user by the socket, and root by another name or not at all.
        yield ok("database", "only vhpcd's user can log in to the server; vhpcd checks it when it starts")
        return
    yield server(config)


def server(config: Config) -> CheckResult:
    """Whether the server answers, and keeps what it has confirmed."""
    from vhpc_slurm.controller.store import mariasession
    from vhpc_slurm.controller.store.errors import EngineError
    from vhpc_slurm.controller.store.mariadb import MariaDatabase
    from vhpc_slurm.controller.store.mariastore import explain

    where = mariasession.where(config.database)
    try:
        with closing(MariaDatabase(config.database, config.controller.user)) as db:
            found = mariasession.variables(db.execute)
    except EngineError as err:
        explained = explain(err, config.database)
        return error("database", f"{explained.what}: {explained.why}", explained.hint)
    except FabricError as err:
        return error("database", f"{err.what}: {err.why}", err.hint)
    if (trouble := mariasession.trouble(found)) is not None:
        return error("database", f"vhpcd does not start with the {where}: {trouble[0]}", trouble[1])
    return ok("database", f"{where}: version {found.get('version', '?')}, commits are on its disk")
