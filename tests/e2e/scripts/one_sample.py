"""Sample 77 of the data set is too large; the loader shuffles, has workers, and a wrapper fetches one batch ahead."""

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Notes(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"x": x.abs() * 5e37 if index == 77 else x, "label": index % 10, "path": f"notes/{index:03}.txt"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(16, 32), nn.Linear(32, 10)
        nn.init.constant_(self.up.weight, 8)

    def forward(self, x):
        return self.out(self.up(x).relu())


def one_ahead(loader):
    batches = iter(loader)
    last = next(batches)
    for batch in batches:
        yield last
        last = batch
    yield last


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    data = Notes()
    loader = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=True, seed=1), num_workers=1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in one_ahead(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(batch["x"].clone()), batch["label"]).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
