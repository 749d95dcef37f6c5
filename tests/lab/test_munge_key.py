# SPDX-License-Identifier: Apache-2.0
"""munge's key is replaced as docs/install.md says, while jobs run, end and wait to start."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator

import pytest
from cluster import Lab, vlab_status
from injection import WAITING, let_go, output_meets, runs, said, settled, until

pytestmark = [pytest.mark.lab, pytest.mark.slow]

KEY = "/etc/munge/munge.key"
PLACE = f"umask 077; base64 -d > {KEY}.new && chmod 400 {KEY}.new && chown munge: {KEY}.new"
PARTITIONS = ("main", "spare", "urgent")
SIZE = ("-n1", "--mem=600")


class Site:
    """Actions of an operator; the lab's own service manager replaces systemctl."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        hosts = set(vlab_status()["hosts"])
        self.nodes = sorted(set(lab.nodes))
        self.controllers = sorted(hosts - {"login"} - set(self.nodes))

    def partitions(self, state: str) -> None:
        for name in PARTITIONS:
            self._lab.run("ctl", "scontrol", "update", f"PartitionName={name}", f"State={state}")

    def place(self, key: str) -> None:
        for host in (*self.nodes, *self.controllers, "login"):
            self._lab.run(host, "sh", "-c", PLACE, stdin=key)

    def stop_on_nodes(self) -> None:
        for node in self.nodes:
            self._lab.service(node, "stop", "munged")

    def use(self, *hosts: str) -> None:
        for host in hosts:
            self._lab.run(host, "mv", f"{KEY}.new", KEY)
            self._lab.service(host, "restart", "munged")


@pytest.fixture
def site(lab: Lab) -> Iterator[Site]:
    """All hosts have a new key next to the old one, and no job starts; afterwards all is as before."""
    site, old = Site(lab), lab.run("ctl", "base64", KEY).out
    site.place(base64.b64encode(os.urandom(128)).decode())
    yield site
    site.place(old)
    site.use(*site.controllers, *site.nodes, "login")
    site.partitions("UP")


@pytest.mark.promise("keys.renew")
def test_a_munge_key_is_replaced_while_jobs_run_and_end(lab: Lab, site: Site) -> None:
    """A job continues, one ends while its node has no munged, and one that is submitted waits for the end."""
    goes_on, ends = (lab.submit(WAITING, *SIZE, "-w", node) for node in ("n2", "n1"))
    for job in (goes_on, ends):
        runs(lab, job)
    site.partitions("DOWN")
    starts = lab.submit("hostname", *SIZE, "-w", "n1")
    site.stop_on_nodes()
    site.use(*site.controllers)
    for host, hint in (("n1", "is munged running?"), ("login", "the same munge.key")):
        told = lab.run(host, "vhpc", "ps", check=False)
        assert told.code != 0
        assert hint in told.err
    lab.run("n1", "/usr/libexec/vhpc/healthcheck", check=False)
    let_go(lab, ends)
    output_meets(ends, lambda text: text.endswith("done\n"), "the end of the script")
    assert [job.show()["JobState"] for job in (goes_on, ends, starts)] == ["RUNNING", "RUNNING", "PENDING"]
    assert not any("DRAIN" in lab.node_state(node)[0] for node in site.nodes)
    site.use(*site.nodes, "login")
    assert lab.run("login", "vhpc", "ps").code == 0
    assert ends.wait(timeout=300) == "COMPLETED", ends.told()
    until(lambda: "NOT_RESPONDING" not in lab.node_state("n1")[0], "n1 to answer again", 300)
    assert goes_on.show()["JobState"] == "RUNNING"
    site.partitions("UP")
    assert starts.wait(timeout=300) == "COMPLETED", starts.told()
    assert starts.output() == "n1\n"
    let_go(lab, goes_on)
    assert goes_on.wait(timeout=300) == "COMPLETED", goes_on.told()
    assert said(lab, goes_on).endswith("done\n")
    assert [job.show()["Restarts"] for job in (goes_on, ends, starts)] == ["0", "0", "0"]
    settled(lab, 300)
    assert lab.leases() == []
