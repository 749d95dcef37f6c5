# SPDX-License-Identifier: Apache-2.0
"""Tars that a hostile guest sends to vhpc cp: nothing outside of the user's folder is touched."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vhpc_slurm.cli.jobs.extract import TEMPORARY, extract
from vhpc_slurm.errors import UserError


def of(*entries: tuple[str, bytes, str | bytes]) -> bytes:
    """A tar of entries: name, type, and target of a link or content."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind, value in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = kind, 0o644
            if isinstance(value, bytes):
                entry.size = len(value)
            else:
                entry.linkname = value
            archive.addfile(entry, io.BytesIO(value) if isinstance(value, bytes) else None)
    return raw.getvalue()


FILE, DIR, LINK, HARD, FIFO = (
    tarfile.REGTYPE,
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
)


@contextlib.contextmanager
def target(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "to/existing").mkdir(parents=True, exist_ok=True)
    (tmp_path / "secret").write_text("mine")
    descriptor = os.open(tmp_path / "to", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "to"}
    assert [path for path in (tmp_path / "to").rglob("*") if path.name.startswith(TEMPORARY)] == []
    assert (tmp_path / "secret").read_text() == "mine"
    assert (tmp_path / "secret").stat().st_nlink == 1


HOSTILE = {
    "upwards": of(("../secret", FILE, b"theirs")),
    "absolute": of(("/tmp/theirs", FILE, b"theirs")),
    "down and upwards": of(("existing/../../secret", FILE, b"theirs")),
    "hard link upwards": of(("x", HARD, "../secret"), ("x", FILE, b"theirs")),
    "hard link absolute": of(("x", HARD, "/etc/passwd")),
    "file through a link": of(("x", LINK, "existing"), ("x/y", FILE, b"theirs")),
    "folder through a link": of(("x", LINK, "existing"), ("x/y", DIR, "")),
    "folder is a link": of(("x", LINK, "existing"), ("x", DIR, "")),
    "file in place of a folder": of(("existing", FILE, b"theirs")),
    "long name": of(("x" * 300, FILE, b"theirs")),
    "cut off": of(("a", FILE, bytes(2000)))[:1600],
    "no tar": b"no tar at all" * 100,
}


@pytest.mark.promise("attack.cp")
@pytest.mark.parametrize("tar", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_tar_is_refused(tmp_path: Path, tar: bytes) -> None:
    with target(tmp_path) as folder, pytest.raises(UserError):
        extract(io.BytesIO(tar), folder, is_new=False)


@pytest.mark.promise("attack.cp")
def test_links_that_lead_outside_are_left_out(tmp_path: Path) -> None:
    links = {
        "a": "/etc/passwd", "b": "../secret", "existing/c": "../../secret", "d": "existing/../../secret",
        "e": "", "f": "/", "existing/g": "../existing/../../x",
    }  # fmt: skip
    inside = {"i": "existing", "existing/j": "../i", "k": "./i/x", "l": "not-there"}
    entries = [(name, LINK, to) for name, to in (links | inside).items()]
    with target(tmp_path) as folder:
        result = extract(io.BytesIO(of(*entries, ("p", FIFO, ""))), folder, is_new=False)
    assert result.files == len(inside)
    assert result.left_out_line() == (
        "left out 7 links that lead outside: a -> /etc/passwd, b -> ../secret, existing/c -> ../../secret, "
        "d -> existing/../../secret, e -> and 2 more; 1 pipe: p"
    )
    found = {str(path.relative_to(tmp_path / "to")) for path in (tmp_path / "to").rglob("*")}
    assert found == {*inside, "existing"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write below /proc: run as root")
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """By the name that the user knows, not by that of the temporary file."""
    folder = os.open("/proc", os.O_RDONLY)
    try:
        with pytest.raises(UserError) as caught:
            extract(io.BytesIO(of(("./x", LINK, "y"))), folder, is_new=False)
    finally:
        os.close(folder)
    assert caught.value.line() == "cannot write what the guest has sent: ./x: No such file or directory"


def test_an_existing_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    with target(tmp_path) as folder:
        (tmp_path / "to/x").symlink_to("../secret")
        extract(io.BytesIO(of(("x", FILE, b"theirs"))), folder, is_new=False)
        assert (tmp_path / "to/x").read_bytes() == b"theirs"
        (tmp_path / "to/out").symlink_to("..")
        with pytest.raises(UserError):
            extract(io.BytesIO(of(("out/secret", FILE, b"theirs"))), folder, is_new=False)


@pytest.mark.promise("attack.cp")
def test_a_header_of_any_size_is_not_read(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 8 << 30
    with target(tmp_path) as folder, pytest.raises(UserError, match="a header of more than 128 KiB"):
        extract(io.BytesIO(header.tobuf(tarfile.GNU_FORMAT) + bytes(2048)), folder, is_new=False)


def test_existing_folders_keep_their_modes(tmp_path: Path) -> None:
    with target(tmp_path) as folder:
        (tmp_path / "to").chmod(0o711)
        tar = of((".", DIR, ""), ("existing", DIR, ""), ("new", DIR, ""))
        (tmp_path / "to/existing").chmod(0o500)
        extract(io.BytesIO(tar), folder, is_new=False)
        modes = [stat.S_IMODE((tmp_path / "to" / name).stat().st_mode) for name in (".", "existing", "new")]
        assert modes == [0o711, 0o500, 0o744]
