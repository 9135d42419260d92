"""State in unusual places: what a run that is resumed in new objects loses, and whether it was named before."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.checkpoint.hidden_state import EXACT, NAMED, Make, in_callback, judge
from tests.silent.cases import case

rehearsal = partial(case, 'rehearsal')


def judged(make: Make, line: str = '') -> str:
    with TemporaryDirectory() as folder:
        return judge(make, Path(folder), line)


@rehearsal('a generator of a callback', old='silent')
def generator() -> Any:
    return judged(lambda: in_callback('generator'), 'FromIterator.it'), 'named'


@rehearsal('rows of a DataFrame in a callback', old='silent')
def rows_of_frame() -> Any:
    return judged(lambda: in_callback('DataFrame.itertuples'), 'FromIterator.it'), 'named'


@rehearsal('a generator in a closure of the data set', old='silent')
def data_closure() -> Any:
    return judged(*NAMED['torch generator in a closure of the data']), 'named'


@rehearsal('weights of a sampler that a callback sets', old='silent')
def sampler_weights() -> Any:
    return judged(*NAMED['weights of a sampler set']), 'named'


@rehearsal('a leaf tensor with requires_grad', old='silent')
def leaf_tensor() -> Any:
    return judged(*NAMED['leaf tensor with requires_grad']), 'named'


@rehearsal('the closure of a forward hook', old='silent')
def forward_hook() -> Any:
    return judged(*NAMED['closure of a forward hook']), 'named'


@rehearsal("a count on the model's class", old='silent')
def model_class() -> Any:
    return judged(*NAMED['count on the class of the model']), 'named'


@rehearsal('a second Learner in a callback', old='silent')
def second_learner() -> Any:
    return judged(*NAMED['second Learner']), 'named'


@rehearsal("a callback's slots", old='silent')
def slots() -> Any:
    return judged(EXACT['slots of a callback']), 'exact'
