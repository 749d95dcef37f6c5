# SPDX-License-Identifier: Apache-2.0
"""vhpc image stage, and vhpc image warm: an image is in the stores of nodes before a job needs it."""
# Decision: An image is warmed by a job of root on each node

from __future__ import annotations

import platform
import time
from collections.abc import Generator, Sequence
from typing import Annotated, Any

import msgspec
import typer

from vhpc_slurm import slurm
from vhpc_slurm.catalog import blobs, site_catalog
from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.images import peers as imagepeers
from vhpc_slurm.cli.images import relay
from vhpc_slurm.cli.options import Json
from vhpc_slurm.cli.progress import progress
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import ImageIdentity, ImageRef
from vhpc_slurm.node.store import images
from vhpc_slurm.node.store.copying import CATALOGUE, KEPT
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.peers.client import Lineage
from vhpc_slurm.slurm.noderuns import Ended, NodeRuns, Place
from vhpc_slurm.terminal import one_line
from vhpc_slurm.undecodable import UNDECODABLE

COMMAND = ("vhpc", "image", "stage")
MEMORY_MIB = 256
"""Of the command. The size of the image is added: a store on a tmpfs is memory of the job."""
NO_NODES = (CATALOGUE, KEPT)
"""Sources of bytes that are not nodes."""
SERVING_MIB = 128
"""Of the process that serves the image to other nodes."""


class Staged(msgspec.Struct, frozen=True):
    """The output of ``vhpc image stage --json``; ``sources`` has bytes by their source."""

    image: str
    digest: str
    copied: int
    seconds: float
    sources: dict[str, int] = {}


class OnNode(msgspec.Struct, frozen=True):
    """The result of staging an image on one node; ``problem`` is empty if the node has it."""

    node: str
    copied: int = 0
    seconds: float = 0.0
    problem: str = ""
    sources: dict[str, int] = {}


SiteImage = Annotated[str, typer.Argument(metavar="NAME[:TAG][@DIGEST]", show_default=False)]


def stage(
    name: SiteImage,
    peers: Annotated[
        bool, typer.Option("--peers", help="For vhpc image warm, which directs it over standard input.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Copy an image of the site into the store of this node, as Prolog does when a job starts (root)."""
    config = options.config()
    context.need_root("image stage")
    image, layout = _image(config, name, "stage", platform.machine()), Layout(config)
    if peers:
        with imagepeers.joined(layout, image) as lineage:
            imagepeers.say(_staged(layout, image, lineage))
        return 0
    found = _staged(layout, image, None)
    if as_json:
        output.write_json(found)
    else:
        done = f"{output.size(found.copied)} copied in {found.seconds:.1f} s"
        print(f"{_label(image)} {done if found.copied else 'is in the store already'}")
    return 0


def _staged(layout: Layout, image: ImageIdentity, lineage: Lineage | None) -> Staged:
    """Copy an image; what it has cost."""
    began = time.monotonic()
    copying = images.stage(layout, image, lineage=lineage)
    while True:
        try:
            next(copying)
        except StopIteration as end:
            staged: images.StagedImage = end.value
            break
    # no job has pinned it, so a job of another image may take its room
    if not images.is_stored(layout, image):
        raise FabricError(
            f"the image store of this node has no room for image {image.ref}",
            "jobs with other images needed the space meanwhile",
            f"free space under {layout.config.images.store}",
        )
    seconds = round(time.monotonic() - began, 3)
    return Staged(str(image.ref), image.digest, staged.copied, seconds, dict(staged.sources))


def warm(
    name: SiteImage,
    nodes: Annotated[
        str,
        typer.Option("--nodes", "-w", metavar="NODES", help="Such as n[1-16],n20.", show_default=False),
    ],
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="N", min=1, max=1024, help="On how many nodes at once.")
    ] = 16,
    as_json: Json = False,
) -> int:
    """Copy an image of the site into the stores of nodes before jobs need it (root).

    Runs vhpc image stage on each node by srun. With images.peer_port nodes pass the image on to each
    other. The exit status is 1 if it failed on a node.
    """
    config = options.config()
    context.need_root("image warm")
    image, runs = _image(config, name, "warm"), slurm.node_runs(config)
    places = runs.places(nodes)
    found = [_unusable(place) for place in places if not place.is_usable]
    for one in found:
        _report(one, found, len(places))
    usable = [place for place in places if place.is_usable]
    ends = _copies(config, image, runs, usable, nodes, parallel)
    try:
        for end in ends:
            found.append(_outcome(end, image.digest))
            _report(found[-1], found, len(places))
    finally:
        ends.close()  # ends what runs, also after Ctrl-C
    _print(image, found, [place.node for place in places], as_json=as_json)
    return int(any(one.problem for one in found))


def _copies(
    config: Config, image: ImageIdentity, runs: NodeRuns, places: Sequence[Place], nodes: str, parallel: int
) -> Generator[Ended, None, None]:
    """The ends of the copies on nodes, as they come."""
    command = [*COMMAND, f"{image.ref.label}@{image.digest}", "--json"]
    memory_mib = MEMORY_MIB + (sum(blob.size for blob in blobs(image.manifest)) >> 20)
    timeout_s = config.guests.stage_timeout_s
    if not config.images.peer_port or len(places) < 2 or len(nodes) > relay.NODES_MAX:
        return runs.run(places, command, parallel=parallel, timeout_s=timeout_s, memory_mib=memory_mib)
    return relay.copy(
        runs,
        places,
        command,
        nodes,
        parallel=parallel,
        timeout_s=timeout_s,
        memory_mib=memory_mib + SERVING_MIB,
    )


def _image(config: Config, name: str, verb: str, arch: str = "") -> ImageIdentity:
    ref = ImageRef.parse(name)
    if ref.own:
        raise UserError(
            f"vhpc image {verb} copies images of the site only",
            f"{ref.label} is an image of a user, copied with the user's rights when a job starts",
        )
    return site_catalog(config.images).resolve(ref, arch, config.guests.emulated)


def _label(image: ImageIdentity) -> str:
    return f"{image.ref.label} {image.digest}"


def _unusable(place: Place) -> OnNode:
    state = one_line(place.state.rstrip("*"))
    return OnNode(place.node, problem=f"it is {state}, no job starts there (run vhpc image stage on it)")


def _outcome(end: Ended, digest: str) -> OnNode:
    if end.problem:
        return OnNode(end.node, problem=end.problem.removeprefix("vhpc: "))
    try:
        staged = msgspec.json.decode(end.output, type=Staged)
    except UNDECODABLE:
        staged = None
    if staged is None or staged.digest != digest:
        return OnNode(
            end.node, problem=f"its vhpc printed {one_line(end.output[:80].decode(errors='replace'))!r}"
        )
    return OnNode(end.node, staged.copied, staged.seconds, sources=staged.sources)


def _report(one: OnNode, found: Sequence[OnNode], count: int) -> None:
    if one.problem:
        progress(f"{one.node}: {one.problem}")
    progress(f"{len(found)} of {count} nodes done")


def _print(image: ImageIdentity, found: Sequence[OnNode], order: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        by_name: dict[str, Any] = {one.node: one for one in found}
        rows = [by_name[node] for node in order]
        output.write_json({"image": image.ref.label, "digest": image.digest, "nodes": rows})
        return
    good = [one for one in found if not one.problem]
    copied = sum(one.copied for one in good)
    newly = sum(one.copied > 0 for one in good)
    passed = sum(size for one in good for source, size in one.sources.items() if source not in NO_NODES)
    from_there = f", {output.size(passed)} from other nodes" if passed else ""
    print(
        f"{_label(image)}: on {len(good)} of {len(found)} nodes, "
        f"copied to {newly} ({output.size(copied)}{from_there}), {len(good) - newly} had it"
    )
