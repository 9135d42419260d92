"""The digest of a Learner differs after a change of anything that can change, and is equal after it was undone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import nn

from learnkit import Callback, Learner
from learnkit.checkpoint.compare import learn_digest, learn_state
from tests.learner.test_no_trace import make

CHANGES: dict[str, Callable[[Any], object]] = {
    'parameter': lambda learn: learn.model.first.weight.data.add_(1),
    'buffer': lambda learn: learn.model.changed.add_(1),
    'replaced buffer': lambda learn: setattr(learn.model, 'replaced', torch.ones(6)),
    'registered buffer': lambda learn: learn.model.register_buffer('new', torch.ones(1)),
    'buffer that is not persistent': lambda learn: learn.model.loose.add_(1),
    'extra state': lambda learn: learn.model.extra.box.seen.append(1),
    'attribute': lambda learn: setattr(learn.model, 'n', 7),
    'mode': lambda learn: learn.model.norm.train(not learn.model.norm.training),
    'requires_grad': lambda learn: learn.model.first.bias.requires_grad_(False),
    'gradient': lambda learn: setattr(learn.model.last.bias, 'grad', torch.ones(3)),
    'hook': lambda learn: learn.model.first.register_forward_pre_hook(noop),
    'generator of the model': lambda learn: torch.rand(1, generator=learn.model.rng),
    'generator of a loader': lambda learn: next(iter(learn.dls.train)),
    'global generator': lambda learn: torch.rand(1),
    'optimizer': lambda learn: learn.opt.set_hypers(lr=7.0),
    'counter': lambda learn: setattr(learn.parts.counters, 'samples', 7),
    'history': lambda learn: learn.history.append({'epoch': 9}),
    'state of a callback': lambda learn: learn.ema._averages['first.bias'].add_(1),
    'callback': lambda learn: learn.add_cb(Callback()),
    'switched off callback': lambda learn: setattr(learn.ema, 'run', False),
    'setting': lambda learn: setattr(learn, 'create_mbar', not learn.create_mbar),
    'file': lambda learn: (learn.path / 'new.txt').write_text('x'),
}


@pytest.mark.parametrize('name', CHANGES)
def test_each_change_is_seen(name: str, tmp_path: Path) -> None:
    learn = make(tmp_path)
    learn.fit(1)
    before = learn_digest(learn, tmp_path)
    assert learn_digest(learn, tmp_path) == before
    CHANGES[name](learn)
    assert learn_digest(learn, tmp_path) != before


def test_equal_runs_have_equal_digests(tmp_path: Path) -> None:
    digests = set()
    for folder in ('one', 'two'):
        learn = make(tmp_path / folder)
        learn.fit(2)
        digests.add(learn_digest(learn))
    assert len(digests) == 1


def test_lazy_layers_have_a_digest() -> None:
    x = torch.ones(4, 2)
    learn = Learner([(x, x[:, :1])], nn.Sequential(nn.LazyLinear(1)), nn.MSELoss())
    assert learn_state(learn)['model']['0.weight'] == 'UninitializedParameter'
    before = learn_digest(learn)
    learn.model(x)
    assert learn_digest(learn) != before
