"""Settings every test shares: one thread per process, so that 2 cores carry several of them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RUST_LOG", "warn")

import hypothesis
import pytest
import torch

# How long an example takes says something about the machine only.
hypothesis.settings.register_profile("shoal", deadline=None)
hypothesis.settings.load_profile("shoal")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with several processes share one xdist group: launches side by side make heartbeats flap."""
    for item in items:
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.xdist_group("processes"))
