"""Callbacks that log training speed, device utilization and remaining time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from numbers import Real
from time import perf_counter
from typing import Any

import torch
from torch import nn

from learnkit.callbacks.mixed_precision import MixedPrecision
from learnkit.core.errors import ModelError, OptionError, did_you_mean
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import bare_model, model_device
from learnkit.core.time import Time
from learnkit.core.validation import check_count, check_number
from learnkit.monitors.monitor import Monitor

__all__ = ['SpeedMonitor', 'RuntimeEstimator', 'PEAK_FLOPS']

# Dense floating-point operations per second of one device, from the vendors' data sheets. The first
# name contained in the name of a device counts.
PEAK_FLOPS: dict[str, dict[str, float]] = {
    'b200': {'fp32': 75e12, 'tf32': 1.1e15, 'fp16': 2.25e15, 'bf16': 2.25e15},
    'h200': {'fp32': 67e12, 'tf32': 495e12, 'fp16': 989e12, 'bf16': 989e12},
    'h100 pcie': {'fp32': 51e12, 'tf32': 378e12, 'fp16': 756e12, 'bf16': 756e12},
    'h100 nvl': {'fp32': 60e12, 'tf32': 417e12, 'fp16': 835e12, 'bf16': 835e12},
    'h100': {'fp32': 67e12, 'tf32': 495e12, 'fp16': 989e12, 'bf16': 989e12},
    'a100': {'fp32': 19.5e12, 'tf32': 156e12, 'fp16': 312e12, 'bf16': 312e12},
    'a10g': {'fp32': 31.5e12, 'tf32': 35e12, 'fp16': 70e12, 'bf16': 70e12},
    'a10': {'fp32': 31.2e12, 'tf32': 62.5e12, 'fp16': 125e12, 'bf16': 125e12},
    'l40s': {'fp32': 91.6e12, 'tf32': 183e12, 'fp16': 362e12, 'bf16': 362e12},
    'l4': {'fp32': 30.3e12, 'tf32': 60e12, 'fp16': 121e12, 'bf16': 121e12},
    'v100': {'fp32': 15.7e12, 'fp16': 125e12},
    't4': {'fp32': 8.1e12, 'fp16': 65e12},
}

SECONDS_IN = {'seconds': 1, 'minutes': 60, 'hours': 3600, 'days': 86400}
COUNTED = ('batches', 'samples', 'tokens', 'flops')


class _TimedMonitor(Monitor):
    "Monitor that separates the seconds of training from the seconds of evaluation and prediction."

    machine_dependent = True
    nondeterministic_state: tuple[str, ...] = ('train_s', 'eval_s')
    # over all fits, up to `_last_read`
    _train_s = 0.0
    _eval_s = 0.0
    _last_read: float | None = None  # last reading of the clock; None: no fit is running
    _eval_depth: int | None = None  # depth of the run that evaluates; None: training

    def _read_clock(self) -> float:
        "Read the clock, and return the seconds of training so far."
        if self._last_read is not None:
            before = self._last_read
            self._last_read = perf_counter()
            if self._eval_depth is None:
                self._train_s += self._last_read - before
            else:
                self._eval_s += self._last_read - before
        return self._train_s

    def before_fit(self) -> None:
        "Start the clock."
        super().before_fit()
        if self.learn.fitting:
            self._last_read = perf_counter()
            self._eval_depth = None

    def before_eval(self) -> None:
        "Count evaluation from now on."
        if self._last_read is None or self._eval_depth is not None:
            return  # no fit, or a nested evaluation
        self._read_clock()
        self._eval_depth = self.learn.run.depth

    def after_eval(self) -> None:
        "Count training from now on."
        if self._eval_depth == self.learn.run.depth:
            self._count_training()

    before_predict = before_eval
    after_predict = after_eval

    def before_train(self) -> None:
        "Count training after an evaluation that a Cancel exception ended."
        if self._eval_depth is not None:
            self._count_training()

    def _count_training(self) -> None:
        self._read_clock()
        self._eval_depth = None

    def after_fit(self) -> None:
        "Stop the clock."
        if self.learn.fitting:
            self._stop_clock()

    def on_run_failed(self) -> None:
        "Count training after an evaluation that failed, if the fit continues."
        if self._eval_depth is not None and self._eval_depth >= self.learn.run.depth:
            self._count_training()

    def cleanup(self) -> None:
        "Stop the clock."
        self._stop_clock()

    def _stop_clock(self) -> None:
        self._read_clock()
        self._last_read = None
        self._eval_depth = None

    def state_dict(self) -> dict[str, Any]:
        "Return the seconds of training and evaluation so far."
        self._read_clock()
        return {**super().state_dict(), 'train_s': self._train_s, 'eval_s': self._eval_s}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the seconds so far."
        super().load_state_dict(sd)
        self._read_clock()  # seconds since the last reading belong to another run
        self._train_s = sd['train_s']
        self._eval_s = sd['eval_s']


class SpeedMonitor(_TimedMonitor):
    """Log throughput (batches, samples, tokens, flops per second) and hours of training and evaluation.

    Rates are computed over the last `window` batches of this fit (or fewer at its start), without
    the time of evaluation and prediction, and without the first batch, which warms up. After a
    resume, batches of this process count. Tokens are logged if the Learner counts them. Times are
    read from the host's clock, without waiting for the device.

    Flops come from the model: an attribute `flops_per_batch`, a number or a function of the batch
    (as the loader gave it) that returns a number, for forward and backward together. The ratio of
    these flops to the device's peak, `mfu` (model flops utilization; Chowdhery et al., 2022,
    appendix B), needs `peak_flops`, or a known GPU in the precision in use; otherwise it is left
    out.

    Raises `OptionError` for an invalid option, and `ModelError` if `flops_per_batch` is or returns
    another type. Checkpointed: the seconds of training and evaluation, and the counts at the last
    batch.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=SpeedMonitor(every='5ba'))
    >>> with learn.no_bar(): learn.fit(1)
    >>> row = learn.history[0]
    >>> round(row['throughput/samples_per_sec'] / row['throughput/batches_per_sec'])
    16
    """

    metric_names = {
        **{f'throughput/{what}_per_sec': f'{what} a second, of all devices' for what in COUNTED},
        **{
            f'throughput/device/{what}_per_sec': f'{what} a second, for each device'
            for what in COUNTED
        },
        'throughput/device/mfu': "the share of the device's peak flops that the model uses",
        'time/train': 'time spent in training, over all fits',
        'time/val': 'time spent in evaluation and prediction during fits',
        'time/total': 'the sum of both',
    }
    latest = ('time/',)
    nondeterministic_state = (*_TimedMonitor.nondeterministic_state, 'point.0')
    _flops_per_batch: Any = None
    _resumed = False  # whether the first point is from the checkpoint
    _peak: float | None = None

    def __init__(
        self,
        window: int = 100,  # number of batches that rates are computed over
        every: int | str | Time = '10ba',  # interval of logging
        peak_flops: float | None = None,  # peak per second of one device; None: of a known GPU
        time_unit: str = 'hours',  # unit of `time/...`: seconds, minutes, hours or days
    ) -> None:
        super().__init__(every)
        self.window = check_count('window', window)
        self.time_unit = time_unit
        self._unit_s = get_seconds(time_unit)
        if peak_flops is not None:
            check_number('peak_flops', peak_flops)
        self.peak_flops = peak_flops
        self._flops = 0.0
        # seconds, and the counts of `COUNTED`
        self._points: deque[tuple[float, ...]] = deque(maxlen=window + 1)

    def before_fit(self) -> None:
        "Reset the rates, and read the model's flops."
        super().before_fit()
        if not self.learn.fitting:
            return
        self._points.clear()
        self._resumed = False
        self._flops = 0.0
        self._flops_per_batch = getattr(bare_model(self.learn.model), 'flops_per_batch', None)
        if self._flops_per_batch is None:
            return
        if not callable(self._flops_per_batch):
            _check_flops(self.learn.model, self._flops_per_batch)
        self._peak = self.peak_flops or find_peak(self.learn)

    def after_batch(self) -> None:
        "Record time and counts of this batch, and log if due."
        learn = self.learn
        done = self.learn.counters
        flops = self._flops_per_batch
        if callable(flops):
            flops = _check_flops(learn.model, flops(learn.batch))
        if flops is not None:
            self._flops += flops
        self._points.append(
            (self._read_clock(), done.batches, done.samples, done.tokens, self._flops)
        )
        # after a resume the batch between the first two points warmed up
        if self._resumed and len(self._points) == 3:
            self._points.popleft()
            self._resumed = False
        super().after_batch()

    def measure(self) -> dict[str, float]:
        "Return rates and times."
        train_s = self._read_clock()
        eval_s = self._eval_s
        seconds = {'train': train_s, 'val': eval_s, 'total': train_s + eval_s}
        times = {f'time/{name}': s / self._unit_s for name, s in seconds.items()}
        return self._compute_rates() | times

    def _compute_rates(self) -> dict[str, float]:
        "Return the rates over the window, by name."
        if len(self._points) < 2:
            return {}
        seconds, *counts = (
            last - first for first, last in zip(self._points[0], self._points[-1], strict=True)
        )
        if seconds <= 0:
            return {}
        n = self.learn.world.size
        rates = dict[str, float]()
        for what, count in zip(COUNTED, counts, strict=True):
            if not count:
                continue
            rate = count / seconds
            if what == 'flops':
                rate *= n  # flops are counted for this device's batches only
            rates[f'throughput/{what}_per_sec'] = rate
            rates[f'throughput/device/{what}_per_sec'] = rate / n
        if counts[-1] and self._peak:
            rates['throughput/device/mfu'] = counts[-1] / seconds / self._peak
        return rates

    def state_dict(self) -> dict[str, Any]:
        "Return the seconds so far, and time and counts at the last batch."
        return {**super().state_dict(), 'point': list(self._points[-1]) if self._points else None}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the counts at the last batch; rates count batches of this process only."
        super().load_state_dict(sd)
        self._points.clear()
        if sd['point'] is None:
            return
        self._points.append(tuple(sd['point']))
        self._flops = sd['point'][-1]
        self._resumed = True

    def cleanup(self) -> None:
        "Stop the clock, and drop the reference to the model."
        super().cleanup()
        self._flops_per_batch = None


def get_seconds(time_unit: str) -> int:
    "Return the seconds in a unit of time; raise `OptionError` for an unknown unit."
    if isinstance(time_unit, str) and time_unit in SECONDS_IN:
        return SECONDS_IN[time_unit]
    raise OptionError(
        f'time_unit={time_unit!r}: give one of {", ".join(SECONDS_IN)}.'
        f'{did_you_mean(str(time_unit), SECONDS_IN)}'
    )


def _check_flops(model: nn.Module, flops: Any) -> float:
    if isinstance(flops, Real) and 0 <= float(flops) < math.inf:
        return float(flops)
    raise ModelError(
        f'{type(bare_model(model)).__name__}.flops_per_batch: {flops!r} is not a number of operations. '
        'Let it be a number, or a function of the batch that returns one.'
    )


def find_peak(learn: LearnerLike) -> float | None:
    "Return the peak flops of the model's device in its precision, None if unknown."
    device = model_device(learn.model, learn.dls)
    if device.type != 'cuda':
        return None
    return lookup_peak(torch.cuda.get_device_name(device), find_precision(learn))


def lookup_peak(device_name: str, kind: str) -> float | None:
    """Return the peak of a GPU in floating-point operations per second, by its name in the driver.

    >>> lookup_peak('NVIDIA A100-SXM4-80GB', 'bf16')
    312000000000000.0
    """
    words = f' {device_name.lower().replace("-", " ")} '
    return next(
        (peaks.get(kind) for name, peaks in PEAK_FLOPS.items() if f' {name} ' in words), None
    )


def find_precision(learn: LearnerLike) -> str:
    "Return the precision of most matrix products of a model: fp16, bf16, tf32, fp32 or fp64."
    for cb in learn.cbs:
        if isinstance(cb, MixedPrecision):
            return str(cb.amp_mode)
    dtype = next(
        (p.dtype for p in learn.model.parameters() if p.is_floating_point()), torch.float32
    )
    if dtype == torch.float32:
        return 'fp32' if torch.get_float32_matmul_precision() == 'highest' else 'tf32'
    names = {torch.float16: 'fp16', torch.bfloat16: 'bf16', torch.float64: 'fp64'}
    return names.get(dtype, str(dtype))


@dataclass
class _Evaluations:
    "Cost of the evaluations of one loader, and their positions as shares of the fit."

    n: int = 0
    first_s: float = 0.0  # seconds of the first evaluation, which warms up
    total_s: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0

    def add(self, seconds: float, at: float) -> None:
        if not self.n:
            self.first_s = seconds
            self.first_at = at
        self.n += 1
        self.total_s += seconds
        self.last_at = at

    def remaining_s(self, start: float) -> float:
        "Return the cost of future evaluations at the same interval as those since `start`."
        if self.n > 1:
            gap = (self.last_at - self.first_at) / (self.n - 1)
            cost = (self.total_s - self.first_s) / (self.n - 1)
        else:
            gap = self.first_at - start
            cost = self.first_s
        # rounded up, as the fit ends with an evaluation
        return cost * math.ceil((1 - self.last_at) / gap - 1e-6) if gap > 0 else 0.0


class RuntimeEstimator(_TimedMonitor):
    """Estimate the remaining time of the fit, including its future evaluations.

    Training is assumed to continue at the rate of this fit so far, without its first
    `skip_batches`. Each loader is assumed to be evaluated as often and as fast as so far: without
    its first evaluation once there are two; before its first evaluation its cost counts as 0. The
    progress of the fit is `learn.pct_train`, so budgets of any unit work; for an epoch of unknown
    length, batches are compared with the previous epoch. `remaining_s` is the estimate in seconds.

    Raises `OptionError` for an invalid option. Checkpointed: rates, costs and positions, so that
    the estimate is available right after a resume.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=RuntimeEstimator(every='5ba', time_unit='seconds'))
    >>> with learn.no_bar(): learn.fit(2)
    >>> learn.history[0]['time/remaining_estimate'] > 0, learn.runtime_estimator.remaining_s
    (True, 0.0)
    """

    metric_names = {
        'time/remaining_estimate': 'time until the end of the fit, evaluations included'
    }
    latest = ('time/',)
    nondeterministic_state = (
        *_TimedMonitor.nondeterministic_state,
        'seconds',
        'share',
        'evals.*.first_s',
        'evals.*.total_s',
    )
    _start: float | None = None  # share of the fit at its start
    _base: tuple[float, float] | None = None  # seconds of training, and share, at the first rate
    _earlier_totals = (0.0, 0.0)  # seconds and share measured before a resume
    _epoch_at = 0.0  # share at the start of this epoch
    _n_last: int | None = None  # number of batches of the last complete epoch
    _eval_started = 0.0  # time when the current evaluation started
    _position: float | None = None  # share at the last batch; None: unknown

    def __init__(
        self,
        skip_batches: int = 1,  # number of first batches to leave out, which warm up
        time_unit: str = 'hours',  # unit of the logged time: seconds, minutes, hours or days
        every: int | str | Time = '10ba',  # interval of logging
    ) -> None:
        super().__init__(every)
        self.skip_batches = self._skip = check_count('skip_batches', skip_batches)
        self.time_unit = time_unit
        self._unit_s = get_seconds(time_unit)
        self._evals: dict[str, _Evaluations] = {}

    @property
    def remaining_s(self) -> float | None:
        "Estimate in seconds; None if unknown."
        seconds, share = self._get_progress()
        if self._position is None or share <= 0 or seconds <= 0:
            return None  # no rate yet
        rest = 1 - self._position if self._position < 1 - 1e-9 else 0.0  # without rounding errors
        evaluations_s = sum(e.remaining_s(self._start or 0.0) for e in self._evals.values())
        return seconds / share * rest + evaluations_s

    def _get_progress(self) -> tuple[float, float]:
        "Return the seconds of training, and their share of the fit."
        seconds, share = self._earlier_totals
        if self._base is None or self._position is None:
            return seconds, share
        return seconds + self._read_clock() - self._base[0], share + self._position - self._base[1]

    def measure(self) -> dict[str, float]:
        "Return the estimate by name."
        seconds = self.remaining_s
        return {} if seconds is None else {'time/remaining_estimate': seconds / self._unit_s}

    def before_fit(self) -> None:
        "Reset the estimate."
        super().before_fit()
        if not self.learn.fitting:
            return
        self._base = None
        self._earlier_totals = (0.0, 0.0)
        self._skip = self.skip_batches
        self._evals = {}
        self._n_last = self._position = self._start = None

    def before_train(self) -> None:
        "Record the position of the epoch."
        super().before_train()
        self._epoch_at = self.learn.pct_train
        if self._start is None:
            self._start = self._epoch_at

    def after_batch(self) -> None:
        "Measure from the batch after the first batches, and log if due."
        if self._skip:
            self._skip -= 1
        self._update_position()
        super().after_batch()

    def _update_position(self) -> None:
        "Set the share of the fit that is done, and measure from here if the first batches are over."
        learn = self.learn
        if learn.n_iter or learn.pct_train != self._epoch_at:
            self._position = min(1.0, learn.pct_train)
        elif self._n_last is None or not learn.n_epoch:
            self._position = None
        else:
            share_of_epoch = min(1.0, (learn.iter + 1) / self._n_last)
            self._position = self._epoch_at + share_of_epoch / learn.n_epoch
        if self._base is None and not self._skip and self._position is not None:
            self._base = self._read_clock(), self._position

    def after_train(self) -> None:
        "Record the number of batches of an epoch."
        if not self.learn.n_iter:
            self._n_last = self.learn.iter + 1
            self._update_position()
        super().after_train()

    def before_validate(self) -> None:
        "Start the time of this loader."
        self._eval_started = perf_counter()

    def after_validate(self) -> None:
        "Record the time of this loader."
        if self._last_read is None or self._position is None or self.learn.phase == 'predict':
            return
        evaluations = self._evals.setdefault(self.learn.dl_name, _Evaluations())
        evaluations.add(perf_counter() - self._eval_started, self._position)

    def state_dict(self) -> dict[str, Any]:
        "Return rates, costs and positions of this fit."
        seconds, share = self._get_progress()
        return {
            **super().state_dict(),
            'seconds': seconds,
            'share': share,
            'start': self._start,
            'at': self._position,
            'n_last': self._n_last,
            'evals': {name: asdict(e) for name, e in self._evals.items()},
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore rates, costs and positions."
        super().load_state_dict(sd)
        self._earlier_totals = (sd['seconds'], sd['share'])
        self._base = None
        self._skip = self.skip_batches
        self._start = sd['start']
        self._position = sd['at']
        self._n_last = sd['n_last']
        self._evals = {name: _Evaluations(**e) for name, e in sd['evals'].items()}
