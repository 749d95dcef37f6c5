# SPDX-License-Identifier: Apache-2.0
"""How the source of an import is written."""

from __future__ import annotations

import pytest

from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.source import Source


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("docker://host/a:1", ("docker", ".", "host/a:1", "")),
        ("oci:/a/b", ("oci", "/a/b", "", "")),
        ("oci:/a/b:name:tag", ("oci", "/a/b", "name:tag", "")),
        ("oci-archive:/a.tar", ("oci-archive", "/a.tar", "", "")),
        ("docker-archive:/a.tar:x/y:1", ("docker-archive", "/a.tar", "x/y:1", "")),
        ("tar:/a.tar", ("tar", "/a.tar", "", "")),
        ("/a.tar.gz", ("tar", "/a.tar.gz", "", "gzip")),
        ("/a.tgz", ("tar", "/a.tgz", "", "gzip")),
        ("/a:b.tar.zst", ("tar", "/a:b.tar.zst", "", "zstd")),
        ("/usr", ("dir", "/usr", "", "")),
        ("dir:/usr", ("dir", "/usr", "", "")),
    ],
)
def test_sources_say_their_format(text: str, expected: tuple[str, ...]) -> None:
    source = Source.parse(text)
    assert (source.kind, str(source.path), source.name, source.compression) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("http://host/a.tar", "http is not one of its sources"),
        ("vdi:/a.vdi", "vdi is not one of its sources"),
        ("/a.img", "does not end in .tar"),
        ("qcow2:", "it has no path"),
        ("oci:", "it has no path"),
        ("", "it has no path"),
        ("tar:/a.tar.xz", "does not end in .tar"),
    ],
)
def test_other_sources_are_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Source.parse(text)
