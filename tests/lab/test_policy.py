# SPDX-License-Identifier: Apache-2.0
"""A policy of the site: jobs of a partition need a signed image, and see and reach what its rule permits."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cluster import Lab
from injection import one_line

pytestmark = pytest.mark.lab

TOML, SIGNERS, CATALOG = "/etc/vhpc/vhpc.toml", "/etc/vhpc/allowed_signers", "/shared/vhpc/catalog"
KEY, TAG = "/root/policy-key", "debian-minimal:policy"
EXPIRED = "'valid-before=\"20200101\"'"
RULE = """
[[policy]]
name = "signed in spare"
partitions = ["spare"]
images = ["debian-*"]
signers = ["ops@hpc.example"]
networks = ["none"]
shares = ["work_dir"]
"""


@pytest.fixture(scope="module")
def rule(lab: Lab) -> Iterator[None]:
    """All hosts have a rule for the partition spare; the key of ops is on ctl."""
    make = f"rm -f {KEY}*; ssh-keygen -q -t ed25519 -N '' -f {KEY}; echo ops@hpc.example $(cat {KEY}.pub)"
    signers = lab.run("ctl", "sh", "-ec", make).out
    hosts = ("ctl", "login", "n1", "n2")
    try:
        for host in hosts:
            lab.run(host, "cp", "-p", TOML, f"{TOML}.before")
            lab.run(host, "sh", "-ec", f"cat >{SIGNERS}", stdin=signers)
            lab.run(host, "sed", "-i", f's|^\\[images\\]$|&\\nallowed_signers = "{SIGNERS}"|', TOML)
            lab.run(host, "sh", "-ec", f"cat >>{TOML}", stdin=RULE)
        lab.service("ctl", "restart", "vhpcd")
        lab.run("ctl", "vhpc", "image", "tag", "debian-minimal", TAG)
        yield
    finally:
        lab.run("ctl", "vhpc", "image", "rm", TAG, check=False)
        lab.run("ctl", "sh", "-c", f"rm -rf {CATALOG}/signatures {KEY}*")
        for host in hosts:
            lab.run(host, "sh", "-ec", f"mv -f {TOML}.before {TOML}; rm -f {SIGNERS}", check=False)
        lab.service("ctl", "restart", "vhpcd")


@pytest.mark.usefixtures("rule")
def test_an_unsigned_image_is_refused_in_its_partition_only(lab: Lab) -> None:
    refused = lab.submit("hostname", "-p", "spare", f"--vhpc-image={TAG}")
    assert refused.wait("FAILED") == "FAILED"
    one_line(
        refused,
        f"^vhpc: .*policy rule 'signed in spare' does not permit image {TAG}: the image needs a signature",
    )
    assert "policy rule" in lab.run("ctl", "sacct", "-nXP", "-o", "admincomment", "-j", str(refused.id)).out
    explained = lab.run(
        "login",
        "vhpc",
        "image",
        "verify",
        TAG,
        "--for",
        "alice",
        "--partition",
        "spare",
        user="alice",
        check=False,
    )
    assert explained.code == 1
    assert "policy rule 'signed in spare'" in explained.out
    free = lab.submit("hostname", "-w", "n1", f"--vhpc-image={TAG}")
    assert free.wait("COMPLETED", "FAILED") == "COMPLETED"


@pytest.mark.usefixtures("rule")
def test_a_signed_image_runs_with_what_the_rule_permits(lab: Lab) -> None:
    signed = lab.run("ctl", "vhpc", "image", "sign", TAG, "--key", KEY, "--json")
    assert json.loads(signed.out)["added"] is True
    verify = ("vhpc", "image", "verify", TAG, "--partition", "spare", "--json")
    (row,) = json.loads(lab.run("login", *verify, user="alice").out)
    assert (row["signers"], row["problem"]) == (["ops@hpc.example"], None)
    script = "for d in ~ /scratch; do findmnt -no FSTYPE -T $d; done; ip -o link | grep -vc ' lo:'"
    job = lab.submit(
        script,
        "-p",
        "spare",
        "-w",
        "n1",
        "-D",
        "/scratch",
        "-o",
        "/scratch/policy.out",
        f"--vhpc-image={TAG}",
    )
    assert job.wait("COMPLETED", "FAILED") in {"COMPLETED", "FAILED"}
    seen = lab.run("login", "cat", "/scratch/policy.out", user="alice").out
    lab.run("login", "rm", "-f", "/scratch/policy.out")
    assert seen.splitlines() == ["overlay", "virtiofs", "0"], "no home, the working directory, no network"
    network = lab.submit("hostname", "-p", "spare", f"--vhpc-image={TAG}", "--vhpc-network=job")
    assert network.wait("FAILED") == "FAILED"
    one_line(network, "^vhpc: .*rule 'signed in spare' refuses the job: it does not permit network job")
    lab.run("ctl", "sh", "-ec", f"echo ops@hpc.example {EXPIRED} $(cat {KEY}.pub) >{SIGNERS}")
    expired = lab.submit("hostname", "-p", "spare", f"--vhpc-image={TAG}")
    assert expired.wait("FAILED") == "FAILED"
    one_line(expired, "key has expired")
