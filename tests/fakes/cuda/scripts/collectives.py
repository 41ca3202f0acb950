"""Two ranks on two devices: each collective over NCCL against the same over gloo on the CPU. Run under torchrun."""

import os

import torch
import torch.distributed as dist

LARGE = 700_001
"""Elements: more than one piece of the stand-in's shared memory."""


def all_reduce(x, group, how=dist.ReduceOp.SUM):
    y = x.clone()
    dist.all_reduce(y, how, group=group)
    return y


def all_gather(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts)


def reduce_scatter(x, group):
    parts = list((x + 0).chunk(dist.get_world_size(group))) if x.numel() % 2 == 0 else [x, x + 1]
    y = torch.empty_like(parts[0])
    dist.reduce_scatter(y, [part.contiguous() for part in parts], group=group)
    return y


def broadcast(x, group):
    y = x.clone()
    dist.broadcast(y, 1, group=group)
    return y


def gather(x, group):
    parts = [torch.empty_like(x) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(x, parts, 0, group=group)
    return torch.cat(parts) if parts else x


def all_to_all(x, group):
    parts, found = [x, x + 1], [torch.empty_like(x) for _ in range(2)]
    dist.all_to_all(found, parts, group=group)
    return torch.cat(found)


def exchange(x, group):
    """Both send first: they must not wait for each other."""
    y, peer = torch.empty_like(x), 1 - dist.get_rank()
    work = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, y, peer, group)]
    for each in dist.batch_isend_irecv(work):
        each.wait()
    return y


def main():
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    cpu = dist.new_group(backend="gloo")
    part = dist.new_group([0, 1], backend="nccl", use_local_synchronization=False)
    calls = [all_reduce, all_gather, reduce_scatter, broadcast, gather, exchange]
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        for number in (1, 10, LARGE):
            x = ((torch.arange(number) * 7 + rank * 3) % 11).to(dtype)
            for call in calls:
                expected, found = call(x, cpu), call(x.to(device), part)
                assert torch.equal(found.cpu(), expected), (call.__name__, dtype, number)
            others = ((torch.arange(number) * 7 + (1 - rank) * 3) % 11).to(dtype)
            expected = [x, others] if rank == 0 else [others + 1, x + 1]
            assert torch.equal(all_to_all(x.to(device), part).cpu(), torch.cat(expected)), (dtype, number)
    x = torch.full((3,), 40000.0, dtype=torch.float16, device=device)
    assert all_reduce(x, part).tolist() == [float("inf")] * 3
    assert all_reduce(x, part, dist.ReduceOp.MAX).tolist() == [40000.0] * 3
    assert all_reduce(x / 100 * (rank + 1), part, dist.ReduceOp.AVG).tolist() == [600.0] * 3
    dist.barrier()
    print(f"rank {rank}: all equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
