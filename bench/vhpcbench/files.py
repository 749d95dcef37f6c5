# SPDX-License-Identifier: Apache-2.0
"""File operations in a job's guest, against a plain guest, and the host.

All have the same home; the job's guest also has copies of the files in folders of
shares.cache_always and shares.snapshots. The plain guest has the same kernel, machine type, CPUs
and memory; QEMU and its virtiofsd (default options, started as the user) run on
the CPUs of the job's guest. Per operation: milliseconds (write and read: per
MiB; import: 551 modules) and requests to virtiofsd.

Targets: at most 1.1 times the plain guest in each; half of the requests of
open-read-close; an import of at most 3 times that from the guest's own root, and
of at most 1.1 times from a snapshot.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vhpcbench import labconfig
from vhpcbench.common import NODE, USER, BenchError, Lab, Report, main
from vhpcbench.plain import Plain, facts
from vhpcbench.targets import at_most

WORK = Path(__file__).with_name("filework.py")
ON_NODE = Path(__file__).with_name("files_plain.py")
TREE, DISK = "/shared/bench-files", "/shared/bench-snapshot"
HOME = f"/home/{USER}"
FILES = f"{HOME}/bench-files"
MARKER = "bench-files-result:"
OWN = "import from the own root"
SLOWEST = at_most(1.1, "time of the slowest operation to the plain guest's")
HALF = at_most(0.5, "requests of open-read-close to the plain guest's")
IMPORT = at_most(3, "import to that from the own root")
SNAPSHOT = at_most(1.1, "import from a snapshot to that from the own root")
TARGETS = (SLOWEST, HALF, IMPORT, SNAPSHOT)
CASES = {"guest": FILES, "cached": f"{TREE}/bench-files", "snapshot": f"{DISK}/bench-files"}
"""Folders in the guest of a job."""
# the init of the plain guest: the image's root is read-only below the agent's overlay
SCRIPT = f"""#!/bin/sh
PATH=/usr/bin:/usr/sbin:/bin:/sbin
mount -t proc proc /proc; mount -t tmpfs tmpfs /tmp
mkdir -p {HOME} || {{ mount -t tmpfs tmpfs /home; mkdir {HOME}; }}
mount -t virtiofs home {HOME} && echo {MARKER} $(python3 {HOME}/{WORK.name} run {FILES} /tmp)
sleep 1000
"""
Result = dict[str, dict[str, float]]


def run() -> int:
    """Entry point."""
    return main("files", __doc__ or "", 2, bench)


def bench(args: argparse.Namespace) -> Report:
    """Run rounds of a job, a plain guest and the host."""
    lab = Lab()
    report = Report("files")
    results: dict[str, list[Result]] = defaultdict(list)
    with _prepared(lab):
        plain = PlainFiles(lab, args.image, facts(lab, args.image), SCRIPT)
        try:
            for _ in range(args.rounds):
                for name, found in zip(CASES, _job(lab, args.image), strict=True):
                    results[name].append(found)
                results["plain"].append(plain.files())
                results["host"].append(_host(lab))
        finally:
            plain.close()
    _tell(report, results)
    return report


@contextmanager
def _prepared(lab: Lab) -> Iterator[None]:
    """The files in the home, in a folder that guests may cache, and in one with a snapshot."""
    both = f'["{TREE}", "{DISK}"]'
    keys = f'site = {both}\\nread_only = {both}\\ncache_always = ["{TREE}"]\\nsnapshots = ["{DISK}"]'
    with ExitStack() as undo:
        undo.callback(lab.run, "login", "rm", "-rf", FILES, WORK.name, user=USER)
        lab.home(WORK.name).write_bytes(WORK.read_bytes())
        lab.run("login", "python3", WORK.name, "prepare", FILES, user=USER)
        undo.callback(lab.run, "ctl", "rm", "-rf", TREE, DISK, "/shared/vhpc/catalog/snapshots")
        for folder in (TREE, DISK):
            lab.run("ctl", "python3", "-c", WORK.read_text(), "prepare", f"{folder}/bench-files")
        undo.enter_context(labconfig.changed(lab, (NODE, "ctl"), "sed", "-i", f"s|^site = .*|{keys}|"))
        lab.run("ctl", "vhpc", "share", "snapshot", DISK)
        yield


def _job(lab: Lab, image: str) -> list[Result]:
    """Results of one job, in each of its folders."""
    out = "bench-files.out"
    lines = [f"python3 ~/{WORK.name} run {folder} /var/tmp" for folder in CASES.values()]
    lab.submit("\n".join(lines), f"--vhpc-image={image}", "-o", out, wait=True)
    said = lab.home(out).read_text()
    lab.home(out).unlink()
    lab.quiet()
    try:
        return [json.loads(line) for line in said.splitlines()]
    except ValueError as err:
        raise BenchError(f"the job printed: {said[:300]}") from err


def _host(lab: Lab) -> Result:
    """Results on the node, without a guest."""
    found: Result = json.loads(lab.run(NODE, "python3", WORK.name, "run", FILES, "/tmp", user=USER))  # noqa: S108 - of a lab host
    return found


class PlainFiles(Plain):
    """Plain guests with a plain virtiofsd for the user's home."""

    def files(self) -> Result:
        """Results of one guest.

        Raises:
            BenchError: the guest printed none.
        """
        path = f"{HOME}/bench-fs.sock"
        ids = [self._lab.run(NODE, "id", flag, USER).strip() for flag in ("-u", "-g")]
        daemon = ["setpriv", f"--reuid={ids[0]}", f"--regid={ids[1]}", "--clear-groups"]
        daemon += ["/usr/libexec/virtiofsd", f"--socket-path={path}", f"--shared-dir={HOME}"]
        order: dict[str, Any] = {
            "argv": self._argv(port=False) + _device(path, self._guest.memory_mib),
            "daemons": [[*daemon, "--sandbox=none", "--log-level=error"]],
            "sockets": [path],
            "cpus": self._guest.cpus,
            "marker": MARKER,
        }
        said = self._lab.run(
            NODE, "python3", "-I", "-c", ON_NODE.read_text(), json.dumps(order), timeout_s=500
        )
        self._lab.run(NODE, "rm", "-f", path, f"{path}.pid")
        result = json.loads(said)
        try:
            found: Result = json.loads(result["line"])
        except ValueError as err:
            raise BenchError(f"the plain guest has no result; its console: {result['console']}") from err
        return found


def _device(path: str, memory_mib: int) -> list[str]:
    memory = f"memory-backend-memfd,id=mem,size={memory_mib}M,share=on"
    argv = ["-object", memory, "-numa", "node,memdev=mem", "-chardev", f"socket,id=fs,path={path}"]
    return [*argv, "-device", "vhost-user-fs-pci,chardev=fs,tag=home"]


def _tell(report: Report, results: dict[str, list[Result]]) -> None:
    """Series of each operation, their ratios to the plain guest's, and the targets."""
    ratios = {}
    for name in results["guest"][0]["ms"]:
        for who, rounds in results.items():
            if name in rounds[0]["ms"]:
                report.add(f"{name}: {who}", "ms", [one["ms"][name] for one in rounds])
                asked = [one["requests"][name] for one in rounds]
                if any(asked):
                    report.add(f"    requests, {name}: {who}", "", asked)
        pairs = zip(results["guest"], results["plain"], strict=True)
        ratios[name] = statistics.median(ours["ms"][name] / theirs["ms"][name] for ours, theirs in pairs)
        report.ratios[f"{name}, guest to plain"] = ratios[name]
    halves, imports = [], []
    for who in ("guest", "cached"):
        for name in ("import", "import again"):
            own = statistics.median(one["ms"][name] / one["ms"][OWN] for one in results[who])
            report.ratios[f"{name} to that from the own root, {who}"] = own
            imports.append(own)
        for name in ("open-read-close", "open-read-close again"):
            part = statistics.median(
                ours["requests"][name] / theirs["requests"][name]
                for ours, theirs in zip(results[who], results["plain"], strict=True)
            )
            report.ratios[f"requests of {name}, {who}"] = part
            halves.append(part)
    report.judge(SLOWEST, max(ratio for name, ratio in ratios.items() if name != OWN))
    report.judge(HALF, max(halves))
    report.judge(IMPORT, max(imports))
    disk = [one["ms"]["import"] / one["ms"][OWN] for one in results["snapshot"]]
    report.ratios["import to that from the own root, snapshot"] = statistics.median(disk)
    report.judge(SNAPSHOT, statistics.median(disk))
