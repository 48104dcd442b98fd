"""Tables and words of ``shoal reproduce batch-size``."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.reproduce.batch_size.criteria import C9_ARGUED
from shoal.reproduce.batch_size.full import Spread
from shoal.reproduce.result import Cell, Table
from shoal.study.analysis import StudyAnalysis
from shoal.study.budgets import Unit

CHOICES = (
    "An evaluation grid of every step to 40 and then 5 % apart, one for all batch sizes: S is a crossing on "
    "that grid, so it is known to 5 % only, and below 20 steps not well at all.",
    "Feasible means not diverged by S, the most an early stop can know; the paper's trials must not diverge "
    "within the whole budget. A trial has diverged when its loss is not finite or ten times that of step 0.",
    "Five searches per point, each with its own scrambled Halton points; 40 feasible trials where the paper "
    "has 100. The paper shows one search per point.",
    "The split of the digits, 1,024 / 386 / 387, is ours. 386 validation samples are few: exchanging them for "
    "the test set changed S by a quarter to two fifths in a pilot.",
    C9_ARGUED,
)

CAVEATS = (
    "A small MLP on 1,797 images: sizes of effects say nothing about real networks. Nothing here tests label "
    "smoothing, data size beyond Fashion-MNIST, or Transformers.",
    "S is the best of many trials: its luck is part of it. What a later run takes is 1.3 to 1.5 times as "
    "much; `shoal study run` measures that with fresh seeds, this command does not.",
    "Steps are not seconds. A plateau in steps says only that more workers cannot help.",
)


def steps_table(analysis: StudyAnalysis, title: str) -> Table:
    """S at every batch and curve, for the hardest goal."""
    goal = analysis.main
    rates = {(o.curve, o.global_batch): o.effective_lr for o in goal.optima}
    batches = sorted({cell.global_batch for cell in goal.cells})
    columns = ["B"]
    for curve in goal.curves:
        name = curve.replace("_", " ")
        columns += [name, "range", "effective lr"]
    rows: list[tuple[Cell, ...]] = []
    for batch in batches:
        row: list[Cell] = [str(batch)]
        for curve in goal.curves:
            cell = next((c for c in goal.cells_of(curve) if c.global_batch == batch), None)
            if cell is None:
                row += [None, None, None]
                continue
            spread = f"{min(cell.steps)}-{max(cell.steps)}" if cell.steps else ""
            spread += f" >{max(cell.censored_at)}" if cell.censored_at else ""
            centre = None if cell.centre is None else round(cell.centre, 1)
            row += [centre, spread.strip(), rates.get((curve, batch))]
        rows.append(tuple(row))
    fits = "; ".join(_fit_words(analysis, curve) for curve in goal.curves)
    return Table(
        title=title,
        columns=tuple(columns),
        rows=tuple(rows),
        note=(
            f"Steps to {goal.goal.metric} < {goal.goal.value:g}, geometric mean of the searches. Range: over "
            f"the searches; > a search that had not reached it by then. {fits}."
        ),
    )


def _fit_words(analysis: StudyAnalysis, curve: str) -> str:
    fit = analysis.main.fits.get(curve)
    name = curve.replace("_", " ")
    if fit is None:
        return f"{name}: no fit"
    if not fit.is_usable:
        return f"{name}: {fit.refusal}"
    low, high = fit.b_crit.profile
    return (
        f"{name}: S_min {fit.s_min.value:.0f}, E_min {fit.e_min.value:.3g}, B_crit "
        f"{fit.b_crit.value:.1f} ({low:.1f}-{high:.1f})"
    )


def budgets_table(table: Mapping[tuple[Unit, int], Spread]) -> Table:
    """Best error under every budget, by batch."""
    batches = sorted({batch for spread in table.values() for batch in spread.means})
    rows = tuple(
        (
            f"{budget:,} {unit}",
            *(round(spread.means[b], 4) if b in spread.means else None for b in batches),
            round(spread.sd, 4),
        )
        for (unit, budget), spread in table.items()
    )
    return Table(
        title="Digits, heavy ball: best validation cross entropy a budget buys",
        columns=("budget", *(str(b) for b in batches), "sd"),
        rows=rows,
        note="Mean over the searches of the best of 40 trials; sd of one search, pooled over B.",
    )
