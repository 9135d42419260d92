"""The lifecycle table: its names, its readers, and the loop's events compared with it."""

from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from learnkit import Callback, UnknownEventError
from learnkit.engine.events import (
    EVENTS,
    LIFECYCLE,
    lifecycle_markdown,
)
from learnkit.engine.seams import SEAMS
from learnkit.testing import synth_learner

FASTAI = """after_create before_fit before_epoch before_train before_batch after_pred after_loss before_backward
    after_cancel_backward after_backward before_step after_cancel_step after_step after_cancel_batch after_batch
    after_cancel_train after_train before_validate after_cancel_validate after_validate after_cancel_epoch after_epoch
    after_cancel_fit after_fit""".split()
COMPOSER = """
    INIT BEFORE_LOAD AFTER_LOAD FIT_START ITERATION_START EPOCH_START BEFORE_DATALOADER AFTER_DATALOADER BATCH_START
    BEFORE_TRAIN_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD
    AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT EPOCH_END EPOCH_CHECKPOINT ITERATION_END ITERATION_CHECKPOINT
    FIT_END EVAL_BEFORE_ALL EVAL_STANDALONE_START EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD
    EVAL_BATCH_END EVAL_END EVAL_AFTER_ALL EVAL_STANDALONE_END PREDICT_START PREDICT_BATCH_START
    PREDICT_BEFORE_FORWARD PREDICT_AFTER_FORWARD PREDICT_BATCH_END PREDICT_END""".split()


def test_fastais_events_are_there_in_their_order() -> None:
    assert len(FASTAI) == 24
    assert [e for e in EVENTS if e in FASTAI] == FASTAI


def test_every_composer_event_has_a_row() -> None:
    rows = {name for m in LIFECYCLE for name in m.composer.split(', ') if name}
    assert rows == {*COMPOSER, 'close', 'post_close'}


@pytest.mark.parametrize(
    ('wrong', 'close'),
    [
        ('befor_fit', 'before_fit'),
        ('on_epoch_end', 'after_epoch'),
        ('begin_validate', 'before_validate'),  # fastai 2.0
        ('on_new_best', None),
        (3, None),
    ],
)
def test_an_unknown_event_is_named_with_the_closest(wrong: Any, close: str | None) -> None:
    with pytest.raises(UnknownEventError) as e:
        synth_learner(default_cbs=False)(wrong)
    assert repr(wrong) in str(e.value)
    assert f'`{close}`' in str(e.value) if close else 'Did you mean' not in str(e.value)


def test_names_may_be_of_an_enum() -> None:
    class Names(StrEnum):
        FIT = 'before_fit'
        CANCEL = 'after_cancel_validate'

    seen: list[str] = []

    class Journal(Callback):
        def run_event(self, event_name: str) -> None:
            seen.append(f'{event_name} {type(event_name).__name__}')

    cbs = Callback(before_fit=lambda cb: seen.append('function'))
    learn = synth_learner(default_cbs=False, cbs=cbs)
    learn.add_cb(Journal())
    learn(Names.FIT)
    learn([Names.CANCEL, Names.FIT])
    assert seen == [
        'function',
        'before_fit str',
        'after_cancel_validate str',
        'function',
        'before_fit str',
    ]


def test_show_training_loop_prints_each_moment_with_its_callbacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Watch(Callback):
        run_valid = False

        def after_pred(self) -> None:
            "Do nothing."

    learn = synth_learner(default_cbs=False, cbs=[Watch, Callback(before_fit=print)])
    learn.show_training_loop()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(LIFECYCLE) + 1 + len(SEAMS)
    for line, m in zip(lines, LIFECYCLE, strict=False):
        assert line.startswith('  ' * m.depth) and not line[2 * m.depth :].startswith(' ')
        assert line.split()[0 if m.is_note else 1] == m.event.split()[0]
    shown = [line for line in lines if 'Watch' in line]
    assert len(shown) == 1 and 'after_pred' in shown[0]  # in training, not in evaluation
    assert [line.split()[1] for line in lines if 'Callback(' in line] == ['before_fit']


def test_a_fit_fires_events_in_the_order_of_the_table() -> None:
    class Journal(Callback):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def run_event(self, event_name: str) -> None:
            self.seen.append(event_name)

    log = Journal()
    learn = synth_learner(n_train=1, n_valid=1, cbs=log)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, iteration=1)
    learn.close()
    absent = {e for e in EVENTS if 'cancel' in e or 'load' in e or 'predict' in e} | {'after_error'}
    assert list(dict.fromkeys(log.seen)) == [e for e in EVENTS if e not in absent]


def test_the_documentation_is_printed_from_the_table() -> None:
    page = (Path(__file__).parents[2] / 'docs' / 'lifecycle.md').read_text('utf-8')
    assert page.endswith(lifecycle_markdown())
    assert all(f'`{name}`' in lifecycle_markdown() for name in EVENTS)
