"""The model summary: counts and shapes compared with closed forms, and the unchanged Learner."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, Learner
from learnkit.callbacks.model_summary import (
    Summary,
    dummy_eval,
    layer_info,
    model_sizes,
    num_features_model,
    summary,
)
from learnkit.checkpoint.compare import learn_digest
from learnkit.core.errors import ModelError
from learnkit.data.dataloaders import DataLoaders
from learnkit.testing import RegModel, synth_learner


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(8 * 64, 10),
    )


def digits(model: nn.Module | None = None, **kwargs: Any) -> Learner:
    x, y = torch.randn(40, 1, 8, 8), torch.randint(0, 10, (40,))
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=16)
    return Learner(dls, model or cnn(), nn.CrossEntropyLoss(), **kwargs)


def rows(s: Summary) -> list[tuple[str, str, int]]:
    return [(row.name, row.output, row.n_params) for row in s.layers]


def test_a_convolutional_network_as_text() -> None:
    model = cnn()
    model[0].requires_grad_(False)
    model[5].weight.requires_grad_(False)
    assert (
        str(summary(model, torch.zeros(16, 1, 8, 8)))
        == """\
Sequential: 16 x 1 x 8 x 8 -> 16 x 10
-------------------------------------------------------
Layer  Type         Output shape    Parameters  Trained
-------------------------------------------------------
0      Conv2d       16 x 8 x 8 x 8          80  no
1      BatchNorm2d  16 x 8 x 8 x 8          16  yes
2      ReLU         16 x 8 x 8 x 8
3      Flatten      16 x 512
4      Dropout      16 x 512
5      Linear       16 x 10              5,130  partly
-------------------------------------------------------
Total params: 5,226
Total trainable params: 26
Total non-trainable params: 5,200"""
    )


def test_counts_and_shapes_are_the_closed_forms() -> None:
    n, t, v, d, h = 4, 7, 50, 16, 24
    model = nn.ModuleDict({'emb': nn.Embedding(v, d), 'rnn': nn.LSTM(d, h, 2, batch_first=True)})

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts, self.out, self.idle = model, nn.Linear(h, v, bias=False), nn.Linear(3, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(model['rnn'](model['emb'](ids))[0])

    s = summary(LanguageModel(), torch.zeros(n, t, dtype=torch.int64))
    lstm = sum(4 * h * (inputs + h + 2) for inputs in (d, h))
    state = f'2 x {n} x {h}'
    assert rows(s) == [
        ('parts.emb', f'{n} x {t} x {d}', v * d),
        ('parts.rnn', f'({n} x {t} x {h}, ({state}, {state}))', lstm),
        ('out', f'{n} x {t} x {v}', h * v),
        ('idle', '', 3 * 2 + 2),
    ]
    assert s.n_params == s.n_trained == v * d + lstm + h * v + 8
    assert (s.input, s.output) == (f'{n} x {t}', f'{n} x {t} x {v}') and 'not called' in str(s)


def test_shared_layers_and_tied_weights_are_counted_once() -> None:
    shared, tied = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    tied.weight = shared.weight
    s = summary(nn.Sequential(shared, nn.ReLU(), shared, tied), torch.zeros(3, 4))
    assert rows(s) == [('0', '3 x 4', 20), ('1', '3 x 4', 0), ('3', '3 x 4', 0)]
    assert s.n_params == 20
    assert s.layers[0].n_calls == 2 and 'Linear x 2' in str(s)


def test_dict_inputs_and_outputs_are_named() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(9, 4)

        def forward(
            self, ids: Tensor, mask: Tensor, labels: Tensor | None = None
        ) -> dict[str, Any]:
            logits = (self.emb(ids) * mask[..., None]).sum(1)
            loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
            return {'loss': loss, 'logits': logits, 'cache': object()}

    ids = torch.zeros(5, 3, dtype=torch.int64)
    batch = {'ids': ids, 'mask': torch.ones(5, 3), 'labels': ids[:, 0], 'text': ['a'] * 5}
    s = Learner([batch], Named()).summary()
    assert s.input == '{ids: 5 x 3, mask: 5 x 3, labels: 5}'
    assert s.output == '{loss: scalar, logits: 5 x 4, cache: object}'
    assert (
        summary(Named(), {'ids': ids, 'mask': torch.ones(5, 3)}).output
        == '{logits: 5 x 4, cache: object}'
    )


# -- of a Learner


def test_the_summary_of_a_learner_describes_its_training() -> None:
    opt_func = partial(torch.optim.SGD, momentum=0.9)
    learn = digits(opt_func=opt_func, cbs=Callback(before_fit=lambda cb: None))
    text = str(learn.summary())
    assert text.startswith('Sequential: 16 x 1 x 8 x 8 -> 16 x 10\n')
    assert repr(learn.summary()) == text
    end = text[text.index('Total non') :].split('\n')
    assert end[:4] == [
        'Total non-trainable params: 0',
        '',
        'Optimizer used: SGD(momentum=0.9)',
        'Loss function: CrossEntropyLoss',
    ]
    assert end[4:7] == ['', 'Callbacks:', '  - TrainEvalCallback']
    assert len(end) == 6 + len(learn.cbs)
    assert learn.opt is None

    learn.create_opt()
    assert '\n\nModel unfrozen\n\n' in str(learn.summary())
    learn.opt.frozen_idx = 1
    assert '\n\nModel frozen up to parameter group #1\n\n' in str(learn.summary())
    assert 'Loss function: none' in str(Learner([(torch.zeros(2, 1),)], RegModel()).summary())


class Counting(nn.Module):
    "Counts forward passes in a buffer, also in evaluation, and draws a random number."

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.register_buffer('n', torch.zeros(()))
        self.register_buffer('last', torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.last = x.flatten()[:1]
        random.random()
        return x.flatten(1)[:, :10] * self.a + torch.rand(())


@pytest.mark.parametrize('kind', [cnn, Counting])
def test_nothing_is_disturbed(kind: Any) -> None:
    learn = digits(kind())
    learn.model.train()
    if kind is cnn:
        learn.model[1].eval()
    x = torch.randn(4, 1, 8, 8)
    before = learn_digest(learn), learn.opt, learn.logger, learn.loss_func
    learn.summary()
    assert (learn_digest(learn), learn.opt, learn.logger, learn.loss_func) == before
    summary(learn.model, x)
    assert learn_digest(learn) == before[0]


def test_loss_and_metrics_are_not_computed_and_callbacks_may_change_the_batch() -> None:
    def never(*args: Any) -> Tensor:
        raise AssertionError

    def flat(cb: Callback) -> None:
        cb.learn.xb = (cb.learn.x.flatten(1),)

    learn = digits(nn.Linear(64, 10), cbs=Callback(before_batch=flat), metrics=never)
    learn.loss_func = never
    assert learn.summary().input == '16 x 64'


# -- sizes


def test_sizes_of_the_children_are_the_closed_forms() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, stride=2))
    assert model_sizes(model, (20, 21)) == [(1, 4, 18, 19), (1, 4, 9, 9), (1, 8, 4, 4)]
    assert model_sizes(nn.Conv2d(6, 4, 1, groups=2), (5, 5)) == [(1, 4, 5, 5)]


def test_a_dummy_evaluation_is_on_noise_from_minus_one_to_one_and_in_evaluation_mode() -> None:
    seen: list[Tensor] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.training and not torch.is_grad_enabled()
            seen.append(x)
            return x

    model = nn.Sequential(Look(), nn.Conv2d(3, 8, 3, dtype=torch.float64))
    out = dummy_eval(model, (50, 60))
    assert out.shape == (1, 8, 48, 58)
    assert seen[0].dtype is torch.float64
    assert seen[0].shape == (1, 3, 50, 60)
    assert seen[0].min() < -0.99
    assert seen[0].max() > 0.99
    assert abs(seen[0].mean()) < 0.05
    assert seen[0].abs().max() <= 1
    assert model.training and not out.requires_grad


def test_num_features_model_tries_larger_images() -> None:
    assert num_features_model(nn.Sequential(nn.Conv2d(5, 4, 3), nn.Conv2d(4, 7, 1))) == 7
    assert num_features_model(nn.Sequential(nn.Conv2d(1, 4, 100), nn.Conv2d(4, 9, 1))) == 9
    with pytest.raises(ModelError, match='no 2-d convolution'):
        num_features_model(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(ModelError, match='ReLU'):
        model_sizes(nn.ReLU())


def test_layer_info_has_fastais_form() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    for p in model[0].parameters():
        p.requires_grad_(False)
    learn = synth_learner(model=model, dls=[(torch.zeros(4, 3), torch.zeros(4, 2))])
    assert layer_info(learn, torch.zeros(4, 3)) == [
        ('Linear', 12, False, torch.Size([1, 3]), True),
        ('ReLU', '', '', torch.Size([1, 3]), True),
        ('Linear', 8, True, torch.Size([1, 2]), False),
    ]
