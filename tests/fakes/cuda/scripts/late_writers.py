"""Trains the model of train.py where gradients are reduced, sharded or copied on streams of others. Run under torchrun.

`--fault backward`: the gradient of `block.widen.weight` has an inf in one rank's batch.
"""

import os

import torch
import torch.distributed as dist
from poke import Poke
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from train import Net, parser_of_training

LATE = 20_000_000


class Late(torch.autograd.Function):
    """Holds up the backward's stream, so that what is computed behind it is late."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(LATE)
        return gradient.clone()


def ddp_view(net, device):
    return DistributedDataParallel(net, device_ids=[device], gradient_as_bucket_view=True)


def ddp_hook(net, device):
    model = DistributedDataParallel(net, device_ids=[device])
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def fsdp1(net, device):
    return FullyShardedDataParallel(net, device_id=device, use_orig_params=True)


def fsdp2(net, device, **more):
    fully_shard(net.block, **more)
    return fully_shard(net, **more)


def fsdp2_offload(net, device):
    return fsdp2(net.cpu(), device, offload_policy=CPUOffloadPolicy())


def reduces_at_once(net, device):
    """Each gradient is reduced where it lies as soon as it is there, and nobody waits before the step."""

    def reduce(weight):
        works.append(dist.all_reduce(weight.grad.div_(2), async_op=True))

    for weight in net.parameters():
        weight.register_post_accumulate_grad_hook(reduce)
    return net


WAYS = {
    "ddp-view": ddp_view,
    "ddp-hook": ddp_hook,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "fsdp2-offload": fsdp2_offload,
    "reduces-at-once": reduces_at_once,
}
works = []


def train(args, way, rank):
    torch.manual_seed(0)
    net = Net().cuda()
    net.block.widen.register_forward_hook(lambda module, given, found: Late.apply(Poke.apply(found)))
    model = WAYS[way](net, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    numbers = torch.Generator().manual_seed(rank)
    for batch in range(args.batches):
        inputs = torch.rand(4, 8, generator=numbers) + torch.arange(8.0)
        Poke.is_on = args.fault == "backward" and (rank, batch) == (args.rank, args.batch)
        loss = model(inputs.cuda()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        while works:
            works.pop().wait()
        optimizer.step()
        print(f"rank {rank} {way} batch {batch} loss {loss.item()!r}\n", end="", flush=True)


def main(args, rank):
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    for way in WAYS if args.way == "all" else [args.way]:
        train(args, way, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = parser_of_training()
    parser.add_argument("--way", choices=["all", *WAYS], default="all")
    main(parser.parse_args(), int(os.environ["RANK"]))
