#!/usr/bin/env bash
# OneCycleLR with linear annealing leaves a negative learning rate behind, and a momentum above `max_momentum`.
#
# A loop calls `scheduler.step()` after each of its `total_steps` batches. The schedule reaches its minimum in the last
# batch, and the call after it continues the line; cosine annealing turns back there. torch sets the values without a
# check and without a warning, so what reads the optimizer next (a log, a checkpoint, a second phase of training) gets
# a rate below 0, although the arguments allow none.
#
# Versions: torch 2.13.0, numpy 2.3.5. Output seen:
#     rates of the last two batches: 0.028572, 0.000000
#     after the last step: rate -0.028571, beta1 0.978571 (max_momentum is 0.95)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
import torch

p = torch.nn.Parameter(torch.zeros(1))
opt = torch.optim.Adam([p], lr=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    opt, max_lr=0.1, total_steps=5, anneal_strategy='linear', base_momentum=0.85, max_momentum=0.95
)
rates = []
for _ in range(5):
    rates.append(opt.param_groups[0]['lr'])
    p.grad = torch.zeros(1)
    opt.step()
    scheduler.step()
rate, beta = opt.param_groups[0]['lr'], opt.param_groups[0]['betas'][0]
print(f'rates of the last two batches: {rates[-2]:.6f}, {rates[-1]:.6f}')
print(f'after the last step: rate {rate:.6f}, beta1 {beta:.6f} (max_momentum is 0.95)')
assert rates[-1] > 0 > rate and beta > 0.95
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
