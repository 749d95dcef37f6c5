# SPDX-License-Identifier: Apache-2.0
"""Metrics of a node in a file for the textfile collector of Prometheus' node_exporter.

The health check writes it: there is no process on the node that has to be asked.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model.usage import GpuUsage
from vhpc_slurm.node.devices import quarantine
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.store import images, journal, outbox
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile.finding import RepairResult

if TYPE_CHECKING:
    from prometheus_client import Gauge

NAME = "vhpc.prom"


def write(
    folder: Path, layout: Layout, results: Sequence[RepairResult], gpus: Mapping[int, GpuUsage]
) -> None:
    """Replace the file.

    Args:
        folder: of node_exporter; it must belong to root.
        layout: the node's folders.
        results: of this health check.
        gpus: those in running guests, by Slurm's index.

    Raises:
        NodeError: the file cannot be written, or prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, generate_latest
    except ModuleNotFoundError as err:
        raise NodeError(
            "there are no metrics of this node", str(err), "install Debian's python3-prometheus-client"
        ) from err
    registry = CollectorRegistry()

    def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"vhpc_node_{name}", text, labels, registry=registry)

    gauge("generations", "Jobs whose guests are on this node.").set(
        sum(1 for _ in journal.generations(layout.journals))
    )
    gauge("devices_in_quarantine", "Devices that no job may get.").set(len(quarantine.read_records(layout)))
    stored = images.stored(layout)
    gauge("image_blobs", "Blobs of images in this node's store.").set(len(stored))
    gauge("image_bytes", "Their size.").set(sum(size for _, size in stored))
    gauge("unsent_acknowledgements", "Ends of jobs that vhpcd does not know yet.").set(
        len(outbox.pending(layout.outbox))
    )
    counts = Counter((result.kind, result.repaired) for result in results)
    findings = gauge(
        "findings",
        "What the last health check found, by kind, and whether it was repaired.",
        ("kind", "repaired"),
    )
    for kind in Kind:
        for repaired in (True, False):
            findings.labels(kind.value, "yes" if repaired else "no").set(counts[kind, repaired])
    _gpus(gauge, gpus)
    gauge("health_check_timestamp_seconds", "When the last health check ended.").set(time.time())
    _replace(folder, generate_latest(registry))


def _gpus(gauge: Callable[..., Gauge], gpus: Mapping[int, GpuUsage]) -> None:
    """The figures that drivers in the guests have counted; one that is not known has no row."""
    busy = gauge("gpu_busy_ratio", "Mean use of a GPU since its guest began.", ("gpu",))
    memory = gauge("gpu_peak_memory_bytes", "Most memory of a GPU in use since its guest began.", ("gpu",))
    power = gauge("gpu_power_watts", "Mean power of a GPU since its guest began.", ("gpu",))
    for index, gpu in gpus.items():
        for family, value, unit in (
            (busy, gpu.busy_e4, 10_000),
            (memory, gpu.memory_bytes, 1),
            (power, gpu.power_mw, 1000),
        ):
            if value is not None:
                family.labels(str(index)).set(value / unit)


def _replace(folder: Path, text: bytes) -> None:
    """Write the file under another name, and rename it: node_exporter reads at any time."""
    try:
        where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(where).st_uid != 0:
                raise PermissionError(1, "the folder must belong to root")
            part = f"{NAME}.part"
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(part, flags, 0o644, dir_fd=where), "wb") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(text)
            os.rename(part, NAME, src_dir_fd=where, dst_dir_fd=where)
        finally:
            os.close(where)
    except OSError as err:
        raise NodeError(f"cannot write {folder / NAME}", str(err), "see host.metrics_folder") from err
