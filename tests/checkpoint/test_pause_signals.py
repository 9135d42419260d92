"""Fits that a real Ctrl-C interrupts at random instants, and that continue in memory; set-ups are those of row 51."""

from __future__ import annotations

import contextlib
import io
import random
import signal
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from learnkit import Callback
from learnkit.core.errors import FitError
from tests.faults.set_ups import CALLBACKS, FITS, LOADERS, LOSSES, MODELS, Plain, add_noise, loader
from tests.faults.test_f51_set_ups import SetUp, Trace, compare, picture
from tests.helpers.forks import start
from tests.helpers.resuming import scramble

N_INTERRUPTS = 200
AXES = {'model': MODELS, 'loss': LOSSES, 'callback': CALLBACKS, 'fit': FITS}
# two fits of these differ, it hides an attribute of the model, or it trains no lazy layers
LEFT_OUT = ('out of order', 'Scheduler', 'normed and lazy', 'every epoch', 'every 3 batches')
SPAWNED = loader(partial(Plain, add_noise), num_workers=2, multiprocessing_context='spawn')
WORKERS: dict[str, dict[str, Any]] = {
    name: part for name, part in LOADERS.items() if 'workers' in name
}
ALONE = {name: part for name, part in LOADERS.items() if name not in (*WORKERS, *LEFT_OUT)}


class Slow(Callback):
    "Let batches take a time, so that a signal arrives in them."

    order = -500

    def __init__(self, began: Path) -> None:
        self._began = began

    def before_epoch(self) -> None:
        self._began.touch()

    def before_batch(self) -> None:
        sleep(0.004)

    def state_dict(self) -> None:
        return None


def draw(seed: int) -> dict[str, dict[str, Any]]:
    "Return a random part of each axis; every third one has a loader with two workers."
    rng = random.Random(seed)
    loaders = WORKERS if seed % 3 == 0 else ALONE
    parts = {name: rng.choice([p for p in ps if p not in LEFT_OUT]) for name, ps in AXES.items()}
    chosen = {name: AXES[name][part] for name, part in parts.items()}
    if seed % 30 == 0:
        return {**chosen, 'loader': {'train': SPAWNED}}
    return {**chosen, 'loader': loaders[rng.choice(list(loaders))]}


def combine(chosen: Mapping[str, dict[str, Any]]) -> SetUp:
    fields = {k: v for part in chosen.values() for k, v in part.items() if k != 'lost'}
    fields['cbs'] = sum((part.get('cbs', ()) for part in chosen.values()), ())
    return SetUp(**fields)


def train(seed: int, began: Path) -> dict[str, Any]:
    "Train, and continue after Ctrl-C; return what can be compared, and what was said."
    chosen = draw(seed)
    set_up = combine(chosen)
    # callbacks that change the data at each batch, also in an evaluation
    changes_data = chosen['loader'] in (LOADERS['weights'], LOADERS['samples'])
    scramble(0)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of torchdata
        learn = set_up.make()
    scramble(0)
    learn.add_cbs([trace := Trace(), slow := Slow(began)])
    out = io.StringIO()
    stopped: list[str] = []
    reason = ''
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out):
        warnings.simplefilter('always')
        learn.logger = lambda row: None
        before = monotonic()
        try:
            set_up.fit(learn, lambda name: [])
        except KeyboardInterrupt as e:
            stopped.append(str(e))
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        seconds = monotonic() - before
        caught.clear()
        if stopped and not learn.paused and not learn.run.not_paused:
            stopped = []  # the fit was over
        if stopped:
            if not changes_data:
                learn.validate()
            scramble(7)
            try:
                learn.resume()
            except FitError as e:
                reason = str(e)
    learn.remove_cbs([trace, slow])
    said = [line for line in out.getvalue().splitlines() if 'not exact' in line]
    said += [str(w.message) for w in caught if '/torch/' not in w.filename]
    end = {} if reason else picture(learn)
    learn.close()
    return {
        'picture': end,
        'batches': trace.batches,
        'stopped': stopped,
        'said': said,
        'reason': reason,
        'seconds': seconds,
    }


def run(seed: int, folder: Path, at: float | None = None, group: bool = False) -> dict[str, Any]:
    "Train in a child process, to which Ctrl-C is sent after a time."
    folder.mkdir(parents=True, exist_ok=True)
    began = folder / 'began'
    with start(partial(train, seed, began)) as child:
        if at is not None:
            child.wait(until=began.exists)
            sleep(at)
            child.send(signal.SIGINT, group)
        code = child.wait()
        assert code == 0, f'{code}, interrupted at {at}: {child.stderr[-3000:]}'
        result: dict[str, Any] = child.result
        return result


def judge(seed: int, folder: Path) -> str:
    "Interrupt a fit at a random instant; return 'exact', 'said', 'refused', or what is wrong."
    expected = run(seed, folder / 'straight')
    rng = random.Random(1000 + seed)
    for attempt in range(20):
        at = rng.uniform(0, expected['seconds'])
        found = run(seed, folder / str(attempt), at, group=bool(seed % 2))
        if not found['stopped']:
            continue
        if found['reason']:
            return f'refused: {found["reason"]}'
        differences = compare(expected['picture'], found['picture'])
        differences += compare(expected['batches'], found['batches'])
        if not differences:
            return 'exact, said' if found['said'] else 'exact'
        return f'said: {found["said"]}' if found['said'] else f'SILENT: {differences[:4]}'
    return 'never interrupted'


def judge_all(seeds: range, folder: Path) -> Counter[str]:
    results = {}
    for seed in seeds:
        try:
            results[seed] = judge(seed, folder / str(seed))
        except AssertionError as e:
            results[seed] = f'FAILED: {e}'
    kinds = Counter(result.partition(':')[0] for result in results.values())
    print(f'{len(results)} interrupts: {dict(kinds)}')
    for seed, result in results.items():
        if not result.startswith('exact'):
            print(seed, draw(seed), result)
    assert not any(kinds[kind] for kind in ('SILENT', 'FAILED', 'never interrupted'))
    return kinds


def test_some_interrupts(tmp_path: Path) -> None:
    judge_all(range(3, 5), tmp_path)  # with workers, and without


@pytest.mark.full
def test_interrupts_at_random_instants(tmp_path: Path) -> None:
    kinds = judge_all(range(N_INTERRUPTS), tmp_path)
    assert kinds['exact'] + kinds['exact, said'] >= 0.95 * N_INTERRUPTS
