"""Whose state counts after a quorum: a pure function of what all members know of each other.

Every member evaluates it on the same quorum and comes to the same verdict, so nothing is voted on.
Starting a run, resuming one and healing a worker are the same: somebody holds the state, everybody
else gets it from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.world.contract import Position
from shoal.world.elastic.ranking import rank_order


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the members of a quorum do next.

    Args:
        primaries: the members that hold the state that counts, in rank order; never empty.
        starter: the member that has to start the run (load a checkpoint or begin), or None.
        sources: for each member that needs the state, the member that sends it.
    """

    primaries: tuple[str, ...]
    starter: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """The member whose store the new process group meets at."""
        return self.primaries[0]


def elect(positions: Mapping[str, Position]) -> Verdict:
    """Choose whose state counts and who sends it to whom.

    The state of the members with the most commits counts. If those hold different states (they
    trained apart and came back), the state that more of them hold counts, and among equally frequent
    ones that of the first in rank. If all members are blank, the one that offers the newest
    checkpoint starts the run, the first in rank among equal offers.

    Args:
        positions: where each member stands, by name; at least one.

    Returns:
        The verdict. Members that need the state are spread evenly over those that hold it.
    """
    assert positions, "a quorum has at least one member"
    furthest = max(position.commits for position in positions.values())
    if furthest < 0:
        starter = min(positions, key=lambda name: (-positions[name].offer, rank_order(name)))
        primaries = (starter,)
    else:
        starter = None
        leading = {name: at.lineage for name, at in positions.items() if at.commits == furthest}
        frequency = Counter(leading.values())
        first = min(leading, key=lambda name: (-frequency[leading[name]], rank_order(name)))
        holders = (name for name, lineage in leading.items() if lineage == leading[first])
        primaries = tuple(sorted(holders, key=rank_order))
    lagging = sorted(set(positions) - set(primaries), key=rank_order)
    sources = {name: primaries[i % len(primaries)] for i, name in enumerate(lagging)}
    return Verdict(primaries=primaries, starter=starter, sources=sources)
