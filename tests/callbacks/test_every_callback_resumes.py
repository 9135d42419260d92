"""For every callback class, a resumed run ends like an uninterrupted run, in its state and its files.

This includes a folder that was moved, and a folder that a killed process has written to after the checkpoint."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from learnkit import Callback, Learner
from learnkit.checkpoint.digest import differences
from learnkit.core.errors import CancelFitException
from learnkit.engine.resumed_run import checkpoint_point
from tests.helpers.every_callback import CLASSES, DEFAULTS, RESUMED, learner, make_to_resume
from tests.helpers.output import capture_printed, read_files, to_comparable
from tests.helpers.resuming import State, check_every_place, scramble, through_a_file

# large attributes for display only, which do not influence training and are documented as not checkpointed
NOT_KEPT = {
    'FetchPredsCallback': {'preds'},
    'CollectDataCallback': {'data'},
    'PeriodicData': {'results'},
    'ImageVisualizer': {'images'},
    'HookCallback': {'hooks'},
    'ActivationMonitor': {'hooks'},
    'ActivationStats': {'hooks'},
    'RNNCallback': {'raw_out', 'out'},
    'MixUp': {'lam', 'yb1'},
    'CutMix': {'lam', 'yb1'},
    'GatherPredsCallback': {'preds', 'targets', 'n_batches'},
    'SaveModelCallback': {'last_saved_path'},
}
BY_NAME = {cls.__name__: cls for cls in CLASSES}
# they take seconds
ONE_PLACE = 'MlflowLogger WandbLogger ExportForInference'.split()


class Watch(Callback):
    "Record at each place the callbacks' public attributes, the printed lines and a copy of the folder."

    order = 2100  # after the checkpoint was made

    def __init__(self) -> None:
        self.places: list[tuple[str, int]] = []
        self.seen: list[dict[str, Any]] = []
        self.copies: list[Path] = []
        self.n_lines: list[int] = []
        self.lines: list[str] = []

    def look(self) -> None:
        learn = self.learn
        self.places.append((checkpoint_point(learn), learn.time.ba))
        self.seen.append(shown(learn))
        self.n_lines.append(len(self.lines))
        self.copies.append(learn.path.with_name(f'{learn.path.name}-{len(self.copies)}'))
        if learn.path.exists():
            shutil.copytree(learn.path, self.copies[-1])

    batch_checkpoint = epoch_checkpoint = iteration_checkpoint = look

    def after_fit(self) -> None:
        if self.learn.fitting:
            self.look()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.lines.clear()  # what comes at the start comes again


def shown(learn: Learner) -> dict[str, Any]:
    "Return the public attributes of the callbacks as comparable values."
    return {
        key: {
            name: to_comparable(value, learn.path)
            for name, value in vars(cb).items()
            if name[0] != '_'
            and name != 'learn'
            and name not in NOT_KEPT.get(type(cb).__name__, ())
        }
        for cb in learn.cbs
        if type(cb).__module__.startswith('learnkit.') and type(cb) not in DEFAULTS
        for key in [learn.parts.callbacks.keys[id(cb)]]
    }


def check(
    tmp_path: Path,
    cbs: Callable[[], list[Any]],
    places: Callable[[list[State]], Iterable[State]] = lambda kept: kept,
    fit: Callable[[Learner, Any], None] = lambda learn, resume: learn.fit(2, resume=resume),
    keep_again: bool = False,
    n_more_kills: int = 2,
    **kwargs: Any,
) -> None:
    "Check callbacks resumed from some of the places."
    runs: list[Learner] = []

    def make() -> Learner:
        runs.append(learner(tmp_path / f'run{len(runs)}', Watch(), *cbs(), **kwargs))
        return runs[-1]

    def run(learn: Learner, resume: Any) -> None:
        straight, watch = runs[0], learn.watch
        if learn is not straight:
            n = straight.watch.places.index((resume['loop']['point'], resume['loop']['done']['ba']))
            # the process was lost at once, or much later
            copy = straight.watch.copies[-1 if n % 2 else n]
            if copy.exists():
                shutil.copytree(copy, learn.path)
            for file in learn.path.rglob('events.out.*'):
                file.rename(str(file).replace('tfevents.1', 'tfevents.0'))
        with capture_printed(learn, watch.lines):
            fit(learn, resume)
        learn.close()
        if learn is not straight:
            compare(straight, learn, n)

    check_every_place(make, run, places, keep_again, n_more_kills)


def compare(straight: Learner, learn: Learner, n: int) -> None:
    "Compare attributes, lines and files since place `n`."
    assert learn.watch.places == straight.watch.places[n + 1 :]
    for place, found, expected in zip(
        learn.watch.places, learn.watch.seen, straight.watch.seen[n + 1 :], strict=True
    ):
        wrong = differences(expected, found)
        assert not wrong, '\n'.join([f'shown at {place}, resumed from place {n}:', *wrong])
    lines = straight.watch.lines[: straight.watch.n_lines[n]] + learn.watch.lines
    assert lines == straight.watch.lines, f'resumed from place {n}'
    wrong = differences(read_files(straight), read_files(learn))
    assert not wrong, '\n'.join([f'written, resumed from place {n}:', *wrong])


def some(*numbers: int) -> Callable[[list[State]], list[State]]:
    return lambda kept: [kept[n] for n in numbers if n < len(kept)]


def make_all(cls: type[Callback]) -> list[Any]:
    "Return an instance of a class, unless every Learner has one, and of the class that it needs."
    needed = [BY_NAME['RNNCallback']] if cls.__name__ == 'RNNRegularizer' else []
    return [make_to_resume(c) for c in (*needed, cls) if c not in DEFAULTS]


@pytest.mark.parametrize(
    ('numbers', 'n_more_kills'),
    [
        # the process is lost at once at an even place, and much later than at an odd one
        ((2, 3), 1),
        pytest.param((2, 3, 4), 2, marks=pytest.mark.full),
    ],
    ids=['some', 'more'],
)
@pytest.mark.parametrize('cls', RESUMED, ids=lambda cls: cls.__name__)
def test_every_callback_resumes_as_if_it_had_not_stopped(
    cls: type[Callback], numbers: tuple[int, ...], n_more_kills: int, tmp_path: Path
) -> None:
    places = some(3) if cls.__name__ in ONE_PLACE else some(*numbers)
    check(
        tmp_path,
        lambda: make_all(cls),
        places,
        n_more_kills=n_more_kills,
        rnn=cls.__name__.startswith('RNN'),
        eval_every='3ba',
    )


@pytest.mark.parametrize('cls', RESUMED, ids=lambda cls: cls.__name__)
def test_the_state_of_a_loaded_state_is_the_same(cls: type[Callback], tmp_path: Path) -> None:
    def make(folder: str) -> Learner:
        is_rnn = cls.__name__.startswith('RNN')
        return learner(tmp_path / folder, *make_all(cls), rnn=is_rnn, eval_every='3ba')

    first = make('first')
    with first.no_logging():
        first.fit(1)
    state = through_a_file(first.callback_states())
    for folder in ('second', 'third'):
        scramble(1)
        again, load = make(folder), Load(state)
        if first.path.exists():
            shutil.copytree(first.path, again.path, dirs_exist_ok=True)
        with again.no_logging():
            again.fit(1, cbs=load)
        assert not (found := differences(state, load.states, leave_out=())), '\n'.join(found)
        state = through_a_file(load.states)


class Load(Callback):
    "Load states into all callbacks when they have begun a fit, take their states, and end the fit."

    order = 5000

    def __init__(self, states: State) -> None:
        self._loaded, self.states = states, State()

    def before_fit(self) -> None:
        self.learn.load_callback_states(self._loaded)
        self.states = self.learn.callback_states()
        raise CancelFitException

    def state_dict(self) -> None:
        return None


# what goes together: instances of one class, accumulation, loggers with those whose values they get
TOGETHER: dict[str, list[str]] = {
    'two of a class': ['TrackerCallback', 'TrackerCallback', 'EMA', 'Periodic', 'Periodic'],
    'clip and average accumulated gradients': [
        'GradientAccumulation',
        'EMA',
        'GradientClip',
        'OptimizerMonitor',
    ],
    'log what others measure': [
        'ImageVisualizer',
        'SpeedMonitor',
        'BestMetric',
        'JSONLinesLogger',
        'CSVLogger',
    ],
    'tell what others measure': [
        'SpeedMonitor',
        'OptimizerMonitor',
        'GradientAccumulation',
        'ConsoleLogger',
    ],
    'save the average': ['EMA', 'SaveModelCallback', 'EarlyStoppingCallback', 'ReduceLROnPlateau'],
}


@pytest.mark.parametrize('names', TOGETHER.values(), ids=TOGETHER)
def test_callbacks_resume_together(names: list[str], tmp_path: Path) -> None:
    cbs = lambda: [make_to_resume(BY_NAME[name]) for name in names]
    check(tmp_path, cbs, some(1, 3, 4, 6), eval_every='2ba')


def test_a_callback_of_one_fit_resumes(tmp_path: Path) -> None:
    def fit(learn: Learner, resume: Any) -> None:
        cbs = [
            make_to_resume(BY_NAME[name])
            for name in ('LRMonitor', 'JSONLinesLogger', 'TrackerCallback')
        ]
        learn.fit(2, cbs=cbs, resume=resume)

    check(tmp_path, lambda: [make_to_resume(BY_NAME['EMA'])], some(1, 4), fit)


def test_the_second_fit_resumes(tmp_path: Path) -> None:
    def fit(learn: Learner, resume: Any) -> None:
        if resume is False:
            learn.fit_one_cycle(1)
        learn.fit_one_cycle(2, resume=resume)

    names = 'JSONLinesLogger', 'SaveModelCallback', 'BestMetric', 'LRMonitor'
    cbs = lambda: [make_to_resume(BY_NAME[name]) for name in names]
    check(tmp_path, cbs, some(6, 7), fit, keep_again=True)
