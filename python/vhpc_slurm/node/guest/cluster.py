# SPDX-License-Identifier: Apache-2.0
"""The request that tells a guest who is in its cluster."""

from __future__ import annotations

from collections.abc import Sequence

from vhpc_slurm.node.guest.channel import GuestChannel
from vhpc_slurm.node.guest.wire import Op, Tag, put
from vhpc_slurm.record import Record

GUESTS_MAX = 16384
"""Guests of one request, and keys of each kind; also in guest/agent/cluster.h."""


class ClusterGuest(Record, frozen=True):
    """A guest as the others of its cluster know it.

    Attributes:
        hostname: its name in the cluster, such as n1-j1234.
        job_id: of its job.
        ipv4: its address, without a prefix.
        ipv6: its address, without a prefix.
        slots: number of its CPUs.
    """

    hostname: str
    job_id: int
    ipv4: str
    ipv6: str
    slots: int


def tell(
    channel: GuestChannel,
    name: str,
    own_job: int,
    guests: Sequence[ClusterGuest],
    host_publics: Sequence[str],
    user_publics: Sequence[str],
    uid: int,
    timeout_s: float,
) -> None:
    """Have a guest know these guests of its cluster, and no others.

    Args:
        channel: to the guest.
        name: of the cluster.
        own_job: the guest's job.
        guests: all of the cluster, including those of its own job; at most GUESTS_MAX.
        host_publics: public keys of the guests' ssh servers.
        user_publics: public keys that may log in as this user.
        uid: of the job's user.
        timeout_s: deadline.

    Raises:
        ChannelRefusedError: ENOSYS: the image's agent does not know the operation; else a value that it
            does not accept, in which case nothing has changed, or a file that it cannot write.
        ChannelError: silence, or the channel was closed.
    """
    body = [put(Tag.CLUSTER, name), put(Tag.JOB, own_job), put(Tag.USER_UID, uid)]
    body += [put(Tag.GUEST, _guest(one)) for one in guests]
    body += [put(Tag.MEMBER_HOST_KEY, key) for key in host_publics]
    body += [put(Tag.MEMBER_USER_KEY, key) for key in user_publics]
    channel.ask(Op.CLUSTER, b"".join(body), timeout_s)


def _guest(one: ClusterGuest) -> bytes:
    fields = put(Tag.HOSTNAME, one.hostname) + put(Tag.JOB, one.job_id)
    fields += put(Tag.IPV4, one.ipv4) + put(Tag.IPV6, one.ipv6)
    return fields + put(Tag.CPUS, one.slots)
