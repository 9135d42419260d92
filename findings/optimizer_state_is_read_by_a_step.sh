#!/usr/bin/env bash
# `get_optimizer_state_dict` before the first step changes the training that follows.
#
# A getter is expected to read. An optimizer without state is made to take a step with zero gradients and a rate of 0,
# and the state that this step leaves stays in the optimizer: Adam corrects its bias for one step more, dampened SGD
# has a first gradient of 0 in its average, and Rprop has lost its step size. The weights stay and no warning
# appears. A program that reads the state as a template for `dcp.load`, finds no checkpoint and starts, trains differently.
#
# Versions: torch 2.13.0, numpy 2.3.5. Output seen:
#     first step of Adam: 0.1 without the call, 0.0744 after it (steps counted: 1, 2)
#     first step of SGD with dampening 0.5: 0.1 without the call, 0.05 after it (steps counted: none)
#     first step of Rprop: 0.1 without the call, 1e-06 after it (steps counted: 1, 2)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_step(make, read):
    "Return how far the first step moves a weight, and the steps that the optimizer has counted."
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt = make(model.parameters())
    before = model.weight.item()
    if read:
        get_optimizer_state_dict(model, opt)
        assert model.weight.item() == before
    model.weight.grad = torch.ones(1, 1)
    opt.step()
    count = opt.state[model.weight].get('step')
    return abs(model.weight.item() - before), None if count is None else int(count)


kinds = {
    'Adam': lambda params: torch.optim.Adam(params, lr=0.1),
    'SGD with dampening 0.5': lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, dampening=0.5),
    'Rprop': lambda params: torch.optim.Rprop(params, lr=0.1),
}
for name, make in kinds.items():
    (alone, n), (after, n_after) = first_step(make, False), first_step(make, True)
    counted = 'none' if n is None else f'{n}, {n_after}'
    print(f'first step of {name}: {alone:.3g} without the call, {after:.3g} after it (steps counted: {counted})')
    assert abs(alone - 0.1) < 1e-5 and after < 0.08
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py"
