# SPDX-License-Identifier: Apache-2.0
"""The end of a guest in libvirt's log; texts of libvirt 11.3 and QEMU 10.0 on Debian 13."""

from __future__ import annotations

from pathlib import Path

import pytest

from vhpc_slurm.node.guest import qemulog

START = """2026-11-21 16:04:36.624+0000: starting up libvirt version: 11.3.0
LC_ALL=C \\
/usr/bin/qemu-system-x86_64 \\
-name guest=vhpc-71-0-bf4e3407-g0,debug-threads=on \\
-msg timestamp=on
"""
ASSERTION = (
    "qemu-system-x86_64: system/physmem.c:2671: iotlb_to_section:"
    " Assertion `section_index < d->map.sections_nb' failed.\n"
)
WROTE = "Failed to write msg. Wrote -1 instead of 20."
STAMPED = f"2026-11-21T16:04:37.100000Z qemu-system-x86_64: {WROTE}\n"
TERMINATED = "2026-11-21T16:04:37.200000Z qemu-system-x86_64: terminating on signal 15 from pid 81\n"


def end(reason: str) -> str:
    return f"2026-11-21 16:04:38.703+0000: shutting down, reason={reason}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (START + ASSERTION + end("crashed"), ASSERTION.split(": ", 1)[1].strip()),
        (START + STAMPED + end("crashed"), WROTE),
        (START + STAMPED.replace("qemu-system-x86_64", "qemu-kvm") + end("crashed"), WROTE),
        (START + end("crashed"), ""),
        (START + TERMINATED + end("destroyed"), None),
        (START + end("shutdown"), None),
        (START, None),
        (START + "a guest says: shutting down, reason=crashed\n", None),
        (START + end("crashed") + START + end("shutdown"), None),
        ("", None),
    ],
)
def test_a_crash_is_distinguished_from_other_ends(tmp_path: Path, text: str, words: str | None) -> None:
    (tmp_path / "vhpc-71.log").write_text(text)
    assert qemulog.crash("vhpc-71", str(tmp_path)) == words


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    noise = "qemu-system-x86_64: warning: again\n" * 5000
    (tmp_path / "vhpc-71.log").write_bytes(b"\xff\xfe" + (START + noise + end("crashed")).encode())
    assert qemulog.crash("vhpc-71", str(tmp_path)) == "warning: again"


def test_a_missing_log_and_a_link_count_as_no_crash(tmp_path: Path) -> None:
    (tmp_path / "real").write_text(START + end("crashed"))
    (tmp_path / "vhpc-71.log").symlink_to(tmp_path / "real")
    assert qemulog.crash("vhpc-71", str(tmp_path)) is None
    assert qemulog.crash("vhpc-72", str(tmp_path)) is None
