# SPDX-License-Identifier: Apache-2.0
"""Requests of ordinary users: which ones, how many, and whose jobs they see.

A user sees the user's own jobs, a coordinator those of the coordinator's accounts, operators
and administrators of Slurm all.  That is what Slurm shows with ``PrivateData=jobs``, also
where a site does not set it.  Deputies, such as a web server that has authenticated its users,
may ask what another user would be answered, and nothing more.  Operators and administrators also
see alarms, devices in quarantine and the state of the fabric.  Users save their own jobs, and remove
their own checkpoints.  Clusters of an account belong to all of its users.

slurmctld is asked about a job that its owner saves; it and slurmdbd are asked for a user's rights once in
``REMEMBERED_S``, and only for requests about clusters, or if the user's own jobs are not the answer.
"""

from __future__ import annotations

import asyncio
import logging
import pwd
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from vhpc_slurm.controller.api import checkpoint_messages, cluster_messages
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.attempts import Attempts
from vhpc_slurm.controller.api.cluster_messages import ClusterLists
from vhpc_slurm.controller.api.requests import Answering, ByUsers
from vhpc_slurm.controller.api.status_messages import AskTrouble
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import Viewer
from vhpc_slurm.slurm.port import Slurm, SlurmError

log = logging.getLogger("vhpcd")

RATE, BURST = 5.0, 60.0
"""Requests per second of a user, and how many at once."""
READS = 1
"""Requests of users in the database at a time: one start waits for one of them at most."""
CHANGES = 2
"""Requests of users that change something at a time: slurmctld is asked for some of them."""
REMEMBERED_S, AGAIN_S = 300.0, 60.0
"""How long a user's rights are remembered, and how long a failure to learn them."""
WAIT_S = 3.0
"""How long a request waits for slurmdbd; without an answer its user sees the user's own jobs."""
USERS = 4096
"""Users whose rights are remembered."""


class UserAccess:
    """Belongs to the event loop; slurmdbd and the user database are asked in threads of their own."""

    def __init__(
        self,
        requests: Answering,
        slurm: Slurm,
        clock: Callable[[], float] = time.monotonic,
        *,
        deputies: frozenset[int] = frozenset(),
    ) -> None:
        """``clock`` never jumps; ``deputies`` are the uids that may send AsUser."""
        self._deputies = deputies
        self._requests = requests
        self._slurm = slurm
        self._clock = clock
        self._attempts = Attempts(RATE, BURST, clock)
        self._reads = asyncio.Semaphore(READS)
        self._changes = asyncio.Semaphore(CHANGES)
        self._threads = ThreadPoolExecutor(2, "users")
        self._known: OrderedDict[int, tuple[float, asyncio.Future[Viewer]]] = OrderedDict()

    def another(self, uid: int) -> wire.Failure | None:
        """Count a request of a user; why it is refused, if the user sends too many."""
        return None if uid in self._deputies else self._counted(uid, str(uid))

    def _counted(self, uid: int, bucket: str) -> wire.Failure | None:
        if self._attempts.another(bucket):
            return None
        why = f"vhpcd answers {RATE:g} requests of a user per second"
        return _failure(UserError(f"uid {uid} asks vhpcd too often", why, "try again in a few seconds"))

    async def answer(self, request: wire.Request, uid: int) -> wire.Answer | None:
        """The answer to a user; None for a request that users may not send."""
        if isinstance(request, wire.AsUser):
            if uid not in self._deputies:
                return None
            # apart from the user's own commands, so that a web page does not use up their requests
            if (refusal := self._counted(request.uid, f"as {request.uid}")) is not None:
                return refusal
            uid, request = request.uid, request.request
        if not isinstance(request, wire.OfUsers):
            return await self._change(request, uid)
        if isinstance(request, wire.ListTimelines) and request.job_id is None:
            return _failure(UserError("vhpcd lists timelines of one job only", "the request names no job"))
        if not isinstance(request, AskTrouble) and request.job_id is not None:
            answer = await self._read(request, Viewer(uid))
            if not _is_empty(answer):
                return answer
        return await self._read(request, await self._viewer(uid))

    async def _change(self, request: wire.Request, uid: int) -> wire.Answer | None:
        """The answer to a request about what belongs to the user, and of operators; None for all others."""
        if isinstance(request, ClusterLists):
            return await self._read(request, await self._viewer(uid))
        if not isinstance(request, ByUsers):
            return None
        viewer = await self._viewer(uid) if isinstance(request, cluster_messages.ByUsers) else Viewer(uid)
        async with self._changes:
            return await self._requests.answer(request, uid, viewer)

    async def _read(self, request: wire.OfUsers | ClusterLists, viewer: Viewer) -> wire.Answer:
        async with self._reads:
            return await self._requests.answer(request, viewer.uid, viewer)

    async def _viewer(self, uid: int) -> Viewer:
        """Which jobs of others a user may see."""
        until, asked = self._known.pop(uid, (0.0, None))
        if asked is None or until < self._clock():
            loop = asyncio.get_running_loop()
            asked = loop.run_in_executor(self._threads, self._look_up, uid)
            until = self._clock() + REMEMBERED_S
        self._known[uid] = (until, asked)
        if len(self._known) > USERS:
            self._known.popitem(last=False)
        await asyncio.wait([asked], timeout=WAIT_S)
        if not asked.done():
            return Viewer(uid)
        if (err := asked.exception()) is None:
            return asked.result()
        if until > self._clock() + AGAIN_S:
            self._known[uid] = (self._clock() + AGAIN_S, asked)
            line = err.line() if isinstance(err, VhpcError) else repr(err)
            log.warning("slurmdbd does not tell the rights of uid %d: %s", uid, line)
        return Viewer(uid)

    def _look_up(self, uid: int) -> Viewer:
        try:
            user = pwd.getpwuid(uid).pw_name
        except KeyError:
            return Viewer(uid)
        standing = self._slurm.standing(user)
        found = Viewer(uid, standing.coordinates, standing.level in ("Operator", "Administrator"))
        try:
            return replace(found, user=user, member_of=self._slurm.accounts(user))
        except SlurmError as err:
            log.warning("slurmctld does not tell the accounts of uid %d: %s", uid, err.line())
            return found

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _is_empty(answer: wire.Answer) -> bool:
    match answer:
        case wire.LeasePage():
            return not answer.records
        case wire.TimelinePage():
            return not answer.timelines
        case wire.ReportPage():
            return not answer.reports
        case checkpoint_messages.CheckpointPage():
            return not answer.checkpoints
        case wire.Failure():
            return answer.kind == UserError.kind
    return False


def _failure(err: VhpcError) -> wire.Failure:
    return wire.Failure(kind=err.kind, what=err.what, why=err.why, hint=err.hint)
