"""The spec: the same from Python and TOML, one clear line for every mistake, growth and differences."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.study import (
    Budget,
    CurveSpec,
    Discrete,
    Goal,
    Grid,
    Integer,
    Linear,
    Log,
    ReverseLog,
    Space,
    StudySpec,
    load_spec,
)
from shoal.study.records import SearchKey
from shoal.study.spec_file import spec_from_canonical

TOML = """
name = "small"
workload = "digits_mlp"
workload_parameters = { widths = [16] }
global_batches = [4, 8, 16]
repeats = 2
seed = 7
sampler = "sobol"
allow_batch_norm = true

[budget]
trials = 5
draw_limit = 9
max_steps = 300
kappa = 1
full = true

[grid]
ratio = 1.1

[[goals]]
metric = "val/classification_error"
value = 0.2

[[goals]]
metric = "val/classification_error"
value = 0.1

[curves.sgd.space]
lr = { scale = "log", min = 1e-3, max = 1 }

[curves.decayed]
optimizer = "nesterov"
schedule = "linear_decay"
fixed = { weight_decay = 1e-4 }
[curves.decayed.space]
lr = { scale = "log", min = 1e-3, max = 1 }
momentum = { scale = "reverse_log", min = 0, max = 0.99 }
decay_steps = { scale = "integer", min = 10, max = 300, log = true }
end_factor = { scale = "discrete", values = [0.0, 0.1] }
[curves.decayed.space_at.16]
lr = { scale = "linear", min = 0.1, max = 1 }
momentum = { scale = "reverse_log", min = 0, max = 0.99 }
decay_steps = { scale = "integer", min = 10, max = 300 }
end_factor = { scale = "discrete", values = [0.0] }
"""


def _python() -> StudySpec:
    lr, momentum = Log(min=1e-3, max=1), ReverseLog(min=0, max=0.99)
    return StudySpec(
        name="small",
        workload="digits_mlp",
        workload_parameters={"widths": [16]},
        global_batches=(4, 8, 16),
        repeats=2,
        seed=7,
        sampler="sobol",
        allow_batch_norm=True,
        budget=Budget(feasible=5, draws=9, steps=300, kappa=1, full=True),
        grid=Grid(ratio=1.1),
        goals=(
            Goal(metric="val/classification_error", value=0.2),
            Goal(metric="val/classification_error", value=0.1),
        ),
        curves={
            "sgd": CurveSpec(optimizer="sgd", space=Space({"lr": lr})),
            "decayed": CurveSpec(
                optimizer="nesterov",
                schedule="linear_decay",
                fixed={"weight_decay": 1e-4},
                space=Space(
                    {
                        "lr": lr,
                        "momentum": momentum,
                        "decay_steps": Integer(min=10, max=300, log=True),
                        "end_factor": Discrete(values=(0.0, 0.1)),
                    }
                ),
                spaces={
                    16: Space(
                        {
                            "lr": Linear(min=0.1, max=1),
                            "momentum": momentum,
                            "decay_steps": Integer(min=10, max=300),
                            "end_factor": Discrete(values=(0.0,)),
                        }
                    )
                },
            ),
        },
    )


def _written(tmp_path: Path, text: str) -> StudySpec:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return load_spec(path)


def test_toml_and_python_say_the_same(tmp_path: Path) -> None:
    spec = _written(tmp_path, TOML)
    assert spec == _python()
    assert spec.canonical() == _python().canonical()
    assert spec.hash == _python().hash
    assert spec.base == tmp_path


def test_defaults(tmp_path: Path) -> None:
    spec = _written(
        tmp_path,
        'name = "s"\nworkload = "digits_tiny"\nglobal_batches = [8]\n'
        'goals = { metric = "val/cross_entropy_error", value = 0.3 }\n'
        "budget = { trials = 10, max_steps = 205 }\n"
        'curves.sgd.space.lr = { scale = "log", min = 0.1, max = 1 }\n',
    )
    assert spec.budget == Budget(feasible=10, draws=40, steps=205, kappa=3.0, full=False)
    assert (spec.repeats, spec.seed, spec.sampler, spec.grid) == (5, 0, "halton", Grid())
    assert spec.curves["sgd"].optimizer == "sgd" and spec.curves["sgd"].schedule == "constant"
    # 205 lies between two points of the grid.
    assert spec.steps == spec.grid.floor(205) < 205


def test_searches_repeat_by_repeat() -> None:
    keys = _python().searches()
    assert len(keys) == len(set(keys)) == 2 * 2 * 3
    assert keys[0] == SearchKey(curve="sgd", global_batch=4, repeat=0)
    assert [key.repeat for key in keys] == [0] * 6 + [1] * 6


def test_what_a_study_directory_holds_makes_the_same_study() -> None:
    spec = _python()
    read = spec_from_canonical(json.loads(json.dumps(spec.canonical())))
    assert read == spec and read.hash == spec.hash
    assert read.difference(spec) == [] and spec.grows_into(read)
    assert read.recorded_fingerprint == spec.resolved.fingerprint
    with pytest.raises(UsageError, match="format = 99"):
        spec_from_canonical(spec.canonical() | {"format": 99})


def test_reading_a_study_needs_neither_its_data_nor_its_code() -> None:
    facts = _python().canonical() | {"workload": "gone.py:mine", "workload_parameters": {}}
    read = spec_from_canonical(facts)
    assert read.canonical() == facts
    with pytest.raises(UsageError, match="no such file"):
        _ = read.resolved


def test_a_workload_that_changed_under_a_study_is_refused() -> None:
    facts = _python().canonical()
    assert spec_from_canonical(facts).resolved.name == "digits_mlp"
    changed = spec_from_canonical(facts | {"workload_parameters": {"widths": [17]}})
    with pytest.raises(UsageError, match="not what this study began with"):
        _ = changed.resolved


def test_differences_are_named_one_a_line() -> None:
    here = _python()
    curve = dataclasses.replace(here.curves["sgd"], space=Space({"lr": Log(min=1e-2, max=1)}))
    there = dataclasses.replace(
        here,
        repeats=3,
        curves={**here.curves, "sgd": curve},
        goals=here.goals[:1],
        workload_parameters={"widths": [17]},
    )
    assert here.difference(there) == [
        "workload_parameters.widths: [16] here, [17] there",
        f'workload_fingerprint: "{here.fingerprint}" here, "{there.fingerprint}" there',
        "curves.sgd.space.lr.min: 0.001 here, 0.01 there",
        "goals.0.value: 0.1 here, 0.2 there",
        'goals.1.metric: "val/classification_error" here, nothing there',
        "goals.1.value: 0.2 here, nothing there",
        "repeats: 2 here, 3 there",
    ]


def test_which_orders_matter() -> None:
    here = _python()
    turned = dataclasses.replace(
        here, curves=dict(reversed(here.curves.items())), goals=here.goals[::-1]
    )
    assert here.hash == turned.hash and here.difference(turned) == []
    assert here.grows_into(turned)
    # A draw's k-th coordinate belongs to the k-th parameter.
    curve = here.curves["decayed"]
    spaces = {16: Space(dict(reversed(list(curve.spaces[16].items()))))}
    space = Space(dict(reversed(list(curve.space.items()))))
    other = dataclasses.replace(
        here,
        curves={**here.curves, "decayed": dataclasses.replace(curve, space=space, spaces=spaces)},
    )
    assert here.hash != other.hash and not here.grows_into(other)
    assert here.difference(other) == [
        "the order of the searched parameters: it decides what a draw means"
    ]


def test_growth_is_more_of_the_same() -> None:
    small = _python()
    more = dataclasses.replace(
        small,
        repeats=5,
        global_batches=(2, 4, 8, 16),
        curves={
            **small.curves,
            "decayed": dataclasses.replace(
                small.curves["decayed"],
                spaces={**small.curves["decayed"].spaces, 2: small.curves["decayed"].space},
            ),
            "more": small.curves["sgd"],
        },
    )
    assert small.grows_into(small) and small.grows_into(more) and not more.grows_into(small)
    assert set(small.searches()) < set(more.searches())
    moved = {**small.curves, "sgd": dataclasses.replace(small.curves["sgd"], optimizer="adamw")}
    for other in (
        dataclasses.replace(small, seed=8),
        dataclasses.replace(small, grid=Grid()),
        dataclasses.replace(small, curves=moved),
        dataclasses.replace(small, curves={"sgd": small.curves["sgd"]}),
        dataclasses.replace(small, budget=dataclasses.replace(small.budget, feasible=6)),
        dataclasses.replace(small, workload_parameters={"widths": [17]}),
    ):
        assert not small.grows_into(other)


BAD = [
    ('name = "small"', 'nmae = "small"', "nmae = unknown key; did you mean name?"),
    ("repeats = 2", "repaets = 2", "repaets = unknown key; did you mean repeats?"),
    ("seed = 7", "batch_size = 7", "batch_size = unknown key; did you mean global_batches?"),
    ("trials = 5", "trails = 5", "budget.trails = unknown key; did you mean trials?"),
    ("ratio = 1.1", "ration = 1.1", "grid.ration = unknown key; did you mean ratio?"),
    ("value = 0.2", "valeu = 0.2", r"goals\[0\].valeu = unknown key; did you mean value?"),
    ("[curves.sgd.space]", "[curves.sgd.spaec]", "curves.sgd.spaec = unknown key"),
    ('{ scale = "log", min = 1e-3', '{ scale = "log", mim = 1e-3', "space.lr.mim = unknown key"),
    ('{ scale = "log", min', '{ scale = "logg", min', "scale = 'logg'; did you mean log?"),
    ('{ scale = "log", min', '{ scal = "log", min', r"lr = without `scale`"),
    ('name = "small"', "", "the study = without `name`"),
    ("trials = 5", "", "budget = without `trials`"),
    ("max_steps = 300", "", "budget = without `max_steps`"),
    ("trials = 5", "trials = 5.0", "trials = 5.0; it is a whole number"),
    ("trials = 5", "trials = 0", "at least 1 feasible trial"),
    ("draw_limit = 9", "draw_limit = 4", "draw_limit = 4"),
    ("kappa = 1", "kappa = 0.5", "kappa = 0.5"),
    ("kappa = 1", "kappa = true", "kappa = True; it is a number"),
    ("max_steps = 300", "max_steps = 0", "max_steps = 0"),
    ("full = true", 'full = "yes"', "full = 'yes'; it is true or false"),
    ("repeats = 2", "repeats = 0", "repeats = 0"),
    ("seed = 7", "seed = -1", "seed = -1"),
    ('"sobol"', '"random"', "sampler = 'random'; known are halton and sobol"),
    ("[4, 8, 16]", "[]", "global_batches = none"),
    ("[4, 8, 16]", "[8, 4, 16]", r"each once and rising; use \[4, 8, 16\]"),
    ("[4, 8, 16]", "[4, 4, 16]", "each once and rising"),
    ("[4, 8, 16]", "[0, 8, 16]", "global_batches = 0"),
    ("[4, 8, 16]", "[4.5, 16]", "list of whole numbers"),
    ("[4, 8, 16]", "[4, 8]", "space_at = 16, which is none of global_batches"),
    ("space_at.16", "space_at.large", "keys are batch sizes"),
    ("value = 0.1", "value = 0.2", "one is there twice"),
    ("value = 0.1", "value = 0.0", "nothing reaches it"),
    ("value = 0.1", "value = inf", "finite"),
    ("value = 0.1", "value = 0.1\nlarger_is_better = true", "several metrics|smaller is better"),
    ('metric = "val/classification_error"', 'metric = "test/e"', "several metrics|validation data"),
    ("ratio = 1.1", "ratio = 1.0", "grid.ratio = 1.0"),
    (
        "min = 1e-3, max = 1 }",
        "min = 1, max = 1 }",
        "curves.sgd.space.lr: min = 1, max = 1; .*min < max",
    ),
    ("min = 1e-3, max = 1 }", "min = 1e-3, max = nan }", "max = nan; a log range has finite ends"),
    ("min = 1e-3, max = 1 }", "min = 1e-3 }", "lr = without `max`"),
    ("min = 1e-3, max = 1 }", 'min = "a", max = 1 }', "lr.min = 'a'; it is a number"),
    ("min = 0, max = 0.99", "min = 0, max = 1.0", "decayed.space.momentum: max = 1; .*below 1"),
    (
        '"reverse_log", min = 0, max = 0.99',
        '"linear", min = 0, max = 1',
        "momentum must stay below 1",
    ),
    ("values = [0.0, 0.1]", "values = []", "at least one"),
    ("values = [0.0, 0.1]", 'values = ["a"]', "values = 'a'; it is a number"),
    ("weight_decay = 1e-4", "weight_decay = -1", "weight_decay is at least 0"),
    ("weight_decay = 1e-4", "weight_decay = nan", "weight_decay is a finite number"),
    ("weight_decay = 1e-4", "momentum = 0.9", "searched too"),
    ("weight_decay = 1e-4", "beta1 = 0.9", "'beta1'; nesterov with .* has lr, momentum"),
    ('optimizer = "nesterov"', 'optimizer = "adam"', "optimizer = 'adam'; known are sgd"),
    ('optimizer = "nesterov"', "optimizer = 3", "optimizer = 3; it is a text"),
    ('optimizer = "nesterov"', "", "curves.decayed = without `optimizer`"),
    ('schedule = "linear_decay"', 'schedule = "cosine"', "schedule = 'cosine'; known are constant"),
    ('schedule = "linear_decay"', "", "'decay_steps'; nesterov with the schedule constant"),
    ('optimizer = "nesterov"', 'optimizer = "sgd"', "'momentum'; sgd with the schedule"),
    (
        'end_factor = { scale = "discrete", values = [0.0] }',
        "",
        r"spaces\[16\] = .*same parameters in the same order",
    ),
    ("[curves.sgd.space]", '["curves"."s g d".space]', "without `optimizer`"),
    ('workload = "digits_mlp"', "workload = 3", "workload = 3; it is a text"),
    ("{ widths = [16] }", "3", "workload_parameters = 3; it is a table"),
    ("name = ", "name : ", "is not TOML"),
]


@pytest.mark.parametrize(("good", "bad", "text"), BAD, ids=[bad or good for good, bad, _ in BAD])
def test_a_mistake_is_one_clear_line_with_its_place(
    tmp_path: Path, good: str, bad: str, text: str
) -> None:
    assert good in TOML
    with pytest.raises(UsageError, match=text) as refusal:
        _written(tmp_path, TOML.replace(good, bad, 1))
    line = str(refusal.value)
    assert "\n" not in line and line.startswith(f"{tmp_path / 'study.toml'}: ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: cannot be read"):
        load_spec(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not TOML"):
        load_spec(tmp_path / "bytes.toml")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"curves": {}}, "curves = none"),
        ({"name": " "}, "a study has a name"),
        ({"goals": ()}, "goals = none"),
        ({"curves": {"a b": _python().curves["sgd"]}}, "letters, digits"),
        ({"global_batches": (True,)}, "global_batches = True"),
    ],
)
def test_mistakes_in_python(changes: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        dataclasses.replace(_python(), **changes)  # pyright: ignore


def test_mistakes_that_show_with_the_data() -> None:
    spec = dataclasses.replace(_python(), global_batches=(8, 16, 2048))
    with pytest.raises(UsageError, match=r"global_batches = 2048; .*1024 samples"):
        _ = spec.resolved
    goal = Goal(metric="val/perplexity", value=3.0)
    with pytest.raises(UsageError, match="measures classification_error, cross_entropy_error"):
        _ = dataclasses.replace(_python(), goals=(goal,)).resolved
    workload = _python().resolved
    with pytest.raises(UsageError, match="beside a Workload"):
        dataclasses.replace(_python(), workload=workload)
    made = dataclasses.replace(_python(), workload=workload, workload_parameters={})
    assert made.fingerprint == _python().fingerprint


def test_parameters_that_json_cannot_hold() -> None:
    spec = dataclasses.replace(
        _python(), workload_parameters={"widths": {1}}, recorded_fingerprint="0"
    )
    with pytest.raises(UsageError, match="JSON cannot hold"):
        _ = spec.hash


@pytest.mark.parametrize("name", ["study_digits", "study_fashion"])
def test_the_examples_are_specs(name: str) -> None:
    spec = load_spec(Path(__file__).parents[2] / "examples" / f"{name}.toml")
    assert spec.repeats == 5 and spec.steps >= 1000
    assert all(
        b == 2 * a for a, b in zip(spec.global_batches, spec.global_batches[1:], strict=False)
    )


def test_the_digits_example_fits_its_data() -> None:
    spec = load_spec(Path(__file__).parents[2] / "examples" / "study_digits.toml")
    assert spec.resolved.samples("train") == 1024
