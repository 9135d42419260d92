"""Row 32: a callback was added, removed, renamed or duplicated on resume: named warnings or errors."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import EMA, Callback, MixUp, Periodic, ProgressCallback, SchedLin
from learnkit.callbacks import (
    SAM,
    EarlyStoppingCallback,
    GradientClip,
    MixedPrecision,
    ParamScheduler,
    ReduceLROnPlateau,
    SaveModelCallback,
    TerminateOnNaNCallback,
)
from learnkit.interop import from_keras
from learnkit.loggers import CSVLogger
from tests.faults.run_helpers import checkpointed, names, same


class Counter(Callback):
    "Counts batches."

    seen = 0

    def after_batch(self) -> None:
        self.seen += self.training

    def state_dict(self) -> dict[str, Any]:
        return {'seen': self.seen}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.seen = sd['seen']


class Tally(Counter):
    "The same under another name."


class Named(Counter):
    "The same, with a key that stays when the class is called something else."

    state_key = 'counter'


class Picky(Counter):
    "Cannot read what it has written, until it is told how."

    fixed = False

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        if not Picky.fixed:
            raise KeyError('an entry that is not there')
        super().load_state_dict(sd)


def saved(folder: Path, *cbs: Any) -> tuple[Path, Any]:
    "Train with callbacks; return the checkpoint after four of six batches, and the state at the end."
    learn = checkpointed(folder, every='1ba', keep_last=None)(*cbs)
    learn.fit(2)
    return folder / next(
        n for n in names(folder) if n.endswith('-ba4.ckpt')
    ), learn.checkpoint_state()


def resumed(path: Path, *cbs: Any) -> tuple[Any, list[str]]:
    "Resume with other callbacks; return the Learner and its warnings."
    learn = checkpointed(path.parent, every='1ba', keep_last=None)(*cbs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.fit(2, resume=path)
    assert learn.opt.n_steps == 6
    return learn, [str(w.message) for w in caught]


def changes(*texts: str) -> list[str]:
    return [
        f'The callbacks differ from those in the checkpoint: {text}. A callback that was added starts without a state, '
        'and the state of one that was removed is ignored.'
        for text in texts
    ]


def test_one_was_added(tmp_path: Path) -> None:
    _, warnings_seen = resumed(saved(tmp_path)[0], counter := Counter())
    assert warnings_seen == changes('added `counter` (Counter)')
    assert counter.seen == 2, 'the batches that came after'


def test_one_was_removed(tmp_path: Path) -> None:
    _, warnings_seen = resumed(saved(tmp_path, Counter)[0])
    assert warnings_seen == changes('removed `counter` (Counter)')


def test_one_was_renamed(tmp_path: Path) -> None:
    _, warnings_seen = resumed(saved(tmp_path, Counter)[0], tally := Tally())
    assert warnings_seen == changes('added `tally` (Tally); removed `counter` (Counter)')
    assert tally.seen == 2
    _, warnings_seen = resumed(saved(tmp_path / 'named', Counter)[0], named := Named())
    assert not warnings_seen and named.seen == 6, 'a key keeps the state'


def test_one_was_duplicated(tmp_path: Path) -> None:
    first, second = Counter(), Counter()
    _, warnings_seen = resumed(saved(tmp_path, Counter)[0], first, second)
    assert warnings_seen == changes('added `counter_2` (Counter)')
    assert (first.seen, second.seen) == (6, 2)


class Plain(Callback):
    "Keeps plain attributes."

    def __init__(self) -> None:
        self.n = 0

    def after_batch(self) -> None:
        self.n += 1


class Bare(Callback):
    "Keeps nothing."

    def after_loss(self) -> None:
        self.learn.loss_grad = self.learn.loss_grad * 1


class Twice(Bare):
    "The same."


class Looks(Callback):
    observer = True

    def after_batch(self) -> None:
        pass


class Subclass(EMA):
    "An average of the user's."


def greet(cb: Any) -> None:
    pass


def wave(cb: Any) -> None:
    pass


def keras_like() -> Any:
    class Ends:
        params: Any = None
        model: Any = None

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            pass

    return Ends()


KINDS: dict[str, Any] = {
    'plain': Plain,
    'bare': Bare,
    'twice': Twice,
    'function': lambda: Callback(before_fit=greet),
    'lambda': lambda: Callback(before_fit=lambda cb: None),
    'two functions': lambda: Callback(before_fit=greet, after_fit=wave),
    'partial function': lambda: Callback(before_fit=partial(greet)),
    'periodic': lambda: Periodic('1ep', on_every=greet),
    'observer': Looks,
    'subclass': lambda: Subclass(0.9),
    'mixup': lambda: MixUp(0.4),
    'sam': lambda: SAM(),
    'ema': lambda: EMA(0.9),
    'clip': lambda: GradientClip(1.0),
    'precision': lambda: MixedPrecision('bf16'),
    'early stopping': lambda: EarlyStoppingCallback(patience=9),
    'best': lambda: SaveModelCallback(),
    'reduce': lambda: ReduceLROnPlateau(patience=9),
    'nan': lambda: TerminateOnNaNCallback(),
    'scheduler': lambda: ParamScheduler({'lr': SchedLin(0.1, 0.01)}),
    'keras': lambda: from_keras(keras_like()),
}


@pytest.mark.parametrize('kind', KINDS)
def test_every_kind_is_named_when_it_is_added_or_removed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = learn_key(KINDS[kind]())
    _, warnings_seen = resumed(saved(tmp_path / 'without')[0], KINDS[kind]())
    assert len(warnings_seen) == 1 and f'added `{key}`' in warnings_seen[0]
    path, _ = saved(tmp_path / 'with', KINDS[kind]())
    assert resumed(path, KINDS[kind]())[1] == []
    _, warnings_seen = resumed(path)
    assert len(warnings_seen) == 1 and f'removed `{key}`' in warnings_seen[0]


def learn_key(cb: Any) -> str:
    return getattr(cb, 'state_key', None) or cb.name


def test_other_functions_are_named(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, Callback(before_fit=greet))
    _, warnings_seen = resumed(path, Callback(before_fit=wave))
    expected = 'added `callback` (Callback(before_fit=wave)); removed `callback` (Callback(before_fit=greet))'
    assert warnings_seen == changes(expected)


def test_loggers_and_bars_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, _ = saved(tmp_path, CSVLogger())
    assert resumed(path)[1] == []
    assert resumed(path, CSVLogger(), ProgressCallback())[1] == []


def test_others_were_reordered(tmp_path: Path) -> None:
    "Each callback has its own state, by its key; two callbacks of a class are matched by their order."

    def cbs() -> list[Any]:
        return [Counter(), EMA(0.9), EarlyStoppingCallback(patience=9), MixUp(0.4)]

    path, end = saved(tmp_path, *cbs())
    learn, warnings_seen = resumed(path, *cbs()[::-1])
    assert not warnings_seen and same(end, learn.checkpoint_state())
    path, _ = saved(tmp_path / 'two', a := Counter(), b := Tally())
    a.seen, b.seen = 0, 0
    _, warnings_seen = resumed(path, b, a)
    assert not warnings_seen and (a.seen, b.seen) == (6, 6)


def test_a_callback_that_cannot_read_its_state_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "The file and the callback are named, and the same fit works when that is fixed."
    path, end = saved(tmp_path, Picky)
    learn = checkpointed(tmp_path, every='1ba', keep_last=None)(Picky)
    before = {name: t.clone() for name, t in learn.model.state_dict().items()}
    with pytest.raises(KeyError, match='an entry that is not there') as caught:
        learn.fit(2, resume=path)
    assert all(torch.equal(t, before[name]) for name, t in learn.model.state_dict().items())
    warnings_seen = '\n'.join(caught.value.__notes__)
    assert 'in Picky.load_state_dict' in warnings_seen
    assert f'while the fit resumed from {path}' in warnings_seen
    assert not learn.resumed
    assert learn.opt.n_steps == 0
    assert all(p.grad is None for p in learn.model.parameters())
    monkeypatch.setattr(Picky, 'fixed', True)
    learn.fit(2, resume=path)
    assert same(end, learn.checkpoint_state())
