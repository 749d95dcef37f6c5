# SPDX-License-Identifier: Apache-2.0
"""Where names may break in a page, and how digests are shortened."""

from __future__ import annotations

import pytest

from vhpc_slurm.cli.pagetext import breakable, brief
from vhpc_slurm.terminal import short_digests

DIGEST = "sha256:0123456789ab" + "c" * 52


@pytest.mark.promise("web.layout")
@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("train-resnet", "train-resnet"),
        ("md_equilibrate_long_name", "md_|equilibrate_|long_|name"),
        ("debian-cuda-12.6:2026.11.26", "debian-|cuda-|12.6:|2026.11.26"),
        ("image own/a-b@c is unknown here", "image own/a-b@c is unknown here"),
        ("gpu-rack12-node001,gpu-rack12-node002", "gpu-|rack12-|node001,|gpu-|rack12-|node002"),
        ("x" * 24, "x" * 24),
        ("x" * 40, f"{'x' * 16}|{'x' * 16}|{'x' * 8}"),
        (DIGEST, f"sha256:|0123456789abcccc|{'c' * 16}|{'c' * 16}|{'c' * 16}"),
        ("<script>alert(1)</script>_x", "&lt;script&gt;alert(1)&lt;/|script&gt;_|x"),
        ("&lt;" * 5, "&amp;lt;" * 5),
        ("a\x1b\u202eb\nc", "a??b\nc"),
        ("", ""),
    ],
)
def test_long_words_break_behind_separators(text: str, html: str) -> None:
    assert str(breakable(text)) == html.replace("|", "<wbr>")


def test_a_short_digest_has_the_whole_as_its_tooltip() -> None:
    assert str(brief(f"tiny:1@{DIGEST}")) == (
        f'<span title="tiny:1@{DIGEST}">tiny:<wbr>1@<wbr>sha256:<wbr>0123456789ab</span>'
    )
    assert str(brief("tiny:1")) == "tiny:1"
    assert str(brief(f'"<b>{DIGEST}')).startswith(
        f'<span title="&#34;&lt;b&gt;{DIGEST}">&#34;&lt;b&gt;sha256:'
    )


def test_only_whole_digests_are_shortened() -> None:
    short = "sha256:0123456789ab"
    assert short_digests(f"a {DIGEST} b {DIGEST}.") == f"a {short} b {short}."
    for other in (f"{DIGEST}0", DIGEST[:-1], DIGEST.upper()):
        assert short_digests(other) == other
