"""Models, algorithms, logger destinations and stateful callbacks in Composer's style, without Composer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from learnkit import Callback, Checkpoint, DataLoaders, Learner
from learnkit.interop import from_composer
from learnkit.interop.composer.time import ComposerTime, ComposerTimestamp
from tests.helpers.learners import quiet_learner

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)]


class Hits:
    "Accuracy with the interface of torchmetrics."

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right, self.n = 0, 0

    def update(self, pred: torch.Tensor, targ: torch.Tensor) -> None:
        self.right += int((pred.argmax(1) == targ).sum())
        self.n += len(targ)

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.right / self.n)


class Model(nn.Module):
    "A model with Composer's interface."

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, batch[1])

    def eval_forward(self, batch: Any, outputs: Any = None) -> torch.Tensor:
        return self.forward(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool = False) -> dict[str, Hits]:
        return {'Hits': Hits()}

    def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Hits) -> None:
        metric.update(outputs, batch[1])


def learner(*cbs: Any, model: nn.Module | None = None, **kwargs: Any) -> Learner:
    "Return 5 training batches of 8 samples, and 2 validation batches."
    adapted = [from_composer(cb) for cb in cbs]
    return quiet_learner(
        (BATCHES, BATCHES[:2]),
        model or Model(),
        opt_func=torch.optim.SGD,
        lr=0.1,
        cbs=[*adapted, *kwargs.pop('also', ())],
        **kwargs,
    )


def trained_by_hand(n: int, scale: float = 1.0) -> tuple[Model, list[float]]:
    "Return a model after `n` epochs of a plain loop, and its accuracy by batch."
    model, hits = Model(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in BATCHES * n:
        outputs = model((scale * x, y))
        hits.append((outputs.argmax(1) == y).float().mean().item())
        model.loss(outputs, (x, y)).backward()
        opt.step()
        opt.zero_grad()
    return model, hits


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('microbatch', [None, 4])
def test_a_composer_model_trains_as_it_is(microbatch: int | None) -> None:
    learn = learner(microbatch=microbatch)
    learn.fit(2)
    by_hand, _ = trained_by_hand(2)
    torch.testing.assert_close(learn.model.net.weight, by_hand.net.weight)
    valid = BATCHES[:2]
    with torch.no_grad():
        right = sum((by_hand((x, y)).argmax(1) == y).sum().item() for x, y in valid)
        losses = [F.cross_entropy(by_hand.net(x), y).item() for x, y in valid]
    assert learn.history[-1]['Hits'] == pytest.approx(right / 16)
    assert learn.history[-1]['valid_loss'] == pytest.approx(sum(losses) / 2)


def test_a_composer_model_predicts_with_its_eval_forward() -> None:
    learn = learner()
    preds, targets = learn.get_preds()
    x, y = torch.cat([b[0] for b in BATCHES[:2]]), torch.cat([b[1] for b in BATCHES[:2]])
    torch.testing.assert_close(preds, learn.model.net(x).detach())
    assert torch.equal(targets, y)


# -- algorithms ------------------------------------------------------------------------------------


class Halve:
    "An algorithm that halves the inputs, and reverses that after the loss."

    def match(self, event: Any, state: Any) -> bool:
        return event in ('before_forward', 'after_loss')

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        factor = 0.5 if event == 'before_forward' else 2.0
        state.batch_set_item(0, factor * state.batch_get_item(0))


def test_an_algorithm_runs_by_match_and_apply() -> None:
    algorithm = Halve()
    learn = learner(algorithm)
    learn.fit(1)
    by_hand, _ = trained_by_hand(1, scale=0.5)
    torch.testing.assert_close(learn.model.net.weight, by_hand.net.weight)
    view = learn.composer_halve.view
    assert view.algorithms == [algorithm] and view.callbacks == []


# -- logger destinations ---------------------------------------------------------------------------


class Memory:
    "A logger destination that records everything."

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []
        self.parameters: dict[str, Any] = {}

    def init(self, state: Any, logger: Any) -> None:
        self.state = state

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.rows += [(name, float(value), step) for name, value in metrics.items()]

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        self.parameters |= parameters

    def can_upload_files(self) -> bool:
        return False

    def of(self, name: str) -> list[tuple[float, int]]:
        return [(value, step) for row, value, step in self.rows if row == name]


def test_a_destination_receives_learn_log_the_callbacks_log_and_the_trainers() -> None:
    class Logs:
        def init(self, state: Any, logger: Any) -> None:
            logger.log_hyperparameters({'depth': 3})

        def batch_end(self, state: Any, logger: Any) -> None:
            logger.log_metrics({'half': int(state.timestamp.batch) / 2})

    memory = Memory()
    own = Callback(before_batch=lambda cb: cb.learn.log('size', len(cb.x)))
    learn = learner(Logs(), memory, also=[own])
    learn.fit(1)
    _, hits = trained_by_hand(1)
    assert memory.parameters == {'depth': 3}
    assert memory.of('half') == [(i / 2, i) for i in range(1, 6)]
    assert memory.of('size') == [(8.0, i) for i in range(5)]
    assert [value for value, _ in memory.of('metrics/train/Hits')[:5]] == pytest.approx(hits)
    assert [step for _, step in memory.of('loss/train/total')] == list(range(5))
    assert memory.of('metrics/eval/Hits') == [(pytest.approx(learn.history[0]['Hits']), 5)]
    assert learn.history[0]['half'] == 1.5


def test_a_destination_needs_nothing_but_log_metrics() -> None:
    class Prints:
        rows: list[Any] = []

        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            self.rows.append((step, *metrics))

    model = Model()
    model.logger = None
    learn = learner(Prints(), Halve(), model=model)
    learn.fit(1)
    assert (
        4,
        'trainer/device_train_microbatch_size',
        'loss/train/total',
        'metrics/train/Hits',
    ) in Prints.rows
    assert learn.model.logger.destinations == learn.composer_halve.host.logs.destinations
    assert copy.deepcopy(learn.model).logger is learn.model.logger


# -- state of callbacks ----------------------------------------------------------------------------


class Stopper:
    "A small version of Composer's EarlyStopper, without `state_dict`."

    def __init__(self) -> None:
        self.patience = ComposerTime(2, 'ep')
        self.best: Any = None
        self.best_at: Any = None

    def eval_end(self, state: Any, logger: Any) -> None:
        value = state.eval_metrics['eval']['Hits'].compute()
        if self.best is None or value - self.best > 9:
            self.best, self.best_at = value, state.timestamp
        assert self.best_at is not None
        if state.timestamp.epoch - self.best_at.epoch > self.patience:
            state.stop_training()


def test_times_and_timestamps_are_saved_and_a_stopper_stops_after_a_resume(tmp_path: Path) -> None:
    save = Checkpoint('1ep')
    whole = learner(Stopper(), path=tmp_path / 'whole')
    whole.fit(9)
    learner(Stopper(), also=[save], path=tmp_path).fit(2)
    stopper = Stopper()
    learn = learner(stopper, also=[Checkpoint('1ep')], path=tmp_path)
    learn.fit(9, resume=True)
    assert len(learn.history) == len(whole.history) == 4
    assert isinstance(stopper.best_at, ComposerTimestamp)
    assert stopper.best_at.epoch == 1 and stopper.best_at.batch == 5


def test_metrics_are_objects_before_and_after_every_evaluation_and_of_each_loader() -> None:
    seen: list[Any] = []

    class Look:
        def eval_start(self, state: Any, logger: Any) -> None:
            state.eval_metrics[state.dataloader_label]['Hits'].reset()

        def eval_end(self, state: Any, logger: Any) -> None:
            hits = state.eval_metrics[state.dataloader_label]['Hits']
            right = (state.outputs.argmax(1) == state.batch[1]).sum()
            seen.append((hits.compute().item(), hits.n, int(right)))

        def fit_end(self, state: Any, logger: Any) -> None:
            assert [m['Hits'].n for m in state.eval_metrics.values()] == [16, 8]

    learn = quiet_learner(
        DataLoaders(BATCHES, {'task/0-shot': BATCHES[:2], 'task/1-shot': BATCHES[2:3]}),
        Model(),
        opt_func=torch.optim.SGD,
        lr=0.1,
        cbs=from_composer(Look()),
    )
    learn.fit(2)
    last = [(row['task/0-shot/Hits'], row['task/1-shot/Hits']) for row in learn.history]
    assert [(a[0], b[0]) for a, b in zip(seen[::2], seen[1::2], strict=True)] == [
        (pytest.approx(a), pytest.approx(b)) for a, b in last
    ]
    assert [n for _, n, _ in seen] == [16, 8, 16, 8]
    assert [right for _, _, right in seen[1::2]] == [round(8 * hits) for hits, _, _ in seen[1::2]]


def test_a_callback_of_composers_package_without_hooks_is_one() -> None:
    class Idle:
        __module__ = 'composer.core.callback'

    learn = learner(Idle())
    learn.fit(1)
    assert learn.composer_idle.view.callbacks == [learn.composer_idle.wrapped]
