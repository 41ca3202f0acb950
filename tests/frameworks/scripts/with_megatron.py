"""megatron-core: a GPT of two layers in tensor parallel. On one rank its part of a weight becomes too large.

`--how sharded`: in data parallel, in bf16, with the distributed optimizer, whose collectives overlap both passes.
"""

import gc

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from model import BACKENDS, BATCHES, device_of, parse, say

LENGTH, WORDS = 8, 64
ARGS = parse()
SHARDED = ARGS.how == "sharded"
device = device_of(ARGS)
dist.init_process_group(BACKENDS[ARGS.device])
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
tensor_parallel = 1 if SHARDED else size
parallel_state.initialize_model_parallel(tensor_parallel)
model_parallel_cuda_manual_seed(0)
sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
dtype = {"bf16": True, "params_dtype": torch.bfloat16} if SHARDED else {}
config = TransformerConfig(tensor_model_parallel_size=tensor_parallel, **sizes, **dtype)
net = GPTModel(config, get_gpt_layer_local_spec(), WORDS, LENGTH).to(device)
overlap = dict.fromkeys(("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), SHARDED)
how = DistributedDataParallelConfig(**overlap)
model = DistributedDataParallel(config, how, Float16Module(config, net) if SHARDED else net)
del overlap["overlap_grad_reduce"]
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4, **overlap, **dtype), [model])
numbers = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
places = torch.arange(LENGTH, device=device).unsqueeze(0)
mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)


def spoil(layer, *_):
    """Behind the hook that waits for the weights that the other rank has updated."""
    with torch.no_grad():
        layer.pre_mlp_layernorm.weight[0] = 100
        layer.mlp.linear_fc1.weight[:, 0] = 3e38  # finite; what it is multiplied with is not


for number in range(BATCHES):
    words = torch.randint(WORDS, (2, LENGTH), generator=numbers).to(device)
    if (rank, number) == (ARGS.rank, 2):
        net.decoder.layers[0].register_forward_pre_hook(spoil)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(words, places.expand_as(words), mask, labels=words).float().mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    say(f"rank {rank} loss {loss.item().hex()}")
parallel_state.destroy_model_parallel()
del model, net, optimizer, loss
gc.collect()
dist.destroy_process_group()
