"""Prices against the table of section 5, and bytes against a count of the messages one by one."""

import math

import pytest

from shoal.errors import UsageError
from shoal.sync.traffic import SERVER, Transfer, hops
from shoal.world.virtual.links import Hop, LinkClass, Links, Network
from shoal.world.virtual.pricing import (
    NOTHING,
    chain,
    messages,
    parameter_server,
    price_of,
    ring,
    score_all_gather,
    tree,
)

A, B = 1e-4, 117e6
FLAT = Network(inter=LinkClass(latency_seconds=A, bytes_per_second=B))
NODES = Network(workers_per_node=4)
RESNET50, RESNET20 = 25_557_032 * 4, 269_722 * 4


@pytest.mark.parametrize(
    ("name", "price", "resnet50", "resnet20"),
    [
        ("chain", lambda w, n: chain(FLAT, 0, w, n), 0.88, 0.011),
        ("ring", lambda w, n: ring(FLAT, w, n), 1.64, 0.020),
        ("tree", lambda w, n: tree(FLAT, 0, w, n), 3.50, 0.038),
        ("server", lambda w, n: parameter_server(FLAT, w, n), 28.0, 0.298),
    ],
)
def test_prices_are_those_of_the_notes_on_16_workers(name, price, resnet50, resnet20):
    assert price(range(16), RESNET50).seconds == pytest.approx(resnet50, rel=0.01)
    assert price(range(16), RESNET20).seconds == pytest.approx(resnet20, rel=0.06)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("size", [0, 1, 7, 1000, 12345])
def test_on_one_class_of_links_seconds_and_bytes_are_the_formulas(p, size):
    workers = list(range(p))
    rounds = math.ceil(math.log2(p))
    cases = [
        (chain(FLAT, p - 1, workers, size), (p - 1) * A + (p > 1) * size / B, (p - 1) * size),
        (tree(FLAT, 0, workers, size), rounds * (A + size / B), (p - 1) * size),
        (ring(FLAT, workers, size), 2 * (p - 1) * (A + size / (p * B)), 2 * (p - 1) * size),
        (parameter_server(FLAT, workers, size), 2 * p * (A + size / B), 2 * p * size),
        (score_all_gather(FLAT, workers, size), rounds * A, p * (p - 1) * size),
    ]
    for price, seconds, carried in cases:
        assert price.seconds == pytest.approx(seconds, rel=1e-12, abs=1e-15)
        assert price.formula_bytes == price.counted_bytes(FLAT) == carried


def test_a_broadcast_over_nodes_enters_each_other_node_once():
    price = chain(NODES, 6, range(16), 1000)
    assert price.counted_bytes(NODES, "inter") == 3 * 1000
    assert price.counted_bytes(NODES, "intra") == 12 * 1000
    assert price.hops[0].source == 6
    assert {NODES.node(hop.target) for hop in price.hops[:3]} == {1}
    assert price.seconds == pytest.approx(12e-5 + 3e-4 + 1000 / 117e6)
    reached = [price.hops[0].source, *(hop.target for hop in price.hops)]
    assert sorted(reached) == list(range(16))


def test_every_worker_of_a_tree_gets_the_bytes_from_one_who_has_them():
    price = tree(NODES, 6, range(11), 1000)
    have = {6}
    for hop in price.hops:
        assert hop.source in have and hop.target not in have
        have.add(hop.target)
    assert have == set(range(11))


def test_a_ring_inside_a_node_is_quicker_and_crosses_borders_only_if_there_are_any():
    inside = ring(NODES, range(4), 1000)
    assert inside.counted_bytes(NODES, "inter") == 0
    across = ring(NODES, range(8), 1000)
    assert across.counted_bytes(NODES) == 2 * 7 * 1000
    assert len([h for h in across.hops if NODES.name(h.source, h.target) == "inter"]) == 2
    assert across.seconds > inside.seconds


def test_messages_at_once_wait_for_the_port_they_share():
    one = messages(NODES, [(0, 4, 1_000_000)])
    assert one.seconds == pytest.approx(1e-4 + 1e6 / 117e6)
    both = messages(NODES, [(0, 4, 1_000_000), (1, 8, 1_000_000)])
    assert both.seconds == pytest.approx(1e-4 + 2e6 / 117e6)
    apart = messages(NODES, [(0, 4, 1_000_000), (8, 12, 1_000_000)])
    assert apart.seconds == pytest.approx(one.seconds)
    assert messages(NODES, [(3, 3, 10)]) == NOTHING


def test_transfers_wait_for_their_ports_in_the_order_in_which_they_ask():
    links = Links(FLAT)
    first = FLAT.ports(Hop(0, 1, 10))
    assert links.start(first, 5.0, 2.0) == 5.0
    assert links.start(FLAT.ports(Hop(0, 2, 10)), 6.0, 1.0) == 7.0
    assert links.start(FLAT.ports(Hop(3, 4, 10)), 6.0, 1.0) == 6.0
    assert links.start(first, 6.5, 1.0) == 8.0


def test_links_counts_by_class():
    links = Links(NODES)
    links.count(chain(NODES, 0, range(8), 100).hops)
    links.count([Hop(0, SERVER, 5)])
    assert links.counted_bytes == {"intra": 600, "inter": 105}
    assert links.messages == {"intra": 6, "inter": 2}


@pytest.mark.parametrize("kind", ["scores", "mean", "broadcast", "send", "fetch"])
def test_a_rule_s_transfers_cost_the_messages_that_its_own_record_lists(kind):
    workers = {"send": (2, 9), "fetch": (SERVER, 9)}.get(kind, tuple(range(3, 14)))
    source = 7 if kind == "broadcast" else None
    transfer = Transfer(kind=kind, workers=workers, size=1001, source=source)
    price = price_of(NODES, transfer)
    nodes = {w: NODES.node(w) for w in workers}
    assert sorted(price.hops) == sorted(Hop(*hop) for hop in hops(transfer, nodes))
    assert price.formula_bytes == price.counted_bytes(NODES)


def test_a_tree_may_be_asked_for():
    transfer = Transfer(kind="broadcast", workers=tuple(range(8)), size=10**6, source=0)
    chained, treed = price_of(FLAT, transfer), price_of(FLAT, transfer, broadcast="tree")
    assert treed.seconds == pytest.approx(3 * (A + 1e6 / B))
    assert chained.seconds < treed.seconds


def test_links_may_be_tried():
    links = Links(FLAT)
    tried = links.tried()
    tried.start(FLAT.ports(Hop(0, 1, 1)), 0.0, 5.0)
    tried.count([Hop(0, 1, 1)])
    assert links.start(FLAT.ports(Hop(0, 1, 1)), 0.0, 1.0) == 0.0
    assert links.counted_bytes["inter"] == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinkClass(latency_seconds=-1.0, bytes_per_second=1.0), "latency_seconds = -1"),
        (lambda: LinkClass(latency_seconds=0.0, bytes_per_second=0.0), "bytes_per_second = 0"),
        (lambda: Network(workers_per_node=0), "workers_per_node = 0"),
    ],
)
def test_a_number_out_of_range_is_named(make, message):
    with pytest.raises(UsageError, match=message):
        make()
