#!/usr/bin/env bash
# `reset` of one metric in a MetricCollection resets its neighbors too, or has no effect; the order of the names decides.
#
# Each metric is an object of its own, so one expects that it alone starts over. Metrics with equal state share the
# state of the first one from the second batch on: resetting the first one takes the data of the others, and
# resetting another one is undone by the next batch. With `compute_groups=False` it is as expected.
#
# Versions: torchmetrics 1.9.0, torch 2.13.0, numpy 2.3.5. Output seen (batches that each metric knows):
#     two batches, reset of a, one batch: {'a': 1, 'b': 1} (expected {'a': 1, 'b': 3})
#     two batches, reset of b, one batch: {'a': 3, 'b': 3} (expected {'a': 3, 'b': 1})
#     without groups: {'a': 1, 'b': 3}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torchmetrics==1.9.0 torch==2.13.0 numpy==2.3.5 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryPrecision, BinaryRecall

one = torch.tensor([1])  # a true positive in each batch


def count(name, groups):
    metrics = MetricCollection({'a': BinaryPrecision(), 'b': BinaryRecall()}, compute_groups=groups)
    metrics.update(one, one)
    metrics.update(one, one)
    metrics[name].reset()
    metrics.update(one, one)
    return {key: int(metrics[key].tp) for key in 'ab'}


first, second, alone = count('a', True), count('b', True), count('a', False)
print(f"two batches, reset of a, one batch: {first} (expected {{'a': 1, 'b': 3}})")
print(f"two batches, reset of b, one batch: {second} (expected {{'a': 3, 'b': 1}})")
print(f'without groups: {alone}')
assert first == {'a': 1, 'b': 1} and second == {'a': 3, 'b': 3} and alone == {'a': 1, 'b': 3}
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py"
