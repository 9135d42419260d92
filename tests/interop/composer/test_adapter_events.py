"""Every row of the table's Composer column is fired by a real run, in order and number."""

from typing import Any

import torch

from learnkit import DataLoaders, Learner
from learnkit.interop import from_composer
from learnkit.testing import RegModel
from tests.helpers.learners import quiet_learner

ONE_PIECE = (
    'before_forward after_forward before_loss after_loss before_backward after_backward'.split()
)
ONE_BATCH = [
    'before_dataloader',
    'after_dataloader',
    'batch_start',
    'before_train_batch',
    *ONE_PIECE * 2,
    'after_train_batch',
    'batch_end',
    'batch_checkpoint',
]
ONE_EVAL = [
    'eval_start',
    *['eval_batch_start', 'eval_before_forward', 'eval_after_forward', 'eval_batch_end'] * 2,
    'eval_end',
]


class EventLog:
    "Records every event by its name."

    def __init__(self) -> None:
        self.names: list[str] = []

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        self.names.append(event.value)

    def close(self, state: Any, logger: Any) -> None:
        self.names.append('close')

    def post_close(self) -> None:
        self.names.append('post_close')

    def taken(self) -> list[str]:
        names, self.names = self.names, []
        return names


def learner(cb: Any, **kwargs: Any) -> Learner:
    "Return a Learner with 2 validation loaders of 2 batches, and 3 batches of 8 samples in microbatches of 4."
    torch.manual_seed(0)
    x = torch.randn(24, 1)
    loader = lambda n: [(x[8 * i : 8 * i + 8], 2 * x[8 * i : 8 * i + 8]) for i in range(n)]
    dls = DataLoaders(loader(3), {'day': loader(2), 'night': loader(2)})
    return quiet_learner(
        dls, RegModel(), torch.nn.MSELoss(), lr=0.1, microbatch=4, cbs=from_composer(cb), **kwargs
    )


def test_fit_fires_all_in_order() -> None:
    cb = EventLog()
    learn = learner(cb)
    assert cb.taken() == ['init']
    learn.fit(2, iteration=2)
    epoch = [
        'epoch_start',
        *ONE_BATCH * 3,
        'before_dataloader',
        'epoch_end',
        'eval_before_all',
        *ONE_EVAL * 2,
        'eval_after_all',
        'epoch_checkpoint',
    ]
    assert cb.taken() == [
        'before_load',
        'after_load',
        'fit_start',
        'iteration_start',
        *epoch * 2,
        'iteration_end',
        'iteration_checkpoint',
        'fit_end',
    ]


def test_a_fit_without_iterations_starts_one_and_a_fit_that_ends_within_an_epoch_has_no_end_of_it() -> (
    None
):
    cb = EventLog()
    learn = learner(cb)
    cb.taken()
    learn.fit('4ba')
    assert cb.taken() == [
        'before_load',
        'after_load',
        'fit_start',
        'iteration_start',
        'epoch_start',
        *ONE_BATCH * 3,
        'before_dataloader',
        'epoch_end',
        'eval_before_all',
        *ONE_EVAL * 2,
        'eval_after_all',
        'epoch_checkpoint',
        'epoch_start',
        *ONE_BATCH,
        'fit_end',
        'eval_before_all',
        *ONE_EVAL * 2,
        'eval_after_all',
    ]


def test_standalone_evaluation_and_prediction_have_their_own_events() -> None:
    cb = EventLog()
    learn = learner(cb)
    cb.taken()
    learn.validate()
    loads = ['before_load', 'after_load']
    assert cb.taken() == [*loads, 'eval_standalone_start', *ONE_EVAL * 2, 'eval_standalone_end']
    learn.get_preds()
    one = (
        'predict_batch_start predict_before_forward predict_after_forward predict_batch_end'.split()
    )
    assert cb.taken() == ['predict_start', *one * 2, 'predict_end']
