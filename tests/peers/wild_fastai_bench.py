"""Run callbacks that users wrote for fastai in a learnkit Learner and in fastai's, and compare.

python -m tests.peers.wild_fastai_bench [CLASS ...]   # in the environment: print rows, and each number that differs"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.peers import fastai_data as data
from tests.peers.fastai_bench import compare_case
from tests.peers.fastai_cases import Case
from tests.peers.rows import Row
from tests.peers.wild import Files, replace_names
from tests.peers.wild_sources import REPOSITORIES

# isort: split
from fastai.callback import all as callbacks
from fastai.losses import MSELossFlat
from fastai.metrics import accuracy
from fastai.text import all as text
from fastai.vision import all as vision

NAMES = {**vars(text), **vars(vision), **vars(callbacks)}
FILES = {key: Files(repository.name, NAMES) for key, repository in REPOSITORIES.items()}
CASES: list[tuple[str, Case]] = []
Make = Callable[[SimpleNamespace], Iterable[Any]]


def wild(repository: str, file: str, name: str, make: Make, **options: Any) -> None:
    "Add the case of a class: `make` gets the names of the file and returns callbacks."

    def make_callbacks() -> list[Any]:
        return list(make(FILES[repository].load(file)))

    CASES.append(
        (repository, Case(name, make_callbacks, part='Callbacks of fastai users', **options))
    )


# -- models and data -------------------------------------------------------------------------------


def without_metrics(model: Any) -> dict[str, Any]:
    return {'metrics': None}


def mean_squared(model: Any) -> dict[str, Any]:
    return {'loss_func': MSELossFlat(), 'metrics': None}


def vectors() -> nn.Module:
    "Return an encoder of pictures and a projector, as self-supervised callbacks ask for."
    encoder = nn.Sequential(data.body(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    projector = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    return Encoded(encoder, projector)


class Encoded(nn.Module):
    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projector = encoder, projector

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projector(self.encoder(x))


def pictures(path: Path) -> Any:
    return data.pictures(path, augment=False)


def augmentations(m: SimpleNamespace, n: int = 2) -> list[Any]:
    "Return pipelines that add noise."
    return [m.Pipeline([add_noise], split_idx=0) for _ in range(n)]


def add_noise(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn_like(x)


def waves(path: Path) -> Any:
    "Return series of 2 variables and 12 steps, in three classes."
    x = torch.randn(60, 2, 12)
    y = (x[:, 0, 0] > 0).long() + (x[:, 1, 0] > 0).long()
    dls = data.make_loaders(x, y, path)
    dls.vars, dls.len, dls.c = 2, 12, 3
    dls.train.weights = np.full(48, 1 / 48)
    return dls


class Convolutions(nn.Module):
    "A network of series with a body and a head."

    head_nf = 8

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


PICTURES = {'loaders': pictures, 'model': data.picture_classifier}
WAVES = {'loaders': waves, 'model': Convolutions}
VECTORS = {
    'loaders': pictures,
    'model': vectors,
    'options': without_metrics,
    'fit': lambda learn: learn.fit(2, 0.01),
}


class ToDict(vision.Callback):
    "Put inputs and targets into a dict, as the loaders of Hugging Face do."

    order = -5

    def before_batch(self) -> None:
        self.learn.xb = ({'input_ids': self.x, 'labels': self.y},)


class DictModel(nn.Module):
    "A model with the arguments and outputs of a model of Hugging Face."

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, Any]:
        logits = self.model(input_ids)
        if labels is None:
            return {'logits': logits}
        return {'loss': nn.functional.cross_entropy(logits, labels), 'logits': logits}


# -- tsai ------------------------------------------------------------------------------------------

T = 'tsai/callback/'
SEEDED = {'random_choice': np.random.choice}  # tsai draws from a generator without a seed


def display(shown: Any, display_id: bool = False) -> SimpleNamespace:
    "Take the place of IPython's function, which returns None outside of a notebook."
    return SimpleNamespace(update=lambda figure: None)


wild(
    'tsai',
    T + 'core.py',
    'TransformScheduler',
    lambda m: [m.TransformScheduler(lambda pct: 1 - pct)],
    **WAVES,
)
wild(
    'tsai',
    T + 'core.py',
    'ShowGraph',
    lambda m: [replace_names(m.ShowGraph, display=display)(False)],
    **WAVES,
)
wild(
    'tsai',
    T + 'core.py',
    'SaveModel',
    lambda m: [m.SaveModel('accuracy')],
    observe=lambda learn: {'files': sorted(p.name for p in Path('models').iterdir())},
    **WAVES,
)
wild(
    'tsai',
    T + 'core.py',
    'WeightedPerSampleLoss',
    lambda m: [KeepIndexes(), m.WeightedPerSampleLoss(torch.linspace(0.5, 1.5, 60))],
    **WAVES,
)
wild(
    'tsai',
    T + 'core.py',
    'BatchSubsampler',
    lambda m: [replace_names(m.BatchSubsampler, **SEEDED)(0.5, 0.5)],
    **WAVES,
)
EXPERIMENTAL = T + 'experimental.py'
wild('tsai', EXPERIMENTAL, 'GamblersCallback', lambda m: [m.GamblersCallback()], **WAVES)
wild(
    'tsai',
    EXPERIMENTAL,
    'UBDAug',
    lambda m: [
        replace_names(m.UBDAug, **SEEDED)(
            [vision.Transform(add_noise), vision.Transform(lambda x: -x)]
        )
    ],
    **WAVES,
)
wild('tsai', EXPERIMENTAL, 'BatchLossFilter', lambda m: [m.BatchLossFilter(0.7)], **WAVES)
wild(
    'tsai',
    EXPERIMENTAL,
    'RandomWeightLossWrapper',
    lambda m: [m.RandomWeightLossWrapper()],
    **WAVES,
)
wild('tsai', EXPERIMENTAL, 'BatchMasker', lambda m: [m.BatchMasker()], **WAVES)
wild(
    'tsai',
    EXPERIMENTAL,
    'SamplerWithReplacement',
    lambda m: [replace_names(m.SamplerWithReplacement, **SEEDED)()],
    **WAVES,
)
wild(
    'tsai',
    T + 'MVP.py',
    'MVP',
    lambda m: [m.MVP()],
    why='it replaces the head before the fit: learnkit trains the new one, fastai does not',
    observe=lambda learn: {
        'best': learn.MVP.best,
        'files': sorted(p.name for p in Path('models/MVP').iterdir()),
    },
    **WAVES,
)
wild(
    'tsai',
    T + 'PredictionDynamics.py',
    'PredictionDynamics',
    lambda m: [replace_names(m.PredictionDynamics, display=display)()],
    loaders=pictures,
    model=data.picture_classifier,
)


def second_loader() -> Any:
    x = torch.randn(24, 2, 12)
    return vision.TfmdDL(torch.utils.data.TensorDataset(x, (x[:, 0, 0] > 0).long()), bs=4)


wild(
    'tsai',
    T + 'noisy_student.py',
    'NoisyStudent',
    lambda m: [m.NoisyStudent(second_loader(), batch_tfms=[], do_setup=False)],
    **WAVES,
)
A = 'tsai/data/mixed_augmentation.py'
wild('tsai', A, 'MixUp1d', lambda m: [m.MixUp1d()], **WAVES)
wild('tsai', A, 'CutMix1d', lambda m: [m.CutMix1d()], **WAVES)
wild('tsai', A, 'IntraClassCutMix1d', lambda m: [m.IntraClassCutMix1d()], **WAVES)


class KeepIndexes(vision.Callback):
    "Give the loader the indexes of its batch, as tsai's own loaders do."

    order = -5

    def before_batch(self) -> None:
        n = len(self.y)
        self.dls.train.input_idxs = torch.arange(self.iter * n, self.iter * n + n) % 48


# -- fasterai --------------------------------------------------------------------------------------


def fasterai(name: str) -> SimpleNamespace:
    return FILES['fasterai'].load(f'fasterai/core/{name}.py')


def schedule() -> Any:
    m = fasterai('schedule')
    return m.Schedule(m.sched_agp, 0.1)


wild(
    'fasterai',
    'fasterai/sparse/sparsify_callback.py',
    'SparsifyCallback',
    lambda m: [
        m.SparsifyCallback(50, 'weight', 'local', fasterai('criteria').large_final, schedule())
    ],
    **PICTURES,
)
wild(
    'fasterai',
    'fasterai/sparse/sparsify_callback.py',
    'SparsifyCallback(lth=True)',
    lambda m: [
        m.SparsifyCallback(
            50, 'filter', 'global', fasterai('criteria').large_final, schedule(), lth=True
        )
    ],
    **PICTURES,
)
wild(
    'fasterai',
    'fasterai/regularize/regularize_callback.py',
    'RegularizeCallback',
    lambda m: [m.RegularizeCallback('filter', 0.001)],
    **PICTURES,
)
wild(
    'fasterai',
    'fasterai/distill/distillation_callback.py',
    'KnowledgeDistillationCallback',
    lambda m: [m.KnowledgeDistillationCallback(data.picture_classifier(), m.SoftTarget)],
    **PICTURES,
)
wild(
    'fasterai',
    'fasterai/quantize/quantize_callback.py',
    'QuantizeCallback',
    lambda m: [m.QuantizeCallback()],
    loaders=data.table,
    rows=True,
)

# -- self_supervised -------------------------------------------------------------------------------

S = 'self_supervised/vision/'
wild(
    'self_supervised', S + 'simclr.py', 'SimCLR', lambda m: [m.SimCLR(augmentations(m))], **VECTORS
)
wild(
    'self_supervised',
    S + 'barlow_twins.py',
    'BarlowTwins',
    lambda m: [m.BarlowTwins(augmentations(m))],
    **VECTORS,
)
wild(
    'self_supervised',
    S + 'moco.py',
    'MOCO',
    lambda m: [m.MOCO(augmentations(m), K=32)],
    observe=lambda learn: {'queue': learn.moco.queue},
    **VECTORS,
)
wild(
    'self_supervised',
    S + 'supcon.py',
    'SupCon',
    lambda m: [m.SupCon(augmentations(m), 9)],
    **VECTORS,
)
wild(
    'self_supervised',
    S + 'supcon.py',
    'SupConMOCO',
    lambda m: [m.SupConMOCO(augmentations(m), 9, K=32)],
    **VECTORS,
)


def byol_model() -> nn.Module:
    m = FILES['self_supervised'].load(S + 'byol.py')
    encoded = vectors()
    return m.BYOLModel(encoded.encoder, encoded.projector, nn.Linear(8, 8))


def swav_model() -> nn.Module:
    m = FILES['self_supervised'].load(S + 'swav.py')
    encoded = vectors()
    return m.SwAVModel(encoded.encoder, encoded.projector, nn.Linear(8, 6, bias=False))


def dino_model() -> nn.Module:
    m = FILES['self_supervised'].load(S + 'dino.py')

    def network() -> nn.Module:
        body = MultiCrop(nn.Sequential(data.body(), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
        return nn.Sequential(body, m.DINOHead(16, 8, hidden_dim=16, bottleneck_dim=8))

    return Distilled(network(), network())


class MultiCrop(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, crops: list[torch.Tensor]) -> torch.Tensor:
        return self.body(torch.cat(crops))


class Distilled(nn.Module):
    "A student and a frozen teacher."

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        teacher.load_state_dict(student.state_dict())
        teacher.requires_grad_(False)
        self.register_buffer('C', torch.zeros(1, 8))

    def forward(self, x: Any) -> torch.Tensor:
        return self.student(x)


wild(
    'self_supervised',
    S + 'byol.py',
    'BYOL',
    lambda m: [m.BYOL(augmentations(m))],
    **VECTORS | {'model': byol_model},
)
wild(
    'self_supervised',
    S + 'swav.py',
    'SWAV',
    lambda m: [m.SWAV(augmentations(m, 3), [0, 1], K=32)],
    **VECTORS | {'model': swav_model},
)
wild(
    'self_supervised',
    S + 'dino.py',
    'DINO',
    lambda m: [m.DINO(augmentations(m, 3))],
    **VECTORS | {'model': dino_model},
)
wild(
    'self_supervised',
    S + 'metrics.py',
    'KNNProxyMetric',
    lambda m: [
        FILES['self_supervised'].load(S + 'simclr.py').SimCLR(augmentations(m)),
        m.KNNProxyMetric(),
    ],
    loaders=pictures,
    model=vectors,
    options=lambda model: {'metrics': text.ValueMetric(lambda: 0.5, 'knn')},
    fit=lambda learn: learn.fit(2, 0.01),
)


class Pairs(nn.Module):
    "A picture and a text encoder, here of two halves of a table's columns."

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 8)
        self.logit_scale = nn.Parameter(torch.tensor(4.6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x[:, :4]), self.b(x[:, 4:])


wild(
    'self_supervised',
    'self_supervised/multimodal/clip.py',
    'CLIPTrainer',
    lambda m: [m.CLIPTrainer()],
    model=Pairs,
    options=without_metrics,
)

# -- blurr, icevision ------------------------------------------------------------------------------

B = 'blurr/text/modeling/'


def own_loss(m: SimpleNamespace) -> dict[str, Any]:
    return {'loss_func': m.PreCalculatedCrossEntropyLoss(), 'metrics': accuracy}


def blurr_core() -> SimpleNamespace:
    return FILES['blurr'].load(B + 'core.py')


wild(
    'blurr',
    B + 'core.py',
    'BaseModelCallback',
    lambda m: [ToDict(), m.BaseModelCallback()],
    model=lambda: Unpacked(data.classifier()),
    options=lambda model: own_loss(blurr_core()),
)
wild(
    'blurr',
    B + 'language_modeling.py',
    'LMMetricsCallback',
    lambda m: [m.LMMetricsCallback()],
    options=without_metrics,
)


class Unpacked(DictModel):
    "A model whose input is the dict."

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        return super().forward(**batch)


ICEVISION = 'icevision/models/'


class AsRecords(vision.Callback):
    "Make the batch that icevision's loaders return: inputs with targets, and records."

    order = -5

    def before_batch(self) -> None:
        x, y = self.x, self.y
        self.learn.xb, self.learn.yb = ((x, y),), ([f'record {i}' for i in range(len(x))],)


class Detector(nn.Module):
    "A model that returns its losses, and in evaluation its detections too."

    def __init__(self) -> None:
        super().__init__()
        self.model = data.classifier()

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.model(x)
        losses = {} if y is None else {'loss': nn.functional.cross_entropy(logits, y)}
        return {**losses, 'detections': logits}


def loss_of_detector(preds: dict[str, Any], *targets: Any) -> torch.Tensor:
    return preds['loss']


def detector_options(model: Any) -> dict[str, Any]:
    return {'loss_func': loss_of_detector, 'metrics': None}


DETECTOR = {'model': Detector, 'options': detector_options}


def keep_predictions(**kwargs: Any) -> list[Any]:
    return [kwargs.get('records')]


def with_conversion(callback: type) -> list[Any]:
    "Replace the conversion of predictions, which needs the package."
    module = SimpleNamespace(convert_raw_predictions=keep_predictions)
    names = {'efficientdet': module, 'yolov5': module}
    replace_names(callback, convert_raw_predictions=keep_predictions, **names)
    return [AsRecords(), callback()]


wild(
    'icevision',
    ICEVISION + 'fastai/unet/fastai.py',
    'UnetCallback',
    lambda m: with_conversion(m.UnetCallback),
    observe=lambda learn: {'converted': learn.converted_preds},
)
wild(
    'icevision',
    ICEVISION + 'ross/efficientdet/fastai/callbacks.py',
    'EfficientDetCallback',
    lambda m: with_conversion(m.EfficientDetCallback),
    observe=lambda learn: {'converted': learn.converted_preds},
    **DETECTOR,
)


def rcnn(m: SimpleNamespace) -> list[Any]:
    class Boxes(m.RCNNCallback):
        def convert_raw_predictions(self, batch: Any, raw_preds: Any) -> list[Any]:
            return [raw_preds['detections']]

    return [AsRecords(), Boxes()]


wild(
    'icevision',
    ICEVISION + 'torchvision/fastai_callbacks.py',
    'RCNNCallback',
    rcnn,
    observe=lambda learn: {'converted': learn.converted_preds},
    **DETECTOR,
)


class Yolo(Detector):
    def forward(self, x: torch.Tensor) -> Any:
        logits = self.model(x)
        return logits if self.training else (logits, logits)


wild(
    'icevision',
    ICEVISION + 'ultralytics/yolov5/fastai/callbacks.py',
    'Yolov5Callback',
    lambda m: with_conversion(m.Yolov5Callback),
    model=Yolo,
    options=without_metrics,
    observe=lambda learn: {'converted': learn.converted_preds},
)


class Trains(nn.Module):
    "A detector of mmdetection: `train_step` and `forward_test`."

    def __init__(self) -> None:
        super().__init__()
        self.model = data.classifier()

    def param_groups(self) -> list[list[nn.Parameter]]:
        return [list(self.parameters())]

    def train_step(self, data: Any, optimizer: Any) -> dict[str, Any]:
        return {'loss': nn.functional.cross_entropy(self.model(data['img']), data['y'])}

    def forward_test(self, imgs: Any, img_metas: Any) -> torch.Tensor:
        return self.model(imgs[0])


class AsImages(vision.Callback):
    order = -5

    def before_batch(self) -> None:
        batch = {'img': self.x, 'y': self.y, 'img_metas': None}
        self.learn.xb, self.learn.yb = (batch,), ([],)


def mmdetection(m: SimpleNamespace) -> list[Any]:
    class Boxes(m.MMDetectionCallback):
        def convert_raw_predictions(self, batch: Any, raw_preds: Any, records: Any) -> list[Any]:
            return [raw_preds]

    return [AsImages(), Boxes()]


wild(
    'icevision',
    ICEVISION + 'mmdet/fastai/callbacks.py',
    'MMDetectionCallback',
    mmdetection,
    model=Trains,
    options=detector_options,
    observe=lambda learn: {'raw': learn.raw_preds},
)

# -- upit, reformer, faststyle, xla ----------------------------------------------------------------


def gan_pairs(path: Path) -> Any:
    return data.make_loaders(torch.randn(48, 6), torch.randn(48, 6), path)


class Cycle(nn.Module):
    "Two generators and two critics."

    def __init__(self) -> None:
        super().__init__()
        self.G_A, self.G_B = nn.Sequential(nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 6))
        self.D_A, self.D_B = nn.Sequential(nn.Linear(6, 1)), nn.Sequential(nn.Linear(6, 1))

    def forward(self, x: Any) -> Any:
        a, b = x
        return self.G_A(b), self.G_B(a), self.G_A(a), self.G_B(b)


def cycle_options(kind: str, module: str) -> Callable[[Any], dict[str, Any]]:
    def options(model: Any) -> dict[str, Any]:
        loss = getattr(FILES['upit'].load(f'upit/train/{module}.py'), kind)(model)
        return {'loss_func': loss, 'metrics': None}

    return options


CYCLE = {'loaders': gan_pairs, 'model': Cycle, 'fit': lambda learn: learn.fit(2, 0.01)}
wild(
    'upit',
    'upit/train/cyclegan.py',
    'CycleGANTrainer',
    lambda m: [m.CycleGANTrainer()],
    options=cycle_options('CycleGANLoss', 'cyclegan'),
    mom=0.0,
    **CYCLE,
)
wild(
    'upit',
    'upit/train/dualgan.py',
    'DualGANTrainer',
    lambda m: [m.DualGANTrainer()],
    options=cycle_options('DualGANLoss', 'dualgan'),
    mom=0.0,
    **CYCLE,
)
wild(
    'upit',
    'upit/tracking/wandb.py',
    'SaveModelAtEndCallback',
    lambda m: [m.SaveModelAtEndCallback()],
    observe=lambda learn: {'files': sorted(p.name for p in Path('models').iterdir())},
)

R = 'reformer_fastai/core.py'


def tokens(path: Path) -> Any:
    "Return sequences of 9 tokens of 5 kinds, each to be predicted from the one before."
    x = torch.randint(0, 5, (48, 9))
    dls = data.make_loaders(x, x.clone(), path)
    dls.train.dataset.sl = 9
    return dls


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embedding(x)
        return self.head(hidden if y is None else hidden[:, : y.shape[1]] + self.embedding(y))


TOKENS = {'loaders': tokens, 'model': Tokens, 'options': without_metrics}
wild('reformer', R, 'PadBatchCallback', lambda m: [m.PadBatchCallback(8)], **TOKENS)
wild(
    'reformer',
    R,
    'CombineInputOutputCallback',
    lambda m: [m.CombineInputOutputCallback()],
    **TOKENS,
)
wild(
    'reformer',
    R,
    'LossTargetShiftCallback',
    lambda m: [ShortInputs(), m.LossTargetShiftCallback()],
    **TOKENS,
)
wild(
    'reformer',
    R,
    'RemoveEOSCallback',
    lambda m: [EndOfText(), m.CombineInputOutputCallback(), m.RemoveEOSCallback(6), FirstTargets()],
    **TOKENS,
)
wild(
    'reformer',
    'reformer_fastai/data.py',
    'MaskTargCallback',
    lambda m: [m.MaskTargCallback()],
    **TOKENS,
)


class ShortInputs(vision.Callback):
    def before_batch(self) -> None:
        self.learn.xb = (self.x[:, :-1],)


class EndOfText(vision.Callback):
    order = -5

    def before_batch(self) -> None:
        y = self.y.clone()
        y[:, -1] = 6
        self.learn.yb = (y,)


class FirstTargets(vision.Callback):
    def after_pred(self) -> None:
        self.learn.yb = (self.y[:, :-1],)


F = 'faststyle/callback.py'


def features(x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [x.mean(1)], [x]


def style_loss(pred: torch.Tensor, target: torch.Tensor, found: dict[str, Any]) -> torch.Tensor:
    a, b = found['pred']['cnt'][0], found['targ']['cnt'][0]
    return (a - b).pow(2).mean()


wild(
    'faststyle',
    F,
    'FeatsCallback',
    lambda m: [m.FeatsCallback(features)],
    loaders=data.series,
    model=data.LongMemory,
    options=lambda model: {'loss_func': style_loss, 'metrics': None},
)
wild(
    'faststyle',
    F,
    'WeightsCallback',
    lambda m: [m.FeatsCallback(features), WithWeights(), m.WeightsCallback()],
    loaders=data.series,
    model=data.LongMemory,
    options=lambda model: {'loss_func': style_loss, 'metrics': None},
)


class WithWeights(vision.Callback):
    order = -5

    def before_batch(self) -> None:
        self.xb[0].ws = torch.ones(2)


M = 'fastai_xla_extensions/multi_core/lr_find.py'


def without_marks(m: SimpleNamespace) -> list[Any]:
    xm = SimpleNamespace(mark_step=lambda: None)
    return [replace_names(m.SkipValidationCallback, xm=xm)()]


wild('xla', M, 'SkipValidationCallback', without_marks, rows=False)
wild('xla', M, 'SyncedCancelCallback', lambda m: [m.SyncedCancelCallback()])

# -- single files ----------------------------------------------------------------------------------

wild(
    'sdfi',
    'src/ML_sdfi_fastai2/train.py',
    'DoThingsAfterBatch',
    lambda m: [m.DoThingsAfterBatch(3)],
    observe=lambda learn: {'files': sorted(p.name for p in Path('models').iterdir())},
)
wild(
    'sdfi',
    'src/ML_sdfi_fastai2/infer.py',
    'SaveSegmentationOutput',
    lambda m: [],
    fit=lambda learn: save_outputs(learn, FILES['sdfi'].load('src/ML_sdfi_fastai2/infer.py')),
    observe=lambda learn: {'saved': learn.saved},
    rows=False,
)


def save_outputs(learn: Any, m: SimpleNamespace) -> None:
    learn.fit(1, 0.1)
    found: queue.Queue[Any] = queue.Queue()
    names = [[Path(f'{i}_{k}.tif') for k in range(8)] for i in range(2)]
    saver = m.SaveSegmentationOutput(learn, Path('out'), names, found, {'batch_size': 8})
    learn.get_preds(cbs=saver)
    learn.saved = [found.get()[0] for _ in range(found.qsize())]


wild(
    'fastMONAI',
    'fastMONAI/vision_metrics.py',
    'EMACheckpoint',
    lambda m: [m.EMACheckpoint('accuracy')],
    observe=lambda learn: {
        'history': learn.ema_checkpoint.ema_history,
        'files': sorted(p.name for p in Path('models').iterdir()),
    },
)


class Trial:
    "A trial of Optuna that is pruned at the second report."

    def __init__(self) -> None:
        self.reported: list[tuple[int, float]] = []

    def report(self, value: float, step: int) -> None:
        self.reported.append((step, value))

    def should_prune(self) -> bool:
        return len(self.reported) > 1


def prune(learn: Any) -> None:
    with suppress(RuntimeError):
        learn.fit(4, 0.1)


def pruning(m: SimpleNamespace) -> list[Any]:
    replace_names(
        m.FastAIV2PruningCallback,
        optuna=SimpleNamespace(TrialPruned=RuntimeError),
        _imports=SimpleNamespace(check=lambda: None),
        CancelFitException=vision.CancelFitException,
    )
    return [m.FastAIV2PruningCallback(Trial(), 'valid_loss')]


wild(
    'optuna',
    'optuna_integration/fastaiv2/fastaiv2.py',
    'FastAIV2PruningCallback',
    pruning,
    fit=prune,
    observe=lambda learn: {'reported': learn.cbs[-1].trial.reported},
)


class Client:
    "What is called on the client of a tracking service, by name."

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, args, kwargs))

        return call


wild(
    'dvclive',
    'src/dvclive/fastai.py',
    'DVCLiveCallback',
    lambda m: [m.DVCLiveCallback(live=Client())],
    observe=lambda learn: {'calls': [c for c in learn.dvc_live.live.calls if 'time' not in str(c)]},
)


def polyaxon(m: SimpleNamespace) -> list[Any]:
    callback = m.Callback.__new__(m.Callback)
    callback.log_model, callback.plx_run, callback._plx_step = False, Client(), 0
    return [callback]


wild(
    'traceml',
    'traceml/traceml/integrations/fastai.py',
    'Callback',
    polyaxon,
    observe=lambda learn: {
        'calls': [c for c in learn.cbs[-1].plx_run.calls if c[0] == 'log_metrics']
    },
)


# -- fastxtend: last, since its files patch fastai --------------------------------------------------

X = 'fastxtend/callback/'
PATCHED = (
    "it calls a method that its package patches into fastai's Learner: patch `learnkit.Learner`"
)
wild('fastxtend', X + 'ema.py', 'EMACallback', lambda m: [m.EMACallback(0.9)])
wild(
    'fastxtend',
    X + 'ema.py',
    'EMASchedule',
    lambda m: [m.EMASchedule(0.5, 0.9, finish=0.8)],
    why=PATCHED,
)
wild('fastxtend', X + 'channelslast.py', 'ChannelsLast', lambda m: [m.ChannelsLast()], **PICTURES)
wild('fastxtend', X + 'amp.py', 'MixedPrecision', lambda m: [m.MixedPrecision('bf16')])
wild(
    'fastxtend', X + 'gradaccum.py', 'GradientAccumulation', lambda m: [m.GradientAccumulation(16)]
)
wild(
    'fastxtend',
    X + 'gradaccum.py',
    'GradientAccumulationSchedule',
    lambda m: [m.GradientAccumulationSchedule(8, 24, log_accum_batch=False)],
    rows=False,
    why='fastai records the loss before for a batch that is cancelled before its forward pass',
)
wild(
    'fastxtend',
    X + 'progresize.py',
    'ProgressiveResize',
    lambda m: [m.ProgressiveResize(start=0.0, preallocate=True, verbose=False)],
    why=PATCHED,
    **PICTURES,
)
wild(
    'fastxtend',
    X + 'tracker.py',
    'TerminateOnTrainNaN',
    lambda m: [m.TerminateOnTrainNaN()],
    fit=lambda learn: learn.fit(3, 1e6),
)
wild(
    'fastxtend',
    X + 'tracker.py',
    'SaveModelAtEnd',
    lambda m: [m.SaveModelAtEnd()],
    observe=lambda learn: {'files': sorted(p.name for p in Path('models').iterdir())},
)
wild(
    'fastxtend',
    X + 'tracker.py',
    'LastMetricCallback',
    lambda m: [m.LastMetricCallback()],
    observe=lambda learn: {'last': dict(learn.lastmetric)},
)
wild('fastxtend', X + 'utils.py', 'LogDispatch', lambda m: [m.LogDispatch()])
wild('fastxtend', X + 'cutmixup.py', 'MixUp', lambda m: [m.MixUp()], **PICTURES)
wild('fastxtend', X + 'cutmixup.py', 'CutMix', lambda m: [m.CutMix()], **PICTURES)
wild(
    'fastxtend',
    'fastxtend/text/huggingface.py',
    'HuggingFaceCallback',
    lambda m: [ToDict(), m.HuggingFaceCallback()],
    model=lambda: DictModel(data.classifier()),
)


def two_losses(m: SimpleNamespace) -> Any:
    losses = [nn.functional.mse_loss, nn.functional.l1_loss]
    return m.MultiLoss(losses, [1.0, 0.5], loss_names=['mse', 'l1'])


def multi_loss_options(model: Any) -> dict[str, Any]:
    m = FILES['fastxtend'].load('fastxtend/multiloss.py')
    return {'loss_func': two_losses(m), 'metrics': None}


wild(
    'fastxtend',
    'fastxtend/multiloss.py',
    'MultiLossCallback',
    lambda m: [m.MultiLossCallback()],
    why="its package patches fastai's Recorder, which names the parts of the loss",
    loaders=data.series,
    model=data.LongMemory,
    options=multi_loss_options,
)


def rows(names: list[str] | None = None) -> list[Row]:
    "Return a row for each class."
    chosen = [(key, case) for key, case in CASES if not names or case.name in names]
    found = []
    for key, case in chosen:
        row = compare_case(case)
        row.callback = f'{REPOSITORIES[key].name}: {row.callback}'
        found.append(row)
    return found


if __name__ == '__main__':
    for row in rows(sys.argv[1:]):
        print(row)
