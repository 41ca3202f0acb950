"""DDP around blocks whose tensors have several users, on rank 1 with a backward that is nan at a row of zeros.

--block prenorm: `x + linear(scale(x))`, and the model computes its own loss, as nanoGPT does. --block postnorm:
`scale(x + linear(x))`: the scale's input is made by the block's own code. --block gated: `wo(act(wi_0(x)) * wi_1(x))`,
as T5 does. --block attention: `q(x)`, `k(x)` and `v(x)` share their input, and `k` makes it.

--block product: `linear(x * scale(x))`: of two finite tensors a product's backward makes no nan.

In the others, something else can have made it as well. --block exponential: `linear(exp(x) * scale(x))`. --block
doubled: `x + linear(scale(2 * x))`. --block pair: `linear(scale(x) + other(x))`, of one class. --block heads:
what attention's own code made of q, k and v goes into `scale`. --block recurrent: `cell(x) / 2 + scale(x)`, twice.

--how: plain, checkpointed, reentrant (the older kind of checkpointing) or compiled.
"""

import torch
import torch.distributed as dist
from common import diagonal, finite, run
from torch import nn
from torch.utils.checkpoint import checkpoint


class Scale(nn.Module):
    """Each row times its own length. For a row of zeros the gradient is 0 * inf."""

    bad = False

    def forward(self, x):
        return x * x.square().sum(-1, keepdim=True).sqrt() if self.bad else x * 1.0


class PreNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.linear = Scale(), diagonal(8, 1.0)

    def forward(self, x):
        return x + self.linear(self.scale(x))


class PostNorm(PreNorm):
    def forward(self, x):
        return self.scale(x + self.linear(x))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi_0, self.wi_1, self.wo, self.scale = diagonal(8, 1.0), diagonal(8, 1.0), diagonal(8, 1.0), Scale()

    def forward(self, x):
        gate = self.scale(self.wi_0(x))
        return self.wo(gate * self.wi_1(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.scale, self.v = diagonal(8, 1.0), Scale(), diagonal(8, 1.0)

    def forward(self, x):
        return self.q(x) * self.scale(x) + self.v(x)


class Product(PreNorm):
    def forward(self, x):
        return self.linear(x * self.scale(x))


class Exponential(PreNorm):
    def forward(self, x):
        return self.linear(x.exp() * self.scale(x))


class Doubled(PreNorm):
    def forward(self, x):
        return x + self.linear(self.scale(2 * x))


class Pair(PreNorm):
    def __init__(self):
        super().__init__()
        self.other = Scale()

    def forward(self, x):
        return self.linear(self.scale(x) + self.other(x))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.scale = (*(diagonal(8, 1.0) for _ in range(3)), Scale())

    def forward(self, x):
        weights = torch.softmax(self.q(x) @ self.k(x).T, -1)
        return self.scale((weights * 0.0) @ self.v(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.scale = diagonal(8, 1.0), Scale()

    def forward(self, x):
        for _ in range(2):
            x = self.cell(x) * 0.5 + self.scale(x)
        return x


class Net(nn.Module):
    def __init__(self, block, how):
        super().__init__()
        self.embed = diagonal(8, 1.0)
        self.block = block()
        self.head = nn.Linear(8, 1)
        self.how = how

    def forward(self, x, target):
        hidden = self.embed(x)
        if self.how in ("checkpointed", "reentrant"):
            hidden = checkpoint(self.block, hidden, use_reentrant=self.how == "reentrant")
        else:
            hidden = self.block(hidden)
        logits = self.head(hidden)
        return logits, (logits - target).square().mean()


KINDS = {
    "prenorm": PreNorm,
    "postnorm": PostNorm,
    "gated": Gated,
    "attention": Attention,
    "product": Product,
    "exponential": Exponential,
    "doubled": Doubled,
    "pair": Pair,
    "heads": Heads,
    "recurrent": Recurrent,
}


def main(block, how):
    net = Net(KINDS[block], how)
    model = nn.parallel.DistributedDataParallel(net)
    if how == "compiled":
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in range(3):
        x = torch.rand(4, 8)
        if batch == 2 and dist.get_rank() == 1:
            x[1], net.block.scale.bad = 0.0, True
        _, loss = model(x, torch.ones(4, 1))
        assert finite(loss)
        optimizer.zero_grad()
        loss.backward()
        assert batch < 2 or not finite(net.embed.weight.grad)
        optimizer.step()


run(main, block="prenorm", how="plain")
