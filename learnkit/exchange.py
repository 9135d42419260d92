"""A Learner from a file of `Learner.save_learner`, without running any code that the file could hold."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from learnkit.data import DataLoaders
from learnkit.errors import EmptyLoaderError, ModelError, OptionError, WeightsError
from learnkit.hints import warn_user
from learnkit.learner import Learner
from learnkit.weights import check_weights, load_weights, read_weights, weights_differ

__all__ = ['load_learner']


class NoBatches:
    "Stands where a Learner without data has its training loader: looking into it says what to do."

    def __len__(self) -> int: raise self._error()
    def __iter__(self) -> Iterator[Any]: raise self._error()

    def _error(self) -> EmptyLoaderError:
        return EmptyLoaderError('This Learner was loaded without data: pass them, `load_learner(path, model=..., '
                                'dls=dls)`, or set `learn.dls`.')


class NoData(DataLoaders):
    "Stands where a Learner without data has its loaders: there are none to train or validate on."

    def __init__(self, device: torch.device | str | None, path: Path, n_inp: int | None, vocab: Any) -> None:
        self.train: Any = NoBatches()
        self.evaluation, self.others, self.n_inp, self.n_iter = [], [], n_inp, None
        self.path, self.vocab = path, vocab
        self._device = None if device is None else torch.device(device)

    def __repr__(self) -> str: return 'No data'


def load_learner(
    path: str | Path,                              # written by `learn.save_learner`
    model: nn.Module | Callable[..., nn.Module] | None = None,  # the model, or what builds it from its configuration
    dls: Any = None,                               # data, as for `Learner`; None: predict on given loaders
    loss_func: Callable[..., Any] | None = None,   # as for `Learner`
    device: torch.device | str | None = None,      # without `dls`: where it runs; None: a GPU if there is one
    cpu: bool = False,                             # fastai's way to say `device='cpu'`
    **kwargs: Any,                                 # more for `Learner`, in place of what the file says
) -> Learner:
    """Make a Learner with the weights and options of a file, ready to predict, validate or train.

    The file holds no code, so loading it is safe whoever it comes from; the model's code comes from `model`: a class or
    function, called with the configuration that was given to `save_learner`, or a model that is ready. Without
    `dls`, loaders are given to each call: `learn.get_preds(dl=...)`; `learn.dls.vocab` has the class names.

    Raises `OptionError` without `model`, `WeightsError` for a file that is damaged, is no such file, or does not fit
    the model (all differences listed, the model unchanged), and `ModelError` when `model` builds none.
    """
    path = Path(path)
    stored = read_weights(path)
    if (config := stored.config) is None:
        raise WeightsError(f'{path} holds weights without a configuration: build a Learner and call its `load`, or '
                           'write the file with `learn.save_learner`.')
    built = _model(path, model, config)
    check_weights(path, weights_differ(built, stored.model), built)
    if loss_func is None and config.get('activates'):
        warn_user(f'The Learner in {path} had the loss {config["loss_func"]}, which turns outputs into predictions. '
                  'Pass `loss_func=` to have them activated and decoded as they were.')
    if dls is None: dls = NoData('cpu' if cpu else device, path.parent, config.get('n_inp'), config.get('vocab'))
    learn = Learner(dls, built, loss_func, **{**_options(config), 'path': path.parent, **kwargs})
    load_weights(built, stored.model)
    return learn


def _model(path: Path, model: Any, config: dict[str, Any]) -> nn.Module:
    if isinstance(model, nn.Module): return model
    own, name = config.get('model_config', {}), config.get('model')
    given = ', '.join(f'{k}={v!r}' for k, v in own.items())
    if model is None:
        own_class = not hasattr(nn, str(name))  # torch's own alone do not build it
        build, what = (name, '') if own_class else ('build', f', your function that returns the {name}')
        raise OptionError(f'{path} holds the weights and configuration of a {name}, and no code, so that loading it is '
                          f'safe. Say what builds the model: `load_learner({str(path)!r}, model={build})` calls '
                          f'`{build}({given})`{what}.')
    if not callable(model): raise OptionError(f'model={model!r} is no model, and nothing that builds one.')
    try: built = model(**own)
    except TypeError as e:
        e.add_note(f'It was called with the configuration in {path}: {given or "nothing"}.')
        raise
    if isinstance(built, nn.Module): return built
    raise ModelError(f'model={model!r} built a {type(built).__name__}, no nn.Module.')


def _options(config: dict[str, Any]) -> dict[str, Any]:
    "Return the Learner's arguments that a configuration holds."
    options: dict[str, Any] = {k: config[k] for k in ('lr', 'wd', 'wd_bn_bias', 'moms', 'train_bn') if k in config}
    if isinstance(lr := options.get('lr'), dict): options['lr'] = slice(*lr['slice'])
    return options
