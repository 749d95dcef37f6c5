# SPDX-License-Identifier: Apache-2.0
"""`vhpc policy`: results of rules for a job that is not fully known."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from site_catalog import publish

from vhpc_slurm.cli.main import main
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.options import OPTIONS
from vhpc_slurm.policy import Subject, applying, possible

RULES = """
[images]
catalog = "{catalog}"

[[policy]]
name = "staff"
accounts = ["hpc-staff"]

[[policy]]
name = "gpu"
partitions = ["gpu*"]
networks = ["none", "job"]
images = ["other-*"]

[[policy]]
name = "everybody else"
networks = ["none"]
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = tmp_path / "catalog"
    publish(catalog, "debian-minimal", b"a root")
    config = tmp_path / "vhpc.toml"
    config.write_text(RULES.format(catalog=catalog))
    monkeypatch.setenv("VHPC_CONFIG", str(config))


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    main(["policy", "explain", "--user", "alice", "--json", *arguments])
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return rows


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("known", "names"),
    [
        ([], ["staff", "gpu", "everybody else"]),
        (["--account", "bio"], ["gpu", "everybody else"]),
        (["--account", "hpc-staff"], ["staff"]),
        (["--partition", "gpu-a"], ["staff", "gpu"]),
        (["--partition", "cpu", "--account", "bio"], ["everybody else"]),
    ],
)
def test_rules_that_may_apply_are_shown(
    capsys: pytest.CaptureFixture[str], known: list[str], names: list[str]
) -> None:
    assert [row["rule"] for row in explained(capsys, *known)] == names


@pytest.mark.usefixtures("site")
def test_the_table_says_when_a_rule_applies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "explain", "--user", "alice", "--partition", "gpu1", "--network", "nat"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "staff account is hpc-staff * none needed" in text
    assert "gpu always other-* none needed none, job" in text
    assert "policy rule 'gpu' refuses the job: it does not permit network nat" in text


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("job", "refused"),
    [
        (["--network", "nat"], ""),  # an account that is not known may be that of the staff
        (["--network", "nat", "--account", "bio"], "policy rule 'gpu' refuses the job"),
        (
            ["--network", "nat", "--account", "bio", "--partition", "cpu"],
            "policy rule 'everybody else' refuses",
        ),
        (["--network", "job", "--account", "bio"], ""),
        (["--image", "debian-minimal", "--account", "bio"], ""),
        (
            ["--image", "debian-minimal", "--account", "bio", "--partition", "gpu"],
            "policy rule 'gpu' does not permit image debian-minimal:latest: it permits other-*",
        ),
        (["--image", "debian-minimum"], "image debian-minimum:latest is unknown"),
        (["--image", "docker://debian:13"], ""),  # not imported yet
    ],
)
def test_a_job_is_refused_if_no_rule_may_permit_it(
    capsys: pytest.CaptureFixture[str], job: list[str], refused: str
) -> None:
    assert main(["policy", "check", "--user", "alice", *job]) == (1 if refused else 0)
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == (1 if refused else 0)
    assert refused in err


MORE = """
[disks]
max_mib = 4096
[network]
allowed = ["none", "job"]
[shares]
site = ["/software"]

[[policy]]
name = "local"
users = ["carol"]
shares = ["home"]
default_disk_mib = 256
default_disk_mount = "/local"

[[policy]]
name = "gpu"
partitions = ["gpu"]
max_disk_mib = 1024
max_guests_per_node = 2
max_checkpoint_user_mib = 40960
max_checkpoint_account_mib = 0
batch = ["guest"]

[[policy]]
name = "physics"
accounts = ["physics"]
default_disk_mib = 2048
default_network = "job"

[[policy]]
name = "all"
default_disk_mib = 512
default_batch = "host"
"""


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "vhpc.toml"
    config.write_text(MORE)
    monkeypatch.setenv("VHPC_CONFIG", str(config))


@pytest.mark.usefixtures("limits")
def test_explain_shows_limits_and_whose_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    gpu, *_ = explained(capsys, "--partition", "gpu", "--qos", "q")
    assert (gpu["max_disk_mib"], gpu["max_guests_per_node"], gpu["batch"]) == (1024, 2, ["guest"])
    assert (gpu["max_checkpoint_user_mib"], gpu["max_checkpoint_account_mib"]) == (40960, 0)
    assert gpu["defaults"] == {
        "network": [{"value": "job", "rule": "physics", "certain": False}],
        "disk_mib": [{"value": 512, "rule": "all", "certain": True}],
    }
    assert main(["policy", "explain", "--user", "alice", "--partition", "gpu", "--account", "physics"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "batch=guest, guests-per-node<=2, disk<=1024M, checkpoints of user<=40960M, " in text
    assert "checkpoints of account<=0M network=job (policy rule 'physics')" in text
    assert "disk=512M (policy rule 'all')" in text


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    ("job", "refused"),
    [
        (["--disk", "1G"], ""),
        (["--disk", "1025"], "it permits disks up to 1024 MiB, the job asks for 1025"),
        (["--disk", "2t"], "the job asks for 2097152"),
        (["--disk", "1G:/local"], ""),
        (["--disk", "1025:/local"], "it permits disks up to 1024 MiB, the job asks for 1025"),
        (
            ["--disk", "1G:/software/local"],
            "a disk cannot be mounted at /software/local, because guests have the shared folder /software",
        ),
        (["--guests-per-node", "3"], "it permits 2 guests on a node"),
        (["--batch", "host"], "it does not permit the batch script on the host"),
        (["--timeout", "3600", "--vfs", "256"], ""),
    ],
)
def test_options_beyond_a_limit_are_refused(
    capsys: pytest.CaptureFixture[str], job: list[str], refused: str
) -> None:
    assert main(["policy", "check", "--user", "alice", "--partition", "gpu", *job]) == (1 if refused else 0)
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1 if refused else 0)
    assert refused in err


@pytest.mark.usefixtures("limits")
def test_what_cannot_be_read_is_no_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--disk", "much"],
        ["--disk", "63"],
        ["--disk", "1G:/etc"],
        ["--disk", "1G:x"],
        ["--guests-per-node", "two"],
    ):
        assert main(["policy", "check", *words]) == 2, "contrib/cli_filter.lua refuses only at status 1"
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("limits")
def test_check_takes_variables_as_sbatch_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ["policy", "check", "--user", "alice", "--partition", "gpu"]
    monkeypatch.setenv("VHPC_DISK", "2G")
    assert main(job) == 1
    assert "the job asks for 2048" in capsys.readouterr().err
    assert main([*job, "--disk", "64"]) == 0, "the option comes before its variable"
    monkeypatch.setenv("VHPC_DISK", "")
    assert main(job) == 0, "an empty variable counts as absent"
    monkeypatch.setenv("VHPC_IMAGE", "no-such-image")
    assert main(job) == 1
    assert "image no-such-image:latest is unknown" in capsys.readouterr().err


@pytest.mark.usefixtures("limits")
def test_check_takes_each_option_of_sbatch(capsys: pytest.CaptureFixture[str]) -> None:
    """contrib/cli_filter.lua passes on all that were given."""
    for option in OPTIONS:
        main(["policy", "check", f"--{option.name}", ""])
        assert "No such option" not in capsys.readouterr().err
    assert main(["policy", "check", "--console", "c.txt", "--mem-reserve", "1G", "--save", "own/a"]) == 0


@pytest.mark.usefixtures("limits")
def test_check_says_what_a_job_gets(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--user", "alice", "--partition", "main", "--account", "physics", "--disk", "64"]
    assert main(["policy", "check", *job, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["rule"] == "physics"
    assert [(one["option"], one["value"], one["from"]) for one in row["gets"]] == [
        ("network", "job", "policy rule 'physics'"),
        ("disk_mib", 64, "the job"),
        ("batch", "host", "policy rule 'all'"),
        ("guests_per_node", 1, "the site"),
    ]
    assert main(["policy", "check", *job, "--show"]) == 0
    assert "physics guests_per_node 1 the site" in " ".join(capsys.readouterr().out.split())


WORDS = ("a", "b", "c")
CONDITION = st.lists(st.sampled_from(WORDS), max_size=2).map(tuple)
VALUE = st.none() | st.sampled_from(WORDS)


@given(st.lists(st.tuples(CONDITION, CONDITION, CONDITION), max_size=4), VALUE, VALUE, VALUE)
def test_whatever_applies_later_was_possible_before(
    conditions: list[tuple[tuple[str, ...], ...]], partition: str | None, account: str | None, qos: str | None
) -> None:
    rules = [Rule(name=f"r{n}", partitions=p, accounts=a, qos=q) for n, (p, a, q) in enumerate(conditions)]
    choices = [(value,) if value is not None else (*WORDS, "") for value in (partition, account, qos)]
    later = {applying(rules, Subject("u", *values)) for values in product(*choices)}
    assert later <= set(possible(rules, Subject("u", partition, account, qos)))


@pytest.mark.usefixtures("limits")
def test_check_and_explain_say_where_a_disk_is_mounted(capsys: pytest.CaptureFixture[str]) -> None:
    def gets(*more: str) -> list[tuple[str, object, str]]:
        assert main(["policy", "check", "--user", "carol", "--json", *more]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        return [(one["option"], one["value"], one["from"]) for one in row["gets"] if "disk" in one["option"]]

    rule = "policy rule 'local'"
    assert gets() == [("disk_mib", 256, rule), ("disk_mount", "/local", rule)]
    assert gets("--disk", "1G") == [("disk_mib", 1024, "the job")]
    assert gets("--disk", "1G:/data") == [("disk_mib", 1024, "the job"), ("disk_mount", "/data", "the job")]
    assert gets("--disk", "1G:/software") == [
        ("disk_mib", 1024, "the job"),
        ("disk_mount", "/software", "the job"),
    ], "guests of this rule have no folder of the site"
    assert main(["policy", "explain", "--user", "carol"]) == 0
    assert "disk=256M:/local" in capsys.readouterr().out
    assert main(["policy", "explain", "--user", "carol", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["defaults"]["disk_mib"] == [
        {"value": 256, "rule": "local", "certain": True, "mount": "/local"}
    ]


CLUSTERS = """
[[policy]]
name = "physics"
accounts = ["physics"]
account_clusters = "join"
max_cluster_guests = 16

[[policy]]
name = "others"
max_cluster_kept_days = 7
"""


def test_rules_about_clusters_are_shown_and_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "vhpc.toml"
    config.write_text(CLUSTERS)
    monkeypatch.setenv("VHPC_CONFIG", str(config))
    rows = explained(capsys)
    assert [row["account_clusters"] for row in rows] == ["join", "none"]
    assert [(row["max_cluster_guests"], row["max_cluster_kept_days"]) for row in rows] == [
        (16, None),
        (None, 7),
    ]
    main(["policy", "explain", "--user", "alice"])
    text = capsys.readouterr().out
    assert "clusters of accounts=join, guests of a cluster<=16" in text
    assert "keep a cluster<=7 days" in text
    check = ["policy", "check", "--user", "alice", "--cluster", "physics/dask"]
    assert main([*check, "--account", "physics"]) == 0
    assert main(check) == 0, "the account is not known"
    assert main([*check, "--account", "bio"]) == 1
    assert (
        "policy rule 'others' refuses the job: it permits no clusters of accounts" in capsys.readouterr().err
    )
