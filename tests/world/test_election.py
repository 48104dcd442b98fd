"""Whose state counts: properties of a pure function."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.world.contract import Position
from shoal.world.elastic.changes import changes_between
from shoal.world.elastic.election import elect

NAMES = st.text("abcdef", min_size=1, max_size=3)
POSITIONS = st.builds(
    Position,
    commits=st.integers(-1, 3),
    lineage=st.sampled_from(["x", "y", "z"]),
    offer=st.integers(-1, 2),
)
FLEETS = st.dictionaries(NAMES, POSITIONS, min_size=1, max_size=8)


@given(FLEETS)
def test_everybody_ends_with_one_state(fleet: dict[str, Position]) -> None:
    verdict = elect(fleet)
    held = {(fleet[name].commits, fleet[name].lineage) for name in verdict.primaries}
    assert len(held) == 1
    assert set(verdict.primaries) | set(verdict.sources) == set(fleet)
    assert not set(verdict.primaries) & set(verdict.sources)
    assert set(verdict.sources.values()) <= set(verdict.primaries)
    assert verdict.owner == min(verdict.primaries)


@given(FLEETS)
def test_no_commit_is_ever_lost(fleet: dict[str, Position]) -> None:
    verdict = elect(fleet)
    furthest = max(position.commits for position in fleet.values())
    assert fleet[verdict.owner].commits == furthest
    assert (verdict.starter is None) == (furthest >= 0)


@given(FLEETS, st.randoms())
def test_the_order_of_the_ballots_does_not_matter(fleet: dict[str, Position], random) -> None:
    shuffled = list(fleet.items())
    random.shuffle(shuffled)
    assert elect(dict(shuffled)) == elect(fleet)


@given(FLEETS)
def test_the_senders_share_the_work(fleet: dict[str, Position]) -> None:
    verdict = elect(fleet)
    loads = [list(verdict.sources.values()).count(name) for name in verdict.primaries]
    assert max(loads) - min(loads) <= 1


@given(FLEETS)
def test_a_blank_fleet_is_started_by_the_newest_checkpoint(fleet: dict[str, Position]) -> None:
    blank = {n: Position(commits=-1, lineage=p.lineage, offer=p.offer) for n, p in fleet.items()}
    starter = elect(blank).starter
    assert starter is not None
    best = max(position.offer for position in blank.values())
    assert starter == min(name for name, position in blank.items() if position.offer == best)


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
