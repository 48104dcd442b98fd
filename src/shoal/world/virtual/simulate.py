"""One simulated run, by whichever loop its rule and trigger need."""

from __future__ import annotations

from shoal.errors import UsageError
from shoal.sync.independent import Independent
from shoal.world.virtual.background import BackgroundRun
from shoal.world.virtual.crew import Crew
from shoal.world.virtual.record import SimulatedRun
from shoal.world.virtual.rounds import Rounds
from shoal.world.virtual.server import ServerRun, has_server
from shoal.world.virtual.setup import Setup


def simulate(setup: Setup) -> SimulatedRun:
    """Train virtual workers on a virtual clock.

    Everything is a function of ``setup``: the same setup gives the same run, bit for bit on one machine.
    The wall clock is never read.

    Args:
        setup: what is simulated.

    Returns:
        What happened. All times in it are virtual; label whatever is made of it as simulated.

    Raises:
        UsageError: a rule that cannot have this trigger, or a model that cannot be laid out in rows.
    """
    return run_crew(Crew(setup))


def run_crew(crew: Crew) -> SimulatedRun:
    """The same for a fleet that has been made already; it can be looked at afterwards.

    Args:
        crew: fresh.

    Returns:
        As :func:`simulate`.

    Raises:
        UsageError: as :func:`simulate`.
    """
    setup = crew.setup
    rule, trigger = setup.rule, setup.trigger
    if has_server(crew):
        if trigger != "fixed":
            raise UsageError(
                f"trigger = {trigger!r} with the sync rule {rule.name}, whose workers visit a server alone and "
                "never meet; use trigger = 'fixed'"
            )
        return ServerRun(crew).run()
    if trigger == "background" and not isinstance(rule, Independent):
        return BackgroundRun(crew).run()
    return Rounds(crew).run()
