# SPDX-License-Identifier: Apache-2.0
"""What the file of a name in a catalogue says: one image for each architecture, as an OCI index has.

A line is ``sha256:HEX`` for x86_64, and ``sha256:HEX ARCH`` for others. So the file of a name with one image
for x86_64 is as it was before there were others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from vhpc_slurm.architecture import X86_64

LIMIT = 1024
"""Maximum bytes of the file of a name."""
_LINE = re.compile(r"(sha256:[0-9a-f]{64})(?: ([a-z0-9_]{1,32}))?\Z", re.ASCII)


def parse(text: str) -> dict[str, str]:
    """Architecture -> digest; empty if the text is not that of a name."""
    found: dict[str, str] = {}
    for line in text.strip().split("\n"):
        match = _LINE.match(line.strip())
        if match is None or (arch := match[2] or X86_64.name) in found:
            return {}
        found[arch] = match[1]
    return found


def encode(pointers: Mapping[str, str]) -> bytes:
    """The bytes of the file: x86_64 first, then the others by their names."""
    order = sorted(pointers, key=lambda arch: (arch != X86_64.name, arch))
    lines = (pointers[arch] + ("" if arch == X86_64.name else f" {arch}") for arch in order)
    return "".join(f"{line}\n" for line in lines).encode()
