# SPDX-License-Identifier: Apache-2.0
"""vhpc image warm: which nodes a node asks for the image, and which may end."""

from __future__ import annotations

import random

import pytest

from vhpc_slurm.cli.images.relay import Relay


def test_the_first_node_reads_the_catalogue_and_two_ask_each() -> None:
    relay = Relay()
    assert [relay.join(node, serves=True) for node in "abcdefg"] == [
        (),
        ("a",),
        ("a",),
        ("b", "a"),
        ("b", "a"),
        ("c", "a"),
        ("c", "a"),
    ]


def test_a_node_that_has_the_image_is_asked_first() -> None:
    relay = Relay()
    for node in "abc":
        relay.join(node, serves=True)
    relay.copied("a")
    relay.copied("c")
    assert relay.unneeded(more=True) == [], "b asks a, and c is kept for those that come"
    assert relay.join("d", serves=True) == ("a",)
    assert relay.join("e", serves=True) == ("c", "a")
    relay.copied("b")
    relay.copied("d")
    assert relay.unneeded(more=True) == ["a", "b"]
    assert relay.unneeded(more=False) == ["a", "b", "d"]
    relay.copied("e")
    assert relay.unneeded(more=True) == ["a", "b", "c", "d"]
    assert relay.unneeded(more=False) == ["a", "b", "c", "d", "e"]


def test_ended_and_not_serving_nodes_are_not_asked() -> None:
    relay = Relay()
    relay.join("a", serves=True)
    relay.join("b", serves=False)
    assert relay.join("c", serves=True) == ("a",)
    relay.gone("a")
    assert relay.join("d", serves=True) == ("c",), "nor is a, which c was to ask"
    relay.gone("c")
    relay.gone("d")
    assert relay.join("e", serves=True) == ()
    relay.copied("b")
    assert relay.unneeded(more=True) == ["b"]


@pytest.mark.promise("peers.warm")
@pytest.mark.parametrize("seed", range(20))
def test_nodes_ask_only_present_nodes_in_any_order_of_events(seed: int) -> None:
    """1,000 nodes come, copy and go: each asks those that run, two copy from one, and one has no source."""
    chance, relay = random.Random(seed), Relay()
    later, copying, has = [f"n{rank}" for rank in range(1000)], dict[str, str](), set[str]()
    alone = 0
    while later or copying:
        if later and len(copying) < 16 and (not copying or chance.random() < 0.5):
            node = later.pop()
            sources = relay.join(node, serves=True)
            assert set(sources) <= {*copying, *has}
            alone += not sources
            copying[node] = sources[0] if sources else ""
            assert max(list(copying.values()).count(one) for one in (*copying, *has)) <= 2
        else:
            node = chance.choice(list(copying))
            del copying[node]
            relay.copied(node)
            has.add(node)
        for node in relay.unneeded(more=bool(later)):
            assert node not in copying.values()
            relay.gone(node)
            has.remove(node)
        assert len(has) <= 17, "no more nodes serve than may be asked, and one for those that come"
    assert (alone, has) == (1, set())
