"""The stacked MLP and the paired samples of the digits."""

import numpy as np
import pytest
import torch

from shoal.workloads.digits_mlp import (
    DigitsTask,
    StackedMLP,
    evaluate,
    load_digits_task,
    losses,
)
from shoal.workloads.draws import keyed_integers


@pytest.fixture(scope="module")
def task() -> DigitsTask:
    return load_digits_task()


def test_split_has_the_stated_sizes_and_shares_nothing(task: DigitsTask) -> None:
    assert task.train_images.shape == (1437, 8, 8)
    assert task.test_images.shape == (360, 8, 8)
    assert float(task.train_images.max()) == 1.0
    share = torch.bincount(task.test_labels) / torch.bincount(task.train_labels)
    assert float(share.min()) > 0.22 and float(share.max()) < 0.28


def test_shifts_move_pixels_and_fill_with_zeros(task: DigitsTask) -> None:
    image = task.train_images[5]
    down_right = task.shifted[8, 5].reshape(8, 8)
    up = task.shifted[1, 5].reshape(8, 8)
    assert torch.equal(task.shifted[4, 5].reshape(8, 8), image)
    assert torch.equal(down_right[1:, 1:], image[:-1, :-1])
    assert not down_right[0].any() and not down_right[:, 0].any()
    assert torch.equal(up[:-1], image[1:])
    assert not up[-1].any()


def test_a_seed_sees_the_same_samples_however_the_stream_is_cut(task: DigitsTask) -> None:
    whole, labels = task.epoch((7, 8), 0, 600)
    pieces = [task.epoch((8,), start, 200) for start in (0, 200, 400)]
    assert torch.equal(torch.cat([x for x, _ in pieces], dim=1)[0], whole[1])
    assert torch.equal(torch.cat([y for _, y in pieces], dim=1)[0], labels[1])
    assert not torch.equal(whole[0], whole[1])


def test_each_pass_holds_every_sample_once(task: DigitsTask) -> None:
    count = len(task.train_labels)
    labels = task.epoch((3,), 0, 2 * count)[1][0]
    for part in (labels[:count], labels[count:]):
        assert torch.equal(torch.bincount(part), torch.bincount(task.train_labels))
    assert not torch.equal(labels[:count], labels[count:])


def test_draws_are_uniform_and_independent_of_their_neighbours() -> None:
    draws = keyed_integers(11, 0, np.arange(90_000), bound=3)
    others = keyed_integers(11, 1, np.arange(90_000), bound=3)
    assert np.bincount(draws, minlength=3) == pytest.approx([30_000] * 3, rel=0.02)
    pairs = np.bincount(3 * draws + others, minlength=9)
    assert pairs == pytest.approx([10_000] * 9, rel=0.05)
    follows = np.bincount(3 * draws[:-1] + draws[1:], minlength=9)
    assert follows == pytest.approx([10_000] * 9, rel=0.05)
    assert not np.array_equal(draws, keyed_integers(12, 0, np.arange(90_000), bound=3))


def test_weights_of_a_seed_do_not_depend_on_its_neighbours() -> None:
    together, alone = StackedMLP((4, 5, 6)), StackedMLP((5,))
    for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours[1], theirs[0])


def test_a_member_computes_the_same_as_its_row(task: DigitsTask) -> None:
    model = StackedMLP((4, 5, 6))
    inputs, labels = task.epoch((4, 5, 6), 0, 16)
    stacked = model(inputs)
    each = losses(stacked, labels)
    accuracy, test_loss = evaluate(model, task)
    for row in range(3):
        member = model.member(row)
        logits = member(inputs[row])
        torch.testing.assert_close(logits, stacked[row], rtol=1e-5, atol=1e-6)
        loss = torch.nn.functional.cross_entropy(logits, labels[row])
        torch.testing.assert_close(loss, each[row], rtol=1e-5, atol=1e-6)
        test_logits = member(task.test_images.reshape(-1, 64))
        right = (test_logits.argmax(1) == task.test_labels).double().mean()
        assert float(accuracy[row]) == pytest.approx(100 * float(right))
        wanted = torch.nn.functional.cross_entropy(test_logits, task.test_labels)
        torch.testing.assert_close(wanted, test_loss[row], rtol=1e-5, atol=1e-6)
