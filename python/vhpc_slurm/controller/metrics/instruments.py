# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms of requests, and of the stages of boots that nodes report."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.requests import Answering
from vhpc_slurm.model import Stage, Viewer

FAILED = "failed:"
"""A stage whose detail begins so has failed (see node.store.timeline)."""
TEARDOWN = frozenset({"power off", "release"})
"""Stages that an Epilog records; the others belong to boots."""
LAST = "setup"
"""The last stage of each guest's boot."""
MOST_STAGES = 64
"""Different names of stages that are told apart; a node cannot make more time series."""
OTHER = "other"
MOST_ENDS = 4096
"""Last ends that are known, to tell repeated acknowledgements from new ones."""
REQUEST_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
STAGE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)

_GUEST = re.compile(r" g[0-9]+$")


class Instruments:
    """Belongs to the event loop; Prometheus reads it from other threads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._stages: set[str] = set()
        self._ends: dict[tuple[str, str, bool], None] = {}
        self._requests = Counter(
            "vhpc_requests",
            "Requests that vhpcd has answered, by kind and kind of error (ok: none).",
            ("request", "result"),
            registry=registry,
        )
        self._request_s = Histogram(
            "vhpc_request_seconds",
            "Time from a request to its answer, waiting for the fabric or for other nodes included.",
            ("request",),
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._boots = Counter(
            "vhpc_boots",
            "Boots of a job's guests on a node: ready, failed, or ended before (a refused or cancelled job).",
            ("result",),
            registry=registry,
        )
        self._boot_s = Histogram(
            "vhpc_boot_seconds",
            "Time of a successful boot of a job's guests on a node, from the start of its Prolog.",
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
        self._stage_s = Histogram(
            "vhpc_stage_seconds",
            "Time of each stage of boots and teardowns on nodes.",
            ("stage",),
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
        self._teardowns = Counter(
            "vhpc_teardowns",
            "Ends of a job's guests on a node; unclean: something could not be verified as released.",
            ("result",),
            registry=registry,
        )

    def answered(self, request: wire.Request, answer: wire.Answer, took_s: float) -> None:
        """Count a request, and what it says about a node."""
        name = str(request.__struct_config__.tag)
        result = answer.kind if isinstance(answer, wire.Failure) else "ok"
        self._requests.labels(name, result).inc()
        self._request_s.labels(name).observe(took_s)
        if result != "ok":
            return
        if isinstance(request, wire.ReportTimeline):
            self._booted(request.timeline.stages)
        elif isinstance(request, wire.Acknowledge):
            self._ended(request)

    def _booted(self, stages: tuple[Stage, ...]) -> None:
        boot = [stage for stage in stages if stage.name not in TEARDOWN]
        if not boot:
            return
        result = _result(boot)
        self._boots.labels(result).inc()
        if result == "ready":
            began, ended = min(one.began for one in boot), max(one.ended for one in boot)
            self._boot_s.observe(max(0.0, ended - began))
        self._observe(boot)

    def _ended(self, request: wire.Acknowledge) -> None:
        """Count an end once: it comes again if an answer was lost, or from an Epilog after a health check."""
        end = (request.generation, request.node, request.clean)
        if end in self._ends:
            return
        self._ends[end] = None
        if len(self._ends) > MOST_ENDS:
            del self._ends[next(iter(self._ends))]
        self._teardowns.labels("clean" if request.clean else "unclean").inc()
        self._observe(stage for stage in request.stages or () if stage.name in TEARDOWN)

    def _observe(self, stages: Iterable[Stage]) -> None:
        for stage in stages:
            name = _GUEST.sub("", stage.name)
            if name not in self._stages and len(self._stages) >= MOST_STAGES:
                name = OTHER
            self._stages.add(name)
            self._stage_s.labels(name).observe(max(0.0, stage.ended - stage.began))


def _result(boot: list[Stage]) -> str:
    """The result of a boot with these stages."""
    if any(stage.detail.startswith(FAILED) for stage in boot):
        return "failed"
    return "ready" if any(_GUEST.sub("", stage.name) == LAST for stage in boot) else "ended"


class Metered:
    """Answers requests as ``requests`` does, and counts them."""

    def __init__(self, requests: Answering, instruments: Instruments) -> None:
        self._requests = requests
        self._instruments = instruments

    async def answer(self, request: wire.Request, uid: int = 0, viewer: Viewer | None = None) -> wire.Answer:
        """The answer of ``requests``."""
        began = time.monotonic()
        answer = await self._requests.answer(request, uid, viewer)
        self._instruments.answered(request, answer, time.monotonic() - began)
        return answer
