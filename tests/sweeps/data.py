"""Train with a loader, kill the training by SIGKILL, resume it in a new process, and compare.

Three epochs with dropout and Adam, and a checkpoint after each batch. A run is killed before its batches 5, 21 and
32, counted from 0: within the first epoch, within the second, and right after the second. The resumed process has
other global seeds. Its batches, their sample ids and values, the final weights and the history are compared with the
uninterrupted run's."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learnkit import Callback, Checkpoint, DataLoaders, Learner
from learnkit.checkpoint.digest import differences
from learnkit.core import errors, validation
from tests.helpers.forks import Child, HarnessError, Planned, reached, start
from tests.helpers.resuming import scramble
from tests.sweeps.loaders import FETCHED, Reading
from tests.sweeps.verdicts import (
    BROKEN,
    EXACT,
    FAILED,
    REFUSED,
    REPLAYED,
    UNREPEATABLE,
    WARNED,
    WRONG,
    Subject,
    Verdict,
    find_version,
    shorten,
)

N_EPOCH = 3
KILLS = (5, 21, 32)  # training batches before the kill
TIMEOUT_S = 120
SEVERITY = (EXACT, REPLAYED, WARNED, REFUSED, BROKEN, WRONG)
TYPED = {name for name, value in vars(errors).items() if isinstance(value, type)}
# by a part of a message: what the table says of it
CLAUSES = {
    'when it repeats the epoch': 'at the resume: the repeated epoch has other batches',
    'no checkpoint holds': 'at the first checkpoint: {} has changed, and is not saved',
    'persistent workers run on': 'at a checkpoint: the generators of persistent workers run on',
    'in_order=False': 'at the first checkpoint: `in_order=False`',
    'and each epoch before': 'after the resume: an epoch has another number of batches',
}
Result = dict[str, Any]


# -- in the process that trains --------------------------------------------------------------------


class Reader(Callback):
    "Turn a library's batch into inputs and targets, and record each training batch."

    order = -50

    def __init__(self, read: Callable[[Any], tuple[Tensor, Tensor]], record: Any) -> None:
        self.read, self.record = read, record

    def after_draw(self) -> None:
        if not self.training:
            return
        reached('batch')
        ids, x = self.read(self.learn.batch)
        self.record(self.epoch, ids, x)
        self.learn.batch = (x.float(), ids.float()[:, None] / 64)

    def state_dict(self) -> None:
        return None


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


def train(subject: Subject, folder: Path, data: Path, n_epoch: int) -> Result:
    "Train, or resume from the folder's newest checkpoint; return what was trained on, and what became of it."
    resumes = any(folder.glob('*.ckpt'))
    scramble(1000 if resumes else 0)
    os.environ[FETCHED] = str(folder / f'fetched{int(resumes)}')
    _record_warnings(folder / 'warnings.json')
    reading: Reading = subject.options
    data.mkdir(parents=True, exist_ok=True)
    dls = DataLoaders(subject.build(data), device='cpu', path=folder, n_iter=reading.n_iter)
    batches: list[Any] = []

    def record(epoch: int, ids: Tensor, x: Tensor) -> None:
        digest = sha256(x.contiguous().numpy().tobytes()).hexdigest()
        batches.append([epoch, ids.tolist(), digest[:16]])

    cbs = [Reader(reading.read, record), Checkpoint('1ba', folder, background=False)]
    learn = Learner(dls, make_model(), nn.MSELoss(), opt_func=torch.optim.Adam, lr=0.01, cbs=cbs)
    with learn.no_logging(), learn.no_bar():
        learn.fit(n_epoch, resume=True)
    history = [{k: v for k, v in row.items() if k not in ('time', 'fit')} for row in learn.history]
    return {
        'batches': batches,
        'weights': {**learn.model.state_dict()},
        'history': history,
        'n_fetched': _count_fetched(folder / f'fetched{int(resumes)}'),
    }


def _record_warnings(path: Path) -> None:
    "Append the warnings of the package to a file, of which a kill leaves what was written; ignore others."

    def record(message: Any, *args: Any, **kwargs: Any) -> None:
        with path.open('a', encoding='utf-8') as file:
            file.write(json.dumps(str(message)) + '\n')

    warnings.simplefilter('ignore')
    validation.warn = record  # type: ignore[assignment]


def _count_fetched(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# -- in the process that compares ------------------------------------------------------------------


def judge(
    subject: Subject, folder: Path, kills: tuple[int, ...] = KILLS, n_epoch: int = N_EPOCH
) -> Verdict:
    "Train without a stop, kill and resume at each of `kills`, and return the verdict."
    began = time.monotonic()
    verdict, note = _judge(subject, folder, kills, n_epoch)
    seconds = time.monotonic() - began
    print(f'{verdict:14} {subject.name} ({seconds:.0f} s) {note}', flush=True)
    return Verdict(
        subject.library, find_version(subject.library) or '', subject.title, verdict, note
    )


def _judge(subject: Subject, folder: Path, kills: tuple[int, ...], n_epoch: int) -> tuple[str, str]:
    "Return the worst verdict of all kills, with what it is based on."
    run = partial(_run, subject, data=folder / 'data', n_epoch=n_epoch)
    try:
        straight = run(folder=folder / 'straight')
    except HarnessError as e:
        return FAILED, _find_error(e)
    outcomes = [_judge_kill(run, folder / f'killed{n}', n, straight) for n in kills]
    verdict = max((verdict for verdict, _ in outcomes), key=SEVERITY.index)
    notes = [note for kind, note in outcomes if kind == verdict and note]
    if verdict in (WRONG, BROKEN, WARNED):
        again = run(folder=folder / 'again')
        if compare(straight, again, 0):
            warned = [note for kind, note in outcomes if kind == WARNED]
            return UNREPEATABLE, warned[0] if warned else ''
    return verdict, '; '.join(notes) if verdict == WRONG else ''.join(notes[:1])


def _judge_kill(
    run: Callable[..., Result], folder: Path, n: int, straight: Result
) -> tuple[str, str]:
    "Kill a run after `n` batches, resume it, and return the verdict with a note."
    try:
        run(folder=folder, kill=n)
        resumed = run(folder=folder)
    except HarnessError as e:
        error = _find_error(e)
        return (REFUSED if error.partition(':')[0] in TYPED else BROKEN), error
    texts = _read_warnings(folder)
    note = summarize(texts[-1]) if texts else ''
    if lines := compare(straight, resumed, n):
        print(f'  {folder.name}: {", ".join(lines)}')
        return (WARNED, note) if texts else (WRONG, f'after {n} batches {", ".join(lines)}')
    surplus = _count_surplus(resumed) - _count_surplus(straight)
    is_replayed = straight['n_fetched'] > 0 and surplus > 0
    return (REPLAYED if is_replayed else EXACT), note


def summarize(text: str) -> str:
    "Return a short clause of a warning."
    for part, clause in CLAUSES.items():
        if part in text:
            names = re.findall(r'training loader\.([\w.]+)', text)
            return clause.format(', '.join(f'`{name}`' for name in names[:2]))
    return shorten(text)


def _run(
    subject: Subject, folder: Path, data: Path, n_epoch: int, kill: int | None = None
) -> Result:
    "Train in a forked process, which is killed before batch `kill`; raise `HarnessError` if it fails by itself."
    folder.mkdir(parents=True, exist_ok=True)
    planned = None if kill is None else Planned('batch', kill + 1, signal.SIGKILL, group=True)
    with start(partial(train, subject, folder, data, n_epoch), planned) as child:
        code = child.wait(TIMEOUT_S)
        if code != (0 if kill is None else -signal.SIGKILL):
            raise child.error(f'ended with {code}')
        return {} if kill is not None else _read_result(child)


def _read_result(child: Child) -> Result:
    result: Result = child.result
    return result


def compare(straight: Result, resumed: Result, n: int) -> list[str]:
    "Return what differs in a run that was resumed after `n` batches."
    expected, got = straight['batches'][n:], resumed['batches']
    found = []
    numbers = [Counter(epoch for epoch, *_ in batches) for batches in (expected, got)]
    if numbers[0] != numbers[1]:
        counts = [' + '.join(str(c) for _, c in sorted(number.items())) for number in numbers]
        found.append(f'batches {counts[1]} for {counts[0]}')
    if [ids for _, ids, _ in expected] != [ids for _, ids, _ in got]:
        found.append('samples')
    elif [digest for *_, digest in expected] != [digest for *_, digest in got]:
        found.append('values')
    found += [k for k in ('weights', 'history') if differences(straight[k], resumed[k])]
    return found


def _count_surplus(result: Result) -> int:
    "Return the number of samples that were fetched and not trained on."
    n_trained: int = sum(len(ids) for _, ids, _ in result['batches'])
    n_fetched: int = result['n_fetched']
    return n_fetched - n_trained


def _read_warnings(folder: Path) -> list[str]:
    path = folder / 'warnings.json'
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text('utf-8').splitlines()]


def _find_error(e: HarnessError) -> str:
    "Return the type and the first sentence of the last error in a child's output."
    lines = re.findall(r'^[\w.]*(?:Error|Exception|Warning)\b.*', str(e), re.MULTILINE)
    line = lines[-1] if lines else str(e).splitlines()[0]
    return shorten(re.sub(r'^[\w.]*\.(?=\w+:)', '', line))
