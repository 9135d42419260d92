"""Plans of a training, run by fastai and by learnkit from one source, and what is compared afterwards.

A plan is JSON: what is called on a Learner, which callbacks it has, and at which places they raise which Cancel
exception. `run_plan` follows it with the library given and returns the trace of the 24 shared events."""
from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

# The events that fastai and learnkit share, in firing order, and the Cancel exceptions that are legal in each: of the
# levels that are open there, outermost first.
_OPEN = {
    'before_fit': 'F', 'before_epoch': 'FE', 'before_train': 'FET', 'before_batch': 'FETB', 'after_pred': 'FETB',
    'after_loss': 'FETB', 'before_backward': 'FETBb', 'after_cancel_backward': 'FETB', 'after_backward': 'FETB',
    'before_step': 'FETBs', 'after_cancel_step': 'FETB', 'after_step': 'FETB', 'after_cancel_batch': 'FET',
    'after_batch': 'FET', 'after_cancel_train': 'FE', 'after_train': 'FE', 'before_validate': 'FEV',
    'after_cancel_validate': 'FE', 'after_validate': 'FE', 'after_cancel_epoch': 'F', 'after_epoch': 'F',
    'after_cancel_fit': '', 'after_fit': '',
}
EVENTS = ('after_create', *_OPEN)
EXCEPTIONS = dict(F='CancelFitException', E='CancelEpochException', T='CancelTrainException', V='CancelValidException',
                  B='CancelBatchException', b='CancelBackwardException', s='CancelStepException')
BATCH_EVENTS = EVENTS[EVENTS.index('before_batch'):EVENTS.index('after_batch') + 1]
VALID_BATCH_EVENTS = ('before_batch', 'after_pred', 'after_loss', 'after_cancel_batch', 'after_batch')
FOLLOW_UPS = dict(T='train', V='validate', B='batch', b='backward', s='step', E='epoch')
RAISER_ORDERS = (-20, 0, 70)  # before TrainEvalCallback, after it, after the Recorder
NOT_FITTING = ('validate', 'with_learn')
WRAPPED = dict(fit='FETVBbs', validate='VBbs', with_learn='VBbs', events='TVBbs', one_batch='Bbs', all_batches='Bbs')  # levels of each call

Plan = dict[str, Any]
Place = tuple[int, str, int, int, bool]  # call, event, epoch, batch (-1 outside one), whether in training


def learnkit_names() -> SimpleNamespace:
    "Everything a plan needs, by learnkit."
    import learnkit
    names = SimpleNamespace(**{name: getattr(learnkit, name) for name in learnkit.__all__})
    names.which = 'learnkit'
    return names


def fastai_names() -> SimpleNamespace:
    "Everything a plan needs, by fastai; raises ImportError where it is not installed."
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        from fastai import learner
        from fastai.callback import core, schedule, tracker, training
        from fastai.data import core as data
    names = {k: v for m in (data, schedule, tracker, training, core, learner) for k, v in vars(m).items() if not k.startswith('_')}
    return SimpleNamespace(**{**names, 'which': 'fastai'})


# -- making plans ------------------------------------------------------------------------------------------------------

def legal(event: str, training: bool, what: str) -> str:
    "The levels whose Cancel exceptions are legal at an event within a call; nothing crosses a stand-alone validation."
    levels = _OPEN[event]
    if not training and event in VALID_BATCH_EVENTS: levels = levels.replace('T', 'V')
    return ''.join(level for level in levels if level in WRAPPED[what])


def places(plan: Plan) -> Iterator[tuple[Place, str]]:
    "Every place of a plan where an exception is legal, with the levels."
    for call, (what, *args) in enumerate(plan['calls']):
        n_epochs = args[0] if what == 'fit' else 1
        for epoch in range(n_epochs):
            for event in _OPEN:
                at = -1 if event == 'before_fit' else epoch
                if event not in BATCH_EVENTS: found = [((call, event, at, -1, True), legal(event, True, what))]
                else:
                    found = [((call, event, at, i, True), legal(event, True, what)) for i in range(plan['n_train'])]
                    if event in VALID_BATCH_EVENTS:
                        found += [((call, event, at, i, False), legal(event, False, what)) for i in range(plan['n_valid'])]
                yield from ((place, levels) for place, levels in found if levels)


def every_single_raise() -> Iterator[Plan]:
    "One plan for each place of a small fit and each exception that is legal there; a second fit follows."
    base: Plan = dict(seed=0, n_train=2, n_valid=2, mom=0.9, recorder=False, cbs=[], calls=[['fit', 2, 0], ['fit', 1, 0]])
    for place, levels in places(base):
        if place[0] == 0:
            for level in levels: yield {**base, 'raises': [[*place, 0, level]]}
            if place[1].startswith('before_'): yield {**base, 'raises': [[*place, -20, levels[-1]]]}


def random_plan(seed: int) -> Plan:
    "A plan with several calls, callbacks of every kind and up to six exceptions."
    rng = random.Random(seed)
    plan: Plan = dict(seed=seed, n_train=rng.randint(3, 5), n_valid=2, mom=rng.choice([0., 0.9]), recorder=rng.random() < 0.4)
    plan['calls'] = [_random_call(rng) for _ in range(rng.randint(1, 3))]
    if plan['recorder']: plan['calls'].insert(0, ['fit', 1, 0])  # fastai's Recorder cannot record before its first fit
    plan['cbs'] = [_random_callback(rng) for _ in range(rng.randint(0, 3))]
    if any(kind.startswith('off') for kind, *_ in plan['cbs']):  # XXX after_fit by hand
        plan['calls'] = [['all_batches'] if call == ['events'] else call for call in plan['calls']]

    by_event: dict[str, list[tuple[Place, str]]] = {}
    for place, levels in places(plan): by_event.setdefault(place[1], []).append((place, levels))
    raises = []
    for _ in range(rng.choice([0, 1, 1, 2, 3, 6])):
        (place, levels) = rng.choice(by_event[rng.choice(sorted(by_event))])
        level = rng.choice(levels)
        raises.append([*place, rng.choice(RAISER_ORDERS), level])
        if (name := FOLLOW_UPS.get(level)) and rng.random() < 0.5: raises += _follow_up(rng, place, name, plan['calls'][place[0]][0])
    if plan['recorder']: raises = [r for r in raises if r[0] > 0 and (r[1] not in ('before_batch', 'after_pred') or r[-1] != 'B')]
    return {**plan, 'raises': raises}


def _follow_up(rng: random.Random, place: Place, level: str, what: str) -> list[list[Any]]:
    "An exception of an outer level in what fires because of the first one."
    call, event, epoch, batch, training = place
    follow = f'{rng.choice(["after_cancel", "after"])}_{level}'
    levels = legal(follow, training, what)
    batch = batch if follow in BATCH_EVENTS else -1
    return [[call, follow, epoch, batch, training if batch >= 0 else True, rng.choice(RAISER_ORDERS), rng.choice(levels)]] if levels else []


def _random_call(rng: random.Random) -> list[Any]:
    what = rng.choices(['fit', 'validate', 'one_batch', 'all_batches', 'events', 'with_learn'], [8, 1, 1, 1, 1, 1])[0]
    if what != 'fit': return [what]
    n = rng.choice([1, 2, 2, 3])
    return ['fit', n, rng.choice([0, 0, 0, rng.randint(0, n)])]


def _random_callback(rng: random.Random) -> list[Any]:
    kind = rng.choice(['plain', 'plain', 'no_train', 'no_valid', 'neither', 'off_in_fit', 'off_in_batch', 'every_event', 'adds', 'removes_itself',
                       'changes_order', 'changes_run', 'sets_lr', 'changes_batch', 'scales_loss', 'calls_by_hand', 'by_keyword', 'temporary'])
    return [kind, rng.choice([-50, -10, -1, 0, 1, 49, 50, 51, 100]), rng.choice(BATCH_EVENTS[:3]), rng.randint(0, 1), rng.randint(0, 2)]


# -- the callbacks of a plan, one source for both libraries --------------------------------------------------------------

def callbacks_of(lib: Any, run: Run) -> SimpleNamespace:
    "Callback classes on the given library's `Callback`."

    class Raiser(lib.Callback):
        "Raise what the plan says for the place that the loop is at."
        def __init__(self, order: int, planned: dict[Place, str]) -> None:
            self.order, self.planned = order, planned

        def at(self, event: str) -> None:
            training = bool(self.learn.training)
            epoch = -1 if event in ('before_fit', 'after_create') else getattr(self.learn, 'epoch', 0) if run.counting else 0
            batch = getattr(self.learn, 'iter', 0) if event in BATCH_EVENTS else -1
            place = (run.call, event, epoch, batch, training if event in BATCH_EVENTS else True)
            if place in self.planned: raise getattr(lib, EXCEPTIONS[self.planned[place]])

    def raise_at(event: str) -> Any: return lambda self: self.at(event)
    for event in EVENTS: setattr(Raiser, event, raise_at(event))

    class Tracer(lib.Callback):
        "Note every event."
        def __init__(self, tag: str, order: int = 0) -> None:
            self.tag, self.order = tag, order

        def note(self, event: str) -> None: run.note(self.tag, event, self.learn)

    def note_at(event: str) -> Any: return lambda self: self.note(event)
    for event in EVENTS: setattr(Tracer, event, note_at(event))

    class Losses(lib.Callback):
        order, run_valid = 200, True
        def after_loss(self) -> None: run.losses.append(float(self.loss))

    class OnlyTraining(Tracer): run_valid = False
    class OnlyValidation(Tracer): run_train = False
    class OnlyOutside(Tracer): run_train = run_valid = False

    class OffInFit(Tracer):
        def before_fit(self) -> None:
            self.note('before_fit')
            self.run = False

    class Acts(Tracer):
        "Do something at one event of one batch."
        def __init__(self, tag: str, order: int, at: str, epoch: int, batch: int) -> None:
            super().__init__(tag, order)
            self.acts_at, self.in_epoch, self.on_batch = at, epoch, batch

        def note(self, event: str) -> None:
            super().note(event)
            if event == self.acts_at and self.is_here(): self.act()

        def is_here(self) -> bool:
            learn = self.learn
            return bool(learn.training) and learn.epoch == self.in_epoch and learn.iter == self.on_batch

    class OffInBatch(Acts):
        def act(self) -> None: self.run = False

    class RemovesItself(Acts):
        def act(self) -> None: self.learn.remove_cb(self)

    class Adds(Acts):
        def act(self) -> None:
            self.added = Tracer(f'{self.tag}+', self.order - 1)
            self.learn.add_cb(self.added)

        def after_train(self) -> None:
            self.note('after_train')
            if 'added' in self.__dict__: self.learn.remove_cb(self.__dict__.pop('added'))

    class ChangesOrder(Acts):
        def act(self) -> None: self.order = -self.order

    class ChangesRun(Acts):
        def act(self) -> None: self.run_train = not self.run_train

    class SetsLr(Acts):
        def act(self) -> None: self.opt.set_hypers(lr=self.opt.hypers[-1]['lr'] * 0.5)

    class ChangesBatch(Tracer):
        def before_batch(self) -> None:
            self.note('before_batch')
            self.learn.xb, self.learn.yb = (self.x * 2,), (self.y - 1,)

    class ScalesLoss(Tracer):
        def after_loss(self) -> None:
            self.note('after_loss')
            self.learn.loss_grad = self.loss_grad * 0.5

    class EveryEvent(lib.Callback):
        def __init__(self, tag: str, order: int) -> None: self.tag, self.order = tag, order
        def __call__(self, event: str) -> None: run.note(self.tag, event, self.learn)

    class CallsByHand(Tracer):
        "Hand events on to a callback that is not part of the learner."
        def __init__(self, tag: str, order: int) -> None:
            super().__init__(tag, order)
            self.inner = Tracer(f'{tag}>')

        def note(self, event: str) -> None:
            super().note(event)
            self.inner.learn = self.learn
            self.inner(event)

    def by_keyword(tag: str, order: int) -> Any:
        def note(event: str) -> Any: return lambda self: run.note(tag, event, self.learn)
        cb = lib.Callback(**{event: note(event) for event in EVENTS})
        cb.order = order
        return cb

    plain = dict(plain=Tracer, no_train=OnlyValidation, no_valid=OnlyTraining, neither=OnlyOutside, off_in_fit=OffInFit, every_event=EveryEvent,
                 changes_batch=ChangesBatch, scales_loss=ScalesLoss, calls_by_hand=CallsByHand, by_keyword=by_keyword, temporary=Tracer)
    acting = dict(off_in_batch=OffInBatch, adds=Adds, removes_itself=RemovesItself, changes_order=ChangesOrder, changes_run=ChangesRun, sets_lr=SetsLr)

    def make(i: int, kind: str, order: int, at: str, epoch: int, batch: int) -> Any:
        tag = f'{i}:{kind}'
        return plain[kind](tag, order) if kind in plain else acting[kind](tag, order, at, epoch, batch)

    return SimpleNamespace(Raiser=Raiser, Tracer=Tracer, Losses=Losses, make=make)


# -- following a plan ----------------------------------------------------------------------------------------------------

class Run:
    "What happened while a plan was followed."

    def __init__(self, plan: Plan) -> None:
        self.plan, self.call, self.counting = plan, -1, True
        self.trace: list[tuple[Any, ...]] = []
        self.losses: list[float] = []
        self.weights: list[float] = []
        self.recorded: list[Any] = []

    def note(self, tag: str, event: str, learn: Any) -> None:
        "Append an event with the counters; outside a fit learnkit keeps the counters, so they are left out there."
        if event not in EVENTS or (event == 'after_cancel_step' and tag not in ('first', 'last')): return
        counters = [getattr(learn, name, 0) for name in ('epoch', 'iter', 'train_iter', 'pct_train')] if self.counting else []
        if event in _OPEN and event not in BATCH_EVENTS: counters = counters[:1] + counters[2:]  # an old batch number means nothing
        self.trace.append((self.call, tag, event, *counters, bool(learn.training)))

    def digest(self) -> str: return sha256(repr(self.trace).encode()).hexdigest()[:16]

    def letters(self) -> str:
        "The events of the tracer that sees them all, one letter each."
        return ''.join(chr(ord('a') + EVENTS.index(event)) for _, tag, event, *_ in self.trace if tag == 'last')


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def loaders(lib: Any, plan: Plan) -> Any:
    "Plain torch loaders over the same numbers, with an uneven last training batch."
    g = torch.Generator().manual_seed(plan['seed'] + 1)
    def loader(n: int) -> Any:
        x = torch.rand(n, 2, generator=g, dtype=torch.float64)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4)
    train, valid = loader(4 * plan['n_train'] - 2), loader(4 * plan['n_valid'])
    return lib.DataLoaders(train, valid, device=torch.device('cpu'))


def mse(pred: torch.Tensor, y: torch.Tensor) -> torch.Tensor: return (pred - y).square().mean()


def run_plan(plan: Plan, lib: Any) -> Run:
    "Follow a plan with the given library."
    run = Run(plan)
    cbs = callbacks_of(lib, run)
    planned: dict[int, dict[Place, str]] = {order: {} for order in RAISER_ORDERS}
    for *place, order, level in plan['raises']: planned[order][tuple(place)] = level  # type: ignore[index]
    made = [(kind, cbs.make(i, kind, *rest)) for i, (kind, *rest) in enumerate(plan['cbs'])]
    opt_func = lib.SGD if not plan['mom'] else _partial(lib.SGD, plan['mom'])
    learn = lib.Learner(loaders(lib, plan), net(plan['seed']), mse, opt_func=opt_func, lr=0.1, default_cbs=False, cbs=[
        lib.TrainEvalCallback, *([_recorder(lib)] if plan['recorder'] else []), cbs.Tracer('first', -100), cbs.Losses(),
        *(cb for kind, cb in made if kind != 'temporary'), *(cbs.Raiser(order, planned[order]) for order in RAISER_ORDERS), cbs.Tracer('last', 300)])
    learn.logger = lambda row: None
    temporary = [cb for kind, cb in made if kind == 'temporary']
    for run.call, (what, *args) in enumerate(plan['calls']):
        with _as_documented(learn, lib, run, what):
            CALLS[what](learn, lib, temporary, *args)
            if what == 'fit' and plan['recorder']: run.recorded.append(recorded(learn))
    run.weights = [v for p in learn.model.parameters() for v in p.detach().flatten().tolist()]
    return run


def _partial(SGD: Any, mom: float) -> Any: return lambda params, lr: SGD(params, lr=lr, mom=mom)


def _recorder(lib: Any) -> Any:
    "A Recorder that smooths losses in double precision; fastai's is made for single."
    rec = lib.Recorder(add_time=False)
    if lib.which == 'fastai': rec.smooth_loss.reset = lambda: vars(rec.smooth_loss).update(count=0, val=torch.zeros((), dtype=torch.float64))
    return rec


def recorded(learn: Any) -> list[Any]:
    rec = learn.recorder
    return [[float(v) for v in rec.lrs], [float(v) for v in rec.losses],
            [[None if v is None else float(v) for v in row] for row in rec.values], [int(i) for i in rec.iters]]


def _fit(learn: Any, lib: Any, temporary: list[Any], n_epoch: int, start_epoch: int) -> None:
    learn.fit(n_epoch, start_epoch=start_epoch, cbs=temporary)


def _validate(learn: Any, lib: Any, temporary: list[Any]) -> None:
    learn.validate(cbs=temporary)


def _by_hand(learn: Any, lib: Any) -> None:
    if learn.opt is None: learn.create_opt()
    learn.epoch, learn.train_iter, learn.pct_train, learn.n_iter, learn.n_epoch = 0, 0, 0., 4, 1
    learn.training = True


def _one_batch(learn: Any, lib: Any, temporary: list[Any]) -> None:
    _by_hand(learn, lib)
    batches = list(learn.dls.train)
    for i in (0, 2, 1): learn.one_batch(i, batches[i])


def _all_batches(learn: Any, lib: Any, temporary: list[Any]) -> None:
    _by_hand(learn, lib)
    learn.dl = learn.dls.train
    learn.all_batches()
    learn.training, learn.dl = False, learn.dls.valid
    learn.all_batches()


def _events(learn: Any, lib: Any, temporary: list[Any]) -> None:
    _by_hand(learn, lib)
    learn(['before_fit', 'before_epoch'])
    learn._do_epoch_train()
    learn._do_epoch_validate()
    learn('after_epoch')
    learn(['after_fit'])


def _with_learn(learn: Any, lib: Any, temporary: list[Any]) -> None:
    with learn: learn._do_epoch_validate()


CALLS = dict(fit=_fit, validate=_validate, one_batch=_one_batch, all_batches=_all_batches, events=_events, with_learn=_with_learn)


@contextmanager
def _as_documented(learn: Any, lib: Any, run: Run, what: str) -> Iterator[None]:
    """Do for fastai what learnkit does differently on purpose.

    A fit starts without gradients, `zero_grad` sets them to None, and a stand-alone validation puts back what it touched."""
    run.counting = what not in NOT_FITTING
    names = ('training', 'epoch', 'iter', 'n_iter', 'train_iter', 'pct_train')
    before = {name: getattr(learn, name, 0) for name in names}
    modes = [(m, m.training) for m in learn.model.modules()]

    def forget_gradients() -> None:
        for p in learn.model.parameters(): p.grad = None
    if what == 'fit': forget_gradients()
    if lib.which == 'fastai':
        if learn.opt is None: learn.create_opt()
        learn.opt.zero_grad = forget_gradients
    yield
    run.counting = True
    if what == 'validate' or (what == 'with_learn' and lib.which == 'fastai'):
        for name, value in before.items(): setattr(learn, name, value)
        for m, mode in modes: m.training = mode
    if what == 'with_learn': learn.training = False
