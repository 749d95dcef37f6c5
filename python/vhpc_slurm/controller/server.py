# SPDX-License-Identifier: Apache-2.0
"""The process vhpcd: configuration, the lock of the database, signals, start and stop.

vhpcd answers root and SlurmUser only, uses only what munged has authenticated, and
accepts requests in the name of a node only from that node.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import pwd
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm import __version__, files
from vhpc_slurm.config import Config, load
from vhpc_slurm.controller.api.addresses import HostAddresses
from vhpc_slurm.controller.api.authority import Authority
from vhpc_slurm.controller.api.conversation import Server
from vhpc_slurm.controller.api.listening import Listener
from vhpc_slurm.controller.assembly import assemble
from vhpc_slurm.controller.leases import layer
from vhpc_slurm.controller.periodic import audit_for_ever
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.controller.store.writer import Writer
from vhpc_slurm.errors import FabricError, NodeError, VhpcError
from vhpc_slurm.fabric.backend import NetworkBackend
from vhpc_slurm.fabric.select import backend
from vhpc_slurm.munge import Munge
from vhpc_slurm.slurm import connect

log = logging.getLogger("vhpcd")

DESCRIPTORS = 512
"""File descriptors that are kept for other things than connections."""


async def serve(config: Config) -> None:
    """Run until SIGTERM or SIGINT; VhpcError when it cannot begin."""
    settings = config.controller
    allowed = frozenset({0, _uid(settings.slurm_user, "controller.slurm_user")})
    munge = Munge(settings.munge_socket)
    munge.decode(munge.encode(b"vhpcd begins"))
    with _only_one(Path(settings.database)):
        store = SqliteStore(settings.database)
        writer = Writer(store)
        # A backend asks from the fabric's thread.
        network = backend(config.fabric, lambda *known: writer.submit(store.keys.knows, *known).result())
        _validate(network, store)
        leases = layer.build(store, network, config)
        slurm = connect(config)
        authority = Authority(HostAddresses(settings, slurm, underlay=config.network.underlay))
        vhpcd = assemble(config, leases, network, slurm, writer, authority.underlay)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - DESCRIPTORS
        server = Server(vhpcd.requests, munge, allowed, authority, descriptors=descriptors)
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
        authority.close()
        vhpcd.close()
        store.close()


def _validate(network: NetworkBackend, store: LeaseStore) -> None:
    """Log what is wrong with the fabric; leases become ready when it is repaired."""
    try:
        network.validate(store.keys.snapshot())
    except FabricError as err:
        log.error("the fabric cannot serve: %s", err.line())


@contextlib.contextmanager
def _only_one(database: Path) -> Iterator[None]:
    """Hold the lock of the database: two writers would assign the same keys twice."""
    try:
        database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = files.open_lock(Path(f"{database}.lock"))
    except OSError as err:
        raise NodeError(
            f"vhpcd cannot use {database}", str(err), "create its folder, owned by its user"
        ) from err
    try:
        if not files.try_lock(lock):
            owner = os.pread(lock, 20, 0).decode(errors="replace").strip() or "?"
            raise NodeError(f"another vhpcd uses {database}", f"it is process {owner}")
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def _uid(name: str, key: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise NodeError(f"there is no user {name!r}", f"{key} of vhpc.toml names it") from None


def main(arguments: list[str] | None = None) -> int:
    """Process entry point."""
    parser = argparse.ArgumentParser(
        prog="vhpcd",
        description="vhpc's controller service: leases of virtual clusters, for root and SlurmUser.",
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
