# SPDX-License-Identifier: Apache-2.0
"""The process vhpcd: configuration, the lock of the database, signals, start and stop.

vhpcd answers root and SlurmUser, and users about their own jobs; it uses only what munged has
authenticated, and accepts requests in the name of a node only from that node.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import pwd
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vhpc_slurm import __version__, loglines, record
from vhpc_slurm.config import Config, load
from vhpc_slurm.controller.api.addresses import HostAddresses
from vhpc_slurm.controller.api.authority import Authority
from vhpc_slurm.controller.api.conversation import Server
from vhpc_slurm.controller.api.duty import Duty
from vhpc_slurm.controller.api.listening import Listener
from vhpc_slurm.controller.api.useraccess import UserAccess
from vhpc_slurm.controller.assembly import Assembly, assemble
from vhpc_slurm.controller.leases import layer
from vhpc_slurm.controller.periodic import audit_for_ever
from vhpc_slurm.controller.store.choice import lock_path, only_one, open_store
from vhpc_slurm.controller.store.mariastore import MariaStore
from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.controller.store.sqlstore import SqlStore
from vhpc_slurm.controller.store.writer import Writer
from vhpc_slurm.controller.tenure import Tenure, await_turn
from vhpc_slurm.errors import FabricError, NodeError, VhpcError
from vhpc_slurm.fabric.backend import NetworkBackend
from vhpc_slurm.fabric.fence import ALONE, FabricWriter
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
    slurm_user = _uid(settings.slurm_user, "controller.slurm_user")
    munge = Munge(settings.munge_socket)
    munge.decode(munge.encode(b"vhpcd begins"))
    with only_one(lock_path(config)):
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        one_of_several = bool(settings.backup_hosts)
        store = None if one_of_several else open_store(config)
        front = Front(config, munge, frozenset({0, slurm_user}), Duty(standby=one_of_several))
        if one_of_several:
            front.listen("as a standby ")
            store = await await_turn(config, front.duty, stop)
        try:
            if store is not None:
                await _serve_actively(config, store, front, stop)
        finally:
            await front.close()


class Front:
    """The part of vhpcd that a standby has too: its port, and who may ask."""

    def __init__(self, config: Config, munge: Munge, allowed: frozenset[int], duty: Duty) -> None:
        """``allowed`` are the uids that may send all requests."""
        settings = config.controller
        self.duty, self.allowed = duty, allowed
        self.slurm = connect(config)
        self.authority = Authority(HostAddresses(settings, self.slurm, underlay=config.network.underlay))
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - DESCRIPTORS
        self.server = Server(None, munge, allowed, self.authority, duty=duty, descriptors=descriptors)
        self._place = (settings.listen, settings.port)
        self._listener: Listener | None = None
        self._learning: asyncio.Task[None] | None = None
        self._closed = False

    def listen(self, how: str = "") -> None:
        """Accept connections, unless that has begun."""
        if self._listener is None:
            self._listener = Listener(*self._place, self.server.accepted)
            self._listener.start()
            self._learning = asyncio.create_task(self.authority.keep_learning())
            log.info("vhpcd %s listens %son %s port %d", __version__, how, *self._place)

    async def close(self) -> None:
        """Accept no more, and close all connections; once is enough."""
        if self._closed:
            return
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        if self._learning is not None:
            self._learning.cancel()
        await self.server.close()
        self.authority.close()


async def _serve_actively(config: Config, store: SqlStore, front: Front, stop: asyncio.Event) -> None:
    """Answer requests until ``stop``, as the only or the active vhpcd."""
    writer, tenure = Writer(store), None
    if config.controller.backup_hosts and isinstance(store, MariaStore):
        tenure = Tenure(store, writer)
    try:
        await _serve_as(config, store, writer, tenure, front, stop)
    except VhpcError:
        if tenure is not None:
            # Another vhpcd may have what this one lacks.
            tenure.close()
            writer.close()
            store.close()
        raise


async def _serve_as(
    config: Config, store: SqlStore, writer: Writer, tenure: Tenure | None, front: Front, stop: asyncio.Event
) -> None:
    settings, slurm = config.controller, front.slurm
    # A backend asks from the fabric's thread.
    network = backend(
        config.fabric,
        lambda *known: writer.submit(store.keys.knows, *known).result(),
        ALONE if tenure is None else FabricWriter(tenure.epoch, tenure.left_s),
    )
    _validate(network, writer, store)
    leases = layer.build(store, network, config)
    vhpcd = assemble(config, leases, network, slurm, writer, front.authority.underlay)
    metrics = _metrics(settings.metrics, leases, writer, vhpcd)
    requests = vhpcd.requests if metrics is None else metrics.metered(vhpcd.requests)
    users = UserAccess(requests, slurm, deputies=front.allowed | _deputy(settings.web_user))
    front.server.begin(requests, users, vhpcd.clusters.lose)
    if tenure is not None:
        front.duty.begin(tenure.epoch, tenure.left_s)
        log.info("vhpcd is active, with epoch %d", tenure.epoch)
    front.listen()
    try:
        await vhpcd.reconciler.begin()
    except FabricError as err:
        if tenure is None:
            raise
        log.warning("not reconciled: %s", err.line())  # another vhpcd would not reach the database either
    tasks = [
        asyncio.create_task(vhpcd.reconciler.run_for_ever()),
        asyncio.create_task(vhpcd.timed.run_for_ever()),
        asyncio.create_task(
            audit_for_ever(vhpcd.audit, vhpcd.trigger, vhpcd.thread, config.fabric.audit_interval_s)
        ),
    ]
    await stop.wait()
    log.info("vhpcd stops")
    if tenure is not None:
        tenure.stopping()
    await front.close()
    for task in tasks:
        task.cancel()
    if metrics is not None:
        metrics.close()
    users.close()
    vhpcd.close()
    if tenure is not None:
        tenure.close()
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


def _validate(network: NetworkBackend, writer: Writer, store: LeaseStore) -> None:
    """Log what is wrong with the fabric; leases become ready when it is repaired."""
    try:
        network.validate(writer.submit(store.keys.snapshot).result())
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
    loglines.to_stderr("%(levelname)s %(message)s")
    faulthandler.enable(2)  # the log of a crash in C has the lines of Python that led to it
    record.prepare()
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
