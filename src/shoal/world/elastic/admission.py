"""Who of a quorum takes part: a pure function that all members evaluate on the same ballots.

One bad peer must not end the others, so nobody that is in the fleet raises here: those that do not fit
are left out, by everybody alike. Only a newcomer that does not fit says so, and ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shoal.errors import UsageError
from shoal.world.elastic.quorum import Ballot
from shoal.world.elastic.ranking import rank_order


def admitted(me: Ballot, peers: Mapping[str, Ballot]) -> dict[str, Ballot]:
    """The members that count.

    Left out are those of other versions than the fleet's and, during an evaluation, those that do not
    share a last membership with it. The fleet's versions are those of most members that have had a
    membership before, or of most members if there is none of these; among equally frequent ones those
    of the first in rank.

    Args:
        me: this worker's own ballot.
        peers: all ballots that could be read, in rank order.

    Returns:
        The members in rank order; this worker may not be among them.

    Raises:
        UsageError: this worker has had no membership yet, and runs other versions than the fleet; the
            text names a worker of the fleet and both versions.
    """
    standard = _standard(peers)
    if standard is not None and me.last == "" and dict(me.versions) != dict(standard.versions):
        raise UsageError(
            f"worker {me.name!r} runs {_listed(me.versions)}, worker {standard.name!r} runs "
            f"{_listed(standard.versions)}; all workers of a fleet run the same versions; install "
            "the same constraints on both machines"
        )
    fitting = {
        name: peer
        for name, peer in peers.items()
        if standard is not None and dict(peer.versions) == dict(standard.versions)
    }
    evaluating = {peer.last for peer in fitting.values() if peer.shrink_only}
    if not evaluating:
        return fitting
    return {name: peer for name, peer in fitting.items() if peer.last in evaluating}


def _standard(peers: Mapping[str, Ballot]) -> Ballot | None:
    """A member that runs the fleet's versions, the first in rank; None for an empty quorum."""
    voters = [peer for peer in peers.values() if peer.last] or list(peers.values())
    frequency = Counter(_listed(peer.versions) for peer in voters)
    return min(
        voters,
        key=lambda peer: (-frequency[_listed(peer.versions)], rank_order(peer.name)),
        default=None,
    )


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
