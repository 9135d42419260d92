"""What Noether's callbacks ask of their trainer, written from the interface of ksuit's `CallbackBase`.

Noether cannot be installed from an index. Each class here has the name of one of its callbacks and uses the services
that this one uses, with the same keys and arguments. Nothing here knows learnkit."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

INF = float('inf')


class EarlyStopIteration(StopIteration):
    "Raised by a callback that ends the training."


# Bases


class CallbackBase:
    "Keeps what the trainer gives to its constructor; without state."

    def __init__(
        self,
        trainer: Any,
        model: Any,
        data_container: Any,
        tracker: Any,
        log_writer: Any,
        checkpoint_writer: Any,
        metric_property_provider: Any,
        name: str | None = None,
    ) -> None:
        self.trainer, self.model, self.data_container = trainer, model, data_container
        self.tracker, self.writer, self.checkpoint_writer = tracker, log_writer, checkpoint_writer
        self.metric_property_provider, self.name = metric_property_provider, name

    @property
    def logger(self) -> logging.Logger:
        return logging.getLogger(type(self).__name__)

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        "Nothing to load."

    def resume_from_checkpoint(self, resumption_paths: Any, model: nn.Module) -> None:
        "No files to read."

    def before_training(self, *, update_counter: Any) -> None:
        "Nothing to do."

    def after_training(self, *, update_counter: Any) -> None:
        "Nothing to do."


@dataclass(kw_only=True)
class Interval:
    "Options of every periodic callback."

    every_n_epochs: int | None = None
    every_n_updates: int | None = None
    every_n_samples: int | None = None
    batch_size: int | None = None
    id: str | None = None


class PeriodicCallback(CallbackBase):
    "Decides itself when `periodic_callback` is due."

    def __init__(self, callback_config: Interval, **services: Any) -> None:
        super().__init__(**services, name=callback_config.id)
        self.every_n_epochs = callback_config.every_n_epochs
        self.every_n_updates = callback_config.every_n_updates
        self.every_n_samples = callback_config.every_n_samples
        self.batch_size = callback_config.batch_size

    def periodic_callback(self, *, interval_type: str, update_counter: Any, **_: Any) -> None:
        "Due."

    def track_after_accumulation_step(self, **_: Any) -> None:
        "Nothing to track."

    def track_after_update_step(self, *, update_counter: Any, times: dict[str, float]) -> None:
        "Nothing to track."

    def is_due_in_epochs(self, iteration: Any) -> bool:
        return bool(self.every_n_epochs) and iteration.epoch % self.every_n_epochs == 0

    def is_due_in_updates(self, iteration: Any) -> bool:
        return bool(self.every_n_updates) and iteration.update % self.every_n_updates == 0

    def is_due_in_samples(self, iteration: Any, effective_batch_size: int) -> bool:
        n = self.every_n_samples
        return bool(n) and iteration.sample // n > (iteration.sample - effective_batch_size) // n

    def after_epoch(self, update_counter: Any, **more: Any) -> None:
        if self.is_due_in_epochs(update_counter.cur_iteration):
            self.periodic_callback(interval_type='epoch', update_counter=update_counter, **more)

    def after_update(self, update_counter: Any, **more: Any) -> None:
        now = update_counter.cur_iteration
        if self.is_due_in_updates(now):
            self.periodic_callback(interval_type='update', update_counter=update_counter, **more)
        if self.is_due_in_samples(now, update_counter.effective_batch_size):
            self.periodic_callback(interval_type='sample', update_counter=update_counter, **more)

    def at_eval(self, update_counter: Any, **more: Any) -> None:
        self.periodic_callback(interval_type='eval', update_counter=update_counter, **more)

    def updates_per_interval(self, update_counter: Any) -> int:
        if self.every_n_epochs:
            return update_counter.updates_per_epoch * self.every_n_epochs
        if self.every_n_updates:
            return self.every_n_updates
        return self.every_n_samples // update_counter.effective_batch_size

    def updates_till_next_invocation(self, update_counter: Any) -> int:
        n = self.updates_per_interval(update_counter)
        return n - update_counter.cur_iteration.update % n

    def to_short_interval_string(self) -> str:
        units = {'E': self.every_n_epochs, 'U': self.every_n_updates, 'S': self.every_n_samples}
        return '_'.join(f'{unit}{n}' for unit, n in units.items() if n)


@dataclass(kw_only=True)
class OfDataSet(Interval):
    dataset_key: str


class PeriodicDataIteratorCallback(PeriodicCallback):
    "Gets the batches of a data set, and its joined results."

    def __init__(self, callback_config: OfDataSet, **services: Any) -> None:
        super().__init__(callback_config, **services)
        self.dataset_key = callback_config.dataset_key
        dataset = self.data_container.get_dataset(
            key=self.dataset_key, properties=None, max_size=None
        )
        self.n_samples, self.pipeline = len(dataset), dataset.pipeline
        assert self.n_samples > 0

    def process_data(self, batch: Any, *, trainer_model: nn.Module) -> Any:
        "Return the results of a batch; the trainer joins them."

    def process_results(
        self, results: Any, *, interval_type: str, update_counter: Any, **_: Any
    ) -> None:
        "Use the joined results."


# What a trainer adds itself


class DatasetStatsCallback(CallbackBase):
    def before_training(self, **_: Any) -> None:
        for key, dataset in self.data_container.datasets.items():
            self.tracker.set_summary(key=f'ds_stats/{key}/len', value=len(dataset))
        self.logger.info('%s data sets', len(self.data_container.datasets))


class ParamCountCallback(CallbackBase):
    def before_training(self, **_: Any) -> None:
        key = f'param_count/{type(self.model).__name__.lower()}'
        trainable, frozen = self.model.trainable_param_count, self.model.frozen_param_count
        self.tracker.update_summary(
            {f'{key}/trainable': trainable, f'{key}/frozen': frozen, key: trainable + frozen}
        )


class EtaCallback(PeriodicCallback):
    def before_training(self, *, update_counter: Any) -> None:
        self.seconds, self.lines = 0.0, []
        self.width = len(str(update_counter.end_iteration.update))

    def track_after_update_step(self, *, update_counter: Any, times: dict[str, float]) -> None:
        now, end = update_counter.cur_iteration, update_counter.end_iteration
        self.seconds += times['update'] + times['data_wait']
        assert self.seconds / now.update > 0
        done = (self.is_due_in_epochs(now) and update_counter.is_full_epoch) or (
            self.is_due_in_updates(now)
        )
        due = self.is_due_in_samples(now, update_counter.effective_batch_size)
        left = 0 if done or due else self.updates_till_next_invocation(update_counter)
        self.lines.append(
            f'E {now.epoch}/{end.epoch} U {now.update:{self.width}d}/{end.update} '
            f'S {now.sample}/{end.sample} next {left}'
        )


class LrCallback(PeriodicCallback):
    def periodic_callback(self, **_: Any) -> None:
        for name, model in self.model.get_named_models().items():
            optimizer = model.optimizer
            assert optimizer is not None
            for group in optimizer.torch_optim.param_groups:
                if optimizer.schedule is not None:
                    self.writer.add_scalar(f'optim/lr/{name}', group['lr'])
                if optimizer.weight_decay_schedule is not None:
                    self.writer.add_scalar(f'optim/wd/{name}', group['weight_decay'])


@dataclass(kw_only=True)
class OnlineLossConfig(Interval):
    verbose: bool = True


class OnlineLossCallback(PeriodicCallback):
    def __init__(self, callback_config: OnlineLossConfig, **services: Any) -> None:
        super().__init__(callback_config, **services)
        self.verbose = callback_config.verbose
        self.tracked_losses: defaultdict[str, list[Tensor]] = defaultdict(list)

    def track_after_accumulation_step(self, *, losses: dict[str, Tensor], **_: Any) -> None:
        for name, loss in losses.items():
            self.tracked_losses[name].append(loss.detach())

    def periodic_callback(self, *, interval_type: str, **_: Any) -> None:
        if interval_type == 'eval':
            return
        for name, losses in self.tracked_losses.items():
            mean = torch.stack(losses).mean()
            if not self.trainer.config.skip_nan_loss and mean.isnan():
                raise RuntimeError(f'{name} is nan')
            self.writer.add_scalar(
                key=f'loss/online/{name}/{self.to_short_interval_string()}',
                value=mean,
                logger=self.logger if self.verbose else None,
            )
        self.tracked_losses.clear()


class PeakMemoryCallback(PeriodicCallback):
    def periodic_callback(self, **_: Any) -> None:
        if str(self.model.device) == 'cuda':
            self.logger.info('%s', torch.cuda.max_memory_allocated())


class ProgressCallback(PeriodicCallback):
    def before_training(self, **_: Any) -> None:
        self.printed_lines: list[str] = []

    def periodic_callback(self, *, interval_type: str, update_counter: Any, **_: Any) -> None:
        now, end = update_counter.cur_iteration, self.trainer.end_checkpoint
        share = now.update / self.trainer.total_training_updates
        units = {'epoch': (now.epoch, end.epoch), 'sample': (now.sample, end.sample)}
        done = units.get(interval_type, (now.update, self.trainer.total_training_updates))
        self.printed_lines.append(f'{share:.0%} {interval_type} {done} ({now})')


class TrainTimeCallback(PeriodicCallback):
    def __init__(self, callback_config: Interval, **services: Any) -> None:
        super().__init__(callback_config, **services)
        self.train_times: dict[str, list[float]] = defaultdict(list)
        self.total_train_times: dict[str, float] = defaultdict(float)

    def track_after_update_step(self, *, times: dict[str, float], **_: Any) -> None:
        for name, seconds in times.items():
            self.train_times[name].append(seconds)

    def periodic_callback(self, **_: Any) -> None:
        every = self.to_short_interval_string()
        for name, seconds in self.train_times.items():
            values = torch.tensor(seconds)
            self.total_train_times[name] += values.sum().item()
            for kind, value in (('mean', values.mean()), ('max', values.max())):
                key = f'train_time/{name}/{kind}/{every}'
                self.writer.add_scalar(key=key, value=value, logger=self.logger)
        self.train_times.clear()

    def after_training(self, **_: Any) -> None:
        for name, seconds in self.total_train_times.items():
            self.logger.info('%s: %s s', name, seconds)


# What a user adds


@dataclass(kw_only=True)
class BestCheckpointConfig(Interval):
    metric_key: str
    tolerances: list[int] | None = None
    model_names: list[str] | None = None


class BestCheckpointCallback(PeriodicCallback):
    def __init__(self, callback_config: BestCheckpointConfig, **services: Any) -> None:
        super().__init__(callback_config, **services)
        self.metric_key = callback_config.metric_key
        self.higher = self.metric_property_provider.higher_is_better(self.metric_key)
        self.best = -INF if self.higher else INF
        self.exceeded = dict.fromkeys(callback_config.tolerances or [], False)
        self.n_worse, self.at_exceeded = 0, dict[int, float]()
        self.model_names = callback_config.model_names or []

    def state_dict(self) -> dict[str, Any]:
        names = ('best', 'exceeded', 'n_worse', 'at_exceeded')
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)

    def before_training(self, *, update_counter: Any) -> None:
        if self.exceeded and update_counter.cur_iteration.sample > 0:
            raise NotImplementedError('tolerances cannot be resumed')

    def periodic_callback(self, **_: Any) -> None:
        if self.writer.log_cache is None or self.metric_key not in self.writer.log_cache:
            raise KeyError(f'no {self.metric_key} in {list(self.writer.log_cache or ())}')
        value = self.writer.log_cache[self.metric_key]
        if value > self.best if self.higher else value < self.best:
            self.logger.info('%s: %s', self.metric_key, value)
            self._save('')
            self.best, self.n_worse = value, 0
            self.exceeded = dict.fromkeys(self.exceeded, False)
            return
        self.n_worse += 1
        for tolerance, was_exceeded in self.exceeded.items():
            if not was_exceeded and self.n_worse > tolerance:
                self.exceeded[tolerance], self.at_exceeded[tolerance] = True, value
                self._save(f'.tolerance={tolerance}')

    def _save(self, suffix: str) -> None:
        self.checkpoint_writer.save(
            model=self.model,
            checkpoint_tag=f'best_model.{self.metric_key.replace("/", ".")}{suffix}',
            save_optim=False,
            model_names_to_save=self.model_names,
        )

    def after_training(self, **_: Any) -> None:
        for tolerance, value in self.at_exceeded.items():
            self.logger.info('best with tolerance %s: %s', tolerance, value)


@dataclass(kw_only=True)
class CheckpointConfig(Interval):
    save_weights: bool = True
    save_optim: bool = False
    save_latest_weights: bool = True
    save_latest_optim: bool = False
    model_names: list[str] | None = None


class CheckpointCallback(PeriodicCallback):
    def __init__(self, callback_config: CheckpointConfig, **services: Any) -> None:
        super().__init__(callback_config, **services)
        self.config = callback_config

    def before_training(self, *, update_counter: Any) -> None:
        n_bytes = 4 * (self.model.frozen_param_count + self.model.trainable_param_count)
        end, n = update_counter.end_iteration, 1
        if self.every_n_epochs:
            n += end.epoch // self.every_n_epochs
        if self.every_n_updates:
            n += end.update // self.every_n_updates
        if self.every_n_samples:
            n += end.sample // self.every_n_samples
        self.expected_bytes = n * n_bytes

    def periodic_callback(self, *, interval_type: str, update_counter: Any, **_: Any) -> None:
        if interval_type != 'eval':
            self._save(str(update_counter.cur_iteration))

    def after_training(self, **_: Any) -> None:
        self._save('last')

    def _save(self, tag: str) -> None:
        self.checkpoint_writer.save(
            model=self.model,
            trainer=self.trainer,
            checkpoint_tag=tag,
            save_weights=self.config.save_weights,
            save_optim=self.config.save_optim,
            save_latest_weights=self.config.save_latest_weights,
            save_latest_optim=self.config.save_latest_optim,
            model_names_to_save=self.config.model_names,
            save_frozen_weights=True,
        )


@dataclass(kw_only=True)
class EmaConfig(Interval):
    target_factors: list[float]
    save_weights: bool = True
    save_last_weights: bool = True
    save_latest_weights: bool = False


class EmaCallback(PeriodicCallback):
    def __init__(self, callback_config: EmaConfig, **services: Any) -> None:
        super().__init__(callback_config, **services)
        self.config, self.factors = callback_config, callback_config.target_factors
        self.parameters: dict[float, dict[str, Tensor]] = {}
        self.buffers: dict[str, Tensor] = {}
        self.was_resumed = False

    def resume_from_checkpoint(self, resumption_paths: Any, model: nn.Module) -> None:
        for factor in self.factors:
            name = f'{self.model.name}_ema={factor}_cp=latest_model.th'
            file = resumption_paths.checkpoint_path / name
            saved = torch.load(file, weights_only=True)['state_dict']
            self.parameters[factor] = {name: saved[name] for name, _ in model.named_parameters()}
            self.buffers = {name: saved[name] for name, _ in model.named_buffers()}
        self.was_resumed = True

    def before_training(self, **_: Any) -> None:
        assert isinstance(self.model, nn.Module)
        if self.was_resumed:
            return
        for factor in self.factors:
            parameters = self.model.named_parameters()
            self.parameters[factor] = {name: p.clone() for name, p in parameters}
        self.buffers = {name: b.clone() for name, b in self.model.named_buffers()}

    def track_after_update_step(self, **_: Any) -> None:
        for factor in self.factors:
            averages = list(self.parameters[factor].values())
            torch._foreach_mul_(averages, factor)
            torch._foreach_add_(averages, list(self.model.parameters()), alpha=1 - factor)
        for name, buffer in self.model.named_buffers():
            self.buffers[name].copy_(buffer)

    def periodic_callback(self, *, interval_type: str, update_counter: Any, **_: Any) -> None:
        if interval_type != 'eval':
            self._save(str(update_counter.cur_iteration))

    def after_training(self, **_: Any) -> None:
        if self.config.save_last_weights:
            self._save('last')

    def _save(self, tag: str) -> None:
        tags = [tag] * self.config.save_weights + ['latest'] * self.config.save_latest_weights
        for factor in self.factors:
            for each in tags:
                self.checkpoint_writer.save_model_checkpoint(
                    model_name=self.model.name,
                    checkpoint_tag=each,
                    model_info=f'ema={factor}',
                    state_dict={**self.parameters[factor], **self.buffers},
                    model_config=getattr(self.model, 'model_config', None),
                    ema=factor,
                )


@dataclass(kw_only=True)
class BestMetricConfig(Interval):
    source_metric_key: str
    target_metric_keys: list[str] | None = None
    optional_target_metric_keys: list[str] | None = None


class BestMetricCallback(PeriodicCallback):
    def __init__(self, callback_config: BestMetricConfig, **services: Any) -> None:
        super().__init__(callback_config, **services)
        self.source = callback_config.source_metric_key
        self.targets = callback_config.target_metric_keys or []
        self.optional = callback_config.optional_target_metric_keys or []
        self.higher = self.metric_property_provider.higher_is_better(self.source)
        self.best = -INF if self.higher else INF
        self.last: dict[str, float] = {}

    def periodic_callback(self, **_: Any) -> None:
        cache = self.writer.log_cache
        for key in (self.source, *self.targets):
            if cache is None or key not in cache:
                raise ValueError(f'no {key} in {list(cache or ())}')
        value = cache[self.source]
        if value > self.best if self.higher else value < self.best:
            found = [key for key in self.optional if key in cache]
            suffix = f'at_best/{self.source}'
            self.last = {f'{key}/{suffix}': cache[key] for key in (*self.targets, *found)}
            self.best = value
        for key, at_best in self.last.items():
            self.writer.add_scalar(key=key, value=at_best, logger=self.logger, format_str='.6f')


@dataclass(kw_only=True)
class TrackOutputsConfig(Interval):
    keys: list[str] | None = None
    patterns: list[str] | None = None
    verbose: bool = False
    reduce: str = 'mean'
    log_output: bool = True
    save_output: bool = False


class TrackAdditionalOutputsCallback(PeriodicCallback):
    def __init__(self, callback_config: TrackOutputsConfig, **services: Any) -> None:
        super().__init__(callback_config, **services)
        self.config = callback_config
        self.keys, self.patterns = callback_config.keys or [], callback_config.patterns or []
        self.tracked_values: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.out = None
        if callback_config.save_output:
            self.out = self.checkpoint_writer.path_provider.run_output_path / 'update_outputs'
            self.out.mkdir(exist_ok=True)

    def track_after_accumulation_step(
        self, *, update_counter: Any, update_outputs: dict[str, Tensor] | None, **_: Any
    ) -> None:
        assert update_outputs is not None
        is_last = self.updates_till_next_invocation(update_counter) == 1
        if self.config.reduce == 'last' and not is_last:
            return
        for key in self.keys:
            self.tracked_values[key].append(update_outputs[key].detach())
        for key, value in update_outputs.items():
            if any(pattern in key for pattern in self.patterns):
                self.tracked_values[key].append(value.detach())

    def periodic_callback(self, *, update_counter: Any, **_: Any) -> None:
        every = self.to_short_interval_string()
        for key, values in self.tracked_values.items():
            is_mean = self.config.reduce == 'mean'
            value = torch.stack(values).float().mean() if is_mean else values[-1]
            if self.config.log_output:
                logger = self.logger if self.config.verbose else None
                self.writer.add_scalar(
                    key=f'{key}/{every}', value=value, logger=logger, format_str='.5f'
                )
            if self.out is not None:
                torch.save(value, self.out / f'{key}_{every}_{update_counter.cur_iteration}.th')
        self.tracked_values.clear()


class EarlyStopperBase(PeriodicCallback):
    should_stop: Callable[[Any], bool]

    def periodic_callback(self, *, interval_type: str, update_counter: Any, **_: Any) -> None:
        if interval_type != 'eval' and self.should_stop(update_counter):
            raise EarlyStopIteration


@dataclass(kw_only=True)
class FixedConfig:
    stop_at_sample: int | None = None
    stop_at_update: int | None = None
    stop_at_epoch: int | None = None


class FixedEarlyStopper(EarlyStopperBase):
    def __init__(self, callback_config: FixedConfig, **services: Any) -> None:
        super().__init__(Interval(every_n_updates=1), **services)
        self.config = callback_config

    def should_stop(self, update_counter: Any) -> bool:
        now, at = update_counter.cur_iteration, self.config
        pairs = (
            (now.sample, at.stop_at_sample),
            (now.update, at.stop_at_update),
            (now.epoch, at.stop_at_epoch),
        )
        return any(end is not None and n >= end for n, end in pairs)


@dataclass(kw_only=True)
class MetricStopperConfig(Interval):
    metric_key: str
    tolerance: int


class MetricEarlyStopper(EarlyStopperBase):
    def __init__(self, callback_config: MetricStopperConfig, **services: Any) -> None:
        super().__init__(callback_config, **services)
        self.metric_key, self.tolerance = callback_config.metric_key, callback_config.tolerance
        self.higher = self.metric_property_provider.higher_is_better(self.metric_key)
        self.best, self.n_worse = -INF if self.higher else INF, 0

    def should_stop(self, update_counter: Any) -> bool:
        if self.writer.log_cache is None or self.metric_key not in self.writer.log_cache:
            raise ValueError(f'no {self.metric_key} in {list(self.writer.log_cache or ())}')
        value = self.writer.log_cache[self.metric_key]
        is_better = value > self.best if self.higher else value < self.best
        self.best, self.n_worse = (value, 0) if is_better else (self.best, self.n_worse + 1)
        self.logger.info('%s %s: %s', self.metric_key, value, self.n_worse)
        return self.n_worse >= self.tolerance


@dataclass(kw_only=True)
class OfflineLossConfig(OfDataSet):
    output_patterns_to_log: list[str] | None = None


class OfflineLossCallback(PeriodicDataIteratorCallback):
    def __init__(self, callback_config: OfflineLossConfig, **services: Any) -> None:
        super().__init__(callback_config, **services)
        self.patterns = callback_config.output_patterns_to_log or []

    def process_data(self, batch: Any, *, trainer_model: nn.Module) -> Any:
        result = self.trainer.train_step(batch=batch, model=trainer_model)
        losses = {'total': result.total_loss.detach().cpu()}
        for name, loss in (result.losses_to_log or {}).items():
            losses[name] = loss.cpu()
        outputs = {
            name: output.cpu()
            for name, output in (result.additional_outputs or {}).items()
            if any(pattern in name for pattern in self.patterns)
        }
        return losses, outputs

    def process_results(self, results: Any, **_: Any) -> None:
        losses, outputs = results
        for name, values in losses.items():
            mean = values.mean()
            self._write(f'loss/{self.dataset_key}/{name}', mean)
            key = f'loss/online/{name}/{self.to_short_interval_string()}'
            online = self.writer.log_cache.get(key)
            if online is not None:
                self._write(f'lossdiff/{self.dataset_key}/{name}', mean - online)
        for name, output in outputs.items():
            self._write(f'{name}/{self.dataset_key}', output.float().mean())

    def _write(self, key: str, value: Tensor) -> None:
        self.writer.add_scalar(key=key, value=value, logger=self.logger, format_str='.5f')


class AccuracyCallback(PeriodicDataIteratorCallback):
    "A user's own: the share of targets whose sign is predicted."

    def process_data(self, batch: Any, *, trainer_model: nn.Module) -> Tensor:
        with self.trainer.autocast_context:
            pred = trainer_model(batch['x'])['pred']
        return (pred.sign() == batch['target'].sign()).float()

    def process_results(self, results: Any, *, update_counter: Any, **_: Any) -> None:
        self.writer.add_scalar(f'accuracy/{self.dataset_key}', results.mean())
        self.writer.add_nonscalar(f'note/{self.dataset_key}', str(update_counter.cur_iteration))
