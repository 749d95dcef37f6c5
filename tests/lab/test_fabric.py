# SPDX-License-Identifier: Apache-2.0
"""Jobs on a fabric: ibsim and Debian's OpenSM on ctl, two adapters of it for each node.

smpquery reads the adapters' tables along known paths.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import NODES, VLAB, Job, Lab, vlab_status
from fabric_tables import ADAPTERS, FULL, LIMITED, NOBODY, by_node, holding, keys_of, nobody_has_a_key, tables
from hca_ports import hca_tree, played
from injection import WAITING, admin_comment, let_go, one_line, requeued, runs, said, start_soon, until
from variants import PRELUDE

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module", autouse=True)
def _fabric(lab: Lab) -> Iterator[None]:
    """The lab with a fabric, which it has only for these tests unless somebody wanted it."""
    del lab
    had = "opensm" in vlab_status()["hosts"]["ctl"]["units"]
    subprocess.run([VLAB, "up", "--fabric"], check=True, capture_output=True, timeout=120)
    yield
    if not had:
        subprocess.run([VLAB, "up", "--no-fabric"], check=True, capture_output=True, timeout=120)


def no_node_is_drained(lab: Lab) -> None:
    assert not [node for node in NODES if "DRAIN" in lab.node_state(node)[0]]


@pytest.mark.promise("fabric.exact")
def test_adapters_of_two_users_hold_exactly_their_keys(lab: Lab) -> None:
    assert tables(lab) == NOBODY
    alices = lab.submit(WAITING, "-N2")
    bobs = lab.submit(WAITING, "-N2", user="bob")
    runs(lab, alices)
    runs(lab, bobs)
    (first,), (second,) = keys_of(lab, alices), keys_of(lab, bobs)
    assert first != second
    both = tables(lab)
    assert by_node(both) == by_node(holding((alices, first, NODES), (bobs, second, NODES)))
    assert lab.vhpc("ctl", "fabric", "audit")["findings"] == []
    let_go(lab, bobs)
    assert bobs.wait() == "COMPLETED"
    # alice's adapters are as they were
    until(
        lambda: (
            tables(lab) == {guid: keys if first | FULL in keys else {LIMITED} for guid, keys in both.items()}
        ),
        "bob's key to be taken off the fabric",
    )
    let_go(lab, alices)
    assert alices.wait() == "COMPLETED"
    nobody_has_a_key(lab)


@pytest.mark.promise("fabric.cluster")
def test_adapters_of_a_clusters_members_share_a_key(lab: Lab) -> None:
    alpha = [lab.submit(WAITING, "-N1", "-w", node, "--vhpc-cluster=alpha") for node in ("n1", "n2")]
    other = lab.submit(WAITING, "-N1", "-w", "n2", "--vhpc-cluster=alpha", user="bob")
    for job in (*alpha, other):
        runs(lab, job)
    (key,), (others,) = set.union(*(keys_of(lab, job) for job in alpha)), keys_of(lab, other)
    alpha.append(lab.submit(WAITING, "-N1", "-w", "n1", "--vhpc-cluster=alpha"))
    runs(lab, alpha[2])
    assert keys_of(lab, alpha[2]) == {key} != {others}
    held = [
        (alpha[0], key, ("n1",)),
        (alpha[1], key, ("n2",)),
        (alpha[2], key, ("n1",)),
        (other, others, ("n2",)),
    ]
    assert by_node(tables(lab)) == by_node(holding(*held))
    let_go(lab, alpha[0])
    until(
        lambda: by_node(tables(lab)) == by_node(holding(*held[1:])), "the key to leave one adapter of n1", 60
    )
    assert lab.vhpc("ctl", "fabric", "audit")["findings"] == []
    for job in (*alpha, other):
        let_go(lab, job)
        assert job.wait() == "COMPLETED"
    nobody_has_a_key(lab)


def cannot_be_applied(lab: Lab) -> Job:
    """A job that was requeued because OpenSM did not run."""
    lab.service("ctl", "stop", "opensm")
    try:
        job = lab.submit("echo up", "-N2")
        until(lambda: requeued(job), "the job to be requeued")
        show = job.show()
        assert (show["JobState"], show["Restarts"]) == ("PENDING", "1")
        line = admin_comment(lab, job)
        assert line.startswith("vhpc: OpenSM does not run: "), line
        assert tables(lab) == NOBODY
        no_node_is_drained(lab)
    finally:
        lab.service("ctl", "start", "opensm")
    return job


@pytest.mark.promise("fabric.requeue")
def test_a_job_whose_key_cannot_be_applied_is_requeued(lab: Lab) -> None:
    job = cannot_be_applied(lab)
    lab.run("login", "scancel", str(job.id), user="alice")
    assert job.wait() == "CANCELLED"
    lab.service("ctl", "restart", "vhpcd")  # which would look again within the minute
    nobody_has_a_key(lab)


@pytest.mark.promise("fabric.requeue")
@pytest.mark.slow
def test_a_job_whose_key_could_not_be_applied_runs_when_it_can(lab: Lab) -> None:
    job = cannot_be_applied(lab)
    start_soon(lab, job.id)
    assert job.wait() == "COMPLETED"
    assert said(lab, job) == "up\n"
    nobody_has_a_key(lab)


@contextmanager
def opensm_hangs(lab: Lab) -> Iterator[None]:
    """OpenSM does not answer for a while, which a start of a job waits for."""
    lab.run("ctl", "pkill", "-STOP", "-x", "opensm")
    try:
        yield
    finally:
        lab.run("ctl", "pkill", "-CONT", "-x", "opensm")


def applying(lab: Lab, job: Job) -> None:
    """Wait until the job's key is in the file, and OpenSM has yet to read it."""
    until(lambda: f"{job.id}." in str(lab.leases()), f"a lease of job {job.id}", 30)
    (key,) = keys_of(lab, job)
    file = ("grep", "-q", f"key_{key:04x}", "/etc/opensm/partitions.conf")
    until(lambda: lab.run("ctl", *file, check=False).code == 0, "the key to be in the file", 20)


@pytest.mark.promise("fabric.killed-start")
@pytest.mark.slow
def test_a_job_starts_though_vhpcd_is_killed_meanwhile(lab: Lab) -> None:
    with opensm_hangs(lab):
        job = lab.submit("echo up", "-N2")
        applying(lab, job)
        lab.service("ctl", "kill", "vhpcd")
        assert tables(lab) == NOBODY
    lab.service("ctl", "start", "vhpcd")
    until(lambda: job.show()["JobState"] != "CONFIGURING", "PrologSlurmctld to end", 60)
    if job.show()["JobState"] == "PENDING":
        start_soon(lab, job.id)
    assert job.wait() == "COMPLETED"
    assert said(lab, job) == "up\n"
    nobody_has_a_key(lab)
    no_node_is_drained(lab)


@pytest.mark.promise("fabric.killed-start")
@pytest.mark.slow
def test_a_job_cancelled_while_its_key_is_applied_leaves_none(lab: Lab) -> None:
    with opensm_hangs(lab):
        job = lab.submit("echo up", "-N2")
        applying(lab, job)
        lab.run("login", "scancel", str(job.id), user="alice")
    assert job.wait() == "CANCELLED"
    nobody_has_a_key(lab)
    no_node_is_drained(lab)


# --- a fabric that vhpcd cannot close -------------------------------------------------------------

SWIFT = "open_deadline_s = 3\naudit_interval_s = 1\napply_timeout_s = 2\n"
HEALTH_CHECK_S = 60  # HealthCheckInterval of the lab
ROGUE = "/run/opensm/readers/rogue"


@contextmanager
def configured(lab: Lab, lines: str) -> Iterator[None]:
    """vhpcd with more in its configuration, whose last section is the fabric's."""
    lab.run("ctl", "sh", "-c", "cat >>/etc/vhpc/vhpc.toml", stdin=lines)
    lab.service("ctl", "restart", "vhpcd")
    try:
        yield
    finally:
        subprocess.run([VLAB, "up"], check=True, capture_output=True, timeout=120)


@contextmanager
def rogue_opensm(lab: Lab) -> Iterator[None]:
    """Another OpenSM that vhpcd does not know replaces the first one and opens the fabric."""
    script = (
        f"mkdir -p {ROGUE}; cd {ROGUE}; export OSM_CACHE_DIR=. OSM_TMP_DIR=. SIM_HOST=SM"
        " LD_PRELOAD=/usr/lib/x86_64-linux-gnu/umad2sim/libumad2sim.so\n"
        "echo 'Default=0x7fff, ipoib : ALL=full, SELF=full ;' >partitions.conf\n"
        "setsid opensm -F /etc/opensm/opensm.conf -P partitions.conf -f log >out 2>&1 </dev/null &\n"
        "echo $! >pid\n"
    )
    lab.service("ctl", "stop", "opensm")
    try:
        lab.run("ctl", "sh", "-c", script)
        until(lambda: all(keys == {0xFFFF} for keys in tables(lab).values()), "an open fabric", 30)
        yield
    finally:
        lab.run(
            "ctl", "sh", "-c", f"read pid <{ROGUE}/pid; kill $pid; timeout 20 tail --pid=$pid -f /dev/null"
        )
        lab.service("ctl", "start", "opensm")


def isolation(lab: Lab) -> list[str]:
    """How bad isolation is, says `vhpc doctor` on a node."""
    findings = lab.vhpc("n1", "doctor", check=False)
    return [one["level"] for one in findings if one["check"] == "fabric.open"]


@pytest.mark.promise("fabric.open")
@pytest.mark.slow
def test_guests_with_a_key_end_when_nothing_closes_the_fabric(lab: Lab) -> None:
    with configured(lab, SWIFT):
        alices = lab.submit(WAITING, "-N2")
        bobs = lab.submit(WAITING, "-N1", "-w", "n1", user="bob")
        plain = lab.submit(WAITING, "-N1", "-w", "n2", user="bob", image=None)
        for job in (alices, bobs, plain):
            runs(lab, job)
        assert isolation(lab) == []
        with rogue_opensm(lab):
            until(lambda: isolation(lab) == ["error"], "the deadline", 30)
            late = lab.submit("echo up", "-N1", "-w", "n1", user="bob")
            for job in (alices, bobs):
                assert job.wait(timeout=HEALTH_CHECK_S + 30) == "FAILED", "within the stated time"
                assert "done" not in job.output()
                one_line(
                    job,
                    rf"^vhpc: the guests of job {job.id} were ended on n1: the fabric does not keep jobs "
                    r"apart: port 0x[0-9a-f]{16} has the keys 0xffff, and should have ",
                )
            for node in NODES:
                assert lab.run(node, "virsh", "-q", "list", "--all", "--name").out.strip() == ""
            found = lab.vhpc("ctl", "fabric", "audit", check=False)["findings"]
            assert {int(one["port_guid"], 16) for one in found if one["port_guid"]} == set(NOBODY)
            until(lambda: admin_comment(lab, late), "the late job to be requeued", 60)
            assert admin_comment(lab, late).startswith("vhpc: the fabric does not keep jobs apart: port 0x")
            assert plain.show()["JobState"] == "RUNNING"
        until(lambda: isolation(lab) == [], "the fabric to be closed again", 60)
        start_soon(lab, late.id)
        assert late.wait() == "COMPLETED"
        assert said(lab, late) == "up\n"
        let_go(lab, plain)
        assert plain.wait() == "COMPLETED"
        nobody_has_a_key(lab)
        no_node_is_drained(lab)


# --- tables behind OpenSM's back ------------------------------------------------------------------

SMP_SET = (Path(__file__).parents[1] / "unit/support/smp_set.py").read_text()


def write_table(lab: Lab, guid: int, *entries: int) -> None:
    """Change an adapter's table by a management packet, as whoever opens umad could."""
    place = 1 + [one for guids in ADAPTERS.values() for one in guids].index(guid)
    words = f"0,1,{place} 0 {' '.join(f'{entry:x}' for entry in entries)}"
    script = (
        "cd /run/opensm/readers && SIM_HOST=SM"
        f" LD_PRELOAD=/usr/lib/x86_64-linux-gnu/umad2sim/libumad2sim.so /opt/vhpc/bin/python - {words}"
    )
    lab.run("ctl", "sh", "-c", script, stdin=SMP_SET)


def port_of(lab: Lab, job: Job, node: str) -> tuple[int, int, int]:
    """The job's key, its port on a node, and the other port there."""
    (key,) = keys_of(lab, job)
    found = tables(lab)
    mine = next(guid for guid in ADAPTERS[node] if key | FULL in found[guid])
    return key, mine, next(guid for guid in ADAPTERS[node] if guid != mine)


@pytest.mark.promise("fabric.repair")
def test_a_port_that_gains_or_loses_a_key_is_put_right(
    lab: Lab,
) -> None:
    job = lab.submit(WAITING, "-N2")
    runs(lab, job)
    key, mine, other = port_of(lab, job, "n1")
    right = tables(lab)
    for guid, entries in ((other, (LIMITED, key | FULL)), (mine, (LIMITED,)), (other, (0xFFFF,))):
        write_table(lab, guid, *entries)
        until(lambda: tables(lab) == right, f"{guid:#x} to have its own keys again")
    until(lambda: lab.vhpc("ctl", "fabric", "audit")["findings"] == [], "a clean audit")
    assert job.show()["JobState"] == "RUNNING"
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    nobody_has_a_key(lab)


@pytest.mark.promise("fabric.repair")
@pytest.mark.slow
def test_a_key_that_cannot_be_released_holds_up_no_other_job(lab: Lab) -> None:
    with configured(lab, SWIFT):
        alices = lab.submit(WAITING, "-N1", "-w", "n1")
        bobs = lab.submit(WAITING, "-N1", "-w", "n1", user="bob")
        for job in (alices, bobs):
            runs(lab, job)
        _, mine, _ = port_of(lab, alices, "n1")
        lab.service("ctl", "stop", "opensm")  # so that nothing restores it
        try:
            write_table(lab, mine, LIMITED)
            assert alices.wait(timeout=HEALTH_CHECK_S + 60) == "FAILED"
            one_line(
                alices,
                rf"^vhpc: the guests of job {alices.id} were ended on n1: the job's partition key was "
                rf"removed from its port and cannot be restored: port {mine:#018x} has the keys 0x7fff, and ",
            )
            assert bobs.show()["JobState"] == "RUNNING"
            no_node_is_drained(lab)
        finally:
            lab.service("ctl", "start", "opensm")
        let_go(lab, bobs)
        assert bobs.wait() == "COMPLETED"
        nobody_has_a_key(lab)


# --- guests that have ports --------------------------------------------------------------------

HCA_IMAGE = "has-hca"
OPTION = "vhpc.agent.sysfs=/hca/sys"


@pytest.fixture(scope="module")
def _ports_in_guests(lab: Lab) -> Iterator[None]:
    """Leases say that guests have the ports; an image that looks for them where each node lays out a tree."""
    publish = (
        "base = load('debian-minimal')\n"
        f"publish('{HCA_IMAGE}', base | {{'cmdline': base['cmdline'] + ' {OPTION}'}})\n"
    )
    lab.run("ctl", "python3", "-", stdin=PRELUDE + publish)
    with configured(lab, 'in_guests = true\nipoib_network = "10.128.0.0/12"\n'):
        yield
        lab.run("ctl", "rm", "-r", f"/shared/vhpc/catalog/names/{HCA_IMAGE}")


@pytest.mark.promise("fabric.address", "fabric.environment")
@pytest.mark.usefixtures("_ports_in_guests")
def test_a_guest_waits_for_its_key_and_names_its_ports(lab: Lab) -> None:
    trees = {(hca_tree("n1"), "mlx5_0"): ADAPTERS["n1"][0], (hca_tree("n2"), "ibp5s0"): ADAPTERS["n2"][0]}
    show = "echo $(hostname) $VHPC_PKEY $UCX_IB_PKEY $OMPI_MCA_btl_openib_pkey $NCCL_IB_PKEY $NCCL_IB_HCA"
    with played(lab, trees):
        job = lab.submit(
            f"{show}\nexport UCX_NET_DEVICES=all\nsrun -l sh -c '{show} $UCX_NET_DEVICES'\n"
            f"srun -l ip -o -4 address show dev lo\ngetent hosts n1 n2\n{WAITING}",
            "-N2",
            image=HCA_IMAGE,
        )
        runs(lab, job)
        (key,) = keys_of(lab, job)
        let_go(lab, job)
        assert job.wait() == "COMPLETED"
    lines = job.output().splitlines()
    words = f"0x{key:04x} 0x{key:04x} 0x{key:04x} 0"
    assert lines[0] == f"n1 {words} =mlx5_0:1"
    assert sorted(lines[1:3]) == [f"0: n1 {words} =mlx5_0:1 all", f"1: n2 {words} =ibp5s0:1 all"]
    assert sorted(re.findall(r"^(\d): .* inet (\S+) ", job.output(), re.M)) == [
        ("0", "10.128.0.1/12"),
        ("1", "10.128.0.2/12"),
    ]
    assert [line.split() for line in lines if line.startswith("10.")] == [
        ["10.128.0.1", "n1"],
        ["10.128.0.2", "n2"],
    ]
    nobody_has_a_key(lab)


@pytest.mark.promise("fabric.guest-ports")
@pytest.mark.usefixtures("_ports_in_guests")
def test_a_guest_with_a_foreign_key_fails_its_job(lab: Lab) -> None:
    tree = hca_tree("n1")
    tree.add("mlx5_0", ADAPTERS["n1"][0], (0x7FFF, 0xA001))
    job = lab.finish("echo up", "-N1", "-w", "n1", image=HCA_IMAGE)
    tree.clear()
    assert job.show()["JobState"] == "FAILED"
    assert "up\n" not in job.output()
    one_line(
        job,
        r"the job's InfiniBand is not isolated on n1: its guest sees: "
        r"mlx5_0 port 1 has the keys 0x7fff 0xa001, and should have 0x9[0-9a-f]{3} 0x7fff "
        r"\(nothing was started; tell your operator\)",
    )
    no_node_is_drained(lab)
    nobody_has_a_key(lab)
