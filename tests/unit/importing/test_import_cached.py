# SPDX-License-Identifier: Apache-2.0
"""Sources in place of names: imported once for each content, one import at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from containers import Layout, tar
from controller_lab import wait_for
from site_catalog import publish

from vhpc_slurm.catalog import FolderCatalog
from vhpc_slurm.cli import options
from vhpc_slurm.cli.images import imports as verbs
from vhpc_slurm.config import Config
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import cached, imports
from vhpc_slurm.importing.cached import image_of, name_for
from vhpc_slurm.importing.identify import identify
from vhpc_slurm.importing.offer import Offer
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import IMAGE_NAME, ImageRef

FIRST, SECOND = f"sha256:{'11' * 32}", f"sha256:{'22' * 32}"
ARCHIVE = "oci-archive:/x/tools.tar"


class Site:
    """A site with a kernel, a user's catalogue, and a source whose content changes."""

    def __init__(self, top: Path) -> None:
        self.catalog, self.own, self.digest = top / "site", top / "own", FIRST
        publish(self.catalog, "base", b"root of the base")
        self.images = Images(catalog=str(self.catalog), import_kernel="base")
        self.imported: list[Source] = []
        self.lines: list[str] = []
        self.during: Callable[[], object] = lambda: None

    def worker(self, source: Source, out: Path, *_: object) -> dict[str, Any]:
        self.imported.append(source)
        self.during()
        (out / "root.erofs").write_bytes(b"root of " + self.digest.encode())
        return {"digest": self.digest, "special": 0, "process": {}}

    def image(self, source: str = ARCHIVE) -> str:
        return image_of(self.images, Source.parse(source), self.own, self.lines.append)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    found = Site(tmp_path)
    monkeypatch.setattr(imports, "run_worker", found.worker)
    monkeypatch.setattr(imports, "fetch", lambda *_: None)
    monkeypatch.setattr(cached, "identify", lambda *_: found.digest)
    monkeypatch.setattr(cached, "look", lambda source, _: Offer(replace(source, digest=found.digest), None))
    for module in (cached, imports):
        monkeypatch.setattr(module, "check_source", lambda _source: None)
    return found


def test_equal_content_is_imported_once(site: Site) -> None:
    name = name_for(Source.parse(ARCHIVE))
    image = site.image()
    assert image == f"own/{name}:latest@{FolderCatalog(site.own).resolve(ImageRef(name)).digest}"
    assert site.lines[-1] == f"{ARCHIVE} is own/{name}:latest now"
    assert site.image() == image
    assert site.lines[-1] == f"{ARCHIVE} is own/{name}:latest already"
    assert len(site.imported) == 1


def test_other_content_is_imported_again(site: Site) -> None:
    first, site.digest = site.image(), SECOND
    assert site.image() != first
    assert len(site.imported) == 2


def test_another_kernel_of_the_site_is_another_image(site: Site) -> None:
    first = site.image()
    publish(site.catalog, "base", b"another root")
    assert site.image() != first
    assert len(site.imported) == 2


@pytest.mark.parametrize("damage", ["absent", "shorter"])
def test_an_image_without_its_files_is_imported_again(site: Site, damage: str) -> None:
    site.image()
    (root,) = [path for path in site.own.rglob("*") if path.is_file() and b"root of sha" in path.read_bytes()]
    if damage == "absent":
        root.unlink()
    else:
        root.write_bytes(b"root of sha")
    site.image()
    assert len(site.imported) == 2
    assert root.read_bytes() == b"root of " + FIRST.encode()


def test_a_source_without_a_digest_is_always_imported(site: Site) -> None:
    site.digest = ""
    site.image("tar:/x/a.tar")
    site.image("tar:/x/a.tar")
    assert len(site.imported) == 2


@pytest.mark.promise("attack.image-swap")
def test_an_image_of_a_registry_is_pinned_by_its_digest(site: Site) -> None:
    image = site.image("docker://r.example:5000/team/box:1")
    (source,) = site.imported
    assert source.pinned == f"r.example:5000/team/box@{FIRST}"
    manifest = FolderCatalog(site.own).read_manifest(image.partition("@")[2])
    assert manifest.labels["vhpc/registry-digest"] == FIRST
    assert manifest.provenance.source == "docker://r.example:5000/team/box:1"
    assert site.image("docker://r.example:5000/team/box:1") == image


@pytest.mark.parametrize(
    ("name", "pinned"),
    [
        ("debian", f"debian@{FIRST}"),
        ("debian:13", f"debian@{FIRST}"),
        ("r.example:5000/box", f"r.example:5000/box@{FIRST}"),
        ("r.example:5000/a/box:1", f"r.example:5000/a/box@{FIRST}"),
        (f"a/box@{SECOND}", f"a/box@{FIRST}"),
    ],
)
def test_a_digest_replaces_the_tag(name: str, pinned: str) -> None:
    assert Source("docker", Path(), name, digest=FIRST).pinned == pinned
    assert Source("docker", Path(), name).pinned == name


@pytest.mark.promise("import.cached")
def test_a_second_import_waits_for_the_first(site: Site) -> None:
    began, found = threading.Event(), []
    waits = "waiting for another import into your catalogue"

    def during() -> None:
        began.set()
        wait_for(lambda: site.lines.count(waits) == 3, "the others do not wait")

    site.during = during
    threads = [threading.Thread(target=lambda: found.append(site.image())) for _ in range(4)]
    threads[0].start()
    assert began.wait(60)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(site.imported) == 1
    assert len(found) == 4
    assert len(set(found)) == 1
    assert site.lines.count(waits) == 3


def test_a_wait_for_another_import_is_bounded(site: Site) -> None:
    site.images = Images(catalog=str(site.catalog), import_kernel="base", import_timeout_s=1)
    began, ends = threading.Event(), threading.Event()

    def during() -> None:
        began.set()
        assert ends.wait(60)

    site.during = during
    thread = threading.Thread(target=site.image)
    thread.start()
    assert began.wait(60)
    with pytest.raises(UserError, match="another import has not ended for 1 s"):
        site.image()
    ends.set()
    thread.join(60)


def test_names_are_readable_and_differ() -> None:
    sources = [
        "docker://debian:13",
        "docker://Debian-13",
        "oci:/a/b:x",
        "oci:/c/b:x",
        f"tar:/{'x' * 300}.tar",
    ]
    names = [name_for(Source.parse(text)) for text in sources]
    assert len(set(names)) == len(names)
    assert all(IMAGE_NAME.match(name) for name in names)
    assert names[0].startswith("debian-13-")
    assert names[2].startswith("b-x-")


def test_the_command_prints_the_image(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verbs, "own_catalog", lambda *_: FolderCatalog(site.own))
    monkeypatch.setattr(options, "config", lambda: Config(images=site.images))
    assert verbs.resolve(ARCHIVE) == 0
    plain = capsys.readouterr()
    assert plain.out == f"{site.image()}\n"
    assert plain.err.endswith(" now\n")
    assert verbs.resolve(ARCHIVE, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"image": site.image()}


# --- the digest of real containers ------------------------------------------------------


def test_an_archive_is_identified_without_its_layers(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    layout.write(layout.image([tar("a/")], "box"))
    stated = json.loads((layout.top / "index.json").read_text())["manifests"][0]["digest"]
    assert identify(Source.parse(f"oci:{layout.top}:box"), 60) == stated
    assert identify(Source.parse(f"tar:{tmp_path}/a.tar"), 60) == ""
    with pytest.raises(UserError, match="cannot import"):
        identify(Source.parse(f"oci:{tmp_path}/nothing"), 60)
