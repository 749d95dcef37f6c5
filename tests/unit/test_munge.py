# SPDX-License-Identifier: Apache-2.0
"""Credentials, against real munged processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from controller_lab import HAVE_MUNGED, NOBODY, Munged, as_uid, munged

from vhpc_slurm.errors import FabricError
from vhpc_slurm.munge import (
    MAX_PAYLOAD,
    Credential,
    CredentialError,
    CredentialExpiredError,
    CredentialReplayedError,
    CredentialRewoundError,
    CredentialUnauthorizedError,
    Munge,
    MungeError,
    MungeMissingError,
)

pytestmark = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: run as root")


@pytest.fixture
def munge(daemon: Munged) -> Munge:
    return Munge(str(daemon.socket))


@pytest.mark.parametrize("payload", [b"", b"hello", b"a\0b\0", bytes(range(256)) * 100, b"x" * MAX_PAYLOAD])
def test_data_is_decoded_with_the_own_uid_and_gid(munge: Munge, payload: bytes) -> None:
    assert munge.decode(munge.encode(payload)) == Credential(payload, os.geteuid(), os.getegid())


def test_repetitive_payloads_shrink(munge: Munge) -> None:
    assert len(munge.encode(b'{"node":"n1"},' * 20000)) < 10000


def test_too_long_a_payload_is_refused_before_munged_sees_it(munge: Munge) -> None:
    with pytest.raises(MungeError, match="too long"):
        munge.encode(b"x" * (MAX_PAYLOAD + 1))


def test_a_second_decode_on_this_host_is_a_replay(munge: Munge) -> None:
    credential = munge.encode(b"once")
    munge.decode(credential)
    with pytest.raises(CredentialReplayedError) as caught:
        munge.decode(credential)
    assert caught.value.credential == Credential(b"once", os.geteuid(), os.getegid())


def test_an_expired_credential_still_names_its_sender(munge: Munge) -> None:
    credential = munge.encode(b"old", ttl_s=1)
    time.sleep(2.2)
    with pytest.raises(CredentialExpiredError, match="clocks") as caught:
        munge.decode(credential)
    assert caught.value.credential == Credential(b"old", os.geteuid(), os.getegid())


def test_a_credential_from_the_future_is_rewound(daemon: Munged, munge: Munge) -> None:
    with munged(daemon.key, shift_s=3600) as ahead, pytest.raises(CredentialRewoundError):
        munge.decode(Munge(str(ahead.socket)).encode(b"tomorrow"))


def test_another_cluster_s_credential_is_refused(munge: Munge) -> None:
    with munged() as stranger, pytest.raises(CredentialError, match=r"munge\.key") as caught:
        munge.decode(Munge(str(stranger.socket)).encode(b"trust me"))
    assert caught.value.credential is None


@pytest.mark.parametrize("junk", [b"", b"MUNGE:AwQDAAD:", b"hello", b"MUNGE:" + b"A" * 500 + b":", b"a\0b"])
def test_an_invalid_credential_is_refused(munge: Munge, junk: bytes) -> None:
    with pytest.raises(MungeError):
        munge.decode(junk)


def test_a_damaged_credential_is_refused(munge: Munge) -> None:
    credential = bytearray(munge.encode(b"pay alice"))
    credential[len(credential) // 2] ^= 0x01
    with pytest.raises(CredentialError):
        munge.decode(bytes(credential))


def test_only_the_named_user_may_decode(munge: Munge) -> None:
    assert munge.decode(munge.encode(b"x", only_uid=os.geteuid())).payload == b"x"
    with pytest.raises(CredentialUnauthorizedError):
        munge.decode(munge.encode(b"x", only_uid=os.geteuid() + 1))


@root
def test_a_credential_of_another_user_has_that_uid(munge: Munge) -> None:
    assert munge.decode(as_uid(NOBODY, lambda: munge.encode(b"x"))) == Credential(b"x", NOBODY, NOBODY)


def test_a_missing_munged_is_the_fabric_s_failure_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(MungeMissingError, match="systemctl status munge") as caught:
        Munge(str(tmp_path / "none")).encode(b"x")
    assert isinstance(caught.value, FabricError)
