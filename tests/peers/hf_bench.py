"Run callbacks of Hugging Face's Trainer in a learnkit Learner and in the Trainer, and compare."

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback
from transformers.utils.notebook import NotebookProgressCallback

from learnkit import Callback, Checkpoint, DataLoaders, GradientAccumulation, GradientClip, Learner
from learnkit.interop import from_hf
from learnkit.interop.hf.adapter import HOOKS
from tests.peers.rows import TOO_FAR, Row, compare_numbers, quiet_folder

N, BATCH, EPOCHS = 40, 8, 3
G = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=G)
Y = X.sum(1, keepdim=True)
N_TOKENS = 12  # size of the vocabulary
# what the ends of names say: times, and operations, which a Learner does not count
UNCOMPARED = ('runtime', 'per_second', 'total_flos')


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


class Sentences(Dataset[dict[str, Tensor]]):
    "Rows of 3 to 8 tokens, each the one before plus 1 or 2, padded to 8 tokens."

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        n = 3 + i % 6
        is_real = torch.arange(8) < n
        ids = (i + torch.arange(8) * (1 + i % 2)) % N_TOKENS
        return {
            'input_ids': ids.where(is_real, 0),
            'attention_mask': is_real.long(),
            'labels': ids.where(is_real, -100),
        }


def make_gpt2() -> nn.Module:
    "Return a small GPT-2 made from a config, without dropout: an evaluation moves the generators in the Trainer only."
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=N_TOKENS,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


@dataclass(frozen=True)
class Task:
    "What is trained: a model, the rows of its data, and a rate."

    make_model: Callable[[], nn.Module]
    rows: Dataset[dict[str, Tensor]]
    lr: float


REGRESSION = Task(Net, Rows(), 0.05)
LANGUAGE = Task(make_gpt2, Sentences(), 0.01)


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
        # before a training the Trainer's state has no number of steps
        n = 0 if hook == 'on_init_end' else state.max_steps
        self.record.append((hook, state.global_step, state.epoch, n))

    return call


for name in set(HOOKS) - {'on_save'}:
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
        self.record.append([v for k, v in logs.items() if not k.endswith(UNCOMPARED)])


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


class Spikes(TrainerCallback):
    "Records the norms of gradients and the rates."

    def __init__(self) -> None:
        self.record: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        if 'grad_norm' in logs:
            self.record.append((logs['grad_norm'], kwargs['lr_scheduler'].get_last_lr()[0]))


class StopAtSubstep(TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


class StopAtBatch(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return TrainerControl(should_training_stop=state.global_step == 8)


# -- the comparison --------------------------------------------------------------------------------


WEIGHT = 'weight'  # begins the names of weights among the compared tensors


@dataclass
class Case:
    "Callbacks, and options of the run."

    title: str
    make: Callable[[], TrainerCallback | list[TrainerCallback]]
    accumulated: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    part: str = "Users' callbacks"
    clip: float = 0.0
    why: str = ''  # what differs
    lost: str = ''  # what no checkpoint holds


OWN = 'Callbacks of transformers'
BY_STEPS = {'eval_strategy': 'steps', 'eval_steps': 4, 'logging_strategy': 'steps'}
CASES = [
    Case('EarlyStoppingCallback(2)', lambda: EarlyStoppingCallback(2), part=OWN),
    Case(
        'EarlyStoppingCallback(1, threshold=1.0)', lambda: EarlyStoppingCallback(1, 1.0), part=OWN
    ),
    Case(
        'EarlyStoppingCallback(1, threshold=0.3), every 4 steps',
        lambda: [DefaultFlowCallback(), EarlyStoppingCallback(1, 0.3)],
        options={**BY_STEPS, 'logging_steps': 3},
        part=OWN,
    ),
    Case('PrinterCallback()', PrinterCallback, part=OWN),
    Case('ProgressCallback()', ProgressCallback, part=OWN),
    Case('NotebookProgressCallback()', NotebookProgressCallback, part=OWN),
    Case('TensorBoardCallback()', lambda: TensorBoardCallback(SummaryWriter('tb')), part=OWN),
    Case('DefaultFlowCallback()', DefaultFlowCallback, part=OWN),
    Case(
        'DefaultFlowCallback(), by shares of the steps',
        lambda: [DefaultFlowCallback(), SaveOften()],
        options={**BY_STEPS, 'eval_steps': 0.25, 'logging_steps': 0.2, 'logging_first_step': True},
        part=OWN,
    ),
    Case('notes every call', Calls),
    Case('notes every call, two batches a step', Calls, 2),
    Case('notes every call, three batches a step', Calls, 3),
    Case('stops at a step', StopAtStep),
    Case('stops at a step, two batches a step', StopAtStep, 2),
    Case('stops in a step', lambda: [StopAtBatch(), Calls()]),
    Case('stops between the batches of a step', lambda: [StopAtSubstep(), Calls()], 2),
    Case('ends epochs early', lambda: [ShortEpochs(), Calls()]),
    Case('evaluates at steps', lambda: [EvaluateOften(), Calls()]),
    Case('evaluates for another one', lambda: [EvaluateOften(), EarlyStoppingCallback(2, 0.2)]),
    Case('logs at steps', LogOften),
    Case('logs at steps, two batches a step', LogOften, 2),
    Case(
        'logs every four steps',
        Calls,
        options={'logging_strategy': 'steps', 'logging_steps': 4},
    ),
    Case('reads the logged norm of gradients', Spikes),
    Case('reads the logged norm before clipping', Spikes, clip=0.5),
    Case('stops at a loss', StopAtLoss),
    Case('sets the rate', HalveRate, why="the Trainer's scheduler sets it again at each step"),
    Case('reads gradients', GradientNorms),
    Case('reads gradients, two batches a step', GradientNorms, 2),
    Case('changes weights after the step', ClipWeights),
    Case('averages weights', Averaged, lost='no checkpoint holds a model in an attribute'),
    Case('freezes a parameter', Freeze),
    Case('reads the best metric', Best),
    Case('saves at steps', SaveOften),
]


def arguments(folder: Path, case: Case, task: Task) -> TrainingArguments:
    options = {'eval_strategy': 'epoch', 'logging_strategy': 'epoch', 'save_strategy': 'no'}
    return TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=case.accumulated,
        learning_rate=task.lr,
        lr_scheduler_type='constant',
        max_grad_norm=case.clip,
        optim='adamw_torch',
        metric_for_best_model='eval_loss',
        greater_is_better=False,
        report_to='none',
        use_cpu=True,
        disable_tqdm=True,
        **{**options, **case.options},
    )


def made_by(case: Case) -> list[TrainerCallback]:
    cbs = case.make()
    return cbs if isinstance(cbs, list) else [cbs]


def run_in_trainer(case: Case, task: Task) -> dict[str, Tensor]:
    cbs = made_by(case)
    args = arguments(Path('trainer'), case, task)
    data = {'train_dataset': task.rows, 'eval_dataset': task.rows}
    trainer = Ordered(task.make_model(), args, **data, callbacks=cbs)
    for own in (PrinterCallback, DefaultFlowCallback):
        if any(isinstance(cb, own) for cb in cbs) or own is PrinterCallback:
            trainer.pop_callback(own)  # of two of a class, the first is the Trainer's
    if any(isinstance(cb, PrinterCallback) for cb in cbs):
        trainer.add_callback(cbs[0])
    trainer.train()
    trainer.predict(task.rows)
    trainer.evaluate()
    return numbers_of(cbs, trainer.model, trainer.state)


def make_learner(case: Case, task: Task, cbs: list[TrainerCallback]) -> Learner:
    args = arguments(Path('learner'), case, task)
    loader = DataLoader(task.rows, BATCH)
    own: list[Any] = [Checkpoint(None, Path('checkpoints')), *[from_hf(cb, args) for cb in cbs]]
    if case.accumulated > 1:
        own.append(GradientAccumulation(batches=case.accumulated))
    if case.clip:
        own.append(GradientClip(case.clip))
    decides = any(isinstance(cb, DefaultFlowCallback) for cb in cbs)
    return Learner(
        DataLoaders(loader, loader, device='cpu'),
        task.make_model(),
        opt_func=torch.optim.AdamW,
        lr=task.lr,
        wd=0.0,
        cbs=own,
        eval_every=None if decides else '1ep',
    )


def run_in_learner(case: Case, task: Task) -> dict[str, Tensor]:
    cbs = made_by(case)
    learn = make_learner(case, task, cbs)
    with learn.no_bar(), learn.no_logging():
        learn.fit(EPOCHS)
        learn.get_preds()
        learn.validate()
    return numbers_of(cbs, learn.model, learn.trainer_run.state)


def run_killed(case: Case, task: Task) -> dict[str, Tensor]:
    "Train in a Learner that fails in the second epoch, and resume in another one."

    def fail(cb: Any) -> None:
        if cb.train_iter == 8:
            raise InterruptedError

    for more in ([Callback(before_batch=fail)], []):
        cbs = made_by(case)
        learn = make_learner(case, task, cbs)
        learn.remove_cb(Checkpoint)
        learn.add_cbs([Checkpoint('1ba', Path('checkpoints')), *more])
        with learn.no_bar(), learn.no_logging(), contextlib.suppress(InterruptedError):
            learn.fit(EPOCHS, resume=True)
    learn.get_preds()
    learn.validate()
    return numbers_of(cbs, learn.model, learn.trainer_run.state)


def numbers_of(cbs: list[Any], model: nn.Module, state: Any) -> dict[str, Tensor]:
    "Return the weights, the state, and what was logged and noted, as tensors."
    found = {f'{WEIGHT} {k}': v.detach() for k, v in model.state_dict().items()}
    best = state.best_metric
    found['state'] = torch.tensor([state.global_step, float('nan') if best is None else best])
    for i, row in enumerate(state.log_history):
        values = {k: v for k, v in row.items() if not k.endswith(UNCOMPARED)}
        found |= {f'{i}, {k}': torch.tensor(float(v)) for k, v in values.items()}
    for cb in cbs:
        for i, entry in enumerate(getattr(cb, 'record', ())):
            parts = entry if isinstance(entry, (tuple, list)) else [entry]
            names = [part for part in parts if isinstance(part, str)]
            values = [float(part) for part in parts if isinstance(part, (int, float))]
            found[f'record {i} {names}'] = torch.tensor(values, dtype=torch.float64)
    return found


def align(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Take the expected value of what differs from it by one unit of float32.

    The Trainer averages the losses of an evaluation in float32."""
    for name, value in found.items():
        other = expected.get(name)
        if other is not None and not name.startswith(WEIGHT) and other.shape == value.shape:
            close = torch.isclose(value, other, rtol=2**-23, atol=0)
            found[name] = torch.where(close, other, value)


def run_case(
    case: Case, task: Task, run: Callable[[Case, Task], dict[str, Tensor]], part: str
) -> Row:
    with quiet_folder():
        expected = run_in_trainer(case, task)
    with quiet_folder():
        try:
            found = run(case, task)
        except Exception as e:
            return Row(case.title, False, None, TOO_FAR, f'{type(e).__name__}: {e}', part)
    align(expected, found)
    same_keys = list(expected) == list(found)
    why = case.why or (case.lost if run is run_killed else '')
    if task is LANGUAGE and case.accumulated > 1:
        why = 'rounding: here each batch of a step has a weight; AdamW magnifies what is rounding alone'
    return Row(case.title, True, same_keys, compare_numbers(expected, found), why, part)


def rows() -> list[Row]:
    warnings.simplefilter('ignore')
    with contextlib.redirect_stderr(io.StringIO()):
        whole = [run_case(case, REGRESSION, run_in_learner, case.part) for case in CASES]
        of_language = [run_case(case, LANGUAGE, run_in_learner, 'With a GPT-2') for case in CASES]
        resumed = [run_case(case, REGRESSION, run_killed, 'Killed and resumed') for case in CASES]
    return whole + of_language + resumed
