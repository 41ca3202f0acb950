"""Draws a token as a language model does. In one batch the probabilities are nan, and the device asserts."""

import torch
from torch import nn
from train import parser_of_training

args = parser_of_training().parse_args()
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(args.device)
with torch.no_grad():
    net[0].weight.fill_(1)  # drawn ones may cancel out, and 3e38 times their sum is finite then
for batch in range(args.batches):
    if batch == args.batch:
        with torch.no_grad():
            net[1].weight.fill_(3e38)  # finite; sums of it are not
    logits = net(torch.ones(2, 8, device=args.device))
    print("rank 0 token", torch.multinomial(logits.softmax(-1), 1).tolist())
