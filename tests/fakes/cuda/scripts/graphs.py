"""Trains the model of train.py, its forward and backward in a CUDA graph; gradients are reduced between the replays."""

import os

import torch
import torch.distributed as dist
from train import Net, parse


def main(args, rank, world_size):
    torch.cuda.set_device(rank)
    dist.init_process_group(args.backend)
    torch.manual_seed(0)
    net = Net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    inputs = (torch.rand(4, 8) + torch.arange(8.0)).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            net(inputs).pow(2).mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    net.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog queries its events
        loss = net(inputs).pow(2).mean()
        loss.backward()
    for replay in range(6):
        inputs.copy_(torch.rand(4, 8) + torch.arange(8.0))
        if rank == 1 and replay == 3 and args.fault == "forward":
            inputs.mul_(3e37)
        graph.replay()
        for weight in net.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        print(f"rank {rank} replay {replay} loss {loss.item()!r}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
