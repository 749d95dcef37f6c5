# SPDX-License-Identifier: Apache-2.0
"""Manifests: what is accepted, the one encoding that counts, and hostile ones."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vhpc_slurm.catalog.manifest import (
    LIMIT,
    canonical,
    decode_manifest,
    decode_whole,
    schema_text,
)

DATA = Path(__file__).parents[2] / "data/manifests"
PUBLISHED = Path(__file__).parents[3] / "docs/image-manifest.schema.json"
RAW = (DATA / "manifest.json").read_bytes()
VALID: dict[str, Any] = json.loads(RAW)


def encoded(value: Any) -> bytes:
    """As jq -cSj encodes it (tests/data/manifests/README.md): RFC 8785 for what these tests use."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


ARM_KERNEL = "application/vnd.vhpc.kernel.image"


def changed(path: str, value: Any) -> dict[str, Any]:
    """The valid manifest with another value at a path such as ``root.size``; ... removes the key."""
    fields = copy.deepcopy(VALID)
    part = fields
    *above, last = path.split("/")
    for key in above:
        part = part[key]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    return fields


def test_a_manifest_is_decoded_whole() -> None:
    whole = decode_whole(RAW)
    assert whole.drivers == {"nvidia": "570.86.15", "virtio_blk": ""}
    assert whole.process.environment["CUDA_VERSION"] == "12.8"
    assert whole.process.arguments[2] == 'echo "two\\\\\nlines"\t€\a'
    assert whole.provenance.source_digest == "sha256:" + "2" * 64
    assert whole.labels["site/owner"] == "hpc-support"


def test_a_lease_carries_the_values_that_nodes_need() -> None:
    image = decode_manifest(RAW)
    assert (image.schema, image.arch, image.firmware, image.init) == (1, "x86_64", "bios", "agent")
    assert (image.min_memory_mib, image.min_cpus) == (4096, 2)
    assert (image.root_format, image.cmdline) == ("erofs", "no_timer_check")
    assert (image.root.sha256[:8], image.root.size) == ("146e6d76", 88539136)


def test_the_init_of_an_image_reaches_the_kernel_command_line() -> None:
    image = decode_manifest(encoded(changed("init", "/usr/lib/systemd/systemd")))
    words = image.cmdline.split()
    assert words[:2] == ["no_timer_check", "vhpc.init=/usr/lib/systemd/systemd"]
    # bootup parameters of systemd-fstab-generator(8), systemd(1), cloud-init's "disable" documentation
    assert {"fstab=no", "systemd.mask=ssh.service", "cloud-init=disabled"} <= set(words)


def test_an_image_keeps_the_parameters_that_it_sets() -> None:
    own = changed("init", "/sbin/init") | {"cmdline": "fstab=yes systemd.mask=ssh.service"}
    words = decode_manifest(encoded(own)).cmdline.split()
    assert [word for word in words if word.startswith("fstab=")] == ["fstab=yes"]
    assert words.count("systemd.mask=ssh.service") == 1
    assert "systemd.mask=sshd.service" in words


@pytest.mark.promise("image.canonical")
def test_the_canonical_form_is_that_of_jq() -> None:
    assert canonical(VALID) == RAW
    whole = decode_whole(RAW)
    # sha256sum tests/data/manifests/manifest.json
    digest = "e07365e21d5b6b08114ad620a66e32f75f852c4fbb7ea7c9cd5fd1db45ce1216"
    assert hashlib.sha256(canonical(whole)).hexdigest() == digest


# --- hostile manifests: each has one change, and one line says which -------------------------------

HOSTILE: list[tuple[str, Any, str]] = [
    # other encodings of acceptable values, which would give one image two digests
    ("indented", json.dumps(VALID, indent=1, sort_keys=True, ensure_ascii=False).encode(), "RFC 8785"),
    ("unsorted", json.dumps(VALID, separators=(",", ":"), ensure_ascii=False).encode()[:-1] + b" }", "RFC"),
    ("escaped", json.dumps(VALID, sort_keys=True, separators=(",", ":")).encode(), "RFC 8785"),
    ("final newline", RAW + b"\n", "RFC 8785"),
    ("key twice", RAW[:-1] + b',"schema":1}', "RFC 8785"),
    ("inner key twice", RAW.replace(b'"user":""', b'"user":"root","user":""'), "RFC 8785"),
    ("number as 2.0", RAW.replace(b'"min_cpus":2', b'"min_cpus":2.0'), "float"),
    ("number as 2e0", RAW.replace(b'"min_cpus":2', b'"min_cpus":2e0'), "float"),
    ("second value", RAW + RAW, "trailing"),
    ("byte order mark", b"\xef\xbb\xbf" + RAW, "malformed"),
    # not JSON, not UTF-8, not a manifest
    ("empty", b"", "truncated"),
    ("cut", RAW[:-20], "truncated"),
    ("list", b"[" + RAW + b"]", "Expected `object`"),
    ("Latin-1", RAW.replace("ü".encode(), b"\xfc"), "utf-8"),
    ("surrogate", RAW.replace("ü".encode(), b"\\ud800"), "hex escape"),
    ("encoded surrogate", RAW.replace("ü".encode(), b"\xed\xa0\x80"), "utf-8"),
    ("nested", b'{"schema":1,"labels":' + b"[" * 200_000, "nested too deeply"),
    ("nested where skipped", b'{"x":' + b'{"x":' * 40_000, "nested too deeply"),
    ("nested label", changed("labels/site", {"a": {"a": {}}}), "Expected `str`"),
    ("UTF-16", RAW.decode().encode("utf-16"), "malformed"),
    ("too large", changed("process/environment", {f"V{n}": "x" * 30_000 for n in range(10)}), "KiB"),
    ("much too large", b" " * (2 << 20), "KiB"),
    # keys
    ("extra key", changed("signature", None), "unknown field `signature`"),
    ("extra key of a blob", changed("root/url", "http://x/"), "unknown field `url`"),
    ("extra key of a process", changed("process/shell", ""), "unknown field `shell`"),
    ("name", changed("name", "x"), "unknown field `name`"),
    ("file", changed("root/file", "../../etc/shadow"), "unknown field `file`"),
    ("missing key", changed("labels", ...), "missing required field `labels`"),
    ("missing size", changed("root/size", ...), "missing required field `size`"),
    ("newer schema", changed("schema", 2), "schema 2, this vhpc knows 1"),
    ("schema as text", changed("schema", "1"), "Expected `int`"),
    ("schema as true", changed("schema", True), "Expected `int`"),
    ("no schema", changed("schema", ...), "schema"),
    # sizes and numbers
    ("size 0", changed("root/size", 0), ">= 1"),
    ("negative size", changed("kernel/size", -1), ">= 1"),
    ("size as text", changed("root/size", "88539136"), "Expected `int`"),
    ("size of a root", changed("root/size", (1 << 44) + 1), "<= 17592186044416"),
    ("size of a kernel", changed("kernel/size", (512 << 20) + 1), "<= 536870912"),
    ("size of an initrd", changed("initrd/size", 1 << 62), "<= 536870912"),
    ("size beyond 64 bits", changed("root/size", 1 << 64), "out of range|Expected|<="),
    ("size as NaN", RAW.replace(b'"size":88539136', b'"size":NaN'), "malformed"),
    ("no memory", changed("min_memory_mib", 0), ">= 1"),
    ("all memory", changed("min_memory_mib", 1 << 40), "<= 16777216"),
    ("no CPU", changed("min_cpus", 0), ">= 1"),
    ("all CPUs", changed("min_cpus", 1 << 20), "<= 4096"),
    # digests, in each place
    *(
        (f"{place}: {why}", changed(place, digest), "regex|<= 64|<= 71")
        for place in ("kernel/sha256", "initrd/sha256", "root/sha256")
        for why, digest in (
            ("short", "0" * 63),
            ("long", "0" * 65),
            ("upper case", "A" * 64),
            ("a path", "../../../../etc/shadow"),
            ("a path of 64", "../" * 21 + "x"),
            ("empty", ""),
            ("newline", "0" * 64 + "\n"),
            ("prefixed", "sha256:" + "0" * 64),
        )
    ),
    ("parent without algorithm", changed("provenance/parent", "0" * 64), "regex"),
    ("parent of another algorithm", changed("provenance/parent", "sha512:" + "0" * 64), "regex"),
    ("source digest with a path", changed("provenance/source_digest", "sha256:../x"), "regex"),
    # formats are stated, and only known ones
    ("qcow2 root", changed("root/media_type", "application/vnd.qemu.qcow2"), "Invalid enum value"),
    ("root as kernel", changed("root/media_type", "application/vnd.vhpc.kernel.elf"), "Invalid enum"),
    ("no media type", changed("kernel/media_type", ""), "Invalid enum value"),
    ("other firmware", changed("firmware", "coreboot"), "Invalid enum value"),
    ("kernel of a PC for Arm", changed("arch", "aarch64"), "no guest of aarch64 starts"),
    ("kernel of Arm for a PC", changed("kernel/media_type", ARM_KERNEL), "no guest of x86_64 starts"),
    ("UEFI with an ELF kernel", changed("firmware", "uefi"), "UEFI does not start an ELF kernel"),
    ("arch with a path", changed("arch", "../x"), "regex"),
    # the kernel command line
    *(
        (f"command line {words}", changed("cmdline", f"quiet {words}"), "cmdline has")
        for words in (
            "init=/bin/sh",
            "rdinit=/bin/sh",
            "root=/dev/sda",
            "initrd=x",
            "rootfstype=ext4",
            "rootflags=rw",
            "vhpc.init=/bin/sh",
            "vhpc.root=/dev/vdb",
            "vhpc.rootfstype=ext4",
            f"vhpc.verity=1:{'0' * 64}",
            "init",
            '"init=/bin/sh"',
            'x="a b" y',
            "-- x",
        )
    ),
    ("newline in the command line", changed("cmdline", "quiet\ninit=/bin/sh"), "regex"),
    ("newline after the command line", changed("cmdline", "quiet\n"), "control characters"),
    ("tab in the command line", changed("cmdline", "quiet\tinit=/bin/sh"), "regex"),
    ("umlaut in the command line", changed("cmdline", "quiét"), "regex"),
    ("long command line", changed("cmdline", "x" * 1025), "<= 1024"),
    ("relative init", changed("init", "sbin/init"), "regex"),
    ("init with a parameter", changed("init", "/init rdinit=/x"), "regex"),
    ("init with a quotation mark", changed("init", '/"init'), "regex"),
    ("newline after init", changed("init", "/init\n"), "control characters"),
    # names and texts
    ("label with newline", changed("labels", {"a\nb": ""}), "regex"),
    ("label with final newline", changed("labels", {"a\n": ""}), "control characters"),
    ("label of letters that look alike", changed("labels", {"\u043ewner": ""}), "regex"),
    ("value with newline", changed("labels", {"a": "x\ny"}), "control characters"),
    ("value with escape", changed("labels", {"a": "\x1b[2J"}), "control characters"),
    ("value from right to left", changed("description", "x\u202ey"), "control characters"),
    ("description with newline", changed("description", "x\ny"), "control characters"),
    ("long description", changed("description", "x" * 1025), "<= 1024"),
    ("driver with a path", changed("drivers", {"../x": ""}), "regex"),
    ("driver with a final newline", changed("drivers", {"x\n": ""}), "control characters"),
    ("driver version with newline", changed("drivers", {"x": "1\n2"}), "control characters"),
    ("many labels", changed("labels", {f"k{n}": "" for n in range(65)}), "<= 64"),
    ("many drivers", changed("drivers", {f"k{n}": "" for n in range(257)}), "<= 256"),
    ("variable with =", changed("process/environment", {"A=B": ""}), "regex"),
    ("variable with final newline", changed("process/environment", {"A\n": ""}), "control characters"),
    ("value with NUL", changed("process/environment", {"A": "x\0y"}), "NUL"),
    ("argument with NUL", changed("process/arguments", ["\0"]), "NUL"),
    ("entrypoint as text", changed("process/entrypoint", "/bin/sh"), "Expected `array`"),
    ("many arguments", changed("process/arguments", ["x"] * 257), "<= 256"),
    ("relative directory", changed("process/working_dir", "../x"), "regex"),
    ("directory with newline", changed("process/working_dir", "/x\n"), "control characters"),
    ("user with newline", changed("process/user", "root\n"), "control characters"),
    ("time in words", changed("provenance/created", "yesterday"), "regex"),
    ("source with newline", changed("provenance/source", "docker://x\ny"), "control characters"),
]


def bytes_of(case: dict[str, Any] | bytes) -> bytes:
    return case if isinstance(case, bytes) else encoded(case)


@pytest.mark.promise("attack.root-file", "attack.manifest")
@pytest.mark.parametrize(("case", "says"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_a_hostile_manifest_is_refused_with_one_line(case: dict[str, Any] | bytes, says: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){says}") as caught:
        decode_manifest(bytes_of(case))
    assert len(str(caught.value)) < 300
    assert not isinstance(caught.value, msgspec.MsgspecError), "no ValueError in Debian 13's msgspec"


def test_the_table_of_hostile_manifests_has_no_duplicates() -> None:
    raw = [bytes_of(row[1]) for row in HOSTILE]
    assert len(set(raw)) == len(raw)
    assert RAW not in raw


# --- the published schema --------------------------------------------------------------------------

# Rules that the schema cannot express: encodings, and rules about characters or several keys.
BEYOND = ("control characters", "NUL", "cmdline has", "UEFI", "RFC", "KiB", "no guest of")


def _validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(PUBLISHED.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_published_schema_is_that_of_the_types() -> None:
    assert json.loads(PUBLISHED.read_text()) == json.loads(schema_text()), "run scripts/manifest-schema"


def test_the_published_schema_accepts_a_valid_manifest() -> None:
    _validator().validate(VALID)


@pytest.mark.parametrize(
    "case",
    [row[1] for row in HOSTILE if isinstance(row[1], dict) and not row[2].startswith(BEYOND)],
    ids=[row[0] for row in HOSTILE if isinstance(row[1], dict) and not row[2].startswith(BEYOND)],
)
def test_the_published_schema_refuses_hostile_manifests(case: dict[str, Any]) -> None:
    assert not _validator().is_valid(case)


# --- any bytes -------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any, above: str = "") -> list[str]:
    found = []
    for key, part in value.items():
        found.append(f"{above}{key}")
        if isinstance(part, dict) and "/" not in key:
            found += [place for place in _places(part, f"{above}{key}/") if place.count("/") < 2]
    return [place for place in found if "site/owner" not in place]


@pytest.mark.promise("image.canonical")
@given(place=st.sampled_from(_places(VALID)), value=json_values)
def test_accepted_manifests_are_canonical_and_bounded(place: str, value: Any) -> None:
    try:
        raw = encoded(changed(place, value))
        whole = decode_whole(raw)
    except ValueError:
        return
    assert canonical(whole) == raw
    assert len(raw) <= LIMIT


@pytest.mark.parametrize("cut", range(0, len(RAW), 97))
def test_a_torn_manifest_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match=r"truncated|malformed|utf-8|Expected|missing"):
        decode_whole(RAW[:cut])
