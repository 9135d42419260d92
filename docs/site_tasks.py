"""Pages of the API: one page for each task, with the modules whose public names belong to it.

Add a new public module to one of these pages; a test finds a missing module."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ['PUBLIC_MODULES', 'TASKS', 'Task']


@dataclass(frozen=True)
class Task:
    "One page of the API."

    slug: str  # name of the page's file
    title: str
    intro: str  # first paragraph of the page
    modules: tuple[str, ...]  # modules that define the names, without `learnkit.`


# Modules from which users import names.
PUBLIC_MODULES = (
    'learnkit learnkit.all learnkit.callbacks learnkit.monitors learnkit.metrics learnkit.losses learnkit.loggers '
    'learnkit.optim learnkit.data learnkit.testing learnkit.distributed learnkit.interop learnkit.checkpoint '
    'learnkit.inference learnkit.debug learnkit.sklearn'
).split()

_ROWS = (
    (
        'learner',
        'Learner',
        'The training loop with the data, the model, the loss and the optimizer. This page has all its members.',
        'learner',
    ),
    (
        'callback',
        'Write a callback',
        'The base class of callbacks, and the events at which callbacks run.',
        'engine.callback engine.events engine.train_eval core.contexts',
    ),
    (
        'train',
        'Train',
        'Gradient accumulation, clipping, mixed precision, MixUp and weight averages.',
        'callbacks.accumulation callbacks.training callbacks.mixed_precision callbacks.mixup callbacks.ema '
        'callbacks.sam callbacks.rnn',
    ),
    (
        'schedules',
        'Schedules and learning rates',
        'Learning-rate schedules, the learning-rate finder, and the functions that schedules are made of.',
        'callbacks.schedule callbacks.torch_scheduler callbacks.lr_finder callbacks.lr_suggestions optim.annealing',
    ),
    (
        'optimizers',
        'Optimizers',
        'Optimizers by the names of fastai, and parameter groups. Every class of torch.optim can be used as it is.',
        'optim.optimizers optim.wrapper optim.hyperparams',
    ),
    (
        'data',
        'Data',
        'Loaders, validation sets with metrics, and functions for batches.',
        'data.dataloaders data.evaluator core.batch',
    ),
    ('losses', 'Losses', 'Loss functions; every loss of torch can be used as it is.', 'losses'),
    (
        'metrics',
        'Metrics',
        'Metrics over a whole validation set. Metrics of torchmetrics can be used as they are.',
        # a source page links to the module that was described first
        'metrics.whole_set metrics.classification metrics.functional metrics.ranking '
        'metrics.segmentation metrics.base metrics.averages metrics.direction',
    ),
    (
        'stopping',
        'Early stopping and the best model',
        'Stop when a value no longer improves, and keep the best weights.',
        'callbacks.tracking callbacks.stoppers callbacks.best_metric callbacks.optuna',
    ),
    (
        'checkpoints',
        'Checkpoints and export',
        'Save and resume exactly, load weights, and export for inference.',
        'callbacks.checkpoint callbacks.export checkpoint.compare interop.hub',
    ),
    (
        'logging',
        'Logging, history and progress',
        'Loggers for files and services, the recorded history, the progress bar, and plots while training.',
        'loggers.base loggers.console loggers.files loggers.tensorboard loggers.wandb loggers.mlflow loggers.api '
        'callbacks.recorder callbacks.history callbacks.progress callbacks.live_plot',
    ),
    (
        'monitors',
        'Monitors',
        'Measure speed, memory, gradients, activations and data while training.',
        'monitors.monitor monitors.periodic monitors.speed monitors.memory monitors.system_monitor '
        'monitors.optimizer_monitor monitors.activation_monitor monitors.activation_stats monitors.dataset '
        'monitors.images monitors.mlperf monitors.profiler',
    ),
    (
        'inference',
        'Predictions and interpretation',
        'Collect predictions, and look at the samples with the largest losses.',
        'inference.interpretation inference.gather callbacks.predictions',
    ),
    (
        'debugging',
        'Find what is wrong',
        'Values that are not finite, batches to run again, hooks, and summaries of a model.',
        'callbacks.nan_guard callbacks.replay callbacks.hooks callbacks.model_summary debug.doc',
    ),
    (
        'distributed',
        'Several processes',
        'Train in several processes, on one machine or several.',
        'distributed.callback',
    ),
    (
        'interop',
        'Callbacks of Composer and Noether',
        'Run callbacks that were written for other packages. Callbacks of fastai run as they are.',
        'interop.composer interop.ksuit',
    ),
    (
        'sklearn',
        'Estimators of scikit-learn',
        'A Learner in pipelines, grid searches and cross-validation of scikit-learn.',
        'sklearn',
    ),
    (
        'time',
        'Time',
        'Intervals, budgets and time stamps in epochs, batches, samples or seconds.',
        'core.time',
    ),
    ('errors', 'Errors and Cancel exceptions', 'Every error that learnkit raises.', 'core.errors'),
    (
        'testing',
        'Testing',
        'Small Learners for tests, and tests that kill a run and resume it.',
        'testing testing.harness',
    ),
)

TASKS = [Task(slug, title, intro, tuple(modules.split())) for slug, title, intro, modules in _ROWS]
