# SPDX-License-Identifier: Apache-2.0
"""The `vhpc` command and a real vhpcd: leases that were opened, taken, refused and given back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from controller_lab import HAVE_MUNGED, free_port, munged, stop, wait_for
from vhpc_command import Vhpc

from vhpc_slurm import __version__
from vhpc_slurm.cli.host.checks import Level, services
from vhpc_slurm.config import load
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import Allocation, ImageRef, JobRequest, Lease, NodeAllocation, Stage, Timeline
from vhpc_slurm.node.store.outbox import Acknowledgement

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.skipif(
    not HAVE_MUNGED or os.getuid() != 0, reason="needs munged, and root, whom vhpcd listens to"
)


@pytest.fixture
def client(vhpc: Vhpc) -> Iterator[ControllerClient]:
    """A vhpcd on this machine, and what hooks would ask it with."""
    config = vhpc.folder / "vhpc.toml"
    port = free_port()
    with munged() as daemon:
        keys = {
            "port": port,
            "listen": "127.0.0.1",
            "user": "root",
            "slurm_user": "root",
            "database": f"{vhpc.folder}/db/leases.sqlite",
            "slurm_bin": f"{vhpc.folder}/no-slurm",
        }
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        text = config.read_text().replace("port = 1\n", lines)
        text = text.replace(f"{vhpc.folder}/no-munge", str(daemon.socket))
        config.write_text(text)
        (vhpc.folder / "db").mkdir(mode=0o700)
        log = (vhpc.folder / "vhpcd.log").open("w")
        vhpcd = subprocess.Popen(
            [sys.executable, "-m", "vhpc_slurm.controller.server", "--config", str(config)],
            env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
            stderr=log,
            text=True,
        )
        asking = ControllerClient(load(config))

        def answers() -> bool:
            assert vhpcd.poll() is None, (vhpc.folder / "vhpcd.log").read_text()
            try:
                return bool(asking.status())
            except VhpcError:
                return False

        try:
            wait_for(answers, "vhpcd did not come up")
            yield asking
        finally:
            stop(vhpcd)
            log.close()


def open_lease(client: ControllerClient, job_id: int, image: str = "tiny:1", restart: int = 0) -> Lease:
    request = JobRequest(job_id, restart, 2, 2, "daemon", "/", ImageRef.parse(image))
    nodes = (NodeAllocation("n1", (2, 3), 1001), NodeAllocation("n2", (0,), 1001))
    return client.open_generation(request, Allocation(nodes))


def test_ps_shows_holders_and_reasons_of_refusals(vhpc: Vhpc, client: ControllerClient) -> None:
    lease = open_lease(client, 42)
    open_lease(client, 43, "absent:1")
    client.lease(42, 0, "n2", 1)
    head, first, second = vhpc("ps").splitlines()
    assert head.split() == [
        "JOB",
        "GENERATION",
        "USER",
        "IMAGE",
        "STATE",
        "NODES",
        "HELD",
        "ON",
        "AGE",
        "CPU",
        "PEAK",
        "FIGURES",
        "NOTE",
    ]
    assert first.split()[:7] == ["42", str(lease.generation), "daemon", "tiny:1", "booting", "n[1-2]", "n2"]
    assert second.split()[4] == "refused"
    assert "image absent:1 is unknown" in second
    client.ending(42, 0)
    client.acknowledge(Acknowledgement(lease.generation, "n2", clean=True))
    assert [row["job"] for row in vhpc.json("ps")] == [43]
    row = vhpc.json("ps", "--all")[0]
    assert (row["state"], row["taken"], row["acknowledged"]) == ("released", ["n2"], ["n2"])
    assert row["nodes"] == ["n1", "n2"]


def test_ps_shows_twelve_digits_of_a_digest(vhpc: Vhpc, client: ControllerClient) -> None:
    digest = "sha256:0123456789ab" + "c" * 52
    open_lease(client, 42, f"tiny:1@{digest}")
    for options in (("ps",), ("ps", "--all")):
        head, row = vhpc(*options).splitlines()
        assert row.split()[3] == "tiny:1@sha256:0123456789ab"
        assert head.index("STATE") - head.index("IMAGE") == len("tiny:1@sha256:0123456789ab") + 2
        assert vhpc.json(*options)[0]["image"] == f"tiny:1@{digest}"


@pytest.mark.promise("boot.time-limit")
def test_a_nodes_report_of_the_end_is_shown_to_the_user(vhpc: Vhpc, client: ControllerClient) -> None:
    lease = open_lease(client, 42)
    client.lease(42, 0, "n1", 1)
    client.ending(42, 0)
    said = "the job's time limit ended the boot"
    client.acknowledge(Acknowledgement(lease.generation, "n1", clean=True, note=f"told: {said}"))
    assert vhpc.json("ps", "--all")[0]["told"] == {"n1": said}
    assert vhpc("ps", "--all").splitlines()[1].endswith(f"  {said}")
    assert f"n1: {said}" in vhpc("report", "42")


def test_an_unclean_node_is_named_with_its_reason(vhpc: Vhpc, client: ControllerClient) -> None:
    lease = open_lease(client, 42)
    client.lease(42, 0, "n1", 1)
    client.acknowledge(Acknowledgement(lease.generation, "n1", clean=False, note="a VF stays"))
    assert vhpc("ps").splitlines()[1].endswith("n1: a VF stays")
    assert vhpc.json("ps")[0]["unclean"] == {"n1": "a VF stays"}


def test_the_plan_of_a_job_follows_from_its_lease(vhpc: Vhpc, client: ControllerClient) -> None:
    lease = open_lease(client, 42)
    plan = vhpc.json("plan", "42")
    assert plan["generation"] == str(lease.generation)
    # socket 0 of this machine has the cores (0,4) and (2,6): Slurm's ids 2-3 are 2 and 6
    assert [pin["os_cpu"] for pin in plan["guests"][0]["pins"]] == [2, 6]
    assert vhpc.json("plan", "42", "--node", "n2")["guests"][0]["pins"][0]["os_cpu"] == 0
    vhpc("plan", "42", "--node", "n3", code=1)
    assert "job 42 has no allocation on n3: its nodes are n[1-2]" in vhpc.error
    vhpc("plan", "41", code=1)
    assert "vhpcd has no job 41" in vhpc.error
    open_lease(client, 43, "absent:1")
    vhpc("plan", "43", code=1)
    assert "image absent:1 is unknown" in vhpc.error


def test_timelines_of_all_nodes_are_aligned_to_the_earliest(vhpc: Vhpc, client: ControllerClient) -> None:
    old = open_lease(client, 42)
    client.ending(42, 0)
    new = open_lease(client, 42, restart=1)
    for lease, node, offset in ((old, "n1", -500), (new, "n1", 0), (new, "n2", 2)):
        stages = (
            Stage("lease", 100.0 + offset, 100.5 + offset),
            Stage("start g0", 100.5 + offset, 101.0 + offset),
            Stage("setup g0", 101.0 + offset, 102.0 + offset),
        )
        client.report_timeline(Timeline(lease.generation, node, stages))
    lines = vhpc("timeline", "42").splitlines()
    assert lines[0] == f"job 42, run 0, generation {old.generation}"
    assert f"job 42, run 1, generation {new.generation}" in lines
    starts = [(line.split()[0], float(line.split()[2])) for line in lines if " lease " in line]
    assert starts == [("n1", 0.0), ("n1", 0.0), ("n2", 2.0)]
    assert lines[-2:] == ["n1: ready after 2.000 s", "n2: ready after 2.000 s"]
    found = vhpc.json("timeline", "42", "--node", "n2")
    (only,) = found["nodes"]
    assert [stage["took_s"] for stage in only["stages"]] == [0.5, 0.5, 1.0]
    assert [(run["restart"], run["timelines"]) for run in found["runs"]] == [(1, [only])]
    assert [run["restart"] for run in vhpc.json("timeline", "42")["runs"]] == [0, 1]


def test_before_the_end_of_a_job_its_timeline_is_on_its_nodes(vhpc: Vhpc, client: ControllerClient) -> None:
    open_lease(client, 42)
    vhpc("timeline", "42", code=1)
    assert "root sees it earlier on a node of the job: n[1-2]" in vhpc.error


def test_a_console_on_another_node_is_pointed_to(vhpc: Vhpc, client: ControllerClient) -> None:
    open_lease(client, 42)
    vhpc("console", "42", "n7", code=1)
    assert "job 42 has no guest on n7: its nodes are n[1-2]" in vhpc.error
    vhpc("console", "42", "n2", code=1)
    assert "run on n2: vhpc console 42" in vhpc.error


def test_doctor_sees_munge_and_vhpcd(vhpc: Vhpc, client: ControllerClient) -> None:
    config = load(vhpc.folder / "vhpc.toml")
    assert services.munge(config).level is Level.OK
    answer, clock = services.vhpcd(config, listener=True)
    assert (answer.level, answer.what) == (
        Level.OK,
        f"vhpcd {__version__} at 127.0.0.1:{config.controller.port}, database {vhpc.folder}/db/leases.sqlite",
    )
    assert clock.level is Level.OK
    found = {finding["check"]: finding for finding in vhpc.json("doctor", code=1)}
    assert found["slurm"]["level"] == "error"
    assert "slurm.Prolog" not in found
    assert found["vhpcd"]["level"] == "ok"


def test_doctor_without_munge_has_a_hint(vhpc: Vhpc) -> None:
    config = load(vhpc.folder / "vhpc.toml")
    assert services.munge(config).level is Level.ERROR
    (finding,) = services.vhpcd(config, listener=True)
    assert (finding.check, finding.level) == ("vhpcd", Level.ERROR)
