"""First times, taken before a worker joins: a whole fleet would wait for them in its first step."""

from __future__ import annotations

import torch
from torch import nn


def warm_up(device: torch.device) -> None:
    """Run one tiny step: autograd's threads, kernels and the optimizer's code are loaded after it.

    Touches nothing of the user's: a model of its own, no random numbers, no gradient mode.
    """
    with torch.enable_grad():
        weight = nn.Parameter(torch.ones(4, 4, device=device))
        hidden = torch.relu(torch.ones(2, 4, device=device) @ weight)
        loss = nn.functional.cross_entropy(hidden, torch.zeros(2, dtype=torch.long, device=device))
        loss.backward()
        torch.optim.SGD([weight], lr=0.0, momentum=0.9).step()
        float(loss.detach())
