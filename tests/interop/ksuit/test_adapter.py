"""ksuit- and Noether-style callbacks in a Learner: small typical ones, and the arguments of their hooks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from learnkit.core.errors import CallbackError, OptionError
from learnkit.interop import from_ksuit
from tests.helpers.interop import make_learner

learner = partial(make_learner, adapt=from_ksuit)


# -- what hooks are given --------------------------------------------------------------------------


def test_order_and_number_of_hooks() -> None:
    names: list[str] = []
    hooks = (
        'before_training before_epoch before_every_update before_every_accumulation_step '
        'before_every_backward track_after_accumulation_step before_every_optim_step '
        'track_after_update_step after_update after_epoch after_training at_eval'
    ).split()
    All = type('All', (), {h: lambda self, h=h, **_: names.append(h) for h in hooks})
    learn = learner(All())
    learn.fit(2)
    update = ['before_every_update', *hooks[3:6] * 2, *hooks[6:9]]
    assert names == [
        'before_training',
        *['before_epoch', *update * 3, 'after_epoch'] * 2,
        'after_training',
    ]
    names.clear()
    learn.validate()
    assert names == ['at_eval']
    learn.get_preds()
    assert names == ['at_eval']


def test_values_of_an_accumulation_step_and_an_update() -> None:
    class Look:
        def __init__(self) -> None:
            self.steps, self.times, self.losses = [], [], []

        def track_after_accumulation_step(
            self,
            *,
            batch: Any,
            losses: Any,
            update_outputs: Any,
            accumulation_step: int,
            accumulation_steps: int,
            update_counter: Any,
        ) -> None:
            assert batch[0].shape == update_outputs['pred'].shape == (4, 1)
            assert not update_outputs['pred'].requires_grad
            self.steps.append((accumulation_step, accumulation_steps, update_counter.update))
            self.losses.append(
                (update_outputs['pred'] - batch[1]).square().mean().item() - losses['total'].item()
            )

        def track_after_update_step(self, *, times: dict[str, float], update_counter: Any) -> None:
            self.times.append(
                (
                    sorted(times),
                    update_counter.effective_batch_size,
                    update_counter.updates_per_epoch,
                )
            )

    cb = Look()
    learner(cb).fit(1)
    assert cb.steps == [(i, 2, update) for update in range(3) for i in (0, 1)]
    assert cb.times == [(['backward', 'data_wait', 'forward', 'update'], 8, 3)] * 3
    assert cb.losses == pytest.approx([0.0] * 6, abs=1e-6)


def test_hooks_run_without_gradients_and_in_evaluation_mode_and_change_nothing() -> None:
    class Draw:
        every_n_updates = 1

        def periodic_callback(self, *, trainer_model: nn.Module, **_: Any) -> None:
            assert not torch.is_grad_enabled() and not trainer_model.training
            torch.rand(3)

    def trained(*cbs: Any) -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        learn = learner(*cbs, model=model)
        learn.fit(2)
        return torch.cat([p.detach().flatten() for p in learn.model.parameters()]).tolist()

    assert trained(Draw()) == trained()


def test_what_a_callback_lacks_is_given_and_its_own_stays() -> None:
    class Own:
        path_provider = writer = None

        def __init__(self) -> None:
            self.tracker = 'mine'

        def before_training(self, update_counter: Any) -> None:
            assert self.tracker == 'mine' and self.update_counter is update_counter
            assert self.model is self.trainer.model and str(self.trainer.device) == 'cpu'
            assert list(self.data_container.datasets) == ['train', 'day', 'night']
            assert self.trainer.callbacks == [self] and self.trainer.log_writer is self.writer
            assert self.trainer.precision == 'fp32'
            assert update_counter.epoch == 0
            assert not update_counter.is_full_epoch

    cb = Own()
    learn = learner(cb)
    learn.fit(1)
    other = learner(cb)
    other.fit(1)
    assert cb.model is other.model  # what was given here follows the Learner


def test_entries_are_written_at_the_end_of_a_fit(tmp_path: Path) -> None:
    class Logs:
        writer: Any = None
        every_n_updates = 2

        def periodic_callback(self, *, update_counter: Any) -> None:
            self.writer.add_scalar('half', update_counter.update / 2)

    learn = learner(Logs(), path=tmp_path)
    learn.fit(2)
    entries = torch.load(tmp_path / 'tracker' / 'entries.th', weights_only=True)
    assert entries['half'] == {n: n / 2 for n in range(2, learn.time.st + 1, 2)}
    assert list(entries) == ['epoch', 'sample', 'half']


def test_early_stopping_by_exception_and_by_answer(tmp_path: Path) -> None:
    class EarlyStopIteration(StopIteration):
        pass

    class Raises:
        def after_update(self, update_counter: Any) -> None:
            if update_counter.update == 2:
                raise EarlyStopIteration

    class Answers:
        def should_stop_after_epoch(self, checkpoint: Any) -> bool:
            return checkpoint.epoch == 2

    learn = learner(Raises(), path=tmp_path)
    learn.fit(5)
    assert learn.time.st == 2
    saved = torch.load(tmp_path / 'checkpoints' / 'RegModel_cp=E0_U2_S16.early_exit_model.th')
    weights = learn.model.state_dict()
    assert all(torch.equal(t, weights[name]) for name, t in saved['state_dict'].items())
    learn = learner(Answers())
    learn.fit(5)
    assert learn.time.ep == 2


def test_state_goes_through() -> None:
    class Best:
        "Records the last loss, with hooks under the names that its base class wraps."

        every_n_epochs, best = 1, None

        def _periodic_callback(self, **_: Any) -> None:
            self.best = self.writer.log_cache['day/loss']

        def state_dict(self) -> dict[str, Any]:
            return {'best': self.best}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.best = state_dict['best']

    cb = Best()
    learn = learner(cb)
    learn.fit(1)
    sd = learn.cbs[-1].state_dict()
    assert sd['callback'] == {'best': learn.history[0]['day/loss']}
    cb.best = None
    learn.cbs[-1].load_state_dict(sd)
    assert cb.best == sd['callback']['best']


def test_mistakes() -> None:
    class Nothing:
        def go(self) -> None:
            pass

    class Never:
        every_n_epochs = 0

        def periodic_callback(self, **_: Any) -> None:
            pass

    with pytest.raises(CallbackError, match=r'ksuit.*before_training'):
        from_ksuit(Nothing())
    with pytest.raises(OptionError, match=r'Never.every_n_epochs=0'):
        from_ksuit(Never())

    class Fails:
        def track_after_update_step(self, **_: Any) -> None:
            raise ValueError('no')

    learn = learner(Fails())
    with pytest.raises(ValueError, match='no') as e:
        learn.fit(1)
    assert 'in Fails.track_after_update_step, a ksuit-style callback' in e.value.__notes__
    learn.remove_cb(learn.cbs[-1])
    learn.fit(1)
