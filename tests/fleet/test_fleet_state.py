"""What a joining worker receives, a checkpoint holds, and a copy does not share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_fleet import (
    OPTIMIZERS,
    Run,
    classes,
    classifier,
    digest,
    same_bits,
    train,
    training_state,
)

import shoal
from shoal import VirtualEvent, VirtualWorld
from shoal.testing.threads import Ended, ThreadScript, run_workers

RULES = [
    shoal.scaling.Unscaled(),
    shoal.scaling.Linear(reference_batch=8, momentum_correction=False),
    shoal.scaling.Dynamic(reference_batch=8),
    shoal.scaling.AdaScale(reference_batch=8),
    shoal.scaling.NoiseMatched(reference_batch=8),
    shoal.scaling.Legw(reference_batch=8, warmup_epochs=1),
]


class Meter:
    """A user's object with state."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "best": 0.0,
            "seen": torch.zeros(2),
            "names": ["a"],
            "n": None,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def new(rule: Any, *, seed: int, kind: str = "heavy_ball", **settings: Any) -> Run:
    model = classifier(norm=True, seed=seed)
    optimizer = OPTIMIZERS[kind](model.parameters())
    fleet = shoal.init(model, optimizer, scaling=rule, **settings)
    return Run(model, optimizer, fleet)


def go_on(run: Run, until: int) -> None:
    """Train to the step ``until`` without saying goodbye."""
    for _ in run.fleet.epochs(4):
        for x, y in run.fleet.batches(classes(60), local_batch=8, micro_batch=4):
            run.fleet.backward(F.cross_entropy(run.model(x), y))
            if run.fleet.step():
                run.lrs.append(run.fleet.lr)
            if run.fleet.step_count >= until:
                break


@pytest.mark.parametrize(
    ("rule", "kind"),
    [(rule, kind) for rule in RULES for kind in ("heavy_ball", "adamw") if kind in rule.optimizers],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_restored_replica_goes_on_bit_for_bit(rule: Any, kind: str) -> None:
    """In the middle of a ramp, of an epoch and of momentum; registered objects come along."""

    def script() -> VirtualWorld:
        return VirtualWorld(1, [VirtualEvent(kind="join", workers=2, at_step=5)])

    whole = new(rule, seed=0, kind=kind, world=script())
    go_on(whole, 20)
    first = new(rule, seed=0, kind=kind, world=script())
    meter = Meter()
    meter.values["best"], meter.values["seen"] = 0.7, torch.tensor([1.0, 2.0])
    first.fleet.register("meter", meter)
    go_on(first, 7)
    tree = first.fleet._replica.snapshot()
    second = new(rule, seed=9, kind=kind, world=VirtualWorld(3))
    other = Meter()
    second.fleet.register("meter", other)
    second.fleet._replica.restore(tree)
    assert digest(second.fleet._replica.snapshot()) == digest(first.fleet._replica.snapshot())
    assert other.values["best"] == 0.7 and torch.equal(
        other.values["seen"], torch.tensor([1.0, 2.0])
    )
    second.fleet._world._started = True  # type: ignore[attr-defined]
    go_on(second, 20)
    assert first.lrs + second.lrs == whole.lrs
    assert same_bits(second.model, whole.model)
    for run in (whole, first, second):
        run.fleet.close()


def test_a_snapshot_is_a_copy() -> None:
    run = new(shoal.scaling.Dynamic(reference_batch=8), seed=0)
    run.fleet.register("meter", Meter())
    trees: list[tuple[Any, str]] = []
    for _ in run.fleet.epochs(1):
        for x, y in run.fleet.batches(classes(60), local_batch=8):
            run.fleet.backward(F.cross_entropy(run.model(x), y))
            run.fleet.step()
            tree = run.fleet._replica.snapshot()
            trees.append((tree, digest(tree)))
    assert len({before for _, before in trees}) == len(trees) == 8
    assert all(digest(tree) == before for tree, before in trees)
    run.fleet.close()


def test_registering_after_the_state_has_come() -> None:
    """A joiner that is healed first and registers later gets its object's state then."""
    run = new(shoal.scaling.Unscaled(), seed=0)
    meter = Meter()
    meter.values["best"] = 0.9
    run.fleet.register("meter", meter)
    tree = run.fleet._replica.snapshot()
    late = new(shoal.scaling.Unscaled(), seed=1)
    late.fleet._replica.restore(tree)
    assert late.fleet._replica.snapshot()["extra"]["meter"]["best"] == 0.9  # type: ignore[index]
    other = Meter()
    late.fleet.register("meter", other)
    assert other.values["best"] == 0.9
    run.fleet.close()
    late.fleet.close()


def test_register_refuses_what_it_cannot_carry() -> None:
    run = new(shoal.scaling.Unscaled(), seed=0)
    run.fleet.register("meter", Meter())
    with pytest.raises(shoal.UsageError, match="name is taken"):
        run.fleet.register("meter", Meter())
    with pytest.raises(shoal.UsageError, match="no state_dict"):
        run.fleet.register("other", object())  # type: ignore[arg-type]
    odd = Meter()
    odd.values = {"deep": [{"set": {1}}]}
    with pytest.raises(shoal.UsageError, match=r"deep\[0\]\.set = set"):
        run.fleet.register("odd", odd)
    assert "odd" not in run.fleet._replica.snapshot()["extra"]  # type: ignore[operator]
    run.fleet.close()


def hashes(run: Run) -> str:
    return digest(training_state(run.fleet))


@pytest.mark.parametrize("script", [
    ThreadScript(joins={2: 4}),
    ThreadScript(joins={1: 2, 2: 9}),
    ThreadScript(failures={3: {1}, 5: {0, 2}, 8: {0, 1, 2}}),
    ThreadScript(kills={1: 6}),
    ThreadScript(leaves={0: 5}),
    ThreadScript(joins={2: 3}, kills={0: 8}, failures={6: {2}, 7: {1}}),
])  # fmt: skip
@pytest.mark.parametrize("rule", [RULES[2], RULES[3]], ids=["dynamic", "adascale"])
def test_all_workers_hold_equal_hashes(script: ThreadScript, rule: Any) -> None:
    """Weights, momentum, statistics, scaling state, cursor and registered objects, at the end."""

    def worker(world: Any) -> tuple[str, int]:
        meter = Meter()
        model = classifier(norm=True, seed=world.number)
        optimizer = OPTIMIZERS["nesterov"](model.parameters())
        fleet = shoal.init(model, optimizer, world=world, scaling=rule)
        fleet.register("meter", meter)
        for _ in fleet.epochs(2):
            for x, y in fleet.batches(classes(72), local_batch=4, micro_batch=2):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
            fleet.evaluate(classes(6), lambda m, b: {"n": (0, 1)})
            meter.values["seen"] = meter.values["seen"] + 1
        run = Run(model, optimizer, fleet)
        result = hashes(run), fleet.samples_seen
        fleet.close()
        return result

    results = [r for r in run_workers(3, worker, script) if not isinstance(r, Ended)]
    assert len(results) >= 2 and len(set(results)) == 1 and results[0][1] == 144


def test_the_first_workers_weights_start_the_run() -> None:
    def worker(world: Any) -> float:
        model = classifier(seed=world.number)
        fleet = shoal.init(model, OPTIMIZERS["sgd"](model.parameters()), world=world)
        for _ in fleet.epochs(1):
            value = model[0].weight.detach().sum().item()
            for x, y in fleet.batches(classes(6), local_batch=2):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
        fleet.close()
        return value

    expected = classifier(seed=0)[0].weight.detach().sum().item()
    assert run_workers(3, worker) == [expected] * 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 4}, "seed = 4, but"),
        ({"rule": shoal.scaling.Linear(reference_batch=8)}, "scaling = linear"),
        ({"kind": "adamw"}, "optimizer = "),
        ({"model": 16}, "model = "),
    ],
)
def test_a_state_of_another_run_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    run = train(epochs=1, close=False)
    tree = run.fleet._replica.snapshot()
    run.fleet.close()
    model = classifier() if "model" not in change else torch.nn.Linear(6, change["model"])
    optimizer = OPTIMIZERS[change.get("kind", "heavy_ball")](model.parameters())
    fleet = shoal.init(model, optimizer, scaling=change.get("rule"), seed=change.get("seed", 0))
    with pytest.raises(shoal.UsageError, match=named):
        fleet._replica.restore(tree)
    fleet.close()


def test_another_format_is_refused() -> None:
    run = train(epochs=1, close=False)
    tree: Any = run.fleet._replica.snapshot()
    tree["progress"]["format"] = 99
    with pytest.raises(ValueError, match="format = 99"):
        run.fleet._replica.restore(tree)
    run.fleet.close()


def test_the_runs_base_rate_outlives_another_one_in_the_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = train(optimizer="sgd", epochs=1, close=False)
    tree = run.fleet._replica.snapshot()
    run.fleet.close()
    model = classifier()
    fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.7))
    fleet._replica.restore(tree)
    assert fleet.lr == 0.05
    assert "lr = [0.7] of the optimizer is not used" in capsys.readouterr().err
    fleet.close()


def test_one_line_per_membership_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, and stored with step, samples, workers, batch, lr now and target, ramp end."""
    script = [
        VirtualEvent(kind="join", workers=3, at_step=2),
        VirtualEvent(kind="kill", workers=2, at_step=6),
        VirtualEvent(kind="leave", at_samples=160),
    ]
    world = VirtualWorld(1, script)
    events: list[dict[str, Any]] = []
    world.event = lambda row: events.append(dict(row))  # type: ignore[method-assign]
    train(
        world,
        data=classes(200),
        scaling=shoal.scaling.Dynamic(reference_batch=8, ramp_steps=8),
        epochs=1,
        local_batch=8,
    )
    changes = [e for e in events if e["kind"] in ("join", "kill", "leave")]
    assert [(e["kind"], e["workers_before"], e["workers_after"]) for e in changes] == [
        ("join", 1, 4),
        ("kill", 4, 2),
        ("leave", 2, 1),
    ]
    assert [(e["step"], e["samples"]) for e in changes] == [(2, 16), (6, 144), (7, 160)]
    assert [e["global_batch"] for e in changes] == [32, 16, 8]
    assert [e["lr_target"] for e in changes] == pytest.approx([0.2, 0.1, 0.05])
    assert changes[0]["lr"] == pytest.approx(0.05) and changes[0]["ramp_end_step"] == 10
    assert [e["names"] for e in changes] == [["v1", "v2", "v3"], ["v2", "v3"], ["v1"]]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["join", "kill", "leave"]
    assert "workers 1 -> 4" in lines[0] and "lr 0.05 -> 0.2, ramp ends at step 10" in lines[0]


def test_one_worker_of_many_reports_a_change() -> None:
    def worker(world: Any) -> list[dict[str, Any]]:
        train(world, model=classifier(seed=world.number), data=classes(72), local_batch=4)
        return world.events

    results = run_workers(3, worker, ThreadScript(joins={2: 2}, leaves={0: 5}))
    assert results[0] == Ended("left", 0)
    rows = [e for r in results[1:] for e in r if e["kind"] in ("join", "leave")]  # type: ignore[union-attr]
    assert [(row["kind"], row["names"]) for row in rows] == [("leave", ["t0"])]


def test_an_attempt_that_fails_leaves_no_trace_in_the_rule() -> None:
    """The first step fails and a worker joins before it is made: no ramp from two workers to three."""
    rule = shoal.scaling.Dynamic(reference_batch=4)
    script = ThreadScript(failures={0: {0, 1}}, joins={2: 1})

    def worker(world: Any) -> list[float]:
        model = classifier(seed=world.number)
        return train(world, model=model, data=classes(48), scaling=rule, local_batch=4).lrs

    results = run_workers(3, worker, script)
    assert results == [[pytest.approx(0.15)] * 8] * 3
