"""Imports once, then forks a runner per line of its input: ``DIRECTORY NAME``; tells its pid, then its end."""

from __future__ import annotations

import os
import sys

import torch

from shoal.study import search_run
from shoal.study.runner import main

# Lives of a second or two must leave something behind.
search_run.PAUSE_SECONDS = 0.15
search_run.PAUSE_SHARE = 0.5
torch.set_num_threads(1)

for line in sys.stdin:
    directory, name = line.split()
    pid = os.fork()
    if pid == 0:
        os._exit(main([directory, "--runner", name, "--parent", str(os.getppid())]))
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
