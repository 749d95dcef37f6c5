# SPDX-License-Identifier: Apache-2.0
"""A policy of the site: jobs of a partition need a signed image, and see and reach what its rule permits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

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

[[policy]]
name = "two small guests"
users = ["bob"]
max_disk_mib = 512
max_guests_per_node = 2

[[policy]]
name = "defaults"
users = ["bob"]
default_disk_mib = 128
default_guests_per_node = 2
default_batch = "host"
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


@pytest.mark.promise("policy.rule")
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


@pytest.mark.promise("policy.rule")
@pytest.mark.usefixtures("rule")
def test_a_signed_image_runs_with_the_permitted_options(lab: Lab) -> None:
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


@pytest.mark.promise("policy.node")
@pytest.mark.usefixtures("rule")
def test_a_node_refuses_an_image_that_only_vhpcd_permits(lab: Lab) -> None:
    """The signer counts on vhpcd's host; the file of n1 has no key. n1 stays in service."""
    signer = f"echo ops@hpc.example $(cat {KEY}.pub)"
    lab.run("ctl", "sh", "-ec", f"{signer} >{SIGNERS}")
    lab.run("ctl", "vhpc", "image", "sign", TAG, "--key", KEY)
    lab.run("n1", "sh", "-ec", f"cp -p {SIGNERS} {SIGNERS}.before; echo >{SIGNERS}")
    try:
        job = lab.submit("hostname", "-p", "spare", "-w", "n1", f"--vhpc-image={TAG}")
        assert job.wait("FAILED", "COMPLETED") == "FAILED"
        one_line(job, f"^vhpc: .*'signed in spare' does not permit image {TAG} on n1: .*signers of n1 differ")
        lab.quiet()
        lab.all_idle()  # a wrong file drains no node
        found = [one["what"] for one in lab.vhpc("ctl", "doctor", check=False) if one["check"] == "alarms"]
        assert any("policy rule 'signed in spare' of the node refuses" in what for what in found), found
        lab.run("n1", "rm", SIGNERS)
        said = [
            one["what"] for one in lab.vhpc("n1", "doctor", check=False) if one["check"] == "policy.signers"
        ]
        assert said == [f"images.allowed_signers = {SIGNERS} cannot be read: No such file or directory"]
    finally:
        lab.run("n1", "mv", "-f", f"{SIGNERS}.before", SIGNERS)
    same = lab.submit("hostname", "-p", "spare", "-w", "n1", f"--vhpc-image={TAG}")
    assert same.wait("COMPLETED", "FAILED") == "COMPLETED"


@pytest.mark.usefixtures("rule")
def test_a_job_gets_limits_and_defaults_of_rules(lab: Lab) -> None:
    refused = lab.submit("hostname", "-w", "n1", "--vhpc-disk=513", user="bob")
    assert refused.wait("FAILED") == "FAILED"
    one_line(refused, "rule 'two small guests' refuses the job: it permits disks up to 512 MiB")
    script = "hostname; srun -n2 hostname"
    job = lab.finish(script, "-n2", "-w", "n1", "--mem=1400", user="bob")
    assert set(job.output().split()) >= {"n1", "n1-g0", "n1-g1"}, "two guests, and the script on the node"
    report = lab.vhpc("ctl", "report", str(job.id))
    named = {one["option"]: one["rule"] for one in report["defaults"]}
    assert named == dict.fromkeys(("disk_mib", "batch", "guests_per_node"), "defaults")
    assert [guest["disk_mib"] for guest in report["nodes"][0]["guests"]] == [128, 128]
    own = lab.finish("hostname", "-n2", "-w", "n1", "--vhpc-guests-per-node=1", user="bob")
    assert lab.vhpc("ctl", "report", str(own.id))["guests_per_node"] == 1
    check = ("vhpc", "policy", "check", "--partition", "main", "--guests-per-node", "3")
    asked = lab.run("login", *check, user="bob", check=False)
    assert (asked.code, "it permits 2 guests on a node" in asked.err) == (1, True), asked.err


@pytest.fixture
def cli_filter(lab: Lab) -> Iterator[None]:
    """The login host asks the policy when a job is submitted."""
    text = (Path(__file__).parents[2] / "contrib/cli_filter.lua").read_text()
    conf = lab.slurm_conf
    lua = f"{Path(conf).parent}/cli_filter.lua"
    try:
        lab.run("login", "cp", "-p", conf, f"{conf}.before")
        lab.run("login", "sh", "-ec", f"echo CliFilterPlugins=cli_filter/lua >>{conf}")
        lab.run("login", "sh", "-ec", f"cat >{lua}", stdin=text)
        yield
    finally:
        lab.run("login", "sh", "-c", f"mv -f {conf}.before {conf}; rm -f {lua}")


@pytest.mark.usefixtures("rule", "cli_filter")
def test_a_job_that_will_be_refused_is_not_submitted(lab: Lab) -> None:
    def submit(*options: str, **variables: str) -> tuple[int, str]:
        words = [f"{name}={value}" for name, value in variables.items()]
        done = lab.run("login", "env", *words, "sbatch", "--wrap=true", *options, user="alice", check=False)
        return done.code, done.err

    code, said = submit("-p", "spare", f"--vhpc-image={TAG}", "--vhpc-network=job")
    assert code != 0
    assert "vhpc: policy rule 'signed in spare' refuses the job: it does not permit network job" in said
    code, said = submit("-p", "spare", VHPC_IMAGE="debian-minimal:none'; exit 1; '")
    assert code != 0
    assert "is not an image name" in said
    code, said = submit("--vhpc-image=debian-minimam")
    assert code != 0
    assert "image debian-minimam:latest is unknown (did you mean" in said
    assert lab.run("ctl", "squeue", "-ho", "%i").out == "", "no job was created"
    assert submit("-p", "spare")[0] == 0, "a job without guests"
    assert submit("-w", "n1", f"--vhpc-image={TAG}")[0] == 0
    lab.quiet(120)
