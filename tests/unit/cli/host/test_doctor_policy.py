# SPDX-License-Identifier: Apache-2.0
"""vhpc doctor: what it says about the rules of [[policy]]."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from vhpc_slurm.cli.host.checks import Level, policy
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.images import Images
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.policy import signatures
from vhpc_slurm.slurm.port import SlurmPartition
from vhpc_slurm.slurm.settings import SlurmSettings

PARTITIONS = (SlurmPartition("main", "OFF"), SlurmPartition("gpu1", "OFF"))


def found(
    config: Config, enforced: str = "associations,limits,qos,safe", storage: str = "slurmdbd"
) -> list[tuple[Level, str, str]]:
    settings = SlurmSettings.parse(
        f"AccountingStorageEnforce = {enforced}\nAccountingStorageType = accounting_storage/{storage}\n"
    )
    return [(one.level, one.what, one.hint) for one in policy.check(config, settings, PARTITIONS)]


def test_no_rules_are_not_mentioned() -> None:
    assert found(Config()) == []


def test_conditions_that_users_choose_are_named() -> None:
    config = Config(policy=(Rule(name="a", accounts=("x",)), Rule(name="b", qos=("y",))))
    assert found(config) == [(Level.OK, "rules of the policy: 2", "")]
    (one,) = found(config, "associations")
    assert one[0] is Level.WARN
    assert "policy rule 'b' has qos" in one[1]
    first, second = found(config, "none")
    assert "'a' has accounts" in first[1]
    assert first[2] == "AccountingStorageEnforce=associations in slurm.conf"
    assert "'b' has qos" in second[1]


def test_clusters_of_accounts_need_associations() -> None:
    config = Config(policy=(Rule(name="a"), Rule(name="b", users=("x",), account_clusters="join")))
    (order,) = found(config)
    assert "'b' never applies" in order[1]
    first, _ = found(config, storage="none")
    assert "policy rule 'b' has account_clusters, and Slurm has no associations" in first[1]


def test_a_rule_that_never_applies_is_named() -> None:
    config = Config(policy=(Rule(name="a", partitions=("gpu*",)), Rule(name="b", partitions=("GPU*", "gpu"))))
    ((level, what, _),) = found(config)
    assert level is Level.WARN
    assert "rule 'b' never applies: Slurm has no partition GPU*, gpu" in what


def test_a_rule_behind_one_for_all_its_jobs_is_named() -> None:
    first = Rule(name="physics", accounts=("phys*",))
    assert found(Config(policy=(first, Rule(name="b")))) == [(Level.OK, "rules of the policy: 2", "")]
    ((level, what, _),) = found(Config(policy=(first, Rule(name="b", accounts=("physics",), images=()))))
    assert level is Level.WARN
    assert "rule 'b' never applies: 'physics' is before it" in what
    defaults = Rule(name="b", accounts=("physics",), default_batch="host")
    assert found(Config(policy=(first, defaults))) == [(Level.OK, "rules of the policy: 2", "")]
    both = Rule(name="b", accounts=("physics",), default_batch="host", images=())
    ((_, what, hint),) = found(Config(policy=(first, both)))
    assert "its images does not count" in what
    assert hint == "put images into 'physics'"
    own = Rule(name="physics", accounts=("phys*",), default_batch="guest")
    ((_, what, _),) = found(Config(policy=(own, defaults)))
    assert "rule 'b' never applies" in what, "an earlier rule always gives the default"


def test_vhpcd_must_be_able_to_read_the_signers(tmp_path: Path) -> None:
    signers = tmp_path / "allowed_signers"
    images = Images(allowed_signers=str(signers))

    def levels(user: str) -> list[tuple[Level, str]]:
        config = Config(
            images=images, controller=Controller(user=user), policy=(Rule(name="a", signers=("x",)),)
        )
        return [(level, what) for level, what, _ in found(config)]

    me, other = getpass.getuser(), "nobody"
    ((level, what),) = levels(me)
    assert (level, "No such file" in what) == (Level.ERROR, True)
    signers.write_text("")
    for mode, user, good in (
        (0o644, me, True),
        (0o600, me, True),
        (0o644, other, True),
        (0o600, other, False),
        (0o200, me, False),
    ):
        signers.chmod(mode)
        ((level, what),) = levels(user)
        assert (level is Level.OK) is good, (mode, user, what)
    ((level, what),) = levels("no-such-user")
    assert level is Level.ERROR


@pytest.mark.parametrize("enforced", ["none", "associations"])
def test_rules_about_users_need_nothing_of_slurm(enforced: str) -> None:
    config = Config(policy=(Rule(name="a", users=("alice",), images=()),))
    assert found(config, enforced) == [(Level.OK, "rules of the policy: 1", "")]


def test_a_node_must_be_able_to_check_signatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signers = tmp_path / "allowed_signers"
    images = Images(allowed_signers=str(signers), revoked_signers=str(tmp_path))
    config = Config(images=images, policy=(Rule(name="a", signers=("x",)),))
    assert list(policy.on_node(Config(images=images, policy=(Rule(name="a"),)))) == []
    first, second = policy.on_node(config)
    assert (first.level, second.level) == (Level.ERROR, Level.ERROR)
    assert first.what == f"images.allowed_signers = {signers} cannot be read: No such file or directory"
    assert second.what == f"images.revoked_signers = {tmp_path} cannot be read: Is a directory"
    signers.write_text("")
    config = Config(images=Images(allowed_signers=str(signers)), policy=config.policy)
    assert [one.level for one in policy.on_node(config)] == [Level.OK]
    monkeypatch.setattr(signatures, "SEARCH", str(tmp_path))
    assert [one.what for one in policy.on_node(config)] == ["this host has no ssh-keygen"]
