#!/usr/bin/env bash
# A parameter of torch that is not initialized yet has `ndim` 1, while its `shape` raises an error.
#
# The usual rule for weight decay ("no decay for parameters with p.ndim < 2", as in nanoGPT and timm) then sorts the
# weight matrices of lazy layers with the biases if the optimizer is made before the first forward pass, which torch's
# documentation of lazy modules recommends. No error is raised, and after the forward pass the groups stay as they are.
#
# Versions: torch 2.13.0, numpy 2.3.5. Output seen:
#     before the first forward pass: ndim 1, shape raises RuntimeError
#     after it: ndim 2, shape (4, 3), decayed: [], not decayed: ['weight', 'bias']
#     weight after a step with lr=0.1, weight_decay=0.5 and zero gradients: 1.0 of it (0.95 expected)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch import nn

layer = nn.LazyLinear(4)
decayed = [p for p in layer.parameters() if p.ndim >= 2]
rest = [p for p in layer.parameters() if p.ndim < 2]
try:
    shape = layer.weight.shape
except RuntimeError:
    shape = 'raises RuntimeError'
print(f'before the first forward pass: ndim {layer.weight.ndim}, shape {shape}')
assert layer.weight.ndim == 1 and shape == 'raises RuntimeError'

groups = [{'params': rest, 'weight_decay': 0.0}]
if decayed:
    groups.append({'params': decayed, 'weight_decay': 0.5})
opt = torch.optim.AdamW(groups, lr=0.1)
layer(torch.zeros(2, 3)).sum().mul(0).backward()
names = {id(p): name for name, p in layer.named_parameters()}
found = [[names[id(p)] for p in params] for params in (decayed, rest)]
shape = tuple(layer.weight.shape)
print(f'after it: ndim {layer.weight.ndim}, shape {shape}, decayed: {found[0]}, not decayed: {found[1]}')
assert layer.weight.ndim == 2 and found == [[], ['weight', 'bias']]

before = layer.weight.detach().clone()
opt.step()
left = (layer.weight / before).mean().item()
print(f'weight after a step with lr=0.1, weight_decay=0.5 and zero gradients: {left} of it (0.95 expected)')
assert left == 1.0
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
