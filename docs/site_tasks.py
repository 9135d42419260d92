"""Pages of the API: one for each task, with the modules or the Learner's members that belong to it.

Add a new public module to one of these pages, and a new public member of the Learner to
`LEARNER_PAGES`; tests find what is missing."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ['LEARNER_PAGES', 'PUBLIC_MODULES', 'TASKS', 'LearnerPage', 'Task']


@dataclass(frozen=True)
class Task:
    "One page of the API."

    slug: str  # name of the page's file
    title: str
    intro: str  # first paragraph of the page
    modules: tuple[str, ...]  # modules that define the names, without `learnkit.`


@dataclass(frozen=True)
class LearnerPage:
    "One page about the Learner, with the members for one task."

    slug: str  # name of the page's file
    title: str
    intro: str  # first paragraph of the page
    members: tuple[str, ...]  # methods and properties, in the order of the page


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
        'The training loop with its data, model, loss and optimizer.',
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
        'Gradient accumulation, clipping, mixed precision, MixUp, weight averages, activation checkpointing.',
        'callbacks.accumulation callbacks.training callbacks.mixed_precision callbacks.mixup callbacks.ema '
        'callbacks.sam callbacks.rnn callbacks.activation_checkpointing',
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
        'optim.optimizers optim.wrapper optim.hyperparams core.roles',
    ),
    (
        'data',
        'Data',
        'Loaders, validation sets with metrics, and functions for batches.',
        'data.dataloaders data.combined data.evaluator core.batch',
    ),
    ('losses', 'Losses', 'Loss functions; every loss of torch can be used as it is.', 'losses'),
    (
        'metrics',
        'Metrics',
        'Functions that are averaged over samples or targets: accuracy, errors, perplexity. Metrics of torchmetrics '
        'can be used as they are.',
        'metrics.functional',
    ),
    (
        'metrics_scores',
        'Metrics of a whole set',
        'Scores that are not a mean over samples: F1, precision, recall, AUC, correlations, Dice.',
        'metrics.whole_set metrics.classification metrics.ranking metrics.segmentation',
    ),
    (
        'metrics_base',
        'Write a metric',
        'Base classes of metrics, and adapters for functions and for other packages.',
        'metrics.base metrics.averages metrics.direction',
    ),
    (
        'stopping',
        'Early stopping and the best model',
        'Stop when a value no longer improves, and keep the best weights.',
        'callbacks.tracking callbacks.early_stopping callbacks.save_model callbacks.reduce_lr_on_plateau '
        'callbacks.stoppers callbacks.best_metric callbacks.optuna',
    ),
    (
        'checkpoints',
        'Checkpoints and export',
        'Save and resume exactly, load weights, and export for inference.',
        'callbacks.checkpoint callbacks.load_weights callbacks.export_for_inference '
        'checkpoint.compare checkpoint.digest interop.hub',
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
        'monitors.monitor monitors.periodic monitors.speed monitors.step_time monitors.memory monitors.system_monitor '
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
        'callbacks.nan_guard callbacks.replay callbacks.hooks callbacks.model_summary debug.doc '
        'debug.difference debug.runs',
    ),
    (
        'distributed',
        'Several processes',
        'Train in several processes, on one machine or several.',
        'distributed.callback',
    ),
    (
        'interop',
        'Code of other packages',
        'Run callbacks and modules that were written for other packages. Callbacks of fastai run as they are.',
        'interop.composer.adapter interop.ksuit.adapter interop.lightning.adapter interop.hf.adapter interop.keras',
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

_LEARNER_ROWS = (
    (
        'learner_train',
        'Train with a Learner',
        'Fit a model, find a learning rate or a batch size, freeze layers, use mixed precision, compile, and train on '
        'several GPUs.',
        'fit fit_one_cycle fit_flat_cos fit_sgdr fit_until fine_tune lr_find find_batch_size stop pause paused resume '
        'freeze freeze_to unfreeze to_bf16 to_fp16 to_fp32 compile distributed launch eval_every create_opt',
    ),
    (
        'learner_evaluate',
        'Evaluate with a Learner',
        'Compute the loss and the metrics of a validation or test set, log values, and read the history.',
        'validate metrics metric_names log history smooth_loss no_bar no_mbar no_logging loss_not_reduced '
        'validation_context',
    ),
    (
        'learner_predict',
        'Predict with a Learner',
        'Predict on new data: one sample, a whole loader, or batch by batch; average over test-time augmentation.',
        'predict get_preds predict_iter tta show_results',
    ),
    (
        'learner_save',
        'Save and load a Learner',
        'Save a model and load the saved model again: weights, a whole Learner, a program for serving, or the complete '
        'state of a training.',
        'save load save_learner export checkpoint_state load_checkpoint_state callback_states load_callback_states '
        'check_resume rewind',
    ),
    (
        'learner_inspect',
        'Inspect a Learner',
        'Look at the layers, the events, the callbacks and what they change, and write a report.',
        'summary report show_training_loop explain trace replay explain_step check_replicas gather_args time finished',
    ),
    (
        'learner_callbacks',
        'Callbacks of a Learner',
        'Add and remove callbacks, and release what they hold.',
        'cbs add_cb add_cbs remove_cb remove_cbs added_cbs removed_cbs ordered_cbs callback_changed contexts close',
    ),
    (
        'learner_loop',
        "Parts of a Learner's loop",
        'Call or override the parts of the loop, for a training step of your own.',
        'train_batch evaluate_batch forward compute_loss optimize report_loss x y batch_source step_parameters '
        'to_detach train one_batch all_batches draw_batches do_evaluation set_loader run',
    ),
)

LEARNER_PAGES = [
    LearnerPage(slug, title, intro, tuple(members.split()))
    for slug, title, intro, members in _LEARNER_ROWS
]
