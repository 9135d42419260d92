#!/usr/bin/env bash
# A loader of PyTorch Geometric changes the values of an attribute if its name has `batch` in it.
#
# Attributes of graphs are expected to be concatenated as they are; names with `index` are the known exception, for
# indices of nodes. Any name that contains "batch" (`batch_id`, `minibatch`) is taken for a vector
# of assignments: to the values of each graph, the largest value plus one of every graph before it is added. A label by
# which samples are traced is silently another one, except in the first graph.
#
# Versions: torch_geometric 2.8.1, torch 2.13.0, numpy 2.3.5. Output seen:
#     three graphs with sample_id=7, batch_id=7: sample_id [7, 7, 7], batch_id [7, 15, 23]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch_geometric==2.8.1 torch==2.13.0 numpy==2.3.5 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

number = torch.tensor([7])
graphs = [Data(x=torch.zeros(3, 1), sample_id=number, batch_id=number) for _ in range(3)]
batch = next(iter(DataLoader(graphs, batch_size=3)))
sample, shifted = batch.sample_id.tolist(), batch.batch_id.tolist()
print(f'three graphs with sample_id=7, batch_id=7: sample_id {sample}, batch_id {shifted}')
assert sample == [7, 7, 7] and shifted == [7, 15, 23]
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py"
