"""Done, undone and done again: what an extra forward pass, a search or a second resume used to leave behind."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from fastcore.basics import noop
from torch import Tensor, nn

from learnkit import SAM, SGD, Callback, Checkpoint, DataLoaders, Learner, Replay
from learnkit.callbacks import ActivationCheckpointing, GuardNonFinite
from learnkit.interop import from_keras, from_lightning
from tests.helpers.learners import quiet_learner
from tests.silent.cases import case

row = partial(case, 'twice')


class Counts(nn.Linear):
    "A layer that counts its calls in extra state, kept in an object that no copy of attributes reaches."

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.box = type('Box', (), {'n': 0})()

    @property
    def n(self) -> int:
        return int(self.box.n)

    def get_extra_state(self) -> Any:
        return self.box.n

    def set_extra_state(self, state: Any) -> None:
        self.box.n = state

    def forward(self, x: Tensor) -> Tensor:
        self.box.n += 1
        return super().forward(x)


def make(model: nn.Module, *cbs: Any, **options: Any) -> Learner:
    "Return a Learner of 4 training batches, and one of validation."
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 16)[:, None]
    dls = DataLoaders.from_tensors((x, 2 * x), (x[:4], x[:4]), bs=4, device='cpu')
    return quiet_learner(dls, model, nn.MSELoss(), lr=0.01, cbs=[*cbs], **options)


def count_after(use: Callable[[Learner], object]) -> int:
    "Return the number of calls that a feature leaves."
    model = Counts()
    use(make(model))
    return model.n


# -- extra forward passes --------------------------------------------------------------------------


@row('calls in extra state that lr_find leaves', old='6')
def lr_find() -> tuple[Any, Any]:
    return count_after(lambda learn: learn.lr_find(num_it=6, show_plot=False)), 0


@row('calls in extra state that check_resume leaves', old='6')
def check_resume() -> tuple[Any, Any]:
    return count_after(lambda learn: learn.check_resume(3, 1)), 0


@row('calls in extra state that find_batch_size leaves', old='6')
def find_batch_size() -> tuple[Any, Any]:
    return count_after(lambda learn: learn.find_batch_size(max_size=8)), 0


@row('calls in extra state that summary leaves', old='1')
def summary() -> tuple[Any, Any]:
    return count_after(lambda learn: learn.summary()), 0


@row('calls in extra state of a fit of 4 batches with SAM, without its second passes', old='9')
def second_pass() -> tuple[Any, Any]:
    model = Counts()
    learn = make(model, SAM())
    learn.fit(1)
    return model.n, 4 + 1


@row('calls in extra state of a checkpointed layer in 4 batches', old='9')
def recomputed() -> tuple[Any, Any]:
    model = nn.Sequential(Counts(), nn.Tanh())
    make(model, ActivationCheckpointing(Counts)).fit(1)
    return model[0].n, 4 + 1


@row('calls in extra state after 4 batches of which one was skipped as not finite', old='5')
def skipped() -> tuple[Any, Any]:
    model = Counts()

    def spoil(cb: Any) -> None:
        if cb.learn.training and cb.iter == 1:
            cb.learn.xb = (cb.x * float('nan'),)

    learn = make(model, Callback(before_batch=spoil), GuardNonFinite('skip'))
    learn.fit(1)
    return model.n, 3 + 1


# -- what predictions leave ------------------------------------------------------------------------


@row('valid_loss in `recorder.measured` after a prediction', old='None')
def measured() -> tuple[Any, Any]:
    learn = make(nn.Linear(1, 1))
    learn.fit(1)
    expected = learn.history[-1]['valid_loss']
    learn.get_preds()
    return learn.recorder.measured.get('valid_loss'), expected


@row('predictions before the first fit with Replay', old='KeyError')
def replay() -> tuple[Any, Any]:
    model = nn.Linear(1, 1)
    try:
        preds = make(model, Replay()).get_preds()[0].flatten().tolist()
    except KeyError as e:
        return type(e).__name__, 'predictions'
    x = torch.linspace(-1, 1, 16)[:4, None]
    return preds, model(x).flatten().tolist()


# -- lazy layers -----------------------------------------------------------------------------------


def describe_lazy(use: Callable[[Learner], object]) -> str:
    model = nn.Sequential(nn.LazyLinear(1))
    learn = make(model)
    use(learn)
    try:
        learn.fit(1)
    except AttributeError as e:
        return f'{type(e).__name__} in the next fit'
    return str(model[0])


@row('a lazy layer after lr_find', old='AttributeError in the next fit')
def lazy_search() -> tuple[Any, Any]:
    found = describe_lazy(lambda learn: learn.lr_find(num_it=6, show_plot=False))
    return found, str(nn.Linear(1, 1))


@row('a lazy layer after check_resume', old='AttributeError in the next fit')
def lazy_check() -> tuple[Any, Any]:
    return describe_lazy(lambda learn: learn.check_resume(3, 1)), str(nn.Linear(1, 1))


class LazyModule(nn.Module):
    "A module in Lightning's style with a lazy layer."

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LazyLinear(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@row('weight of a LightningModule with a lazy layer, killed twice', old='WeightsError')
def lazy_resume() -> tuple[Any, Any]:
    x = torch.linspace(-1, 1, 16)[:, None]
    batches = [(x[i : i + 4], 2 * x[i : i + 4]) for i in range(0, 16, 4)]

    def train(folder: Path, kills: tuple[int, ...]) -> float:
        for at in (*kills, None):
            torch.manual_seed(0)
            learn = from_lightning(LazyModule(), DataLoaders(batches))
            learn.path = folder
            learn.logger = noop
            learn.add_cbs([Checkpoint('1ba'), *interrupt(at, 'batch_checkpoint', 'ba')])
            run(learn, 2)
        return float(learn.model.net.weight.detach())

    torch.manual_seed(0)
    net = nn.LazyLinear(1)
    net(x[:4])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for xb, yb in batches * 2:
        opt.zero_grad()
        (net(xb) - yb).square().mean().backward()
        opt.step()
    with TemporaryDirectory() as folder:
        try:
            found: Any = train(Path(folder), (2, 5))
        except Exception as e:
            found = type(e).__name__
    return found, float(net.weight.detach())


def interrupt(at: int | None, event: str, unit: str) -> list[Callback]:
    "Return a callback that interrupts a run at a time; none for None."

    def stop(cb: Any) -> None:
        if cb.learn.finished(unit) == at:
            raise KeyboardInterrupt

    return [] if at is None else [Callback(order=3000, **{event: stop})]


def run(learn: Learner, n_epoch: int) -> None:
    try:
        learn.fit(n_epoch, resume=True)
    except KeyboardInterrupt:
        pass


# -- second resumes --------------------------------------------------------------------------------


class EarlyStopping:
    "Keras's callback: the comparison and the sign of `min_delta` are chosen at the first epoch."

    def __init__(self) -> None:
        self.min_delta, self.monitor_op = 0.03, None

    def on_train_begin(self, logs: Any = None) -> None:
        self.best, self.wait = np.inf, 0

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        if self.monitor_op is None:
            self.monitor_op, self.min_delta = np.less, -self.min_delta
        self.wait += 1
        if self.monitor_op(logs['val_loss'] - self.min_delta, self.best):
            self.best, self.wait = logs['val_loss'], 0
        if self.wait >= 2:
            self.model.stop_training = True  # type: ignore[attr-defined]


def count_epochs(folder: Path, kills: list[int]) -> int:
    "Train a weight that shrinks by a fifth in each epoch of one step; return the number of epochs."
    data = torch.ones(4, 1), torch.zeros(4, 1)
    for at in (*kills, None):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        dls = DataLoaders.from_tensors(data, data, bs=4, device='cpu')
        cbs = [from_keras(EarlyStopping()), Checkpoint('1ep', folder)]
        learn = quiet_learner(dls, model, nn.MSELoss(), SGD, lr=0.1, path=folder, cbs=cbs)
        learn.add_cbs(interrupt(at, 'epoch_checkpoint', 'ep'))
        run(learn, 30)
    return int(learn.time.ep)


@row(
    'epochs with EarlyStopping(min_delta=.03) of Keras after 0 to 4 kills',
    old='[10, 10, 30, 30, 10]',
)
def min_delta() -> tuple[Any, Any]:
    found = []
    for n in range(5):
        with TemporaryDirectory() as folder:
            found.append(count_epochs(Path(folder), [2, 4, 6, 8][:n]))
    best, wait, epoch = np.inf, 0, 0
    while wait < 2:
        epoch += 1
        loss = 0.64**epoch
        wait = 0 if loss < best - 0.03 else wait + 1
        best = min(best, loss) if wait == 0 else best
    return found, [epoch] * 5
