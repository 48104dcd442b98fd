"""Sync rules: how replicas exchange what they learn."""

from shoal.sync.allreduce import AllReduce
from shoal.sync.bmuf import BMUF
from shoal.sync.contract import Event, Exchange, Outcome, Pull, Signals, SyncRule
from shoal.sync.diloco import DiLoCo
from shoal.sync.downpour import Downpour
from shoal.sync.eamsgd import EAMSGD
from shoal.sync.easgd import EASGD
from shoal.sync.independent import Independent
from shoal.sync.leader import Leader
from shoal.sync.local_sgd import LocalSGD
from shoal.sync.lookahead import Lookahead
from shoal.sync.powersgd import PowerSGD
from shoal.sync.pulling import pull_scalings
from shoal.sync.sgp import SGP
from shoal.sync.slowmo import SlowMo
from shoal.sync.stacked import Stacked
from shoal.sync.states import reseat
from shoal.sync.table import RULES, ShippedRule, by_name

__all__ = [
    "BMUF",
    "EAMSGD",
    "EASGD",
    "RULES",
    "SGP",
    "AllReduce",
    "DiLoCo",
    "Downpour",
    "Event",
    "Exchange",
    "Independent",
    "Leader",
    "LocalSGD",
    "Lookahead",
    "Outcome",
    "PowerSGD",
    "Pull",
    "ShippedRule",
    "Signals",
    "SlowMo",
    "Stacked",
    "SyncRule",
    "by_name",
    "pull_scalings",
    "reseat",
]
