"""Four ranks, and models of which each rank holds something of its own because that is meant."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def linear(seed, to=8, of=8):
    torch.manual_seed(seed)
    return nn.Linear(of, to)


class Column(nn.Module):
    """Tensor parallel by hand. The bias of the row's half is added on rank 0 alone."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = linear(rank, 4), linear(rank, of=4), nn.LayerNorm(8)
        self.up.bias.data.zero_()
        if rank:
            self.down.bias.data.zero_()

    def forward(self, x):
        return self.norm(self.down(self.up(x)))


class Stage(nn.Module):
    """One of two stages of a pipeline: ranks 0 and 1, and ranks 2 and 3."""

    def __init__(self):
        super().__init__()
        self.fc, self.bn = linear(rank // 2), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.bn(self.fc(x))


class Headed(nn.Module):
    """A shared body, and a head of each rank's own that begins at zero."""

    def __init__(self):
        super().__init__()
        self.body, self.head = linear(1), linear(1)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(self.body(x)) + x


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = linear(2, 2), nn.ModuleList(linear(100 + rank) for _ in range(2))

    def forward(self, x):
        gate = self.gate(x).softmax(-1)
        return sum(gate[:, n : n + 1] * expert(x) for n, expert in enumerate(self.experts))


class Longer(nn.Module):
    """RoPE's frequencies are made anew where a sequence was longer."""

    def __init__(self):
        super().__init__()
        self.fc = linear(3)
        self.register_buffer("inv_freq", torch.linspace(1, 0.1, 8), persistent=False)

    def forward(self, x):
        return self.fc(x) * self.inv_freq


class Bank(nn.Module):
    """Keeps what it has seen, at first on one rank."""

    def __init__(self):
        super().__init__()
        self.fc, self.seen = linear(4), 0
        self.register_buffer("bank", torch.zeros(4, 8))

    def forward(self, x):
        self.seen += 1
        if (self.seen == 3 and rank == 2) or self.seen > 6:
            self.bank.copy_(x[:4].detach())
        return self.fc(x) + self.bank.mean()


class Local(nn.Module):
    """Trained apart, and averaged now and then."""

    def __init__(self):
        super().__init__()
        self.fc = linear(5)

    def forward(self, x):
        return self.fc(x)


class Teacher(Local):
    """Each rank's own."""

    def __init__(self):
        super().__init__()
        self.fc = linear(200 + rank)


class Copied(Local):
    """Its average over time is evaluated on rank 0 alone."""


def among_two(model):
    for parameter in model.parameters():
        gradients = [torch.zeros_like(parameter) for _ in range(ranks)]
        dist.all_gather(gradients, parameter.grad)
        parameter.grad = gradients[rank // 2 * 2] + gradients[rank // 2 * 2 + 1]


def among_all(*modules):
    for module in modules:
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)


models = {cls: cls() for cls in (Column, Stage, Headed, Mixture, Longer, Bank, Local, Copied)}
reduce = {
    Column: lambda model: among_all(model.norm),
    Stage: among_two,
    Headed: lambda model: None,
    Mixture: lambda model: among_all(model.gate),
    Local: lambda model: None,
}
optimizers = {cls: torch.optim.AdamW(model.parameters(), lr=1e-3) for cls, model in models.items()}
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(models[Headed], ["head.weight", "head.bias"])
called = {**models, Headed: DistributedDataParallel(models[Headed])}
teacher, average = Teacher(), copy.deepcopy(models[Copied])
for batch in range(17):
    torch.manual_seed(100 * batch + rank)
    x = torch.randn(8, 8)
    if batch == 3 and rank == 1:
        models[Longer].inv_freq = torch.linspace(1, 0.05, 8)
    for cls, model in models.items():
        called[cls](x).square().mean().backward()
        reduce.get(cls, among_all)(model)
        optimizers[cls].step()
        optimizers[cls].zero_grad()
    with torch.no_grad():
        teacher(x)
        for mean, weight in zip(average.parameters(), models[Copied].parameters(), strict=True):
            mean.lerp_(weight, 0.1)
        if rank == 0 and batch % 4 == 0:
            average(x)
        for weight in models[Local].parameters() if batch % 5 == 4 else ():
            dist.all_reduce(weight)
            weight /= ranks
dist.barrier()
dist.destroy_process_group()
