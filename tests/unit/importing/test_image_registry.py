# SPDX-License-Identifier: Apache-2.0
"""vhpc image push and pull with a real registry on loopback."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from containers import Layout, tar
from kill_rig import kills
from registry import Registry, registry
from site_catalog import publish, whole

from vhpc_slurm.catalog import FolderCatalog, edit
from vhpc_slurm.catalog.changes import STAGING
from vhpc_slurm.cli import options
from vhpc_slurm.cli.images.registry import pull as pull_verb
from vhpc_slurm.cli.images.registry import push as push_verb
from vhpc_slurm.config import Config
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import pull as pulling
from vhpc_slurm.importing.cached import image_of, name_for
from vhpc_slurm.importing.fetch import fetch_artifact
from vhpc_slurm.importing.imports import import_image
from vhpc_slurm.importing.offer import look
from vhpc_slurm.importing.pull import Pulled, pull
from vhpc_slurm.importing.push import Pushed, push
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import ImageRef

pytestmark = pytest.mark.xdist_group("registry")
ROOT = bytes(range(256)) * 5000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    top = tmp_path_factory.mktemp("registry")
    with registry(top) as found:
        word = base64.b64encode(b"alice:secret").decode()
        found.login.write_text(json.dumps({"auths": {found.address: {"auth": word}}}))
        layout = Layout(top / "layout")
        layout.write(layout.image([tar("a/")], "box"))
        found.push(f"oci:{layout.top}:box", "team/box:1")
        yield found


@dataclass
class Site:
    """A catalogue with the image ``base``, another catalogue, and the registry."""

    top: Path
    server: Registry
    images: Images
    digest: str

    @property
    def catalog(self) -> Path:
        return self.top / "site"

    @property
    def other(self) -> Path:
        return self.top / "other"

    def at(self, name: str) -> str:
        return f"docker://{self.server.address}/team/{name}"

    def push(self, name: str = "vm:1") -> Pushed:
        catalog = FolderCatalog(self.catalog)
        return push(self.images, catalog.resolve(ImageRef("base")), catalog, self.at(name), print)

    def pull(self, name: str = "vm:1", target: str = "mine", catalog: Path | None = None) -> Pulled:
        return pull(self.images, self.at(name), ImageRef.parse(target), catalog or self.other, print)

    def skopeo(self, *words: str) -> bytes:
        command = ["skopeo", words[0], f"--authfile={self.server.login}", *words[1:]]
        return subprocess.run(command, check=True, capture_output=True).stdout


@pytest.fixture
def site(tmp_path: Path, server: Registry, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("SSL_CERT_FILE", str(server.certificate))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(server.login))
    digest = publish(tmp_path / "site", "base", ROOT)
    return Site(tmp_path, server, Images(catalog=str(tmp_path / "site"), import_kernel="base"), digest)


def signature(folder: Path, manifest: bytes, name: str) -> bytes:
    key = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    command = ["ssh-keygen", "-Y", "sign", "-q", "-n", "vhpc-image", "-f", str(key)]
    return subprocess.run(command, input=manifest, check=True, capture_output=True).stdout


def signatures_in(folder: Path, name: str = "mine") -> bytes:
    catalog = FolderCatalog(folder)
    return catalog.read_signed(catalog.resolve(ImageRef(name))).signatures


@pytest.mark.promise("registry.digest")
def test_an_image_comes_back_with_its_digest(site: Site) -> None:
    pushed = site.push()
    pulled = site.pull()
    found = FolderCatalog(site.other).resolve(ImageRef("mine"))
    assert pulled.digest == pushed.digest == site.digest == found.digest
    assert pulled.registry_digest == pushed.registry_digest
    assert whole(site.other) == ["mine:latest"]
    assert pulled.fetched == pushed.size == len(ROOT) + len(b"kernel") + len(b"initrd")
    name = f"manifests/sha256/{site.digest.removeprefix('sha256:')}.json"
    assert (site.other / name).read_bytes() == (site.catalog / name).read_bytes()
    assert pulled.changed
    assert not list(site.other.glob(".import-*"))


def test_a_pull_makes_the_chunk_list_again(site: Site) -> None:
    size = 1 << 16
    hashes = b"".join(hashlib.sha256(ROOT[at : at + size]).digest() for at in range(0, len(ROOT), size))
    listed = hashlib.sha256(hashes).hexdigest()
    publish(site.catalog, "base", ROOT, chunks={"sha256": listed, "size": size})
    site.push("listed:1")
    site.pull("listed:1")
    assert (site.other / "blobs/sha256" / listed).read_bytes() == hashes
    publish(site.catalog, "base", ROOT, chunks={"sha256": "0" * 64, "size": size})
    site.push("unlike:1")
    with pytest.raises(UserError, match="names a chunk list that is not the root's"):
        site.pull("unlike:1", target="unlike")
    assert whole(site.other) == ["mine:latest"]


def test_the_registry_has_an_artifact_of_our_types(site: Site) -> None:
    pushed = site.push()
    raw = site.skopeo("inspect", "--raw", site.at("vm:1"))
    assert f"sha256:{hashlib.sha256(raw).hexdigest()}" == pushed.registry_digest
    manifest = json.loads(raw)
    assert manifest["artifactType"] == "application/vnd.vhpc.image.v1"
    assert manifest["config"]["digest"] == site.digest
    assert [layer["mediaType"] for layer in manifest["layers"]] == [
        "application/vnd.vhpc.kernel.elf",
        "application/vnd.vhpc.initrd.cpio",
        "application/vnd.vhpc.root.erofs",
    ]
    assert site.push().registry_digest == pushed.registry_digest


@pytest.mark.promise("registry.digest")
def test_signatures_travel_and_are_not_doubled(site: Site) -> None:
    image = FolderCatalog(site.catalog).resolve(ImageRef("base"))
    both = []
    for name in ("ops", "eve"):
        both.append(signature(site.top, FolderCatalog(site.catalog).read_signed(image).manifest, name))
        edit.add_signature(site.catalog, image, both[-1])
    assert site.push("signed:1").signatures == 2
    assert site.pull("signed:1").signatures == 2
    assert site.pull("signed:1").changed is False
    assert signatures_in(site.other) == b"".join(both)


def test_a_digest_pins_the_pulled_image(site: Site) -> None:
    pushed = site.push("pinned:1")
    digest = publish(site.catalog, "base", b"another root")
    assert site.push("pinned:1").digest == digest
    assert site.pull("pinned:1").digest == digest
    old = site.pull(f"pinned@{pushed.registry_digest}", "old")
    assert (old.digest, old.fetched) == (site.digest, len(ROOT))
    with_tag = site.pull(f"pinned:1@{pushed.registry_digest}", "tagged")
    assert (with_tag.digest, with_tag.fetched) == (site.digest, 0)


@pytest.mark.promise("registry.digest")
def test_blobs_in_the_catalogue_are_not_fetched(site: Site) -> None:
    site.push("again:1")
    assert site.pull("again:1", catalog=site.catalog, target="copy").fetched == 0
    root = site.catalog / "blobs/sha256" / hashlib.sha256(ROOT).hexdigest()
    root.write_bytes(ROOT[:-1] + b"x")
    assert site.pull("again:1", catalog=site.catalog, target="copy").fetched == len(ROOT)
    assert root.read_bytes() == ROOT
    assert whole(site.catalog) == ["base:latest", "copy:latest"]


def test_a_broken_image_is_not_pushed(site: Site) -> None:
    (site.catalog / "blobs/sha256" / hashlib.sha256(ROOT).hexdigest()).write_bytes(b"other bytes")
    with pytest.raises(UserError, match="root: expected sha256:"):
        site.push("broken:1")
    with pytest.raises(UserError, match="manifest unknown"):
        site.pull("broken:1")


def test_pull_and_import_name_each_other(site: Site) -> None:
    site.push()
    with pytest.raises(UserError, match=r"it is a container.*use: vhpc image import docker://.* mine:latest"):
        site.pull("box:1")
    with pytest.raises(UserError, match=r"it is a vhpc image.*use: vhpc image pull docker://"):
        import_image(site.images, Source.parse(site.at("vm:1")), ImageRef("x"), site.other, "", print)
    assert whole(site.other) == []


def test_a_job_s_source_may_be_a_vhpc_image(site: Site) -> None:
    site.push("job:1")
    source = Source.parse(site.at("job:1"))
    lines: list[str] = []
    name = name_for(source)
    assert image_of(site.images, source, site.other, lines.append) == f"own/{name}:latest@{site.digest}"
    assert whole(site.other) == [f"{name}:latest"]
    assert lines[-1] == f"{source} is own/{name}:latest now"
    assert image_of(site.images, source, site.other, lines.append) == f"own/{name}:latest@{site.digest}"
    assert lines[-1] == f"{source} is own/{name}:latest already"
    image = FolderCatalog(site.catalog).resolve(ImageRef("base"))
    edit.add_signature(
        site.catalog, image, signature(site.top, FolderCatalog(site.catalog).read_signed(image).manifest, "k")
    )
    site.push("job:1")
    image_of(site.images, source, site.other, lines.append)
    assert signatures_in(site.other, name).count(b"BEGIN SSH") == 1


class KilledError(Exception):
    """The process ends here."""


def test_a_kill_at_any_rename_leaves_whole_images(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    image = FolderCatalog(site.catalog).resolve(ImageRef("base"))
    made = signature(site.top, FolderCatalog(site.catalog).read_signed(image).manifest, "ops")
    edit.add_signature(site.catalog, image, made)
    site.push("killed:1")
    real, left, kills = Path.replace, [0], 0

    def replace(path: Path, target: Path) -> Path:
        if left[0] == 0:
            raise KilledError
        left[0] -= 1
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    for count in range(20):
        own = site.top / f"own-{count}"
        left[0] = count
        try:
            site.pull("killed:1", catalog=own)
        except KilledError:
            kills += 1
            left[0] = -1
            assert whole(own) == []
            edit.collect(own, 0)
            assert [path for path in own.rglob("*") if path.is_file() and path.name[0] != "."] == []
            site.pull("killed:1", catalog=own)
        assert whole(own) == ["mine:latest"]
        assert signatures_in(own) == made
        if left[0] > 0:
            break
    assert kills == len(("kernel", "initrd", "root", "manifest", "signatures", "name"))


@pytest.mark.promise("registry.pull")
@pytest.mark.long
def test_a_sigkill_at_any_step_of_a_pull_leaves_whole_images(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image is fetched once: skopeo is another process, which ends with its sandbox."""
    site.push("steps:1")
    offer = look(Source.parse(site.at("steps:1")), 60.0)
    assert offer.image is not None
    kept, own = site.top / "kept", site.top / "own"
    kept.mkdir()
    fetch_artifact(offer.source.pinned, kept, {}, len(ROOT), 8 << 20, 60.0, lambda _: None)
    monkeypatch.setattr(pulling, "look", lambda *_: offer)
    monkeypatch.setattr(
        pulling, "fetch_artifact", lambda _ref, out, *_: shutil.copytree(kept, out, dirs_exist_ok=True)
    )
    seen = 0
    for _ in kills(lambda: site.pull("steps:1", catalog=own)):
        seen += 1
        if not own.exists():
            continue
        assert set(whole(own)) <= {"mine:latest"}
        if (own / "manifests/sha256").exists() and (own / "names").exists():
            edit.collect(own, 0)
            assert not list(own.glob(f"{STAGING}*"))
        if "mine:latest" in whole(own):
            edit.remove(own, ImageRef("mine"))
            edit.collect(own, 0)
        assert not [path for path in own.glob("blobs/sha256/*") if path.is_file()], (
            "gc removes what no manifest needs"
        )
    assert seen >= 15, "the pull has few steps: they are not seen"
    assert whole(own) == ["mine:latest"]


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("team/vm:1", "it is not an image of a registry"),
        ("docker://a b", r"it is not \[REGISTRY/\]NAME"),
        (f"docker://a/b@sha256:{'0' * 64}", "the registry computes the digest"),
    ],
)
def test_a_bad_reference_is_refused_at_once(site: Site, reference: str, says: str) -> None:
    catalog = FolderCatalog(site.catalog)
    with pytest.raises(UserError, match=says):
        push(site.images, catalog.resolve(ImageRef("base")), catalog, reference, print)


def test_without_a_password_nothing_is_pushed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(site.top / "none"))
    with pytest.raises(UserError, match=r"cannot push to docker://.*(authentication required|unauthorized)"):
        site.push()


def test_the_commands_print_names_and_json(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "config", lambda: Config(images=site.images))
    reference = site.at("cli:1")
    assert push_verb("base", reference, catalog=site.catalog) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{reference} sha256:")
    assert said.err.startswith("vhpc: checking base:latest\nvhpc: pushing to docker://")
    assert pull_verb(reference, "mine:2", catalog=site.other, as_json=True) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["image"], found["digest"], found["changed"]) == ("mine:2", site.digest, True)
    assert pull_verb(reference, "mine:2", catalog=site.other) == 0
    assert capsys.readouterr().out == f"mine:2 {site.digest}\n"
