# SPDX-License-Identifier: Apache-2.0
"""Peers that vhpcd serves, requests that it drops, and answers that its client accepts."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from controller_lab import (
    HAVE_MUNGED,
    NOBODY,
    ChildError,
    Munged,
    allocation,
    as_uid,
    munged,
    request,
    stop,
)
from vhpcd_process import ME, SLURM_USER, Vhpcd, frame_of, make

from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.conversation import NONCE_LIFE_S, FreshNonces
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.munge import Munge

pytestmark = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: run as root")


@pytest.fixture
def stopped(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    found = make(tmp_path, daemon)
    yield found
    if found.process is not None:
        stop(found.process)


@pytest.fixture
def vhpcd(stopped: Vhpcd) -> Vhpcd:
    return stopped.start()


# --- who is heard, and what is not ------------------------------------------------------


@pytest.mark.promise("attack.request")
@root
def test_other_users_are_refused_with_a_reason(vhpcd: Vhpcd) -> None:
    with pytest.raises(ChildError, match=f"refuses uid {NOBODY}") as caught:
        as_uid(NOBODY, vhpcd.client.status)
    assert caught.value.args[0] == "UserError"
    assert f"uid {NOBODY} at 127.0.0.1 is refused: not root or SlurmUser" in vhpcd.log


@root
def test_requests_of_slurmuser_are_served(vhpcd: Vhpcd) -> None:
    uid = pwd.getpwnam(SLURM_USER).pw_uid
    client = vhpcd.client
    assert as_uid(uid, lambda: client.open_generation(request(), allocation()).state) == "ready"


@pytest.mark.promise("attack.request")
def test_a_request_sent_again_is_refused_also_by_another_munged(vhpcd: Vhpcd, daemon: Munged) -> None:
    sealed = vhpcd.munge().encode(wire.wrap("request", "b" * 32, wire.AskStatus()))
    assert vhpcd.raw(frame_of(sealed), end=False)
    assert vhpcd.raw(frame_of(sealed), end=False) == b"", "munged knows the credential"
    assert "Replayed credential" in vhpcd.log
    # A munged that was restarted has forgotten; so do we ask with the same nonce in a new credential.
    answer = vhpcd.tell(wire.wrap("request", "b" * 32, wire.AskStatus()))
    assert isinstance(answer, wire.Failure)
    assert "seen this request before" in answer.what


@pytest.mark.promise("attack.request")
def test_an_expired_request_gets_a_hint_about_clocks(vhpcd: Vhpcd) -> None:
    sealed = vhpcd.munge().encode(
        wire.wrap("request", "c" * 32, wire.Ending(job_id=1, restart=None)), ttl_s=1
    )
    time.sleep(2.2)
    frame = vhpcd.raw(frame_of(sealed), end=False)
    answer = wire.read_answer(wire.unwrap(vhpcd.munge().decode(frame[4:]).payload, "answer"))
    assert isinstance(answer, wire.Failure)
    assert "Expired" in answer.why


@pytest.mark.promise("attack.request")
def test_a_forged_request_is_dropped(vhpcd: Vhpcd) -> None:
    with munged() as stranger:
        sealed = Munge(str(stranger.socket)).encode(wire.wrap("request", "d" * 32, wire.AskStatus()))
    assert vhpcd.raw(frame_of(sealed)) == b""
    assert "Invalid credential" in vhpcd.log
    assert vhpcd.client.status()


GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.0\r\n\r\n",
    "empty": b"\0\0\0\0",
    "text": frame_of(b"hello"),
    "stub": frame_of(b"MUNGE:AwQDAAD:"),
    "short": struct.pack(">I", 1000) + b"MUNGE:",
    "oversize": struct.pack(">I", (1 << 20) + 1) + b"x" * 100,
    "ff": b"\xff" * 5000,
    "largest": frame_of(os.urandom(1 << 20)),
}


@pytest.mark.promise("attack.garbage")
def test_garbage_is_dropped_without_an_answer(vhpcd: Vhpcd) -> None:
    for name, data in GARBAGE.items():
        assert vhpcd.raw(data) == b"", name
        assert vhpcd.client.status(), name
        assert "Traceback" not in vhpcd.log, name


FORGERY = "x\nERROR 9.0.00000000 not clean on n1: \x1b]0;t\x07\x9b2J\u202e\u2028\r"


@pytest.mark.promise("attack.log-escape")
@root
def test_a_user_cannot_forge_a_line_of_the_log(vhpcd: Vhpcd) -> None:
    """The decoder's error names the field that the user has made up."""
    frame = {"message": "request", "version": wire.VERSION, "nonce": "c" * 32, "body": {}}
    bodies = [
        frame | {FORGERY: 1},
        frame | {"message": FORGERY},
        frame | {"body": {"type": "status", FORGERY: 1}},
        frame | {"body": {"type": FORGERY}},
    ]
    before = len(vhpcd.log)
    for number, body in enumerate(bodies):
        payload = msgspec.json.encode(body | {"nonce": f"{number:032x}"})
        sealed = as_uid(NOBODY, partial(vhpcd.munge().encode, payload))
        vhpcd.raw(frame_of(sealed), end=False)
    said = vhpcd.log[before:]
    assert f"uid {NOBODY}" in said
    assert not re.search(r"[^\n -~]", said), said
    assert not [line for line in said.splitlines() if "not clean" in line and f"uid {NOBODY}" not in line]


def test_authentic_nonsense_is_answered_or_dropped(vhpcd: Vhpcd) -> None:
    def body(raw: bytes, version: int = wire.VERSION, nonce: str = "") -> bytes:
        fields = {"message": "request", "version": version, "nonce": nonce or os.urandom(16).hex()}
        return msgspec.json.encode(fields | {"body": msgspec.Raw(raw)})

    for raw in (b'{"type":"format disk"}', b'{"type":"ending"}', b"[]", b'{"type":"status","more":1}'):
        answer = vhpcd.tell(body(raw))
        assert isinstance(answer, wire.Failure)
        assert answer.kind == "unusable"
    answer = vhpcd.tell(body(b'{"type":"status"}', version=99))
    assert isinstance(answer, wire.Failure)
    assert f"speaks protocol {wire.VERSION}" in answer.why
    ack = {"type": "acknowledge", "generation": "../../x", "node": "n1", "clean": True}
    answer = vhpcd.tell(body(msgspec.json.encode(ack)))
    assert isinstance(answer, wire.Failure)
    assert "not a generation" in answer.why
    for payload in (b"", b"{}", b"\xff", body(b"{}", nonce="x"), wire.wrap("answer", "e" * 32, wire.Done())):
        assert vhpcd.raw(frame_of(vhpcd.munge().encode(payload))) == b""
    assert "Traceback" not in vhpcd.log


@pytest.mark.promise("attack.garbage")
def test_many_silent_connections_do_not_keep_others_out(vhpcd: Vhpcd) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(300):
            link = held.enter_context(socket.create_connection(("127.0.0.1", vhpcd.config.controller.port)))
            link.sendall(struct.pack(">I", 1 << 20) + b"x" * 1000)
        assert vhpcd.client.status().connections >= 300


@pytest.mark.slow
def test_a_silent_connection_is_closed(vhpcd: Vhpcd) -> None:
    began = time.monotonic()
    assert vhpcd.raw(struct.pack(">I", 100), end=False, seconds=60.0) == b""
    assert time.monotonic() - began > 9.0


def test_nonces_are_forgotten_only_after_their_credentials() -> None:
    nonces = FreshNonces()
    assert nonces.fresh("a", 0.0)
    assert not nonces.fresh("a", NONCE_LIFE_S - 1)
    assert nonces.fresh("a", NONCE_LIFE_S + 1)
    assert NONCE_LIFE_S > 2 * wire.TTL_S


# --- what the client believes ------------------------------------------------------------


class Impostor:
    """Listens where vhpcd should, and answers what the test makes of the request."""

    def __init__(self, munge: Munge, make: Callable[[bytes], bytes]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._munge, self._make = munge, make
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                with link:
                    (length,) = struct.unpack(">I", link.recv(4, socket.MSG_WAITALL))
                    link.sendall(self._make(link.recv(length, socket.MSG_WAITALL)))

    def close(self) -> None:
        self._listener.close()


def asked(daemon: Munged, make: Callable[[Munge, bytes], bytes], user: str = ME) -> Any:
    munge = Munge(str(daemon.socket))
    impostor = Impostor(munge, lambda credential: make(munge, credential))
    try:
        settings = Controller(
            host="127.0.0.1",
            port=impostor.port,
            user=user,
            munge_socket=str(daemon.socket),
            request_timeout_s=2,
        )
        return ControllerClient(Config(controller=settings)).status()
    finally:
        impostor.close()


def reply(munge: Munge, credential: bytes, nonce: str | None = None) -> bytes:
    envelope = wire.unwrap(munge.decode(credential).payload, "request")
    return wire.wrap("answer", nonce or envelope.nonce, wire.Failure(kind="user", what="from the impostor"))


def test_an_answer_of_the_right_user_is_accepted(daemon: Munged) -> None:
    with pytest.raises(UserError, match="from the impostor"):
        asked(daemon, lambda munge, credential: frame_of(munge.encode(reply(munge, credential))))


@pytest.mark.promise("attack.answer")
def test_an_answer_to_another_request_is_refused(daemon: Munged) -> None:
    with pytest.raises(FabricError, match="another request"):
        asked(daemon, lambda munge, credential: frame_of(munge.encode(reply(munge, credential, "f" * 32))))


def test_the_own_request_sent_back_is_refused(daemon: Munged) -> None:
    with pytest.raises(FabricError, match="request where answer"):
        asked(daemon, lambda _, credential: frame_of(credential))


@pytest.mark.promise("attack.answer")
@root
def test_an_answer_of_another_user_is_refused(daemon: Munged) -> None:
    def forge(munge: Munge, credential: bytes) -> bytes:
        answer = reply(munge, credential)
        return frame_of(as_uid(NOBODY, lambda: munge.encode(answer)))

    with pytest.raises(FabricError, match=f"uid {NOBODY} sent it, not {ME} or root"):
        asked(daemon, forge)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (frame_of(b"MUNGE:AwQDAAD:"), "cannot be trusted"),
        (struct.pack(">I", 1 << 31), "is not vhpcd"),
        (b"", "does not answer"),
        (struct.pack(">I", 100) + b"MUNGE", "does not answer"),
    ],
)
def test_garbage_is_refused(daemon: Munged, answer: bytes, why: str) -> None:
    with pytest.raises(FabricError, match=why):
        asked(daemon, lambda *_: answer)
