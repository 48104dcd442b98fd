"""A second way to every analysed number: from raw journals or parquet, by the words of the definitions.

Imports nothing of the package, and takes the slow and plain way wherever there are two: definitions step by
step, enumeration in place of formulas, another optimiser on another form of the likelihood.
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import optimize, stats

Place = tuple[str, int, int]


# -- raw rows --------------------------------------------------------------------------------------


def journal_rows(directory: Path) -> list[dict]:
    """All whole lines of all journals, non-finite numbers restored."""
    rows = []
    for path in sorted((directory / "rows").glob("*.jsonl")):
        for line in path.read_text().split("\n")[:-1]:
            row = json.loads(line)
            for where, word in row.pop("_nonfinite", {}).items():
                at = row
                *way, last = where.replace("~1", "\0").split("/")
                for step in way:
                    at = at[step.replace("\0", "/").replace("~0", "~")]
                at[last.replace("\0", "/").replace("~0", "~")] = float(word)
            rows.append(row)
    return rows


def parquet_rows(directory: Path) -> list[dict]:
    """The same out of the compacted tables, through duckdb alone."""
    import duckdb

    found: list[dict] = []
    numbers = [int(p.name.split(".")[1]) for p in (directory / "tables").glob("manifest.*.json")]
    manifest = json.loads((directory / "tables" / f"manifest.{max(numbers)}.json").read_text())
    for kind, names in manifest["parts"].items():
        files = [str(directory / "tables" / name) for name in names]
        if not files:
            continue
        cursor = duckdb.connect().execute(
            "SELECT * FROM read_parquet(?, union_by_name = true)", [files]
        )
        columns = [column[0] for column in cursor.description]
        for values in cursor.fetchall():
            row = {"kind": kind, **dict(zip(columns, values, strict=True))}
            if kind == "eval":
                kinds = row.pop("kinds") or {}
                row["bounds"] = {m: k for m, k in kinds.items() if k == ">="}
                for metric, word in kinds.items():
                    if word in ("nan", "inf", "-inf"):
                        row["metrics"][metric] = float(word)
            found.append(row)
    return found


class Raw:
    """The rows by the reading rule: one attempt per trial, the largest segment per step."""

    def __init__(self, rows: list[dict]) -> None:
        self.trials: dict[Place, dict[int, dict]] = {}
        self.ends: dict[Place, dict] = {}
        newest: dict[tuple[Place, int], tuple] = {}
        name_of: dict[str, Place] = {}
        for row in rows:
            if row["kind"] == "trial":
                place = (row["curve"], row["global_batch"], row["repeat"])
                name_of[row["search"]] = place
                order = (row["segment"], row["time"])
                key = (place, row["trial"])
                if key not in newest or order > newest[key]:
                    newest[key] = order
                    self.trials.setdefault(place, {})[row["trial"]] = dict(row, points={})
        for row in rows:
            place = name_of.get(row["search"]) if "search" in row else None
            if place is None:
                continue
            if row["kind"] == "search":
                old = self.ends.get(place)
                if old is None or (row["segment"], row["time"]) > (old["segment"], old["time"]):
                    self.ends[place] = row
            if row["kind"] not in ("eval", "outcome"):
                continue
            trial = self.trials[place][row["trial"]]
            if row["attempt"] != trial["attempt"]:
                continue
            if row["kind"] == "outcome":
                trial["outcome"] = row["outcome"]
                continue
            old = trial["points"].get(row["step"])
            if old is None or row["segment"] > old["segment"]:
                trial["points"][row["step"]] = row

    def searches(self) -> list[Place]:
        return sorted(place for place in self.trials if place[2] >= 0)


# -- steps to a result -----------------------------------------------------------------------------


def value_at(row: dict, metric: str) -> float:
    """A bound counts as infinitely bad."""
    if row.get("bounds", {}).get(metric) == ">=":
        return math.inf
    value = row["metrics"].get(metric, math.inf)
    return math.inf if math.isnan(value) else value


class Trial:
    def __init__(self, row: dict, metric: str, goal: float, end: float) -> None:
        self.unit, self.parameters = row["unit"], row["parameters"]
        self.steps = sorted(s for s in row["points"] if s <= end)
        self.values = {s: value_at(row["points"][s], metric) for s in self.steps}
        self.diverged = min(
            (s for s in self.steps if row["points"][s]["diverged"]), default=math.inf
        )
        self.crossing = min((s for s in self.steps if self.values[s] < goal), default=math.inf)
        self.points = row["points"]

    def infeasible(self, h: float) -> bool:
        return self.diverged <= h and self.diverged <= self.crossing


class Search:
    """One search by the definition."""

    def __init__(
        self, raw: Raw, place: Place, metric: str, goal: float, n: int, grid: list[int]
    ) -> None:
        self.place, self.n, self.goal, self.metric = place, n, goal, metric
        row = raw.ends.get(place)
        self.state = row["state"] if row else None
        self.end = row["end"] if row and row["state"] == "done" else grid[-1]
        self.grid = [g for g in grid if g <= self.end]
        rows = raw.trials[place]
        self.trials = [Trial(rows[i], metric, goal, self.grid[-1]) for i in range(max(rows) + 1)]
        self.solve()

    def solve(self) -> None:
        """S by trying every grid point in order."""
        self.steps = self.winner = None
        self.short = False
        for h in self.grid:
            inside = self.members(h)
            if inside is None:
                self.short = True
                break
            won = [i for i in inside if self._won(i, h)]
            if won:
                self.steps, self.winner = h, won[0]
                break

    def with_validation_set(self, times: np.ndarray, samples: list[dict]) -> int | None:
        """S if sample j of the validation set had come ``times[j]`` times."""
        values = [dict(trial.values) for trial in self.trials]
        for row in samples:
            packed = np.frombuffer(base64.b64decode(row["bits"]), dtype=np.uint8)
            wrong = np.unpackbits(packed)[: row["count"]]
            if row["step"] in values[row["trial"]]:
                values[row["trial"]][row["step"]] = float(times @ wrong) / times.sum()
        other = copy.copy(self)
        other.trials = []
        for trial, changed in zip(self.trials, values, strict=True):
            again = copy.copy(trial)
            again.values = changed
            again.crossing = min((s for s in changed if changed[s] < self.goal), default=math.inf)
            other.trials.append(again)
        other.solve()
        return other.steps

    def members(self, h: float) -> list[int] | None:
        feasible = 0
        for i, trial in enumerate(self.trials):
            feasible += not trial.infeasible(h)
            if feasible == self.n:
                return list(range(i + 1))
        return None

    def _won(self, i: int, h: float) -> bool:
        return self.trials[i].crossing <= h and self.trials[i].crossing < self.trials[i].diverged

    @property
    def previous(self) -> int:
        return max((g for g in self.grid if g < self.steps), default=0)

    def feasible_trials(self) -> list[int]:
        at = self.steps if self.steps is not None else self.grid[-1]
        return [i for i in self.members(at) or [] if not self.trials[i].infeasible(at)]

    def best(self, count: int) -> list[int]:
        crossed = [i for i in self.feasible_trials() if self._won(i, self.grid[-1])]
        return sorted(crossed, key=lambda i: (self.trials[i].crossing, i))[:count]

    def on_every_second(self) -> int | None:
        """S by the definition on the coarser grid, by the trials that are in P(S)."""
        return self._seen_at(self.grid[::2], lambda trial, h: trial.values.get(h, math.inf))

    def twice(self) -> int | None:
        """The first point that a trial of P(S) is better at, and at the next point too."""
        after = dict(itertools.pairwise(self.grid))

        def worse_of_two(trial: Trial, h: int) -> float:
            if h not in after or after[h] >= trial.diverged:
                return math.inf
            return max(trial.values.get(h, math.inf), trial.values.get(after[h], math.inf))

        return self._seen_at(self.grid, worse_of_two)

    def _seen_at(self, points: list[int], value: Callable[[Trial, int], float]) -> int | None:
        for h in points:
            for i in self.members(self.steps):
                trial = self.trials[i]
                met = any(
                    value(trial, g) < self.goal for g in points if g <= h and g < trial.diverged
                )
                if met and self._entry(i) <= h:
                    return h
        return None

    def _entry(self, i: int) -> int:
        return next(h for h in self.grid if i in (self.members(h) or []))


# -- over searches ---------------------------------------------------------------------------------


def by_cell(searches: list[Search]) -> dict[tuple[str, int], list[Search]]:
    found: dict[tuple[str, int], list[Search]] = {}
    for s in searches:
        found.setdefault(s.place[:2], []).append(s)
    return found


def interval(searches: list[Search], all_of_curve: list[list[Search]]) -> tuple | None:
    """The t-interval of the geometric mean; two repeats borrow the curve's spread."""
    counted = [s for s in searches if not s.short]
    if any(s.steps is None for s in counted) or len(counted) < 2:
        return None
    logs = np.log([s.steps for s in counted])
    # The grid alone: a uniform error over a step's width.
    least = np.mean([math.log(s.steps / max(s.previous, s.steps / 2)) for s in counted]) / 12**0.5
    if len(logs) > 2:
        scale = max(float(logs.std(ddof=1)), least) / math.sqrt(len(logs))
        low, high = stats.t.interval(0.95, len(logs) - 1, loc=logs.mean(), scale=scale)
        return math.exp(low), math.exp(high)
    squares, freedom = 0.0, 0
    for cell in all_of_curve:
        values = [math.log(s.steps) for s in cell if s.steps is not None and not s.short]
        if len(values) > 1:
            squares += sum((v - sum(values) / len(values)) ** 2 for v in values)
            freedom += len(values) - 1
    if freedom < 2:
        return None
    half = stats.t.ppf(0.975, freedom) * max(math.sqrt(squares / freedom), least) / len(logs) ** 0.5
    return math.exp(logs.mean() - half), math.exp(logs.mean() + half)


def fit_terms(searches: list[Search], left_out: set[Place]) -> list[tuple[int, float, float]]:
    terms = []
    for s in searches:
        if s.short or s.place in left_out:
            continue
        if s.steps is not None:
            terms.append((s.place[1], float(s.previous), float(s.steps)))
        else:
            terms.append((s.place[1], float(s.grid[-1]), math.inf))
    return terms


def normal(z: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def minus_log_likelihood(theta, terms, n: float) -> float:
    """theta = (S_min, E_min, sigma) themselves; plain differences of normal distribution functions."""
    s_min, e_min, sigma = theta
    if min(theta) <= 0:
        return 1e9
    total = 0.0
    for batch, above, upto in terms:
        mu = math.log(s_min + e_min * (1 / batch - 1 / n))
        high = 1.0 if math.isinf(upto) else normal((math.log(upto) - mu) / sigma)
        low = normal((math.log(above) - mu) / sigma) if above > 0 else 0.0
        total += math.log(max(high - low, 1e-300))
    return -total


def fit(terms: list[tuple[int, float, float]], n: float = math.inf) -> dict[str, float]:
    """The optimum by simplex, from several places; sigma at least a quarter of the median grid step."""
    widths = [math.log(u / a) for _, a, u in terms if a > 0 and not math.isinf(u)]
    least = max(0.25 * float(np.median(widths)), 1e-3)
    ends = [u for _, _, u in terms if not math.isinf(u)]
    best = None
    for b_crit in (2.0, 20.0, 200.0):
        start = np.log([min(ends), min(ends) * b_crit, 0.3])

        def cost(logs):
            s, e, sigma = np.exp(logs)
            return minus_log_likelihood((s, e, max(sigma, least)), terms, n)

        options = {"xatol": 1e-8, "fatol": 1e-10, "maxiter": 4000, "maxfev": 4000}
        found = optimize.minimize(cost, start, method="Nelder-Mead", options=options)
        if best is None or found.fun < best.fun:
            best = found
    s, e, sigma = np.exp(best.x)
    spread = {"sigma": max(sigma, least), "least": least}
    return {"s_min": s, "e_min": e, "b_crit": e / s, "cost": best.fun, **spread}


def profile_ends(terms, optimum: dict, n: float = math.inf) -> tuple[float, float]:
    """The profile interval of B_crit by scanning and bisecting."""
    freedom = len(terms) - 2
    t = stats.t.ppf(0.975, freedom)
    limit = len(terms) * math.log(1 + t * t / freedom)

    def fallen(b_crit: float) -> float:
        def cost(logs):
            s, sigma = np.exp(logs)
            return minus_log_likelihood((s, s * b_crit, max(sigma, optimum["least"])), terms, n)

        found = math.inf
        for k in (0.0, 0.1):
            level = optimum["s_min"] * (1 + optimum["b_crit"] * k) / (1 + b_crit * k)
            start = [math.log(level), math.log(optimum["sigma"])]
            options = {"xatol": 1e-7, "fatol": 1e-9}
            climbed = optimize.minimize(cost, start, method="Nelder-Mead", options=options)
            found = min(found, climbed.fun)
        return 2 * (found - optimum["cost"]) - limit

    ends = []
    for side in (-1, 1):
        inside, outside = 0.0, side * 0.1
        while fallen(optimum["b_crit"] * math.exp(outside)) < 0:
            inside, outside = outside, outside * 2
            if abs(outside) > 8:
                break
        for _ in range(16):
            middle = (inside + outside) / 2
            if fallen(optimum["b_crit"] * math.exp(middle)) < 0:
                inside = middle
            else:
                outside = middle
        ends.append(optimum["b_crit"] * math.exp((inside + outside) / 2))
    return ends[0], ends[1]


def raw_rules(steps: dict[int, float]) -> tuple[int | None, int | None]:
    """The largest B that is good together with all below; the smallest near the least."""
    batches = sorted(steps)
    good = [
        b
        for b in batches
        if all(
            c * steps[c] <= 1.2 * min(d * steps[d] for d in batches if d <= c)
            for c in batches
            if c <= b
        )
    ]
    perfect = max(good, default=None)
    near = [b for b in batches if steps[b] <= 1.1 * min(steps.values())]
    if len(batches) > 1:
        b1, b2 = batches[-2:]
        slope = (math.log2(steps[b2]) - math.log2(steps[b1])) / (math.log2(b2) - math.log2(b1))
        if slope < -0.2:
            return perfect, None
    return perfect, min(near, default=None)


def edge(searches: list[Search], axis: int) -> tuple[str, str | None, float]:
    """(place, side, median) over the repeats."""
    medians, counted = [], []
    for s in searches:
        best = s.best(5)
        if len(best) == 5:
            medians.append(sorted(s.trials[i].unit[axis] for i in best)[2])
            counted.append(s)
    if not medians:
        return "unknown", None, math.nan
    median = float(np.median(medians))
    if 0.1 <= median <= 0.9:
        return "inside", None, median
    side = "upper" if median > 0.9 else "lower"
    beyond = [
        t.diverged < math.inf
        for s in counted
        for t in s.trials
        if (t.unit[axis] > median if side == "upper" else t.unit[axis] < median)
    ]
    if len(beyond) >= 3 and sum(beyond) / len(beyond) > 0.5:
        return "stability limit", side, median
    return "boundary", side, median


def edge_alone(search: Search, axis: int) -> tuple[str, str | None, float]:
    return edge([search], axis)


def rate(parameters: dict) -> float:
    return parameters["lr"] / (1 - parameters.get("momentum", 0.0))


def best_five(searches: list[Search]) -> list[dict]:
    rows = [(s.trials[i].crossing, s.place[2], i, s) for s in searches for i in s.best(5)]
    ranked = sorted(rows, key=lambda row: row[:3])
    return [row[3].trials[row[2]].parameters for row in ranked[:5]]


def exponent(pairs: list[tuple[int, float]]) -> tuple[float, float, float]:
    """Slope of ln y over ln B with its 95 % interval, by solving the normal equations."""
    x = np.array([[1.0, math.log(b)] for b, _ in pairs])
    y = np.array([math.log(v) for _, v in pairs])
    solution, *_ = np.linalg.lstsq(x, y, rcond=None)
    residual = y - x @ solution
    freedom = len(y) - 2
    covariance = np.linalg.inv(x.T @ x) * (residual @ residual) / freedom
    half = stats.t.ppf(0.975, freedom) * math.sqrt(covariance[1, 1])
    return float(solution[1]), float(solution[1] - half), float(solution[1] + half)


def expected_best(search: Search, n: int) -> float:
    """The mean over all subsets of n feasible trials of the log of the best."""
    logs = []
    for i in search.feasible_trials():
        t = search.trials[i]
        crossed = t.crossing < t.diverged and t.crossing <= search.grid[-1]
        logs.append(math.log(max(t.crossing, 1) if crossed else search.grid[-1] + 1))
    bests = [min(subset) for subset in itertools.combinations(logs, n)]
    return math.fsum(bests) / len(bests)


def confirmed(raw: Raw, curve: str, batch: int, metric: str, goal: float) -> list[float]:
    steps = []
    for row in raw.trials[(curve, batch, -1)].values():
        trial = Trial(row, metric, goal, math.inf)
        steps.append(trial.crossing if trial.crossing < trial.diverged else math.inf)
    return steps


def best_error(search: Search, n: int, budget: float, per_step: int) -> float | None:
    """The least metric of the first n trials that never diverged, with step times per_step in budget."""
    whole = [t for t in search.trials if t.diverged == math.inf][:n]
    values = [
        t.values[s]
        for t in whole
        for s in t.steps
        if s > 0 and s * per_step <= budget and math.isfinite(t.values[s])
    ]
    return min(values, default=None)
