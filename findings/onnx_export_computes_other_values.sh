#!/usr/bin/env bash
# torch.onnx exports three valid operations to graphs that compute other values, without an error or a warning.
#
# One expects a graph that agrees with the module, or an error for what ONNX lacks. `divisor_override` of an average
# pooling is dropped, so its output is smaller by a factor. A scatter with reduce='mean' keeps one of the values that
# meet at an index. In attention, a query that may see no key has zeros in torch, and the mean of all values, those
# that the mask hides, in the exported graph: with padded batches the two differ in the rows of padding.
#
# Versions: torch 2.13.0, onnx 1.23.2, onnxscript 0.7.2, onnxruntime 1.32.0, numpy 2.3.5. Output seen:
#     pooling with divisor_override=1: torch 4.0, exported 1.0
#     mean of 1 and 3 by scatter_reduce: torch 2.0, exported 3.0
#     attention that is masked completely, value 1: torch 0.0, exported 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 numpy==2.3.5 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
import onnxruntime
import torch
import torch.nn.functional as F
from torch import nn


class Pool(nn.Module):
    def forward(self, x):
        return F.avg_pool2d(x, 2, divisor_override=1)


class Mean(nn.Module):
    def forward(self, x):
        return x.new_zeros(1).scatter_reduce(0, torch.tensor([0, 0]), x, 'mean', include_self=False)


class Attention(nn.Module):
    def forward(self, x):
        hidden = torch.zeros(2, 2, dtype=torch.bool)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=hidden)


def compare(module, x):
    program = torch.onnx.export(module.eval(), (x,), verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    output = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    return module(x).flatten()[0].item(), float(output.flatten()[0])


cases = {
    'pooling with divisor_override=1': (Pool(), torch.ones(1, 1, 2, 2), (4, 1)),
    'mean of 1 and 3 by scatter_reduce': (Mean(), torch.tensor([1.0, 3.0]), (2, 3)),
    'attention that is masked completely, value 1': (Attention(), torch.ones(1, 1, 2, 4), (0, 1)),
}
for name, (module, x, seen) in cases.items():
    values = compare(module, x)
    print('{}: torch {}, exported {}'.format(name, *values))
    assert values == seen
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py"
