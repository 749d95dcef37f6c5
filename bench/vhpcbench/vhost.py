# SPDX-License-Identifier: Apache-2.0
"""TCP between two guests with KVM and vhost-net of one host, against two plain guests on a bridge.

In the hardware lab's machine, which has KVM but is itself emulated: times are far from
those of a real host, only ratios mean something. The job's guests are on its network,
each with one CPU; the plain guests have the same kernel, machine, processor, memory (in
huge pages of the same cell) and CPUs. A TCP ping-pong of one byte (half the round trip),
and a stream of 64 MiB. Targets: at most 1.1 times the latency, at least 0.95 of the bandwidth.

--parts adds plain guests without vhost-net, jobs without, and what each part of a job's
network costs: by turns between the same two plain guests directly (tap to tap), over a
plain bridge, a job's bridge and firewall, and VXLAN with and without the firewall.
--queues adds plain guests with two CPUs each, on all CPUs of the machine: two streams at
the same time, with one and with two pairs of queues. Emulated KVM often fails with such
guests: a kernel panics, or the machine ends. Then repeat it.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vhpc_slurm.bootfiles.newc import Archive
from vhpc_slurm.model import Generation, NodeSegment
from vhpc_slurm.node.network import firewall, plan, segment
from vhpcbench.common import USER, BenchError, Report, main
from vhpcbench.hardwarelab import NODE, HardwareLab, hardware_lab
from vhpcbench.targets import at_least, at_most

WORK = Path(__file__).with_name("pingpong.py")
ON_NODE = Path(__file__).with_name("vhost_plain.py")
MARKER = "bench-pingpong:"
LATENCY = at_most(1.1, "latency to the plain guests'")
BANDWIDTH = at_least(0.95, "bandwidth to the plain guests'")
TARGETS = (LATENCY, BANDWIDTH)
REPEATS = 3
VNI, PORT = 4242, 4789
TAPS = tuple(plan.tap_name(VNI, index) for index in range(2))
MACS = tuple(plan.mac(VNI, rank) for rank in range(2))
ADDRESSES = ("192.0.2.1", "192.0.2.2")
UNDERLAYS = ("198.51.100.1", "198.51.100.2")
PARTS = ("direct", "bridge", "closed+firewall", "vxlan", "vxlan+firewall")
TAKEN = ("-machine", "-accel", "-cpu", "-m", "-overcommit", "-smp", "-object", "-numa", "-rtc", "-append")
"""Options of a job's QEMU that a plain one has too; of its objects only memory."""
FOLDER = "/run/vhpc-bench"
OUT = "bench-vhost.out"
CONFIG = "/etc/vhpc/vhpc.toml"
ALLOW = f"""cp {CONFIG} {FOLDER}/vhpc.toml
printf '[network]\\nallowed = ["none", "job"]\\nmtu = 1500\\n' >> {CONFIG}
systemctl restart vhpcd"""
RESTORE = f"""cp {FOLDER}/vhpc.toml {CONFIG}
systemctl restart vhpcd
[ ! -e {FOLDER}/vhost-net ] || mv {FOLDER}/vhost-net /dev/
rm -r {FOLDER} ~{USER}/{WORK.name} ~{USER}/{OUT}"""
OPTIONS = ("-n2", "-c1", "--mem=768", "--time=30", "--vhpc-network=job", "--vhpc-guests-per-node=2")
JOB = f"""#!/bin/sh
srun -K1 -n2 sh -c 'python3 ~/{WORK.name} $SLURM_PROCID {NODE}-g0 --repeats={REPEATS}'
"""
SCRIPT = f"""#!/bin/sh
PATH=/usr/bin:/usr/sbin:/bin:/sbin
mount -t proc proc /proc; mount -t sysfs sysfs /sys
rank=1; other=0; mine={ADDRESSES[1]}; its={ADDRESSES[0]}; mac={MACS[0]}
if grep -q $mac /sys/class/net/eth0/address; then
    rank=0; other=1; mine={ADDRESSES[0]}; its={ADDRESSES[1]}; mac={MACS[1]}
fi
ip link set lo up; ip link set eth0 up
ip address add $mine/24 dev eth0
ip neighbour add $its lladdr $mac dev eth0
run='exec(__import__("base64").b64decode("{{work}}"))'
python3 -c "$run" $rank {ADDRESSES[0]} {{options}}
sleep 1000
"""
Result = dict[str, float]


@dataclass(frozen=True)
class Guest:
    """Options of a job's QEMU, and the CPUs on which it may run."""

    options: tuple[str, ...]
    cpus: str


@dataclass(frozen=True)
class Interface:
    """Of a plain guest: ``queues`` are pairs of them, ``streams`` of TCP are measured at the same time."""

    vhost: bool = True
    queues: int = 1
    streams: int = 1


def run() -> int:
    """Entry point."""
    return main("vhost", __doc__ or "", 3, bench, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", action="store_true", help="also without vhost-net, and what parts cost")
    parser.add_argument("--queues", action="store_true", help="also two streams with one and two queues")


def bench(args: argparse.Namespace) -> Report:
    """Jobs and pairs of plain guests by turns."""
    with hardware_lab() as lab:
        lab.run("mkdir", "-p", FOLDER)
        lab.run("sh", "-ec", ALLOW)
        try:
            return _bench(lab, args)
        finally:
            lab.quiet()
            lab.run("sh", "-ec", RESTORE)


def _bench(lab: HardwareLab, args: argparse.Namespace) -> Report:
    report = Report("vhost")
    lab.run("sh", "-c", f"cat > {WORK.name}", user=USER, stdin=WORK.read_text())
    guests = _guests(lab, args.image)
    pair = Pair(lab, args.image, guests)
    found: dict[str, list[Result]] = {}
    # first: if the emulated machine ends here, little time is lost
    streams = _queues(lab, args, guests) if args.queues else {}
    for _ in range(args.rounds):
        _merge(found, "job", {"": [_job(lab, args.image)]})
        _merge(found, "plain", pair.measure(PARTS if args.parts else ("bridge",)))
        if args.parts:
            _merge(found, "plain without vhost", pair.measure(("bridge",), Interface(vhost=False)))
            lab.run("mv", "/dev/vhost-net", FOLDER)
            _merge(found, "job without vhost", {"": [_job(lab, args.image)]})
            lab.run("mv", f"{FOLDER}/vhost-net", "/dev/")
    for key, unit, name in (("us", "us", "half round trip"), ("mib_s", "MiB/s", "stream")):
        for case, results in found.items():
            report.add(f"{name}, {case}", unit, [one[key] for one in results])
            if case not in ("plain, bridge", "job"):
                report.ratios[f"{name}, {case}"] = _ratio(results, _reference(found, case), key)
    for case, results in streams.items():
        report.add(f"two streams, {case}", "MiB/s", [one["mib_s"] for one in results])
        report.ratios[f"two streams, {case}"] = _ratio(results, next(iter(streams.values())), "mib_s")
    report.judge(LATENCY, _ratio(found["job"], _reference(found, "job"), "us"))
    report.judge(BANDWIDTH, _ratio(found["job"], _reference(found, "job"), "mib_s"))
    return report


def _queues(lab: HardwareLab, args: argparse.Namespace, guests: list[Guest]) -> dict[str, list[Result]]:
    """Two streams at once between plain guests with two CPUs: two such jobs have no room in the machine."""
    everywhere = f"0-{int(lab.run('nproc')) - 1}"
    pair = Pair(lab, args.image, [Guest(tuple(_two_cpus(guest.options)), everywhere) for guest in guests])
    found: dict[str, list[Result]] = {}
    for _ in range(args.rounds):
        for count in (1, 2):
            results = pair.measure(("bridge",), Interface(queues=count, streams=2))
            _merge(found, f"pairs of queues: {count}", {"": results["bridge"]})
    return found


def _two_cpus(options: tuple[str, ...]) -> Iterator[str]:
    for option, value in zip(options[::2], options[1::2], strict=True):
        yield option
        yield {"-smp": "2", "-numa": re.sub(r"\bcpus=0\b", "cpus=0-1", value)}.get(option, value)


def _merge(found: dict[str, list[Result]], case: str, results: dict[str, list[Result]]) -> None:
    for part, lines in results.items():
        # the emulated machine may end before all is measured
        print(f"{case}, {part}: {json.dumps(lines)}", file=sys.stderr, flush=True)
        found.setdefault(f"{case}, {part}".removesuffix(", "), []).extend(lines)


def _reference(found: dict[str, list[Result]], case: str) -> list[Result]:
    return found["plain without vhost, bridge" if case == "job without vhost" else "plain, bridge"]


def _ratio(ours: list[Result], theirs: list[Result], key: str) -> float:
    """Of the medians: the plain guests have several values for each of the job's."""
    return statistics.median(one[key] for one in ours) / statistics.median(one[key] for one in theirs)


def _submit(lab: HardwareLab, image: str, script: str, *options: str) -> str:
    argv = ["sbatch", "--parsable", *OPTIONS, f"--vhpc-image={image}", *options]
    return lab.run(*argv, user=USER, stdin=script).strip()


def _guests(lab: HardwareLab, image: str) -> list[Guest]:
    """The two guests of a job, which are known to have vhost-net."""
    job = _submit(lab, image, "#!/bin/sh\necho up; sleep 3600\n", "-o", OUT)
    try:
        waiting = f"for i in $(seq 300); do grep -q up {OUT} && exit; sleep 1; done; exit 1"
        lab.run("sh", "-c", waiting, user=USER)
        return [_guest(lab, pid) for pid in lab.run("pgrep", "^qemu-system").split()]
    finally:
        lab.run("scancel", job)
        lab.quiet()


def _guest(lab: HardwareLab, pid: str) -> Guest:
    words = lab.run("cat", f"/proc/{pid}/cmdline").split("\0")
    options: list[str] = []
    for option, value in itertools.pairwise(words):
        if option in TAKEN and (
            option != "-object" or "memory-backend" in value or "thread-context" in value
        ):
            options += [option, value]
    if "/dev/vhost-net" not in lab.run("ls", "-l", f"/proc/{pid}/fd"):
        raise BenchError("a guest of a job has no vhost-net")
    cpus = lab.run("sed", "-n", r"s/^Cpus_allowed_list:\s*//p", f"/proc/{pid}/status")
    return Guest(tuple(options), cpus.strip())


def _job(lab: HardwareLab, image: str) -> Result:
    _submit(lab, image, JOB, "--wait", "-o", OUT)
    said = lab.run("cat", OUT, user=USER)
    lab.quiet()
    return _median([line.partition(MARKER)[2] for line in said.splitlines() if MARKER in line], said)


def _median(lines: list[str], said: str) -> Result:
    try:
        results: list[Result] = [json.loads(line) for line in lines]
    except ValueError:
        results = []
    if not results:
        raise BenchError(f"no result; printed was: {said[-600:]}")
    return {key: statistics.median(one[key] for one in results) for key in results[0]}


class Pair:
    """Two plain guests at the same time, on the CPUs of the job's guests."""

    def __init__(self, lab: HardwareLab, image: str, guests: list[Guest]) -> None:
        self._lab, self._guests = lab, guests
        catalog = "/shared/catalog"
        digest = lab.run("cat", f"{catalog}/names/{image}/latest").split()[0].removeprefix("sha256:")
        self._manifest = json.loads(lab.run("cat", f"{catalog}/manifests/sha256/{digest}.json"))

    def measure(
        self,
        cases: tuple[str, ...],
        interface: Interface = Interface(),
    ) -> dict[str, list[Result]]:
        """Results of one boot of the pair, by the way of packets.

        Raises:
            BenchError: a pair of guests printed no result.
        """
        self._initrd(interface.streams, asked=len(cases) > 1)
        here = Generation(1, 0, "0" * 8)
        firewalls = [
            firewall.render(
                here,
                NodeSegment(VNI, PORT, UNDERLAYS[place], plan.bridge_name(VNI), plan.vxlan_name(VNI)),
                (UNDERLAYS[1 - place],),
            )
            for place in range(2)
        ]
        order: dict[str, Any] = {
            "marker": MARKER,
            "cases": cases,
            "repeats": REPEATS,
            "taps": TAPS,
            "queues": interface.queues,
            "macs": MACS,
            "bridge": plan.bridge_name(VNI),
            "vxlan": plan.vxlan_name(VNI),
            "vni": VNI,
            "port": PORT,
            "firewalls": firewalls,
            "underlays": UNDERLAYS,
            "closed": segment.CLOSED,
            "guests": [
                {
                    "cpus": guest.cpus,
                    "argv": self._argv(guest, rank, interface),
                }
                for rank, guest in enumerate(self._guests)
            ],
        }
        argv = ("unshare", "--net", "--mount", "python3", "-I", "-c", ON_NODE.read_text(), json.dumps(order))
        result = json.loads(self._lab.run(*argv))
        return {case: [_median(lines, result["console"])] for case, lines in result["lines"].items()}

    def _initrd(self, streams: int, *, asked: bool) -> None:
        """The image's initrd in the machine, with the script in place of the agent."""
        script = SCRIPT.replace("{work}", base64.b64encode(WORK.read_bytes()).decode())
        options = f"--repeats={REPEATS * (len(PARTS) if asked else 1)} --streams={streams}"
        script = script.replace("{options}", f"{options} --asked" if asked else options)
        archive = Archive()
        archive.file("vhpc-agent", script.encode(), 0o755)
        text = base64.b64encode(archive.to_bytes()).decode()
        blob = self._blob("initrd")
        self._lab.run("sh", "-ec", f"(cat {blob}; base64 -d) > {FOLDER}/initrd", stdin=text)

    def _blob(self, part: str) -> str:
        return f"/var/lib/vhpc/images/blobs/sha256/{self._manifest[part]['sha256']}"

    def _argv(self, guest: Guest, rank: int, interface: Interface) -> list[str]:
        argv = ["qemu-system-x86_64", *guest.options, "-nodefaults", "-no-user-config", "-display", "none"]
        argv += ["-no-reboot", "-serial", "stdio", "-name", f"bench{rank},debug-threads=on"]
        argv += ["-kernel", self._blob("kernel"), "-initrd", f"{FOLDER}/initrd"]
        root = f"file={self._blob('root')},if=none,id=root,format=raw,readonly=on"
        argv += ["-drive", root, "-device", "virtio-blk-pci,drive=root"]
        tap = f"tap,id=net,ifname={TAPS[rank]},script=no,downscript=no"
        tap += f",vhost={'on' if interface.vhost else 'off'}"
        device = f"virtio-net-pci,netdev=net,mac={MACS[rank]},romfile="
        if interface.queues > 1:
            # a vector for each queue, one for changes of the configuration and one for the control queue
            tap += f",queues={interface.queues}"
            device += f",mq=on,vectors={2 * interface.queues + 2}"
        return [*argv, "-netdev", tap, "-device", device]


if __name__ == "__main__":
    raise SystemExit(run())
