# SPDX-License-Identifier: Apache-2.0
"""A node asks its own policy before it boots an image, and believes a lease only what it cannot check."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import site_catalog
from boot_rig import USER, BootRig, boot_layout, finished, prepared, run
from stepd import needs_root

from vhpc_slurm.catalog import FolderCatalog, edit
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import Blob, ImageIdentity, ImageRef
from vhpc_slurm.node.boot import permission, start
from vhpc_slurm.node.store import blobsource, copying, images, manifests
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.policy import signatures

layout = boot_layout
pytestmark = needs_root
SIGNED: dict[str, Any] = {"name": "signed only", "partitions": ["main"], "signers": ["ops@*"]}
NAMED: dict[str, Any] = {"name": "base only", "images": ["base:*"]}


def keygen(*arguments: str, stdin: bytes = b"") -> bytes:
    return subprocess.run(["ssh-keygen", *arguments], input=stdin, capture_output=True, check=True).stdout


@dataclass
class Site:
    """A node with a boot of the image ``base`` of the site, and keys of ops and eve."""

    folder: Path
    rig: BootRig

    @property
    def catalog(self) -> Path:
        return self.folder / "catalog"

    @property
    def image(self) -> ImageIdentity:
        return self.rig.work.image

    def key(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            keygen("-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path))
        return path

    def sign(self, name: str, catalog: Path | None = None) -> None:
        catalog = catalog or self.catalog
        manifest = FolderCatalog(catalog).read_signed(self.image).manifest
        made = keygen("-Y", "sign", "-q", "-n", "vhpc-image", "-f", str(self.key(name)), stdin=manifest)
        edit.add_signature(catalog, self.image, made)

    def rules(self, *rules: dict[str, Any], **images: Any) -> None:
        """The rules in the node's vhpc.toml."""
        raw = msgspec.to_builtins(self.rig.work.layout.config)
        raw["policy"] = [*rules]
        raw["images"] |= {"allowed_signers": str(self.folder / "allowed_signers")} | images
        self.rig.change(layout=Layout(msgspec.convert(raw, Config)))

    def asks(self, image: ImageIdentity, **request: Any) -> None:
        """What the lease has."""
        work = self.rig.work
        asked = replace(work.lease.request, image=image.ref, **({"partition": "main"} | request))
        self.rig.change(image=image, lease=replace(work.lease, image=image, request=asked))

    def check(self) -> int:
        """Ask the policy; returns how often the caller could look whether the job still exists."""
        waits, asking = 0, permission.check(self.rig.work)
        while True:
            try:
                next(asking)
            except StopIteration as end:
                self.rig.change(image=end.value)
                return waits
            waits += 1

    def refusal(self) -> str:
        with pytest.raises(permission.RefusedHereError) as caught:
            self.check()
        return caught.value.line()


@pytest.fixture
def site(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = Path(layout.config.images.catalog).parent
    folder.chmod(0o755)
    found = Site(folder, prepared(layout, monkeypatch))
    site_catalog.publish(found.catalog, "base", b"root")
    found.asks(FolderCatalog(found.catalog).resolve(ImageRef("base")))
    public = found.key("ops").with_suffix(".pub").read_text()
    (folder / "allowed_signers").write_text(f"ops@hpc.example {public}")
    yield found
    found.rig.work.journal.close()


@pytest.mark.promise("policy.node")
def test_an_image_that_this_node_refuses_boots_nothing(site: Site) -> None:
    """vhpcd has no rule, or another one: its lease is as good as any."""
    site.rules(SIGNED)
    with pytest.raises(permission.RefusedHereError) as caught:
        run(site.rig)
    assert caught.value.line() == (
        "policy rule 'signed only' does not permit image base:latest on n1: the image needs a signature of "
        "ops@* (vhpc.toml or the signers of n1 differ from those of vhpcd, which has permitted it, or have "
        "changed since; tell the site's support)"
    )
    assert caught.value.cause == "policy rule 'signed only' of the node refuses what vhpcd has permitted"
    assert site.rig.hypervisor.domains == []
    assert not Path(site.rig.work.layout.config.images.store).exists()


def test_a_signed_image_passes_and_another_key_does_not(site: Site) -> None:
    site.rules(SIGNED)
    site.sign("eve")
    assert "a key that images.allowed_signers does not have" in site.refusal()
    site.sign("ops")
    site.check()
    stages = [stage.name for stage in site.rig.work.recorder.timeline().stages]
    assert stages == ["policy", "policy"]
    revoked = site.folder / "revoked"
    shutil.copy(site.key("ops").with_suffix(".pub"), revoked)
    site.rules(SIGNED, revoked_signers=str(revoked))
    assert "revoked" in site.refusal()


def test_rules_are_those_of_the_node_and_of_the_jobs_user(site: Site) -> None:
    site.rules(SIGNED)
    site.asks(site.image, partition="other")
    site.check()
    site.rules({"name": "none", "users": ["alice"], "images": []})
    site.asks(site.image, user="root")
    assert "rule 'none' does not permit image base:latest on n1: it permits no image" in site.refusal()


def test_without_a_rule_nothing_is_read(site: Site) -> None:
    site.rules()
    shutil.rmtree(site.catalog / "manifests")
    before = site.image
    site.check()
    assert site.image is before
    assert site.rig.work.recorder.timeline().stages == ()


@pytest.mark.promise("policy.node")
@pytest.mark.parametrize("what", ["root", "kernel", "initrd"])
def test_files_that_are_not_those_of_the_digest_are_not_booted(site: Site, what: str) -> None:
    """The lease has the digest of a permitted image, and the file of another one."""
    site.rules(NAMED)
    other = replace(site.image.manifest, **{what: Blob(what, "e" * 64, 4)})  # type: ignore[arg-type]
    site.asks(replace(site.image, manifest=other))
    with pytest.raises(
        FabricError, match="the lease of the job has other files than image base:latest@sha256"
    ):
        site.check()


@pytest.mark.promise("policy.node")
def test_the_booted_image_is_the_one_that_the_node_has_read(site: Site) -> None:
    site.rules(NAMED)
    true = site.image
    site.asks(replace(true, manifest=replace(true.manifest, cmdline="init=/bin/sh", init="/bin/sh")))
    site.check()
    assert site.image == true


@pytest.mark.promise("policy.node")
def test_a_name_that_means_another_image_is_no_permission(site: Site) -> None:
    """As if vhpcd said that ``base`` was an unknown image."""
    site.rules(NAMED)
    other = site_catalog.publish(site.catalog, "other", b"another root")
    site.asks(replace(FolderCatalog(site.catalog).resolve(ImageRef("other")), ref=ImageRef("base")))
    with pytest.raises(FabricError, match=f"image base:latest is not {other}"):
        site.check()
    site.asks(FolderCatalog(site.catalog).resolve(ImageRef("base", digest=other)))
    assert "'base only' does not permit image base:latest@sha256:" in site.refusal()
    edit.tag(site.catalog, ImageRef("other"), ImageRef("base", "2"))
    site.check()


def test_a_node_that_cannot_check_signatures_says_why(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.sign("ops")
    site.rules(SIGNED, allowed_signers=str(site.folder / "no"))
    with pytest.raises(FabricError, match=r"signatures of images on n1: .*/no: it does not exist"):
        site.check()
    site.rules(SIGNED)
    monkeypatch.setattr(signatures, "SEARCH", "/nowhere")
    with pytest.raises(FabricError, match="on n1: this host has no ssh-keygen"):
        site.check()


@pytest.mark.promise("attack.policy-read")
def test_ssh_keygen_has_no_rights(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site's files are for root only, and a process without rights parses a user's signatures."""
    programs, seen = site.folder / "programs", site.folder / "seen"
    programs.mkdir()
    seen.mkdir()
    seen.chmod(0o777)
    (programs / "ssh-keygen").write_text(
        f'#!/bin/sh\nwhile read -r l; do echo "$l"; done </proc/$$/status >{seen}/$$\n'
        f'exec {shutil.which("ssh-keygen")} "$@"\n'
    )
    (programs / "ssh-keygen").chmod(0o755)
    (site.folder / "allowed_signers").chmod(0o600)
    site.sign("ops")
    site.rules(SIGNED)
    monkeypatch.setattr(signatures, "SEARCH", str(programs))
    site.check()
    told = [dict(line.split(":\t", 1) for line in path.read_text().splitlines() if ":\t" in line)
            for path in seen.iterdir()]  # fmt: skip
    assert len(told) == 2, "one finds the principal, one checks the signature"
    for one in told:
        assert one["Uid"].split() == one["Gid"].split() == ["65534"] * 4
        assert (one["CapEff"], one["CapBnd"], one["NoNewPrivs"]) == ("0" * 16, "0" * 16, "1")


# --- what is changed between the check and its use ----


@pytest.mark.promise("attack.image-swap")
@pytest.mark.parametrize("part", ["kernel", "initrd", "root"])
def test_own_bytes_swapped_after_the_check_are_not_staged(site: Site, own: Path, part: str) -> None:
    """The image is signed; its owner then puts other bytes, as many, under the digest of a file of it."""
    site.check()
    blob = getattr(site.image.manifest, part)
    path = own / "blobs/sha256" / blob.sha256
    path.write_bytes(bytes(blob.size))
    with pytest.raises(UserError, match=f"image own/base:latest is damaged: {part}: it has sha256"):
        list(start.stage_image(site.rig.work))
    store = site.rig.work.layout.blobs_of(USER.uid)
    assert not (store / blob.sha256).exists()
    assert not list(store.glob("*.part"))


@pytest.mark.promise("attack.image-swap")
def test_a_manifest_swapped_after_the_check_changes_nothing(site: Site, own: Path) -> None:
    """The name and the digest's own file then lead to another image, whose files are whole."""
    site.check()
    checked = site.image
    other = site_catalog.publish(own, "base", b"another root")
    raw = (own / f"manifests/sha256/{other[7:]}.json").read_bytes()
    (own / f"manifests/sha256/{checked.digest[7:]}.json").write_bytes(raw)
    for path in own.rglob("*"):
        os.chown(path, USER.uid, USER.gid)
    assert finished(start.stage_image(site.rig.work)).root.read_bytes() == b"root"
    with pytest.raises(
        UserError, match=f"image own/base:latest is broken: manifest: expected {checked.digest}"
    ):
        site.check()


@pytest.mark.promise("attack.image-swap")
def test_a_name_moved_after_the_check_does_not_move_the_boot(site: Site) -> None:
    site.rules(NAMED)
    site.check()
    digest = site.image.digest
    site_catalog.publish(site.catalog, "base", b"another root")
    assert finished(start.stage_image(site.rig.work)).root.read_bytes() == b"root"
    assert site.image.digest == digest


@pytest.mark.promise("attack.image-swap")
@pytest.mark.parametrize("how", ["overwritten", "replaced"])
def test_bytes_swapped_within_a_copy_are_not_staged(
    site: Site, own: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the copy the owner puts other bytes into the file, or another file in its place."""
    size = 8 << 20
    site_catalog.publish(own, "base", b"x" * size)
    for path in own.rglob("*"):
        os.chown(path, USER.uid, USER.gid)
    site.asks(replace(FolderCatalog(own).resolve(ImageRef("base")), ref=ImageRef("base", own=True)))
    blob = site.image.manifest.root
    path = own / "blobs/sha256" / blob.sha256
    monkeypatch.setattr(images, "CHECK_S", 0.0)
    monkeypatch.setattr(copying, "CHUNK", 1 << 16)
    staging = start.stage_image(site.rig.work)
    for _ in range(40):
        next(staging)
    if how == "replaced":
        path.rename(own / "kept")
    path.write_bytes(b"!" * size)
    next(staging)
    if how == "overwritten":
        with pytest.raises(UserError, match=r"^image own/base:latest is damaged: root: it has sha256"):
            finished(staging)
    else:  # the copy goes on with the file that it has open
        assert finished(staging).root.read_bytes() == b"x" * size


# --- images of users' own -----------------------------------------------------


@pytest.fixture
def own(site: Site) -> Path:
    """The image is alice's own now, in a catalogue that no other user can read, signed by ops."""
    folder = site.folder / "alice"
    site.catalog.rename(folder)
    site.asks(replace(site.image, ref=ImageRef("base", own=True)))
    site.sign("ops", folder)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER.uid, USER.gid)
        path.chmod(0o700 if path.is_dir() else 0o600)
    site.rules(SIGNED, user_catalog=f"{site.folder}/{{user}}")
    return folder


def replaced(path: Path) -> Path:
    """The path without what was there."""
    with contextlib.suppress(IsADirectoryError):
        path.unlink()
        return path
    shutil.rmtree(path)
    return path


@pytest.mark.promise("policy.node")
def test_an_own_image_is_checked_with_its_users_rights(site: Site, own: Path) -> None:
    site.check()
    digest = site.image.digest[7:]
    (own / "signatures/sha256" / digest).unlink()
    assert "rule 'signed only' does not permit image own/base:latest on n1: the image needs" in site.refusal()
    (own / "manifests/sha256" / f"{digest}.json").unlink()
    with pytest.raises(UserError, match=r"image own/base:latest is broken: .*No such file"):
        site.check()


@pytest.mark.promise("attack.policy-read")
@pytest.mark.parametrize("what", ["manifests/sha256/{}.json", "signatures/sha256/{}", "signatures", "."])
def test_a_link_to_what_root_can_read_shows_nothing(site: Site, own: Path, what: str) -> None:
    """A copy of what alice has is root's own; she makes links to it."""
    roots = site.folder / "roots"
    shutil.copytree(own, roots)
    for path in (roots, *roots.rglob("*")):
        os.chown(path, 0, 0)
    place = what.format(site.image.digest[7:])
    replaced(own / place).symlink_to(roots / place)
    with pytest.raises(UserError, match="Permission denied"):
        site.check()


@pytest.mark.promise("attack.catalogue-read")
@pytest.mark.parametrize("what", ["manifests/sha256/{}.json", "signatures/sha256/{}"])
def test_a_hard_link_to_what_root_can_read_shows_nothing(site: Site, own: Path, what: str) -> None:
    path = own / what.format(site.image.digest[7:])
    roots = site.folder / "roots"
    shutil.copy(path, roots)
    roots.chmod(0o600)
    replaced(path).hardlink_to(roots)
    with pytest.raises(UserError, match="Permission denied"):
        site.check()


@pytest.mark.promise("attack.policy-read")
@pytest.mark.parametrize("what", ["manifests/sha256/{}.json", "signatures/sha256/{}"])
@pytest.mark.parametrize("how", ["pipe", "zeros", "folder"])
def test_an_own_special_file_ends_the_check(site: Site, own: Path, what: str, how: str) -> None:
    path = replaced(own / what.format(site.image.digest[7:]))
    {"pipe": os.mkfifo, "zeros": lambda at: at.symlink_to("/dev/zero"), "folder": os.mkdir}[how](path)
    if how != "zeros":
        os.chown(path, USER.uid, USER.gid)
    with pytest.raises(UserError):
        site.check()


@pytest.mark.promise("attack.policy-read")
def test_a_catalogue_that_hangs_is_its_users_error(
    site: Site, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = site.folder / "dd"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(blobsource, "DD", str(hanging))
    monkeypatch.setattr(manifests, "CHECK_S", 0.05)
    raw = msgspec.to_builtins(site.rig.work.layout.config)
    raw["guests"]["stage_timeout_s"] = 1
    site.rig.change(layout=Layout(msgspec.convert(raw, Config)))
    asking = permission.check(site.rig.work)
    next(asking)  # the caller can look whether the job still exists
    next(asking)
    with pytest.raises(UserError, match="is the file system of your catalogue slow"):
        list(asking)
