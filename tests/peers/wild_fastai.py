"What classes that users wrote for fastai are trained with."

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock  # noqa: F401  # the table names it

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.peers import fastai_data as data
from tests.peers.fastai_bench import compare_case
from tests.peers.fastai_cases import Case as FastaiCase
from tests.peers.rows import Row
from tests.peers.wild_bench import Case

# isort: split
from fastai.callback import all as callbacks
from fastai.metrics import accuracy
from fastai.text import all as text
from fastai.vision import all as vision

NAMES = {**vars(text), **vars(vision), **vars(callbacks)}


def compare(case: Case, make: Callable[[], list[Any]]) -> list[Row]:
    def observe(learn: Any) -> dict[str, Any]:
        return case.observe({'learn': learn, 'saved': saved})

    part = 'Callbacks of fastai users'
    return [
        compare_case(FastaiCase(case.name, make, observe, part=part, why=case.why, **case.options))
    ]


def saved() -> list[str]:
    return sorted(map(str, Path('models').rglob('*')))


class Net(nn.Module):
    "Modules by name, and the function of them and of the batch that is the forward pass."

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Change(vision.Callback):
    "Change each batch before other callbacks see it, as the loaders of a package do."

    order = -5

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def before_batch(self) -> None:
        self.change(self)


# -- tsai ------------------------------------------------------------------------------------------


def waves(path: Path) -> Any:
    "Return series of 2 variables and 12 steps, in three classes."
    x = torch.randn(60, 2, 12)
    y = (x[:, 0, 0] > 0).long() + (x[:, 1, 0] > 0).long()
    dls = data.make_loaders(x, y, path)
    dls.vars, dls.len, dls.c = 2, 12, 3
    dls.train.weights = np.full(48, 1 / 48)
    return dls


def convolutions() -> nn.Module:
    body = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3))
    return Net(lambda m, x: m.head(m.body(x)), body=body, head=head, head_nf=8)


def second_loader() -> Any:
    x = torch.randn(24, 2, 12)
    return vision.TfmdDL(torch.utils.data.TensorDataset(x, (x[:, 0, 0] > 0).long()), bs=4)


def keep_indexes(cb: Any) -> None:
    "Give the loader the indexes of its batch, as tsai's own loaders do."
    n = len(cb.y)
    cb.dls.train.input_idxs = torch.arange(cb.iter * n, cb.iter * n + n) % 48


# -- self_supervised -------------------------------------------------------------------------------


def pictures(path: Path) -> Any:
    return data.pictures(path, augment=False)


def add_noise(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn_like(x)


def noisy(n: int) -> list[Any]:
    "Return pipelines that add noise."
    return [vision.Pipeline([add_noise], split_idx=0) for _ in range(n)]


def make_encoder() -> nn.Module:
    return nn.Sequential(data.body(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def vectors(make: Any = None, *more: nn.Module) -> nn.Module:
    "Return an encoder of pictures and a projector, as self-supervised callbacks ask for."
    encoder = make_encoder()
    projector = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    if make is not None:
        return make(encoder, projector, *more)
    return Net(lambda m, x: m.projector(m.encoder(x)), encoder=encoder, projector=projector)


def student_and_teacher(m: Any) -> nn.Module:
    "Return a network that is trained, and a frozen one."

    def network() -> nn.Module:
        crops = Net(lambda m, crops: m.body(torch.cat(crops)), body=make_encoder())
        return nn.Sequential(crops, m.DINOHead(16, 8, hidden_dim=16, bottleneck_dim=8))

    both = Net(lambda m, x: m.student(x), student=network(), teacher=network())
    both.teacher.load_state_dict(both.student.state_dict())
    both.teacher.requires_grad_(False)
    both.register_buffer('C', torch.zeros(1, 8))
    return both


def halves() -> nn.Module:
    "Return a picture and a text encoder, here of two halves of a table's columns."
    scale = nn.Parameter(torch.tensor(4.6))
    a, b = nn.Linear(4, 8), nn.Linear(4, 8)
    return Net(lambda m, x: (m.a(x[:, :4]), m.b(x[:, 4:])), a=a, b=b, logit_scale=scale)


# -- blurr, icevision ------------------------------------------------------------------------------


def to_dict(cb: Any) -> None:
    "Put inputs and targets into a dict, as the loaders of Hugging Face do."
    cb.learn.xb = ({'input_ids': cb.x, 'labels': cb.y},)


class DictModel(nn.Module):
    "A model with the arguments and outputs of a model of Hugging Face."

    def __init__(self) -> None:
        super().__init__()
        self.model = data.classifier()

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> dict[str, Any]:
        logits = self.model(input_ids)
        loss = {} if labels is None else {'loss': F.cross_entropy(logits, labels)}
        return {**loss, 'logits': logits}


class Unpacked(DictModel):
    "A model whose input is the dict."

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        return super().forward(**batch)


def to_records(cb: Any) -> None:
    "Make the batch of icevision's loaders: inputs with targets, and records."
    x, y = cb.x, cb.y
    cb.learn.xb, cb.learn.yb = ((x, y),), ([f'record {i}' for i in range(len(x))],)


def run_detector(m: Any, x: torch.Tensor, y: Any = None) -> dict[str, Any]:
    "Return losses, and the detections."
    logits = m.model(x)
    losses = {} if y is None else {'loss': F.cross_entropy(logits, y)}
    return {**losses, 'detections': logits}


def run_yolo(m: Any, x: torch.Tensor) -> Any:
    logits = m.model(x)
    return logits if m.training else (logits, logits)


def classify(run: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Net(run, model=data.classifier())


def keep_predictions(**kwargs: Any) -> list[Any]:
    return [kwargs.get('records')]


def converting(cls: type) -> type:
    "Give a class the conversion of predictions, which needs the package."
    return type(
        'Boxes', (cls,), {'convert_raw_predictions': lambda self, raw_preds, **_: [raw_preds]}
    )


class TrainStep(nn.Module):
    "A detector of mmdetection: `train_step` and `forward_test`."

    def __init__(self) -> None:
        super().__init__()
        self.model = data.classifier()
        self.param_groups = lambda: [list(self.parameters())]
        self.forward_test = lambda imgs, img_metas: self.model(imgs[0])

    def train_step(self, data: Any, optimizer: Any) -> dict[str, Any]:
        return {'loss': F.cross_entropy(self.model(data['img']), data['y'])}


def to_images(cb: Any) -> None:
    cb.learn.xb, cb.learn.yb = ({'img': cb.x, 'y': cb.y, 'img_metas': None},), ([],)


# -- upit, reformer, faststyle ---------------------------------------------------------------------


def cycle(name: str) -> Callable[[Any], dict[str, Any]]:
    "Return a condition: two generators and two critics, with a loss function of the package."

    def pairs(path: Path) -> Any:
        return data.make_loaders(torch.randn(48, 6), torch.randn(48, 6), path)

    def run(m: Any, batch: Any) -> Any:
        a, b = batch
        return m.G_A(b), m.G_B(a), m.G_A(a), m.G_B(b)

    def model() -> nn.Module:
        sizes = {'G_A': 6, 'G_B': 6, 'D_A': 1, 'D_B': 1}
        parts = {name: nn.Sequential(nn.Linear(6, size)) for name, size in sizes.items()}
        return Net(run, **parts)

    def condition(m: Any) -> dict[str, Any]:
        own = lambda model: {'loss_func': getattr(m, name)(model), 'metrics': None}
        return {'loaders': pairs, 'model': model, 'options': own, 'mom': 0.0, 'fit': fit_slowly}

    return condition


def fit_slowly(learn: Any) -> None:
    learn.fit(2, 0.01)


def tokens(path: Path) -> Any:
    "Return sequences of 9 tokens of 5 kinds, each to be predicted from the one before."
    x = torch.randint(0, 5, (48, 9))
    dls = data.make_loaders(x, x.clone(), path)
    dls.train.dataset.sl = 9
    return dls


def run_tokens(m: Any, x: torch.Tensor, y: Any = None) -> torch.Tensor:
    hidden = m.embedding(x)
    return m.head(hidden if y is None else hidden[:, : y.shape[1]] + m.embedding(y))


def cut_inputs(cb: Any) -> None:
    cb.learn.xb = (cb.x[:, :-1],)


def add_end(cb: Any) -> None:
    y = cb.y.clone()
    y[:, -1] = 6
    cb.learn.yb = (y,)


class FirstTargets(vision.Callback):
    def after_pred(self) -> None:
        self.learn.yb = (self.y[:, :-1],)


def features(x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [x.mean(1)], [x]


def style_loss(pred: torch.Tensor, target: torch.Tensor, found: dict[str, Any]) -> torch.Tensor:
    a, b = found['pred']['cnt'][0], found['targ']['cnt'][0]
    return (a - b).pow(2).mean()


def add_weights(cb: Any) -> None:
    cb.xb[0].ws = torch.ones(2)


# -- services --------------------------------------------------------------------------------------


def fit_and_predict(m: Any) -> dict[str, Any]:
    "Return a condition: a callback of predictions is made with the trained Learner."

    def fit(learn: Any) -> None:
        learn.fit(1, 0.1)
        found: queue.Queue[Any] = queue.Queue()
        names = [[Path(f'{i}_{k}.tif') for k in range(8)] for i in range(2)]
        saver = m.SaveSegmentationOutput(learn, Path('out'), names, found, {'batch_size': 8})
        learn.get_preds(cbs=saver)
        learn.saved = [found.get()[0] for _ in range(found.qsize())]

    return {'fit': fit}


class Trial:
    "A trial of Optuna that is pruned at the second report."

    def __init__(self) -> None:
        self.reported: list[tuple[int, float]] = []

    def report(self, value: float, step: int) -> None:
        self.reported.append((step, value))

    def should_prune(self) -> bool:
        return len(self.reported) > 1


def fit_pruned(learn: Any) -> None:
    with suppress(RuntimeError):
        learn.fit(4, 0.1)


def without_init(cls: type, **attributes: Any) -> Any:
    callback = cls.__new__(cls)
    vars(callback).update(attributes)
    return callback


def two_losses(m: Any) -> dict[str, Any]:
    def options(model: Any) -> dict[str, Any]:
        losses = [F.mse_loss, F.l1_loss]
        loss_func = m.MultiLoss(losses, [1.0, 0.5], loss_names=['mse', 'l1'])
        return {'loss_func': loss_func, 'metrics': None}

    return {**SERIES, 'options': options}


def give(metrics: Any = None, **options: Any) -> dict[str, Any]:
    "Return a condition with options of the Learner."
    return {'options': lambda model: {'metrics': metrics, **options}}


def encoded(make: Callable[[Any], nn.Module]) -> Callable[[Any], dict[str, Any]]:
    return lambda m: {**VECTORS, 'model': lambda: make(m)}


SERIES = {'loaders': data.series, 'model': data.LongMemory}
VECTORS = {'loaders': pictures, 'model': vectors, 'fit': fit_slowly, **give()}
OWN_LOSS = give(loss_func=lambda preds, *targets: preds['loss'])
CONDITIONS: dict[str, Any] = {
    'waves': {'loaders': waves, 'model': convolutions},
    'pictures': {'loaders': pictures, 'model': data.picture_classifier},
    'vectors': VECTORS,
    'neighbors': {'options': lambda m: {'metrics': text.ValueMetric(lambda: 0.5, 'knn')}},
    'byol': encoded(lambda m: vectors(m.BYOLModel, nn.Linear(8, 8))),
    'swav': encoded(lambda m: vectors(m.SwAVModel, nn.Linear(8, 6, bias=False))),
    'dino': encoded(student_and_teacher),
    'halves': {'model': halves, **give()},
    'dicts': lambda m: {
        'model': Unpacked,
        **give(accuracy, loss_func=m.PreCalculatedCrossEntropyLoss()),
    },
    'keywords': {'model': DictModel},
    'no_metrics': give(),
    'no_rows': {'rows': False},
    'detector': {'model': classify(run_detector), **OWN_LOSS},
    'yolo': {'model': classify(run_yolo), **give()},
    'train_step': {'model': TrainStep, **OWN_LOSS},
    'cyclegan': cycle('CycleGANLoss'),
    'dualgan': cycle('DualGANLoss'),
    'tokens': {
        'loaders': tokens,
        'model': lambda: Net(run_tokens, embedding=nn.Embedding(7, 8), head=nn.Linear(8, 7)),
        **give(),
    },
    'styles': {**SERIES, **give(loss_func=style_loss)},
    'predictions': fit_and_predict,
    'pruned': {'fit': fit_pruned},
    'exploding': {'fit': lambda learn: learn.fit(3, 1e6)},
    'two_losses': two_losses,
}
CONVERTER = SimpleNamespace(convert_raw_predictions=keep_predictions)
STAND_INS = {
    # IPython's function returns None outside of a notebook
    'display': lambda *args, **kwargs: SimpleNamespace(update=lambda figure: None),
    'random_choice': np.random.choice,  # tsai draws from a generator without a seed
    'convert_raw_predictions': keep_predictions,
    'efficientdet': CONVERTER,
    'yolov5': CONVERTER,
    'xm': SimpleNamespace(mark_step=lambda: None),
    'optuna': SimpleNamespace(TrialPruned=RuntimeError),
    '_imports': SimpleNamespace(check=lambda: None),
    'CancelFitException': vision.CancelFitException,
}
