#!/usr/bin/env bash
# `ToUndirected` of PyTorch Geometric doubles the edge weights of a graph that is undirected already, at each call.
#
# The transform is expected to leave such a graph as it is. It adds the reverse
# of each edge and sums the attributes of equal edges, and does not ask `is_undirected()` first. A list of transforms
# that has it twice, or a saved data set that is transformed again on loading, trains on other weights.
#
# Versions: torch_geometric 2.8.1, torch 2.13.0, numpy 2.4.6. Output seen:
#     is_undirected: True, weights [2.0, 2.0]
#     after one, two and three calls: [4.0, 4.0], [8.0, 8.0], [16.0, 16.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch_geometric==2.8.1 torch==2.13.0 numpy==2.4.6 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch_geometric.data import Data
from torch_geometric.transforms import ToUndirected

edges = torch.tensor([[0, 1], [1, 0]])
graph = Data(edge_index=edges, edge_attr=torch.tensor([2.0, 2.0]), num_nodes=2)
print(f'is_undirected: {graph.is_undirected()}, weights {graph.edge_attr.tolist()}')
assert graph.is_undirected()
found = []
for _ in range(3):
    graph = ToUndirected()(graph)
    assert torch.equal(graph.edge_index, edges)
    found.append(graph.edge_attr.tolist())
print('after one, two and three calls:', ', '.join(map(str, found)))
assert found == [[4, 4], [8, 8], [16, 16]]
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py"
