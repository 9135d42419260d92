#!/usr/bin/env bash
# `step()` of an optimizer of HeavyBall sets the gradients to None.
#
# In torch, gradients stay until `zero_grad()`, so a loop may read them after the step (a norm to log, the gradients of
# frozen statistics) or step twice on the same gradients. Here `p.grad` is gone, and the second step moves nothing.
#
# Versions: heavyball 3.2.1, torch 2.13.0, numpy 2.3.5. Output seen:
#     torch.optim.SGD: gradient after the step 1.0, weight after two steps 0.8
#     heavyball.SGD: gradient after the step None, weight after two steps 0.9
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q heavyball==3.2.1 torch==2.13.0 numpy==2.3.5 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
import heavyball
import torch
from torch import nn

heavyball.utils.compile_mode = None
found = []
for name, kind in (('torch.optim.SGD', torch.optim.SGD), ('heavyball.SGD', heavyball.SGD)):
    weight = nn.Parameter(torch.ones(2, 2))
    opt = kind([weight], lr=0.1)
    weight.sum().backward()
    opt.step()
    grad = None if weight.grad is None else weight.grad[0, 0].item()
    opt.step()
    found.append((grad, round(weight[0, 0].item(), 4)))
    print(f'{name}: gradient after the step {grad}, weight after two steps {found[-1][1]}')
assert found == [(1, 0.8), (None, 0.9)]
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py"
