"""Every feature that promises to leave no trace: do it, undo it, do it again, and compare everything that could move.

The model has what a forward pass can change: a buffer that is changed, one that is replaced and one that is registered
by it, extra state, attributes, a generator, draws from the global generators, and a forward hook that counts."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import Callback, DataLoaders, Learner, Replay
from learnkit.callbacks import EMA
from learnkit.callbacks.model_summary import layer_info
from learnkit.checkpoint.compare import learn_state
from learnkit.checkpoint.digest import WALL_CLOCK, differences
from learnkit.checkpoint.state import copy_to_host
from learnkit.debug.samples import measure_samples
from learnkit.metrics import accuracy
from tests.helpers.learners import quiet_learner

pytestmark = pytest.mark.filterwarnings('ignore:microbatch=.* on its own')


class Extra(nn.Module):
    "A layer with extra state that is kept in an object which no copy of attributes reaches."

    def __init__(self) -> None:
        super().__init__()
        self.box = Box()

    def get_extra_state(self) -> Any:
        return {'n': self.box.n, 'seen': self.box.seen}

    def set_extra_state(self, state: Any) -> None:
        self.box.n, self.box.seen = state['n'], state['seen']

    def forward(self, x: Tensor) -> Tensor:
        self.box.n += 1
        self.box.seen.append(len(x))
        return x


class Box:
    "An object of a class that nobody knows."

    def __init__(self) -> None:
        self.n, self.seen = 0, list[int]()


class Moves(nn.Module):
    "A classifier whose forward pass changes all that a forward pass can change."

    changed: Tensor
    replaced: Tensor

    def __init__(self, in_every_mode: bool) -> None:
        super().__init__()
        self.in_every_mode = in_every_mode
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.extra = Extra()
        self.register_buffer('changed', torch.zeros(6))
        self.register_buffer('replaced', torch.zeros(6))
        self.register_buffer('later', None)
        self.register_buffer('loose', torch.zeros(()), persistent=False)
        self.rng, self.numbers = torch.Generator().manual_seed(1), random.Random(1)
        self.n, self.sizes = 0, list[int]()
        self.hooked = 0
        self.norm.register_forward_hook(self.count)

    def count(self, norm: nn.Module, *given: Any) -> None:
        self.hooked += norm.training or self.in_every_mode

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.first(x))
        if self.training or self.in_every_mode:
            self.move(x.detach())
        return self.last(F.dropout(x.relu(), 0.1, self.training))

    def move(self, x: Tensor) -> None:
        self.extra(x)
        self.changed += x.mean(0) + torch.rand(6)
        self.replaced = self.replaced + x.std() + torch.rand(6, generator=self.rng)
        self.later = self.replaced * self.numbers.random()
        self.loose = self.loose + random.random() + float(np.random.rand())
        self.n += 1
        self.sizes.append(len(x))


def make(path: Path, in_every_mode: bool = False) -> Learner:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    dls = DataLoaders.from_tensors((x[:32], y[:32]), (x[32:], y[32:]), bs=8, device='cpu')
    cbs = [Replay(), EMA(0.5)]
    options = {'lr': 0.01, 'metrics': accuracy, 'path': path, 'cbs': cbs}
    return quiet_learner(dls, Moves(in_every_mode), nn.CrossEntropyLoss(), **options)


def noop(*given: Any, **named: Any) -> None:
    "Do nothing."


class Loss(nn.CrossEntropyLoss):
    "A loss function that counts its calls in a buffer that it replaces, and in extra state."

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.extra = Extra()
        self.register_buffer('n', torch.zeros(()))

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        self.n = self.n + 1
        self.extra(pred)
        return super().forward(pred, target)


# -- features that may run the model's forward pass, and undo what it changes -----------------------


def lr_find(learn: Learner) -> None:
    learn.lr_find(num_it=6, show_plot=False)
    learn.lr_search = None  # its result


def look(learn: Learner) -> None:
    "Read what can be read."
    for text in (learn, learn.dls, learn.summary(), learn.history, learn.opt):
        repr(text)
    learn.explain('after_batch')
    learn.explain_step()
    learn.metric_names()
    learn.gather_args()
    learn.show_training_loop()
    learn.callback_states()
    learn.checkpoint_state()
    dir(learn)


def use_contexts(learn: Learner) -> None:
    "Enter and leave each context in which nothing is trained."
    observer = Callback(before_fit=noop)
    with learn.no_logging(), learn.no_mbar(), learn.no_bar(), learn.loss_not_reduced():
        with learn.added_cbs(observer), learn.removed_cbs(learn.cbs[-1]), learn.trace():
            pass


def use_average(learn: Learner) -> None:
    with learn.ema.applied() as model:
        dict(model.named_parameters())


def load_state(learn: Learner) -> None:
    learn.load_checkpoint_state(learn.checkpoint_state())


EXTRA_FORWARDS: dict[str, Callable[[Learner], object]] = {
    'lr_find': lr_find,
    'check_resume': lambda learn: learn.check_resume(3, 1),
    'find_batch_size': lambda learn: learn.find_batch_size(max_size=8),
    'summary': lambda learn: learn.summary(),
    'layer_info': lambda learn: layer_info(learn, torch.ones(4, 4)),
    'report': lambda learn: learn.report(learn.path.parent.parent / 'r', predictions=False),
    'save_learner': lambda learn: learn.save_learner(learn.path.parent.parent / 'm.pth'),
    'replay': lambda learn: learn.replay(),
    'average': use_average,
    'look': look,
    'contexts': use_contexts,
    'batches': lambda learn: [learn.dls.one_batch(), learn.dls.show_batch()],
    'save': lambda learn: learn.save('weights', with_opt=learn.opt is not None),
    'load_checkpoint_state': load_state,
}
NEED_A_FIT = 'replay', 'average'
# real evaluations, which leave what the model's forward pass changes in evaluation mode
EVALUATIONS: dict[str, Callable[[Learner], object]] = {
    'validate': lambda learn: learn.validate(),
    'get_preds': lambda learn: learn.get_preds(),
    'get_preds of training data': lambda learn: learn.get_preds(dl=learn.dls.train),
    'export': lambda learn: learn.export(learn.path.parent.parent / 'm.pt2'),
    'predict_iter': lambda learn: list(learn.predict_iter()),
    'predict_iter, left early': lambda learn: next(iter(learn.predict_iter())),
    'predict': lambda learn: learn.predict(torch.ones(4)),
    'tta': lambda learn: learn.tta(n=1, augment=lambda x: x + torch.rand(x.shape)),
    'show_results': lambda learn: learn.show_results(),
    'report with predictions': lambda learn: learn.report(learn.path.parent.parent / 'r'),
}


def check(
    path: Path,
    feature: Callable[[Learner], object],
    trained: bool,
    leave_out: Any = WALL_CLOCK,
    **options: Any,
) -> None:
    "Use a feature twice, compare everything after each, and then a fit with a fit without it."
    learn, other = (make(path / name / 'run', **options) for name in ('one', 'two'))
    if trained:
        for each in (learn, other):
            scramble(3)
            each.fit(1)
    scramble(4)
    for number in ('first', 'second'):
        before, objects = copy_to_host(learn_state(learn)), list_objects(learn)
        feature(learn)
        found = differences(before, learn_state(learn), leave_out)
        assert not found, '\n'.join([f'after the {number} time:', *found])
        moved = [k for k, o in list_objects(learn).items() if o is not objects.get(k)]
        assert not moved, f'other objects after the {number} time: {moved}'
    for each in (learn, other):
        scramble(5)
        each.fit(1)
    found = differences(copy_to_host(learn_state(other)), learn_state(learn))
    assert not found, '\n'.join(['after the next fit:', *found])


def scramble(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def list_objects(learn: Learner) -> dict[str, Any]:
    "Return the objects that must be the same ones, by name."
    named = [*learn.model.named_parameters(), *learn.model.named_buffers()]
    parts = {name: getattr(learn, name) for name in ('model', 'loss_func', 'opt', 'logger', 'dls')}
    return {**parts, **dict(named), **{f'cb {i}': cb for i, cb in enumerate(learn.cbs)}}


@pytest.mark.parametrize('trained', [True, False], ids=['trained', 'new'])
@pytest.mark.parametrize('name', EXTRA_FORWARDS)
def test_an_extra_forward_pass_leaves_no_trace(name: str, trained: bool, tmp_path: Path) -> None:
    if not trained and name in NEED_A_FIT:
        pytest.skip('needs a batch or a step')
    check(tmp_path, EXTRA_FORWARDS[name], trained, in_every_mode=True)


@pytest.mark.parametrize('trained', [True, False], ids=['trained', 'new'])
@pytest.mark.parametrize('name', EVALUATIONS)
def test_an_evaluation_leaves_no_trace(name: str, trained: bool, tmp_path: Path) -> None:
    # the values of the latest evaluation
    result = ['callbacks.recorder.open.measured*'] if name == 'validate' else []
    check(tmp_path, EVALUATIONS[name], trained, [*WALL_CLOCK, *result])


def only_of_classes(pred: Tensor, targ: Tensor) -> Tensor:
    "A metric that fails on the targets of training, so that it is tried on a batch of validation."
    if targ.is_floating_point():
        raise ValueError('soft targets')
    return (pred.argmax(1) == targ).float().mean()


@pytest.mark.parametrize('options', [{}, {'microbatch': 4}], ids=['batches', 'microbatches'])
def test_the_checks_of_a_fit_leave_no_trace(options: Any, tmp_path: Path) -> None:
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    soft = F.one_hot(y, 3).float()
    dls = DataLoaders.from_tensors((x[:32], soft[:32]), (x[32:], y[32:]), bs=8, device='cpu')
    learn = quiet_learner(
        dls, Moves(in_every_mode=True), Loss(), metrics=only_of_classes, **options
    )
    learn.fit(2)
    n = 2 * (4 * (2 if options else 1) + 1)  # 4 batches of training and 1 of validation
    model, loss = learn.model, learn.loss_func
    assert (model.n, model.hooked, model.extra.box.n, len(model.sizes)) == (n,) * 4
    assert (float(loss.n), loss.extra.box.n) == (n, n)


# -- within a fit ----------------------------------------------------------------------------------

WITHIN_A_FIT: dict[str, tuple[bool, Callable[[Learner], object]]] = {
    'summary': (True, EXTRA_FORWARDS['summary']),
    'layer_info': (True, EXTRA_FORWARDS['layer_info']),
    'report': (True, EXTRA_FORWARDS['report']),
    'samples': (True, measure_samples),
    'validate': (False, EVALUATIONS['validate']),
    'get_preds': (False, EVALUATIONS['get_preds']),
    'predict': (False, EVALUATIONS['predict']),
    'report with predictions': (False, EVALUATIONS['report with predictions']),
}


@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_batch', 'after_epoch'])
@pytest.mark.parametrize('name', WITHIN_A_FIT)
def test_an_observer_leaves_no_trace(name: str, event: str, tmp_path: Path) -> None:
    if name == 'samples' and event != 'before_batch':
        pytest.skip('needs a batch')
    in_every_mode, feature = WITHIN_A_FIT[name]

    def observe(cb: Any) -> None:
        if cb.learn.run.depth == 1 and (cb.learn.training or event == 'after_epoch'):
            feature(cb.learn)

    ends = []
    for folder, act in (('one', noop), ('two', observe)):
        learn = make(tmp_path / folder / 'run', in_every_mode)
        learn.add_cb(Callback(**{event: act}))
        scramble(6)
        learn.fit(2)
        ends.append(copy_to_host(learn_state(learn)))
    found = differences(*ends)
    assert not found, '\n'.join(found)
