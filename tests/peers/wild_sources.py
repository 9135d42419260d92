"Public repositories with callbacks that users wrote, and the behaviors that their code relies on."

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Repository:
    "A repository, and what was read of it: a commit, or a release on the package index."

    name: str  # owner/name
    version: str


REPOSITORIES = {
    'blurr': Repository('ohmeow/blurr', '8e20e65037425283d3d27f7065462a0a73da91c3'),
    'composer': Repository('mosaicml/composer', '6405188805a0054b4551ec49e4919c54c971d0e8'),
    'diffusion': Repository('mosaicml/diffusion', '49282fd7b2ecde2d5bafb1ca6476d9239865665f'),
    'dvclive': Repository('iterative/dvclive', '51a21507c777eee6d2935547e2a8faeef0579052'),
    'examples': Repository('mosaicml/examples', 'daddaeff7a535273ff984b0134da4839c70a45b3'),
    'fasterai': Repository('nathanhubens/fasterai', '01d7de0e2a0f4344b2927d3bee5b9db2079723f1'),
    'fastMONAI': Repository('MMIV-ML/fastMONAI', 'fastmonai==0.12.0'),
    'faststyle': Repository('lgvaz/faststyle', 'fdd6fce30c64cd60ba2712f915208fceec2b72af'),
    'fastxtend': Repository(
        'warner-benjamin/fastxtend', 'b8c4e87c0c6dc0338c01b7d46ee126d74b32b3db'
    ),
    'icevision': Repository('airctic/icevision', 'f7770b8f015539d518fdfb52fd0fe7b96daf08af'),
    'llm-foundry': Repository('mosaicml/llm-foundry', '8c8dd48f72168c5d51e2f7b151595892a8fba43d'),
    'LLM-Shearing': Repository(
        'princeton-nlp/LLM-Shearing', 'b87218b566c73f6b246aaad3e4c42883f65a48a6'
    ),
    'ModernBERT': Repository('AnswerDotAI/ModernBERT', '8c57a0f01c12c4953ead53d398a36f81a4ba9e38'),
    'neptune-fastai': Repository(
        'neptune-ai/neptune-fastai', '803012057c58630a57303ada07730bd075bbc0f9'
    ),
    'noether': Repository('Emmi-AI/noether', '12bbabad8210643423113f1f17927b64c99f7711'),
    'optuna': Repository('optuna/optuna-integration', '981b8cdf305cee0ce3d916f5b3731c76166ea1b8'),
    'reformer': Repository('arampacha/reformer_fastai', '72ee639a2cc48c262ec5a1245e33fa1814cc7cbf'),
    'sdfi': Repository('SDFIdk/ML_sdfi_fastai2', '4999f80e6b09a5d95e6acb2ab4b8151fcc184ebb'),
    'self_supervised': Repository(
        'KeremTurgutlu/self_supervised', '360df7f1fa06b0ab1e2abe2e1ea6e2230b073a12'
    ),
    'swanlab': Repository('SwanHubX/SwanLab', 'swanlab==0.10.3'),
    'traceml': Repository('polyaxon/traceml', '9a21546c060fbf3085606b8ed0ff977e8631f9bc'),
    'tsai': Repository('timeseriesAI/tsai', 'tsai==0.4.0'),
    'upit': Repository('tmabraham/UPIT', '3c38f943ed9b28659d50f6c2a94b3cc290754870'),
    'xla': Repository(
        'butchland/fastai_xla_extensions', 'e6c58205522b74b0026a2c7bc53a74e2e1dabec1'
    ),
}


@dataclass(frozen=True)
class Behavior:
    "What the code of users relies on; `statement` is a test in tests/interop."

    text: str
    statement: str
    classes: str  # names in the benches, without spaces, separated by spaces


BEHAVIORS = [
    Behavior(
        'replaces `learn.loss_func` by a method of its own, and restores it',
        'loss_function_of_a_callback',
        (
            'BarlowTwins BYOL CLIPTrainer CutMix CutMix1d DINO MixUp MixUp1d MOCO MVP NoisyStudent '
            'RandomWeightLossWrapper SimCLR SupCon SupConMOCO SWAV WeightedPerSampleLoss'
        ),
    ),
    Behavior(
        'puts another number, shape or type of inputs and targets into `learn.xb` and `learn.yb`',
        'batch_of_another_shape',
        (
            'BatchLossFilter BatchMasker BatchSubsampler CombineInputOutputCallback IntraClassCutMix1d '
            'LossTargetShiftCallback PadBatchCallback RemoveEOSCallback UBDAug UnetCallback'
        ),
    ),
    Behavior(
        'changes targets in place',
        'targets_changed_in_place',
        'MaskTargCallback WeightsCallback',
    ),
    Behavior(
        'empties `yb` before the forward pass and gives it afterwards',
        'targets_after_the_forward_pass',
        'EfficientDetCallback RCNNCallback',
    ),
    Behavior(
        'a loss function that reads the dict of losses of the model',
        'loss_function_of_the_models_losses',
        'EfficientDetCallback MMDetectionCallback RCNNCallback',
    ),
    Behavior(
        'replaces or adds to `loss_grad` and `loss` in `after_loss`',
        'loss_of_after_loss',
        'BaseModelCallback HuggingFaceCallback KnowledgeDistillationCallback RegularizeCallback',
    ),
    Behavior(
        'takes the prediction out of a dict or tuple in `after_pred`',
        'prediction_out_of_a_tuple',
        'BaseModelCallback FeatsCallback GamblersCallback HuggingFaceCallback SWAV Yolov5Callback',
    ),
    Behavior(
        'updates a copy of the model after each step',
        'copy_of_the_model',
        'BYOL DINO EMACallback MOCO SupConMOCO',
    ),
    Behavior(
        'changes weights in place after a step or a batch',
        'weights_changed_in_place',
        'CLIPTrainer SparsifyCallback SWAV',
    ),
    Behavior(
        'wraps or converts `learn.model`',
        'model_that_is_wrapped',
        'BaseModelCallback ChannelsLast HuggingFaceCallback MMDetectionCallback QuantizeCallback',
    ),
    Behavior(
        'makes optimizers by `learn.opt_func` and replaces `learn.opt`',
        'several_optimizers',
        'CycleGANTrainer DualGANTrainer',
    ),
    Behavior(
        'cancels batches, validation and fits by exceptions',
        'cancelled_levels',
        (
            'FastAIV2PruningCallback GradientAccumulation GradientAccumulationSchedule '
            'SkipValidationCallback SyncedCancelCallback TerminateOnTrainNaN'
        ),
    ),
    Behavior(
        'enters autocast in `before_batch`, and steps by a scaler that calls the callback',
        'scaler_that_steps',
        'MixedPrecision',
    ),
    Behavior(
        'reads `recorder.values`, `log`, `metric_names`, `losses` and `final_record`',
        'records_that_are_read',
        (
            'Callback DVCLiveCallback EMACheckpoint FastAIV2PruningCallback LastMetricCallback '
            'PredictionDynamics SaveModel ShowGraph'
        ),
    ),
    Behavior(
        'adds metrics before the Recorder names them',
        'metrics_that_are_added',
        'KNNProxyMetric LMMetricsCallback',
    ),
    Behavior(
        'names parts of the loss by a Recorder that its package patches',
        'parts_of_a_loss',
        'MultiLossCallback',
    ),
    Behavior(
        'saves by `learn.save`, and keeps the path that it returns',
        'files_that_are_saved',
        'DoThingsAfterBatch EMACheckpoint MVP SaveModel SaveModelAtEnd SaveModelAtEndCallback',
    ),
    Behavior(
        'replaces what the loader draws, its transforms and its batch size',
        'loader_that_is_changed',
        'NoisyStudent SamplerWithReplacement TransformScheduler',
    ),
    Behavior(
        'runs the model once more in a handler',
        'forward_passes_of_a_handler',
        'BatchLossFilter KNNProxyMetric KnowledgeDistillationCallback UBDAug',
    ),
    Behavior(
        'is made with the Learner, and runs in `get_preds(cbs=)`',
        'callback_of_predictions',
        'SaveSegmentationOutput',
    ),
    Behavior(
        'finds other callbacks by `hasattr(self, name)`',
        'names_of_other_callbacks',
        'DVCLiveCallback LastMetricCallback LogDispatch PredictionDynamics SyncedCancelCallback',
    ),
    Behavior(
        "calls a method that `@patch` has added to fastai's Learner",
        'methods_that_are_patched',
        'EMASchedule ProgressiveResize',
    ),
    Behavior(
        'replaces a part of the model before the fit',
        'new_head_is_trained',
        'MVP',
    ),
    Behavior(
        'Composer: reads `state.train_metric_values` and `state.eval_metric_values`',
        'composer_metric_values',
        'FDiffMetrics FDiffMetrics(diff_train_metrics=True)',
    ),
    Behavior(
        'Composer: puts a metric into `state.train_metrics` or `state.eval_metrics`',
        'composer_metrics_written',
        'MetricsCallback MetricSetterCallback,train MetricSetterCallback,eval',
    ),
    Behavior(
        "Composer: reads what the model's `update_metric` returns",
        'composer_metric_outputs',
        'EvalOutputLogging',
    ),
    Behavior(
        'Composer: finds metrics of a loader whose name has a "/"',
        'metrics_are_objects_before_and_after_every_evaluation_and_of_each_loader',
        'EvalGauntlet',
    ),
    Behavior(
        'Composer: changes rates, decay and `requires_grad` at `fit_start` or `batch_start`',
        'composer_optimizer_written',
        'DiscriminatorSchedule GlobalLRScaling LayerFreezing',
    ),
    Behavior(
        'Composer: ends the run by an error of its own',
        'composer_errors',
        'KillLossSpike(log_only=False) NaNCatcher,onNaN',
    ),
    Behavior(
        'Composer: swaps weights around an evaluation',
        'composer_weights_swapped',
        'EMA EMA(half_lifeinepochs)',
    ),
    Behavior(
        'Composer: reads attributes and methods of an optimizer class of its own',
        'composer_own_optimizer',
        'DecoupledAdaLRLion DecoupledClipLion DecoupledLionW LogGradNorm NoOp',
    ),
    Behavior(
        'Composer: reads and extends dicts in `state.batch` and `state.outputs`',
        'composer_dicts',
        (
            'DebugCallback DynamicLoadingCallback LogDiffusionImages LogLatentStatistics '
            'PackingEfficency PruningCallback SaveClassImages'
        ),
    ),
    Behavior(
        'Composer: reads `state.device._device` and `state.rank_zero_seed`',
        'composer_device_and_seed',
        'PinDiffusionRNG',
    ),
    Behavior(
        'Composer: changes the data set of `state.train_dataloader`',
        'composer_data_set',
        'DynamicLoadingCallback',
    ),
    Behavior(
        'Composer: hears every event by `run_event`',
        'composer_run_event',
        'CheckBatch0 EventCounterCallback SleepyCallback',
    ),
    Behavior(
        'Composer: follows tokens and a share of the duration',
        'elapsed_share_and_stop',
        'EMA(half_lifeinepochs) FlexBertRopeSchedule KillLossSpike',
    ),
    Behavior(
        'Composer: acts on the process, at the start and end of fits, evaluations and loading',
        'composer_process',
        (
            'DataloaderSpeedMonitor EnvironmentLoggingCallback RunTimeoutCallback '
            'ScheduledGarbageCollector'
        ),
    ),
    Behavior(
        'Noether: a `callback_config`, a `Model`, and the services of `BaseTrainer`',
        'early_stopping_by_exception_and_by_answer',
        (
            'BestCheckpointCallback(every_n_updates=1) EmaCallback(every_n_updates=2) '
            'FixedEarlyStopper(stop_at_epoch=2) FixedEarlyStopper(stop_at_update=4) '
            'OfflineLossCallback(every_n_epochs=1) OnlineLossCallback(every_n_updates=2)'
        ),
    ),
]
