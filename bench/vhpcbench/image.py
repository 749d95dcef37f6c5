# SPDX-License-Identifier: Apache-2.0
"""Import, staging and warm use of an image, each against the plain tools in the same round.

On the lab's login host, as a user: `vhpc image import` of a tar against mkfs.erofs alone with
the same options and the same tar. On a node, as root: staging of that image into an empty
store (copied and verified) against sha256sum and cp of the same files. And the stage "image"
of the boot of a job whose image the node has, and the stage "disks" of the same boot, in which the
job's disk is made.

Targets: an import at no less than 0.8 of the speed of mkfs.erofs, staging in at most 1.2 times
the time of sha256sum and cp, at most 30 ms of a warm boot, a disk within 20 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from vhpcbench.common import NODE, USER, BenchError, Lab, Report, main
from vhpcbench.targets import at_least, at_most

ON_NODE = Path(__file__).with_name("image_staging.py")
PYTHON = "/opt/vhpc/bin/python"
FOLDER = f"/scratch/{USER}/bench-image"
TAR, CATALOG = f"{FOLDER}/root.tar", f"{FOLDER}/catalog"
SOURCES = ("usr/bin", "usr/lib")
"""Below / of the login host: programs and libraries, as an image has them."""
OPTIONS = "--quiet --tar=f -zlz4 -C65536 -T0 --mkfs-time -U00000000-0000-0000-0000-000000000000"
TARGETS = (
    at_least(0.8, "speed of an import to mkfs.erofs"),
    at_most(1.2, "staging to sha256sum and cp"),
    at_most(30, "stage image of a warm boot", "ms"),
    at_most(20, "stage disks", "ms"),
)
DISK = "1G"
"""Size of a guest's disk."""


def run() -> int:
    """Entry point."""
    return main("image", __doc__ or "", 3, bench)


def bench(args: argparse.Namespace) -> Report:
    """Run rounds of all four."""
    lab, report = Lab(), Report("image")
    values: dict[str, list[float]] = {
        name: [] for name in ("mkfs", "import", "tools", "stage", "warm", "disk")
    }
    lab.run("login", "mkdir", "-p", FOLDER, user=USER)
    try:
        made = f"tar -cf {TAR} --ignore-failed-read -C / {' '.join(SOURCES)} 2>/dev/null; stat -c %s {TAR}"
        size = int(lab.run("login", "sh", "-c", made, user=USER)) / (1 << 20)
        for _ in range(args.rounds):
            values["mkfs"].append(_seconds(lab, f"mkfs.erofs {OPTIONS} {FOLDER}/plain.erofs < {TAR}"))
            values["import"].append(
                _seconds(lab, f"vhpc image import {TAR} bench --catalog {CATALOG} --kernel {args.image}")
            )
            staged = json.loads(lab.run(NODE, PYTHON, "-c", ON_NODE.read_text(), CATALOG))
            values["tools"].append(staged["tools"])
            values["stage"].append(staged["stage"])
            stages = _stages_ms(lab, args.image)
            values["warm"].append(stages["image"])
            values["disk"].append(stages["disks"])
    finally:
        lab.run("login", "rm", "-rf", FOLDER, user=USER)
    series = {
        "mkfs": report.add(f"mkfs.erofs of {size:.0f} MiB", "s", values["mkfs"]),
        "import": report.add("vhpc image import", "s", values["import"]),
        "tools": report.add("sha256sum and cp of its files", "s", values["tools"]),
        "stage": report.add("staging", "s", values["stage"]),
        "warm": report.add("stage image of a warm boot", "ms", values["warm"]),
        "disk": report.add(f"stage disks of a boot with a disk of {DISK}", "ms", values["disk"]),
    }
    speed = _ratio(values["mkfs"], values["import"])
    staging = _ratio(values["stage"], values["tools"])
    report.ratios = {"speed of import to mkfs.erofs": speed, "staging to sha256sum and cp": staging}
    found = (speed, staging, series["warm"].median, series["disk"].median)
    for target, value in zip(TARGETS, found, strict=True):
        report.judge(target, value)
    return report


def _ratio(above: list[float], below: list[float]) -> float:
    """Median of the ratios of the rounds."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _seconds(lab: Lab, command: str) -> float:
    """Duration of a shell command of the user, of which both cases have the same start-up of the lab."""
    script = (
        f"sync; began=$(date +%s%N); {command} >/dev/null 2>&1 || exit 1; echo $(($(date +%s%N) - began))"
    )
    return int(lab.run("login", "sh", "-c", script, user=USER)) / 1e9


def _stages_ms(lab: Lab, image: str) -> dict[str, float]:
    """Durations of the stages of a boot."""
    options = (f"--vhpc-image={image}", f"--vhpc-disk={DISK}", "-o", "/dev/null")
    job = lab.submit("true", *options, wait=True)
    found = {stage["name"]: float(stage["took_s"]) * 1e3 for stage in lab.timeline(job)}
    if missing := {"image", "disks"} - found.keys():
        raise BenchError(f"job {job} has no stage {' and '.join(sorted(missing))}")
    return found
