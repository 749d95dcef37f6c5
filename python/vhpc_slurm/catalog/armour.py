# SPDX-License-Identifier: Apache-2.0
"""The text form of OpenSSH's signatures (PROTOCOL.sshsig); a file may have several of them."""

from __future__ import annotations

import re

MAX_SIGNATURES = 8
"""Signatures of one manifest that are looked at: each takes a process or two."""
ARMOUR = re.compile(rb"-----BEGIN SSH SIGNATURE-----\n[A-Za-z0-9+/=\n]{1,16384}-----END SSH SIGNATURE-----\n")


def split(signatures: bytes) -> list[bytes]:
    """The single signatures, at most MAX_SIGNATURES; what has another form is left out."""
    return [match[0] for match in ARMOUR.finditer(signatures)][:MAX_SIGNATURES]
