# SPDX-License-Identifier: Apache-2.0
"""The ready barrier: a job with a network starts when all its guests are ready and reach each other.

Each guest tests the next rank and rank 0, and its node reports the result to vhpcd; before that the site's
check runs in the guests, if there is one, and then jobs without a network have a barrier too.  The Prolog of
the first node, where the batch script runs, ends when all nodes have reported.  Slurm starts the batch script
(PrologFlags=DeferBatch), and the first step of salloc and srun, when all Prologs have ended; so nothing
starts earlier, and the first node's state file has the error of a job that cannot start.

In a heterogeneous job the barrier is over all components on the segment, and the first node is that
of the first of them: Slurm starts the batch script when the nodes of all components are ready
(_het_job_ready in slurmctld/job_scheduler.c).

A job of a cluster joins it when all its nodes have passed. Then the first node waits until the nodes of all
members know the job (their followers tell vhpcd), and its guests test a guest of the oldest and one of the
newest other member.
"""
# Decision: The ready barrier is in the Prologs

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.wire_types import NodeState, ReadyState
from vhpc_slurm.errors import FabricError, NodeError, UserError, VhpcError
from vhpc_slurm.hooks import common
from vhpc_slurm.model import Lease, RunningGuest, RunningNode
from vhpc_slurm.node.guest.channel import ROOT_SOCKET, ChannelError, ChannelRefusedError, GuestChannel
from vhpc_slurm.node.guest.peers import reach
from vhpc_slurm.node.network.cluster import member_peers
from vhpc_slurm.node.network.plan import Peer, reach_targets
from vhpc_slurm.node.store import membership
from vhpc_slurm.node.store.journal import Stopped
from vhpc_slurm.node.store.layout import Layout

REPORT_S = 2.0
"""A node reports that it waits if its guests have received no answer after this time, in seconds."""
ASK_S = 5.0
"""After that it asks vhpcd at this interval whether others are ready or have failed, or the job has ended."""
CONNECT_S = 10.0
PAUSE_S = 1.0
AWARE_S = 0.2
"""The shortest time between two questions whether all nodes of a cluster know the job."""
FOLLOWERS_S = 20.0
"""The nodes of the other members of a cluster have at least so long to take a new one into their networks.

After a restart of vhpcd all have asked again by then: an attempt to connect ends after ``CONNECT_ALONE_S``, a
pause of a follower after ``AWAY_MOST_S``.
"""
REQUEUES = 2
"""How many times a job is requeued because of the network between its nodes; after that it fails."""


class PeerFailedError(UserError):
    """Another node of the job reported an error; that node has written the consoles of its guests."""


def report_failure(
    config: Config, client: ControllerClient, lease: Lease, node: str, error: VhpcError, line: str
) -> None:
    """Tell the other nodes of a job with a barrier why it fails; if vhpcd does not answer, only log this."""
    if not _has_others(config, lease) or isinstance(error, PeerFailedError):
        return
    try:
        client.ready(lease.generation, node, "failed", error=(error.kind, line))
    except FabricError as err:
        common.log.warning("the job's other nodes are not told of the failure: %s", err.line())


def is_wanted(config: Config, lease: Lease) -> bool:
    """Whether a job has a barrier: for its network, or for the check of its guests."""
    return lease.segment is not None or bool(config.guests.check)


def _has_others(config: Config, lease: Lease) -> bool:
    """Whether vhpcd has to know of the barrier: for other nodes of the job, or for other members."""
    return is_wanted(config, lease) and (len(lease.segment_nodes) > 1 or lease.cluster is not None)


def wait(
    layout: Layout,
    client: ControllerClient,
    lease: Lease,
    node: RunningNode,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Wait until the guests of this node reach those that they test; on the first node, for all nodes.

    ``check`` is called before this node reports that it has passed.

    Raises:
        Exception: ``check`` raises it.
        UserError: a guest does not answer its node, or another node reported an error of the user.
        FabricError: a guest is not ready in time, or does not answer another one, or a node of the cluster
            does not take the job into its network.
        Stopped: the job has ended.
    """
    if is_wanted(layout.config, lease):
        _Barrier(layout, client, lease, node).wait(check)


class _Barrier:
    """One Prolog's wait."""

    def __init__(self, layout: Layout, client: ControllerClient, lease: Lease, node: RunningNode) -> None:
        self._layout, self._config = layout, layout.config
        self._client = client
        self._lease = lease
        self._node, self._guests = node.plan.node, node.guests
        self._nodes = lease.segment_nodes
        self._until = time.monotonic() + self._config.network.ready_timeout_s
        self._aware_s = max(FOLLOWERS_S, 2 * self._config.network.reach_timeout_s)
        self._joining = False

    def wait(self, check: Callable[[], None]) -> None:
        for guest in self._guests if self._lease.segment is not None else ():
            if peers := reach_targets(self._lease, self._node, guest.plan.index):
                self._test(guest, peers)
        check()
        if _has_others(self._config, self._lease):
            self._await_others()
        if self._joining:
            for guest in self._guests:
                self._test_members(guest)

    # --- guests ---------------------------------------------------------------

    def _test(self, guest: RunningGuest, peers: Sequence[Peer]) -> None:
        """Repeat a guest's tests until all peers have answered."""
        with self._channel(guest) as channel:
            self._repeat(guest, peers, channel)

    @contextlib.contextmanager
    def _channel(self, guest: RunningGuest) -> Iterator[GuestChannel]:
        try:
            with GuestChannel.connect(Path(guest.plan.paths.run_dir) / ROOT_SOCKET, CONNECT_S) as channel:
                yield channel
        except ChannelRefusedError as err:
            hint = "rebuild the image with this version's agent" if err.errno == errno.ENOSYS else ""
            raise UserError(f"guest {guest.plan.hostname} cannot test its network", err.why, hint) from err
        except (ChannelError, NodeError) as err:  # it was set up a moment ago: the node is well
            what = f"guest {guest.plan.hostname} does not answer its node any more"
            raise UserError(what, err.line()) from err

    def _repeat(self, guest: RunningGuest, peers: Sequence[Peer], channel: GuestChannel) -> None:
        limit_s = float(self._config.guests.stage_timeout_s)
        ready_since: dict[str, float] = {}
        pending, wait_s = tuple(peers), REPORT_S
        while True:
            addresses = [address for peer in pending for address in peer.addresses]
            found = reach(channel, addresses, guest.mtu, wait_s, limit_s)
            pending = tuple(peer for peer in pending if set(peer.addresses) & set(found.unanswered))
            if not pending:
                return
            state = self._tell("waiting", about=[peer.node for peer in pending])
            now = time.monotonic()
            for peer in pending:
                if peer.node == self._node or (state and peer.node in state.reported):
                    ready_since.setdefault(peer.hostname, now)
            for peer in pending:
                if now - ready_since.get(peer.hostname, now) >= self._config.network.reach_timeout_s:
                    raise self._failed(self._unreachable(guest, peer, found.why))
            absent = [peer for peer in pending if peer.hostname not in ready_since]
            if absent and now >= self._until:
                raise self._failed(self._slow([absent[0].node], state is None))
            wait_s = ASK_S

    def _unreachable(self, guest: RunningGuest, peer: Peer, why: str) -> FabricError:
        segment, here, there = self._lease.segment, self._node, peer.node
        assert segment is not None
        hint = f"both guests are on {here}: does the image drop ICMP echo requests?"
        if here != there:
            ends = " and ".join(segment.underlay[self._nodes.index(node)] for node in (here, there))
            hint = f"check UDP port {segment.port} between {ends}, and see docs/network.md"
        return FabricError(
            f"guest {guest.plan.hostname} on {here} does not reach guest {peer.hostname} on {there} "
            f"with packets of {guest.mtu} bytes",
            why,
            hint,
        )

    def _slow(self, nodes: Sequence[str], unknown: bool) -> FabricError:
        waited = f"waited for {self._config.network.ready_timeout_s} s or more on {self._node}"
        if unknown:
            waited += "; vhpcd did not answer"
        return FabricError(
            f"the guests of node{'s' * (len(nodes) > 1)} {', '.join(nodes)} are not ready",
            waited,
            "see hooks.log of that node, and network.ready_timeout_s in vhpc.toml(5)",
        )

    # --- other members of the cluster -------------------------------------------

    def _test_members(self, guest: RunningGuest) -> None:
        """Repeat a guest's tests until the other members have answered, except those that have gone."""
        until = time.monotonic() + self._config.network.reach_timeout_s
        limit_s = float(self._config.guests.stage_timeout_s)
        answered: set[str] = set()
        while pending := [peer for peer in self._other_members() if peer.hostname not in answered]:
            addresses = [address for peer in pending for address in peer.addresses]
            with self._channel(guest) as channel:
                found = reach(channel, addresses, guest.mtu, REPORT_S, limit_s)
            lost = [peer for peer in pending if set(peer.addresses) & set(found.unanswered)]
            answered |= {peer.hostname for peer in pending if peer not in lost}
            if lost:
                self._tell("passed")
                if time.monotonic() >= until and lost[0] in self._other_members():
                    raise self._failed(self._member_unreachable(guest, lost[0], found.why))

    def _other_members(self) -> list[Peer]:
        """A guest of the oldest and one of the newest other member, as far as this node's network has any."""
        known = membership.read(self._layout, self._lease.generation.job_id)
        peers = [] if known is None else member_peers(known.others)
        return list(dict.fromkeys((*peers[:1], *peers[-1:])))

    def _member_unreachable(self, guest: RunningGuest, peer: Peer, why: str) -> FabricError:
        segment = self._lease.segment
        assert segment is not None
        return FabricError(
            f"guest {guest.plan.hostname} on {self._node} does not reach guest {peer.hostname} of its "
            f"cluster on {peer.node} with packets of {guest.mtu} bytes",
            why,
            f"check UDP port {segment.port} between the nodes; does its image drop ICMP echo requests?",
        )

    def _unaware(self, state: ReadyState) -> FabricError:
        assert self._lease.cluster is not None
        return FabricError(
            f"a node of cluster {self._lease.cluster.name} has not taken the job into its network: "
            f"{', '.join(state.first_unaware) or 'unknown'}",
            f"waited for {self._aware_s:g} s on {self._node}",
            "see hooks.log of that node (follower), and run there: vhpc reconcile",
        )

    # --- nodes ----------------------------------------------------------------

    def _await_others(self) -> None:
        """Report that this node has passed; the first node waits for all, and for their cluster."""
        first = self._node == self._nodes[0]
        spare_s = 2 * self._config.network.reach_timeout_s
        until = max(self._until + self._config.guests.check_s, time.monotonic()) + spare_s
        while True:
            asked = time.monotonic()
            state = self._tell("passed", wait_s=ASK_S if first else 0.0)
            if state is not None and (not first or state.missing == 0):
                if not first or self._lease.cluster is None or state.failure is not None:
                    return
                if not self._joining:
                    self._joining, until = True, time.monotonic() + self._aware_s
                if state.unaware == 0:
                    return
                if time.monotonic() >= until:
                    raise self._failed(self._unaware(state))
                time.sleep(max(0.0, asked + AWARE_S - time.monotonic()))
                continue
            if time.monotonic() >= until:
                missing = state.first_missing if state is not None else ("of the job",)
                raise self._failed(self._slow(missing, state is None))
            if state is None or state.failure is not None:
                time.sleep(PAUSE_S)

    def _tell(self, what: NodeState, *, about: Sequence[str] = (), wait_s: float = 0.0) -> ReadyState | None:
        """Report to vhpcd, and act on what other nodes have reported.

        Returns None if vhpcd does not answer.  After a failure of the network that another node
        reported, this node only waits: that node ends the job.

        Raises:
            Stopped: the job has ended.
            PeerFailedError: another node reported an error that fails the job.
        """
        if not _has_others(self._config, self._lease):
            return None
        others = [node for node in dict.fromkeys(about) if node != self._node]
        try:
            state = self._client.ready(self._lease.generation, self._node, what, about=others, wait_s=wait_s)
        except FabricError as err:
            common.log.warning("ready barrier: %s", err.line())
            return None
        if state.over:
            raise Stopped(f"generation {self._lease.generation} was ended")
        failure = state.failure
        if failure is not None and failure.kind == UserError.kind and failure.node != self._node:
            raise PeerFailedError(f"node {failure.node}", failure.line)
        return state

    def _failed(self, error: FabricError) -> VhpcError:
        """Report an error of the network; a UserError if the job has been requeued often enough."""
        if len(self._nodes) == 1 and not self._joining:
            return UserError(error.what, error.why, error.hint)
        try:
            state = self._client.ready(
                self._lease.generation, self._node, "failed", error=(error.kind, error.line())
            )
        except FabricError as err:
            common.log.warning("ready barrier: %s", err.line())
            return error
        if state.failed_starts <= REQUEUES:
            return error
        hint = "; ".join(filter(None, (error.hint, f"the job was requeued {REQUEUES} times before")))
        return UserError(error.what, error.why, hint)
