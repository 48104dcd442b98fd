"""Which optimizers and ratios a rule accepts, the lookup by name, and the texts of the errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.errors import UsageError
from shoal.scaling import (
    RULES,
    AdaScale,
    Dynamic,
    Legw,
    Linear,
    NoiseMatched,
    SquareRoot,
    Unscaled,
    by_name,
    check_optimizer,
    check_range,
)


def optimizers() -> dict[str, torch.optim.Optimizer]:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    return {
        "sgd": torch.optim.SGD(parameters, lr=0.1),
        "heavy_ball": torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "nesterov": torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        "adam": torch.optim.Adam(parameters),
        "adamw": torch.optim.AdamW(parameters),
        "sgd_with_dampening": torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1),
        "rmsprop": torch.optim.RMSprop(parameters),
    }


SGD = {"sgd", "heavy_ball", "nesterov"}
ACCEPTED = {
    Unscaled(): SGD | {"adam", "adamw", "sgd_with_dampening", "rmsprop"},
    Linear(reference_batch=8): SGD,
    Dynamic(reference_batch=8): SGD,
    NoiseMatched(reference_batch=8): SGD,
    AdaScale(reference_batch=8): SGD,
    SquareRoot(reference_batch=8): SGD | {"adam", "adamw"},
    Legw(reference_batch=8, warmup_epochs=1): SGD | {"adam", "adamw"},
}


def test_the_table_of_accepted_optimizers_is_whole() -> None:
    assert {type(rule) for rule in ACCEPTED} == set(RULES.values())


@pytest.mark.parametrize("rule", ACCEPTED, ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", optimizers())
def test_an_optimizer_is_accepted_or_refused_by_name(rule: Any, kind: str) -> None:
    optimizer = optimizers()[kind]
    if kind in ACCEPTED[rule]:
        check_optimizer(rule, optimizer)
        return
    with pytest.raises(UsageError) as caught:
        check_optimizer(rule, optimizer)
    text = str(caught.value)
    assert repr(rule.name) in text
    assert kind in text
    assert "Unscaled" in text
    assert "scaling" in text
    assert "\n" not in text


def test_refusing_adamw_names_the_rules_that_work() -> None:
    with pytest.raises(UsageError) as caught:
        check_optimizer(Dynamic(reference_batch=8), optimizers()["adamw"])
    assert "use Unscaled or SquareRoot or Legw (argument scaling)" in str(caught.value)


def test_range_is_silent_up_to_the_tested_ratio_and_speaks_beyond() -> None:
    rule = Dynamic(reference_batch=64)
    assert [check_range(rule, batch) for batch in (4, 64, 1024)] == [None, None, None]
    above, below = check_range(rule, 1025), check_range(rule, 3)
    assert above is not None and below is not None
    assert "global_batch = 1025; that is 16.0156 times reference_batch = 64" in above
    assert "'dynamic' was tested only up to a ratio of 16" in above
    assert "global_batch = 3; that is 1/21.3333 of reference_batch = 64" in below
    assert check_range(Unscaled(), 10**9) is None


def test_by_name_builds_what_the_constructor_builds() -> None:
    assert by_name("dynamic", reference_batch=8, ramp_steps=5) == Dynamic(
        reference_batch=8, ramp_steps=5
    )
    assert by_name("unscaled") == Unscaled()


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("dynamical", {}, "scaling = 'dynamical'; there is no such rule"),
        ("linear", {"reference_batch": 8, "ramp_steps": 3}, "ramp_steps = 3"),
        ("linear", {}, "reference_batch"),
        ("legw", {"reference_batch": 8}, "warmup_epochs"),
        (
            "linear",
            {"reference_batch": 8, "momentum_correction": "no"},
            "momentum_correction = 'no'",
        ),
        ("noise_matched", {"reference_batch": 8, "tolerance": 0}, "tolerance = 0"),
        ("legw", {"reference_batch": 8, "warmup_epochs": -1}, "warmup_epochs = -1"),
        ("square_root", {"reference_batch": "8"}, "reference_batch = '8'"),
        ("adascale", {"reference_batch": 0}, "reference_batch = 0"),
        ("unscaled", {"reference_batch": 0}, "reference_batch = 0"),
    ],
)
def test_by_name_refuses_in_one_line(name: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        by_name(name, **settings)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_state_of_another_rule_is_refused_with_the_fix() -> None:
    dynamic, linear = Dynamic(reference_batch=8), Linear(reference_batch=8)
    with pytest.raises(UsageError, match="another rule wrote this state; resume with the rule"):
        dynamic.from_dict({"applied": 1.0})
    with pytest.raises(UsageError, match="applied = None"):
        linear.from_dict({"applied": None})
