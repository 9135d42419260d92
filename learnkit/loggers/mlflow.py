"""Logs for MLflow, by its own client."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any

from learnkit.core.errors import OptionError
from learnkit.core.files import check_writable
from learnkit.core.time import Time
from learnkit.loggers.base import Logger, Rows, need
from learnkit.loggers.values import png

__all__ = ['MlflowLogger']

_AT_ONCE = 1000  # metrics that a server takes in one call
_PARAM_LENGTH = 6000
_ALLOW = 'MLFLOW_ALLOW_FILE_STORE'


class MlflowLogger(Logger):
    """Log to a run of MLflow, by default into a folder: `mlflow ui --backend-store-uri mlruns` shows it.

    All fits of a Learner, and a process that resumes it, log to one run. Nothing can be taken back from MLflow: resumed
    from an earlier checkpoint, what the run has already is kept, and not logged again; a parameter that another fit
    changes is logged beside the first, as `fit_2/epochs`. The run ends with `close`, as FAILED where the last fit has
    failed. MLflow asks for a consent to log to folders, which is given for this logger alone: a database
    (`tracking_uri='sqlite:///mlflow.db'`) or a server has more features. Raises `MissingExtraError` without mlflow.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=MlflowLogger('runs', run_name='first'))
    ...     with learn.no_bar(), learn: learn.fit(1)
    ...     len(list(Path(folder).glob('runs/*/*/metrics/valid_loss')))
    1
    """

    def __init__(
        self,
        tracking_uri: str | Path = 'mlruns',  # folder below `learn.path`, or a URI ('http://...')
        experiment: str = 'learnkit',
        run_name: str | None = None,  # None: MLflow invents one
        every: str | Time = '10ba',  # as for `Logger`
    ) -> None:
        need('mlflow', 'mlflow', 'MlflowLogger')
        super().__init__(every)
        self.tracking_uri, self.experiment, self.run_name = tracking_uri, experiment, run_name
        self._id, self._there = '', {}  # type: tuple[str, dict[str, int]]  # the run; each metric's last step there

    def where(self) -> Any:
        "Return the folder, or the address of a database or server."
        uri = str(self.tracking_uri)
        if re.match(r'[a-z][a-z0-9+.-]+:', uri):
            return uri
        return Path(os.path.realpath(self.learn.path / uri))

    def check(self) -> None:
        if not isinstance(folder := self.where(), Path):
            return
        try:
            check_writable(folder / 'meta.yaml')
        except OSError as e:
            raise OptionError(f'{folder} cannot be written: {e}.') from None

    def open(self, keep: int | None) -> tuple[Any, int]:
        from mlflow import MlflowClient

        uri = self.where()
        with _files_allowed():
            client = MlflowClient(tracking_uri=uri.as_uri() if isinstance(uri, Path) else uri)
            if self._id:
                client.update_run(self._id, status='RUNNING')
            else:
                self._id = self._new_run(client)
        self._there = self._steps(client) if keep is not None else {}
        return client, max(self._there.values(), default=-1)

    def _new_run(self, client: Any) -> str:
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        return str(client.create_run(experiment, run_name=self.run_name).info.run_id)

    def _steps(self, client: Any) -> dict[str, int]:
        names = client.get_run(self._id).data.metrics
        return {
            name: max(m.step for m in client.get_metric_history(self._id, name)) for name in names
        }

    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        self.write([(step, values)])

    def write(self, rows: Rows) -> None:
        from mlflow.entities import Metric

        now = int(time() * 1000)
        metrics = [
            Metric(clean(name), float(value), now, step)
            for step, values in rows
            for name, value in values.items()
            if step > self._there.get(clean(name), -1)
        ]
        for i in range(0, len(metrics), _AT_ONCE):
            self._handle.log_batch(self._id, metrics[i : i + _AT_ONCE])

    def log_params(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        there = self._handle.get_run(self._id).data.params
        texts = {clean(name): str(value)[:_PARAM_LENGTH] for name, value in params.items()}
        new = [Param(_free(name, text, there), text) for name, text in texts.items()]
        new = [p for p in new if p.key not in there]
        for i in range(0, len(new), 100):
            self._handle.log_batch(self._id, params=new[i : i + 100])

    def log_images(self, step: int, name: str, images: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for i, image in enumerate(images):
                path = Path(folder, f'{clean(name).replace("/", "_")}-{step}-{i}.png')
                path.write_bytes(png(image))
                self._handle.log_artifact(self._id, str(path), 'images')

    def log_text(self, step: int, name: str, text: str) -> None:
        self._handle.log_text(self._id, text, f'texts/{clean(name).replace("/", "_")}-{step}.txt')

    def shut(self, handle: Any) -> None:
        handle.set_terminated(self._id, 'FAILED' if self._failed else 'FINISHED')

    def saved(self) -> dict[str, Any]:
        return {'id': self._id}

    def restore(self, sd: dict[str, Any]) -> None:
        self._id = sd['id']


def clean(name: str) -> str:
    """Return a name in the letters that MLflow takes.

    >>> clean('loss (a=1)/x')
    'loss _a_1_/x'
    """
    return re.sub(r'[^\w./ -]', '_', name, flags=re.ASCII)


def _free(name: str, text: str, there: dict[str, str]) -> str:
    "Return a name under which the text is, or can be, a parameter of the run."
    n, free = 1, name
    while there.get(free, text) != text:
        n, free = n + 1, f'fit_{n + 1}/{name}'
    return free


@contextmanager
def _files_allowed() -> Iterator[None]:
    "Give the consent that MLflow asks for before it writes to a folder, for the length of a context."
    before = os.environ.get(_ALLOW)
    os.environ[_ALLOW] = 'true'
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ALLOW]
        else:
            os.environ[_ALLOW] = before
