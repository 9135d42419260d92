"""Log to MLflow with its client."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any

from typing_extensions import override

from learnkit.core.optional import check_libraries
from learnkit.core.time import Time
from learnkit.loggers.base import Rows, RunLogger
from learnkit.loggers.values import encode_png

_BATCH_SIZE = 1000  # maximum number of metrics that a server accepts in one call
_PARAM_LENGTH = 6000  # maximum number of characters of a parameter
_ALLOW = 'MLFLOW_ALLOW_FILE_STORE'


class MlflowLogger(RunLogger):
    """Log to a run of MLflow, by default to a folder: `mlflow ui --backend-store-uri mlruns` shows it.

    All fits of a Learner, and a process that resumes it, log to one run. MLflow cannot delete
    logged values: after a resume from an earlier checkpoint, values that the run already has are
    kept and not logged again. A parameter that a later fit changes is logged under an additional
    name, such as `fit_2/epochs`. `close` ends the run, with the status FAILED if the last fit
    failed. MLflow requires consent to log to folders; this logger gives it, for itself only. A
    database (`tracking_uri='sqlite:///mlflow.db'`) or a server has more features. Raises
    `MissingExtraError` without mlflow.

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
        experiment: str = 'learnkit',  # name of the experiment
        run_name: str | None = None,  # name of the run; None: chosen by MLflow
        every: str | Time = '10ba',  # interval of losses and hyperparameters, as in `Logger`
    ) -> None:
        check_libraries('MlflowLogger', 'mlflow')
        super().__init__(every)
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self.run_name = run_name
        self._logged_steps: dict[str, int] = {}  # last step in the run, by metric
        self._metric_names: dict[str, str] = {}  # metric name in MLflow of each logged name

    @override
    def where(self) -> Any:
        "Return the folder, or the address of a database or server."
        uri = str(self.tracking_uri)
        if re.match(r'[a-z][a-z0-9+.-]+:', uri):
            return uri
        return Path(os.path.realpath(self.learn.path / uri))

    @override
    def check(self) -> None:
        if isinstance(self.where(), Path):
            super().check()

    @override
    def open(self, keep: int | None) -> tuple[Any, int]:
        from mlflow import MlflowClient

        uri = self.where()
        with _allow_folders():
            client = MlflowClient(tracking_uri=uri.as_uri() if isinstance(uri, Path) else uri)
            if self._id:
                client.update_run(self._id, status='RUNNING')
            else:
                self._id = self._new_run(client)
        self._logged_steps = self._read_steps(client) if keep is not None else {}
        return client, max(self._logged_steps.values(), default=-1)

    def _new_run(self, client: Any) -> str:
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        return str(client.create_run(experiment, run_name=self.run_name).info.run_id)

    def _read_steps(self, client: Any) -> dict[str, int]:
        steps = {}
        for name in client.get_run(self._id).data.metrics:
            history = client.get_metric_history(self._id, name)
            steps[name] = max(m.step for m in history)
        return steps

    @override
    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        self.write([(step, values)])

    @override
    def write(self, rows: Rows) -> None:
        from mlflow.entities import Metric

        now = int(time() * 1000)
        new = [name for _, values in rows for name in values if name not in self._metric_names]
        if new:
            taken = {*self._metric_names.values(), *self._logged_steps}
            self._metric_names |= find_names(new, taken)
        named = [
            (self._metric_names[name], value, step)
            for step, values in rows
            for name, value in values.items()
        ]
        metrics = [
            Metric(name, float(value), now, step)
            for name, value, step in named
            if step > self._logged_steps.get(name, -1)
        ]
        for i in range(0, len(metrics), _BATCH_SIZE):
            self._handle.log_batch(self._id, metrics[i : i + _BATCH_SIZE])

    @override
    def log_params(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        logged = self._handle.get_run(self._id).data.params
        names = find_names(params, logged)
        values = {names[name]: str(value)[:_PARAM_LENGTH] for name, value in params.items()}
        new = [Param(_find_name(name, value, logged), value) for name, value in values.items()]
        new = [p for p in new if p.key not in logged]
        for i in range(0, len(new), 100):
            self._handle.log_batch(self._id, params=new[i : i + 100])

    @override
    def log_images(self, step: int, name: str, images: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for i, image in enumerate(images):
                path = Path(folder, f'{clean(name).replace("/", "_")}-{step}-{i}.png')
                path.write_bytes(encode_png(image))
                self._handle.log_artifact(self._id, str(path), 'images')

    @override
    def log_text(self, step: int, name: str, text: str) -> None:
        self._handle.log_text(self._id, text, f'texts/{clean(name).replace("/", "_")}-{step}.txt')

    @override
    def shut(self, handle: Any) -> None:
        handle.set_terminated(self._id, 'FAILED' if self._has_failed else 'FINISHED')


def clean(name: str) -> str:
    """Replace the characters of a name that MLflow does not accept.

    >>> clean('loss (a=1)/x')
    'loss _a_1_/x'
    """
    return re.sub(r'[^\w./ -]', '_', name, flags=re.ASCII)


def find_names(names: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """Return the name in MLflow for each name; in a folder of MLflow names are paths, so none may be below another.

    >>> find_names(['loss', 'loss/aux', 'lr/0'], taken=['lr/1'])
    {'loss': 'loss', 'loss/aux': 'loss.aux', 'lr/0': 'lr/0'}
    """
    cleaned = {name: clean(name) for name in names}
    taken = set(taken)
    files = taken.union(cleaned.values())
    folders = {name[: slash.start()] for name in taken for slash in re.finditer('/', name)}

    def separate(name: str) -> str:
        if any(name[: slash.start()] in files for slash in re.finditer('/', name)):
            return name.replace('/', '.')
        return f'{name}.value' if name in folders else name

    return {name: separate(found) for name, found in cleaned.items()}


def _find_name(name: str, value: str, logged: dict[str, str]) -> str:
    "Return the first name under which a parameter is logged with this value, or is not logged yet."
    n = 1
    found = name
    while logged.get(found, value) != value:
        n += 1
        found = f'fit_{n}/{name}'
    return found


@contextmanager
def _allow_folders() -> Iterator[None]:
    "Return a context that gives the consent that MLflow requires to log to a folder."
    before = os.environ.get(_ALLOW)
    os.environ[_ALLOW] = 'true'
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ALLOW]
        else:
            os.environ[_ALLOW] = before
