# SPDX-License-Identifier: Apache-2.0
"""Registries that misbehave in a pull or push: one line, and nothing is published."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from served_registry import (
    Answer,
    Handler,
    Served,
    dripping,
    endless,
    redirecting,
    refusing,
    sending,
    served,
    silent,
    stalled,
)
from site_catalog import BASE, publish, whole

from vhpc_slurm.catalog import FolderCatalog, edit
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.pull import Pulled, pull
from vhpc_slurm.importing.push import push
from vhpc_slurm.model import ImageRef

PARTS = {"kernel": b"k" * 3000, "initrd": b"i" * 4000, "root": b"r" * 300_000}
TIME_S = 6
SIGNATURES = "application/vnd.vhpc.signatures.v1+openssh"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    top = tmp_path_factory.mktemp("served")
    with served(top) as found:
        yield found, top / "cert.pem"


@dataclass
class Case:
    """A registry with the image ``vm:1``, and an empty catalogue."""

    registry: Served
    catalog: Path
    fields: dict[str, Any]
    """Of the vhpc manifest."""
    artifact: dict[str, Any]
    """The OCI manifest."""

    def digest(self, part: str) -> str:
        return f"sha256:{hashlib.sha256(PARTS[part]).hexdigest()}"

    def offer(self) -> None:
        """Let the registry have the image as it is described now."""
        raw = json.dumps(self.fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        self.artifact["config"] |= self.registry.blob(raw, self.artifact["config"]["mediaType"])
        self.registry.manifest("1", self.artifact)

    def pull(self, name: str = "vm:1", **limits: int) -> Pulled:
        images = Images(import_timeout_s=limits.get("time_s", 60), import_max_mib=limits.get("mib", 8))
        text = f"docker://{self.registry.address}/{name}"
        return pull(images, text, ImageRef("mine"), self.catalog, lambda _line: None)


@pytest.fixture
def case(server: tuple[Served, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    registry, certificate = server
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "none"))
    for table in (registry.blobs, registry.manifests, registry.uploads, registry.answers, registry.asked):
        table.clear()
    fields = copy.deepcopy(BASE)
    layers = []
    for part, data in PARTS.items():
        fields[part] |= {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        layers.append(registry.blob(data, fields[part]["media_type"]))
    artifact = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": "application/vnd.vhpc.image.v1",
        "config": {"mediaType": "application/vnd.vhpc.manifest.v1+json"},
        "layers": layers,
    }
    found = Case(registry, tmp_path / "own", fields, artifact)
    found.offer()
    return found


def nothing_left(case: Case) -> None:
    """No name, no blob, no folder of the pull."""
    assert whole(case.catalog) == []
    assert list((case.catalog / "blobs/sha256").iterdir()) == []
    assert list(case.catalog.glob(".import-*")) == []


def test_the_registry_of_these_tests_can_behave(case: Case) -> None:
    done = case.pull()
    assert done.digest == case.artifact["config"]["digest"]
    assert whole(case.catalog) == ["mine:latest"]
    case.registry.asked.clear()
    assert case.pull().fetched == 0
    assert not any(case.registry.fetched(case.digest(part)) for part in PARTS)


def limit(answer: Answer) -> int:
    """Seconds: few only for what would not end."""
    return TIME_S if answer in {silent, stalled, dripping} else 60


BLOB_ANSWERS: dict[str, tuple[Answer, str]] = {
    "other bytes": (sending(bytes(len(PARTS["root"]))), "[Dd]igest"),
    "too short": (sending(PARTS["root"][:-1]), "[Dd]igest|unexpected EOF|size"),
    "too long": (sending(PARTS["root"] + b"x"), "[Dd]igest|size"),
    "endless": (endless, "it has more than 1 MiB|file too large|signal|[Dd]igest"),
    "silent": (silent, "it took too long"),
    "a byte at a time": (dripping, "it took too long"),
    "unauthorized": (refusing(401, "UNAUTHORIZED"), "unauthorized|authentication|401"),
    "forbidden": (refusing(403, "DENIED"), "denied|403"),
    "absent": (refusing(404, "BLOB_UNKNOWN"), "unknown|404"),
    "broken": (refusing(500, "UNKNOWN"), "500"),
    "a file": (redirecting("file:///etc/passwd"), "unsupported protocol scheme"),
    "another host": (redirecting("https://127.0.0.1:1/x"), "connection refused"),
}


@pytest.mark.promise("registry.pull", "attack.registry-image")
@pytest.mark.parametrize("name", BLOB_ANSWERS)
def test_a_bad_answer_for_the_root_ends_the_pull(case: Case, name: str) -> None:
    answer, says = BLOB_ANSWERS[name]
    case.registry.answers[case.digest("root")] = answer
    with pytest.raises(UserError, match=says) as failed:
        case.pull(time_s=limit(answer))
    assert "\n" not in failed.value.line()
    assert failed.value.line().startswith(f"cannot fetch docker://{case.registry.address}/vm@sha256:")
    nothing_left(case)


def test_a_redirection_in_a_circle_ends(case: Case) -> None:
    place = f"/v2/vm/blobs/{case.digest('root')}"
    case.registry.answers[case.digest("root")] = redirecting(f"https://{case.registry.address}{place}")
    with pytest.raises(UserError, match="stopped after 10 redirects"):
        case.pull()
    nothing_left(case)


MANIFEST_ANSWERS: dict[str, tuple[Answer, str]] = {
    "stalled": (stalled, "its registry does not answer in time"),
    "endless": (endless, "cannot find docker://"),
    "unauthorized": (refusing(401, "UNAUTHORIZED"), "unauthorized|authentication|401"),
    "absent": (refusing(404, "MANIFEST_UNKNOWN"), "manifest unknown"),
    "broken": (refusing(500, "UNKNOWN"), "500"),
    "another host": (redirecting("https://127.0.0.1:1/x"), "connection refused"),
    "no JSON": (sending(b"<html>"), "its manifest is not JSON"),
    "a list": (sending(b"[]"), "its manifest is not a JSON object"),
    "deep": (sending(b"[" * 100_000), "its manifest is not JSON|not a JSON object"),
    "a container": (sending(b'{"manifests": []}'), "it is a container, not a vhpc image"),
    "a chart": (
        sending(b'{"config": {"mediaType": "application/vnd.cncf.helm.config.v1+json"}}'),
        "neither a container nor a vhpc image, but of type 'application/vnd.cncf.helm",
    ),
    "newer": (
        sending(b'{"artifactType": "application/vnd.vhpc.image.v9"}'),
        "of type .*v9', this vhpc knows",
    ),
}


@pytest.mark.promise("attack.registry-image")
@pytest.mark.parametrize("name", MANIFEST_ANSWERS)
def test_a_bad_answer_for_the_manifest_ends_the_pull(case: Case, name: str) -> None:
    answer, says = MANIFEST_ANSWERS[name]
    case.registry.answers["/manifests/"] = answer
    with pytest.raises(UserError, match=says) as failed:
        case.pull(time_s=limit(answer))
    assert "\n" not in failed.value.line()
    nothing_left(case)


def test_a_digest_gets_no_other_manifest(case: Case) -> None:
    case.registry.answers["/manifests/"] = sending(json.dumps(case.artifact).encode() + b" ")
    with pytest.raises(UserError, match="digest"):
        case.pull(f"vm@sha256:{'1' * 64}")
    nothing_left(case)


def edit_layer(number: int, **changes: Any) -> Callable[[Case], None]:
    return lambda case: case.artifact["layers"][number].update(changes)


def add_layer(case: Case, data: bytes, kind: str) -> None:
    case.artifact["layers"].append(case.registry.blob(data, kind))


OFFERS: dict[str, tuple[Callable[[Case], Any], str]] = {
    "no root": (lambda case: case.artifact["layers"].pop(), "it has no root"),
    "two roots": (
        lambda case: add_layer(case, b"x", "application/vnd.vhpc.root.erofs"),
        "two layers of type",
    ),
    "an unknown part": (lambda case: add_layer(case, b"x", "text/plain"), "a layer of type 'text/plain'"),
    "an unknown format": (
        edit_layer(2, mediaType="application/vnd.vhpc.root.qcow2"),
        "its manifest: Invalid",
    ),
    "no digest": (edit_layer(2, digest="sha256:../../x"), "a layer has no sha256 digest"),
    "a negative size": (edit_layer(2, size=-1), "a layer has no size"),
    "a size that is a text": (edit_layer(2, size="1"), "a layer has no size"),
    "a huge size": (edit_layer(2, size=1 << 43), "more than 8 MiB.*images.import_max_mib"),
    "a size beyond all": (edit_layer(2, size=1 << 60), "its manifest: Expected `int` <="),
    "a smaller size": (edit_layer(2, size=7), "cannot (fetch|pull) "),
    "another size": (
        lambda case: case.fields["root"].update(size=5),
        "its root in the registry is not the one",
    ),
    "another digest": (
        lambda case: case.fields["kernel"].update(sha256="2" * 64),
        "its kernel in the registry is not the one",
    ),
    "no list": (lambda case: case.artifact.update(layers={}), "it has no list of"),
    "many layers": (
        lambda case: case.artifact.update(layers=case.artifact["layers"] * 3),
        "it has no list of",
    ),
    "many signatures": (
        lambda case: add_layer(case, b"x" * 70_000, SIGNATURES),
        "signatures have more than 64",
    ),
    "reserved words": (
        lambda case: case.fields.update(cmdline="init=/bin/sh"),
        "its manifest: cmdline has 'init=/bin/sh'",
    ),
    "an unknown key": (lambda case: case.fields.update(more=1), "its manifest: .*unknown field"),
    "a large manifest": (
        lambda case: case.fields.update(description="x" * 300_000),
        "vhpc manifest has more than 256",
    ),
}


@pytest.mark.promise("registry.pull", "attack.registry-image")
@pytest.mark.parametrize("name", OFFERS)
def test_an_image_that_lies_is_not_published(case: Case, name: str) -> None:
    change, says = OFFERS[name]
    change(case)
    case.offer()
    with pytest.raises(UserError, match=says) as failed:
        case.pull()
    assert "\n" not in failed.value.line()
    nothing_left(case)


def test_a_manifest_in_another_form_is_refused(case: Case) -> None:
    raw = json.dumps(case.fields, sort_keys=True, indent=1).encode()
    case.artifact["config"] |= case.registry.blob(raw, case.artifact["config"]["mediaType"])
    case.registry.manifest("1", case.artifact)
    with pytest.raises(UserError, match="not in the canonical form"):
        case.pull()
    nothing_left(case)


def test_rubbish_among_signatures_is_not_kept(case: Case) -> None:
    add_layer(case, b"rubbish\n", SIGNATURES)
    case.offer()
    assert case.pull().signatures == 0
    assert not list(case.catalog.glob("signatures/sha256/*"))


def test_two_pulls_fetch_once(case: Case) -> None:
    done: list[Pulled] = []
    threads = [threading.Thread(target=lambda: done.append(case.pull())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    total = sum(map(len, PARTS.values()))
    assert sorted(one.fetched for one in done) == [0, total]
    path = f"GET /v2/vm/blobs/{case.digest('root')}"
    assert case.registry.asked.count(path) == 1


CHILD = """
import sys
from pathlib import Path
from vhpc_slurm.config.images import Images
from vhpc_slurm.importing.pull import pull
from vhpc_slurm.model import ImageRef
pull(Images(), sys.argv[1], ImageRef("mine"), Path(sys.argv[2]), lambda _line: None)
"""


@pytest.mark.promise("registry.pull")
def test_gc_removes_the_files_of_a_killed_pull(case: Case) -> None:
    began = threading.Event()

    def stall(request: Handler) -> None:
        began.set()
        silent(request)

    case.registry.answers[case.digest("root")] = stall
    argv = [sys.executable, "-c", CHILD, f"docker://{case.registry.address}/vm:1", str(case.catalog)]
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as run:
        assert began.wait(60)
        run.send_signal(signal.SIGKILL)
    (left,) = case.catalog.glob(".import-*")
    until = time.monotonic() + 30
    while {item.name for item in edit.collect(case.catalog, 0.0, dry_run=True).removed} != {left.name}:
        assert time.monotonic() < until, "the folder of the pull is still in use"
        time.sleep(0.1)
    while left.exists():  # skopeo, which is ending, may have added a file while the folder was removed
        edit.collect(case.catalog, 0.0)
        assert time.monotonic() < until
    nothing_left(case)


PUSH_ANSWERS: dict[str, tuple[str, Answer, str]] = {
    "unauthorized": ("POST", refusing(401, "UNAUTHORIZED"), "unauthorized|authentication|401"),
    "forbidden": ("POST", refusing(403, "DENIED"), "denied|403"),
    "too large": ("PATCH", refusing(413, "SIZE_INVALID"), "413|size invalid"),
    "broken": ("PATCH", refusing(500, "UNKNOWN"), "500"),
    "another host": ("POST", lambda request: request.send(202, Location="https://127.0.0.1:1/x"), "refused"),
    "stalled": ("POST", stalled, "it took too long"),
    "no manifests": ("PUT /v2/vm/manifests", refusing(400, "MANIFEST_INVALID"), "manifest invalid|400"),
    "a changed manifest": ("GET /v2/vm/manifests", sending(b"{}"), "instead of sha256:"),
}


@pytest.mark.parametrize("name", PUSH_ANSWERS)
def test_a_registry_that_refuses_a_push(case: Case, name: str, tmp_path: Path) -> None:
    where, answer, says = PUSH_ANSWERS[name]
    publish(tmp_path / "site", "base", b"a root")
    case.registry.answers[where] = answer
    catalog, images = FolderCatalog(tmp_path / "site"), Images(import_timeout_s=limit(answer))
    image = catalog.resolve(ImageRef("base"))
    with pytest.raises(UserError, match=says) as failed:
        push(images, image, catalog, f"docker://{case.registry.address}/vm:2", lambda _line: None)
    assert "\n" not in failed.value.line()


def test_an_image_is_pushed_to_the_registry_of_these_tests(case: Case, tmp_path: Path) -> None:
    digest = publish(tmp_path / "site", "base", b"a root")
    catalog = FolderCatalog(tmp_path / "site")
    image = catalog.resolve(ImageRef("base"))
    text = f"docker://{case.registry.address}/vm:2"
    done = push(Images(), image, catalog, text, lambda _line: None)
    assert done.registry_digest in case.registry.manifests
    assert digest in case.registry.blobs
    assert case.pull("vm:2").digest == digest
