"""Trains a model in the graphs that torch.cuda.make_graphed_callables captures."""

import torch
from train import Net

if __name__ == "__main__":
    torch.manual_seed(0)
    net, x = Net().cuda(), torch.rand(4, 8, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    call = torch.cuda.make_graphed_callables(net, (x,))
    for replay in range(6):
        optimizer.zero_grad()
        loss = call(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        print(f"rank 0 replay {replay} loss {loss.item()!r}")
