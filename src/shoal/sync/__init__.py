"""Sync rules: how replicas exchange what they learn."""

from shoal.sync.allreduce import AllReduce

__all__ = ["AllReduce"]
