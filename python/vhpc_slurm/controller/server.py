# SPDX-License-Identifier: Apache-2.0
"""The process vhpcd: configuration, the lock of the database, signals, start and stop.

vhpcd answers root and SlurmUser, and users about their own jobs; it uses only what munged has
authenticated, and accepts requests in the name of a node only from that node.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import pwd
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vhpc_slurm import __version__
from vhpc_slurm.config import Config, load
from vhpc_slurm.controller.api.addresses import HostAddresses
from vhpc_slurm.controller.api.authority import Authority
from vhpc_slurm.controller.api.conversation import Server
from vhpc_slurm.controller.api.listening import Listener
from vhpc_slurm.controller.api.useraccess import UserAccess
from vhpc_slurm.controller.assembly import Assembly, assemble
from vhpc_slurm.controller.leases import layer
from vhpc_slurm.controller.periodic import audit_for_ever
from vhpc_slurm.controller.store.choice import lock_path, only_one, open_store
from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.controller.store.writer import Writer
from vhpc_slurm.errors import FabricError, NodeError, VhpcError
from vhpc_slurm.fabric.backend import NetworkBackend
from vhpc_slurm.fabric.select import backend
from vhpc_slurm.munge import Munge
from vhpc_slurm.slurm import connect

if TYPE_CHECKING:
    from vhpc_slurm.controller.metrics.exposition import Exposition

log = logging.getLogger("vhpcd")

DESCRIPTORS = 512
"""File descriptors that are kept for other things than connections."""


async def serve(config: Config) -> None:
    """Run until SIGTERM or SIGINT; VhpcError when it cannot begin."""
    settings = config.controller
    allowed = frozenset({0, _uid(settings.slurm_user, "controller.slurm_user")})
    munge = Munge(settings.munge_socket)
    munge.decode(munge.encode(b"vhpcd begins"))
    with only_one(lock_path(config)):
        store = open_store(config)
        writer = Writer(store)
        # A backend asks from the fabric's thread.
        network = backend(config.fabric, lambda *known: writer.submit(store.keys.knows, *known).result())
        _validate(network, store)
        leases = layer.build(store, network, config)
        slurm = connect(config)
        authority = Authority(HostAddresses(settings, slurm, underlay=config.network.underlay))
        vhpcd = assemble(config, leases, network, slurm, writer, authority.underlay)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - DESCRIPTORS
        metrics = _metrics(settings.metrics, leases, writer, vhpcd)
        requests = vhpcd.requests if metrics is None else metrics.metered(vhpcd.requests)
        users = UserAccess(requests, slurm, deputies=allowed | _deputy(settings.web_user))
        server = Server(requests, munge, allowed, authority, users=users, descriptors=descriptors)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        listener = Listener(settings.listen, settings.port, server.accepted)
        listener.start()
        log.info("vhpcd %s listens on %s port %d", __version__, settings.listen, settings.port)
        await vhpcd.reconciler.begin()
        tasks = [
            asyncio.create_task(authority.keep_learning()),
            asyncio.create_task(vhpcd.reconciler.run_for_ever()),
            asyncio.create_task(
                audit_for_ever(vhpcd.audit, vhpcd.trigger, vhpcd.thread, config.fabric.audit_interval_s)
            ),
        ]
        await stop.wait()
        log.info("vhpcd stops")
        listener.close()
        for task in tasks:
            task.cancel()
        await server.close()
        if metrics is not None:
            metrics.close()
        authority.close()
        users.close()
        vhpcd.close()
        store.close()


def _metrics(where: str, leases: layer.LeaseLayer, writer: Writer, vhpcd: Assembly) -> Exposition | None:
    """Metrics, if the site wants them; jobs do not wait for a port that another process has."""
    if not where:
        return None
    try:
        from vhpc_slurm.controller.metrics.exposition import Exposition
        from vhpc_slurm.controller.metrics.state import StateReader

        return Exposition(where, StateReader(leases, writer, vhpcd))
    except ModuleNotFoundError as err:
        log.error("there are no metrics: %s (install Debian's python3-prometheus-client)", err)
    except NodeError as err:
        log.error("there are no metrics: %s", err.line())
    return None


def _validate(network: NetworkBackend, store: LeaseStore) -> None:
    """Log what is wrong with the fabric; leases become ready when it is repaired."""
    try:
        network.validate(store.keys.snapshot())
    except FabricError as err:
        log.error("the fabric cannot serve: %s", err.line())


def _uid(name: str, key: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise NodeError(f"there is no user {name!r}", f"{key} of vhpc.toml names it") from None


def _deputy(name: str) -> frozenset[int]:
    return frozenset({_uid(name, "controller.web_user")}) if name else frozenset()


def main(arguments: list[str] | None = None) -> int:
    """Process entry point."""
    parser = argparse.ArgumentParser(
        prog="vhpcd",
        description="vhpc's controller service: leases of virtual clusters.",
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="default: /etc/vhpc/vhpc.toml")
    parser.add_argument(
        "--foreground", action="store_true", help="accepted for service managers; vhpcd never forks"
    )
    parser.add_argument("--version", action="version", version=f"vhpcd {__version__}")
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    os.umask(0o077)
    try:
        config = load(options.config)
        if os.geteuid() not in (0, _uid(config.controller.user, "controller.user")):
            raise NodeError(
                f"vhpcd must run as {config.controller.user} or root",
                "clients accept answers of no other user",
                "see controller.user in vhpc.toml",
            )
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asyncio.run(serve(config))
    except VhpcError as err:
        print(f"vhpcd: {err.line()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
