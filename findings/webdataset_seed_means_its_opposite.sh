#!/usr/bin/env bash
# WebDataset's `seed=` is ignored where samples are drawn at random, and a shuffle without it is the same in each epoch.
#
# `WebDataset(..., shardshuffle=n)` draws its seed once, when it is made, by Python's global generator. All epochs have the
# same order of the shards, where one expects another order in each epoch, as `shuffle=True` of torch's DataLoader gives;
# `detshuffle=True` is needed for that. `resampled=True` with `seed=3` gives other shards in each run, where one expects
# the seed to repeat them: `seed` is not passed on. Seeding Python's, NumPy's and torch's generators does not help there.
#
# Versions: webdataset 1.0.2, numpy 2.3.5, torch 2.13.0. Output seen:
#     shardshuffle=8, no seed: two epochs in the same order: True
#     shardshuffle=8, detshuffle=True: two epochs in the same order: False, two runs: True
#     resampled=True, seed=3: two runs in the same order: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q webdataset==1.0.2 numpy==2.3.5 torch==2.13.0 2> /dev/null
cd "$folder"
cat > run.py <<'PYTHON'
import random
from itertools import islice

import numpy as np
import torch
import webdataset as wds

for shard in range(8):
    with wds.TarWriter(f'{shard}.tar') as tar:
        for i in range(4 * shard, 4 * shard + 4):
            tar.write({'__key__': f'{i:04}', 'id.cls': i})


def draw(**options):
    "Return the samples of two epochs."
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    data = wds.WebDataset('{0..7}.tar', **options).decode()
    return [[sample['id.cls'] for sample in islice(data, 32)] for _ in range(2)]


fixed = draw(shardshuffle=8)
print(f'shardshuffle=8, no seed: two epochs in the same order: {fixed[0] == fixed[1]}')
det, det_again = [draw(shardshuffle=8, detshuffle=True) for _ in range(2)]
print(f'shardshuffle=8, detshuffle=True: two epochs in the same order: {det[0] == det[1]}, '
      f'two runs: {det == det_again}')
drawn, drawn_again = [draw(resampled=True, shardshuffle=False, seed=3) for _ in range(2)]
print(f'resampled=True, seed=3: two runs in the same order: {drawn == drawn_again}')
assert fixed[0] == fixed[1] != list(range(32))
assert det[0] != det[1] and det == det_again
assert drawn != drawn_again
PYTHON
"$folder/venv/bin/python" -W ignore run.py
