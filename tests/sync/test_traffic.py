"""Payload of every kind of transfer, by class of link, and against what the virtual network counts."""

from itertools import product

import pytest
import torch

from shoal.errors import UsageError
from shoal.sync import Stacked
from shoal.sync.groups import even_groups, rebalanced
from shoal.sync.traffic import SCORE_BYTES, Traffic, Transfer, hops, link_bytes
from shoal.world.virtual import pricing
from shoal.world.virtual.links import Network

NODES = {3: 0, 5: 0, 8: 1, 9: 2, 12: 1}
WORKERS = tuple(NODES)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_are_those_that_the_virtual_network_prices(size: int) -> None:
    network = Network(nodes=NODES)
    for transfer, price in (
        (
            Transfer(kind="broadcast", workers=WORKERS, size=size, source=9),
            pricing.chain(network, 9, WORKERS, size),
        ),
        (Transfer(kind="mean", workers=WORKERS, size=size), pricing.ring(network, WORKERS, size)),
        (
            Transfer(kind="scores", workers=WORKERS, size=size),
            pricing.score_all_gather(network, WORKERS, size),
        ),
    ):
        found = hops(transfer, NODES)
        assert sorted(found) == sorted(tuple(hop) for hop in price.hops)
        assert sum(hop[2] for hop in found) == price.formula_bytes
        counted = link_bytes(transfer, NODES)
        assert counted["intra"] == price.counted_bytes(network, "intra")
        assert counted["inter"] == price.counted_bytes(network, "inter")


def test_a_chain_enters_each_node_once() -> None:
    traffic = Traffic(nodes=NODES)
    traffic.add(Transfer(kind="broadcast", workers=WORKERS, size=100, source=12))
    assert traffic.payload_bytes == {"intra": 200, "inter": 200}
    assert len(traffic.take()) == 1 and traffic.take() == []
    assert traffic.total_bytes() == 400


@pytest.mark.parametrize(("workers", "numbers"), list(product([1, 2, 3, 8], [1, 10])))
def test_stacked_workers_count_by_the_formulas(workers: int, numbers: int) -> None:
    x, size = torch.ones(workers, numbers), 4 * numbers

    def sent(exchange: Stacked) -> int:
        return exchange.traffic.total_bytes()

    exchange = Stacked(workers)
    exchange.mean(x)
    assert sent(exchange) == 2 * (workers - 1) * size
    exchange = Stacked(workers)
    exchange.mean(x, weights=torch.ones(workers))
    assert sent(exchange) == 2 * (workers - 1) * (size + 4)
    exchange = Stacked(workers)
    exchange.scores([0.0] * workers)
    assert sent(exchange) == workers * (workers - 1) * SCORE_BYTES
    exchange = Stacked(workers)
    exchange.from_workers(x, [0] * workers)
    assert sent(exchange) == (workers - 1) * size
    exchange = Stacked(workers)
    exchange.place(x[:1])
    exchange.fetch(0)
    exchange.push(0, x[:1])
    assert sent(exchange) == 2 * size
    exchange = Stacked(workers)
    exchange.send(x, [(rank + 1) % workers for rank in range(workers)])
    assert sent(exchange) == (workers * size if workers > 1 else 0)


def test_means_of_equal_rows_are_those_rows_and_weightless_rows_do_not_enter() -> None:
    row = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    for workers in (3, 7):
        assert torch.equal(Stacked(workers).mean(row.repeat(workers, 1)), row)
    x = torch.tensor([[1.0], [float("nan")], [5.0]])
    mean = Stacked(3).mean(x, weights=torch.tensor([3, 0, 1]))
    assert mean.item() == 2.0  # means 1 (n=3) and 5 (n=1)
    assert Stacked(3).mean(x, weights=torch.zeros(3)).item() == 0.0


def test_one_workers_view_shares_server_and_traffic_and_refuses_collectives() -> None:
    exchange = Stacked(3)
    exchange.place(torch.zeros(1, 2))
    view = exchange.only(2)
    view.push(0, torch.ones(1, 2))
    assert exchange.server.tolist() == [[1.0, 1.0]]
    assert exchange.traffic.transfers[-1].workers == (2, -1)
    with pytest.raises(UsageError, match="mean of 1 rows; 3 workers take part"):
        view.mean(torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "workers = 0"),
        ({"workers": 4, "groups": 3}, "groups = 3 with 4 workers.*use 1, 2, 4"),
        ({"workers": 2, "nodes": [0]}, r"nodes = \(0,\); there are 2 workers"),
        ({"workers": 2, "wire": "fp4"}, "wire = 'fp4'"),
    ],
)
def test_bad_exchanges_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Stacked(**settings)  # pyright: ignore[reportArgumentType]


def test_no_server_variable_before_a_rule_has_placed_one() -> None:
    with pytest.raises(UsageError, match="call the rule's init first"):
        Stacked(2).fetch(0)


def test_groups_are_balanced_with_few_moves() -> None:
    assert even_groups(6, 3) == (0, 0, 1, 1, 2, 2)
    assert rebalanced([0, 0, 1, 1]) == (0, 0, 1, 1)
    assert rebalanced([0, 0, 0, 2]) == (0, 0, 1, 2)
    assert rebalanced([1, 1, 1]) == (1, 1, 0)
    assert rebalanced([0, 0, 0, 1, 2]) == (0, 0, 1, 1, 2)
    assert rebalanced([]) == ()
