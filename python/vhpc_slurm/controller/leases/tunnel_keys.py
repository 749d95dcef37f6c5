# SPDX-License-Identifier: Apache-2.0
"""New keys for the WireGuard tunnels of a generation: X25519 (RFC 7748), by the package cryptography.

The package is imported when keys are needed, as sites without encryption do not need it.
"""
# Decision: Encrypted job networks: keys, ports and addresses

from __future__ import annotations

from base64 import b64encode

from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import TunnelKeyPairs


def make(count: int) -> TunnelKeyPairs:
    """A key pair for each of ``count`` nodes.

    Raises:
        FabricError: this host does not have the package, or it has no X25519.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    except ImportError as err:
        raise FabricError(
            "vhpcd's host cannot make keys for network.encryption",
            str(err),
            "apt install python3-cryptography",
        ) from err
    raw = serialization.Encoding.Raw
    try:
        keys = [X25519PrivateKey.generate() for _ in range(count)]
    except UnsupportedAlgorithm as err:
        raise FabricError("vhpcd's host cannot make keys for network.encryption", str(err)) from err
    secret, plain = serialization.PrivateFormat.Raw, serialization.NoEncryption()
    return TunnelKeyPairs(
        tuple(b64encode(key.private_bytes(raw, secret, plain)).decode() for key in keys),
        tuple(
            b64encode(key.public_key().public_bytes(raw, serialization.PublicFormat.Raw)).decode()
            for key in keys
        ),
    )
