#!/usr/bin/env bash
# The Matthews coefficient of torchmetrics has values from -1 to 1 where the targets have one class and it is undefined.
#
# The denominator is 0 there, and scikit-learn, Wikipedia's definition and most papers take 0. torchmetrics gives 1, -1
# or a number between that rises with the accuracy, so that a validation set of one class, or the value of one batch
# that `forward` returns, looks like a strong correlation.
#
# Versions: torchmetrics 1.9.0, scikit-learn 1.7.2, torch 2.13.0, numpy 2.3.5. Output seen:
#     targets [1, 1, 1]; predictions [1, 1, 1]: 1, scikit-learn 0.0
#     targets [1, 1, 1]; predictions [0, 0, 0]: -1, scikit-learn 0.0
#     targets [1, 1, 1]; predictions [1, 0, 0]: -0.4082, scikit-learn 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torchmetrics==1.9.0 scikit-learn==1.7.2 torch==2.13.0 numpy==2.3.5 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
import torch
from sklearn.metrics import matthews_corrcoef
from torchmetrics.classification import BinaryMatthewsCorrCoef

target = [1, 1, 1]
found = []
for pred in ([1, 1, 1], [0, 0, 0], [1, 0, 0]):
    value = BinaryMatthewsCorrCoef()(torch.tensor(pred), torch.tensor(target)).item()
    expected = float(matthews_corrcoef(target, pred))
    print(f'targets {target}; predictions {pred}: {round(value, 4)}, scikit-learn {expected}')
    assert expected == 0
    found.append(round(value, 4))
assert found == [1, -1, -0.4082]
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py"
