"""The peers' formulas written out worker by worker in plain Python floats, to compare traces with.

The task is that of ``shoal.testing.sync.integer_trace``. Every function returns the weights of all workers
after each step, row after row.
"""

from __future__ import annotations

from collections.abc import Callable

Vector = list[float]
Trace = list[list[float]]


def gradient(x: Vector, rank: int, step: int) -> Vector:
    return [rank + 1.0, (step + rank) % 3 - 1.0, x[2] - rank]


def loss(x: Vector, rank: int, step: int, workers: int) -> float:
    return abs(x[2] - rank) + (step + rank) % workers


def stepped(x: Vector, rank: int, step: int) -> Vector:
    return [a - b for a, b in zip(x, gradient(x, rank, step), strict=True)]


def mean(vectors: list[Vector]) -> Vector:
    return [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def blend(a: Vector, b: Vector, fraction: float) -> Vector:
    """a + fraction (b - a)."""
    return [x + (y - x) * fraction for x, y in zip(a, b, strict=True)]


def start(workers: int) -> list[Vector]:
    return [[0.0, 0.0, 0.0] for _ in range(workers)]


def flat(xs: list[Vector]) -> Vector:
    return [number for x in xs for number in x]


def simple(
    workers: int, steps: int, exchange: Callable[[int, list[Vector], list[float]], list[Vector]]
) -> Trace:
    """Plain steps, each followed by ``exchange(step from 1, weights, losses before the step)``."""
    xs, trace = start(workers), []
    for step in range(steps):
        losses = [loss(x, rank, step, workers) for rank, x in enumerate(xs)]
        xs = [stepped(x, rank, step) for rank, x in enumerate(xs)]
        xs = exchange(step + 1, xs, losses)
        trace.append(flat(xs))
    return trace


def all_reduce(workers: int, steps: int) -> Trace:
    xs, trace = start(workers), []
    for step in range(steps):
        shared = mean([gradient(x, rank, step) for rank, x in enumerate(xs)])
        xs = [[a - b for a, b in zip(x, shared, strict=True)] for x in xs]
        trace.append(flat(xs))
    return trace


def local_sgd(workers: int, steps: int, *, period: int) -> Trace:
    def exchange(step: int, xs: list[Vector], _: list[float]) -> list[Vector]:
        return [mean(xs)] * workers if step % period == 0 else xs

    return simple(workers, steps, exchange)


def leader(workers: int, steps: int, *, period: int, pull: float, window: int = 10) -> Trace:
    history: list[list[float]] = [[] for _ in range(workers)]

    def exchange(step: int, xs: list[Vector], losses: list[float]) -> list[Vector]:
        for past, value in zip(history, losses, strict=True):
            past.append(value)
        if step % period:
            return xs
        scores = [sum(past[-window:]) / len(past[-window:]) for past in history]
        best = scores.index(min(scores))
        return [x if rank == best else blend(x, xs[best], pull) for rank, x in enumerate(xs)]

    return simple(workers, steps, exchange)


def easgd(
    workers: int, steps: int, *, period: int, alpha: float, beta: float, synchronous: bool
) -> Trace:
    xs, trace = start(workers), []
    center = mean(xs)
    for step in range(steps):
        before = xs
        xs = [stepped(x, rank, step) for rank, x in enumerate(xs)]
        if (step + 1) % period == 0 and synchronous:
            xs = [
                [c - (b - m) * alpha for c, b, m in zip(x, old, center, strict=True)]
                for x, old in zip(xs, before, strict=True)
            ]
            center = blend(center, mean(before), beta)
        elif (step + 1) % period == 0:
            moved = []
            for x, old in zip(xs, before, strict=True):
                d = [(b - m) * alpha for b, m in zip(old, center, strict=True)]
                center = [m + e for m, e in zip(center, d, strict=True)]
                moved.append([c - e for c, e in zip(x, d, strict=True)])
            xs = moved
        trace.append(flat(xs))
    return trace


def eamsgd(workers: int, steps: int, *, period: int, alpha: float, momentum: float) -> Trace:
    xs, trace = start(workers), []
    center, velocities = mean(xs), start(workers)
    for step in range(steps):
        moved = []
        for rank, x in enumerate(xs):
            v = velocities[rank]
            ahead = [a + momentum * b for a, b in zip(x, v, strict=True)]
            g = gradient(ahead, rank, step)
            v = [momentum * b - c for b, c in zip(v, g, strict=True)]
            velocities[rank] = v
            new = [a + b for a, b in zip(x, v, strict=True)]
            if (step + 1) % period == 0:
                d = [(a - m) * alpha for a, m in zip(x, center, strict=True)]
                center = [m + e for m, e in zip(center, d, strict=True)]
                new = [a - e for a, e in zip(new, d, strict=True)]
            moved.append(new)
        xs = moved
        trace.append(flat(xs))
    return trace


def downpour(workers: int, steps: int, *, period: int) -> Trace:
    server = [0.0, 0.0, 0.0]
    fetched = start(workers)

    def exchange(step: int, xs: list[Vector], _: list[float]) -> list[Vector]:
        nonlocal server
        if step % period:
            return xs
        for rank, x in enumerate(xs):
            server = [s + a - f for s, a, f in zip(server, x, fetched[rank], strict=True)]
            fetched[rank] = server
        return list(fetched)

    return simple(workers, steps, exchange)


def slowmo(workers: int, steps: int, *, period: int, beta: float, alpha: float) -> Trace:
    previous, slow = [0.0] * 3, [0.0] * 3

    def exchange(step: int, xs: list[Vector], _: list[float]) -> list[Vector]:
        nonlocal previous, slow
        if step % period:
            return xs
        shared = mean(xs)
        slow = [beta * u + p - m for u, p, m in zip(slow, previous, shared, strict=True)]
        previous = [p - alpha * u for p, u in zip(previous, slow, strict=True)]
        return [previous] * workers

    return simple(workers, steps, exchange)


def bmuf(
    workers: int, steps: int, *, period: int, zeta: float, eta: float, nesterov: bool
) -> Trace:
    weights, begin, change = [0.0] * 3, [0.0] * 3, [0.0] * 3

    def exchange(step: int, xs: list[Vector], _: list[float]) -> list[Vector]:
        nonlocal weights, begin, change
        if step % period:
            return xs
        moved = [m - s for m, s in zip(mean(xs), begin, strict=True)]
        change = [zeta * c + eta * g for c, g in zip(change, moved, strict=True)]
        weights = [w + c for w, c in zip(weights, change, strict=True)]
        ahead = zeta if nesterov else 0.0
        begin = [w + ahead * c for w, c in zip(weights, change, strict=True)]
        return [begin] * workers

    return simple(workers, steps, exchange)


def lookahead(workers: int, steps: int, *, period: int, step_size: float) -> Trace:
    slow = start(workers)

    def exchange(step: int, xs: list[Vector], _: list[float]) -> list[Vector]:
        nonlocal slow
        if step % period:
            return xs
        slow = [blend(s, x, step_size) for s, x in zip(slow, xs, strict=True)]
        return slow

    return simple(workers, steps, exchange)


def sgp(workers: int, steps: int) -> Trace:
    powers = (workers - 1).bit_length()

    def exchange(step: int, xs: list[Vector], _: list[float]) -> list[Vector]:
        if not powers:
            return xs
        offset = 2 ** ((step - 1) % powers)
        return [
            [(a + b) / 2 for a, b in zip(x, xs[(rank - offset) % workers], strict=True)]
            for rank, x in enumerate(xs)
        ]

    return simple(workers, steps, exchange)


def diloco(
    workers: int,
    steps: int,
    *,
    period: int,
    lr: float,
    momentum: float,
    nesterov: bool,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
) -> Trace:
    """One number per fragment if there are three; else all of them together."""
    center, buffer = [0.0] * 3, [0.0] * 3
    arriving: list[tuple[int, int]] = []
    every, done = period // fragments, 0

    def exchange(step: int, xs: list[Vector], _: list[float]) -> list[Vector]:
        nonlocal done
        xs = [list(x) for x in xs]
        if step % every == 0:
            shared = mean(xs)
            for i in range(3):
                if fragments == 1 or i == done % fragments:
                    moved = center[i] - shared[i]
                    buffer[i] = momentum * buffer[i] + moved
                    ahead = moved + momentum * buffer[i] if nesterov else buffer[i]
                    center[i] -= lr * ahead
                    arriving.append((step + delay, i))
            done += 1
        for when, i in arriving:
            if when == step:
                for x in xs:
                    x[i] = center[i] + mixing * (x[i] - center[i])
        return xs

    return simple(workers, steps, exchange)
