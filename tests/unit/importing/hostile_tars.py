# SPDX-License-Identifier: Apache-2.0
"""Tars and compressed tars that an import refuses: hostile, damaged, or not what their names say."""

from __future__ import annotations

import gzip
import io
import subprocess
import tarfile
import zipfile
from collections.abc import Callable

from containers import entry, tar
from hostile_rig import MAX_FILES, Case, of_bytes, of_entries

DIR, LINK, HARD, FIFO = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE
END = bytes(1024)


def raw(name: str = "x", kind: bytes = b"0", data: bytes = b"", size: bytes | None = None) -> bytes:
    """A header with a sound checksum, of any type, and its data; ``size``: what the field of the size has."""
    block = bytearray(entry(name, kind, size=len(data)).tobuf(tarfile.USTAR_FORMAT))
    if size is not None:
        block[124:136] = size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data + bytes(-len(data) % 512)


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    """A file after an extended header with these bytes."""
    return raw("PaxHeader", kind, records) + raw("x", data=b"content") + END


def record(key: str, value: bytes | str) -> bytes:
    """A sound record of an extended header."""
    text = key.encode() + b"=" + (value if isinstance(value, bytes) else value.encode()) + b"\n"
    size = len(text) + 1
    while len(str(size)) + 1 + len(text) != size:
        size = len(str(size)) + 1 + len(text)
    return b"%d %s" % (size, text)


def with_pax(name: str, says: str, **values: bytes | str) -> Case:
    records = b"".join(record(key.replace("__", "."), value) for key, value in values.items())
    return of_bytes(name, says, lambda: pax(records))


def sparse(name: str, says: str, size: int, *numbers: int) -> Case:
    """A sparse file as GNU tar 1.0 has it: its map stands before its data."""
    header = b"".join(
        (
            record("GNU.sparse.major", "1"),
            record("GNU.sparse.minor", "0"),
            record("GNU.sparse.name", "x"),
            record("GNU.sparse.realsize", str(size)),
        )
    )
    listed = "".join(f"{number}\n" for number in (len(numbers) // 2, *numbers)).encode()
    data = listed + bytes(-len(listed) % 512) + b"data"
    return of_bytes(name, says, lambda: raw("PaxHeader", b"x", header) + raw("x", data=data) + END)


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + b"\xff" * 8 + data[at + 8 :]


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-c"], input=data, check=True, stdout=subprocess.PIPE).stdout


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x", "content")
    return out.getvalue()


LINKS = [entry(f"l{n}", LINK, linkname=f"l{n + 1}/a") for n in range(50)]
BOTH = (tar(("a", "x" * 2000)), tar("a"))
BIG = 1 << 62

NAMES = [
    of_entries("up", "'../x' leads out of the image", "../x"),
    of_entries("up in the middle", "leads out of the image", "a/../../x"),
    of_entries("up, absolute", "leads out of the image", "/../../etc/cron.d/x"),
    of_entries("up at the end", "leads out of the image", "a/.."),
    of_entries("long name", "a name has more than 255 bytes", "x" * 256),
    of_entries("long name in bytes", "a name has more than 255 bytes", "ü" * 128),
    of_entries("long path", "a path has more than 4096 bytes", "a/" * 2049 + "x"),
    of_entries("below a file", "a part of the path 'x/y' is not a folder", "x", "x/y"),
    of_entries("below a link to a file", "'l/y' is not a folder", "x", entry("l", LINK, linkname="x"), "l/y"),
    of_entries("many files", f"more than {MAX_FILES} files", *(f"f{n}" for n in range(MAX_FILES + 1))),
    of_entries(
        "many implied folders", f"more than {MAX_FILES} files", "/".join("d" * (MAX_FILES + 1)) + "/x"
    ),
    of_entries(
        "many hard links",
        f"more than {MAX_FILES} files",
        "x",
        *(entry(f"f{n}", HARD, linkname="x") for n in range(MAX_FILES)),
    ),
    with_pax("NUL in a name", "has a NUL", path="a\0b"),
    with_pax("up by a pax header", "leads out of the image", path="../../etc/passwd"),
    of_bytes(
        "up by a global pax header", "leads out of the image", lambda: pax(record("path", "../x"), b"g")
    ),
    of_entries("whiteout with ..", "leads out of the image", "../.wh.x"),
    of_entries("whiteout below ..", "leads out of the image", "a/../../.wh..wh..opq"),
]
TARGETS = [
    of_entries("hard link to the host", "leads out of the image", entry("x", HARD, linkname="../etc/shadow")),
    of_entries(
        "hard link, absolute",
        "'/etc/shadow', which is not a file of the image",
        entry("x", HARD, linkname="/etc/shadow"),
    ),
    of_entries("hard link to nothing", "'none', which is not a file", entry("x", HARD, linkname="none")),
    of_entries("hard link to a folder", "'a', which is not a file", "a/", entry("x", HARD, linkname="a")),
    of_entries("hard link to itself", "'x', which is not a file", entry("x", HARD, linkname="x")),
    of_entries(
        "hard links to each other",
        "'b', which is not a file",
        entry("a", HARD, linkname="b"),
        entry("b", HARD, linkname="a"),
    ),
    of_entries(
        "hard link to a device",
        "'null', which is not a file",
        entry("null", tarfile.CHRTYPE),
        entry("x", HARD, linkname="null"),
    ),
    of_entries("hard link as root", "is a hard link", entry(".", HARD, linkname="x")),
    of_entries(
        "hard link through a link to the host",
        "which is not a file of the image",
        entry("l", LINK, linkname="/etc"),
        entry("x", HARD, linkname="l/passwd"),
    ),
    of_entries("link to itself", "leads through too many links", entry("l", LINK, linkname="l"), "l/x"),
    of_entries(
        "cycle of links",
        "leads through too many links",
        entry("a", LINK, linkname="b"),
        entry("b", LINK, linkname="c/../a"),
        "c/",
        "a/x",
    ),
    of_entries("chain of links", "leads through too many links", *LINKS, "l0/x"),
    of_entries("link to nowhere", "has no usable target", entry("l", LINK, linkname="")),
    of_entries("link to a long path", "has no usable target", entry("l", LINK, linkname="x" * 4096)),
    of_bytes(
        "NUL in a target",
        "has no usable target",
        lambda: raw("P", b"x", record("linkpath", "a\0b")) + raw("l", b"2") + END,
    ),
]
NUMBERS = [
    of_entries("negative uid", "belongs to uid -1", entry("x", uid=-1)),
    of_entries("large gid", "gid 4294967296", entry("x", gid=1 << 32)),
    of_entries(
        "large attributes",
        "more than 64 KiB of extended attributes",
        entry("x", pax_headers={"SCHILY.xattr.user.a": "x" * 70000}),
    ),
    of_bytes("size beyond the end", "is cut off: it ends inside of 'x'", lambda: raw(size=b"77777777777\0")),
    of_bytes("size of 2^80", "is cut off", lambda: raw(size=b"\x80" + (1 << 80).to_bytes(11, "big"))),
    of_bytes("negative size", "has a negative size|not a sound tar", lambda: raw(size=b"\xff" * 11 + b"\0")),
    of_bytes("size in letters", "not a sound tar", lambda: raw(size=b"a lot\0\0\0\0\0\0\0")),
    with_pax("pax size negative", "has a negative size|cannot be read|not a sound tar", size="-512"),
    with_pax("pax size beyond the end", "is cut off", size=str(BIG)),
    with_pax("pax size of 5000 digits", "cannot be read|not a sound tar|is damaged", size="9" * 5000),
    with_pax("pax time NaN", "cannot be read", mtime="NaN"),
    with_pax("pax time infinite", "cannot be read", mtime="-inf"),
    with_pax("pax uid negative", "belongs to uid -7", uid="-7"),
    with_pax("pax uid huge", "belongs to uid 9999999999", uid="9999999999"),
    with_pax("sparse map of letters", "cannot be read|not a sound tar", GNU__sparse__map="a,b"),
    sparse("sparse pieces overlap", "map of its data that makes no sense", 4, 0, 3, 1, 3),
    sparse("sparse piece beyond the end", "map of its data that makes no sense", 4, 2, 3),
    sparse("sparse piece negative", "map of its data that makes no sense", 4, 0, -1),
    sparse("sparse data beyond the tar", "map of its data that makes no sense", 1 << 20, 0, 1 << 20),
    sparse("sparse map without end", "makes no sense|cannot be read|not a sound tar", 4, *([1] * 7)),
    sparse("sparse file of 4 EiB", "more than 16 MiB when unpacked", BIG, 0, 4),
    sparse("sparse file of nothing", "more than 16 MiB when unpacked", BIG),
    sparse("sparse file of negative size", "negative size", -4, 0, 4),
]
HEADERS = [
    of_bytes("pax record too long", "damaged attributes", lambda: pax(b"99999999 path=x\n")),
    of_bytes("pax record of length 0", "damaged attributes", lambda: pax(b"0 path=x\n")),
    of_bytes("pax record that is no text", "damaged attributes", lambda: pax(b"\xff\xfe\0\0")),
    of_bytes("pax header of 2 MiB", "a header of more than 128 KiB", lambda: pax(b"1" * (2 << 20))),
    of_bytes(
        "long name of 2 MiB",
        "a header of more than 128 KiB",
        lambda: raw("L", b"L", b"x" * (2 << 20)) + raw() + END,
    ),
    of_bytes(
        "long name of 8 GiB",
        "a header of more than 128 KiB",
        lambda: raw("L", b"L", size=b"77777777777\0") + raw() + END,
    ),
    of_bytes(
        "thousands of long names",
        "headers of headers|cannot be read",
        lambda: raw("L", b"L", b"x") * 5000 + raw() + END,
    ),
    of_bytes(
        "thousands of pax headers", "headers of headers|cannot be read", lambda: raw("P", b"x") * 5000 + END
    ),
    of_bytes("long name and nothing", "is not a sound tar|is damaged", lambda: raw("L", b"L", b"x") + END),
    of_bytes("digits without end", "damaged attributes", lambda: pax(b"1" * 100_000)),
]
DAMAGE = [
    of_bytes("empty file", "not a sound tar", lambda: b""),
    of_bytes("text", "not a sound tar", lambda: b"x" * 512),
    of_bytes("half", "is cut off: it ends inside of 'a'", lambda: BOTH[0][:1024]),
    of_bytes("cut in a block", "is cut off: it ends inside of 'a'", lambda: BOTH[0][:700]),
    of_bytes(
        "second header",
        "no sound header at byte 2560",
        lambda: damaged(tar(("a", "x" * 2000), "b"), 2560 + 148),
    ),
    of_bytes("short end", "no sound header", lambda: BOTH[1][:512] + b"\0" * 100),
    of_bytes("large", "more than 16 MiB when unpacked", lambda: tar(("a", bytes(17 << 20)))),
    of_bytes("ELF", "not a sound tar", lambda: b"\x7fELF" + bytes(2000)),
    of_bytes("qcow2", "not a sound tar", lambda: b"QFI\xfb\0\0\0\3" + bytes(2000)),
    of_bytes("zip", "not a sound tar", zipped),
    of_bytes("script", "not a sound tar", lambda: b"#!/bin/sh\nexec /bin/sh\n" + b"#" * 1000),
    of_bytes("gzip as tar", "not a sound tar", lambda: gzip.compress(BOTH[1])),
    of_bytes("zstd as tar", "not a sound tar", lambda: zstd(BOTH[1])),
]


def packed(name: str, says: str, data: Callable[[], bytes], suffix: str = "gz") -> Case:
    return of_bytes(name, says, data, f"x.tar.{suffix}")


GZIP = gzip.compress(tar(("a", "x" * 5000)))
COMPRESSED = [
    packed("tar as gzip", "not a sound gzip file", lambda: BOTH[1]),
    packed("zstd as gzip", "not a sound gzip file", lambda: zstd(BOTH[1])),
    packed("gzip, cut", "without its end", lambda: GZIP[:-10]),
    packed("gzip, empty", "without its end", lambda: b""),
    packed("gzip, other bytes after it", "not a sound gzip file", lambda: GZIP + b"rest"),
    packed("gzip, zeros after it", "not a sound gzip file", lambda: GZIP + bytes(512)),
    packed("gzip, wrong checksum", "not a sound gzip file", lambda: GZIP[:-8] + bytes(4) + GZIP[-4:]),
    packed("gzip in gzip", "not a sound tar", lambda: gzip.compress(GZIP)),
    packed("gzip, name without end", "without its end", lambda: b"\x1f\x8b\x08\x08" + b"x" * (1 << 20)),
    packed("gzip bomb", "more than 16 MiB when unpacked", lambda: gzip.compress(bytes(64 << 20), 9)),
    packed(
        "gzip bomb of bombs",
        "more than 16 MiB when unpacked",
        lambda: gzip.compress(bytes(1 << 20), 9) * 100,
    ),
    packed("gzip, 100,000 empty members", "not a sound tar", lambda: gzip.compress(b"") * 100_000),
    packed("tar as zstd", "not a sound zstd file", lambda: BOTH[1], "zst"),
    packed("gzip as zstd", "not a sound zstd file", lambda: GZIP, "zst"),
    packed("zstd, cut", "not a sound zstd file", lambda: zstd(BOTH[0])[:-5], "zst"),
    packed("zstd, empty", "not a sound (zstd file|tar)", lambda: b"", "zst"),
    packed("zstd, other bytes after it", "not a sound zstd file", lambda: zstd(BOTH[1]) + b"rest", "zst"),
    packed("zstd bomb", "more than 16 MiB when unpacked", lambda: zstd(bytes(64 << 20)), "zst"),
    packed(
        "zstd with a window of 2 GiB",
        "not a sound zstd file: .*memory",
        lambda: b"\x28\xb5\x2f\xfd\x00\xa8" + b"\x01\x00\x00" + bytes(100),
        "zst",
    ),
    packed(
        "zstd, a frame to skip of 4 GiB",
        "not a sound (zstd file|tar)",
        lambda: b"\x50\x2a\x4d\x18\xff\xff\xff\xff" + b"x" * 1000,
        "zst",
    ),
]

CASES = [*NAMES, *TARGETS, *NUMBERS, *HEADERS, *DAMAGE, *COMPRESSED]

# Odd and harmless: layers (each a tar), and the files that the root gets from them.
KEPT: dict[str, tuple[list[bytes], dict[str, str]]] = {
    "absolute names": ([tar(("/etc/x", "1"), "//a")], {"etc": "dir", "etc/x": "1", "a": ""}),
    "names of one dot": ([tar("./", "././a/./b")], {"a": "dir", "a/b": ""}),
    "a name twice": ([tar(("a", "1"), ("a", "2"))], {"a": "2"}),
    "file, then folder of its name": ([tar("a", "a/", "a/b")], {"a": "dir", "a/b": ""}),
    "folder, then file of its name": ([tar("a/", "a/b", ("a", "x"))], {"a": "x"}),
    "link to the host, then a file below it": (
        [tar(entry("l", LINK, linkname="/etc"), ("l/passwd", "evil"))],
        {"l": "-> /etc", "etc": "dir", "etc/passwd": "evil"},
    ),
    "link above the image, then a file below it": (
        [tar(entry("l", LINK, linkname="../../../.."), ("l/x", "evil"))],
        {"l": "-> ../../../..", "x": "evil"},
    ),
    "link, then a file of its name": ([tar(entry("l", LINK, linkname="/etc/x"), ("l", "1"))], {"l": "1"}),
    "line feed, escape and no UTF-8 in names": (
        [tar("a\nb", "\x1b[2J", "\udcff\udcfe")],
        {"a\nb": "", "\x1b[2J": "", "\udcff\udcfe": ""},
    ),
    "whiteout of all": ([tar("a/", "a/b", "c"), tar(".wh..wh..opq")], {}),
    "whiteouts in the lowest layer": ([tar(("a", "1"), ".wh.a", ".wh..wh..opq")], {"a": "1"}),
    "whiteouts of nothing": (
        [tar(("a", "1")), tar(".wh.", ".wh..", ".wh...", ".wh.x/y")],
        {"a": "1", ".wh.x": "dir", ".wh.x/y": ""},
    ),
    "whiteout through a link": (
        [tar("etc/", "etc/passwd", entry("l", LINK, linkname="/etc")), tar("l/.wh.passwd")],
        {"etc": "dir", "l": "-> /etc"},
    ),
    "whiteout below a file": ([tar(("a", "1")), tar("a/.wh.b")], {"a": "1"}),
    "program and tar": ([tar(("\x7fELF", "x"))], {"\x7fELF": "x"}),
    "disk image and tar": ([tar(("QFI\xfb", "x"))], {"QFI\xfb": "x"}),
    "zip after the end": ([tar(("a", "1")) + zipped()], {"a": "1"}),
    "unknown type": ([raw("a", b"Z", b"1") + END], {}),
}
