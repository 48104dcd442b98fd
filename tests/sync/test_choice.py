"""Who leads, who is trusted, and when the alarm rings."""

from math import inf, isnan, nan

import pytest
import torch

from shoal.errors import DivergedError, UsageError
from shoal.sync import choice
from shoal.sync.windows import noted, window_scores


@pytest.mark.parametrize(
    ("scores", "leader"),
    [
        ([nan, 0.5, 0.4, 0.6], 2),
        ([0.4, 0.4, 0.5], 0),
        ([inf, 0.9], 1),
        ([-inf, 0.9], 1),
        ([0.1], 0),
    ],
)
def test_the_lowest_finite_score_leads_and_of_equals_the_lowest_rank(
    scores: list[float], leader: int
) -> None:
    assert choice.choose(scores, step=64) == leader


def test_without_a_finite_score_the_error_names_the_step() -> None:
    with pytest.raises(DivergedError, match="at step 192"):
        choice.choose([nan, inf], step=192)


def test_a_window_with_four_of_ten_losses_averages_the_four() -> None:
    windows, filled = torch.zeros((1, 10), dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    assert isnan(window_scores(windows, filled)[0])
    for loss in (2.0, 2.5, 2.25, 2.25):
        windows, filled = noted(windows, filled, torch.tensor([loss]), None)
    assert window_scores(windows, filled) == [2.25]


def test_a_full_window_holds_the_last_losses_only() -> None:
    windows, filled = torch.zeros((1, 3), dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    for loss in range(8):
        windows, filled = noted(windows, filled, torch.tensor([float(loss)]), None)
    assert window_scores(windows, filled) == [6.0]


def test_a_row_without_samples_writes_nothing_and_one_bad_loss_bars_its_row() -> None:
    windows, filled = torch.zeros((3, 4), dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    windows, filled = noted(windows, filled, torch.tensor([1.0, 2.0, 3.0]), None)
    windows, filled = noted(windows, filled, torch.tensor([3.0, nan, nan]), torch.tensor([8, 0, 8]))
    first, second, third = window_scores(windows, filled)
    assert (first, second) == (2.0, 2.0)
    assert isnan(third)
    assert filled.tolist() == [2, 1, 2]


def test_equal_losses_in_any_order_tie() -> None:
    losses = [0.1, 0.7, 1e-9, 0.3, 1e9]
    assert choice.window_score(losses) == choice.window_score(losses[::-1])


def test_groups_follow_their_best_and_a_group_that_is_ill_follows_the_best_of_all() -> None:
    assert choice.choose_in_groups([0.3, 0.2, 0.5, 0.4], [0, 0, 1, 1], step=1) == (1, 1, 3, 3)
    assert choice.choose_in_groups([0.3, 0.2, nan, inf], [0, 0, 1, 1], step=1) == (1, 1, 1, 1)
    with pytest.raises(DivergedError, match="at step 9"):
        choice.choose_in_groups([nan] * 4, [0, 0, 1, 1], step=9)


def test_margin_is_to_the_second_best_that_is_finite() -> None:
    assert choice.lead_margin([0.5, nan, 0.25], 2) == 0.25
    assert choice.lead_margin([nan, 0.25], 1) == inf


@pytest.mark.parametrize(
    ("leader", "own", "accepted"),
    [
        (0.2, 0.4, True),
        (0.4, 0.4, True),
        (0.5, 0.4, False),
        (nan, 0.4, False),
        (inf, nan, False),
        (0.5, nan, True),
    ],
)
def test_a_follower_accepts_by_its_own_scores(leader: float, own: float, accepted: bool) -> None:
    assert choice.accepts(leader, own) is accepted


def test_the_alarm_rings_above_four_fifths_of_ten_rounds_or_more() -> None:
    def reign(leaders: list[int]) -> choice.Reign:
        record = choice.Reign(led=choice.no_reign(), leader=-1, switches=0)
        for leader in leaders:
            record = record.after(leader)
        return record

    assert not reign([0] * 9).is_locked_in
    assert reign([0] * 10).is_locked_in
    assert not reign([0] * 8 + [1, 2]).is_locked_in
    alternating = reign([0, 0, 5, 0, 7, 7])
    assert (alternating.rounds, alternating.switches, alternating.share) == (6, 3, 0.5)
    assert alternating.led.tolist() == [[0, 3], [5, 1], [7, 2]]


def test_the_probe_is_the_default_on_fixed_shards_only() -> None:
    assert choice.resolve_score("auto", shards="fixed") == "probe"
    assert choice.resolve_score("auto", shards="drawn") == "own"
    assert choice.resolve_score("own", shards="fixed") == "own"


def test_a_probe_set_must_not_touch_the_test_set() -> None:
    choice.check_probe(range(100), range(100, 200))
    with pytest.raises(
        UsageError, match="2 of its 100 samples are in the test set, sample 98 first"
    ):
        choice.check_probe(range(100), range(98, 200))
    with pytest.raises(UsageError, match="0 samples"):
        choice.check_probe([], range(3))
