# SPDX-License-Identifier: Apache-2.0
"""Limits and defaults of rules: which value a job gets, from which rule, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from controller_lab import HAVE_MUNGED, Munged, allocation, request, stop
from hypothesis import given
from hypothesis import strategies as st
from refused_config import expect_refused
from vhpcd_process import Vhpcd, make

from vhpc_slurm.config import Config
from vhpc_slurm.config.disks import Disks
from vhpc_slurm.config.network import Network
from vhpc_slurm.config.policy import DEFAULTED, Rule
from vhpc_slurm.model import (
    Allocation,
    GresAllocation,
    JobRequest,
    LeaseState,
    NodeAllocation,
)
from vhpc_slurm.options import BatchPlace
from vhpc_slurm.policy import limit_refusal, with_defaults
from vhpc_slurm.policy.rules import covers

ALL = tuple(option.field for option in DEFAULTED)


def site(*rules: Rule) -> Config:
    network = Network(allowed=("none", "job", "nat"))
    return Config(policy=rules, disks=Disks(max_mib=100_000), network=network)


def job(**other: Any) -> JobRequest:
    return request(unset=tuple(name for name in ALL if name not in other), **other)


def test_the_first_rule_that_sets_a_default_gives_it() -> None:
    config = site(
        Rule(name="other", partitions=("gpu",), default_disk_mib=64),
        Rule(name="alice", users=("alice",), default_network="job"),
        Rule(name="all", default_disk_mib=1024, default_network="nat", default_guests_per_node=2),
    )
    found = with_defaults(config, job())
    assert (found.network, found.disk_mib, found.guests_per_node) == ("job", 1024, 2)
    assert found.batch is BatchPlace.GUEST
    assert found.defaults == (("network", "alice"), ("disk_mib", "all"), ("guests_per_node", "all"))


def test_a_default_disk_has_the_mount_point_of_its_rule() -> None:
    config = site(
        Rule(name="bob", users=("bob",), default_disk_mib=64, default_disk_mount="/local"),
        Rule(name="alice", users=("alice",), default_disk_mib=128),
    )
    found = with_defaults(config, job(user="bob"))
    assert (found.disk_mib, found.disk_mount, found.defaults) == (64, "/local", (("disk_mib", "bob"),))
    assert found.fixed() == job(user="bob").fixed()
    plain = with_defaults(config, job())
    assert (plain.disk_mib, plain.disk_mount) == (128, "")
    for own in ("", "/data"):
        kept = job(user="bob", disk_mib=512, disk_mount=own)
        assert with_defaults(config, kept) == kept


def test_what_the_user_gives_wins() -> None:
    config = site(
        Rule(
            name="a",
            default_disk_mib=1024,
            default_batch="host",
            default_network="job",
            default_guests_per_node=2,
        )
    )
    own = job(disk_mib=64, batch=BatchPlace.GUEST, network="none", guests_per_node=1)
    assert with_defaults(config, own) == own
    assert with_defaults(config, request()).defaults == (), "a hook that does not say what was given"


def test_a_later_default_that_is_not_permitted_is_skipped() -> None:
    config = site(
        Rule(name="small", max_disk_mib=512, networks=("none",), max_guests_per_node=1, batch=("guest",)),
        Rule(name="large", default_disk_mib=1024, default_network="job", default_guests_per_node=2),
        Rule(name="all", default_disk_mib=256, default_batch="host"),
    )
    found = with_defaults(config, job())
    assert found.defaults == (("disk_mib", "all"),)
    assert found.disk_mib == 256


@pytest.mark.promise("policy.default")
def test_a_changed_partition_is_no_new_request() -> None:
    config = site(Rule(name="a", partitions=("all",), default_disk_mib=1024, default_batch="host"))
    before = with_defaults(config, job())
    assert before.defaults
    moved = replace(job(), partition="other", job_name="renamed")
    assert before.fixed() == with_defaults(config, moved).fixed() == job().fixed()
    assert before.fixed() != job(disk_mib=1024).fixed(), "the user's own value is another request"


LIMITED = Rule(
    name="tight", max_guests_per_node=2, max_disk_mib=512, max_vfs=1, max_timeout_s=60, batch=("guest",)
)
NO_DISK = Rule(name="tight", max_disk_mib=0)


@pytest.mark.promise("policy.rule")
@pytest.mark.parametrize(
    ("rule", "asked", "refusal"),
    [
        (LIMITED, {"guests_per_node": 2, "disk_mib": 512, "vfs": 1, "timeout_s": 60}, ""),
        (LIMITED, {"guests_per_node": 3}, "it permits 2 guests on a node, the job asks for 3"),
        (LIMITED, {"disk_mib": 513}, "it permits disks up to 512 MiB, the job asks for 513"),
        (LIMITED, {"vfs": 2}, "it permits 1 virtual functions on a node, the job asks for 2"),
        (LIMITED, {"timeout_s": 61}, "it permits a boot of 60 s, the job asks for 61 s"),
        (LIMITED, {"batch": BatchPlace.HOST}, "it does not permit the batch script on the host"),
        (NO_DISK, {"disk_mib": 64}, "it permits no disks"),
        (NO_DISK, {"guests_per_node": 64, "vfs": 256, "timeout_s": 3600, "batch": BatchPlace.HOST}, ""),
    ],
)
def test_a_refusal_names_the_rule_and_the_limit(rule: Rule, asked: dict[str, Any], refusal: str) -> None:
    said = limit_refusal(site(rule), request(**{"vfs": 0} | asked), allocation("n1"))
    assert said.startswith(f"policy rule 'tight' refuses the job: {refusal}" if refusal else "")
    assert bool(said) is bool(refusal)
    assert "\n" not in said


def test_functions_that_slurm_counts_are_limited_too() -> None:
    gres = (GresAllocation("ibvf", "", 2),)
    nodes = Allocation((NodeAllocation("n1", (0,), 1024), NodeAllocation("n2", (0,), 1024, gres)))
    assert "the job asks for 2" in limit_refusal(site(LIMITED), request(), nodes)
    assert limit_refusal(site(LIMITED), request(vfs=1), nodes) == "", "the job takes fewer"
    assert limit_refusal(site(Rule(name="a", users=("bob",), max_vfs=0)), request(), nodes) == ""


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("max_disk_mib = 200000", "the site permits 100000 (disks.max_mib): a rule can only lower a limit"),
        ("max_timeout_s = 1000", "the site permits 180 (guests.boot_timeout_max_s)"),
        ("default_disk_mib = 200000", "default_disk_mib = 200000, but permits 100000 MiB"),
        ("default_disk_mib = 128\nmax_disk_mib = 64", "default_disk_mib = 128, but permits 64 MiB"),
        (
            "default_guests_per_node = 3\nmax_guests_per_node = 2",
            "default_guests_per_node = 3, but permits 2",
        ),
        ("default_network = 'job'\nnetworks = ['none']", "but job is not in its networks"),
        ("default_network = 'nat'", "but nat is not in network.allowed"),
        ("default_batch = 'host'\nbatch = ['guest']", "'host', but host is not in its batch"),
        ("batch = ['host']", "batch without guest: set its default_batch to host"),
        ("batch = []", "length >= 1"),
        ("max_guests_per_node = 65", "<= 64"),
        ("default_disk_mib = 1", ">= 64"),
        ("default_disk_mount = '/local'", "default_disk_mount = '/local', but no default_disk_mib"),
        ("default_disk_mib = 64\ndefault_disk_mount = '/usr/a'", "belongs to the guest's system"),
        ("default_disk_mib = 64\ndefault_disk_mount = 'a'", "an absolute path"),
        (
            "default_disk_mib = 64\ndefault_disk_mount = '/s'\n[shares]\nsite = ['/s/x']",
            "'/s', but guests have the shared folder /s/x (shares.site)",
        ),
        ("default_image = 'x'", "unknown field `default_image`"),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(tmp_path: Path, keys: str, says: str) -> None:
    site = "[disks]\nmax_mib = 100000\n[network]\nallowed = ['none', 'job']\n[[policy]]\nname = 'a'\n"
    expect_refused(tmp_path, site + keys, says)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (Rule(name="a"), Rule(name="b", users=("x",)), True),
        (Rule(name="a", users=("x*",)), Rule(name="b", users=("x1", "xy")), True),
        (Rule(name="a", users=("x*",)), Rule(name="b", users=("x1", "y")), False),
        (Rule(name="a", users=("x*",)), Rule(name="b", users=("x1*",)), False),
        (Rule(name="a", users=("x",)), Rule(name="b"), False),
        (Rule(name="a", users=("x",)), Rule(name="b", users=("x",), qos=("q",)), True),
        (Rule(name="a", users=("*",)), Rule(name="b", users=("y?",)), True),
    ],
)
def test_whether_a_rule_hides_another_one(first: Rule, second: Rule, *, expected: bool) -> None:
    assert covers(first, second) is expected


# --- for all rules --------------------------------------------------------------------

WORDS = ("a", "b")
CONDITION = st.lists(st.sampled_from(WORDS), max_size=1).map(tuple)
DISK = st.none() | st.sampled_from((64, 128, 256))
RULES = st.lists(st.tuples(CONDITION, CONDITION, DISK, DISK), max_size=5)


@pytest.mark.promise("policy.default")
@given(RULES, st.sampled_from(WORDS), st.sampled_from(WORDS), DISK)
def test_disks_of_jobs_follow_the_written_rule(
    drawn: list[tuple[tuple[str, ...], tuple[str, ...], int | None, int | None]],
    partition: str,
    account: str,
    own: int | None,
) -> None:
    """As docs/images.md says it, written a second time with loops and no library of vhpc."""
    rules = [
        Rule(name=f"r{number}", partitions=p, accounts=a, max_disk_mib=most, default_disk_mib=default)
        for number, (p, a, most, default) in enumerate(drawn)
        if most is None or default is None or default <= most
    ]
    holding = [
        rule
        for rule in rules
        if (not rule.partitions or partition in rule.partitions)
        and (not rule.accounts or account in rule.accounts)
    ]
    limit = holding[0].max_disk_mib if holding else None
    expected, origin = own, None
    if own is None:
        for rule in holding:
            size = rule.default_disk_mib
            if size is not None and (limit is None or size <= limit):
                expected, origin = size, rule.name
                break
    asked = job(partition=partition, account=account, **({"disk_mib": own} if own else {}))
    found = with_defaults(site(*rules), asked)
    assert found.disk_mib == expected
    assert dict(found.defaults).get("disk_mib") == origin
    refused = bool(limit is not None and expected is not None and expected > limit)
    assert bool(limit_refusal(site(*rules), found, allocation("n1"))) is refused
    assert not refused or own, "a default is never refused"
    assert with_defaults(site(*rules), found).fixed() == asked.fixed()


# --- vhpcd ----------------------------------------------------------------------------

needs_munged = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
RULE = """
[[policy]]
name = "small"
max_disk_mib = 128
default_guests_per_node = 2
default_batch = "host"
"""


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    found = make(tmp_path, daemon)
    path = tmp_path / "vhpc.toml"
    path.write_text(path.read_text() + "\n[disks]\nmax_mib = 4096\n" + RULE)
    yield found.start()
    if found.process is not None:
        stop(found.process)


@pytest.mark.promise("policy.default")
@needs_munged
def test_a_lease_has_the_values_and_their_rule(vhpcd: Vhpcd) -> None:
    nodes = allocation("n1", memory_mib=4096)
    lease = vhpcd.client.open_generation(job(), nodes)
    assert lease.state is LeaseState.READY
    assert (lease.request.guests_per_node, lease.request.batch) == (2, BatchPlace.HOST)
    assert lease.request.defaults == (("batch", "small"), ("guests_per_node", "small"))
    vhpcd.kill()
    path = vhpcd.folder / "vhpc.toml"
    path.write_text(path.read_text().replace("default_guests_per_node = 2", "default_guests_per_node = 1"))
    vhpcd.start()
    assert vhpcd.client.open_generation(job(), nodes) == lease, "as it was decided, after a crash"
    refused = vhpcd.client.open_generation(replace(job(disk_mib=256), job_id=43), nodes)
    assert refused.state is LeaseState.REFUSED
    assert "policy rule 'small' refuses the job: it permits disks up to 128 MiB" in refused.refusal
