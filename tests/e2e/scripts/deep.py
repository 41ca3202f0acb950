"""How deep modules and functions can be nested, and that a script which goes on after RecursionError goes on."""

import json
import sys

import torch
from torch import nn


class Nest(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Endless(nn.Module):
    def forward(self, x):
        return self(x)


class Recurses(nn.Module):
    def forward(self, x):
        return x * deepest()


def deepest(n=0):
    try:
        return deepest(n + 1)
    except RecursionError:
        return n


def nested(levels):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    for _ in range(levels):
        model = Nest(model)
    return model


def runs(model, below):
    if below:
        return runs(model, below - 1)
    try:
        model(torch.ones(1, 2))
    except RecursionError:
        return False
    return True


def most_levels(below):
    few, many = 1, 600
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if runs(nested(middle), below) else (few, middle)
    return few


def main():
    told = {"functions": deepest(), "levels": [most_levels(below) for below in range(4)]}
    model = nested(240)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    told["losses"] = losses
    told["endless"] = runs(Endless(), 0)
    told["in a module"] = Recurses()(torch.ones(1)).item()
    sys.setrecursionlimit(500)
    told["limit"] = sys.getrecursionlimit()
    told["less"] = [deepest(), most_levels(0)]
    sys.setrecursionlimit(1500)
    told["more"] = [deepest(), most_levels(0)]
    sys.setrecursionlimit(1000)
    told["functions at last"] = deepest()
    print(json.dumps(told), flush=True)


main()
