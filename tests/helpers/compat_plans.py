"""Plans of a training, run by fastai and by learnkit from one source, and what is compared.

A plan is JSON: what is called on a Learner, which callbacks it has, and at which places they raise which Cancel
exception. `run_plan` in compat_run.py follows it with one library and returns the trace of the 24 shared events."""

import random
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

# The events that fastai and learnkit share, in firing order, and the Cancel exceptions that are legal in each: of the
# levels that are open there, outermost first.
_OPEN = {
    'before_fit': 'F',
    'before_epoch': 'FE',
    'before_train': 'FET',
    'before_batch': 'FETB',
    'after_pred': 'FETB',
    'after_loss': 'FETB',
    'before_backward': 'FETBb',
    'after_cancel_backward': 'FETB',
    'after_backward': 'FETB',
    'before_step': 'FETBs',
    'after_cancel_step': 'FETB',
    'after_step': 'FETB',
    'after_cancel_batch': 'FET',
    'after_batch': 'FET',
    'after_cancel_train': 'FE',
    'after_train': 'FE',
    'before_validate': 'FEV',
    'after_cancel_validate': 'FE',
    'after_validate': 'FE',
    'after_cancel_epoch': 'F',
    'after_epoch': 'F',
    'after_cancel_fit': '',
    'after_fit': '',
}
EVENTS = ('after_create', *_OPEN)
EXCEPTIONS = {
    'F': 'CancelFitException',
    'E': 'CancelEpochException',
    'T': 'CancelTrainException',
    'V': 'CancelValidException',
    'B': 'CancelBatchException',
    'b': 'CancelBackwardException',
    's': 'CancelStepException',
}
BATCH_EVENTS = EVENTS[EVENTS.index('before_batch') : EVENTS.index('after_batch') + 1]
VALID_BATCH_EVENTS = 'before_batch after_pred after_loss after_cancel_batch after_batch'.split()
FOLLOW_UPS = {
    'T': 'train',
    'V': 'validate',
    'B': 'batch',
    'b': 'backward',
    's': 'step',
    'E': 'epoch',
}
RAISER_ORDERS = (-20, 0, 70)  # before TrainEvalCallback, after it, after the Recorder
NOT_FITTING = ('validate', 'with_learn')
# the levels that each call opens
WRAPPED = {
    'fit': 'FETVBbs',
    'validate': 'VBbs',
    'with_learn': 'VBbs',
    'events': 'TVBbs',
    'one_batch': 'Bbs',
    'all_batches': 'Bbs',
}
# of callbacks, see compat_callbacks.py
KINDS = (
    'plain plain no_train no_valid neither off_in_fit off_in_batch every_event adds '
    'removes_itself changes_order changes_run sets_lr changes_batch scales_loss calls_by_hand '
    'by_keyword temporary'
).split()

Plan = dict[str, Any]
# call, event, epoch, batch (-1 outside one), whether in training
Place = tuple[int, str, int, int, bool]


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
    modules = data, schedule, tracker, training, core, learner
    names = {k: v for m in modules for k, v in vars(m).items() if not k.startswith('_')}
    return SimpleNamespace(**{**names, 'which': 'fastai'})


# -- making plans ----------------------------------------------------------------------------------


def legal(event: str, training: bool, what: str) -> str:
    "The levels whose Cancel exceptions are legal at an event within a call; nothing crosses a stand-alone validation."
    levels = _OPEN[event]
    if not training and event in VALID_BATCH_EVENTS:
        levels = levels.replace('T', 'V')
    return ''.join(level for level in levels if level in WRAPPED[what])


def places(plan: Plan) -> Iterator[tuple[Place, str]]:
    "Every place of a plan where an exception is legal, with the levels."
    for call, (what, *args) in enumerate(plan['calls']):
        n_epochs = args[0] if what == 'fit' else 1
        for epoch in range(n_epochs):
            for event in _OPEN:
                at = -1 if event == 'before_fit' else epoch
                if event not in BATCH_EVENTS:
                    found = [((call, event, at, -1, True), legal(event, True, what))]
                else:
                    found = [
                        ((call, event, at, i, True), legal(event, True, what))
                        for i in range(plan['n_train'])
                    ]
                    if event in VALID_BATCH_EVENTS:
                        levels = legal(event, False, what)
                        found += [
                            ((call, event, at, i, False), levels) for i in range(plan['n_valid'])
                        ]
                yield from ((place, levels) for place, levels in found if levels)


def every_single_raise() -> Iterator[Plan]:
    "One plan for each place of a small fit and each exception that is legal there; a second fit follows."
    base: Plan = {
        'seed': 0,
        'n_train': 2,
        'n_valid': 2,
        'mom': 0.9,
        'recorder': False,
        'cbs': [],
        'calls': [['fit', 2, 0], ['fit', 1, 0]],
    }
    for place, levels in places(base):
        if place[0] == 0:
            for level in levels:
                yield {**base, 'raises': [[*place, 0, level]]}
            if place[1].startswith('before_'):
                yield {**base, 'raises': [[*place, -20, levels[-1]]]}


def random_plan(seed: int) -> Plan:
    "A plan with several calls, callbacks of every kind and up to six exceptions."
    rng = random.Random(seed)
    plan: Plan = {
        'seed': seed,
        'n_train': rng.randint(3, 5),
        'n_valid': 2,
        'mom': rng.choice([0.0, 0.9]),
        'recorder': rng.random() < 0.4,
    }
    plan['calls'] = [_random_call(rng) for _ in range(rng.randint(1, 3))]
    # fastai's Recorder cannot record before its first fit
    if plan['recorder']:
        plan['calls'].insert(0, ['fit', 1, 0])
    plan['cbs'] = [_random_callback(rng) for _ in range(rng.randint(0, 3))]
    # `run` comes back on after a run, not by hand
    if any(kind.startswith('off') for kind, *_ in plan['cbs']):
        plan['calls'] = [['all_batches'] if call == ['events'] else call for call in plan['calls']]

    by_event: dict[str, list[tuple[Place, str]]] = {}
    for place, levels in places(plan):
        by_event.setdefault(place[1], []).append((place, levels))
    raises = []
    for _ in range(rng.choice([0, 1, 1, 2, 3, 6])):
        (place, levels) = rng.choice(by_event[rng.choice(sorted(by_event))])
        level = rng.choice(levels)
        raises.append([*place, rng.choice(RAISER_ORDERS), level])
        if (name := FOLLOW_UPS.get(level)) and rng.random() < 0.5:
            raises += _follow_up(rng, place, name, plan['calls'][place[0]][0])
    # fastai's Recorder fails without a first epoch, and on a loss that was never computed
    if plan['recorder']:
        raises = [
            r
            for r in raises
            if r[0] > 0 and (r[1] not in ('before_batch', 'after_pred') or r[-1] != 'B')
        ]
    return {**plan, 'raises': raises}


def _follow_up(rng: random.Random, place: Place, level: str, what: str) -> list[list[Any]]:
    "An exception of an outer level in what fires because of the first one."
    call, _event, epoch, batch, training = place
    follow = f'{rng.choice(["after_cancel", "after"])}_{level}'
    levels = legal(follow, training, what)
    batch = batch if follow in BATCH_EVENTS else -1
    if not levels:
        return []
    training = training if batch >= 0 else True
    return [[call, follow, epoch, batch, training, rng.choice(RAISER_ORDERS), rng.choice(levels)]]


def _random_call(rng: random.Random) -> list[Any]:
    what = rng.choices(
        ['fit', 'validate', 'one_batch', 'all_batches', 'events', 'with_learn'], [8, 1, 1, 1, 1, 1]
    )[0]
    if what != 'fit':
        return [what]
    n = rng.choice([1, 2, 2, 3])
    return ['fit', n, rng.choice([0, 0, 0, rng.randint(0, n)])]


def _random_callback(rng: random.Random) -> list[Any]:
    at, order = rng.choice(BATCH_EVENTS[:3]), rng.choice([-50, -10, -1, 0, 1, 49, 50, 51, 100])
    return [rng.choice(KINDS), order, at, rng.randint(0, 1), rng.randint(0, 2)]
