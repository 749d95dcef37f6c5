# SPDX-License-Identifier: Apache-2.0
"""Changes to a catalogue: readers see whole images, and a process may be killed at any point."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from site_catalog import publish, whole

from vhpc_slurm.catalog import FolderCatalog, changes, edit
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageRef

DAY_S = 86400.0


def ref(text: str) -> ImageRef:
    return ImageRef.parse(text)


def files_in(catalog: Path) -> set[str]:
    return {str(path.relative_to(catalog)) for path in catalog.rglob("*") if path.is_file()}


def test_another_name_has_the_same_digest(tmp_path: Path) -> None:
    digest = publish(tmp_path, "base", b"root")
    (image,) = edit.tag(tmp_path, ref("base"), ref("mine:1"))
    assert (str(image.ref), image.digest) == ("mine:1", digest)
    assert (tmp_path / "names/mine/1").read_text() == f"{digest}\n"
    assert (tmp_path / "names/mine/1").stat().st_mode & 0o777 == 0o644
    assert FolderCatalog(tmp_path).resolve(ref("mine:1")).digest == digest


def test_a_name_is_moved_back_by_a_digest(tmp_path: Path) -> None:
    first = publish(tmp_path, "base", b"first")
    publish(tmp_path, "base", b"second")
    edit.tag(tmp_path, ref(f"base@{first}"), ref("base"))
    assert FolderCatalog(tmp_path).resolve(ref("base")).digest == first


def test_invalid_tags_and_removals_are_refused(tmp_path: Path) -> None:
    digest = publish(tmp_path, "base", b"root")
    before = files_in(tmp_path)
    for change, says in (
        (
            lambda: edit.tag(tmp_path, ref("bose"), ref("x")),
            "image bose:latest is unknown .did you mean base",
        ),
        (lambda: edit.tag(tmp_path, ref("base"), ref(f"x@{digest}")), "it has a digest"),
        (lambda: edit.remove(tmp_path, ref("base:2")), "the catalogue has no image base:2"),
        (lambda: edit.remove(tmp_path, ref(f"base@{digest}")), "it has a digest"),
        (lambda: edit.remove(tmp_path / "absent", ref("base")), "cannot change the image catalogue"),
    ):
        with pytest.raises(UserError, match=says):
            change()
    assert files_in(tmp_path) - before <= {".lock"}


def test_removing_a_name_keeps_others_and_the_bytes(tmp_path: Path) -> None:
    digest = publish(tmp_path, "base", b"root")
    edit.tag(tmp_path, ref("base"), ref("base:1"))
    assert edit.remove(tmp_path, ref("base")) == (digest,)
    assert whole(tmp_path) == ["base:1"]
    assert edit.remove(tmp_path, ref("base:1")) == (digest,)
    assert not (tmp_path / "names/base").exists()
    assert FolderCatalog(tmp_path).resolve(ref(f"base@{digest}")).digest == digest


def test_a_name_without_digest_can_be_removed(tmp_path: Path) -> None:
    publish(tmp_path, "base", b"root")
    (tmp_path / "names/base/bad").write_bytes(b"\xff")
    assert edit.remove(tmp_path, ref("base:bad")) == ()


@pytest.mark.promise("image.gc")
def test_an_image_without_a_name_is_deleted_after_its_time(tmp_path: Path) -> None:
    old = publish(tmp_path, "base", b"old root")
    publish(tmp_path, "base", b"new root")
    first = edit.collect(tmp_path, 7 * DAY_S)
    assert (first.removed, [digest for digest, _ in first.waiting]) == ((), [old])
    mark = tmp_path / "unnamed/sha256" / old[7:]
    os.utime(mark, (0, 0))
    later = edit.collect(tmp_path, 7 * DAY_S)
    root = hashlib.sha256(b"old root").hexdigest()
    assert [(item.kind, item.name) for item in later.removed] == [("manifest", old[7:]), ("blob", root)]
    assert later.removed[1].size == len(b"old root")
    assert not mark.exists()
    assert whole(tmp_path) == ["base:latest"], "kernel and initrd are needed by the other image"


def test_a_name_in_time_saves_an_image(tmp_path: Path) -> None:
    old = publish(tmp_path, "base", b"old")
    publish(tmp_path, "base", b"new")
    edit.collect(tmp_path, DAY_S)
    os.utime(tmp_path / "unnamed/sha256" / old[7:], (0, 0))
    edit.tag(tmp_path, ref(f"base@{old}"), ref("kept"))
    assert edit.collect(tmp_path, DAY_S).removed == ()
    edit.remove(tmp_path, ref("kept"))
    assert edit.collect(tmp_path, DAY_S).removed == (), "the time counts from the loss of the last name"


def test_a_name_that_is_a_link_keeps_its_image(tmp_path: Path) -> None:
    digest = publish(tmp_path, "base", b"root")
    path = tmp_path / "names/base/latest"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to("../../elsewhere")
    path.with_name("broken").symlink_to("nothing")
    assert edit.collect(tmp_path, 0).removed == ()
    assert FolderCatalog(tmp_path).resolve(ref("base")).digest == digest


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    old = publish(tmp_path, "base", b"old")
    publish(tmp_path, "base", b"new")
    (tmp_path / "blobs/sha256/.new-x").write_bytes(b"torn")
    (tmp_path / ".lock").touch()
    before = files_in(tmp_path)
    assert [digest for digest, _ in edit.collect(tmp_path, DAY_S, dry_run=True).waiting] == [old]
    kinds = [item.kind for item in edit.collect(tmp_path, 0, dry_run=True).removed]
    assert kinds == ["manifest", "blob", "file"]
    assert files_in(tmp_path) == before


def test_only_files_of_the_catalogue_are_deleted(tmp_path: Path) -> None:
    publish(tmp_path, "base", b"root")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"x")
    link = tmp_path / "blobs/sha256" / ("0" * 64)
    link.symlink_to(elsewhere)
    (tmp_path / "blobs/sha256/README").write_text("the site's")
    (tmp_path / "manifests/sha256/README.json").write_text("the site's")
    (tmp_path / "names/base/.new-latest").write_text("torn")
    removed = edit.collect(tmp_path, 0).removed
    assert [(item.kind, item.name) for item in removed] == [("file", ".new-latest")]
    assert elsewhere.exists()
    assert link.is_symlink()


def test_a_manifest_that_cannot_be_read_keeps_all_blobs(tmp_path: Path) -> None:
    publish(tmp_path, "base", b"root")
    digest = publish(tmp_path, "newer", b"other")
    path = tmp_path / f"manifests/sha256/{digest[7:]}.json"
    path.write_bytes(path.read_bytes() + b" ")
    unused = tmp_path / "blobs/sha256" / hashlib.sha256(b"unused").hexdigest()
    unused.write_bytes(b"unused")
    found = edit.collect(tmp_path, 0)
    assert found.removed == ()
    assert len(found.broken) == 1
    assert digest in found.broken[0]
    edit.remove(tmp_path, ref("newer"))
    assert {item.kind for item in edit.collect(tmp_path, 0).removed} == {"manifest", "blob"}
    assert not unused.exists()


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes the n-th system call that changes the catalogue the end of the process."""
    left = [-1]

    def counted(name: str) -> None:
        original = getattr(os, name)

        def call(*arguments: object, **named: object) -> object:
            if left[0] == 0:
                raise KilledError
            left[0] -= 1
            return original(*arguments, **named)

        monkeypatch.setattr(os, name, call)

    for name in ("unlink", "replace", "rename", "mkdir", "rmdir", "fsync"):
        counted(name)

    def at(number: int) -> None:
        left[0] = number

    yield at
    left[0] = -1


@pytest.mark.promise("image.gc")
@pytest.mark.parametrize("what", ["tag", "move", "remove", "collect"])
def test_a_kill_at_any_point_leaves_whole_images(
    tmp_path: Path, what: str, killed_at: Callable[[int], None]
) -> None:
    kills = 0
    for number in range(40):
        catalog = tmp_path / str(number)
        publish(catalog, "base", b"one")
        publish(catalog, "base", b"two")
        publish(catalog, "other", b"three")
        changes: dict[str, Callable[[], object]] = {
            "tag": partial(edit.tag, catalog, ref("base"), ref("new")),
            "move": partial(edit.tag, catalog, ref("base"), ref("other")),
            "remove": partial(edit.remove, catalog, ref("other")),
            "collect": partial(edit.collect, catalog, 0),
        }
        killed_at(number)
        try:
            changes[what]()
        except KilledError:
            kills += 1
            killed_at(-1)
            assert "base:latest" in whole(catalog)
            edit.collect(catalog, 0)
            assert not list(catalog.rglob(".new-*"))
            if what != "remove" or "other:latest" in whole(catalog):
                changes[what]()
            assert "base:latest" in whole(catalog)
        else:
            killed_at(-1)
            break
    assert kills > 1
    assert number < 39, "the change ended by itself"


def test_a_publisher_at_work_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, "base", b"root")
    monkeypatch.setattr(changes, "LOCK_TIMEOUT_S", 0.1)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is in use"):
            edit.collect(tmp_path, 0)
    edit.collect(tmp_path, 0)


@pytest.mark.promise("attack.catalogue-delete")
@pytest.mark.skipif(os.geteuid() != 0, reason="run as root: the test needs a folder of another user")
def test_root_changes_no_catalogue_of_another_user(tmp_path: Path) -> None:
    publish(tmp_path, "base", b"root")
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(UserError, match=r"belongs to uid 65534.*run the command as that user"):
        edit.remove(tmp_path, ref("base"))
    assert whole(tmp_path) == ["base:latest"]
