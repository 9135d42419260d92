"Run callbacks of Hugging Face's Trainer in a learnkit Learner and in the Trainer, and compare."

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from learnkit import Checkpoint, DataLoaders, GradientAccumulation, Learner
from learnkit.interop import from_hf
from learnkit.interop.hf import HOOKS
from tests.peers.rows import TOO_FAR, Row, compare_numbers

N, BATCH, EPOCHS, LR = 40, 8, 3, 0.05
G = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=G)
Y = X.sum(1, keepdim=True)
WEIGHTS = ('line.weight', 'line.bias', 'state')
# columns that measure time, and the norm that the Trainer's own clipping computes
OF_TRAINER = ('runtime', 'per_second', 'grad_norm')


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {'x': X[i], 'labels': Y[i]}


class Net(nn.Module):
    "Returns its loss, as models of transformers do."

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        pred = self.line(x)
        return {'loss': F.mse_loss(pred, labels), 'logits': pred}


class Ordered(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> None:
        return None


# -- callbacks as users write them -----------------------------------------------------------------


class Calls(TrainerCallback):
    "Notes each call, with the step and the epoch."

    def __init__(self) -> None:
        self.record: list[Any] = []


def note(hook: str) -> Callable[..., None]:
    def call(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.append((hook, state.global_step, round(state.epoch or 0, 6), state.max_steps))

    return call


for name in set(HOOKS) - {'on_predict', 'on_save'}:
    setattr(Calls, name, note(name))


class StopAtStep(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 7:
            control.should_training_stop = True


class ShortEpochs(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step % 4 == 3:
            control.should_epoch_stop = True
        return control


class EvaluateOften(TrainerCallback):
    def __init__(self) -> None:
        self.record: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = state.global_step % 4 == 2

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.record.append((state.global_step, metrics['eval_loss']))


class LogOften(TrainerCallback):
    def __init__(self) -> None:
        self.record: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = state.global_step % 2 == 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        self.record.append([v for k, v in logs.items() if not k.endswith(OF_TRAINER)])


class StopAtLoss(TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        control.should_training_stop = metrics['eval_loss'] < 1.9


class HalveRate(TrainerCallback):
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for group in kwargs['optimizer'].param_groups:
            group['lr'] = args.learning_rate * 0.5**state.epoch


class GradientNorms(TrainerCallback):
    def __init__(self) -> None:
        self.record: list[Any] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        grads = [p.grad.norm() for p in kwargs['model'].parameters()]
        self.record.append(torch.stack(grads).norm().item())


class ClipWeights(TrainerCallback):
    @torch.no_grad()
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for p in kwargs['model'].parameters():
            p.clamp_(-0.3, 0.3)


class Averaged(TrainerCallback):
    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any
    ) -> None:
        self.average = copy.deepcopy(model)

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        for average, p in zip(self.average.parameters(), model.parameters(), strict=True):
            average.lerp_(p, 0.1)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        model.load_state_dict(self.average.state_dict())


class Freeze(TrainerCallback):
    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any
    ) -> None:
        next(iter(model.parameters())).requires_grad_(state.epoch < 1)


class Best(TrainerCallback):
    def __init__(self) -> None:
        self.record: list[Any] = []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.append((state.best_metric, len(state.log_history)))


class SaveOften(TrainerCallback):
    def __init__(self) -> None:
        self.record: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step % 5 == 0

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.append(state.global_step)


# -- the comparison --------------------------------------------------------------------------------


@dataclass
class Case:
    "A callback, and options of the run."

    make: Callable[[], TrainerCallback]
    title: str
    accumulated: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    part: str = "Users' callbacks"
    why: str = ''  # what differs


OWN = 'Callbacks of transformers'
CASES = [
    Case(lambda: EarlyStoppingCallback(2), 'EarlyStoppingCallback(2)', part=OWN),
    Case(
        lambda: EarlyStoppingCallback(1, 1.0), 'EarlyStoppingCallback(1, threshold=1.0)', part=OWN
    ),
    Case(PrinterCallback, 'PrinterCallback()', part=OWN),
    Case(ProgressCallback, 'ProgressCallback()', part=OWN),
    Case(DefaultFlowCallback, 'DefaultFlowCallback()', part=OWN),
    Case(Calls, 'notes every call'),
    Case(Calls, 'notes every call, two batches a step', 2),
    Case(StopAtStep, 'stops at a step'),
    Case(StopAtStep, 'stops at a step, two batches a step', 2),
    Case(ShortEpochs, 'ends epochs early'),
    Case(EvaluateOften, 'evaluates at steps'),
    Case(LogOften, 'logs at steps'),
    Case(LogOften, 'logs at steps, two batches a step', 2),
    Case(
        Calls,
        'logs every four steps',
        options={'logging_strategy': 'steps', 'logging_steps': 4},
    ),
    Case(StopAtLoss, 'stops at a loss'),
    Case(HalveRate, 'sets the rate', why="the Trainer's scheduler sets it again at each step"),
    Case(GradientNorms, 'reads gradients'),
    Case(GradientNorms, 'reads gradients, two batches a step', 2),
    Case(ClipWeights, 'changes weights after the step'),
    Case(Averaged, 'averages weights'),
    Case(Freeze, 'freezes a parameter'),
    Case(Best, 'reads the best metric'),
    Case(SaveOften, 'saves at steps'),
]


def arguments(folder: Path, case: Case) -> TrainingArguments:
    options = {'eval_strategy': 'epoch', 'logging_strategy': 'epoch', 'save_strategy': 'no'}
    return TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=case.accumulated,
        learning_rate=LR,
        lr_scheduler_type='constant',
        max_grad_norm=0.0,
        optim='adamw_torch',
        metric_for_best_model='eval_loss',
        greater_is_better=False,
        report_to='none',
        use_cpu=True,
        disable_tqdm=True,
        **{**options, **case.options},
    )


def run_in_trainer(case: Case, folder: Path) -> tuple[Any, nn.Module, Any]:
    cb = case.make()
    args = arguments(folder, case)
    trainer = Ordered(Net(), args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[cb])
    if not isinstance(cb, PrinterCallback):
        trainer.pop_callback(PrinterCallback)
    trainer.train()
    return cb, trainer.model, trainer.state


class Plain(nn.Module):
    "The same network, without its loss."

    def __init__(self) -> None:
        super().__init__()
        self.line = Net().line

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


def run_in_learner(case: Case, folder: Path) -> tuple[Any, nn.Module, Any]:
    cb = case.make()
    adapter: Any = from_hf(cb, arguments(folder, case))
    cbs = [adapter, Checkpoint(None, folder / 'checkpoints')]
    if case.accumulated > 1:
        cbs.append(GradientAccumulation(BATCH * case.accumulated))
    rows = torch.utils.data.TensorDataset(X, Y)
    dls = DataLoaders(DataLoader(rows, BATCH), DataLoader(rows, BATCH), device='cpu')
    learn = Learner(dls, Plain(), F.mse_loss, torch.optim.AdamW, lr=LR, wd=0.0, cbs=cbs)
    with learn.no_bar(), learn.no_logging():
        learn.fit(EPOCHS)
    return cb, learn.model, adapter.state


def numbers_of(cb: Any, model: nn.Module, state: Any) -> dict[str, Tensor]:
    "Return the weights, the step and the best metric, and what was logged and noted, as tensors."
    found = {k: v.detach() for k, v in model.state_dict().items()}
    found['state'] = torch.tensor(state.global_step)
    found['best'] = torch.tensor(state.best_metric)
    for i, row in enumerate(state.log_history):
        values = {k: v for k, v in row.items() if not k.endswith(OF_TRAINER)}
        found |= {f'{i}, {k}': torch.tensor(float(v)) for k, v in values.items()}
    for i, entry in enumerate(getattr(cb, 'record', ())):
        parts = entry if isinstance(entry, (tuple, list)) else [entry]
        names = [part for part in parts if isinstance(part, str)]
        values = [float(part) for part in parts if isinstance(part, (int, float))]
        found[f'record {i} {names}'] = torch.tensor(values, dtype=torch.float64)
    return found


def run_case(case: Case) -> Row:
    with TemporaryDirectory() as folder:
        expected = numbers_of(*run_in_trainer(case, Path(folder) / 'trainer'))
        try:
            found = numbers_of(*run_in_learner(case, Path(folder) / 'learner'))
        except Exception as e:
            return Row(case.title, False, None, TOO_FAR, f'{type(e).__name__}: {e}', case.part)
    same_keys = expected.keys() == found.keys()
    numbers = compare_numbers(
        *({k: t for k, t in part.items() if k in WEIGHTS} for part in (expected, found))
    )
    if compare_numbers(expected, found) == TOO_FAR:
        numbers = TOO_FAR  # what was logged and noted; the Trainer averages losses in float32
    return Row(case.title, True, same_keys, numbers, case.why, case.part)


def rows() -> list[Row]:
    warnings.simplefilter('ignore')
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return [run_case(case) for case in CASES]
