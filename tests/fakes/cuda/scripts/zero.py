"""DeepSpeed's ZeRO trains the model of train.py, some times in a row. Run under torchrun.

With `--fault backward`, the gradient of `block.widen.weight` has an inf in one rank's batch of the last training.
"""

import gc
import os

import deepspeed
import torch
from poke import Poke, Poked
from train import Net, parser_of_training


def train(args, rank, is_last):
    torch.manual_seed(0)
    net = Net()
    net.block.widen.__class__ = Poked
    zero = {"stage": args.stage, "overlap_comm": not args.no_overlap}
    zero |= {"reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}  # by default a bucket has 2 GB
    if args.stage == 3 and args.release:
        zero["stage3_param_persistence_threshold"] = 0
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        },
    )
    numbers = torch.Generator().manual_seed(rank)
    for batch in range(args.batches):
        inputs = torch.rand(4, 8, generator=numbers) + torch.arange(8.0)
        Poke.is_on = is_last and args.fault == "backward" and (rank, batch) == (args.rank, args.batch)
        loss = engine(inputs.cuda()).pow(2).mean()
        engine.backward(loss)
        engine.step()
        print(f"rank {rank} batch {batch} loss {loss.item()!r}\n", end="", flush=True)
    engine.destroy()


def main(args):
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    deepspeed.init_distributed("nccl")
    for training in range(args.trainings):
        train(args, rank, training == args.trainings - 1)
        gc.collect()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = parser_of_training()
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--release", action="store_true", help="small weights are gathered for each use, too")
    parser.add_argument("--trainings", type=int, default=1)
    main(parser.parse_args())
