"A trainer in plain torch with the services and the order of hooks that Noether documents; it does not know learnkit."

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.peers.ksuit_callbacks import EarlyStopIteration

LOWER, HIGHER = ('*loss*', '*error*'), ('*accuracy*',)


@dataclass
class Iteration:
    epoch: int = 0
    update: int = 0
    sample: int = 0

    def __str__(self) -> str:
        return f'E{self.epoch}_U{self.update}_S{self.sample}'


@dataclass
class Counter:
    updates_per_epoch: int
    effective_batch_size: int
    end_iteration: Iteration
    cur_iteration: Iteration = field(default_factory=Iteration)

    @property
    def is_full_epoch(self) -> bool:
        return self.cur_iteration.update % self.updates_per_epoch == 0


class Writer:
    "One entry for an update, which holds each key once."

    def __init__(self, counter: Counter, folder: Path) -> None:
        self.counter, self.folder = counter, folder
        self.log_cache: dict[str, Any] | None = None
        self.entries: list[dict[str, Any]] = []

    def add_scalar(
        self,
        key: str,
        value: Any,
        logger: logging.Logger | None = None,
        format_str: str | None = None,
    ) -> None:
        if self.log_cache is None:
            self.log_cache = asdict(self.counter.cur_iteration)
        assert key not in self.log_cache
        self.log_cache[key] = value.item() if isinstance(value, Tensor) else value
        if logger is not None:
            logger.info('%s: %s', key, format(self.log_cache[key], format_str or ''))

    def add_nonscalar(self, key: str, value: Any) -> None:
        "Notes and images are not compared."

    def flush(self) -> None:
        if self.log_cache is not None:
            self.entries.append(self.log_cache)
        self.log_cache = None

    def finish(self) -> None:
        "Write the values of each key by update."
        self.flush()
        found: dict[str, dict[int, Any]] = {}
        for entry in self.entries:
            for key in entry.keys() - {'update'}:
                found.setdefault(key, {})[entry['update']] = entry[key]
        if found:
            folder = self.folder / 'tracker'
            folder.mkdir()
            torch.save(found, folder / 'entries.th')


class Tracker:
    def __init__(self) -> None:
        self.summary: dict[str, Any] = {}

    def set_summary(self, key: str, value: Any) -> None:
        self.summary[key] = value

    def update_summary(self, data: dict[str, Any]) -> None:
        self.summary.update(data)


class Properties:
    def higher_is_better(self, key: str) -> bool:
        return any(fnmatch.fnmatch(key, p) for p in HIGHER) or not any(
            fnmatch.fnmatch(key, p) for p in LOWER
        )


class CheckpointWriter:
    "Weights, optimizer and trainer in files of their own, by name and tag."

    def __init__(self, folder: Path) -> None:
        self.path_provider = SimpleNamespace(
            run_output_path=folder, checkpoint_path=folder / 'checkpoints'
        )
        self.path_provider.checkpoint_path.mkdir()

    def save_model_checkpoint(
        self,
        model_name: str,
        checkpoint_tag: str,
        state_dict: dict[str, Any],
        model_config: Any = None,
        model_info: str | None = None,
        **extra: Any,
    ) -> None:
        info = f'_{model_info}' if model_info else ''
        self._write(f'{model_name}{info}_cp={checkpoint_tag}_model', {'state_dict': state_dict})

    def save(
        self,
        model: Any,
        checkpoint_tag: str,
        trainer: Any = None,
        save_weights: bool = True,
        save_optim: bool = True,
        save_latest_weights: bool = False,
        save_latest_optim: bool = False,
        model_names_to_save: Sequence[str] | None = None,
        save_frozen_weights: bool = True,
    ) -> None:
        tags = {checkpoint_tag: (save_weights, save_optim)}
        tags['latest'] = (save_latest_weights, save_latest_optim)
        for tag, (weights, optim) in tags.items():
            if weights:
                self.save_model_checkpoint(model.name, tag, model.state_dict())
            if optim:
                self._write(f'{model.name}_cp={tag}_optim', model.optimizer.state_dict())
            if (weights or optim) and trainer is not None:
                self._write(f'{model.name}_cp={tag}_trainer', {})

    def _write(self, name: str, state: Any) -> None:
        torch.save(state, self.path_provider.checkpoint_path / f'{name}.th')


class Optimizer:
    def __init__(self, opt: torch.optim.Optimizer, schedule: Any) -> None:
        self.torch_optim = opt
        self.schedule = self.weight_decay_schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        return self.torch_optim.state_dict()


def name_model(model: nn.Module, optimizer: Optimizer) -> nn.Module:
    "Give a model what Noether's models have."
    model.name, model.optimizer = type(model).__name__, optimizer  # type: ignore[assignment]
    model.device = torch.device('cpu')  # type: ignore[assignment]
    sizes = [(p.requires_grad, p.numel()) for p in model.parameters()]
    model.trainable_param_count = sum(n for grad, n in sizes if grad)  # type: ignore[assignment]
    model.frozen_param_count = sum(n for grad, n in sizes if not grad)  # type: ignore[assignment]
    model.get_named_models = lambda: {model.name: model}  # type: ignore[assignment]
    return model


class Trainer:
    "The loop: hooks, accumulation, intervals, early stops and evaluation runs as documented."

    device = torch.device('cpu')
    autocast_context = nullcontext()

    def __init__(
        self,
        model: nn.Module,
        loaders: dict[str, Any],  # 'train' and data sets to pass
        loss_func: Callable[[Any, Tensor], Any],
        opt: torch.optim.Optimizer,
        folder: Path,
        epochs: int,
        microbatch: int | None = None,
        # factor of learning rate and weight decay, by the share of updates done
        schedule: Callable[[float], float] | None = None,
    ) -> None:
        self.loaders, self.loss_func, self.opt = loaders, loss_func, opt
        self.epochs, self.schedule = epochs, schedule
        [group] = opt.param_groups
        self.scheduled = {name: group[name] for name in ('lr', 'weight_decay')}
        self.model = name_model(model, Optimizer(opt, schedule))
        train = loaders['train']
        n, size = len(train), train.batch_size
        self.microbatch = microbatch or size
        self.total_training_updates = epochs * n
        self.end_checkpoint = Iteration(epochs, epochs * n, epochs * n * size)
        self.counter = Counter(n, size, self.end_checkpoint)
        self.config = SimpleNamespace(skip_nan_loss=False)
        self.writer, self.tracker = Writer(self.counter, folder), Tracker()
        self.container = SimpleNamespace(
            datasets={key: dl.dataset for key, dl in loaders.items()},
            get_dataset=lambda key, **_: loaders[key].dataset,
        )
        self.services = {
            'trainer': self,
            'model': self.model,
            'data_container': self.container,
            'tracker': self.tracker,
            'log_writer': self.writer,
            'checkpoint_writer': CheckpointWriter(folder),
            'metric_property_provider': Properties(),
        }
        self.callbacks: list[Any] = []

    def add(self, cls: type, config: Any) -> Any:
        cb = cls(**({} if config is None else {'callback_config': config}), **self.services)
        if hasattr(cb, 'process_data'):
            cb.periodic_callback = partial(self._pass, cb)
        self.callbacks.append(cb)
        return cb

    def _pass(self, cb: Any, *, interval_type: str, update_counter: Counter, **_: Any) -> None:
        results = [
            cb.process_data(batch, trainer_model=self.model)
            for batch in self.loaders[cb.dataset_key]
        ]
        cb.process_results(
            join(results), interval_type=interval_type, update_counter=update_counter
        )

    def train_step(self, batch: dict[str, Tensor], model: nn.Module) -> Any:
        outputs = model(batch['x'])
        losses = self.loss_func(outputs, batch['target'])
        losses = losses if isinstance(losses, dict) else {'loss': losses}
        return SimpleNamespace(
            total_loss=sum(losses.values()), losses_to_log=losses, additional_outputs=outputs
        )

    def train(self) -> None:
        with torch.no_grad():
            self.model.eval()
            for cb in self.callbacks:
                cb.before_training(update_counter=self.counter)
        for _ in range(self.epochs):
            if self._train_epoch():
                break
        with torch.no_grad():
            self.model.eval()
            for cb in self.callbacks:
                cb.after_training(update_counter=self.counter)
        self.writer.finish()

    def evaluate(self) -> None:
        "Run the periodic callbacks once, without training."
        with torch.no_grad():
            self.model.eval()
            for cb in self._periodic():
                cb.at_eval(self.counter)
        self.writer.flush()

    def _train_epoch(self) -> bool:
        now = self.counter.cur_iteration
        began = perf_counter()
        for batch in self.loaders['train']:
            times = {'data_wait': perf_counter() - began}
            if self.schedule is not None:
                share = now.update / self.total_training_updates
                values = {name: v * self.schedule(share) for name, v in self.scheduled.items()}
                self.opt.param_groups[0].update(values)
            self._train_batch(batch, times)
            now.sample += self.counter.effective_batch_size
            now.update += 1
            now.epoch += self.counter.is_full_epoch
            with torch.no_grad():
                self.model.eval()
                for cb in self._periodic():
                    cb.track_after_update_step(update_counter=self.counter, times=times)
                if self._run('after_update'):
                    return True
                if not self.counter.is_full_epoch:
                    self.writer.flush()
            began = perf_counter()
        with torch.no_grad():
            stopped = self._run('after_epoch')
        self.writer.flush()
        return stopped

    def _train_batch(self, batch: dict[str, Tensor], times: dict[str, float]) -> None:
        self.model.train()
        began = perf_counter()
        n = len(batch['x']) // self.microbatch
        for step in range(n):
            rows = slice(step * self.microbatch, (step + 1) * self.microbatch)
            part = {name: t[rows] for name, t in batch.items()}
            result = self.train_step(part, self.model)
            (result.total_loss / n).backward()
            losses = {'total': result.total_loss, **result.losses_to_log}
            with torch.no_grad():
                for cb in self._periodic():
                    cb.track_after_accumulation_step(
                        update_counter=self.counter,
                        batch=part,
                        losses={name: loss.detach() for name, loss in losses.items()},
                        update_outputs=result.additional_outputs,
                        accumulation_steps=n,
                        accumulation_step=step,
                    )
        times['forward'] = perf_counter() - began
        self.opt.step()
        self.opt.zero_grad()
        times['update'] = times['backward'] = perf_counter() - began

    def _periodic(self) -> Iterator[Any]:
        return (cb for cb in self.callbacks if hasattr(cb, 'after_update'))

    def _run(self, hook: str) -> bool:
        "Run a hook of all callbacks; return True if one of them ends the training."
        stopped = False
        for cb in self._periodic():
            try:
                getattr(cb, hook)(update_counter=self.counter)
            except EarlyStopIteration:
                stopped = True
        if stopped:
            tag = f'{self.counter.cur_iteration}.early_exit'
            self.services['checkpoint_writer'].save(self.model, tag, trainer=self)
        return stopped


def join(results: list[Any]) -> Any:
    "Join the results of batches: tensors along the first dimension, numbers stacked."
    first = results[0]
    if isinstance(first, tuple):
        return tuple(join(list(part)) for part in zip(*results, strict=True))
    if isinstance(first, dict):
        return {name: join([result[name] for result in results]) for name in first}
    return torch.stack(results) if first.ndim == 0 else torch.cat(results)
