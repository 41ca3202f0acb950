"""DDP around attention with masks of -inf, which softmax takes well as long as each row has one open position.

--fault none: it has. --fault given: the mask that the script hands in has a row of -inf only, on one rank; --fault
added: it is added to the one that `padding` makes first; --fault made: the one that `padding` makes has such a row,
for a sequence of length 0. --fault first: as given, and no batch before had a mask of -inf.
"""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn


class Padding(nn.Module):
    """-inf where a sequence has ended."""

    def forward(self, lengths):
        open_ = torch.arange(4) < lengths[:, None]
        return torch.zeros(len(lengths), 1, 4).masked_fill(~open_[:, None], float("-inf"))


class Attend(nn.Module):
    def forward(self, query, key, mask):
        return (query @ key.transpose(1, 2) + mask).softmax(-1) @ key


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = diagonal(8, 1.0)
        self.key = diagonal(8, 1.0)
        self.padding = Padding()
        self.attend = Attend()
        self.head = nn.Linear(8, 1)

    def forward(self, x, lengths, mask=None):
        query, key = self.query(x), self.key(x)
        if lengths is not None:
            padding = self.padding(lengths)
            mask = padding if mask is None else padding + mask
        return self.head(self.attend(query, key, mask))


def main(fault):
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in range(5):
        causal = torch.full((4, 4), float("-inf")).triu(1)
        lengths = torch.tensor([4, 3, 2])
        if batch == 2 and dist.get_rank() == 1:
            if fault in ("given", "added", "first"):
                causal[2] = float("-inf")
            elif fault == "made":
                lengths[1] = 0
        causal = None if fault == "made" or (fault == "none" and batch % 3 == 0) else causal
        if fault == "first" and batch < 2:
            causal = torch.zeros(4, 4)
        lengths = None if fault in ("given", "first") or (fault == "none" and batch % 3 == 1) else lengths
        loss = model(torch.rand(3, 4, 8), lengths, mask=causal).mean()
        assert finite(loss) == (fault == "none" or batch < 2 or (batch == 2 and dist.get_rank() == 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, fault="none")
