# SPDX-License-Identifier: Apache-2.0
"""Saving a guest and restoring it, with real FIFOs and files, and with those that others have changed."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import KEY, RESUME, changed, full_after, names, nothing_is_left, root
from libvirt_ends import NEW_XML, PADDED, XML, Restored, header, snapshot, state
from stepd import needs_root

from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import SavedGuest, Seal
from vhpc_slurm.node.checkpoint import folder, image, restore, save
from vhpc_slurm.node.checkpoint.seal import CHUNK, BrokenSealError

__all__ = ["nothing_is_left", "root"]
pytestmark = needs_root
LEAST = 200_000
"""A state fits into no pipe: libvirt cannot open the second FIFO before the first one is read."""
SIZES = (LEAST, CHUNK - 92 - PADDED, CHUNK, 2 * CHUNK + 777)


def saved_state(root: Path, tmp_path: Path, data: bytes, final: bytes | None = None) -> Seal:
    end = header() if final is None else final
    with folder.made(root, 7) as place:
        return save.save_state(place, KEY, tmp_path / "fifo", lambda path: snapshot(path, data, end))


def restored(root: Path, tmp_path: Path, seal: Seal, reader: Restored | None = None) -> Restored:
    guest = SavedGuest(0, "n1", 1, 1, seal)
    libvirt = reader or Restored()
    restore.restore_state(root, RESUME, guest, tmp_path / "fifo", NEW_XML, libvirt.load)
    return libvirt


@pytest.mark.parametrize("size", SIZES)
def test_a_saved_state_is_restored_under_the_new_name(root: Path, tmp_path: Path, size: int) -> None:
    data = state(size)
    seal = saved_state(root, tmp_path, data)
    assert (root / "7/0.state").read_bytes() == header() + data[92:]
    assert seal.size == len(data)
    assert (root / "7/0.state").stat().st_mode & 0o777 == 0o600
    libvirt = restored(root, tmp_path, seal)
    assert libvirt.all[92 + PADDED :] == data[92 + PADDED :]
    assert libvirt.head == libvirt.all[: 92 + PADDED]
    head = image.parse(libvirt.all)
    assert head.xml.decode().count("<name>vhpc-43-0-ffffffff-g0</name>") == 1
    assert head.xml.decode().count("<uuid>99999999-") == 1
    assert "<x>é</x>" in head.xml.decode()
    assert head.cookie == b"<qemusave><cpu/></qemusave>"


def test_an_opening_that_reads_little_is_served_again(root: Path, tmp_path: Path) -> None:
    data = state(CHUNK + 5)
    libvirt = restored(root, tmp_path, saved_state(root, tmp_path, data), Restored(probes=2))
    assert libvirt.all[92 + PADDED :] == data[92 + PADDED :]


def test_a_longer_name_makes_the_head_longer() -> None:
    xml = "<domain><name>a</name><uuid>b</uuid></domain>" + "x" * (PADDED - 80)
    begin = header(xml=xml) + (xml.encode() + b"\0<c/>\0").ljust(PADDED, b"\0")
    old = image.parse(begin)
    new = image.parse(old.renamed("a" * 60, "b" * 36).packed())
    assert (new.length > PADDED, new.cookie, len(new.packed())) == (True, b"<c/>", new.size)
    assert image.parse(new.renamed("a", "b").packed()).xml == old.xml


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (b"x" * 91, "it has 91 bytes"),
        (b"x" * 92, "it is not libvirt's"),
        (header(b"LibvirtQemudPart"), "libvirt has not completed it"),
        (header(version=3), "version 3"),
        (header(), "shorter than its XML"),
        (header() + b"x" * PADDED, "its XML is cut off"),
        (header() + bytes(PADDED), None),
    ],
    ids=["short", "foreign", "unfinished", "newer", "no-xml", "cut-xml", "no-name"],
)
def test_a_head_that_cannot_be_used_is_refused(begin: bytes, why: str | None) -> None:
    with pytest.raises(image.HeadError, match=why or "its XML has no name"):
        image.parse(begin).renamed("a", "b")


@pytest.mark.parametrize(
    "final",
    [b"", b"short", header()[:91], header() + b"x", header(b"LibvirtQemudPart"), b"x" * 92],
    ids=["none", "short", "cut", "longer", "unfinished", "foreign"],
)
def test_a_save_without_libvirts_final_header_leaves_nothing(
    root: Path, tmp_path: Path, final: bytes
) -> None:
    with pytest.raises(NodeError, match="not a saved guest"):
        saved_state(root, tmp_path, state(LEAST), final)
    assert names(root / "7") == []


@pytest.mark.parametrize("openings", [0, 1])
def test_a_libvirt_that_fails_leaves_nothing(root: Path, tmp_path: Path, openings: int) -> None:
    def fails(path: str) -> None:
        for _ in range(openings):
            Path(path).write_bytes(state(CHUNK * 2))
        raise NodeError("cannot save the guest", "libvirt says no")

    with folder.made(root, 7) as place, pytest.raises(NodeError, match="libvirt says no"):
        save.save_state(place, KEY, tmp_path / "fifo", fails)
    assert names(root / "7") == []


def test_libvirt_that_opens_once_only_is_not_waited_for(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(path: str) -> None:
        Path(path).write_bytes(state(LEAST))

    monkeypatch.setattr(save, "GRACE_S", 0.2)
    with folder.made(root, 7) as place, pytest.raises(NodeError, match="not a saved guest"):
        save.save_state(place, KEY, tmp_path / "fifo", once)
    assert names(root / "7") == []


@pytest.mark.parametrize("writes", [0, 1, 3])
def test_a_full_file_system_ends_the_save_of_the_state(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """QEMU gets EPIPE; the message is that of the file system."""
    full_after(monkeypatch, writes)
    with pytest.raises(NodeError, match=r"cannot write .*0\.state: No space left.*vhpc checkpoint rm"):
        saved_state(root, tmp_path, state(20 * CHUNK))
    assert names(root / "7") == []


def test_a_partial_write_is_continued(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: len(data) // 2 + 1], at))
    data = state(CHUNK)
    assert restored(root, tmp_path, saved_state(root, tmp_path, data)).all.endswith(data[-CHUNK:])


# --- hostile files ----------------------------------------------------------------------


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def as_link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HOSTILE: list[tuple[str, Callable[[Path], None], str]] = [
    ("changed head", lambda path: changed(path / "0.state", 30, b"\x01"), "its bytes from 0 on were changed"),
    (
        "changed byte",
        lambda path: changed(path / "0.state", CHUNK + 9, b"!"),
        f"from {CHUNK} on were changed",
    ),
    ("short", lambda path: os.truncate(path / "0.state", CHUNK + 10), f"it ends after {CHUNK + 10}"),
    ("empty", lambda path: os.truncate(path / "0.state", 0), "it ends after 0"),
    ("longer", lambda path: appended(path / "0.state"), "it has more than"),
    ("tags", lambda path: changed(path / "0.state.tags", 0, b"x"), "its tags were changed"),
    ("long tags", lambda path: changed(path / "0.state.tags", 96, b"x"), "its tags were changed"),
    ("no tags", lambda path: (path / "0.state.tags").unlink(), "No such file"),
    ("no state", lambda path: (path / "0.state").unlink(), "No such file"),
    ("link", lambda path: as_link(path / "0.state"), "symbolic links"),
    ("link of tags", lambda path: as_link(path / "0.state.tags"), "symbolic links"),
    ("linked folder", as_link, "Not a directory|symbolic links"),
    ("fifo", lambda path: as_fifo(path / "0.state"), "not a regular file"),
    ("fifo of tags", lambda path: as_fifo(path / "0.state.tags"), "not a regular file"),
]


@pytest.mark.parametrize(("attack", "why"), [one[1:] for one in HOSTILE], ids=[one[0] for one in HOSTILE])
def test_changed_files_are_refused(
    root: Path, tmp_path: Path, attack: Callable[[Path], None], why: str
) -> None:
    seal = saved_state(root, tmp_path, state(2 * CHUNK + 777))
    attack(root / "7")
    libvirt = Restored()
    with pytest.raises(UserError, match=why):
        restored(root, tmp_path, seal, libvirt)
    if "were changed" in why:
        assert len(libvirt.all) <= CHUNK


def test_changed_bytes_never_reach_libvirt(root: Path, tmp_path: Path) -> None:
    seal = saved_state(root, tmp_path, state(2 * CHUNK))
    changed(root / "7/0.state", CHUNK, b"evil")
    libvirt = Restored()
    with pytest.raises(BrokenSealError):
        restored(root, tmp_path, seal, libvirt)
    assert b"evil" not in libvirt.all


def test_a_fifo_reader_that_goes_away_does_not_hang_the_restore(root: Path, tmp_path: Path) -> None:
    seal = saved_state(root, tmp_path, state(2 * CHUNK))

    def load(path: str) -> None:
        Restored(most=100_000).load(path)
        raise NodeError("cannot restore the guest", "QEMU ended")

    guest = SavedGuest(0, "n1", 1, 1, seal)
    with pytest.raises(NodeError, match="QEMU ended"):
        restore.restore_state(root, RESUME, guest, tmp_path / "fifo", NEW_XML, load)


@pytest.mark.parametrize("openings", [0, 1])
def test_a_libvirt_that_does_not_restore_is_not_waited_for(root: Path, tmp_path: Path, openings: int) -> None:
    seal = saved_state(root, tmp_path, state(2 * CHUNK))

    def load(path: str) -> None:
        for _ in range(openings):
            os.close(os.open(path, os.O_RDONLY))
        raise NodeError("cannot restore the guest", "libvirt says no")

    guest = SavedGuest(0, "n1", 1, 1, seal)
    with pytest.raises(NodeError, match="libvirt says no"):
        restore.restore_state(root, RESUME, guest, tmp_path / "fifo", NEW_XML, load)


def test_files_of_links_are_not_written_through(root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("safe")
    (root / "7").mkdir(mode=0o700)
    (root / "7/0.state").symlink_to(victim)
    (root / "7/0.state.tags").symlink_to(victim)
    seal = saved_state(root, tmp_path, state(LEAST))
    assert victim.read_text() == "safe"
    assert restored(root, tmp_path, seal).all


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o777])
def test_a_folder_that_others_may_enter_is_refused(root: Path, mode: int) -> None:
    root.chmod(mode)
    with pytest.raises(NodeError, match=f"mode {mode:o}, not 0 and 700"), folder.made(root, 7):
        pass
    root.chmod(0o700)
    os.chown(root, 5, -1)
    with pytest.raises(NodeError, match="belongs to uid 5"), folder.found(root, 7):
        pass


def test_a_linked_folder_of_a_checkpoint_is_not_written_to(root: Path, tmp_path: Path) -> None:
    (root / "7").symlink_to(tmp_path)
    with pytest.raises(NodeError, match="cannot be used for checkpoints"), folder.made(root, 7):
        pass
    with pytest.raises(NodeError, match="cannot be used for checkpoints"):
        folder.remove(root, 7, (0,))


def test_files_of_a_guest_are_removed_and_those_of_others_kept(root: Path, tmp_path: Path) -> None:
    saved_state(root, tmp_path, state(LEAST))
    (root / "7/1.state").touch()
    (root / "x").touch()
    folder.remove(root, 7, (0,))
    assert names(root / "7") == ["1.state"]
    folder.remove(root, 7, (1,))
    folder.remove(root, 7, (1,))
    assert names(root) == ["x"]


def test_a_file_system_without_direct_io_is_used(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite, os.preadv

    def refused(number: int) -> Callable[..., int]:
        def call(fd: int, data: Any, at: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O")
            result: int = real[number](fd, data, at)
            return result

        return call

    monkeypatch.setattr(os, "pwrite", refused(0))
    monkeypatch.setattr(os, "preadv", refused(1))
    data = state(CHUNK)
    assert restored(root, tmp_path, saved_state(root, tmp_path, data)).all.endswith(data[-CHUNK:])


def test_the_xml_of_the_rig_is_what_libvirt_writes() -> None:
    assert XML.index("<name>") < XML.index("<uuid>")
