"""Pictures of what goes into a model and what comes out, for the loggers and for looking at."""

from __future__ import annotations

from colorsys import hsv_to_rgb
from typing import Any

import torch
from torch import Tensor

from learnkit.core.batch import describe, map_tensors
from learnkit.core.errors import BatchError, OptionError, TimeError, did_you_mean
from learnkit.core.plotting import new_axes
from learnkit.core.time import Time, as_time
from learnkit.data.show import as_pictures
from learnkit.engine.callback import Periodic, defined_on_class

__all__ = ['ImageVisualizer', 'as_pictures', 'class_colors']

MODES = ('input', 'output', 'segment')


class ImageVisualizer(Periodic):
    """Show what the model gets and gives: send images to the loggers, every so often.

    The images are those of the first training batch and of the first one after each interval, and of the first batch
    of every loader in each evaluation, as the model gets them. Mode 'input' shows the inputs; 'output' the predictions
    too, where they are images (of an autoencoder); 'segment' the predicted classes of the pixels and the true ones,
    each class in its color. Their names are `images/train/input`, `images/valid/output`, `images/night/prediction`,
    `images/night/target`.

    Each callback of the Learner that has a method `log_images(step, name, images)` gets them, learnkit's loggers as
    they want them, others as tensors (n, C, H, W) within 0 and 1; the step is `learn.time.ba`. The last ones are kept
    in `images`, by name, and `show()` draws them. Floats beyond 0 and 1 (of normalized data) are stretched to that
    range, bytes divided by 255; of other numbers of channels than 1, 3 and 4 the mean is shown.

    Raises `OptionError` and `TimeError` for bad options, and `BatchError` at the first batch, before its step, for
    data that are no images. Checkpointed: when it was last due; not `images`.

    >>> ImageVisualizer(every='1ep', mode='segment').every
    Time('1ep')
    """

    order, run_valid, remove_on_find, remove_on_fetch = 100, True, True, True

    def __init__(
        self,
        every: str
        | int
        | Time = '100ba',  # the interval of training images; a plain number counts batches
        n: int = 8,  # how many images of a batch
        mode: str = 'input',  # 'input', 'output' or 'segment'
    ) -> None:
        super().__init__(as_time(every, 'ba'))
        if self.every.unit == 'iter':
            raise TimeError(f'every={str(every)!r}: give ba, st, sp, tok, sec, dur or ep.')
        if mode not in MODES:
            raise OptionError(
                f'mode={mode!r}: give one of {MODES}.{did_you_mean(str(mode), MODES)}'
            )
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise OptionError(f'n={n!r}: give 1 or more.')
        self.n, self.mode = n, mode
        self.images: dict[str, Tensor] = {}  # the last ones, by name
        self._wanted = True  # the next training batch is to be shown

    def on_every(self) -> None:
        "Show the next training batch."
        self._wanted = True

    def before_batch(self) -> None:
        "See that there are images, before the batch is learned from."
        if self._is_due():
            self._input()

    def after_batch(self) -> None:
        "Show the batch."
        if not self._is_due():
            return
        if self.learn.training:
            self._wanted = False
        if self.mode == 'input':
            self._send('input', as_pictures(self._input()[: self.n]))
        elif 'pred' in self.learn.__dict__:
            self._send_output()

    def _is_due(self) -> bool:
        learn = self.learn
        if learn.training:
            return self._wanted
        return bool(learn.fitting and learn.phase == 'valid' and learn.iter == 0)

    def _input(self) -> Tensor:
        "Return the first input that is images."
        found: list[Tensor] = []

        def look(t: Tensor) -> Tensor:
            found.append(t)
            return t

        map_tensors(self.learn.xb, look)
        images = next((t for t in found if t.ndim == 4 or (t.ndim == 3 and t.shape[-2] > 1)), None)
        if images is not None:
            return images
        raise BatchError(
            f'ImageVisualizer: there are no images (N, C, H, W) in the inputs {describe(self.learn.xb)}.'
        )

    def _send_output(self) -> None:
        pred, targ = self.learn.pred, self.learn.yb[0] if self.learn.yb else None
        if not isinstance(pred, Tensor) or pred.ndim != 4:
            raise BatchError(
                f'ImageVisualizer(mode={self.mode!r}): the predictions are {describe(pred)}, not '
                '(N, C, H, W).'
            )
        rows = slice(
            -len(pred), None
        )  # of a batch that came in pieces, predictions are the last one's
        self._send('input', as_pictures(self._input()[rows][: self.n]))
        if self.mode == 'output':
            return self._send('output', as_pictures(pred[: self.n]))
        self._send('prediction', class_colors(_classes(pred[: self.n])))
        if isinstance(targ, Tensor):
            self._send('target', class_colors(_target(targ[rows][: self.n], pred)))

    def _send(self, kind: str, pictures: Tensor) -> None:
        "Keep pictures, and hand them to whoever logs images."
        learn = self.learn
        name = f'images/{"train" if learn.training else learn.dl_name}/{kind}'
        self.images[name] = pictures
        for cb in learn.cbs:
            if hasattr(cb, 'send_images'):  # a `Logger`
                cb.send_images(name, pictures)
            elif defined_on_class(cb, 'log_images'):
                cb.log_images(learn.time.ba, name, pictures)

    def show(
        self,
        figsize: tuple[float, float] | None = None,  # inches
    ) -> Any:
        "Draw the last images, a row for each name, and return the axes."
        if not self.images:
            raise OptionError('There are no images yet: they come with the first batch of a fit.')
        n = max(map(len, self.images.values()))
        size = figsize or (1.3 * n + 0.2, 1.6 * len(self.images))
        axs = new_axes(n * len(self.images), n, size)
        for ax in axs:
            ax.axis('off')
        for i, (name, pictures) in enumerate(self.images.items()):
            row = axs[i * n : (i + 1) * n]
            row[0].set_title(name, loc='left', fontsize=9)
            for ax, picture in zip(row, pictures.permute(0, 2, 3, 1), strict=False):
                ax.imshow(picture.expand(*picture.shape[:2], max(picture.shape[2], 3)).numpy())
        return axs

    def state_dict(self) -> dict[str, Any]:
        "Return when it was last due, and whether a batch is to be shown."
        return {**super().state_dict(), 'wanted': self._wanted}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on from there."
        super().load_state_dict(sd)
        self._wanted = sd['wanted']


def class_colors(
    classes: Tensor,  # (n, H, W), class numbers; those below 0 are ignored ones
) -> Tensor:  # (n, 3, H, W) on the CPU, within 0 and 1
    """Return a picture of class numbers: 0 is black, what is ignored grey, the others have a color each.

    >>> class_colors(torch.tensor([[[0, 1, -100]]]))[0, :, 0].T
    tensor([[0.0000, 0.0000, 0.0000],
            [0.2375, 0.4454, 0.9500],
            [0.5000, 0.5000, 0.5000]])
    """
    classes = classes.detach().cpu().long()
    n = max(int(classes.max()), 0) + 1 if classes.numel() else 1
    # hues by the golden ratio lie far apart however many there are
    colors = [
        (0.0, 0.0, 0.0),
        *(hsv_to_rgb(k * 0.618034 % 1, 0.75, 0.95) for k in range(1, n)),
        (0.5, 0.5, 0.5),
    ]
    return torch.tensor(colors)[classes.where(classes >= 0, n)].permute(0, 3, 1, 2)


def _classes(pred: Tensor) -> Tensor:
    "Return the class of each pixel by scores (n, K, H, W); a single score is that of class 1."
    return (pred[:, 0] > 0).long() if pred.shape[1] == 1 else pred.argmax(1)


def _target(targ: Tensor, pred: Tensor) -> Tensor:
    "Return true classes (n, H, W), given as such, with a channel, or one-hot."
    if targ.ndim == 4:
        targ = targ.argmax(1) if targ.shape[1] == pred.shape[1] > 1 else targ[:, 0]
    if targ.ndim == 3:
        return targ.round() if targ.is_floating_point() else targ
    raise BatchError(
        f'ImageVisualizer(mode="segment"): the target is {describe(targ)}, not (N, H, W) of classes.'
    )
