# SPDX-License-Identifier: Apache-2.0
"""256 MiB through a script's stdout, against the same bytes through a bare virtio-serial port.

In the guest of a job `dd if=/dev/zero bs=64k` writes to the standard output of the
batch script, a file; in a plain guest of the same image, on the same CPUs, the same
command writes to a port, and its socket is read into a file. The benchmark measures
the time and the CPU time of the host per GiB, which is more important if the guest
has dedicated CPUs: QEMU without its vCPUs, and the processes at the socket (the
shim and vhpc-run, or one reader). The targets are 0.7 of the speed of the bare
port, and 1.5 times the CPU time of the reader. In addition: 32 MiB through `srun`,
with the task in the guest and the output written by srun, against the same srun
without a guest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from vhpcbench import hostcpu
from vhpcbench.common import BenchError, Lab, Report, main
from vhpcbench.plain import Plain, facts
from vhpcbench.targets import at_least, at_most

SPEED = at_least(0.7, "speed to that of the bare port")
RELAYS = at_most(1.5, "CPU time of shim and vhpc-run to the reader's")
TARGETS = (SPEED, RELAYS)
WAIT_S = 120
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
    """Run rounds of all four cases."""
    lab = Lab()
    report = Report("stdio")
    plain = Plain(lab, args.image, facts(lab, args.image), SCRIPT)
    guest = f"--vhpc-image={args.image}"
    script: list[float] = []
    bare: list[float] = []
    srun: list[float] = []
    host: list[float] = []
    parts: list[dict[str, float]] = []
    reference: list[dict[str, float]] = []
    try:
        for _ in range(args.rounds):
            seconds, cpu = _script(lab, guest)
            script.append(seconds)
            parts.append(cpu)
            seconds, cpu = plain.transfer(MIB << 20)
            bare.append(seconds)
            reference.append(cpu)
            srun.append(_job(lab, SRUN_MIB, "srun ", guest, "--vhpc-batch=host"))
            host.append(_job(lab, SRUN_MIB, "srun "))
    finally:
        plain.close()
    for name, mib, spans in (
        ("a script's stdout in a guest", MIB, script),
        ("a bare port of a plain guest", MIB, bare),
        ("srun, with the task in a guest", SRUN_MIB, srun),
        ("srun without a guest", SRUN_MIB, host),
    ):
        report.add(name, "MiB/s", [mib / s for s in spans])
    for title, rounds in (("script", parts), ("bare port", reference)):
        for name in rounds[0]:
            values = [cpu[name] * 1024 / MIB for cpu in rounds]
            report.add(f"host's CPU time, {title}: {name}", "s/GiB", values)
    speed = statistics.median(b / s for b, s in zip(bare, script, strict=True))
    report.ratios["script's stdout to bare port"] = speed
    relays = [cpu["vhpc-shim"] + cpu["vhpc-run"] for cpu in parts]
    ratio = statistics.median(ours / cpu["reader"] for ours, cpu in zip(relays, reference, strict=True))
    report.ratios["relays' CPU time to the reader's"] = ratio
    report.ratios["srun's, in a guest to without"] = statistics.median(
        h / s for h, s in zip(host, srun, strict=True)
    )
    report.judge(SPEED, speed)
    report.judge(RELAYS, ratio)
    return report


def _script(lab: Lab, *options: str) -> tuple[float, dict[str, float]]:
    """Seconds from the line before the command to the last byte of output; CPU seconds by process."""
    files = {name: lab.home(f"{NAME}.{name}") for name in ("up", "go", "begin", "end", "out")}
    wait = "until [ -e {} ]; do sleep 0.1; done"
    lines = [
        f": > {NAME}.up",
        wait.format(f"{NAME}.go"),
        f": > {NAME}.begin",
        _dd(MIB),
        wait.format(f"{NAME}.end"),
    ]
    job = lab.submit("\n".join(lines), "-o", f"{NAME}.out", *options, wait=False)
    try:
        _until(files["up"].exists, "the job to run")
        before = hostcpu.of_job(job)
        files["go"].touch(0o666)
        _until(lambda: files["out"].stat().st_size >= MIB << 20, "its output")
        cpu = {name: seconds - before[name] for name, seconds in hostcpu.of_job(job).items()}
        seconds = (files["out"].stat().st_mtime_ns - files["begin"].stat().st_ctime_ns) / 1e9
        files["end"].touch(0o666)
    except BaseException:
        lab.run("ctl", "scancel", str(job))
        raise
    finally:
        lab.quiet()
        for path in files.values():
            path.unlink(missing_ok=True)
    return seconds, cpu


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise BenchError(f"timed out after {WAIT_S} s while waiting for {what}")
        time.sleep(0.02)


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
