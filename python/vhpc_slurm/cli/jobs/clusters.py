# SPDX-License-Identifier: Apache-2.0
"""vhpc cluster: list and show clusters of jobs; keep one without jobs, and remove it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vhpc_slurm.cli import context, leases, options, output
from vhpc_slurm.cli.options import Json
from vhpc_slurm.cli.verbs import Group, Verb
from vhpc_slurm.errors import UserError
from vhpc_slurm.node.network.cluster import living

if TYPE_CHECKING:
    from vhpc_slurm.model import Cluster, ClusterJob, ClusterMember

TIME = re.compile(r"([1-9][0-9]{0,4})([mhd])", re.ASCII)
SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
SEE = "see: vhpc cluster ls"
Name = Annotated[str, typer.Argument(metavar="[ACCOUNT/]NAME", help="Name of a cluster.", show_default=False)]
User = Annotated[
    str | None,
    typer.Option("--user", metavar="USER", help="The cluster's user, for root.", show_default=False),
]

GROUP = Group(
    Verb("ls", "jobs.clusters:ls", "List clusters of yours and of your accounts; operators see all."),
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
    """List clusters of yours and of your accounts; operators see all."""
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
            _user(one, cluster),
            _state(one),
            output.node_list(one.member.segment_nodes),
            *_ranges(one.member),
        )
        for one in jobs
    ]
    output.write_table(("JOB", "USER", "STATE", "NODES", "IPV4", "IPV6"), rows)
    return 0


def create(
    name: Name,
    time: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="TIME",
            help="So long: 30m, 12h or 7d; default: until rm, or as long as the policy permits.",
            show_default=False,
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


def _ranges(member: ClusterMember) -> Iterator[str]:
    """The first and the last IPv4, and IPv6 address of its guests."""
    found = [one.addresses for one in living(member)]
    for addresses in zip(*found, strict=True) if found else ((), ()):
        yield " to ".join(dict.fromkeys((*addresses[:1], *addresses[-1:])))


def _user(job: ClusterJob, cluster: Cluster) -> str:
    return context.user_name(cluster.uid if job.uid is None else job.uid)


def whole_document(cluster: Cluster, jobs: Sequence[ClusterJob]) -> dict[str, Any]:
    """A cluster and its members in JSON."""
    return document(cluster) | {"members": [_member(one, cluster) for one in jobs]}


def _member(job: ClusterJob, cluster: Cluster) -> dict[str, Any]:
    return {
        "job": job.member.generation.job_id,
        "generation": str(job.member.generation),
        "user": _user(job, cluster),
        "state": _state(job),
        "since": job.since,
        "nodes": list(job.member.segment_nodes),
        "guests": [
            {"host": one.name, "ipv4": one.addresses[0], "ipv6": one.addresses[1]}
            for one in living(job.member)
        ],
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
