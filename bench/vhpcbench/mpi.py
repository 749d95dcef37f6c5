# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth between two guests of a job on two nodes, against two plain guests on a bridge.

A TCP ping-pong of one byte (half the round trip), and a stream of 64 MiB: what
MPI has over TCP, without the time of an MPI library, which the image has not.
The job's guests are on its network (VXLAN between the nodes). The plain guests
have the same kernel, machine type, memory and CPUs and the same model of
network interface, on one bridge without VXLAN. In both cases each guest has one
CPU of its own, as guests on two nodes have: a job without a guest takes the
first CPU of the first node. Targets: at most 1.1 times the
latency, at least 0.95 of the bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from vhpcbench.common import NODE, BenchError, Lab, Report, main
from vhpcbench.plain import GuestFacts, Plain, running
from vhpcbench.targets import at_least, at_most

WORK = Path(__file__).with_name("pingpong.py")
ON_NODE = Path(__file__).with_name("mpi_plain.py")
MARKER = "bench-pingpong:"
NODES = (NODE, "n2")
ADDRESSES = ("192.0.2.1", "192.0.2.2")
MACS = ("52:54:00:00:00:01", "52:54:00:00:00:02")
LATENCY = at_most(1.1, "latency to the plain guests'")
BANDWIDTH = at_least(0.95, "bandwidth to the plain guests'")
TARGETS = (LATENCY, BANDWIDTH)
JOB = f"""
first=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)
srun -K1 -n2 --ntasks-per-node=1 sh -c "python3 ~/{WORK.name} \\$SLURM_PROCID $first"
"""
SCRIPT = f"""#!/bin/sh
PATH=/usr/bin:/usr/sbin:/bin:/sbin
mount -t proc proc /proc; mount -t sysfs sysfs /sys
rank=1; grep -q {MACS[0]} /sys/class/net/eth0/address && rank=0
ip link set lo up; ip link set eth0 up
if [ $rank = 0 ]; then ip address add {ADDRESSES[0]}/24 dev eth0
else ip address add {ADDRESSES[1]}/24 dev eth0; fi
python3 - $rank {ADDRESSES[0]} <<'END'
{{work}}
END
sleep 1000
"""


def run() -> int:
    """Entry point."""
    return main("mpi", __doc__ or "", 5, bench)


def bench(args: argparse.Namespace) -> Report:
    """Run the pairs of guests by turns."""
    lab = Lab()
    report = Report("mpi")
    lab.home(WORK.name).write_bytes(WORK.read_bytes())
    guests = two_guests(lab, args.image)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    plain = PlainPair(lab, args.image, guests[0], SCRIPT.replace("{work}", WORK.read_text()))
    try:
        for _ in range(args.rounds):
            ours.append(_job(lab, args.image))
            theirs.append(plain.pair(guests))
    finally:
        plain.close()
        lab.home(WORK.name).unlink()
    for key, unit, name in (("us", "us", "half round trip"), ("mib_s", "MiB/s", "stream")):
        report.add(f"{name}, job", unit, [one[key] for one in ours])
        report.add(f"{name}, plain", unit, [one[key] for one in theirs])
        report.ratios[name] = statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))
    report.judge(LATENCY, report.ratios["half round trip"])
    report.judge(BANDWIDTH, report.ratios["stream"])
    return report


def _options(image: str) -> list[str]:
    # the limit ends a job of which nobody knows any more, such as after Ctrl-C
    return ["-N2", "--time=10", f"--vhpc-image={image}", "--vhpc-network=job"]


def two_guests(lab: Lab, image: str, *options: str) -> list[GuestFacts]:
    """Configuration of the two guests of a job."""
    jobs = [lab.hold(node=NODES[0])]
    try:
        jobs.append(lab.hold(*_options(image), *options, node=",".join(NODES)))
        guests = [running(lab, node) for node in NODES]
    finally:
        lab.cancel(*jobs)
    if guests[0].cpus == guests[1].cpus:
        raise BenchError(f"both guests have CPU {guests[0].cpus}: the lab's nodes need two CPUs")
    return guests


def _job(lab: Lab, image: str) -> dict[str, float]:
    said = job_output(lab, JOB, image)
    return _result(said.partition(MARKER)[2], said)


def job_output(lab: Lab, script: str, image: str, *options: str) -> str:
    """Output of a job with two guests, each on a CPU of its own.

    Raises:
        BenchError: the job has failed.
    """
    out = "bench-mpi.out"
    other = lab.hold(node=NODES[0])
    try:
        lab.submit(script, *_options(image), *options, "-o", out, wait=True, node=",".join(NODES))
    except BenchError as err:
        raise BenchError(f"{err}; printed was: {_printed(lab, out)[-600:]}") from err
    finally:
        lab.cancel(other)
    return _printed(lab, out)


def _printed(lab: Lab, out: str) -> str:
    try:
        said = lab.home(out).read_text(errors="replace")
    except FileNotFoundError:
        return ""
    lab.home(out).unlink()
    return said


def _result(line: str, said: str) -> dict[str, float]:
    try:
        found: dict[str, float] = json.loads(line)
    except ValueError as err:
        raise BenchError(f"no result; printed was: {said[-300:]}") from err
    return found


class PlainPair(Plain):
    """Two plain guests at the same time, on the CPUs of the job's guests."""

    def pair(self, guests: list[GuestFacts]) -> dict[str, float]:
        """Result of one pair.

        Raises:
            BenchError: it has none.
        """
        return _result(*self.line(guests, MARKER))

    def line(self, guests: list[GuestFacts], marker: str, deadline_s: float = 240) -> tuple[str, str]:
        """The rest of the line with the marker on the second guest's console; the end of both consoles."""
        order: dict[str, Any] = {"guests": [], "marker": marker, "deadline_s": deadline_s}
        order["guests"] = [
            {
                "cpus": guest.cpus,
                "argv": [
                    *self._argv(port=False),
                    *("-netdev", f"tap,id=net,ifname=vhpcbench{rank},script=no,downscript=no"),
                    *("-device", f"virtio-net-pci,netdev=net,mac={MACS[rank]},romfile="),
                ],
            }
            for rank, guest in enumerate(guests)
        ]
        # in a network namespace of its own, which ends with the last of its processes
        run = ("unshare", "--net", "python3", "-I", "-c", ON_NODE.read_text(), json.dumps(order))
        result = json.loads(self._lab.run(NODE, *run, timeout_s=deadline_s + 60))
        return str(result["line"]), str(result["console"])
