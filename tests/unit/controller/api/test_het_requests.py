# SPDX-License-Identifier: Apache-2.0
"""How vhpcd brings the requests of a heterogeneous job's components together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from checkpoint_vhpcd import Ctld
from controller_lab import allocation, identity
from het_site import UNDERLAY, component, two
from segment_site import JOB, Site, replace_network

from vhpc_slurm.config import Config
from vhpc_slurm.controller import wire_types
from vhpc_slurm.controller.api import components as gathering
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.components import Components, LateError
from vhpc_slurm.controller.api.starting import Starting
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.leases.opening import Wanted
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import HetPlace
from vhpc_slurm.slurm.port import Slurm

T = TypeVar("T")


def run(test: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(test(), 30)

    return asyncio.run(bounded())


def test_components_wait_for_each_other() -> None:
    async def test() -> None:
        found = Components()
        parts = [(component(number, 3), allocation(f"n{number}")) for number in range(3)]
        waiting = [asyncio.ensure_future(found.gather(*part, 20.0)) for part in parts[:2]]
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting)
        last = await found.gather(*parts[2], 20.0)
        assert list(last) == parts
        assert await asyncio.gather(*waiting) == [last, last]

    run(test)


@pytest.mark.parametrize("early", [True, False])
def test_a_component_without_guests_is_not_waited_for(early: bool) -> None:
    async def test() -> None:
        found = Components()
        if early:
            found.apart(10, 0)
        own = (component(1, 2), allocation("n1"))
        waiting = asyncio.ensure_future(found.gather(*own, 20.0))
        await asyncio.sleep(0)
        if not early:
            assert not waiting.done()
            found.apart(10, 0)
        assert await waiting == (own,)

    run(test)


def test_a_component_that_is_not_announced_is_named() -> None:
    async def test() -> None:
        found = Components()
        first = (component(0, 3), allocation("n1"))
        with pytest.raises(LateError, match="component 1, 2 of heterogeneous job 10"):
            await found.gather(*first, 0.01)
        # a hook that went away is not taken for one that waits
        last = asyncio.ensure_future(found.gather(component(1, 3), allocation("n2"), 20.0))
        found.apart(10, 2)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not last.done()
        await found.gather(*first, 20.0)
        assert [job.job_id for job, _ in await last] == [10, 11]

    run(test)


def test_components_of_different_users_have_no_common_network() -> None:
    async def test() -> None:
        found = Components()
        other = asyncio.ensure_future(found.gather(component(1, 2, uid=2002), allocation("n2"), 20.0))
        await asyncio.sleep(0)
        for refused in (found.gather(component(0, 2), allocation("n1"), 20.0), other):
            with pytest.raises(FabricError, match="of different users"):
                await refused

    run(test)


def test_memory_of_other_jobs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "MAX_JOBS", 3)

    async def test() -> None:
        found = Components()
        waiting = asyncio.ensure_future(found.gather(component(0, 2), allocation("n1"), 20.0))
        await asyncio.sleep(0)
        for leader in range(100, 150):
            found.apart(leader, 0)
        assert len(found._groups) == 3
        found.apart(10, 1)
        await waiting

    run(test)


def vhpcd(site: Site) -> Any:
    """vhpcd's requests, over a site's leases; nodes have the addresses of UNDERLAY."""

    class Executor(LeaseExecutor):
        def __init__(self) -> None:
            pass

        async def write(self, act: Any, *args: Any, **more: Any) -> Any:  # type: ignore[override]
            return act(*args, **more)

        async def aside(self, act: Any, *args: Any, **more: Any) -> Any:  # type: ignore[override]
            return identity(0) if act.__name__ == "look_up" else act(*args, **more)

    async def locate(nodes: Any) -> Mapping[str, str]:
        return {node: UNDERLAY[node] for node in nodes}

    config = Config(network=site.network)
    scheduler: Any = type("Scheduler", (), {"arriving": lambda _self: contextlib.nullcontext()})
    watch: Any = type("Watch", (), {"must_be_safe": lambda _self: None})
    return Starting(
        site.service.leases, Executor(), scheduler(), watch(), config, locate, cast(Slurm, Ctld())
    )


def asked(one: Wanted) -> wire.OpenGeneration:

    return wire.OpenGeneration(request=one.request, node_groups=wire_types.pack_allocation(one.allocation))


def test_the_last_request_makes_the_leases_of_all(tmp_path: Path) -> None:
    site = Site(tmp_path / "db")

    async def test() -> None:
        starting, (first, second) = vhpcd(site), two()
        waiting = asyncio.ensure_future(starting.open(asked(first)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert site.store.of_job(10) == ()
        answers = [(await starting.open(asked(second))).lease, (await waiting).lease]
        assert answers[0].segment == answers[1].segment
        assert len(answers[0].segment.parts) == 2
        # a hook that asks again does not wait for the others
        assert (await starting.open(asked(first))).lease == answers[1]
        # all nodes of the segment have the same keys for ssh
        keys = [
            (await starting.get(wire.GetLease(job_id=job, restart=0, node=node, wait_s=9.0))).ssh
            for job, node in ((11, "n1"), (10, "n3"), (11, "n2"))
        ]
        assert keys[0] is not None
        assert keys[0] == keys[1] == keys[2]

    run(test)


def test_a_component_without_a_network_starts_alone(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", JOB)

    async def test() -> None:
        starting, (first, second) = vhpcd(site), two()
        alone = dataclasses.replace(second, request=component(1, 2, network="none"))
        assert (await starting.open(asked(alone))).lease.segment is None
        segment = (await starting.open(asked(first))).lease.segment
        assert segment is not None
        assert segment.parts == ()

    run(test)


def test_places_and_ids_that_slurm_does_not_give_are_refused(tmp_path: Path) -> None:
    site = Site(tmp_path / "db")

    async def test() -> None:
        starting, (first, _) = vhpcd(site), two()
        for place in (
            HetPlace(10, 2, 2),
            HetPlace(10, -1, 2),
            HetPlace(10, 0, 1 << 40),
            HetPlace(1 << 64, 0, 2),
        ):
            odd = dataclasses.replace(first, request=dataclasses.replace(first.request, het=place))
            with pytest.raises(FabricError, match="its place in a heterogeneous job is out of range"):
                await starting.open(asked(odd))
        for uid, gid in ((1 << 64, 2001), (-1, 2001), (2001, 1 << 32)):
            odd = dataclasses.replace(first, request=dataclasses.replace(first.request, uid=uid, gid=gid))
            with pytest.raises(FabricError, match="its uid or gid is out of range"):
                await starting.open(asked(odd))

    run(test)


def test_no_component_waits_for_a_network_that_is_not_allowed(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", replace_network(allowed=("none",), default="none"))

    async def test() -> None:
        starting, (first, _) = vhpcd(site), two()
        asks = dataclasses.replace(first, request=component(0, 2, network="job"))
        assert "is not allowed here" in (await starting.open(asked(asks))).lease.refusal

    run(test)
