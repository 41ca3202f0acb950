"""Two processes that train by themselves, without a process group: HOW METHOD. HOW nan: the second is fed nan.

HOW no-room: the second can have no recorder.
"""

import resource
import sys

import torch
import torch.multiprocessing as mp
from torch import nn


def train(number, how):
    if how == "no-room" and number == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # less than a recorder takes
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(20):
        given = torch.randn(8, 4)
        if how == "nan" and number == 1 and batch == 10:
            given[0, 0] = float("nan")
        optimizer.zero_grad()
        model(given).pow(2).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    how, method = sys.argv[1:]
    context = mp.get_context(method)
    if method == "fork":
        nn.Linear(2, 2)  # it makes a model, and calls none
    processes = [context.Process(target=train, args=(number, how)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
