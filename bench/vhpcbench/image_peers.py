# SPDX-License-Identifier: Apache-2.0
"""Eight nodes of a job without the image: with and without asking each other, in turn.

The nodes are threads with a store and an address of the loopback network each; client, server and
munged are the real ones. Read from the catalogue: bytes that the nodes count, in images. The times
are those of one machine, whose CPU and disk all nodes share: they compare the two, and nothing else.
Needs no lab, but munged and root: `make deps`.

Target: at most 1.5 images are read from the catalogue.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from controller_lab import munged
from peers_rig import Lease, finish, publish

from vhpc_slurm import chunks
from vhpc_slurm.catalog import blobs, with_list
from vhpc_slurm.munge import Munge
from vhpc_slurm.node.store import images
from vhpc_slurm.node.store.copying import CATALOGUE
from vhpc_slurm.node.store.peers import tree
from vhpc_slurm.node.store.peers.client import Pace
from vhpc_slurm.node.store.peers.server import Limits
from vhpcbench.common import BenchError, Report, main
from vhpcbench.targets import at_most

NODES, MIB = 8, 256
TARGETS = (at_most(1.5, "images read from the catalogue"),)


def run() -> int:
    """Entry point."""
    return main("image-peers", __doc__ or "", 3, bench)


def bench(args: argparse.Namespace) -> Report:
    """Rounds of both."""
    report = Report("image-peers")
    read: dict[bool, list[float]] = {True: [], False: []}
    took: dict[bool, list[float]] = {True: [], False: []}
    with munged() as daemon:
        for _ in range(args.rounds):
            for asking in (True, False):
                share, seconds = _round(Munge(str(daemon.socket)), asking=asking)
                read[asking].append(share)
                took[asking].append(seconds)
    peers = report.add(f"read by {NODES} nodes that ask each other", "images", read[True])
    report.add(f"read by {NODES} nodes that do not", "images", read[False])
    ours = report.add("until all have it, asking each other", "s", took[True])
    alone = report.add("until all have it, each alone", "s", took[False])
    report.ratios = {"time with to without": ours.median / alone.median}
    report.judge(TARGETS[0], peers.median)
    return report


def _round(seal: Munge, *, asking: bool) -> tuple[float, float]:
    """Images read from the catalogue, and seconds until all nodes have the image."""
    folder = Path(tempfile.mkdtemp(prefix="bench-image-peers-"))
    job = Lease(folder, NODES, pace=Pace(), limits=Limits(), seal=seal)
    try:
        image = publish(job.catalog, MIB << 20, chunks.SIZE)
        size = sum(blob.size for blob in with_list(image.manifest))
        for rank in range(NODES):
            job.read_catalogue(rank)
        job.serve([rank for rank in range(NODES) if tree.is_asked(job.names, job.names[rank])], image)
        began = time.monotonic()

        def stage(rank: int) -> images.StagedImage:
            lineage = job.lineage(rank) if asking else None
            return finish(images.stage(job.nodes[rank].layout, image, None, lineage))

        with ThreadPoolExecutor(NODES) as threads:
            staged = list(threads.map(stage, range(NODES)))
        seconds = time.monotonic() - began
        for node in job.nodes:
            if not all(
                (node.store / blob.sha256).stat().st_size == blob.size for blob in blobs(image.manifest)
            ):
                raise BenchError(f"{node.name} lacks a file of the image")
        return sum(dict(one.sources).get(CATALOGUE, 0) for one in staged) / size, seconds
    finally:
        job.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    raise SystemExit(run())
