# SPDX-License-Identifier: Apache-2.0
"""Callbacks that log training speed, device utilization and remaining time."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from learnkit.callbacks.mixed_precision import MixedPrecision
from learnkit.core.model import bare_model, model_device
from learnkit.core.time import Time
from learnkit.core.validation import check_count
from learnkit.monitors.monitor import Monitor

if TYPE_CHECKING:
    from learnkit.learner import Learner

# Dense operations per second of one device in fp16 and bf16, from the vendors' data sheets. The
# first name contained in the name of a device counts.
PEAK_FLOPS = {
    'b200': 2.25e15,
    'h200': 989e12,
    'h100 pcie': 756e12,
    'h100 nvl': 835e12,
    'h100': 989e12,
    'a100': 312e12,
    'a10g': 70e12,
    'a10': 125e12,
    'l40s': 362e12,
    'l4': 121e12,
    'v100': 125e12,
    't4': 65e12,
}

SECONDS_IN = {'seconds': 1, 'minutes': 60, 'hours': 3600, 'days': 86400}
HALF = {torch.float16, torch.bfloat16}
COUNTED = ('batches', 'samples', 'tokens', 'flops')


class SpeedMonitor(Monitor):
    """Log throughput (batches, samples, tokens, flops per second) and hours of training and evaluation.

    Rates are computed over the last `window` batches of this fit (or fewer at its start), without
    the time of evaluation and prediction, and without the first batch, which warms up. After a
    resume, batches of this process count. Tokens are logged if the Learner counts them. Times are
    read from the host's clock, without waiting for the device.

    Flops come from the model: an attribute `flops_per_batch`, a number or a function of the batch
    (as the loader returned it) that returns a number, for forward and backward together. The ratio of
    these flops to the device's peak, `mfu` (model flops utilization; Chowdhery et al., 2022,
    appendix B), needs `peak_flops`, or a known GPU in fp16 or bf16; otherwise it is left out.

    Raises `OptionError` for an invalid window. Checkpointed: the seconds of evaluation.

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
    machine_dependent = True
    nondeterministic_state = ('eval_s',)
    # depth of the run that evaluates, and the Learner's seconds at its start
    _evaluation: tuple[int, float] | None = None
    _flops_per_batch: Any = None
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
        self._unit_s = SECONDS_IN[time_unit]
        self.peak_flops = peak_flops
        self._flops = 0.0
        self._eval_s = 0.0  # seconds of evaluation, over all fits
        # seconds of training, and the counts of `COUNTED`
        self._points: deque[tuple[float, ...]] = deque(maxlen=window + 1)

    @override
    def before_fit(self) -> None:
        "Reset the rates, and read the model's flops."
        super().before_fit()
        if not self.learn.fitting:
            return
        self._points.clear()
        self._flops = 0.0
        self._flops_per_batch = getattr(bare_model(self.learn.model), 'flops_per_batch', None)
        self._peak = self.peak_flops or find_peak(self.learn)

    def before_eval(self) -> None:
        "Count evaluation from now on, unless this evaluation is inside another one."
        if self._evaluation is None:  # outside of fits the Learner's clock is stopped
            self._evaluation = self.learn.run.depth, self.learn.parts.counters.elapsed()

    def after_eval(self) -> None:
        "Count training from now on."
        if self._evaluation is not None and self._evaluation[0] == self.learn.run.depth:
            self._end_evaluation()

    before_predict = before_eval
    after_predict = after_eval

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._eval_s += self.learn.parts.counters.elapsed() - self._evaluation[1]
        self._evaluation = None

    @override
    def after_batch(self) -> None:
        "Record time and counts of this batch, and log if due."
        learn = self.learn
        flops = self._flops_per_batch
        self._flops += (flops(learn.batch) if callable(flops) else flops) or 0.0
        done = learn.parts.counters
        counts = done.batches, done.samples, done.tokens, self._flops
        self._points.append((done.elapsed() - self._eval_s, *counts))
        super().after_batch()

    @override
    def measure(self) -> dict[str, float]:
        "Return rates and times."
        total = self.learn.parts.counters.elapsed()
        seconds = {'train': total - self._eval_s, 'val': self._eval_s, 'total': total}
        times = {f'time/{name}': s / self._unit_s for name, s in seconds.items()}
        return self._compute_rates() | times

    def _compute_rates(self) -> dict[str, float]:
        "Return the rates over the window, by name."
        if len(self._points) < 2:
            return {}
        first, last = self._points[0], self._points[-1]
        seconds, *counts = (b - a for a, b in zip(first, last, strict=True))
        if seconds <= 0:
            return {}
        world = self.learn.world
        rates = dict[str, float]()
        for what, count in zip(COUNTED, counts, strict=True):
            if not count:
                continue
            # flops are counted for this rank's batches only, which its copies share
            n_counted = world.copies if what == 'flops' else world.size
            rate = count / seconds / n_counted
            rates[f'throughput/{what}_per_sec'] = rate * world.size
            rates[f'throughput/device/{what}_per_sec'] = rate
        if counts[-1] and self._peak:
            rates['throughput/device/mfu'] = counts[-1] / seconds / world.copies / self._peak
        return rates

    def cleanup(self) -> None:
        "Drop the reference to the model."
        self._end_evaluation()
        self._flops_per_batch = None

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the seconds of evaluation so far; the Learner counts its seconds."
        return {**super().state_dict(), 'eval_s': self._eval_s}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the seconds so far."
        super().load_state_dict(sd)
        self._eval_s = sd['eval_s']


def find_peak(learn: Learner) -> float | None:
    "Return the peak flops of the model's device; None if unknown, and outside of half precision."
    device = model_device(learn.model, learn.dls)
    dtypes = {p.dtype for p in learn.model.parameters() if p.is_floating_point()}
    is_half = any(isinstance(cb, MixedPrecision) for cb in learn.cbs) or dtypes <= HALF
    if device.type != 'cuda' or not is_half:
        return None
    return lookup_peak(torch.cuda.get_device_name(device))


def lookup_peak(device_name: str) -> float | None:
    """Return the peak of a GPU in operations per second in half precision, by its name in the driver.

    >>> lookup_peak('NVIDIA A100-SXM4-80GB')
    312000000000000.0
    """
    words = f' {device_name.lower().replace("-", " ")} '
    return next((peak for name, peak in PEAK_FLOPS.items() if f' {name} ' in words), None)


class RuntimeEstimator(Monitor):
    """Estimate the remaining time of the fit: training and evaluations continue at the rate of this fit so far.

    The rate is measured without the first `skip_batches`; evaluations count from the first one on.
    The progress of the fit is `learn.pct_train`, so budgets of any unit work; with epochs of
    unknown length it grows once an epoch. `remaining_s` is the estimate in seconds.

    Raises `OptionError` for an invalid option. Checkpointed: the number of intervals passed; a
    resumed fit measures its rate again.

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
    machine_dependent = True

    def __init__(
        self,
        skip_batches: int = 1,  # number of first batches to leave out, which warm up
        time_unit: str = 'hours',  # unit of the logged time: seconds, minutes, hours or days
        every: int | str | Time = '10ba',  # interval of logging
    ) -> None:
        super().__init__(every)
        self.skip_batches = self._skip = check_count('skip_batches', skip_batches)
        self._unit_s = SECONDS_IN[time_unit]
        # time and share of the fit at the first and at the last measurement
        self._first: tuple[float, float] | None = None
        self._last: tuple[float, float] | None = None

    @property
    def remaining_s(self) -> float | None:
        "Estimate in seconds; None if unknown."
        if self._first is None or self._last is None or self._last[1] <= self._first[1]:
            return None  # no rate yet
        rest = 1 - self.learn.pct_train
        rate = (self._last[0] - self._first[0]) / (self._last[1] - self._first[1])
        return rate * rest if rest > 1e-9 else 0.0  # rounding errors

    @override
    def measure(self) -> dict[str, float]:
        "Return the estimate by name."
        seconds = self.remaining_s
        return {} if seconds is None else {'time/remaining_estimate': seconds / self._unit_s}

    @override
    def before_fit(self) -> None:
        "Reset the estimate."
        super().before_fit()
        if self.learn.fitting:
            self._first = self._last = None
            self._skip = self.skip_batches

    def before_train(self) -> None:
        "Measure up to the start of the epoch, where an epoch of unknown length is counted."
        self._update()

    @override
    def after_batch(self) -> None:
        "Measure from the batch after the first batches, and log if due."
        self._skip = max(self._skip - 1, 0)
        self._update()
        super().after_batch()

    def _update(self) -> None:
        "Measure if the share of the fit has grown."
        share = self.learn.pct_train
        if self._skip or (self._last is not None and share <= self._last[1]):
            return
        self._last = perf_counter(), share
        if self._first is None:
            self._first = self._last
