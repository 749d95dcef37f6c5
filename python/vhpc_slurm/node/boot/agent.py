# SPDX-License-Identifier: Apache-2.0
"""Reaching the agent of a guest that boots, and setting the guest up through it."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import GuestPlan
from vhpc_slurm.node.boot import diagnose
from vhpc_slurm.node.boot.helpers import Helpers
from vhpc_slurm.node.boot.state import Boot, Started
from vhpc_slurm.node.guest import console, hold, ports
from vhpc_slurm.node.guest.answers import GuestInfo
from vhpc_slurm.node.guest.channel import (
    ROOT_SOCKET,
    ChannelError,
    ChannelRefusedError,
    ChannelSilentError,
    GuestChannel,
)
from vhpc_slurm.node.host import timezone
from vhpc_slurm.node.network.plan import names as segment_names
from vhpc_slurm.node.resource.registry import NETWORKS
from vhpc_slurm.options import parse_mounts

ASK_FIRST_S, ASK_S = 2.0, 10.0
"""Longest wait for a guest before the caller is asked whether to go on: at first, so that those who wait
for the job are told soon, and later."""
CONNECT_S = 0.5
"""To reach a shim, whose sockets listen before it starts."""
log = logging.getLogger("vhpc")


def reach(work: Boot, started: Started) -> Generator[None, None, GuestChannel]:
    """Start the shim and wait for the agent's hello, as long as the guest lives and the deadline allows.

    Yields every ``ASK_S`` seconds of the wait.  Each deadline counts from the
    start of this guest: those of several guests do not add up.

    Raises:
        UserError: the guest does not come up, or the user has stopped a helper.
        NodeError: the shim does not start, or does not serve, although the guest lives.
    """
    guest, helpers = started.guest.plan, started.helpers
    until = started.since + guest.boot_timeout_s
    try:
        helpers.start_shim(_connect(Path(guest.paths.agent_socket)))
        # It listens already. A guest that has ended has taken it along, and nobody listens any more.
        channel = GuestChannel.connect(Path(guest.paths.run_dir) / ROOT_SOCKET, CONNECT_S)
    except NodeError as err:
        # a guest that ends takes its channel, its shim and its share daemons with it: not the node's fault
        if error := helpers.disturbed() or helpers.exhausted():
            raise error from err
        if helpers.left_by_guest() or diagnose.has_ended(work, guest):
            raise diagnose.boot_failure(work, started, late=False) from err
        raise
    try:
        yield from wait_for_hello(helpers, channel, until)
    except ChannelError as err:
        raise diagnose.boot_failure(work, started, late=time.monotonic() >= until - 1.0) from err
    return channel


def wait_for_hello(helpers: Helpers, channel: GuestChannel, until: float) -> Generator[None, None, None]:
    """Wait for the agent's hello; yields after ``ASK_FIRST_S`` and then every ``ASK_S`` seconds.

    Raises:
        UserError: the user has stopped a helper.
        ChannelError: the guest has ended, or stays silent until the deadline.
    """
    wait_s = ASK_FIRST_S
    while True:
        try:
            channel.hello(max(1.0, min(wait_s, until - time.monotonic())))
            return
        except ChannelSilentError:
            if time.monotonic() >= until - 1.0:
                raise
        if error := helpers.disturbed(ending_s=0.0):  # no failure: the guest may answer in this moment
            raise error
        yield
        wait_s = ASK_S


def set_up(work: Boot, started: Started, channel: GuestChannel) -> tuple[str, ...]:
    """Give the guest its identity, its shares, its networks and NCCL's topology, and declare it ready.

    Returns lines for the job's report.

    Raises:
        UserError: the image's agent does not do it, or the guest's InfiniBand is not isolated.
    """
    guest, config = started.guest.plan, work.layout.config
    timeout_s = float(config.guests.stage_timeout_s)
    try:
        if work.lease.resume is not None:
            hold.resume(channel, time.time_ns())  # it has all the rest
            return ()
        if guest.disk_mount:
            _mount_disk(work, guest.disk_mount, channel, timeout_s)
        channel.identity(
            guest.hostname,
            work.account,
            hosts=hosts(
                guest.hostname,
                (*(work.lease.network.addresses if guest.port_guids else ()), *segment_names(work.lease)),
            ),
            timezone=timezone.of_host(),
            commands=config.host.commands,
            timeout_s=timeout_s,
        )
        for share in started.guest.shares:
            channel.mount(share.tag, share.path, read_only=share.read_only, timeout_s=timeout_s)
        for mount in parse_mounts(work.lease.request.mounts or ""):
            with _required(work, f"--vhpc-mount={mount}"):
                channel.bind(mount, work.account, timeout_s)
        asked = work.lease.request
        if asked.env or asked.start_dir:
            with _required(work, "--vhpc-env" if asked.env else f"--vhpc-workdir={asked.start_dir}"):
                variables = asked.env.split(",") if asked.env else []
                channel.environment(variables, asked.start_dir or "", timeout_s)
        for network in NETWORKS:
            network.configure(work.lease, started.guest, channel, timeout_s)
        if guest.port_guids:
            wait_s = config.fabric.guest_timeout_s
            ports.find(
                work.lease, guest.hostname, guest.port_guids, channel, wait_s=wait_s, timeout_s=timeout_s
            )
        _send_topology(guest, channel, timeout_s)
        return _notes(started, channel.ready(timeout_s=timeout_s))
    except ChannelError as err:
        helpers = started.helpers
        if error := helpers.disturbed() or helpers.exhausted():
            raise error from err
        raise UserError(
            f"image {work.image.ref} could not be set up on {work.plan.node}",
            str(err),
            console.last_words(Path(guest.paths.console_log)),
        ) from err


def _notes(started: Started, info: GuestInfo) -> tuple[str, ...]:
    """Lines about what the guest's kernel or agent does not do."""
    if info.locks or not started.guest.has_locks:
        return ()
    line = "locks on files of shared folders hold within each guest only: its kernel or agent is too old"
    return (f"{line} (kernel {info.kernel}, vhpc-agent {info.agent_version}; Linux 5.5 is needed)",)


def _mount_disk(work: Boot, path: str, channel: GuestChannel, timeout_s: float) -> None:
    """Mount the guest's disk, before anything is made in the directory or below it.

    Raises:
        UserError: the image's agent is too old for it.
        ChannelError: the guest does not do it.
    """
    try:
        channel.disk(path, work.account.uid, work.account.gid, timeout_s)
    except ChannelRefusedError as err:
        if err.errno != errno.ENOSYS:
            raise
        raise UserError(
            f"image {work.image.ref} cannot mount a disk at {path}",
            "its agent is older than --vhpc-disk=SIZE:/MOUNT/POINT",
            "build or import the image again, or use --vhpc-disk=SIZE",
        ) from err


@contextmanager
def _required(work: Boot, option: str) -> Generator[None, None, None]:
    """What an option asks of the guest.

    Raises:
        UserError: the guest has refused it.
    """
    try:
        yield
    except ChannelRefusedError as err:
        failed = f"{option} is not possible on {work.plan.node}"
        if err.errno != errno.ENOSYS:
            raise UserError(failed, err.why) from err
        raise UserError(
            failed,
            f"the agent of image {work.image.ref} is older than this option",
            "build or import the image again",
        ) from err


def _send_topology(guest: GuestPlan, channel: GuestChannel, timeout_s: float) -> None:
    """Send the guest the file for NCCL, if its plan has one."""
    if not guest.nccl_topology:
        return
    try:
        channel.topology(guest.nccl_topology, timeout_s)
    except ChannelRefusedError as err:
        # NCCL may be slower without it, nothing worse: an older agent, or a guest without room
        log.warning("%s gets no topology for NCCL: %s", guest.hostname, err.why)


def hosts(hostname: str, addresses: tuple[tuple[str, str], ...]) -> list[str]:
    """Lines of the guest's /etc/hosts; a guest without an address resolves its own name to 127.0.1.1.

    A name has several addresses where the job has a segment; programs try them in this order.
    """
    lines = [f"{address} {name}" for name, address in addresses]
    return lines if hostname in dict(addresses) else [f"127.0.1.1 {hostname}", *lines]


def _connect(path: Path) -> socket.socket:
    """Connect to the socket that libvirt made for the agent's port."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect(str(path))
    except OSError as err:
        sock.close()
        raise NodeError(f"cannot reach the guest's channel {path}", str(err), "see QEMU's log") from err
    return sock
