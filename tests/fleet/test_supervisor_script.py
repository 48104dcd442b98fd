"""Scripts of events: parsed strictly, with errors that name the event and the field."""

import doctest

import pytest

from shoal.errors import UsageError
from shoal.fleet.supervisor.script import Event, check, counts, load, parse

DEMO = """
[[event]]
at_samples = 55000
join = 2

[[event]]
at_step = 40
kill = 1
name = "w0"

[[event]]
at_step = 60
leave = 1

[[event]]
at_step = 80
hang = 1

[[event]]
at_step = 90
kill_coordinator = true
"""


def test_a_script_is_read_in_the_order_of_the_file():
    assert parse(DEMO) == (
        Event(action="join", count=2, at_samples=55000),
        Event(action="kill", at_step=40, name="w0"),
        Event(action="leave", at_step=60),
        Event(action="hang", at_step=80),
        Event(action="kill_coordinator", at_step=90),
    )
    assert parse("") == ()


def test_an_event_is_due_from_its_mark_on():
    event = Event(action="join", at_samples=100)
    assert not event.is_due(step=1000, samples=99)
    assert event.is_due(step=0, samples=100)
    assert Event(action="join", at_step=0).is_due(step=0, samples=0)


def test_workers_follow_the_events():
    assert counts(parse(DEMO), 2) == [2, 4, 3, 2, 2, 2]
    assert counts((), 3) == [3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[event]\nat_step = 1", r"S: not TOML: .*line 1"),
        ("[[event]]\nat_step = 1\njoin = 1\n[[event]]\nat_step = x", r"S: not TOML: .*line 5"),
        ("workers = 2", r"S: key 'workers'; a script consists of \[\[event\]\] tables only"),
        ("event = 3", r"S: key 'event' is no array of tables"),
        ("[[event]]\nat_step = 1\njoins = 1", r"S: event 1: field 'joins'; known are at_step"),
        ("[[event]]\nat_step = 1", r"S: event 1: actions none; give exactly one of join, leave"),
        (
            "[[event]]\nat_step = 1\njoin = 1\nkill = 1",
            r"S: event 1: actions \['join', 'kill'\]; give exactly one",
        ),
        ("[[event]]\njoin = 1", r"S: event 1: exactly one of at_step and at_samples"),
        ("[[event]]\nat_step = 1\nat_samples = 1\njoin = 1", r"S: event 1: exactly one of"),
        ("[[event]]\nat_step = 1.5\njoin = 1", r"S: event 1: at_step = 1.5; it is a whole number"),
        ("[[event]]\nat_step = -1\njoin = 1", r"S: event 1: mark = -1"),
        ("[[event]]\nat_step = 1\njoin = 0", r"S: event 1: join = 0; it is a number of workers"),
        ("[[event]]\nat_step = 1\njoin = true", r"S: event 1: join = True; it is a whole number"),
        ("[[event]]\nat_step = 1\njoin = 1\nname = 'w0'", r"S: event 1: name = 'w0'; it goes with"),
        ("[[event]]\nat_step = 1\nkill = 1\nname = 0", r"S: event 1: name = 0; it is a worker's"),
        (
            "[[event]]\nat_step = 1\nkill_coordinator = false",
            r"S: event 1: kill_coordinator = False; it can only be true",
        ),
    ],
)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(UsageError, match=message):
        parse(text, "S")


def test_a_script_that_cannot_be_read_is_a_mistake_of_the_user(tmp_path):
    with pytest.raises(UsageError, match=r"--script .*none.*: cannot be read"):
        load(tmp_path / "none.toml")


def test_a_script_may_not_leave_the_range_of_workers():
    check(parse("[[event]]\nat_step = 1\njoin = 2\n[[event]]\nat_step = 2\nkill = 2"), 1, 1, 3)
    with pytest.raises(UsageError, match=r"event 2 \(kill = 3\) makes 0 workers; .* 1 to 3"):
        check(parse("[[event]]\nat_step = 1\njoin = 2\n[[event]]\nat_step = 2\nkill = 3"), 1, 1, 3)
    with pytest.raises(UsageError, match=r"event 1 \(join = 3\) makes 4 workers"):
        check(parse("[[event]]\nat_step = 1\njoin = 3"), 1, 1, 3)


def test_the_examples_hold():
    from shoal.fleet.supervisor import environment, script, settings
    from shoal.world.elastic import ranking

    for module in (script, settings, environment, ranking):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0
