# SPDX-License-Identifier: Apache-2.0
"""vhpc doctor: run all checks, and give a hint for each warning and error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.host.checks import (
    CheckResult,
    Level,
    boottime,
    checkpoint,
    error,
    fabric,
    hookd,
    images,
    leasedatabase,
    ok,
    plugstack,
    policy,
    services,
    slurm,
    slurmaccess,
)
from vhpc_slurm.cli.options import Json, ThisNode
from vhpc_slurm.config import Config
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.slurm import commands, named_conf
from vhpc_slurm.slurm.port import NodeResources
from vhpc_slurm.terminal import printable

SLURM_TIMEOUT_S = 15.0
STYLE = {Level.OK: "green", Level.WARN: "yellow", Level.ERROR: "bold red"}


def doctor(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show only warnings and errors.")] = False,
    node: ThisNode = None,
    as_json: Json = False,
) -> int:
    """Check this host and Slurm's settings; each finding comes with a hint.

    Run it as root on the controller, on a login node and on every compute node.
    The exit status is 1 when a finding is an error.
    """
    found = list(findings(options.config(), context.node_name(node)))
    shown = [finding for finding in found if not (quiet and finding.level is Level.OK)]
    if as_json:
        output.write_json([_fields(finding) for finding in shown])
    else:
        _show(shown, found)
    return 1 if any(finding.level is Level.ERROR for finding in found) else 0


def _fields(finding: CheckResult) -> dict[str, str]:
    return {
        "check": finding.check,
        "level": finding.level.value,
        "what": finding.what,
        "hint": finding.hint,
    }


def findings(config: Config, node: str) -> Iterator[CheckResult]:
    """All results that apply to this host, in the order in which to repair them."""
    root = context.is_root()
    yield services.munge(config)
    port = commands(config, SLURM_TIMEOUT_S)
    is_node, is_controller, own = _slurmd_runs(), False, NodeResources(node)
    try:
        settings, nodes, partitions = port.settings(), port.node_resources(), port.partitions()
    except VhpcError as err:
        hint = "start slurmctld, or correct slurm_bin and slurm_conf under [controller] of vhpc.toml"
        yield error("slurm", f"Slurm's settings were not checked: {err.line()}", hint)
    else:
        is_controller = node in settings.control_hosts
        known = {one.name: one for one in nodes}
        if node in known:
            is_node, own = True, known[node]
        elif is_node:
            yield error(
                "host.name",
                f"slurmd runs here, but Slurm has no node {node}",
                "vhpc uses the host name as NodeName: make them equal, or give --node",
            )
        sizes = [boottime.NodeSize.of(one, config) for one in nodes]
        yield from slurm.check(settings, config, sizes or [boottime.NodeSize()])
        yield from slurm.partitions(partitions)
        submits = is_node or not is_controller
        yield plugstack.check(settings, config, named_conf(config), submits=submits, is_node=is_node)
        if is_node and root:
            yield boottime.message_timeout(
                settings.seconds("MessageTimeout") or 10, boottime.longest_boot_s(Layout(config))
            )
        yield from services.sbcast(config) if submits else ()
        if is_controller:
            yield slurm.operator(port, settings, config)
            yield from slurmaccess.check(config)
            yield from policy.check(config, settings, partitions)
            yield from checkpoint.check(config, settings, partitions)
    listener = root or context.user_name() == config.controller.slurm_user
    yield from services.vhpcd(
        config, listener=listener, node=node if is_node else "", controller=is_controller
    )
    if is_controller:
        yield from slurm.executable_hooks(config, ("prolog-slurmctld", "epilog-slurmctld"))
        yield from hookd.check(config, listener=listener)
        yield from leasedatabase.check(config, root=root)
        yield from services.ssh_keygen(config)
        yield from services.tunnel_keys(config)
    if is_controller or fabric.applies(config):
        yield from fabric.check(config, root=root)
    if is_controller or is_node:
        yield images.catalogue(config)
    if is_controller:
        yield from images.import_kernel(config)
    if not (is_controller or is_node):
        yield from images.import_tools(config)
    if is_node:
        yield from _node(config, node, own, root=root)
    roles = [name for name, it_is in (("controller", is_controller), ("compute node", is_node)) if it_is]
    yield ok("host", f"{node} was checked as {' and '.join(roles) or 'login node'}")


def _node(config: Config, node: str, own: NodeResources, *, root: bool) -> Iterator[CheckResult]:
    from vhpc_slurm.cli.host import qemu
    from vhpc_slurm.cli.host.checks import (
        devices,
        folders,
        imagestore,
        libvirtsockets,
        peers,
        policy,
        snapshots,
        underlay,
    )
    from vhpc_slurm.cli.host.checks import node as checks
    from vhpc_slurm.node.resource import registry

    yield from slurm.executable_hooks(config, ("prolog", "epilog", "healthcheck"))
    yield from folders.check(config)
    yield from libvirtsockets.check()
    yield from checks.check(config, node, root=root)
    yield from registry.check(config, node, root=root)
    yield imagestore.check(config)
    yield from snapshots.check(config)
    yield from underlay.check(config, node)
    yield from peers.check(config, node, root=root)
    if root:
        yield from policy.on_node(config)
        yield from checkpoint.on_node(config, own)
    yield from devices.check(config, node, own, root=root, qemu=qemu.version(config))


def _slurmd_runs() -> bool:
    """Whether a slurmd runs on this host."""
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text(encoding="utf-8", errors="replace") == "slurmd\n":
                return True
        except OSError:
            continue  # the process has ended
    return False


def _show(shown: list[CheckResult], found: list[CheckResult]) -> None:
    from rich.text import Text

    rows = []
    for finding in shown:
        text = printable(finding.what)
        if finding.hint:
            text += f"\n-> {printable(finding.hint)}"
        rows.append((Text(finding.level.value, style=STYLE[finding.level]), finding.check, Text(text)))
    output.write_table(("LEVEL", "CHECK", "FINDING"), rows)
    count = {level: sum(finding.level is level for finding in found) for level in Level}
    print(f"{count[Level.ERROR]} errors, {count[Level.WARN]} warnings, {count[Level.OK]} ok")
