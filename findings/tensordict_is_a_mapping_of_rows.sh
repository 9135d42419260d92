#!/usr/bin/env bash
# A TensorDict is a `collections.abc.Mapping`, but iterating over it gives rows, and its length is the number of rows.
#
# Code for mappings (`for key in batch: batch[key]`) is written for exactly what `isinstance(batch, Mapping)` promises:
# iteration gives the keys, of which there are `len(batch)`. `dict(batch)` does give the keys, since it asks `keys()`.
# torch's own `default_collate` and `default_convert` are such code: a DataLoader over a TensorDict needs another
# `collate_fn`, and the error says nothing of it.
#
# Versions: tensordict 0.14.3, torch 2.13.0, numpy 2.3.5. Output seen:
#     isinstance Mapping: True, len 3, keys ['id', 'x'], dict(...) has ['id', 'x']
#     iteration gives: TensorDict, TensorDict, TensorDict
#     default_convert: TypeError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensordict==0.14.3 torch==2.13.0 numpy==2.3.5 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch.utils.data import default_convert

rows = TensorDict({'id': torch.arange(3), 'x': torch.zeros(3, 4)}, batch_size=[3])
print(f'isinstance Mapping: {isinstance(rows, Mapping)}, len {len(rows)}, keys {sorted(rows.keys())}, '
      f'dict(...) has {sorted(dict(rows))}')
kinds = [type(row).__name__ for row in rows]
print('iteration gives:', ', '.join(kinds))
try:
    converted = default_convert(rows)
    result = type(converted).__name__
except Exception as e:
    result = type(e).__name__
print('default_convert:', result)
assert isinstance(rows, Mapping) and len(rows) == 3 and sorted(rows.keys()) == ['id', 'x']
assert sorted(dict(rows)) == ['id', 'x'] and kinds == ['TensorDict'] * 3
assert result == 'TypeError'
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py"
