"""shoal: train PyTorch models on a number of workers that changes while they train."""

__version__ = "0.1.0"
