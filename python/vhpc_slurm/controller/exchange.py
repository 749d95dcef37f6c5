# SPDX-License-Identifier: Apache-2.0
"""Requests to vhpcd and its answers: sealed by munge, tried again, of the active vhpcd only.

Every request may be repeated without harm, so a lost connection or a vhpcd
that is just being restarted is tried again until the deadline.
"""

from __future__ import annotations

import os
import pwd
import random
import socket
import time
from pathlib import Path
from typing import TypeVar

from vhpc_slurm import errors, munge
from vhpc_slurm.config import Config
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.cluster_messages import ClusterLists
from vhpc_slurm.controller.asking import CLOSED, Round
from vhpc_slurm.controller.epochs import Epochs
from vhpc_slurm.errors import FabricError, VhpcError
from vhpc_slurm.munge import CredentialError, Munge, MungeBusyError

_KINDS: dict[str, type[VhpcError]] = {
    kind.kind: kind for kind in (errors.UserError, errors.NodeError, errors.TeardownError)
}
_Answer = TypeVar("_Answer", bound=wire.Answer)

_CHECK = "check that vhpcd runs there: systemctl status vhpcd"
_UNANSWERED = "does this host have the same munge.key? vhpcd's log says why it closes connections"
FAILOVER_S = 20.0
"""With several vhpcd a client waits so long in addition, in seconds, for one that takes over."""


class AnswerError(FabricError):
    """vhpcd has answered that it does not do what it was asked for."""


class UnusableError(AnswerError):
    """vhpcd cannot use this request, however often it is sent."""


class NotActiveError(FabricError):
    """Of several vhpcd, the one that was asked cannot serve the request now: it is a standby."""


def preload() -> None:
    """Do now what the first request would do, for processes that fork later."""
    munge.preload()
    wire.preload()


class Exchange:
    """Asks the vhpcd that the configuration names; ``ControllerClient`` has the requests."""

    def __init__(
        self, config: Config, *, as_uid: int | None = None, host: str = "", patient: bool = True
    ) -> None:
        """Sends nothing yet; with ``as_uid`` lists have what vhpcd shows to that user (``wire.AsUser``).

        With ``host`` only the vhpcd there is asked, which may be a standby. Without ``patient`` requests
        do not wait longer where a standby has to take over: for what is repeated later anyway.
        """
        self._as_uid = as_uid
        self._settings = config.controller
        self._hosts = (host,) if host else _own_first(config.controller.hosts)
        self._several = bool(config.controller.backup_hosts) and not host
        self._patience_s = FAILOVER_S if self._several and patient else 0.0
        self._epochs = Epochs(Path(config.paths.state)) if self._several else None
        self._munge = Munge(config.controller.munge_socket)
        self._version = wire.VERSION
        self._kept: socket.socket | None = None

    def _ask(
        self, body: wire.Request, expected: type[_Answer], wait_s: float = 0.0, *, keep: bool = False
    ) -> _Answer:
        """The answer; with ``keep`` its connection stays open until that of the next one has it."""
        if self._as_uid is not None:
            # asked as this process's user it would show what is not that user's
            assert isinstance(body, wire.OfUsers | ClusterLists), f"{type(body).__name__} for another user"
            body = wire.AsUser(uid=self._as_uid, request=body)
        limit_s = self._settings.request_timeout_s + wait_s + self._patience_s
        deadline = time.monotonic() + limit_s
        pause_s = 0.05
        while True:
            try:
                answer = self._once(body, deadline, keep)
                break
            except MungeBusyError as err:
                if time.monotonic() + pause_s >= deadline:
                    raise MungeBusyError(err.what, f"{err.why}; tried for {limit_s:g} s", err.hint) from err
            except (OSError, EOFError) as err:
                if time.monotonic() + pause_s >= deadline:
                    where = f"{' or '.join(self._hosts)} port {self._settings.port}"
                    raise FabricError(
                        f"{'no active vhpcd' if self._several else 'vhpcd'} at {where} "
                        f"{'answers' if self._several else 'does not answer'}",
                        f"{err or type(err).__name__}; tried for {limit_s:g} s",
                        _UNANSWERED if CLOSED in str(err) else _CHECK,
                    ) from err
            # A thousand nodes must not come back in step.
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - not a secret
            pause_s = min(2 * pause_s, 1.0)
        if isinstance(answer, wire.Failure):
            raise as_error(answer)
        if not isinstance(answer, expected):
            raise FabricError("vhpcd sent an answer to another request", type(answer).__name__)
        return answer

    def _once(self, body: wire.Request, deadline: float, keep: bool) -> wire.Answer:
        """An answer of the active vhpcd, if need be to a second request in the version of an older one.

        Raises:
            OSError, EOFError: it may be worth another try.
        """
        answer, version = self._exchange(body, deadline, keep)
        if isinstance(answer, wire.Failure) and version < self._version and wire.readable(version):
            self._version = version
            answer, _ = self._exchange(body, deadline, keep)
        return answer

    def _exchange(self, body: wire.Request, deadline: float, keep: bool) -> tuple[wire.Answer, int]:
        """One request, to each host until one serves it; returns the answer and its envelope's version."""

        def sealed() -> tuple[str, bytes]:
            nonce = os.urandom(16).hex()
            try:
                payload = wire.wrap("request", nonce, body, self._version)
            except ValueError as err:
                raise UnusableError("the request cannot be written as JSON", str(err)) from err
            if len(payload) > munge.MAX_PAYLOAD:
                raise UnusableError("the request is too long for vhpcd", f"{len(payload)} bytes")
            found = self._munge.encode(payload, ttl_s=wire.TTL_S)
            if len(found) > wire.MAX_MESSAGE:
                raise UnusableError("the request is too long for vhpcd", f"{len(found)} bytes")
            return nonce, found

        with Round(self._hosts, self._settings.port, deadline, sealed, keep=keep) as asked:
            for link, frame in asked.answers():
                answer, envelope = self._open(frame, link.nonce)
                if (refusal := self._refused(answer, envelope)) is None:
                    # This host is asked first from now on.
                    self._hosts = tuple(dict.fromkeys((link.host, *self._hosts)))
                    if keep:
                        self._hold(asked.take())
                    return answer, envelope.version
                asked.refusals[link.host] = f"{link.host}: {refusal}"
        raise ConnectionError("no host is configured")

    def _hold(self, answered: socket.socket | None) -> None:
        """Keep this connection in place of the one before, which vhpcd has closed."""
        if self._kept is not None:
            self._kept.close()
        self._kept = answered

    def _refused(self, answer: wire.Answer, envelope: wire.Envelope) -> str | None:
        """Why the client must ask another host; None if the answer counts."""
        if self._several and isinstance(answer, wire.Failure) and answer.kind == wire.AGAIN:
            return f"{answer.what}: {answer.why}"
        if self._epochs is None or self._epochs.accept(envelope.epoch):
            return None
        return f"it answered with epoch {envelope.epoch}, and this host has seen {self._epochs.highest}"

    def _open(self, frame: bytes, nonce: str) -> tuple[wire.Answer, wire.Envelope]:
        what = "the answer of vhpcd cannot be trusted"
        try:
            credential = self._munge.decode(frame)
        except CredentialError as err:
            raise FabricError(what, err.why, err.hint) from err
        if credential.uid not in self._trusted():
            user = self._settings.user
            raise FabricError(
                what,
                f"uid {credential.uid} sent it, not {user} or root",
                f"{user} must have the same uid on all hosts; see controller.user in vhpc.toml",
            )
        try:
            envelope = wire.unwrap(credential.payload, "answer")
            if envelope.nonce != nonce:
                raise FabricError(what, "it belongs to another request")
            return wire.read_answer(envelope), envelope
        except ValueError as err:
            raise FabricError(
                "vhpcd's answer cannot be read", str(err)[:200], "install one version of vhpc on all hosts"
            ) from err

    def _trusted(self) -> frozenset[int]:
        try:
            return frozenset({0, pwd.getpwnam(self._settings.user).pw_uid})
        except KeyError:
            return frozenset({0})


def as_error(failure: wire.Failure) -> VhpcError:
    """The error that a failure of vhpcd stands for."""
    by_kind = {wire.AGAIN: NotActiveError, wire.UNUSABLE: UnusableError}
    kind = by_kind.get(failure.kind) or _KINDS.get(failure.kind, AnswerError)
    return kind(failure.what, failure.why, failure.hint)


def _own_first(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Of several hosts this one first: it answers at once, and another one may be off."""
    own = socket.gethostname()
    return tuple(sorted(hosts, key=lambda host: host not in (own, own.partition(".")[0])))
