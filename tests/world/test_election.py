"""Whose state counts: properties of a pure function."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.world.contract import Position
from shoal.world.elastic.admission import admitted
from shoal.world.elastic.changes import changes_between
from shoal.world.elastic.election import elect
from shoal.world.elastic.quorum import Ballot, peers_of
from shoal.world.elastic.ranking import rank_order

NAMES = st.builds("{}{}".format, st.sampled_from("wx"), st.integers(0, 12))
POSITIONS = st.builds(
    Position,
    commits=st.integers(-1, 3),
    lineage=st.sampled_from(["x", "y", "z"]),
    offer=st.integers(-1, 2),
)
FLEETS = st.dictionaries(NAMES, POSITIONS, min_size=1, max_size=8)


@settings(deadline=None)
@given(FLEETS)
def test_everybody_ends_with_one_state(fleet: dict[str, Position]) -> None:
    verdict = elect(fleet)
    held = {(fleet[name].commits, fleet[name].lineage) for name in verdict.primaries}
    assert len(held) == 1
    assert set(verdict.primaries) | set(verdict.sources) == set(fleet)
    assert not set(verdict.primaries) & set(verdict.sources)
    assert set(verdict.sources.values()) <= set(verdict.primaries)
    assert verdict.owner == min(verdict.primaries, key=rank_order)


@settings(deadline=None)
@given(FLEETS)
def test_no_commit_is_ever_lost(fleet: dict[str, Position]) -> None:
    verdict = elect(fleet)
    furthest = max(position.commits for position in fleet.values())
    assert fleet[verdict.owner].commits == furthest
    assert (verdict.starter is None) == (furthest >= 0)


@settings(deadline=None)
@given(FLEETS, st.randoms())
def test_the_order_of_the_ballots_does_not_matter(fleet: dict[str, Position], random) -> None:
    shuffled = list(fleet.items())
    random.shuffle(shuffled)
    assert elect(dict(shuffled)) == elect(fleet)


@settings(deadline=None)
@given(FLEETS)
def test_the_senders_share_the_work(fleet: dict[str, Position]) -> None:
    verdict = elect(fleet)
    loads = [list(verdict.sources.values()).count(name) for name in verdict.primaries]
    assert max(loads) - min(loads) <= 1


@settings(deadline=None)
@given(FLEETS)
def test_a_blank_fleet_is_started_by_the_newest_checkpoint(fleet: dict[str, Position]) -> None:
    blank = {n: Position(commits=-1, lineage=p.lineage, offer=p.offer) for n, p in fleet.items()}
    starter = elect(blank).starter
    assert starter is not None
    best = max(position.offer for position in blank.values())
    offering = [name for name, position in blank.items() if position.offer == best]
    assert starter == min(offering, key=rank_order)


def test_the_majority_of_those_that_trained_apart_counts() -> None:
    fleet = {
        "a": Position(commits=7, lineage="x"),
        "b": Position(commits=7, lineage="y"),
        "c": Position(commits=7, lineage="y"),
        "d": Position(commits=6, lineage="x"),
    }
    verdict = elect(fleet)
    assert verdict.primaries == ("b", "c")
    assert verdict.sources == {"a": "b", "d": "c"}


def test_a_tie_goes_to_the_smallest_name() -> None:
    fleet = {"a": Position(commits=7, lineage="y"), "b": Position(commits=7, lineage="x")}
    assert elect(fleet).primaries == ("a",)


@settings(deadline=None)
@given(st.sets(NAMES), st.sets(NAMES, min_size=1), st.sets(NAMES))
def test_changes_lead_from_the_old_count_to_the_new(
    old: set[str], new: set[str], departed: set[str]
) -> None:
    changes = changes_between(sorted(old), sorted(new), departed)
    if not old:
        assert changes == []
        return
    workers = len(old)
    for change in changes:
        assert change.workers_before == workers
        workers = change.workers_after
        assert abs(workers - change.workers_before) == len(change.names)
    assert workers == len(new)
    by_kind = {change.kind: set(change.names) for change in changes}
    assert len(by_kind) == len(changes)
    assert by_kind.get("join", set()) == new - old
    assert by_kind.get("leave", set()) == (old - new) & departed
    assert by_kind.get("kill", set()) == old - new - departed


# ---- ranks, and who is admitted -------------------------------------------------------------------


def test_ranks_follow_numbers_and_workers_of_other_machines_come_last() -> None:
    names = ["x1", "w10", "x12", "w2", "w0", "worker", "x3"]
    assert sorted(names, key=rank_order) == ["w0", "w2", "w10", "worker", "x1", "x3", "x12"]


def ballot(
    name: str, *, last: str = "", torchft: str = "0.2.0", shrink_only: bool = False
) -> Ballot:
    return Ballot(
        name=name,
        position=Position(commits=5 if last else -1, lineage="x"),
        nonce=f"n-{name}",
        store="h:1",
        state="h:2",
        listener=3,
        standing=last,
        last=last,
        shrink_only=shrink_only,
        trained=True,
        versions={"torch": "2.13.0", "torchft": torchft},
    )


def everybody_admits(*ballots: Ballot) -> list[str]:
    """Whom all those that are admitted agree on; the others are left out or give up."""
    peers = {one.name: one for one in sorted(ballots, key=lambda one: rank_order(one.name))}
    verdicts: dict[str, list[str]] = {}
    for name, me in peers.items():
        try:
            verdicts[name] = list(admitted(me, peers))
        except UsageError:
            assert me.last == "", "only a newcomer gives up"
    agreed = {tuple(names) for names in verdicts.values()}
    assert len(agreed) == 1
    (names,) = agreed
    assert set(names) <= set(verdicts)
    return list(names)


def test_a_newcomer_of_other_versions_is_left_out_by_all_and_gives_up_itself() -> None:
    old = [ballot("w1", last="t"), ballot("w2", last="t")]
    # Its name comes first, and several of them are more than the fleet: neither counts.
    strangers = [ballot(name, torchft="0.1.9") for name in ("w0", "w3", "w4")]
    assert everybody_admits(*old, *strangers, ballot("x5")) == ["w1", "w2", "x5"]
    peers = {one.name: one for one in (*old, *strangers)}
    with pytest.raises(UsageError, match=r"'w0' runs .*0\.1\.9, worker 'w1' runs .*0\.2\.0"):
        admitted(strangers[0], peers)


def test_at_a_start_the_versions_of_most_are_the_fleets() -> None:
    assert everybody_admits(ballot("w0", torchft="0.1.9"), ballot("w1"), ballot("w2")) == [
        "w1",
        "w2",
    ]
    assert everybody_admits(ballot("w0"), ballot("w1", torchft="0.1.9")) == ["w0"]


def test_during_an_evaluation_only_its_members_count_whatever_strangers_say() -> None:
    at_it = [ballot("w0", last="t", shrink_only=True), ballot("w1", last="t", shrink_only=True)]
    stranger = ballot("w2", torchft="0.1.9", shrink_only=True)
    assert everybody_admits(*at_it, stranger, ballot("w3")) == ["w0", "w1"]


def test_a_member_that_cannot_be_read_is_passed_over() -> None:
    good = ballot("w10", last="t")
    participants = [
        SimpleNamespace(
            replica_id=name, data=data, store_address="h:1", address="h:2", shrink_only=False
        )
        for name, data in (
            ("w10", good.data()),
            ("w9", {**good.data(), "versions": "none"}),
            ("stranger", None),
            ("w2", good.data()),
        )
    ]
    peers = peers_of(SimpleNamespace(participants=participants))  # type: ignore[arg-type]
    assert list(peers) == ["w2", "w10"]
    assert peers["w10"] == good
