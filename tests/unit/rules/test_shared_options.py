# SPDX-License-Identifier: Apache-2.0
"""Options of sbatch: the plugin and the hook read the same values, and other tables have each option."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from typing import Any, get_args

import pytest
from c_probe import CHECKOUT, PLUGIN, compile_c, highest, strings
from hypothesis import given
from hypothesis import strategies as st

from vhpc_slurm import config
from vhpc_slurm.config.network import NetworkChoice
from vhpc_slurm.config.policy import DEFAULTED, LIMITED, Rule
from vhpc_slurm.errors import UserError
from vhpc_slurm.fabric.numbers import MAX_VFS as GUIDS_OF_A_RAIL
from vhpc_slurm.model import WITHOUT_OPTIONS, ImageRef
from vhpc_slurm.options import (
    BY_FIELD,
    CHECKPOINT,
    CLUSTER,
    DISK,
    ENV,
    IMAGE,
    MAX_TIMEOUT_S,
    MAX_VFS,
    MOUNT,
    OPTIONS,
    SAVE,
    TIMEOUT,
    VFS,
)
from vhpc_slurm.options.grammars import ValueRefusedError, Words
from vhpc_slurm.options.mountpoint import MOUNT_POINT_MAX, PLACES, TREES, mount_point_refusal
from vhpc_slurm.options.option import Option
from vhpc_slurm.policy import QUOTAS, clusters

PROBE = """
#include <stdio.h>
#include <string.h>
#include "options.h"
#include "text.h"
int main(int argc, char **argv)
{
    for (int i = 1; argc == 1 && i <= VHPC_OPTION_COUNT; i++)
        printf("%s\\n", vhpc_options[i - 1].variable);
    for (int i = 2; i < argc; i++) {
        static struct vhpc_values values;
        char why[VHPC_WHY_SIZE];
        for (int id = 0; id < VHPC_OPTION_COUNT; id++)
            if (strcmp(vhpc_options[id].variable, argv[1]) == 0)
                printf("%s\\n", vhpc_values_set(&values, id, "", argv[i], why, sizeof why)
                                    ? values.text[id] : (why[0] = 27, why));
    }
    return 0;
}
"""
REFUSED = "\x1b"
"""In place of the = between the option and its value; no value begins with it."""
READ_BY_THE_HOOK = [option for option in OPTIONS if option.fields]
Plugin = Callable[..., list[str]]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Plugin:
    """The plugin's variables for values of an option, or ``REFUSED`` and why; or all variables."""
    sources = tuple(PLUGIN / name for name in ("image.c", "mountpoint.c", "options.c", "text.c"))
    program = compile_c(tmp_path_factory.mktemp("plugin"), PROBE, sources)

    def ask(option: Option | None = None, *texts: str) -> list[str]:
        words = [] if option is None else [option.variable, *texts]
        done = subprocess.run([program, *words], check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    return ask


def read(option: Option, text: str) -> dict[str, Any] | None:
    """The value that the hook reads; None if it refuses the value."""
    try:
        return option.values(text)
    except ValueRefusedError:
        return None


def test_the_plugin_has_the_declared_options(plugin: Plugin) -> None:
    assert plugin() == [option.variable for option in OPTIONS]
    # the plugin sets this variable itself
    text = (CHECKOUT / "spank_plugin/allocator.c").read_text()
    assert 'spank_job_control_setenv(spank, "VHPC_WAITER"' in text


PIECES = (
    *("0", "1", "9", "63", "64", "65", "256", "257", "3600", "3601", "16777216", "16777217", "16384G", "17T"),
    *("K", "M", "g", "T", "-", "+", " ", ".", ",", ":", "/", "..", "a", "local", "/etc", "/var/tmp"),
    *("/a:/b", ":ro", "A=", "b=1", "USER"),
    *("every:", "every:30m", "every:2h", "m", "h"),
    *("none", "host", "guest", "\n", "ä", "\u2028", "\x7f", "\x85", "٣"),
    *(word for option in OPTIONS for word in getattr(option.grammar, "words", ())),
)
TEXTS = st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), min_size=1, max_size=40)
LISTS = st.lists(st.lists(st.sampled_from(PIECES), max_size=4).map(",".join), min_size=1, max_size=40)


@pytest.mark.parametrize("option", READ_BY_THE_HOOK, ids=lambda option: option.name)
@given(texts=TEXTS | LISTS)
def test_plugin_and_hook_read_the_same(plugin: Plugin, option: Option, texts: list[str]) -> None:
    for text, said in zip(texts, plugin(option, *texts), strict=True):
        values = read(option, text)
        assert (values is None) == said.startswith(REFUSED), (text, said)
        if values is not None:
            assert read(option, said) == values, "the plugin writes the canonical form of the same value"
            assert read(option, option.text(values)) == values


@pytest.mark.parametrize("option", READ_BY_THE_HOOK, ids=lambda option: option.name)
def test_plugin_and_hook_expect_the_same(plugin: Plugin, option: Option) -> None:
    (said,) = plugin(option, "")
    with pytest.raises(ValueRefusedError) as refused:
        option.values("")
    assert said == f"{REFUSED}: {refused.value}"


def test_limits_of_options_are_those_of_their_purpose(plugin: Plugin) -> None:
    assert highest(config.Guests, "boot_timeout_max_s") == MAX_TIMEOUT_S
    assert highest(config.Guests, "boot_timeout_s") == MAX_TIMEOUT_S
    assert GUIDS_OF_A_RAIL == MAX_VFS
    for option, most in ((TIMEOUT, MAX_TIMEOUT_S), (VFS, MAX_VFS)):
        accepted, refused = plugin(option, str(most), str(most + 1))
        assert (accepted, refused[:1]) == (str(most), REFUSED)


@pytest.mark.promise("disk.mount")
def test_mount_points_of_disks_are_the_same(plugin: Plugin) -> None:
    assert MOUNT_POINT_MAX == 255
    reserved = [*PLACES, *TREES, *(f"{tree}/a" for tree in TREES)]
    good = [
        "/scratch", "/tmp", "/var/tmp", "/var/lib/a", "/homes", "/libs", "/.a", "/...", "/a/.../b",
        "/A_b+c-d.E/9", "/" + "x" * (MOUNT_POINT_MAX - 1),
    ]  # fmt: skip
    bad = [
        "", "a", "//", "/a/", "/a//b", "/.", "/..", "/a/.", "/a/..", "/./a", "/../a", "/a/../b", "/a b",
        "/a\n", "/a,b", "/a:b", "/a%j", "/ä", "/a\\b", "/a\x01", "/" + "x" * MOUNT_POINT_MAX,
    ]  # fmt: skip
    paths = [*reserved, *good, *bad]
    said = plugin(DISK, *(f"64M:{path}" for path in paths))
    assert [one.startswith(REFUSED) for one in said] == [bool(mount_point_refusal(path)) for path in paths]
    assert [one for one in said if not one.startswith(REFUSED)] == [f"64:{path}" for path in good]
    assert [path for path in paths if not mount_point_refusal(path)] == good


@pytest.mark.promise("mount.folder")
def test_folders_at_second_places_are_the_same(plugin: Plugin) -> None:
    good = [
        "/a:/b", "/home/alice/a b:/opt/x:ro", "/a:/b,/a:/c:ro", "/a:/b,/c:/bb", "/...:/b", "/ä=;$:/b",
        ",".join(f"/a:/b/{i}" for i in range(16)), f"/{'a' * 1020}:/b",
    ]  # fmt: skip
    bad = [
        "/a", "/a:", ":/b", "a:/b", "/a:b", "/a:/b:rw", "/a:/b:", "/a:/b:ro:", "/a:/b,", ",/a:/b", "/:/b",
        "", "/a/:/b", "/a//c:/b", "/a/..:/b", "/./a:/b", "/a:/usr/b", "/a:/", "/a:/home/b", "/a:/etc",
        "/a:/b/", "/a:/b c",
        "/a:/b,/c:/b", "/a:/b,/c:/b/d", "/a:/b/d:ro,/c:/b", ",".join(f"/a:/b/{i}" for i in range(17)),
        f"/{'a' * 1021}:/b", "/a\x85:/b",
    ]  # fmt: skip
    said = plugin(MOUNT, *good, *bad)
    assert said[: len(good)] == good
    assert all(one.startswith(REFUSED) for one in said[len(good) :])
    assert [text for text in (*good, *bad) if read(MOUNT, text) is not None] == good


def test_variables_of_the_environment_are_the_same(plugin: Plugin) -> None:
    good = ["A=", "_a1=b c", "A=1,B=2", "A=B=C", "HOMES=/h", "A=1,AB=2", "PATH=/x:/y", f"A={'x' * 1022}"]
    good += ["A", "A,B=1,C", "HOMES", "A=1,AB"]
    bad = [
        "", "1A", "=1", "1A=1", "A-B=1", "A=1,", ",A=1", "A=1,A", "A,A", "HOME", "PMI_X",
        "A=1,A=2", "A=1,B=2,A=", "HOME=/", "USER=a",
        "SLURM_JOB_ID=1", "VHPC_X=1", "PMI_RANK=1", "A=1,PWD=/", "A=a\x7f", "Ä=1", f"A={'x' * 1023}",
    ]  # fmt: skip
    said = plugin(ENV, *good, *bad)
    assert said[: len(good)] == good
    assert all(one.startswith(REFUSED) for one in said[len(good) :])
    assert [text for text in (*good, *bad) if read(ENV, text) is not None] == good


def test_moments_of_checkpoints_are_the_same(plugin: Plugin) -> None:
    good = {
        "none": "none",
        "preempt,limit": "limit,preempt",
        "every:90": "every:90m",
        "every:2h,limit": "limit,every:120m",
        "every:168h": "every:10080m",
    }
    bad = ["", "limit,", ",every:5m", "none,every:5m", "every:5m,every:6m", "every:0m", "every:m", "every:"]
    bad += ["every:10081", "every:169h", "every:5M", "every:-5m", "limit,limit,every:5m", "every:" + "9" * 30]
    assert plugin(CHECKPOINT, *good) == list(good.values())
    assert [read(CHECKPOINT, text) for text in good] == [{"checkpoint": value} for value in good.values()]
    assert all(line.startswith(REFUSED) for line in plugin(CHECKPOINT, *bad))
    assert [read(CHECKPOINT, text) for text in bad] == [None] * len(bad)


def test_names_of_clusters_are_the_same(plugin: Plugin) -> None:
    good = ["a", "0", "Dask-1_x", "a:keep", "x" * 64, "x" * 64 + ":keep"]
    good += ["a/B", "phys.2-a_b/Dask:keep", "x" * 64 + "/" + "x" * 64]
    bad = [
        "",
        "-a",
        "_a",
        ":keep",
        "a:",
        "a:kee",
        "a:keeps",
        "a:keep:keep",
        "a.b",
        "a b",
        "ä",
        "a\n",
        "x" * 65,
    ]
    bad += ["a,b", "x" * 65 + ":keep", "A/b", "a/", "/b", "a/b/c", "a/b.c", ".a/b", "a/_b", "../b", "a b/c"]
    bad += ["x" * 65 + "/b", "a/" + "x" * 65, "a:keep/b", "a/:keep"]
    assert plugin(CLUSTER, *good) == good
    assert [read(CLUSTER, text) for text in good] == [{"cluster": text} for text in good]
    assert all(line.startswith(REFUSED) for line in plugin(CLUSTER, *bad))
    assert [read(CLUSTER, text) for text in bad] == [None] * len(bad)


def test_image_names_are_the_same(plugin: Plugin) -> None:
    digest = "sha256:" + "0123456789abcdef" * 4
    names = [
        "debian", "debian:12", "a" * 64, "a" * 65, "a:" + "b" * 64, "a:" + "b" * 65, "0a", "_a", "a:_b",
        "a:-b", "A", "a:B", "a.b-c_d", "a b", "a:", ":b", "", "a:b:c", "-", "ä",
        "a@", f"a@{digest}", f"a:b@{digest}", f"a@{digest}0", f"a@{digest[:-1]}", f"a:@{digest}",
        f"a@{digest}@{digest}", f"@{digest}", f"a@{digest.upper()}", f"a@{digest}:b", f"a@{digest[7:]}",
        "own/a", "own/a:b", f"own/a@{digest}", "own", "own/", "own/own/a", "own/../a", "Own/a", "x/a",
    ]  # fmt: skip

    def parsed(name: str) -> str:
        try:
            return str(ImageRef.parse(name))
        except UserError:
            return "refused"

    said = ["refused" if one.startswith(REFUSED) else one for one in plugin(IMAGE, *names)]
    assert dict(zip(names, said, strict=True)) == {name: parsed(name) for name in names}
    assert 0 < said.count("refused") < len(names)
    own = ["refused" if one.startswith(REFUSED) else one for one in plugin(SAVE, *names)]
    assert own == [one if one.startswith("own/") and "@" not in one else "refused" for one in said]


def test_the_mark_of_a_refused_image_is_no_image() -> None:
    mark = strings((PLUGIN / "plugin.h").read_text())["VHPC_IMAGE_REFUSED"]
    with pytest.raises(UserError, match="image name"):
        ImageRef.parse(mark)


# --- other tables ----------------------------------------------------------------------


def test_options_have_fields_of_the_request_and_keys_of_rules() -> None:
    fields = [field for option in OPTIONS for field in option.fields]
    assert len(fields) == len(set(fields))
    assert set(fields) <= WITHOUT_OPTIONS.keys()
    assert set(LIMITED) == {option for option in OPTIONS if option.limit is not None}
    limits = {option.limit.key for option in LIMITED if option.limit is not None}
    kept = {quota.key for quota in QUOTAS} | {key for key, _ in clusters.LIMITS.values()}
    assert {key for key in Rule.__struct_fields__ if key.startswith("max_")} <= limits | kept
    assert {key for key in Rule.__struct_fields__ if key.startswith("default_")} == {
        f"default_{field}" for option in DEFAULTED for field in option.fields
    }
    assert {BY_FIELD[option.field] for option in DEFAULTED} == set(DEFAULTED)


def test_values_without_options_are_correct() -> None:
    for option in READ_BY_THE_HOOK:
        values = {field: WITHOUT_OPTIONS[field] for field in option.fields}
        assert values[option.field] is None or option.values(option.text(values)) == values


def test_words_of_options_are_those_of_the_configuration() -> None:
    plain = Rule(name="a")
    for option in OPTIONS:
        if option.limit is not None and hasattr(option.grammar, "words"):
            none = ("none",) if isinstance(option.grammar, Words) else ()
            assert getattr(plain, option.limit.key) == (*none, *option.grammar.words)
    network = BY_FIELD["network"].grammar
    assert isinstance(network, Words)
    assert set(network.values()) == set(get_args(NetworkChoice))


def test_the_users_guide_has_every_option() -> None:
    guide = (CHECKOUT / "docs/users-guide.md").read_text()
    rows = re.findall(r"^\| `--vhpc-([a-z-]+)=.+?` \| `(\w+)` \|", guide, re.MULTILINE)
    assert dict(rows) == {option.name: option.variable for option in OPTIONS}
