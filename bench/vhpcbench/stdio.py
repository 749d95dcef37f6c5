"""256 MiB through a task's stdout, against the same bytes through a bare virtio-serial port.

In the guest of a job `dd if=/dev/zero bs=64k` writes to the standard output of the
batch script, a file; in a plain guest of the same image, on the same CPUs, the same
command writes to a port, and its socket is read into a file. The target, at least
0.7, is for these two. Beside them: 32 MiB through `srun`, whose task is in the guest
and whose output srun itself writes, against that srun without a guest.
"""

from __future__ import annotations

import argparse
import statistics

from vhpcbench.common import BenchError, Lab, Report, main
from vhpcbench.plain import Plain, facts

TARGET = 0.7
MIB, SRUN_MIB = 256, 32


def _dd(mib: int) -> str:
    return f"dd if=/dev/zero bs=64k count={mib * 16} 2>/dev/null"


SCRIPT = f"""#!/bin/sh
for p in /sys/class/virtio-ports/*; do
    read name < $p/name
    [ "$name" = bench ] && exec > /dev/${{p##*/}}
done
echo
{_dd(MIB)}
sleep 1000
"""
NAME = "bench-stdio"


def run() -> int:
    """Entry point."""
    return main("stdio", __doc__ or "", 5, bench)


def bench(args: argparse.Namespace) -> Report:
    """Rounds of all four."""
    lab = Lab()
    report = Report("stdio")
    plain = Plain(lab, args.image, facts(lab, args.image), SCRIPT)
    guest = f"--vhpc-image={args.image}"
    script, bare, srun, host = [], [], [], []
    try:
        for _ in range(args.rounds):
            script.append(_job(lab, MIB, "", guest))
            bare.append(plain.measure(pinned=True, size=MIB << 20))
            srun.append(_job(lab, SRUN_MIB, "srun ", guest, "--vhpc-batch=host"))
            host.append(_job(lab, SRUN_MIB, "srun "))
    finally:
        plain.close()
    for name, mib, seconds in (
        ("a script's stdout in a guest", MIB, script),
        ("a bare port of a plain guest", MIB, bare),
        ("srun, its task in a guest", SRUN_MIB, srun),
        ("srun without a guest", SRUN_MIB, host),
    ):
        report.add(name, "MiB/s", [mib / s for s in seconds])
    ratio = statistics.median(b / s for b, s in zip(bare, script, strict=True))
    report.ratios["script's stdout to bare port"] = ratio
    report.ratios["srun's, in a guest to without"] = statistics.median(
        h / s for h, s in zip(host, srun, strict=True)
    )
    report.judge(f"ratio {ratio:.2f}, target at least {TARGET}", ratio >= TARGET)
    return report


def _job(lab: Lab, mib: int, launch: str, *options: str) -> float:
    """Seconds from the line before the command to the last byte in the job's output."""
    job = lab.submit(f": > {NAME}.begin\n{launch}{_dd(mib)}", "-o", f"{NAME}.out", *options, wait=True)
    begin, out = lab.home(f"{NAME}.begin"), lab.home(f"{NAME}.out")
    began, end = begin.stat(), out.stat()
    begin.unlink()
    out.unlink()
    lab.quiet()
    if end.st_size != mib << 20:
        raise BenchError(f"job {job} wrote {end.st_size} bytes")
    return (end.st_mtime_ns - began.st_ctime_ns) / 1e9
