# SPDX-License-Identifier: Apache-2.0
"""A report in rows of text, for the terminal and for HTML.  Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vhpc_slurm.cli import output
from vhpc_slurm.cli.jobs import bootline, reportdata
from vhpc_slurm.cli.jobs.reportdata import JobReport
from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.model import WITHOUT_OPTIONS, JobRequest
from vhpc_slurm.options import BY_FIELD, GUESTS_PER_NODE, OPTIONS
from vhpc_slurm.terminal import short_digests

GUEST_HEAD = ("node", "guest", "CPUs of the host", "memory MiB", "NUMA cells", "devices", "ready after s")
"""Of the rows of ``guest_rows`` in a page."""


def facts(found: JobReport) -> list[tuple[str, str]]:
    """Names and values of what all nodes have in common."""
    lease, request = found.record.lease, found.record.lease.request
    network = reportdata.document(found)["network"]
    named = [
        ("job", f"{lease.generation.job_id} {request.job_name}".strip()),
        ("generation", str(lease.generation)),
        ("user", request.user + (f", account {request.account}" if request.account else "")),
        ("partition", request.partition + (f", QOS {request.qos}" if request.qos else "")),
        # the next line has the whole digest
        ("image", short_digests(str(request.image)) if lease.image else str(request.image)),
        ("digest", lease.image.digest if lease.image else "none: the job was refused"),
        ("state", _state(found)),
        ("began", output.date(found.record.created)),
        ("last change", output.date(found.record.updated)),
        ("nodes", output.node_list(lease.allocation.node_names)),
        ("guests", f"{request.guests_per_node} on each node"),
    ]
    named += _asked(request)
    for option, rule in request.defaults:
        more = [str(value) for field in BY_FIELD[option].fields[1:] if (value := getattr(request, field))]
        place = f" at {more[0]}" if more else ""
        named.append(("set by policy", f"{option} = {getattr(request, option)}{place}, by rule {rule!r}"))
    if network["partition_key"] is not None:
        named.append(("partition key", network["partition_key"]))
    if network["vlan"] is not None:
        named.append(("VLAN", str(network["vlan"])))
    if network["vni"] is not None:
        encrypted = ", encrypted" if network["encrypted"] else ""
        named.append(
            ("job network", f"VNI {network['vni']}, {network['ipv4']}, {network['ipv6']}{encrypted}")
        )
    ways = [name for name in ("nat", "site") if network[name]]
    if ways:
        named.append(("other networks", ", ".join(ways)))
    return named


def _asked(request: JobRequest) -> Iterator[tuple[str, str]]:
    """Options that the user has given; the number of guests has a row above."""
    for option in OPTIONS:
        values = {field: getattr(request, field) for field in option.fields}
        if (
            option.reported
            and option is not GUESTS_PER_NODE
            and option.field not in dict(request.defaults)
            and values[option.field] != WITHOUT_OPTIONS[option.field]
        ):
            yield f"--vhpc-{option.name}", option.text(values)
    if request.from_file:
        yield "set by its file", ", ".join(request.from_file)


def _state(found: JobReport) -> str:
    lease = found.record.lease
    far = bootline.line(lease.request.guests_per_node, found.progress)
    return bootline.state(lease, found.progress) + (f": {far}" if far else "")


def guest_rows(found: JobReport) -> list[tuple[str, ...]]:
    """A row for each guest that a node has reported, and one for each other node."""
    rows: list[tuple[str, ...]] = []
    for part in found.record.lease.allocation.nodes:
        line, report = found.timelines.get(part.node), found.reports.get(part.node)
        seconds = line.ready_s if line is not None else None
        ready = "-" if seconds is None else f"{seconds:.3f}"
        if report is None or not report.guests:
            rows.append((part.node, "-", "-", "-", "-", "-", ready))
            continue
        for guest in report.guests:
            rows.append(
                (
                    part.node,
                    str(guest.index),
                    format_cpu_list(sorted(guest.cpus)),
                    str(sum(mib for _, mib in guest.cells)),
                    ",".join(sorted({str(cell) for cell, _ in guest.cells})),
                    " ".join(f"{role} {address}" for address, role in guest.devices) or "-",
                    ready,
                )
            )
    return rows
