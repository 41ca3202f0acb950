"""accelerate: `prepare`, gradient accumulation, clipping."""

import gc

import torch
from accelerate import Accelerator
from model import Net, batches, parse, say

ARGS = parse()
accelerator = Accelerator(cpu=ARGS.device == "cpu", gradient_accumulation_steps=2)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
model, optimizer = accelerator.prepare(model, optimizer)
for inputs in batches(accelerator.process_index, ARGS.rank):
    with accelerator.accumulate(model):
        loss = model(inputs.to(accelerator.device)).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    say(f"rank {accelerator.process_index} loss {loss.item().hex()}")
del model, optimizer, loss
gc.collect()
accelerator.end_training()
