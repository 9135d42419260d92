# SPDX-License-Identifier: Apache-2.0
"""Log to TensorBoard with `torch.utils.tensorboard`."""

from __future__ import annotations

import json
import os
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from typing_extensions import override

from learnkit.core.files import as_local_path
from learnkit.core.optional import check_libraries
from learnkit.core.time import Time
from learnkit.engine.portable_paths import from_portable_path, to_portable_path
from learnkit.loggers.base import Logger


class TensorBoardLogger(Logger):
    """Log scalars, images and text to a folder for TensorBoard: `tensorboard --logdir runs`.

    Without `folder`, each run gets a new folder, `runs/<date and time>`, and a resumed process uses
    it again. The log continues an existing folder and its steps. After a resume from an earlier
    checkpoint, TensorBoard hides the numbers that were logged after that checkpoint (but not text).
    The configuration is the text `params`. Raises `MissingExtraError` without tensorboard.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=TensorBoardLogger('tb'))
    ...     with learn.no_bar(), learn: learn.fit(1)
    ...     len(os.listdir(f'{folder}/tb'))
    1
    """

    def __init__(
        self,
        folder: str | Path | None = None,  # relative to `learn.path` or absolute; None: new
        every: str | Time = '10ba',  # interval of losses and hyperparameters, as in `Logger`
    ) -> None:
        check_libraries('TensorBoardLogger', 'tensorboard')
        super().__init__(every)
        self.folder = None if folder is None else as_local_path(folder)
        self._run_folder = ''

    @override
    def where(self) -> Path:
        "Return the folder, or without `folder` the parent folder of all runs."
        return Path(os.path.realpath(self.learn.path / (self.folder or 'runs')))

    @override
    def open(self, keep: int | None) -> tuple[Any, int]:
        from torch.utils.tensorboard import SummaryWriter

        if not self._run_folder:
            name = datetime.now().isoformat('_', 'microseconds').replace(':', '-')
            self._run_folder = str(self.where() / (name if self.folder is None else ''))
        folder = Path(self._run_folder)
        found = _last_step(folder) if self._is_new_log and folder.exists() else -1
        return SummaryWriter(folder, purge_step=None if keep is None else keep + 1), found

    @override
    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._handle.add_scalar(name, value, step)

    @override
    def log_params(self, params: dict[str, Any]) -> None:
        lines = json.dumps(params, indent=1).split('\n')  # indented Markdown is shown unchanged
        text = '\n'.join(f'    {line}' for line in lines)
        self._handle.add_text('params', text, self._last_written + 1)

    @override
    def log_images(self, step: int, name: str, images: Any) -> None:
        for i, image in enumerate(images):
            tag = f'{name}/{i}' if len(images) > 1 else name
            self._handle.add_image(tag, image, step, dataformats='HWC')

    @override
    def log_text(self, step: int, name: str, text: str) -> None:
        self._handle.add_text(name, text, step)

    @override
    def flush(self) -> None:
        self._handle.flush()

    @override
    def shut(self, handle: Any) -> None:
        handle.close()

    @override
    def saved(self) -> dict[str, Any]:
        return {'folder': to_portable_path(self.learn, self._run_folder or None)}

    @override
    def restore(self, sd: dict[str, Any]) -> None:
        self._run_folder = str(from_portable_path(self.learn, sd['folder'], self.folder) or '')


def _last_step(folder: Path) -> int:
    "Return the last step of a scalar in a folder, or -1 if there is no scalar."
    # tensorboard has no type annotations
    reader: Any = import_module('tensorboard.backend.event_processing.event_accumulator')
    events = reader.EventAccumulator(str(folder), size_guidance={'scalars': 1}).Reload()
    return max((events.Scalars(tag)[-1].step for tag in events.Tags()['scalars']), default=-1)
