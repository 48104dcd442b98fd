"""Golden numbers of the noisy quadratic.

Source: section 1.5 of the notes on arXiv 1904.12043, printed there to two or three decimals.
"""

import pytest

from shoal.reproduce.claims import Verdict
from shoal.reproduce.dynamic import tier1
from shoal.reproduce.dynamic.criteria import judge_tier1


@pytest.fixture(scope="module")
def responses() -> tier1.Responses:
    return tier1.run_tier1()


def test_every_cell_of_the_reference_table_is_met_to_its_printed_digits(
    responses: tier1.Responses,
) -> None:
    assert len(tier1.REFERENCE) == 29
    for cell, (peak, excess) in tier1.REFERENCE.items():
        digits = 1 if cell == ((16, 1), "T=128") else 2
        # One and a half units of the last digit printed: both sides are rounded.
        assert responses[cell].peak == pytest.approx(peak, abs=1.5 * 10**-digits), cell
        assert responses[cell].excess == pytest.approx(excess, abs=6e-3), cell


def test_criteria_hold(responses: tier1.Responses) -> None:
    claims = judge_tier1(tier1.peaks(responses))
    assert [claim.verdict for claim in claims] == [Verdict.SHOWN] * 6


def test_first_update_at_once_has_the_variance_of_the_formula(responses: tier1.Responses) -> None:
    for k in (2, 4, 8, 16):
        formula = k**2 * 0.81 + k * 0.19
        measured = responses[(1, k), "linear, at once"].update_variance
        assert measured == pytest.approx(formula, rel=0.02)


def test_table_has_a_row_for_each_cell(responses: tier1.Responses) -> None:
    table = tier1.table(responses)
    assert len(table.rows) == len(tier1.REFERENCE)
    assert table.rows[18][:4] == ("1 -> 16", "linear, at once", 7.993, 7.99)
