# SPDX-License-Identifier: Apache-2.0
"""Collectives of Open MPI in a job's two guests on two nodes, against two plain guests on a bridge.

2, 4, 8 and 16 ranks, half of them in each guest, started by mpirun: the first
collective after MPI_Init (a barrier), then barrier, and bcast, allreduce and
alltoall of 8 bytes to 1 MiB, each the median of 5 to 51 calls, of which the
slowest rank counts. The first collective also in ranks that srun --mpi=pmix has
started. Guests, CPUs and network are as in bench/mpi. The plain guests start
ranks in each other by a small agent in place of ssh.

Targets: the median of all collectives and sizes at most 1.1 times the plain
guests', for each number of ranks; the same for the first collective, in the
median of all numbers of ranks.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics

from vhpcbench.collectives_program import MARKER, SOURCE
from vhpcbench.common import BenchError, Lab, Report, main
from vhpcbench.mpi import ADDRESSES, MACS, PlainPair, job_output, two_guests
from vhpcbench.targets import at_most

IMAGE = "debian-hpc"
RANKS = (2, 4, 8, 16)
PROGRAM = "bench-collectives"
ALL = "bench-collectives-all:"
MEMORY = "--mem=1500"
RUN_S = 120
DEADLINE_S = 400
SAME = at_most(1.1, "collectives to the plain guests', the worst number of ranks")
FIRST = at_most(1.1, "first collective to the plain guests'")
TARGETS = (SAME, FIRST)
EACH = " ".join(str(ranks // 2) for ranks in RANKS)
MPIRUN = f"timeout {RUN_S} mpirun --map-by ppr:$each:node:OVERSUBSCRIBE --bind-to none -n $((2 * each))"
JOB = f"""
for each in {EACH}; do
    {MPIRUN} ~/{PROGRAM}
    echo by srun
    timeout {RUN_S} srun --mpi=pmix --overcommit -n $((2 * each)) --ntasks-per-node=$each ~/{PROGRAM} first
    echo by mpirun
done
"""
# mpirun calls the agent with a host and the words of a command, as it would call ssh
AGENT = """
import socket, sys, time
for _ in range(300):
    try:
        server = socket.create_connection((sys.argv[1], 7000), 10)
        break
    except OSError:
        time.sleep(0.2)
server.settimeout(None)
server.sendall(" ".join(sys.argv[2:]).encode() + b"\\0")
while data := server.recv(4096):
    sys.stderr.buffer.write(data)
"""
SERVER = """
import socket, subprocess
server = socket.create_server(("", 7000))
while True:
    asker, _ = server.accept()
    command = b""
    while not command.endswith(b"\\0"):
        command += asker.recv(4096)
    subprocess.Popen(["sh", "-c", command[:-1]], stdin=subprocess.DEVNULL, stdout=asker, stderr=asker)
    asker.close()
"""
SCRIPT = f"""#!/bin/sh
export PATH=/usr/bin:/usr/sbin:/bin:/sbin HOME=/tmp OMPI_MCA_btl_tcp_disable_family=6
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t tmpfs tmpfs /tmp
mkdir -p /dev/shm /dev/pts; mount -t tmpfs tmpfs /dev/shm; mount -t devpts devpts /dev/pts
number=0; grep -q {MACS[1]} /sys/class/net/eth0/address && number=1
set -- {" ".join(ADDRESSES)}
printf '127.0.0.1 localhost\\n%s g0\\n%s g1\\n' $1 $2 > /tmp/hosts; mount --bind /tmp/hosts /etc/hosts
shift $number
hostname g$number; ip link set lo up; ip link set eth0 up; ip address add $1/24 dev eth0
base64 -d > /tmp/{PROGRAM} <<'END'
{{program}}
END
cat > /tmp/agent <<'END'
#!/usr/bin/python3{AGENT}END
chmod +x /tmp/agent /tmp/{PROGRAM}
[ $number = 1 ] || exec python3 -c '{SERVER}'
for each in {EACH}; do
    {MPIRUN} --prtemca plm ssh --prtemca plm_ssh_agent /tmp/agent --host g1:8,g0:8 /tmp/{PROGRAM}
done > /tmp/out 2>&1
tail -c 600 /tmp/out
echo {ALL} $(sed -n 's/^{MARKER}//p' /tmp/out)
sleep 1000
"""
Result = dict[str, float]


def run() -> int:
    """Entry point."""
    return main("collectives", __doc__ or "", 3, bench, lambda parser: parser.set_defaults(image=IMAGE))


def bench(args: argparse.Namespace) -> Report:
    """Run the pairs of guests by turns."""
    lab = Lab()
    report = Report("collectives")
    guests = two_guests(lab, args.image, MEMORY)
    script = SCRIPT.replace("{program}", base64.encodebytes(_program(lab, args.image)).decode())
    plain = PlainPair(lab, args.image, guests[0], script)
    ours: list[list[Result]] = []
    by_srun: list[list[Result]] = []
    theirs: list[list[Result]] = []
    try:
        for _ in range(args.rounds):
            mpirun, srun = _job(lab, args.image)
            ours.append(mpirun)
            by_srun.append(srun)
            line, console = plain.line(guests, ALL, DEADLINE_S)
            theirs.append(_results(line, console))
    finally:
        plain.close()
        lab.home(PROGRAM).unlink()
    _tell(report, ours, theirs, by_srun)
    return report


def _program(lab: Lab, image: str) -> bytes:
    """The compiled program, which is also left in the user's home."""
    build = f"mpicc.openmpi -O2 -o ~/{PROGRAM} -x c - <<'END'\n{SOURCE}\nEND"
    lab.submit(build, f"--vhpc-image={image}", MEMORY, "-o", "/dev/null", wait=True)
    lab.quiet()
    return lab.home(PROGRAM).read_bytes()


def _job(lab: Lab, image: str) -> tuple[list[Result], list[Result]]:
    """Results of one job: of ranks that mpirun started, and of those that srun started."""
    said = job_output(lab, JOB, image, MEMORY)
    lines = said.splitlines()
    starts = {"mpirun": "", "srun": ""}
    by = "mpirun"
    for line in lines:
        by = line.removeprefix("by ") if line.startswith("by ") else by
        starts[by] += line.removeprefix(MARKER) if line.startswith(MARKER) else ""
    return _results(starts["mpirun"], said), _results(starts["srun"], said)


def _results(line: str, said: str) -> list[Result]:
    """One result for each number of ranks, in the order of RANKS.

    Raises:
        BenchError: some are missing.
    """
    try:
        found: list[Result] = json.loads(f"[{line.strip().replace('}', '},').rstrip(',')}]")
    except ValueError as err:
        raise BenchError(f"no result; printed was: {said[-600:]}") from err
    if tuple(one.pop("ranks") for one in found) != RANKS:
        raise BenchError(f"results are missing; printed was: {said[-600:]}")
    return found


def _tell(
    report: Report, ours: list[list[Result]], theirs: list[list[Result]], by_srun: list[list[Result]]
) -> None:
    worst, firsts = 0.0, []
    for index, ranks in enumerate(RANKS):
        pairs = [(a[index], b[index]) for a, b in zip(ours, theirs, strict=True)]
        ratios = {}
        for name in pairs[0][0]:
            for case, values in zip(("job", "plain"), zip(*pairs, strict=True), strict=True):
                report.add(f"{ranks} ranks, {name}, {case}", "ms", [one[name] * 1e3 for one in values])
            ratios[name] = statistics.median(a[name] / b[name] for a, b in pairs)
        started = [one[index]["first"] * 1e3 for one in by_srun]
        report.add(f"{ranks} ranks, first, job by srun", "ms", started)
        ratios.pop("init")
        firsts.append(ratios.pop("first"))
        report.ratios[f"{ranks} ranks, first collective"] = firsts[-1]
        report.ratios[f"{ranks} ranks, median of all"] = statistics.median(ratios.values())
        worst = max(worst, statistics.median(ratios.values()))
        slowest = max(ratios, key=lambda name: ratios[name])
        report.notes.append(f"{ranks} ranks: {slowest} has the largest ratio, {ratios[slowest]:.2f}")
    report.judge(SAME, worst)
    report.judge(FIRST, statistics.median(firsts))
