"""256 MiB through a script's stdout, against the same bytes through a bare virtio-serial port.

In the guest of a job `dd if=/dev/zero bs=64k` writes to the standard output of the
batch script, a file; in a plain guest of the same image, on the same CPUs, the same
command writes to a port, and its socket is read into a file. Measured are the time
and, which is what counts where the guest has CPUs of its own, the CPU time of the
host for a GiB: QEMU's threads but its vCPUs, and whoever reads the socket (the shim
and vhpc-run; or one reader). The target, at most 2, is for that: there is one more
process, and the bytes pass one more socket. Beside them: 32 MiB through `srun`, whose
task is in the guest and whose output srun itself writes, against that srun without
a guest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from vhpcbench import hostcpu
from vhpcbench.common import BenchError, Lab, Report, main
from vhpcbench.plain import Plain, facts

TARGET = 2.0
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
    """Rounds of all four."""
    lab = Lab()
    report = Report("stdio")
    plain = Plain(lab, args.image, facts(lab, args.image), SCRIPT)
    guest = f"--vhpc-image={args.image}"
    script: list[float] = []
    bare: list[float] = []
    srun: list[float] = []
    host: list[float] = []
    parts: list[dict[str, float]] = []
    cpu_bare: list[float] = []
    try:
        for _ in range(args.rounds):
            seconds, cpu = _script(lab, guest)
            script.append(seconds)
            parts.append(cpu)
            seconds, cpu_s = plain.transfer(MIB << 20)
            bare.append(seconds)
            cpu_bare.append(cpu_s)
            srun.append(_job(lab, SRUN_MIB, "srun ", guest, "--vhpc-batch=host"))
            host.append(_job(lab, SRUN_MIB, "srun "))
    finally:
        plain.close()
    for name, mib, spans in (
        ("a script's stdout in a guest", MIB, script),
        ("a bare port of a plain guest", MIB, bare),
        ("srun, its task in a guest", SRUN_MIB, srun),
        ("srun without a guest", SRUN_MIB, host),
    ):
        report.add(name, "MiB/s", [mib / s for s in spans])
    cpu_script = [sum(part.values()) for part in parts]
    spent = {"a script's stdout": cpu_script}
    spent |= {f"  of it {name}": [part[name] for part in parts] for name in parts[0]}
    for name, values in (spent | {"a bare port": cpu_bare}).items():
        report.add(f"host's CPU time, {name}", "s/GiB", [value * 1024 / MIB for value in values])
    report.ratios["script's stdout to bare port"] = statistics.median(
        b / s for b, s in zip(bare, script, strict=True)
    )
    ratio = statistics.median(s / b for b, s in zip(cpu_bare, cpu_script, strict=True))
    report.ratios["host's CPU time, script to bare port"] = ratio
    report.ratios["srun's, in a guest to without"] = statistics.median(
        h / s for h, s in zip(host, srun, strict=True)
    )
    report.judge(f"host's CPU time: ratio {ratio:.2f}, target at most {TARGET:g}", ratio <= TARGET)
    return report


def _script(lab: Lab, *options: str) -> tuple[float, dict[str, float]]:
    """Seconds from the line before the command to the output's last byte; CPU seconds by process."""
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
            raise BenchError(f"waited {WAIT_S} s in vain for {what}")
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
