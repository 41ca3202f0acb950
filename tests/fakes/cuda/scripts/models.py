"""Trains a transformer of no size, with dropout. Run under torchrun, with gpuwatch or without: it prints the same."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
import transformers

SIZES = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": 64}


def gpt2():
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes, **SIZES))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(use_cache=False, **sizes, **SIZES))


def train(args, rank, world_size):
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    if world_size > 1:
        dist.init_process_group(args.backend)
    torch.manual_seed(0)
    net = {"gpt2": gpt2, "t5": t5}[args.model]().to(args.device).train()
    model = torch.nn.parallel.DistributedDataParallel(net) if world_size > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    numbers = torch.Generator().manual_seed(rank)
    for step in range(5):
        x = torch.randint(1, 64, (2, 8), generator=numbers).to(args.device)
        loss = model(input_ids=x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}\n", end="", flush=True)
    weights = b"".join(weight.detach().cpu().numpy().tobytes() for weight in net.parameters())
    print(f"rank {rank} weights {hashlib.sha256(weights).hexdigest()[:16]}\n", end="", flush=True)
    if world_size > 1:
        del model, optimizer
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--model", choices=["gpt2", "t5"], required=True)
    train(parser.parse_args(), int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
