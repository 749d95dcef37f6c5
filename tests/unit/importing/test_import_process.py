# SPDX-License-Identifier: Apache-2.0
"""A container's command as files of its root; /bin/sh runs the script."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from containers import Layout, tar

from vhpc_slurm.importing.process import (
    created_of,
    labels_of,
    left_out_labels,
    left_out_variables,
    process_of,
    put_files,
)
from vhpc_slurm.importing.taking import take
from vhpc_slurm.importing.tree import RefusedError, Tree

ECHO = "/usr/bin/printf"


def script(tmp_path: Path, entrypoint: list[str], arguments: list[str]) -> Path:
    tree = Tree(100)
    put_files(tree, {"entrypoint": entrypoint, "arguments": arguments}, tmp_path, 0)
    node = tree.find("etc/vhpc/entrypoint")
    assert node is not None
    assert node.mode == 0o755
    return tmp_path / "entrypoint"


@pytest.mark.parametrize(
    ("entrypoint", "arguments", "given", "printed"),
    [
        ([ECHO, "[%s]"], ["a b", "$HOME", "'\"`"], [], ["a b", "$HOME", "'\"`"]),
        ([ECHO, "[%s]"], ["default"], ["x y", "*"], ["x y", "*"]),
        ([], [ECHO, "[%s]", "only a command"], [], ["only a command"]),
        ([], [ECHO, "[%s]", "x"], [ECHO, "[%s]", "mine"], ["mine"]),
        ([ECHO, "[%s]", "-x\n;"], [], [], ["-x\n;"]),
    ],
)
def test_the_entrypoint_starts_the_same_as_a_runtime(
    tmp_path: Path, entrypoint: list[str], arguments: list[str], given: list[str], printed: list[str]
) -> None:
    """Arguments of the caller replace CMD, never ENTRYPOINT (OCI image specification, config)."""
    path = script(tmp_path, entrypoint, arguments)
    done = subprocess.run(["/bin/sh", path, *given], capture_output=True, text=True, check=True)
    assert done.stdout == "".join(f"[{text}]" for text in printed)


def test_a_container_that_starts_nothing_has_no_script(tmp_path: Path) -> None:
    tree = Tree(100)
    put_files(tree, {}, tmp_path, 0)
    put_files(tree, {"entrypoint": [], "arguments": [], "environment": {}}, tmp_path, 0)
    assert not tree.has("etc/vhpc")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["a\0b", "half \ud800"])
def test_an_invalid_argument_is_refused(tmp_path: Path, text: str) -> None:
    for entrypoint, arguments in (([text], []), (["sh"], [text])):
        with pytest.raises(RefusedError, match="cannot be an argument"):
            script(tmp_path, entrypoint, arguments)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2024-05-01T10:11:12.123456789Z", "2024-05-01T10:11:12Z"),
        ("2024-05-01T10:11:12+02:00", "2024-05-01T08:11:12Z"),
        ("0001-01-01T00:00:00Z", ""),
        ("1970-01-01T00:00:00Z", ""),
        ("2024-05-01T10:11:12", ""),
        ("9999-12-31T23:59:59-23:59", ""),
        ("yesterday", ""),
        (17, ""),
        (None, ""),
    ],
)
def test_the_time_of_a_container_is_utc_or_unknown(text: object, found: str) -> None:
    assert created_of({"created": text}) == found


def started(tmp_path: Path, place: str) -> subprocess.CompletedProcess[str]:
    tree = Tree(100)
    process = {"entrypoint": ["/bin/pwd"], "arguments": [], "working_dir": place}
    put_files(tree, process, tmp_path, 0)
    assert place in ("", "/") or tree.has(place)
    return subprocess.run(
        ["/bin/sh", str(tmp_path / "entrypoint")], cwd="/usr", capture_output=True, text=True, check=True
    )


def test_the_entrypoint_starts_in_the_working_directory(tmp_path: Path) -> None:
    place = tmp_path / "it's a $place"
    place.mkdir()
    assert started(tmp_path, str(place)).stdout == f"{place}\n"
    assert started(tmp_path, "").stdout == "/usr\n"
    done = started(tmp_path, f"{tmp_path}/absent")
    assert done.stdout == "/usr\n"
    assert done.stderr == (
        f"vhpc: the working directory {tmp_path}/absent of the container cannot be entered; staying in /usr\n"
    )


def test_a_working_directory_that_the_container_lacks_is_made(tmp_path: Path) -> None:
    tree = Tree(100)
    put_files(tree, {"working_dir": "/srv/app/"}, tmp_path, 0)
    node = tree.find("srv/app")
    assert node is not None
    assert (node.mode, node.uid, node.children) == (0o755, 0, {})
    for hostile in ("../../x", "/a/../../etc", "x" * 300, "\0"):
        put_files(tree, {"working_dir": hostile}, tmp_path, 0)
    assert set(tree.root.children or ()) == {"srv"}
    with pytest.raises(RefusedError, match=r"working directory .* cannot be a path"):
        put_files(tree, {"working_dir": "/\ud800"}, tmp_path, 0)


FUNCTION = "() {  eval `/usr/bin/modulecmd bash $*`\n}"


def test_an_environment_keeps_what_execve_takes(tmp_path: Path) -> None:
    """Entries of public images: dots, leading digits, minus signs, exported functions, several lines."""
    listed = [
        *(
            "PATH=/opt/bin:/bin",
            "com.example.conf-dir=/etc/x",
            "3D_HOME=/opt/3d",
            f"BASH_FUNC_module%%={FUNCTION}",
        ),
        *("MOTD=first\nsecond", "EMPTY=", "no-value", "PATH=/usr/bin:/bin"),
    ]
    process = process_of({"config": {"Env": listed}})
    assert process["environment"] == {
        "PATH": "/usr/bin:/bin",
        "com.example.conf-dir": "/etc/x",
        "3D_HOME": "/opt/3d",
        "BASH_FUNC_module%%": FUNCTION,
        "MOTD": "first\nsecond",
        "EMPTY": "",
    }
    put_files(Tree(100), process, tmp_path, 0)
    entries = (tmp_path / "environment").read_bytes().split(b"\0")
    wanted = [text.encode() for text in listed if "=" in text and text != "PATH=/opt/bin:/bin"]
    assert sorted(entries) == sorted([*wanted, b""])
    assert left_out_variables({"config": {"Env": listed}}) == ""
    # a shell finds all of them in its environment
    shown = subprocess.run(["env", "-0"], env=process["environment"], capture_output=True, check=True).stdout
    assert sorted(shown.split(b"\0")) == sorted(entries)


def test_variables_that_cannot_be_set_are_named() -> None:
    listed = ["=x", "A=\ud800", "B=a\0b", f"{'C' * 129}=", f"D={'x' * 32769}", "a\x1b[2J=1", "GOOD=1"]
    config = {"config": {"Env": listed}}
    assert process_of(config)["environment"] == {"GOOD": "1"}
    assert left_out_variables(config) == (
        "left out 6 variables: '', 'A', 'B' and 3 more "
        "(a name has 1 to 128 printable characters, a value at most 32 KiB)"
    )
    with pytest.raises(RefusedError, match="Env"):
        process_of({"config": {"Env": "A=1"}})


def test_labels_that_a_manifest_can_have_are_kept() -> None:
    good = {"org.opencontainers.image.version": "1.2", "containers.bootc": "1", "empty": ""}
    bad = {"Upper": "x", "vhpc/kernel-image": "forged", "x" * 129: "", "long": "x" * 1025, "lines": "a\nb"}
    odd: dict[str, object] = {"number": 7, "none": None, "": "x", "surrogate": "\ud800"}
    assert labels_of({"config": {"Labels": good | bad | odd}}) == good
    many = {f"label{n:03}": "" for n in range(200)}
    assert list(labels_of({"config": {"Labels": many}})) == [f"label{n:03}" for n in range(48)]
    for nothing in ({}, {"config": None}, {"config": {"Labels": None}}, {"config": {"Labels": ["x"]}}):
        assert labels_of(nothing) == {}


def test_labels_that_are_left_out_are_named(tmp_path: Path) -> None:
    """By the reader, as one line of its progress."""
    labels = {
        "a b": "1",
        "Vendor": "x",
        "lines": "a\nb",
        "z\x1b[2J": "",
        "good": "1",
        "vhpc/kernel-image": "no",
    }
    layout = Layout(tmp_path / "layout")
    image = layout.image([tar("x")], "mine", configuration={"Labels": labels})
    request = {
        "kind": "oci",
        "name": "mine",
        "variant": "",
        "arch": "x86_64",
        "compression": "",
        "max_bytes": 1 << 20,
        "max_files": 100,
    }
    (tmp_path / "out").mkdir()
    said: list[str] = []
    taken = take(request, layout.write(image), tmp_path, tmp_path / "out", said.append)
    assert taken.labels == {"good": "1"}
    assert [line for line in said if "label" in line] == [
        "left out 4 labels: 'Vendor', 'a b', 'lines' and 1 more (a key has a-z, 0-9 and ._/-, a value one "
        "line; at most 48)"
    ]


def test_the_line_on_labels_is_short_and_plain() -> None:
    many = {f"{'X' * 100}\n{number}": "" for number in range(5000)}
    line = left_out_labels({"config": {"Labels": many}})
    assert len(line) <= 200
    assert line.isprintable()
    for fine in ({}, {"config": None}, {"config": {"Labels": {"a": "b", "vhpc/x": "y"}}}):
        assert left_out_labels(fine) == ""
