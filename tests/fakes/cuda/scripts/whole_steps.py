"""Trains the model of train.py with DDP: a CUDA graph has the whole step, DDP's reductions included."""

import hashlib
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from train import Net, parse

WARM_UP, REPLAYS = 11, 6
"""As torch's documentation has it for DDP"""


def main(args, rank, world_size):
    torch.cuda.set_device(rank)
    dist.init_process_group(args.backend)
    torch.manual_seed(0)
    net = Net().cuda()
    inputs = (torch.rand(4, 8) + torch.arange(8.0)).cuda()
    scale = torch.ones(1, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model = torch.nn.parallel.DistributedDataParallel(net, device_ids=[rank])
    if args.fault == "reduction":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = (model(inputs).pow(2) * scale).mean()
        loss.backward()
        optimizer.step()
        return loss

    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    numbers = torch.Generator().manual_seed(rank)
    graph = torch.cuda.CUDAGraph()
    stream = None if args.own_stream else side
    with torch.cuda.graph(
        graph, stream=stream, capture_error_mode="thread_local"
    ):  # NCCL's watchdog queries its events
        loss = step()
    for replay in range(REPLAYS):
        inputs.copy_(torch.rand(4, 8, generator=numbers) + torch.arange(8.0))
        if rank == 1 and replay == 3:
            if args.fault == "forward":
                inputs.mul_(3e37)
            elif args.fault in ("backward", "reduction"):  # in the reduction: finite, and too large for fp16
                scale.fill_(3e38 if args.fault == "backward" else 1e8)
        graph.replay()
        print(f"rank {rank} replay {replay} loss {loss.item()!r}\n", end="", flush=True)
    weights = b"".join(weight.detach().cpu().numpy().tobytes() for weight in net.parameters())
    print(f"rank {rank} weights {hashlib.sha256(weights).hexdigest()[:16]}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
