# SPDX-License-Identifier: Apache-2.0
"""vhpc cluster: list and show clusters of jobs; keep one without jobs, and remove it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vhpc_slurm.cli import context, leases, options, output
from vhpc_slurm.cli.options import Json
from vhpc_slurm.cli.verbs import Group, Verb
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import guest_hostname

if TYPE_CHECKING:
    from vhpc_slurm.model import Cluster, ClusterJob, ClusterMember

TIME = re.compile(r"([1-9][0-9]{0,4})([mhd])", re.ASCII)
SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
SEE = "see: vhpc cluster ls"
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of one of your clusters.", show_default=False)
]
User = Annotated[
    str | None,
    typer.Option("--user", metavar="USER", help="The cluster's user, for root.", show_default=False),
]

GROUP = Group(
    Verb("ls", "jobs.clusters:ls", "List your clusters; operators of Slurm see those of all users."),
    Verb("show", "jobs.clusters:show", "Show the jobs of a cluster, with the addresses of their guests."),
    Verb("login", "jobs.clusterlogin:login", "Open a shell, or run a command, in a new guest of a cluster."),
    Verb("create", "jobs.clusters:create", "Keep the name of a cluster, also while it has no jobs."),
    Verb("rm", "jobs.clusters:remove", "Remove a cluster that has no jobs."),
)


def ls(
    everything: Annotated[
        bool, typer.Option("--all", help="Also those that are kept and have no jobs.")
    ] = False,
    as_json: Json = False,
) -> int:
    """List your clusters; operators of Slurm see those of all users."""
    known = leases.client(options.config()).clusters()
    found = [one for one in known if everything or one.jobs]
    if as_json:
        output.write_json([document(one) for one in found])
        return 0
    rows = [
        (
            one.name,
            context.user_name(one.uid),
            str(one.jobs),
            str(one.guests),
            output.date(one.created),
            _kept(one),
        )
        for one in found
    ]
    head = ("NAME", "USER", "JOBS", "GUESTS", "CREATED", "KEPT")
    output.write_table(head, rows, right=("JOBS", "GUESTS"))
    return 0


def show(name: Name, user: User = None, as_json: Json = False) -> int:
    """Show the jobs of a cluster, with the addresses of their guests."""
    client = leases.client(options.config())
    cluster = named(client.clusters(), name, user)
    jobs = client.cluster_jobs(cluster.serial)
    if as_json:
        output.write_json(whole_document(cluster, jobs))
        return 0
    facts = [
        ("Cluster", f"{cluster.name} (number {cluster.serial})"),
        ("User", context.user_name(cluster.uid)),
        ("Created", output.date(cluster.created)),
    ]
    if cluster.kept:
        facts.append(("Kept", _kept(cluster)))
    output.write_facts(facts)
    rows = [
        (
            str(one.member.generation.job_id),
            _state(one),
            output.node_list(one.member.segment_nodes),
            _range([ipv4 for _, ipv4, _ in _guests(one.member)]),
            _range([ipv6 for _, _, ipv6 in _guests(one.member)]),
        )
        for one in jobs
    ]
    output.write_table(("JOB", "STATE", "NODES", "IPV4", "IPV6"), rows)
    return 0


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the cluster.", show_default=False)],
    time: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="TIME", help="So long: 30m, 12h or 7d; default: until rm.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Keep the name of a cluster, also while it has no jobs.

    A cluster of this name that exists is kept from now on.
    """
    for_s = None if time is None else _seconds_of(time)
    made = leases.client(options.config()).keep_cluster(name, for_s)
    if as_json:
        output.write_json(document(made))
    return 0


def remove(name: Name, user: User = None, as_json: Json = False) -> int:
    """Remove a cluster that has no jobs."""
    client = leases.client(options.config())
    removed = client.remove_cluster(named(client.clusters(), name, user).serial)
    if as_json:
        output.write_json(document(removed))
    return 0


def _seconds_of(time: str) -> float:
    found = TIME.fullmatch(time)
    if found is None:
        raise UserError(
            f"{time[:80]!r} is not a time", "minutes (30m), hours (12h) or days (7d) are expected"
        )
    return int(found[1]) * SECONDS[found[2]]


def named(known: tuple[Cluster, ...], name: str, user: str | None) -> Cluster:
    """The cluster of a name; UserError if there is none, or several users have one."""
    found = [one for one in known if one.name == name and user in (None, context.user_name(one.uid))]
    if not found:
        raise UserError(f"there is no cluster {name[:80]!r}", "", SEE + " --all")
    if len(found) > 1:
        users = ", ".join(context.user_name(one.uid) for one in found)
        raise UserError(f"{len(found)} users have a cluster {name!r}", users, "name one of them: --user USER")
    return found[0]


def _kept(cluster: Cluster) -> str:
    if not cluster.kept:
        return ""
    return "until rm" if cluster.until is None else f"until {output.date(cluster.until)}"


def _state(job: ClusterJob) -> str:
    return "joined" if job.joined else "booting"


def _guests(member: ClusterMember) -> Iterator[tuple[str, str, str]]:
    """Name, IPv4 and IPv6 address of each guest that is there."""
    segment, rank = member.segment, 0
    ipv4, ipv6 = IPv4Network(segment.ipv4), IPv6Network(segment.ipv6)
    for part in member.parts:
        for node in part.nodes:
            for index in range(part.guests_per_node):
                number = segment.first + rank + 1
                if rank not in member.gone:
                    name = guest_hostname(node, index, part.guests_per_node)
                    yield f"{name}-j{member.generation.job_id}", str(ipv4[number]), str(ipv6[number])
                rank += 1


def _range(addresses: list[str]) -> str:
    return " to ".join(dict.fromkeys((*addresses[:1], *addresses[-1:])))


def whole_document(cluster: Cluster, jobs: Sequence[ClusterJob]) -> dict[str, Any]:
    """A cluster and its members in JSON."""
    return document(cluster) | {"members": [_member(one) for one in jobs]}


def _member(job: ClusterJob) -> dict[str, Any]:
    return {
        "job": job.member.generation.job_id,
        "generation": str(job.member.generation),
        "user": context.user_name(job.uid),
        "state": _state(job),
        "since": job.since,
        "nodes": list(job.member.segment_nodes),
        "guests": [{"host": host, "ipv4": ipv4, "ipv6": ipv6} for host, ipv4, ipv6 in _guests(job.member)],
    }


def document(cluster: Cluster) -> dict[str, Any]:
    """A cluster in JSON."""
    return {
        "name": cluster.name,
        "serial": cluster.serial,
        "user": context.user_name(cluster.uid),
        "created": cluster.created,
        "kept": cluster.kept,
        "until": cluster.until,
        "jobs": cluster.jobs,
        "guests": cluster.guests,
    }
