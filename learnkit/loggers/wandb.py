"""Log to Weights & Biases with its client."""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path
from typing import Any

from typing_extensions import override

from learnkit.core.errors import OptionError
from learnkit.core.files import as_local_path
from learnkit.core.optional import check_libraries
from learnkit.core.time import Time
from learnkit.loggers.base import Rows, RunLogger, open_loggers

_STEP_FILE = 'last_step'  # file next to the records of a run, with the last logged step


class WandbLogger(RunLogger):
    """Log to a run of Weights & Biases, by default offline: to `<folder>/wandb`, for `wandb sync`.

    `mode='online'` logs to the server. The default of `mode` is the environment variable
    `WANDB_MODE`, otherwise 'offline'.

    All fits of a Learner, and a process that resumes it, log to one run (with the same id). W&B
    accepts each step once: after a resume from an earlier checkpoint, steps that the run already
    has are kept and not logged again. `close` ends the run, with the status failed if the last fit
    failed. Raises `MissingExtraError` without wandb.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=WandbLogger(mode='disabled'))
    ...     with learn.no_bar(), learn: learn.fit(1)
    ...     len(learn.history)
    1
    """

    def __init__(
        self,
        project: str = 'learnkit',  # name of the project
        mode: str | None = None,  # 'offline', 'online', 'shared', 'disabled'; None: see above
        folder: str | Path = '.',  # parent of `wandb/`, relative to `learn.path` or absolute
        id: str | None = None,  # id of a run to continue; None: a new run
        every: str | Time = '10ba',  # interval of losses and hyperparameters, as in `Logger`
        **options: Any,  # additional options of `wandb.init`: `name`, `tags`, `group`, `entity`, ...
    ) -> None:
        check_libraries('WandbLogger', 'wandb')
        super().__init__(every)
        source = 'mode' if mode is not None else 'WANDB_MODE'
        mode = mode if mode is not None else os.environ.get('WANDB_MODE', '') or 'offline'
        mode = {'run': 'online', 'dryrun': 'offline'}.get(mode, mode)  # older names of wandb
        if mode not in ('offline', 'online', 'disabled', 'shared'):
            raise OptionError(
                f"{source}={mode!r}: choose 'offline', 'online', 'shared' or 'disabled'."
            )
        self.project = project
        self.mode = mode
        self.folder = as_local_path(folder)
        self.options = options
        self._id = id  # id of the run
        self._last_step = -1  # last step that the run has

    @override
    def where(self) -> Path:
        "Return the folder of all runs."
        return Path(os.path.realpath(self.learn.path / self.folder)) / 'wandb'

    @override
    def open(self, keep: int | None) -> tuple[Any, int]:
        import wandb

        folder = self.where().parent
        folder.mkdir(parents=True, exist_ok=True)
        # a run has one writer at a time; the logger of another Learner reopens it when needed
        for cb in list(open_loggers):
            if isinstance(cb, WandbLogger) and self._id and cb._id == self._id:
                cb.close()
        # off, because console capture would record the progress bars
        quiet = wandb.Settings(console='off', silent=self.mode != 'online')
        given = {'settings': quiet, 'reinit': 'create_new', **self.options}
        mode: Any = self.mode
        run = wandb.init(
            project=self.project,
            mode=mode,
            dir=str(folder),
            id=self._id,
            resume='allow' if self._id else None,
            **given,
        )
        self._last_step = max([run.starting_step - 1, *_written_steps(folder, run.id)])
        self._id = run.id
        return run, self._last_step

    @override
    def write(self, rows: Rows) -> None:
        super().write(rows)
        folder = Path(self._handle.dir).parent
        if folder.is_dir():
            (folder / _STEP_FILE).write_text(str(rows[-1][0]))

    @override
    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        if step > self._last_step:
            self._handle.log(values, step=step)

    @override
    def log_params(self, params: dict[str, Any]) -> None:
        self._handle.config.update(params, allow_val_change=True)

    @override
    def log_images(self, step: int, name: str, images: Any) -> None:
        import wandb

        pixels = images[..., 0] if images.shape[-1] == 1 else images
        if step > self._last_step:
            self._handle.log({name: [wandb.Image(image) for image in pixels]}, step=step)

    @override
    def log_text(self, step: int, name: str, text: str) -> None:
        import wandb

        if step > self._last_step:
            self._handle.log({name: wandb.Html(f'<pre>{escape(text)}</pre>')}, step=step)

    @override
    def shut(self, handle: Any) -> None:
        handle.finish(exit_code=int(self._has_failed))


def _written_steps(folder: Path, run_id: str) -> list[int]:
    "Return the last step of each part of a run in a folder; every process writes one part."
    # the folder of a part ends in a number if two parts began in the same second
    name = re.compile(rf'.*run-.*-{re.escape(run_id)}(-\d+)?')
    files = [p for p in folder.glob(f'wandb/*/{_STEP_FILE}') if name.fullmatch(p.parent.name)]
    contents = [p.read_text() for p in files]
    return [int(text) for text in contents if text.isdigit()]
