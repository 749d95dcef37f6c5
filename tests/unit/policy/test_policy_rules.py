# SPDX-License-Identifier: Apache-2.0
"""Rules of [[policy]]: which one applies to a job, what it permits, and which files of them are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused_config import expect_refused

from vhpc_slurm.config import Config
from vhpc_slurm.config.policy import Rule, ShareKind
from vhpc_slurm.config.shares import Shares
from vhpc_slurm.model import ImageRef, JobRequest
from vhpc_slurm.node.guest import shares
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.options import NETWORK
from vhpc_slurm.policy import Subject, applying, visible_shares
from vhpc_slurm.policy.limits import option_refusal
from vhpc_slurm.policy.rules import image_refusal, signer_refusal

ALICE = Subject("alice", "main", "physics", "normal")


@pytest.mark.parametrize(
    ("rule", "applies"),
    [
        (Rule(name="a"), True),
        (Rule(name="a", partitions=("main",)), True),
        (Rule(name="a", partitions=("gpu", "ma*")), True),
        (Rule(name="a", partitions=("gpu",)), False),
        (Rule(name="a", partitions=("Main",)), False),
        (Rule(name="a", accounts=("physics",), qos=("normal",), users=("alice", "bob")), True),
        (Rule(name="a", accounts=("physics",), qos=("high",)), False),
        (Rule(name="a", users=("al",)), False),
        (Rule(name="a", users=("al?ce",)), True),
    ],
)
def test_all_conditions_of_a_rule_must_hold(rule: Rule, *, applies: bool) -> None:
    assert (applying((rule,), ALICE) is rule) is applies


@pytest.mark.promise("policy.rule")
def test_the_first_rule_that_holds_applies() -> None:
    rules = (Rule(name="gpu", partitions=("gpu",)), Rule(name="alice", users=("alice",)), Rule(name="rest"))
    assert [getattr(applying(rules, one), "name", None) for one in (ALICE, Subject("bob"))] == [
        "alice",
        "rest",
    ]
    assert applying(rules[:2], Subject("bob")) is None
    assert applying((Rule(name="a", accounts=("*",)),), Subject("bob")) is not None, "also without an account"
    assert applying((Rule(name="a", accounts=("?*",)),), Subject("bob")) is None


WORD = st.sampled_from(["", "a", "b", "c"])
CONDITION = st.lists(st.sampled_from(["a", "b", "c"]), max_size=2).map(tuple)


@given(st.lists(st.tuples(CONDITION, CONDITION, CONDITION, CONDITION), max_size=5), st.tuples(*[WORD] * 4))
def test_rules_without_patterns_are_lists_of_words(
    conditions: list[tuple[tuple[str, ...], ...]], job: tuple[str, str, str, str]
) -> None:
    rules = [
        Rule(name=f"r{number}", partitions=one[0], accounts=one[1], qos=one[2], users=one[3])
        for number, one in enumerate(conditions)
    ]
    user, partition, account, qos = job
    holding = [
        number
        for number, one in enumerate(conditions)
        if all(
            word in words or words == ()
            for words, word in zip(one, (partition, account, qos, user), strict=True)
        )
    ]
    found = applying(rules, Subject(user, partition, account, qos))
    assert (found.name if found else None) == (f"r{holding[0]}" if holding else None)


@pytest.mark.parametrize(
    ("patterns", "image", "refusal"),
    [
        (("*",), "own/x", ""),
        (("debian-*",), "debian-hpc:1", ""),
        (("debian-*",), "own/debian-hpc", "it permits debian-*"),
        (("debian-hpc:latest",), "debian-hpc", ""),
        (("debian-hpc",), "debian-hpc", "it permits debian-hpc"),
        (("own/*", "base:*"), "base:7", ""),
        ((), "base", "it permits no image"),
    ],
)
def test_images_are_permitted_by_name_and_tag(patterns: tuple[str, ...], image: str, refusal: str) -> None:
    assert image_refusal(Rule(name="a", images=patterns), [ImageRef.parse(image).label]) == refusal


def test_an_image_without_a_name_is_permitted_where_all_are() -> None:
    assert image_refusal(Rule(name="a"), []) == ""
    assert image_refusal(Rule(name="a", images=("b*",)), ["a:1", "b:2"]) == ""
    assert (
        image_refusal(Rule(name="a", images=("b*",)), []) == "it permits b*, and no name has this digest now"
    )


def test_one_signature_of_a_permitted_principal_is_enough() -> None:
    rule = Rule(name="a", signers=("*@hpc.example", "root"))
    assert signer_refusal(rule, ["ops@hpc.example"]) == signer_refusal(rule, ["x", "root"]) == ""
    assert signer_refusal(rule, []) == "the image needs a signature of *@hpc.example, root"
    assert signer_refusal(rule, ["x", "eve@hpc.example.org"]).endswith(
        "and is signed by eve@hpc.example.org, x"
    )
    assert signer_refusal(Rule(name="a"), []) == ""


def test_each_word_of_a_network_must_be_permitted() -> None:
    rule = Rule(name="a", networks=("none", "job"))
    assert option_refusal(rule, NETWORK, "job") == option_refusal(rule, NETWORK, "none") == ""
    assert "does not permit network nat (choose by --vhpc-network: none, job)" in option_refusal(
        rule, NETWORK, "job,nat"
    )
    assert "(choose by --vhpc-network: nothing)" in option_refusal(
        Rule(name="a", networks=()), NETWORK, "none"
    )


def test_shares_are_those_of_the_site_and_of_the_rule() -> None:
    request = JobRequest(1, 0, 7, 7, "alice", "/w", ImageRef("x"), partition="main")
    site = Shares(site=("/scratch",), read_only=("/scratch",), home=False)
    cases: tuple[tuple[tuple[ShareKind, ...], tuple[bool, bool, tuple[str, ...]]], ...] = (
        (("home", "work_dir", "site"), (False, True, ("/scratch",))),
        (("site",), (False, False, ("/scratch",))),
        ((), (False, False, ())),
    )
    for kinds, expected in cases:
        config = Config(shares=site, policy=(Rule(name="a", partitions=("main",), shares=kinds),))
        found = visible_shares(config, request)
        assert (found.home, found.work_dir, found.site) == expected
    assert visible_shares(Config(shares=site, policy=(Rule(name="a", users=("bob",)),)), request) == site


@pytest.mark.parametrize(
    ("asked", "home", "work_dir", "folders"),
    [
        (None, True, False, ("/scratch",)),
        ("home,work_dir,site", True, False, ("/scratch",)),
        ("home", True, False, ()),
        ("work_dir,site", False, False, ("/scratch",)),
        ("none", False, False, ()),
    ],
)
def test_users_leave_shares_out_and_add_none(
    tmp_path: Path, asked: str | None, home: bool, work_dir: bool, folders: tuple[str, ...]
) -> None:
    rule = Rule(name="a", shares=("home", "site"))
    config = Config(shares=Shares(site=("/scratch",)), policy=(rule,))
    request = JobRequest(1, 0, 7, 7, "alice", "/w", ImageRef("x"), shares=asked)
    found = visible_shares(config, request)
    assert (found.home, found.work_dir, found.site) == (home, work_dir, folders)
    account = Account("alice", 7, 7, "", str(tmp_path / "home"), "/bin/sh", ())
    paths = {share.path for share in shares.wanted(found, account, "/w")[0]}
    assert paths == {*folders, *([str(tmp_path / "home")] if home else [])}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[policy]]\nimages = []", "missing required field `name`"),
        ("[[policy]]\nname = 'a'\n[[policy]]\nname = 'a'", "several rules of policy have the name 'a'"),
        ("[[policy]]\nname = 'a'\nsigners = ['ops']", "'a' has signers: set images.allowed_signers"),
        ("[[policy]]\nname = 'a'\nimage = ['x']", "unknown field `image`"),
        ("[[policy]]\nname = 'a\\nb'", "matching regex"),
        ("[[policy]]\nname = 'a'\nnetworks = ['bridge']", "Invalid enum value 'bridge'"),
        ("[[policy]]\nname = 'a'\nshares = 'home'", "Expected `array`"),
        ("[policy]\nname = 'a'", "Expected `array`"),
    ],
)
def test_an_unusable_rule_is_an_error_of_the_file(tmp_path: Path, text: str, says: str) -> None:
    expect_refused(tmp_path, text + "\n", says)
