# SPDX-License-Identifier: Apache-2.0
"""Save, upload and download trained models for the Hugging Face Hub: a `save_learner` file and a model card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastcore.basics import noop
from torch import nn

from learnkit.core.files import as_local_path, atomic_write
from learnkit.core.optional import check_libraries, import_library
from learnkit.learner import Learner, load_learner
from learnkit.loggers.values import configuration

FILE = 'learner.pth'  # the file of `save_learner` in a repository


def save_for_hub(
    learn: Learner,
    folder: str | Path,  # folder for the files, below `learn.path` or absolute
    model_config: Mapping[str, Any] | None = None,  # plain arguments of the model's constructor
    *,
    repo_id: str = 'user/name',  # repository that the model card names
) -> Path:
    """Write the files that `push_to_hub` uploads, and return the folder.

    The files are `learner.pth`, written by `learn.save_learner`, and `README.md`, a model card with the last row of the
    history and the settings of the run. Existing files are overwritten. Raises `OptionError` for a value in
    `model_config` that is not plain, and `MissingExtraError` without huggingface_hub.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder, synth_learner().no_bar() as learn:
    ...     with learn.no_logging(): learn.fit(1)
    ...     _ = save_for_hub(learn, folder)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['README.md', 'learner.pth']
    """
    check_libraries('save_for_hub', 'huggingface_hub')
    target = Path(learn.path / as_local_path(folder)).absolute()
    config = model_config or {}
    _run_on_first_rank(learn, partial(target.mkdir, parents=True, exist_ok=True))
    learn.save_learner(target / FILE, **config)
    _run_on_first_rank(learn, partial(_write_card, learn, target / 'README.md', repo_id, config))
    return target


def push_to_hub(
    learn: Learner,
    repo_id: str,  # repository of the model, such as 'user/digits'; created if missing
    model_config: Mapping[str, Any] | None = None,  # plain arguments of the model's constructor
    *,
    private: bool | None = None,  # whether a new repository is private; None: the user's default
    message: str = 'Upload a Learner',  # commit message
    token: str | None = None,  # access token of the Hub; None: the token of `hf auth login`
) -> str:
    """Upload weights, configuration and a model card to the Hugging Face Hub, and return the commit's URL.

    The files of `save_for_hub` replace files with the same names in the repository, which keeps its history. Raises
    `MissingExtraError` without huggingface_hub, and the errors of huggingface_hub.

    >>> push_to_hub(learn, 'user/digits', {'hidden': 8})  # doctest: +SKIP
    'https://huggingface.co/user/digits/commit/8e2f...'
    """
    check_libraries('push_to_hub', 'huggingface_hub')
    with TemporaryDirectory() as temporary:
        # all ranks receive the folder of rank 0, which writes the files
        folder = learn.world.broadcast(temporary)
        save_for_hub(learn, folder, model_config, repo_id=repo_id)
        upload = partial(_upload, folder, repo_id, private, message, token)
        return str(learn.world.broadcast(_run_on_first_rank(learn, upload)))


def _run_on_first_rank(learn: Learner, f: Callable[[], Any]) -> Any:
    "Call a function on rank 0 and return its result there; raise its error on all ranks."
    return learn.world.run_on_all(f if learn.world.is_first else noop)


def _upload(folder: str, repo_id: str, private: Any, message: str, token: Any) -> str:
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
    return commit.commit_url


def from_hub(
    repo_id: str,  # repository of the model, such as 'user/digits'
    model: nn.Module | Callable[..., nn.Module] | None = None,  # as for `load_learner`
    dls: Any = None,  # as for `load_learner`
    loss_func: Callable[..., Any] | None = None,  # as for `load_learner`
    *,
    revision: str | None = None,  # branch, tag or commit; None: the newest on the main branch
    token: str | None = None,  # access token of the Hub; None: the token of `hf auth login`
    **options: Any,  # further arguments of `load_learner`
) -> Learner:
    """Download a file that `push_to_hub` has uploaded, and create a Learner from it.

    The file holds weights and plain values, and no code of the repository is executed. With a commit as `revision` the
    weights are always the same. The file is kept in the cache of huggingface_hub; the Learner writes its files below
    the working directory. Raises the errors of `load_learner` and of huggingface_hub, and `MissingExtraError` without
    huggingface_hub.

    >>> learn = from_hub('user/digits', model=Digits, revision='8e2f...')  # doctest: +SKIP
    """
    download = import_library('huggingface_hub', 'from_hub').hf_hub_download
    file = download(repo_id, FILE, revision=revision, token=token, library_name='learnkit')
    learn = load_learner(file, model, dls, loss_func, **options)
    learn.path = Path()
    return learn


# -- the model card --------------------------------------------------------------------------------


def _write_card(
    learn: Learner,
    path: Path,
    repo_id: str,
    model_config: Mapping[str, Any],
) -> None:
    "Write the model card: metadata in YAML, results, settings, and code that loads the model."
    from huggingface_hub import ModelCardData

    settings = _describe_settings(learn)
    results = _find_results(learn)
    time = learn.time
    name = settings['model']
    measured = [column for column in results if not column.endswith('loss')]
    data = ModelCardData(library_name='learnkit', tags=['pytorch'], metrics=measured or None)
    arguments = ', '.join(f'{key}={value!r}' for key, value in model_config.items())
    parts = [
        f'---\n{data.to_yaml()}\n---',
        f'# {repo_id.rpartition("/")[2]}',
        f'A `{name}`, trained with learnkit. Epochs: {time.ep}, steps: {time.st}, samples: {time.sp}.',
    ]
    if results:
        parts += ['## Results of the last epoch', _format_table('metric', results)]
    parts += ['## Settings', _format_table('setting', settings)]
    call = f'with `{arguments}`' if arguments else 'without arguments'
    parts += ['## Use', _USE.format(repo_id=repo_id, name=name, call=call).strip()]
    with atomic_write(path) as tmp:
        tmp.write_text('\n\n'.join(parts) + '\n', 'utf-8')


_USE = """
```python
from learnkit.interop import from_hub

learn = from_hub({repo_id!r}, model={name})
```

`model` is the class, or your function that builds the model: it is called {call}. The file
`learner.pth` holds weights and plain values, and is loaded without executing code.
"""


def _find_results(learn: Learner) -> dict[str, Any]:
    "Return the losses and metrics of the last epoch."
    row = learn.history[-1] if learn.history else {}
    return {
        name: value
        for name, value in row.items()
        if name not in ('fit', 'epoch', 'time') and isinstance(value, (int, float))
    }


def _describe_settings(learn: Learner) -> dict[str, Any]:
    "Return the configuration without callbacks' options; rates and momenta are those of the last step."
    settings = configuration(learn)
    return {name: value for name, value in settings.items() if not name.startswith('callback/')}


def _format_table(head: str, rows: Mapping[str, Any]) -> str:
    "Return a Markdown table."
    lines = [f'| {head} | value |', '|---|---|']
    for name, value in rows.items():
        text = f'{value:.6g}' if isinstance(value, float) else value
        lines.append(f'| {name} | `{text}` |')
    return '\n'.join(lines)
