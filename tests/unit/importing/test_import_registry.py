# SPDX-License-Identifier: Apache-2.0
"""Containers from registries: a real one on loopback, and servers that misbehave."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from containers import CONFIG, LAYER, MANIFEST, Layout, digest, tar
from import_rig import listing
from registry import Registry, registry

from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import taking
from vhpc_slurm.importing.archives import Folder, read_fetched
from vhpc_slurm.importing.fetch import _size, fetch, registry_manifest
from vhpc_slurm.importing.layers import Budget
from vhpc_slurm.importing.tree import RefusedError, Tree

pytestmark = pytest.mark.xdist_group("registry")
ONE = tar("a/", ("a/one", "1"))
LIMIT = 8 << 20


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    top = tmp_path_factory.mktemp("registry")
    with registry(top) as found:
        word = base64.b64encode(b"alice:secret").decode()
        found.login.write_text(json.dumps({"auths": {found.address: {"auth": word}}}))
        layout = Layout(top / "layout")
        layout.write(layout.image([ONE], "box", configuration={"Env": ["A=b"]}))
        found.push(f"oci:{layout.top}:box", "team/box:1")
        yield found


@pytest.fixture
def known(site: Registry, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The registry, whose certificate and password the user has."""
    monkeypatch.setenv("SSL_CERT_FILE", str(site.certificate))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(site.login))
    return site


def fetched(reference: str, tmp_path: Path, timeout_s: float = 60.0) -> Path:
    folder = tmp_path / "fetched"
    folder.mkdir()
    fetch(reference, folder, LIMIT, timeout_s, lambda _: None)
    return folder


def files_of(folder: Path, out: Path) -> dict[str, str]:
    container = read_fetched(Folder(folder))
    tree = Tree(100)
    out.mkdir()
    paths, _ = taking.take_layers(tree, container, out, Budget(LIMIT), lambda _: None)
    return listing(tree, paths)


def test_an_image_of_a_registry_is_fetched(known: Registry, tmp_path: Path) -> None:
    folder = fetched(f"{known.address}/team/box:1", tmp_path)
    assert files_of(folder, tmp_path / "out") == {"a": "dir", "a/one": "1"}
    container = read_fetched(Folder(folder))
    command = ["skopeo", "inspect", "--format", "{{.Digest}}", f"docker://{known.address}/team/box:1"]
    known_digest = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert container.digest == known_digest
    assert digest(registry_manifest(f"{known.address}/team/box:1", 60)) == known_digest
    (tmp_path / "again").mkdir()
    pinned = fetched(f"{known.address}/team/box@{known_digest}", tmp_path / "again")
    assert read_fetched(Folder(pinned)).digest == known_digest


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("team/box:2", "manifest unknown"),
        ("team/none:1", "manifest unknown|name unknown"),
        (f"team/box@sha256:{'0' * 64}", "manifest unknown"),
    ],
)
def test_an_image_that_the_registry_lacks_is_refused(
    known: Registry, tmp_path: Path, name: str, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        fetched(f"{known.address}/{name}", tmp_path)


def test_without_a_password_the_registry_refuses(
    known: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"authentication required|unauthorized"):
        fetched(f"{known.address}/team/box:1", tmp_path)


def test_a_registry_with_an_unknown_certificate_is_refused(
    known: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(UserError, match="x509: certificate signed by unknown authority"):
        fetched(f"{known.address}/team/box:1", tmp_path)


@pytest.mark.parametrize("reference", ["", "-x", "a b", "a\nb", "a;b", "x" * 600, "../x"])
def test_an_invalid_reference_is_refused(tmp_path: Path, reference: str) -> None:
    with pytest.raises(UserError, match="it is not"):
        fetched(reference, tmp_path)


CONFIGURATION = json.dumps(
    {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [digest(ONE)]},
    }
).encode()
IMAGE = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, "digest": digest(CONFIGURATION), "size": len(CONFIGURATION)},
        "layers": [{"mediaType": LAYER, "digest": digest(ONE), "size": len(ONE)}],
    }
).encode()


def endless(request: Any) -> None:
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(bytes(1 << 16))


def slow(request: Any) -> None:
    request.send_response(200)
    request.end_headers()
    time.sleep(30)


def wrong(request: Any) -> None:
    request.answer(bytes(len(ONE)))


def redirect(location: str) -> Callable[[Any], None]:
    def answer(request: Any) -> None:
        request.send_response(307)
        request.send_header("Location", location)
        request.end_headers()

    return answer


@pytest.fixture
def misbehaving(known: Registry) -> Iterator[tuple[str, list[Callable[[Any], None]]]]:
    """A registry whose answers for the layer and for the manifest are those in the list."""
    layer: list[Callable[[Any], None]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, data: bytes, kind: str = "application/octet-stream") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Docker-Content-Digest", f"sha256:{hashlib.sha256(data).hexdigest()}")
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            try:
                if "/manifests/" in self.path and len(layer) > 1:
                    layer[1](self)
                elif self.path.endswith(digest(ONE)):
                    layer[0](self)
                elif self.path.endswith(digest(CONFIGURATION)):
                    self.answer(CONFIGURATION)
                elif "/manifests/" in self.path:
                    self.answer(IMAGE, MANIFEST)
                else:
                    self.answer(b"{}", "application/json")
            except OSError:
                pass

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(known.certificate, known.certificate.with_name("key.pem"))
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}/box", layer
        server.shutdown()


def test_the_misbehaving_registry_can_behave(misbehaving: Any, tmp_path: Path) -> None:
    reference, layer = misbehaving
    layer.append(lambda request: request.answer(ONE))
    assert files_of(fetched(reference, tmp_path), tmp_path / "out") == {"a": "dir", "a/one": "1"}


@pytest.mark.promise("attack.registry")
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (endless, "it has more than 8 MiB|file too large|too large|signal"),
        (slow, "it took too long"),
        (wrong, "[Dd]igest"),
        (redirect("file:///etc/passwd"), "unsupported protocol scheme"),
        (redirect("http://127.0.0.1:1/x"), "connection refused"),
    ],
    ids=["endless", "slow", "wrong", "to-a-file", "to-another-host"],
)
def test_a_registry_that_misbehaves_ends_the_import(
    misbehaving: Any, tmp_path: Path, answer: Callable[[Any], None], says: str
) -> None:
    reference, layer = misbehaving
    layer.append(answer)
    with pytest.raises(UserError, match=says):
        fetched(reference, tmp_path, timeout_s=5.0)
    assert sum(path.stat().st_size for path in (tmp_path / "fetched").iterdir() if path.is_file()) < 4 * LIMIT


def status(code: int, text: bytes = b'{"errors": []}') -> Callable[[Any], None]:
    def answer(request: Any) -> None:
        request.send_response(code)
        request.send_header("Content-Length", str(len(text)))
        request.send_header("Retry-After", "0")
        request.end_headers()
        request.wfile.write(text)

    return answer


def trickle(request: Any) -> None:
    """A byte now and then: no single read takes long."""
    request.send_response(200)
    request.send_header("Content-Length", str(len(IMAGE)))
    request.end_headers()
    for byte in IMAGE:
        request.wfile.write(bytes([byte]))
        time.sleep(0.2)


def short(request: Any) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(IMAGE)))
    request.end_headers()
    request.wfile.write(IMAGE[:20])


def lying(request: Any) -> None:
    """Another manifest than that of the digest in the header."""
    request.send_response(200)
    request.send_header("Content-Type", MANIFEST)
    request.send_header("Content-Length", str(len(IMAGE) + 1))
    request.send_header("Docker-Content-Digest", digest(IMAGE))
    request.end_headers()
    request.wfile.write(IMAGE + b" ")


PINNED = f"@{digest(IMAGE)}"


@pytest.mark.promise("attack.registry")
@pytest.mark.parametrize(
    ("answer", "suffix", "says"),
    [
        (status(401), "", "authentication required|unauthorized|denied"),
        (status(403), "", "StatusCode: 403|denied"),
        (status(404), "", "manifest unknown|not found|404"),
        (status(500), "", "500|unknown|unexpected"),
        (status(503), "", "503|[Uu]navailable|unexpected"),
        (status(200, b"<html>sign in</html>"), "", "[Uu]nsupported|invalid|unknown|mime"),
        (status(200, b"[" * 100_000), "", "[Uu]nsupported|invalid|unknown|mime|exceeded"),
        (endless, "", "took too long|too large|more than|exceeded|limit"),
        (trickle, "", "it took too long"),
        (short, "", "unexpected EOF|EOF"),
        (lying, PINNED, "[Dd]igest"),
        (redirect("file:///etc/passwd"), "", "unsupported protocol scheme"),
        (redirect("http://127.0.0.1:1/x"), "", "connection refused"),
        (redirect("https://127.0.0.1:1/v2/"), "", "connection refused"),
    ],
    ids=["401", "403", "404", "500", "503", "page", "deep", "endless", "trickle", "short", "lying",
         "to-a-file", "to-another-host", "to-another-tls-host"],
)  # fmt: skip
def test_an_incomplete_manifest_is_refused(
    misbehaving: Any, tmp_path: Path, answer: Callable[[Any], None], suffix: str, says: str
) -> None:
    reference, layer = misbehaving
    layer.extend((wrong, answer))
    began = time.monotonic()
    with pytest.raises(UserError, match=says) as caught:
        fetched(reference + suffix, tmp_path, timeout_s=5.0)
    assert time.monotonic() - began < 30
    assert len(caught.value.line()) < 600


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (b"", "manifest.json is not JSON"),
        (b"[]", "manifest.json is not a JSON object"),
        (b'{"mediaType": "application/vnd.docker.distribution.manifest.v1+json"}', "unknown type"),
        (b'{"mediaType": 5}', "unknown type '5'"),
        (b"{}", "no valid 'config'"),
    ],
)
def test_a_fetched_manifest_is_checked(tmp_path: Path, manifest: bytes, says: str) -> None:
    (tmp_path / "manifest.json").write_bytes(manifest)
    with pytest.raises(RefusedError, match=says):
        read_fetched(Folder(tmp_path))


def test_renamed_blob_counts_once(tmp_path: Path) -> None:
    """skopeo gives a blob its last name while its folder is read, so that both names are seen."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "oci-put-blob1").write_bytes(bytes(1000))
    (tmp_path / "blobs/complete").hardlink_to(tmp_path / "oci-put-blob1")
    (tmp_path / "index.json").write_bytes(bytes(10))
    assert _size(tmp_path) == (1010, 2)
