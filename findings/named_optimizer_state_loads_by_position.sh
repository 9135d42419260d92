#!/usr/bin/env bash
# An optimizer that knows the names of its parameters loads a state by their position, and then has the wrong names.
#
# `torch.optim` takes `named_parameters()` and writes `param_names` into the state, so one expects that names match the
# state with the parameters, as they do for a module. The order alone decides: of two parameters in another order, each
# gets the momentum of the other one. The names come from the file as well, so what looks them up there (a log, a
# filter by name, the next checkpoint) takes each parameter for the other. No warning is issued.
#
# Versions: torch 2.13.0, numpy 2.4.6. Output seen:
#     saved: momentum of a is 1.0, of b 5.0
#     loaded with b before a: momentum of a is 5.0, of b 1.0; param_names ['a', 'b'] for the parameters b, a
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6 2> /dev/null
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch import nn

params = {name: nn.Parameter(torch.zeros(1)) for name in 'ab'}
params['a'].grad, params['b'].grad = torch.tensor([1.0]), torch.tensor([5.0])


def make(order):
    return torch.optim.SGD([(name, params[name]) for name in order], lr=0.1, momentum=0.9)


def momenta(opt):
    return [opt.state[params[name]]['momentum_buffer'].item() for name in 'ab']


old, new = make('ab'), make('ba')
old.step()
assert new.param_groups[0]['param_names'] == ['b', 'a']
new.load_state_dict(old.state_dict())
names = new.param_groups[0]['param_names']
print('saved: momentum of a is {}, of b {}'.format(*momenta(old)))
print('loaded with b before a: momentum of a is {}, of b {};'.format(*momenta(new)),
      f'param_names {names} for the parameters b, a')
assert momenta(old) == [1, 5] and momenta(new) == [5, 1]
assert names == ['a', 'b'] and new.param_groups[0]['params'][0] is params['b']
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py"
