#!/usr/bin/env bash
# `nn.RReLU` in a checkpointed part of a model has wrong gradients, without an error or a warning.
#
# One expects the gradients of the model without checkpointing, as of dropout, whose random numbers are drawn again.
# RReLU draws random slopes in the forward pass, and reads them in the backward pass. With checkpointing, gradients of
# 1e+35, of 1e-33 or NaN were seen, as if it read a tensor that was not filled. Two runs differ; the loss and the outputs
# are right.
#
# Versions: torch 2.13.0, numpy 2.3.5. Output seen:
#     gradient without checkpointing: 0.3200
#     gradients with checkpointing differ from it: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def gradient(checkpointed):
    torch.manual_seed(0)
    layer, weight, x = nn.RReLU(), nn.Parameter(torch.ones(1)), torch.randn(8, 6)
    y = x * weight
    out = checkpoint(layer, y, use_reentrant=False) if checkpointed else layer(y)
    out.mean().backward()
    return out.mean().item(), weight.grad.item()


loss, alone = gradient(False)
again = [gradient(True) for _ in range(5)]
print(f'gradient without checkpointing: {alone:.4f}')
differ = [not abs(value - alone) < 1e-3 for _, value in again]
print(f'gradients with checkpointing differ from it: {all(differ)}')
assert all(differ) and all(abs(value - loss) < 1e-6 for value, _ in again)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py"
