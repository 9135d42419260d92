# SPDX-License-Identifier: Apache-2.0
"""Callback that logs inputs and outputs of a model as images."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from learnkit.core.batch import describe, tensors_in
from learnkit.core.errors import BatchError, OptionError
from learnkit.core.time import Time, as_time
from learnkit.core.validation import check_count
from learnkit.data.show import as_pictures, class_colors
from learnkit.engine.callback import Periodic
from learnkit.engine.traits import trait_of

__all__ = ['ImageVisualizer', 'as_pictures', 'class_colors']

MODES = ('input', 'segment')


class ImageVisualizer(Periodic):
    """Send images of inputs and predictions to the loggers at an interval.

    Shown are the first training batch, the first training batch after each interval, and the first
    batch of every loader in each evaluation, as the model gets them. Mode 'input' shows the inputs;
    'segment' also the predicted and the true classes of the pixels, one color per class. The names
    are `images/train/input`, `images/night/prediction`, `images/night/target`.

    Each callback of the Learner with a method `log_images(step, name, images)` gets the images:
    learnkit's loggers in their format, others as tensors (n, C, H, W) in [0, 1]; the step is
    `learn.time.ba`. The last images are kept in `images`, by name. Floats
    outside [0, 1] (of normalized data) are rescaled to that range, bytes are divided by 255. If the
    number of channels is not 1, 3 or 4, the mean over channels is shown.

    Raises `OptionError` and `TimeError` for invalid options, and `BatchError` at the first batch for
    data without images. Checkpointed: the number of intervals passed, not `images`.

    >>> ImageVisualizer(every='1ep', mode='segment').every
    Time('1ep')
    """

    order = 100
    run_valid = True
    remove_on_find = True
    remove_on_fetch = True

    def __init__(
        self,
        every: str | int | Time = '100ba',  # interval of training images; an int counts batches
        n: int = 8,  # number of images of a batch
        mode: str = 'input',  # 'input' or 'segment'
    ) -> None:
        super().__init__(as_time(every, 'ba'))
        if mode not in MODES:
            raise OptionError(f'mode={mode!r}: pass one of {MODES}.')
        self.n = check_count('n', n)
        self.mode = mode
        self.images: dict[str, Tensor] = {}  # last images by name
        self._wanted = True  # whether to show the next training batch

    @override
    def on_every(self) -> None:
        "Show the next training batch."
        self._wanted = True

    def after_batch(self) -> None:
        "Show the batch."
        if not self._is_due():
            return
        if self.learn.training:
            self._wanted = False
        if self.mode == 'input':
            self._send('input', as_pictures(self._find_input()[: self.n]))
        elif 'pred' in self.learn.__dict__:
            self._send_output()

    def _is_due(self) -> bool:
        learn = self.learn
        if learn.training:
            return self._wanted
        return bool(learn.fitting and learn.phase == 'valid' and learn.iter == 0)

    def _find_input(self) -> Tensor:
        "Return the first input that has the shape of images."
        found = tensors_in(self.learn.xb)
        images = next((t for t in found if t.ndim == 4 or (t.ndim == 3 and t.shape[-2] > 1)), None)
        if images is not None:
            return images
        raise BatchError(
            f'ImageVisualizer: there are no images (N, C, H, W) in the inputs {describe(self.learn.xb)}.'
        )

    def _send_output(self) -> None:
        pred = self.learn.pred
        targ = self.learn.yb[0] if self.learn.yb else None
        if not isinstance(pred, Tensor) or pred.ndim != 4:
            raise BatchError(
                f'ImageVisualizer: the predictions are {describe(pred)}, not (N, C, H, W).'
            )
        # with microbatches the prediction has the last samples only
        rows = slice(-len(pred), None)
        self._send('input', as_pictures(self._find_input()[rows][: self.n]))
        self._send('prediction', class_colors(_predict_classes(pred[: self.n])))
        if isinstance(targ, Tensor):
            self._send('target', class_colors(_squeeze_target(targ[rows][: self.n], pred)))

    def _send(self, kind: str, pictures: Tensor) -> None:
        "Keep images, and pass them to all loggers of images."
        learn = self.learn
        name = f'images/{"train" if learn.training else learn.dl_name}/{kind}'
        self.images[name] = pictures
        for cb in learn.cbs:
            receive = trait_of(cb, 'receive_images')
            log = trait_of(cb, 'log_images')  # of a callback without the other method
            if receive is not None:
                receive(name, pictures)
            elif log is not None:
                log(learn.time.ba, name, pictures)

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the number of intervals passed, and whether to show the next batch."
        return {**super().state_dict(), 'wanted': self._wanted}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the state of `state_dict`."
        super().load_state_dict(sd)
        self._wanted = sd['wanted']


def _predict_classes(pred: Tensor) -> Tensor:
    "Return the class of each pixel from scores (n, K, H, W); a single score is the score of class 1."
    return (pred[:, 0] > 0).long() if pred.shape[1] == 1 else pred.argmax(1)


def _squeeze_target(targ: Tensor, pred: Tensor) -> Tensor:
    "Return true classes (n, H, W), given with or without a channel, or one-hot."
    if targ.ndim == 4:
        targ = targ.argmax(1) if targ.shape[1] == pred.shape[1] > 1 else targ[:, 0]
    return targ.round() if targ.is_floating_point() else targ
