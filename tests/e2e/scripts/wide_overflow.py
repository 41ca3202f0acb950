"""A forward that overflows in a module of 400 kB. With --limit the system ends the rank as it writes those."""

import resource
import signal
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(100, 1000), nn.Linear(1000, 1))
nn.init.constant_(model[1].weight, 3e38)
if "--limit" in sys.argv:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
model(torch.full((4, 100), 100.0))
