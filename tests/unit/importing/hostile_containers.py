# SPDX-License-Identifier: Apache-2.0
"""Containers that an import refuses: layouts and docker's archives that lie, and odd configurations."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from containers import CONFIG, INDEX, LAYER, MANIFEST, Layout, as_archive, digest, entry, tar
from hostile_rig import MAX_FILES, Case
from hostile_tars import raw

ONE, TWO = tar("a/", ("a/one", "1")), tar("a/.wh.one", ("two", "2"))
ZIPPED = gzip.compress(ONE, mtime=0)
LONG = (4 << 20) + 1

Make = Callable[[Layout], dict[str, Any]]


def layout(name: str, says: str, make: Make, *, archive: bool = False) -> Case:
    """A case that is a layout with one image, in a folder or in a tar."""

    def written(folder: Path) -> str:
        found = Layout(folder / "layout")
        found.write(make(found))
        if archive:
            return f"oci-archive:{as_archive(found.top, folder / 'x.tar')}"
        return f"oci:{found.top}"

    return Case(name, says, written)


def both(name: str, says: str, make: Make) -> list[Case]:
    """The same in a folder and in a tar."""
    return [layout(name, says, make), layout(f"{name}, in a tar", says, make, archive=True)]


def layers(name: str, says: str, *tars: bytes, zipped: bool = True) -> Case:
    """A case that is a sound container of these layers."""
    return layout(name, says, lambda made: made.image(tars, zipped=zipped))


def manifest(name: str, says: str, **changes: Any) -> Case:
    return layout(name, says, lambda made: made.image([ONE], manifest=changes))


def config(name: str, says: str, **changes: Any) -> Case:
    return layout(name, says, lambda made: made.image([ONE], config=changes))


def configuration(name: str, says: str, value: Any) -> Case:
    return layout(name, says, lambda made: made.image([ONE], configuration=value))


def config_bytes(name: str, says: str, data: bytes) -> Case:
    return layout(name, says, lambda made: made.image([ONE], manifest={"config": made.blob(data, CONFIG)}))


def lying_layer(**changes: Any) -> Make:
    return lambda made: made.image([ONE], manifest={"layers": [made.blob(ZIPPED, f"{LAYER}+gzip") | changes]})


def changed(which: str) -> Make:
    """A part has other bytes than its digest."""

    def make(made: Layout) -> dict[str, Any]:
        found = made.image([ONE])
        read = json.loads(blob(made, found).read_bytes())
        parts = {"manifest": found, "config": read["config"], "layer": read["layers"][0]}
        blob(made, parts[which]).write_bytes(b"{}" if which != "layer" else gzip.compress(TWO, mtime=0))
        return found

    return make


def blob(made: Layout, described: dict[str, Any]) -> Path:
    return made.top / "blobs/sha256" / str(described["digest"]).removeprefix("sha256:")


def linked(target: str) -> Make:
    """The layer's blob is a link."""

    def make(made: Layout) -> dict[str, Any]:
        found = made.image([ONE], zipped=False)
        path = blob(made, {"digest": digest(ONE)})
        path.unlink()
        path.symlink_to(target)
        return found

    return make


def nested(depth: int, width: int = 1) -> Make:
    """Indexes in indexes; each has the next one ``width`` times."""

    def make(made: Layout) -> dict[str, Any]:
        found = made.image([ONE])
        for _ in range(depth):
            found = made.json({"manifests": [found] * width}, INDEX)
        return found

    return make


LAYOUTS = [
    *both("other manifest", "a manifest has other bytes than its digest", changed("manifest")),
    *both("other configuration", "a configuration has other bytes than its digest", changed("config")),
    *both("other layer", "the layer sha256:.* has other bytes", changed("layer")),
    *both("wrong size of a layer", "has .* bytes instead of 1", lying_layer(size=1)),
    *both("no blob of a layer", "it has no file blobs/sha256/0000", lying_layer(digest="sha256:" + "0" * 64)),
    layout("negative size of a layer", "a layer has no size", lying_layer(size=-1)),
    layout("size of a layer as text", "a layer has no size", lying_layer(size="1")),
    layout("size of a layer as truth", "a layer has no size", lying_layer(size=True)),
    layout("size of a layer as NaN", "a layer has no size", lying_layer(size=float("nan"))),
    layout(
        "digest with a path", "a layer has no sha256 digest", lying_layer(digest="sha256:../../../etc/shadow")
    ),
    layout("digest in capitals", "a layer has no sha256 digest", lying_layer(digest="sha256:" + "A" * 64)),
    layout("digest with a line feed", "no sha256 digest", lying_layer(digest=digest(ZIPPED) + "\n")),
    layout(
        "digest of another kind", "a layer has no sha256 digest", lying_layer(digest="sha512:" + "0" * 128)
    ),
    layout(
        "type of a layer", "unknown type 'application/x-evil'", lying_layer(mediaType="application/x-evil")
    ),
    layout("encrypted layer", "unknown type", lying_layer(mediaType=f"{LAYER}+gzip+encrypted")),
    layout("gzip stated as tar", "is not a sound tar|is .* instead of", lying_layer(mediaType=LAYER)),
    layout("gzip stated as zstd", "not a sound zstd file", lying_layer(mediaType=f"{LAYER}+zstd")),
    layout(
        "blob that is a link to the host", "it has no file blobs/sha256", linked("../../../../outside/secret")
    ),
    layout("blob that is a link to passwd", "it has no file blobs/sha256", linked("/etc/passwd")),
    layout(
        "blob that is a link to itself",
        "it has no file blobs/sha256",
        linked("x/../../sha256/" + digest(ONE)[7:]),
    ),
    layout("blob that is a device", "is not a regular file", linked("/dev/zero")),
    layout(
        "index without digest",
        "an entry without a sha256 digest",
        lambda _: {"mediaType": MANIFEST, "size": 1},
    ),
    layout(
        "unknown entry",
        "it has no image for linux on amd64",
        lambda made: made.blob(b"{}", "application/json"),
    ),
    layout("indexes in indexes", "indexes in indexes", nested(6)),
    layout("an index 300 times", "more than 256 indexes", nested(2, 300)),
    layout("indexes of 100 indexes of 100", "more than 256 indexes", nested(4, 100)),
    layout(
        "index for another machine",
        "it has no image for linux on amd64",
        lambda made: made.image([ONE], platform={"architecture": "arm64", "os": "linux"}),
    ),
    manifest("no layers", "no valid 'layers'", layers={}),
    manifest("layer as text", "a layer has no sha256 digest", layers=["x"]),
    manifest("more layers", "2 layers, but .* has 1", layers=[{}, {}]),
    manifest("no configuration", "no valid 'config'", config=None),
    config("diff_id", "layer 1, unpacked, is sha256:.* instead of", rootfs={"diff_ids": [digest(TWO)]}),
    config("too few diff_ids", "1 layers, but .* has 0", rootfs={"diff_ids": []}),
    config("no rootfs", "no valid 'rootfs'", rootfs=None),
    config("bad diff_id", "not a sha256", rootfs={"diff_ids": ["x"]}),
    config("many layers", "more than 1024 layers", rootfs={"diff_ids": [digest(b"")] * 1025}),
    config("other system", "it is for windows on amd64", os="windows"),
    config("other machine", "linux on arm64", architecture="arm64"),
    config("machine with control characters", r"\\x1b", architecture="\x1b[2J\n"),
    config_bytes("configuration is a list", "not a JSON object", b"[]"),
    config_bytes("configuration is half", "is not JSON", b"{"),
    config_bytes("configuration is deep", "is not JSON", b"[" * 100_000),
    config_bytes("configuration is not UTF-8", "is not JSON", b'{"os": "\xff"}'),
    config_bytes("configuration in UTF-16", "is not JSON", '{"os": "linux"}'.encode("utf-16")),
    config_bytes("configuration with a key twice", "'os' stands twice", b'{"os": "linux", "os": "linux"}'),
    config_bytes("configuration with a large number", "is not JSON", b'{"x": ' + b"9" * 10_000 + b"}"),
    config_bytes("large configuration", "a configuration has more than 4 MiB|other bytes", b" " * LONG),
]

LAYERS = [
    layers("second layer leaves the image", "leads out of the image", ONE, tar("../x")),
    layers("second layer is cut", "layer 2 is cut off", ONE, tar(("x", "x" * 2000))[:1024]),
    layers("second layer has a file as folder", "'a/one/x' is not a folder", ONE, tar("a/one/x")),
    layers(
        "hard link to what a whiteout removed",
        "'a/one', which is not a file",
        ONE,
        tar("a/.wh.one"),
        tar(entry("x", tarfile.LNKTYPE, linkname="a/one")),
    ),
    layers(
        "layers that are too many files together",
        f"more than {MAX_FILES} files",
        tar(*(f"a{n}" for n in range(MAX_FILES))),
        ONE,
    ),
    layers("layers that are too large together", "more than 16 MiB", *[tar(("x", bytes(6 << 20)))] * 3),
    layers("layer that is no tar", "layer 1 is not a sound tar", b"\x7fELF" + bytes(600), zipped=False),
    layers("layer without a byte", "layer 1 is not a sound tar", b""),
]

CONFIGURATIONS = [
    configuration("configuration as list", "no valid 'config'", []),
    configuration("environment as text", "no valid 'Env'", {"Env": "A=b"}),
    configuration("many variables", "more than 512 variables", {"Env": [f"A{n}=" for n in range(600)]}),
    configuration(
        "large environment",
        "more than 512 variables or 128 KiB",
        {"Env": [f"A{n}=" + "x" * 32000 for n in range(8)]},
    ),
    configuration("entrypoint as text", "no valid 'Entrypoint'", {"Entrypoint": "rm -rf /"}),
    configuration("entrypoint of lists", "no valid 'Entrypoint'", {"Entrypoint": [["sh"]]}),
    configuration("command of numbers", "no valid 'Cmd'", {"Cmd": [1]}),
    configuration("user as number", "no valid 'User'", {"User": 0}),
    configuration("folder as list", "no valid 'WorkingDir'", {"WorkingDir": ["/"]}),
]


def index(name: str, says: str, data: bytes | None) -> Case:
    """A case that is a layout with this index."""

    def written(folder: Path) -> str:
        made = Layout(folder / "layout")
        if data is not None:
            (made.top / "index.json").write_bytes(data)
        return f"oci:{made.top}"

    return Case(name, says, written)


def index_pipe(folder: Path) -> str:
    os.mkfifo(folder / "index.json")
    return f"oci:{folder}"


def named(name: str) -> Callable[[Path], str]:
    def written(folder: Path) -> str:
        made = Layout(folder / "layout")
        made.write(made.image([ONE], "one"), made.image([TWO], "two"))
        return f"oci:{made.top}{name}"

    return written


INDEXES = [
    index("index is a list", "index.json is not a JSON object", b"[]"),
    index("index is empty", "an index has no valid 'manifests'", b"{}"),
    index("index of texts", "an entry without a sha256 digest", b'{"manifests": ["x"]}'),
    index("index is no text", "index.json is not JSON", b"\xff"),
    index("index with a key twice", "'manifests' stands twice", b'{"manifests": [], "manifests": []}'),
    index("large index", "index.json has more than 4 MiB", b" " * LONG),
    index("no index", "it has no file index.json", None),
    Case("index is a pipe", "its index.json is not a regular file", index_pipe),
    Case("several images", "names after the path: one, two", named("")),
    Case("another name", "no image named 'three'", named(":three")),
    Case("name with control characters", r"no image named '\\x1b", named(":\x1b[31m")),
]


def docker(name: str, says: str, described: Any, config: bytes = b"") -> Case:
    """A case that is an archive of docker's; ``config`` and the layer ``layer`` are its other files."""

    def written(folder: Path) -> str:
        parts = [("manifest.json", json.dumps(described).encode()), ("config", config), ("layer", ONE)]
        (folder / "x.tar").write_bytes(tar(*parts, entry("loop", tarfile.SYMTYPE, linkname="loop")))
        return f"docker-archive:{folder / 'x.tar'}"

    return Case(f"docker: {name}", says, written)


def docker_config(*tars: bytes) -> bytes:
    found = {"architecture": "amd64", "os": "linux", "rootfs": {"diff_ids": [digest(data) for data in tars]}}
    return json.dumps(found).encode()


SOUND = docker_config(ONE)
DOCKER = [
    docker("manifest is an object", "manifest.json is not a JSON array", {}),
    docker("manifest of texts", "not a list of images", ["x"]),
    docker("no image", "no such image", []),
    docker("several images", "several images", [{}, {}]),
    docker("configuration is a number", "no valid 'Config'", [{"Config": 1}]),
    docker("configuration is missing", "it has no file none", [{"Config": "none", "Layers": []}]),
    docker("configuration with a path", "it has no file ../config", [{"Config": "../config", "Layers": []}]),
    docker("configuration with a line feed", r"has no file a b", [{"Config": "a\nb", "Layers": []}]),
    docker("configuration is a loop", "it has no file loop", [{"Config": "loop", "Layers": []}]),
    docker(
        "other layer",
        "layer 1, unpacked, is",
        [{"Config": "config", "Layers": ["layer"]}],
        docker_config(TWO),
    ),
    docker(
        "more layers", "1 layers, but .* has 0", [{"Config": "config", "Layers": ["layer"]}], docker_config()
    ),
    docker("layer is missing", "it has no file none", [{"Config": "config", "Layers": ["none"]}], SOUND),
    docker(
        "layer on the host",
        "it has no file /etc/passwd",
        [{"Config": "config", "Layers": ["/etc/passwd"]}],
        SOUND,
    ),
    docker("layer with NUL", "it has no file", [{"Config": "config", "Layers": ["layer\0"]}], SOUND),
    docker("layer is a number", "1 layers, but", [{"Config": "config", "Layers": [1]}], SOUND),
    docker("no platform", "it is for None on None", [{"Config": "config", "Layers": ["layer"]}], b"{}"),
    docker("key twice", "'os' stands twice", [{"Config": "config", "Layers": []}], b'{"os": 1, "os": 2}'),
]


def archive(name: str, says: str, data: Callable[[], bytes]) -> Case:
    def written(folder: Path) -> str:
        (folder / "x").write_bytes(data())
        return f"oci-archive:{folder / 'x'}"

    return Case(f"archive: {name}", says, written)


ARCHIVES = [
    archive("empty", "not a sound, uncompressed tar", lambda: b""),
    archive("text", "not a sound, uncompressed tar", lambda: b"x" * 1024),
    archive("compressed", "not a sound, uncompressed tar", lambda: gzip.compress(ONE)),
    archive("another tar", "it has no file index.json", lambda: ONE),
    archive("docker's", "it has no file index.json", lambda: tar(("manifest.json", "[]"))),
    archive("many files", "more than 65536 files", lambda: tar(entry("d", tarfile.DIRTYPE))[:512] * 65_537),
    archive("names of names", "is not a sound, uncompressed tar", lambda: raw("L", b"L", b"x") * 5000),
    archive(
        "index is a link to the host",
        "it has no file index.json",
        lambda: tar(entry("index.json", tarfile.SYMTYPE, linkname="/etc/passwd")),
    ),
]

CASES = [*LAYOUTS, *LAYERS, *CONFIGURATIONS, *INDEXES, *DOCKER, *ARCHIVES]
