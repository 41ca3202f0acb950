"""The square root's derivative at 0 is inf, in the second of three batches; the backward is compiled as a whole."""

import torch
from compiled_scripts import Plain, batch_of, compiled_autograd

model = Plain()
call = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(3):
    output = call(batch_of(number)) * (number != 1)
    with compiled_autograd():
        (output.abs().sum() + 1).sub(1).sqrt().backward()
    optimizer.step()
    optimizer.zero_grad()
