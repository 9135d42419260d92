"""The learning rate finder: its suggestions, and the restored Learner."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learnkit import SGD, Callback, DataLoaders, Learner
from learnkit.callbacks.schedule import LRScheduler, ParamScheduler, SchedNo
from learnkit.core.errors import FitError
from learnkit.engine.events import EVENTS
from learnkit.testing import synth_learner


class Ema(Callback):
    "A user's callback with many kinds of state and no `state_dict`."

    run_valid = False

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}
        self.average = nn.Linear(2, 2)
        self.calls, self.seen, self.array = 0, [0], np.zeros(3)
        self.random = random.Random(1)
        self.generator = torch.Generator()
        self.numpy = np.random.default_rng(0)

    def after_batch(self) -> None:
        for name, p in self.learn.model.named_parameters():
            self.shadow.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.1)
        with torch.no_grad():
            self.average.weight.add_(1)
        self.calls += 1
        self.seen.append(
            self.random.randrange(9) + int(torch.randint(9, (1,), generator=self.generator))
        )
        self.array += self.numpy.random()
        self.added_later = self.calls


class Net(nn.Module):
    "A model with dropout, batch norm, a module in evaluation mode, a frozen layer and a counter of calls."

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.frozen, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1)
        self.calls, self.hidden = 0, [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.training:
            self.hidden[0] = self.hidden[0] + 1
        return self.head(self.frozen(self.body(x)))


def groups(model: Net) -> list[list[nn.Parameter]]:
    return [[*model.body.parameters()], [*model.head.parameters()]]


def two_optimizers(params: Any, lr: float) -> dict[str, torch.optim.Optimizer]:
    first, second = (list(g['params']) for g in params)
    return {
        'body': torch.optim.SGD(first, lr=lr, momentum=0.9),
        'head': torch.optim.Adam(second, lr=lr),
    }


def data(dtype: torch.dtype) -> Any:
    x = torch.randn(40, 4, dtype=dtype)
    return DataLoaders.from_tensors((x, x.sum(1, keepdim=True)), (x, x[:, :1]), bs=8)


def learner(
    opt_func: Any = torch.optim.Adam, dtype: Any = torch.float32, cbs: Any = (), **kwargs: Any
) -> Learner:
    model = Net().to(dtype)
    dls = data(dtype)
    learn = Learner(
        dls, model, nn.MSELoss(), opt_func, lr=0.01, splitter=groups, cbs=[Ema, *cbs], **kwargs
    )
    learn.logger = quiet
    return learn


def quiet(row: Any) -> None:
    "Show nothing."


# ------------------------------------------------------------------------------- a digest of it all

# the result, and what is made from the rest
OWN = 'lr_search callbacks tables lock loss_weights'.split()


def digest(learn: Learner) -> dict[str, str]:
    "Return the SHA-256 of everything reachable from a Learner and of every random generator, by path."
    # with each object, so that its id stays its own
    found, numbers = dict[str, str](), dict[int, tuple[str, Any]]()

    def note(where: str, content: bytes) -> None:
        found[where] = hashlib.sha256(content).hexdigest()[:16]

    def add(where: str, o: Any) -> None:
        if isinstance(o, (bool, int, float, str, type(None), type)):
            return note(where, repr(o).encode())
        if isinstance(o, torch.Generator):
            return note(where, o.get_state().numpy().tobytes())
        if isinstance(o, random.Random):
            return note(where, repr(o.getstate()).encode())
        if isinstance(o, np.random.Generator):
            return note(where, repr(o.bit_generator.state).encode())
        if id(o) in numbers:
            return note(where, f'the same as {numbers[id(o)][0]}'.encode())
        numbers[id(o)] = where, o
        if isinstance(o, Tensor):
            kind = f'{id(o) if isinstance(o, nn.Parameter) else ""} {o.requires_grad} {o.dtype} {tuple(o.shape)}'
            note(where, kind.encode() + o.detach().cpu().numpy().tobytes())
            if o.is_leaf:
                add(f'{where}.grad', o.grad)
        elif isinstance(o, np.ndarray):
            note(where, o.tobytes())
        elif isinstance(o, dict):
            content = repr(
                sorted(str(k if isinstance(k, str) else id(k)) for k in o if k not in OWN)
            ).encode()
            note(where, content)
            for i, (k, v) in enumerate(o.items()):
                if k not in OWN:
                    add(f'{where}.{k if isinstance(k, str) else i}', v)
        elif isinstance(o, (list, tuple, set)):
            note(where, f'{type(o)} of {len(o)}'.encode())
            for i, v in enumerate(o):
                add(f'{where}.{i}', v)
        if isinstance(vars_of(o), dict):
            add(f'{where}.', vars_of(o))

    add('learn', vars(learn))
    for i, cb in enumerate(learn.cbs):
        add(f'{i} {cb.name}', cb)
    add('random', [torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()])
    return found


def vars_of(o: Any) -> Any:
    return None if callable(o) and hasattr(o, '__qualname__') else getattr(o, '__dict__', None)


@contextmanager
def assert_unchanged(learn: Learner, folder: Path | None = None) -> Iterator[None]:
    learn.recorder.steps.columns()  # a reader moves steps from rows to columns
    before = digest(learn)
    yield
    learn.recorder.steps.columns()
    assert digest(learn) == before
    if folder:
        assert not list(folder.rglob('*'))


# ---------------------------------------------------------------------------- nothing is left of it


@pytest.mark.parametrize('trained', [False, True])
@pytest.mark.parametrize(
    'opt_func', [torch.optim.Adam, partial(SGD, mom=0.9, wd=0.1), two_optimizers]
)
def test_everything_is_as_before(
    opt_func: Any, trained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    learn = learner(opt_func, path=tmp_path)
    if trained:
        learn.fit(1)
    learn.model.eval()
    with assert_unchanged(learn, tmp_path):
        learn.lr_find(num_it=12, show_plot=False)
    assert (learn.opt is None) is not trained and learn.lr_search is not None


FIRED = [
    e
    for e in EVENTS
    if e not in ('after_create', 'before_load', 'after_load', 'close', 'post_close')
]
EARLY = ('before_fit', 'before_epoch', 'before_train')
NOT_HERE = ('valid', 'eval', 'predict', 'iteration', 'cancel', 'error')


@pytest.mark.parametrize(
    ('error', 'trained'),
    [
        (KeyboardInterrupt, False),
        (ValueError, True),
    ],
)
def test_an_error_at_any_event_leaves_nothing_either(
    error: type[BaseException], trained: bool, tmp_path: Path
) -> None:
    hit = set()
    for name in FIRED:
        learn = learner(path=tmp_path)
        if trained:
            learn.fit(1)

        def stop(cb: Any, name: str = name) -> None:
            if cb.train_iter < 3 and name not in EARLY:
                return
            hit.add(name)
            raise error('stop')

        learn.add_cb(Callback(**{name: stop}))
        with assert_unchanged(learn, tmp_path), suppress(error):
            learn.lr_find(num_it=6, show_plot=False)
        if name not in hit:
            continue
        learn.remove_cbs([cb for cb in learn.cbs if type(cb) is Callback])
        learn.fit(1)
        assert len(learn.history) == 1 + trained
    expected = {e for e in FIRED if not any(part in e for part in NOT_HERE)} | {'after_cancel_fit'}
    assert hit == expected


def test_callbacks_that_are_not_to_look_are_left_out_and_keep_their_places() -> None:
    class Saver(Callback):
        remove_on_find, order = True, 60

        def before_fit(self) -> None:
            raise AssertionError

    class Old(Callback):
        def before_fit(self) -> None:
            self.run = not hasattr(self, 'lr_finder')

        def after_batch(self) -> None:
            raise AssertionError

    plateau = LRScheduler(torch.optim.lr_scheduler.ReduceLROnPlateau)
    learn = synth_learner(cbs=[Saver, Old, ParamScheduler({'lr': SchedNo(5.0, 5.0)}), plateau])
    with assert_unchanged(learn):
        learn.lr_find(num_it=8, show_plot=False)
    assert learn.lr_search.lrs[0] == 1e-7 and [type(cb) for cb in learn.cbs[3:5]] == [Saver, Old]


def test_a_running_fit_is_not_disturbed() -> None:
    errors = []

    def find(cb: Any) -> None:
        before = digest(cb.learn)
        with pytest.raises(FitError):
            cb.learn.lr_find()
        errors.append(digest(cb.learn) == before)

    learn = synth_learner(n_train=2, cbs=Callback(after_batch=find))
    learn.logger = quiet
    learn.fit(1)
    assert errors and all(errors)
