"""Saving and loading weights, the exchange of trained models, and programs for serving."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from numbers import Real
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from learnkit.checkpoint.weights import (
    FORMAT,
    SAFETENSORS,
    Stored,
    check_weights,
    load_weights,
    model_state,
    read_weights,
    weights_differ,
    write_safetensors,
)
from learnkit.core.batch import count_stacked, form_of, map_tensors, microbatches, passed_names
from learnkit.core.dtensor import mesh_of, whole_state
from learnkit.core.errors import ModelError, OptimizerError, OptionError, WeightsError
from learnkit.core.files import atomic_write, check_writable
from learnkit.core.model import bare_model, name_of
from learnkit.core.plain import plain
from learnkit.core.validation import warn_user
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.show import (
    as_targets,
    binary_cut,
    check_max_n,
    first_batch,
    first_samples,
    own_method,
    show_samples,
    wrong_ones,
)
from learnkit.engine.checks import check_function
from learnkit.engine.loop import Loop
from learnkit.optim.state import is_torch_state
from learnkit.optim.wrapper import OptimWrapper

__all__ = ['Saving']


class Saving(Loop):
    "The part of the Learner that saves and loads."
    path: Path
    model_dir: str | Path
    lr: Any
    create_opt: Callable[[], None]
    get_preds: Callable[..., tuple[Any, ...]]
    _own_lrs: tuple[Any, Any]
    _cover_params: Callable[[], None]
    _opt_is_of_another_model: Callable[[], bool]

    # -- weights -------------------------------------------------------------------------------------------------------

    def save(
        self,
        file: str | Path,              # a name below `path/model_dir`, or an absolute path; `.pth` is added
        with_opt: bool | None = None,  # save the optimizer's state; None: if there is an optimizer
    ) -> Path:
        """Save the weights, and return the path of the file.

        The file is torch's: `{'model': ..., 'opt': ...}`, or the model's state dict alone. A name that ends in
        `.safetensors` gets the weights alone, in that library's format. It is there whole or not at all, and folders
        are made. Of several processes that train together all call it, and the
        first one writes. Raises `OptionError` for a name that cannot be a file and for
        `with_opt` in a format without place for it, `OptimizerError` when `with_opt` is asked for and there is no
        optimizer; nothing is written then.

        >>> import tempfile
        >>> from learnkit.testing import synth_learner
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     learn = synth_learner(path=folder)
        ...     print(learn.save('line').relative_to(folder).as_posix())
        ...     a = learn.model.a.item()
        ...     _ = learn.model.a.data.zero_()
        ...     learn.load('line').model.a.item() == a
        models/line.pth
        True
        """
        path = self._weights_path(file)
        with self.evaluated_weights(): return self._save(path, with_opt)

    def _save(self, path: Path, with_opt: bool | None) -> Path:
        if path.suffix == SAFETENSORS: return self._save_safetensors(path, with_opt)
        if with_opt and self.opt is None:
            raise OptimizerError('There is no optimizer yet, so its state cannot be saved: leave out `with_opt`, or '
                                 'call `fit` or `create_opt()` first.')
        state: Any = model_state(self.model)
        if with_opt is not False and self.opt is not None:
            state = {'model': state, 'opt': whole_state(plain(self.opt.state_dict(), 'The optimizer\'s state'))}
            if has_params(self.loss_func): state['loss_func'] = model_state(self.loss_func)
        if self.world.is_first:
            with atomic_write(path) as tmp: torch.save(state, tmp)
        return path

    def _save_safetensors(self, path: Path, with_opt: bool | None) -> Path:
        if with_opt:
            raise OptionError(f'{path}: this format has no place for the state of an optimizer. Use a file `.pth`, or '
                              'leave out `with_opt`.')
        state = model_state(self.model)
        if self.world.is_first:
            with atomic_write(path) as tmp: write_safetensors(state, tmp)
        return path

    def load(
        self,
        file: str | Path,              # as for `save`
        with_opt: bool | None = None,  # load the optimizer's state; None: when the file has it
        device: torch.device | str | int | None = None,  # where the file is read to; None: the CPU
        strict: bool = True,           # False: take what fits by name, and convert other dtypes
    ) -> Self:
        """Load what `save`, `torch.save` of a state dict, fastai's or safetensors has written, and return the learner.

        Nothing in the file is executed. The values are copied: parameters stay the same objects. Everything is
        compared before anything is copied: a `WeightsError` lists every name, shape and dtype that differs, and leaves
        weights and optimizer as they were; it is also raised for files that are damaged or hold more than data. An
        optimizer that does not exist yet is made. An optimizer's state that fastai saved is of another form: there, the
        weights alone are loaded, with a warning. `before_load` fires when all was compared, `after_load` in the end.

        >>> import tempfile
        >>> from learnkit.testing import synth_learner
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = (learn := synth_learner()).save(f'{folder}/line')
        ...     again = synth_learner().load(path)
        >>> torch.equal(again.model.a, learn.model.a)
        True
        """
        self.world.barrier()  # the first of several processes has written it when all are here
        path = self._weights_path(file, to_read=True)
        stored = read_weights(path, torch.device('cuda', device) if isinstance(device, int) else device)
        opt_state = opt_state_of(stored, with_opt, path)
        with_loss = (opt_state is not None and stored.loss_func is not None
                     and has_params(self.loss_func))
        with self._optimizer(made=opt_state is not None):
            differences = weights_differ(self.model, stored.model, strict)
            if opt_state is not None: differences += self.opt.differences(opt_state, bare_model(self.model))
            if with_loss:
                differences += [f'loss_func: {d}' for d in weights_differ(self.loss_func, stored.loss_func)]
            check_weights(path, differences, self.model, _fix(differences))
        self('before_load')
        load_weights(self.model, stored.model, strict)
        if with_loss: load_weights(self.loss_func, stored.loss_func)
        if opt_state is not None:
            # the state goes where the parameters are, and they would move at the next fit
            self._to_device()
            self.opt.load_state_dict(opt_state)
        self('after_load')
        return self

    @contextmanager
    def _optimizer(self, made: bool) -> Iterator[None]:
        "Make an optimizer where one is needed, and take it back if the block fails."
        before = self.opt, self.lr, self._own_lrs, self.counters.steps
        if made and (self.opt is None or self._opt_is_of_another_model()): self.create_opt()
        if made and not isinstance(self.opt, OptimWrapper): self.opt = OptimWrapper(opt=self.opt)  # assigned by hand
        try: yield
        except BaseException:
            self.opt, self.lr, self._own_lrs, self.counters.steps = before
            raise

    def _to_device(self) -> None:
        "Move the model, and a loss function that is a module, to the device of the data, where there is one."
        if (device := getattr(self.dls, 'device', None)) is None: return
        for module in (self.model, self.loss_func):
            if isinstance(module, nn.Module): module.to(device)

    def _weights_path(self, file: Any, to_read: bool = False) -> Path:
        "Return the path of a file of weights; found are also one with its suffix doubled, as by fastai, or another."
        folder = self.path/self.model_dir
        path = file_path(file, folder, '' if str(file).endswith(SAFETENSORS) else '.pth')
        if not to_read or path.is_file(): return path
        others = path.with_name(f'{path.name}.pth'), Path(os.path.abspath(folder/file))
        return next((other for other in others if other.is_file()), path)

    def _check_saves(self, file: str | Path) -> None:
        "Raise `OptionError` if a file of weights of this name could not be written."
        path = self._weights_path(file)
        try: check_writable(path)
        except OSError as e: raise OptionError(f'{path} cannot be written: {e}.') from None

    # -- exchange ------------------------------------------------------------------------------------------------------

    def save_learner(
        self,
        fname: str | Path = 'learner.pth',   # a name below `path`, or an absolute path
        /,
        **model_config: Any,                 # plain values that build the model; `load_learner` passes them on
    ) -> Path:
        """Save weights and configuration in one file for `load_learner`, and return its path.

        The file holds tensors and plain values, and no code: what it is loaded with, a model class for one, is in the
        hands of who loads it, who can therefore trust a file from anywhere. It keeps the rates and options of this
        Learner, the class names of its data (`dls.vocab`) and the names of model and loss; the optimizer's state and
        the data stay behind. Raises `OptionError` for a value that is not plain.

        >>> import tempfile
        >>> from learnkit import Learner
        >>> from learnkit import load_learner
        >>> def build(hidden): return nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     learn = Learner([(torch.zeros(4, 1), torch.zeros(4, 1))], build(hidden=8), nn.MSELoss(), path=folder)
        ...     path = learn.save_learner('net.pth', hidden=8)
        ...     load_learner(path, model=build, loss_func=nn.MSELoss())
        Learner(Sequential, loss_func=MSELoss, valid=[], cbs=[TrainEvalCallback, Recorder, ProgressCallback])
        """
        path = file_path(fname, self.path, suffix='')
        config = {**own_config(self), 'model_config': plain(model_config, 'model_config')}
        with self.evaluated_weights():
            state = {'learnkit': FORMAT, 'config': config, 'model': model_state(self.model)}
            if self.world.is_first:
                with atomic_write(path) as tmp: torch.save(state, tmp)
        return path

    # -- serving -------------------------------------------------------------------------------------------------------

    def export(
        self,
        fname: str | Path = 'export.pt2',              # name below `path`, or an absolute path; adds `.pt2`
        act: Callable[[Any], Any] | None = None,       # applied to outputs, e.g. `loss_func.activation`
        sample: Any = None,                            # inputs, a tuple if several; None: shaped like those of the data
    ) -> Path:
        """Save the model as a program for serving (`torch.export`), for any batch size, and return the file's path.

        The program is on the CPU, in evaluation mode, and needs none of the model's code:
        `torch.export.load(path).module()(x)`. What callbacks do to a batch is no part of it. The file also holds inputs
        of the sample's shapes, all zero: nothing of the data is in it. The first of several processes writes it.

        Loading such a file executes trusted code: `torch.export.load` unpickles its sample inputs. Load only files of
        your own making; to exchange models use `save_learner`.

        Raises `ModelError` with torch's reason for a model that cannot be exported, and `OptionError` where there is no
        batch to take the shapes from, or for the name of another kind of file.

        >>> import tempfile
        >>> from learnkit.testing import synth_learner
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     program = torch.export.load(synth_learner(path=folder).export()).module()
        >>> program(torch.ones(5, 1)).shape
        torch.Size([5, 1])
        """
        if str(fname).endswith(('.pkl', '.pickle', '.pth', '.pt')):
            raise OptionError(f'{fname}: a program for serving goes into a file `.pt2`. What `load_learner` reads is '
                              "written by `learn.save_learner('learner.pth')`.")
        if mesh_of(self.model) is not None:
            raise ModelError(f'Every process has a part of {type(self.model).__name__}: export it once the strategy '
                             "'fsdp' has ended, when all of it is back in one place.")
        check_function('act', act)
        path = file_path(fname, self.path, suffix='.pt2')
        if not self.world.is_first: return path
        xb = sample_inputs(self.dls) if sample is None else sample if isinstance(sample, tuple) else (sample,)
        with self.evaluated_weights():
            model = on_cpu(bare_model(self.model))
            modes = [(m, m.training) for m in model.modules()]
            try: program = program_of(model.eval(), *two_rows(xb), act)
            finally:
                for m, mode in modes: m.training = mode
            with atomic_write(path) as tmp, tmp.open('wb') as f: torch.export.save(program, f)
        return path

    # -- looking -------------------------------------------------------------------------------------------------------

    def show_results(
        self,
        ds_idx: int = 1,       # which loader's first batch: 0 training, 1 validation
        dl: Any = None,        # a loader to use instead
        max_n: int = 9,        # the most samples shown
        **kwargs: Any,         # more for the data's own method
    ) -> Any:
        """Show a batch with its predictions: images in a grid, anything else as a table; return what was drawn.

        Wrong classes are marked, and have their names in `dls.vocab` where there is one. Images take `figsize`. A
        method `show_results(batch, preds, max_n=..., **kwargs)` of the loader, as fastai's have it, or of its data set
        is used instead, if there is one; it gets a whole batch and the decoded predictions. Loaders, random generators
        and the model are afterwards as they were.

        >>> from learnkit import Learner
        >>> scores = torch.tensor([[3., 1.], [2., 0.]])
        >>> Learner([(scores, torch.tensor([0, 1]))], nn.Identity(), nn.CrossEntropyLoss()).show_results(ds_idx=0)
        x[0]  x[1]  target  predicted
           3     1       0          0
           2     0       1          0  wrong
        """
        check_max_n(max_n)
        dl = self.dls[ds_idx] if dl is None else dl
        batch, own = first_batch(dl), own_method(dl, 'show_results')
        _, targs, decoded = self.get_preds(dl=[batch], with_decoded=True)
        if own is not None: return own(batch, decoded, max_n=max_n, **kwargs)

        xb, _ = first_samples(batch, form_of(self.dls, 'valid'), max_n)
        preds = as_targets(decoded, targs, binary_cut(self.loss_func))
        (preds,), (targs,) = microbatches((preds,), (targs,), max_n)[0]
        told = {'predicted': preds} if targs is None else {'target': targs, 'predicted': preds}
        return show_samples(xb, told, getattr(self.dls, 'vocab', None), wrong_ones(preds, targs), **kwargs)


def has_params(loss_func: Any) -> bool:
    "Return True if a loss function is a module with parameters."
    return isinstance(loss_func, nn.Module) and next(loss_func.parameters(), None) is not None


def file_path(file: Any, folder: Path, suffix: str = '.pth') -> Path:
    "Return the path of a named file in `folder`; raise `OptionError` for what cannot name one."
    if not isinstance(file, (str, Path)):
        raise OptionError(f'This {type(file).__name__} cannot be a file: give the name of one. A state dict in memory '
                          'is loaded by `learn.model.load_state_dict(...)`.')
    name = str(file)
    if not name.strip() or '\0' in name or name.endswith(('/', '\\')) or Path(name).name in ('', '.', '..'):
        raise OptionError(f'{file!r} cannot be a file: give a name, or a path that ends in one.')
    # absolute, so that what `save` returns is what `load` takes
    path = Path(os.path.abspath(folder/(name if name.endswith(suffix) else f'{name}{suffix}')))
    if path.is_dir(): raise OptionError(f'{path} is a folder: give the name of a file.')
    return path


def opt_state_of(stored: Stored, with_opt: bool | None, path: Path) -> Any:
    "Return the optimizer's state that is to be loaded, None if none is."
    if with_opt is False or (with_opt is None and stored.opt is None): return None
    if is_torch_state(stored.opt): return stored.opt
    what = 'no optimizer state' if stored.opt is None else "an optimizer state that is not torch's, but fastai's own"
    if with_opt:
        raise WeightsError(f'{path} has {what}: pass `with_opt=False` for the weights alone. Nothing was loaded.')
    warn_user(f'{path} has {what}: only the weights are loaded. Pass `with_opt=False` to load it without this warning.')
    return None


def _fix(differences: list[str]) -> str:
    kinds = {d.partition(':')[0].split()[0] for d in differences}
    if kinds == {'optimizer'}: return ' Pass `with_opt=False` for the weights alone.'
    # names that are only missing, or only unknown, may be meant; both are another model's
    loose = kinds <= {'missing', 'dtype'} or kinds <= {'unexpected', 'dtype'}
    if loose: return ' Pass `strict=False` to load what fits by name.'
    return ' It is of another model: build that with the sizes and layers it had when it was saved.'


def own_config(learn: Any) -> dict[str, Any]:
    "Return what a Learner is made of besides weights, data and code, as plain values."
    try: package = version('learnkit')
    except PackageNotFoundError: package = ''
    loss, vocab, lr = learn.loss_func, getattr(learn.dls, 'vocab', None), learn.lr
    while isinstance(loss, partial): loss = loss.func
    if isinstance(lr, slice):
        lr = {'slice': [lr.start, lr.stop]}
    elif isinstance(lr, Mapping):
        lr = {name: float(rate) for name, rate in lr.items()}
    elif not isinstance(lr, Real):
        lr = [*map(float, lr)]
    config = {'version': package, 'torch': str(torch.__version__), 'model': type(bare_model(learn.model)).__name__,
              'loss_func': name_of(loss) if loss is not None else None, 'activates': hasattr(loss, 'activation'),
              'n_inp': form_of(learn.dls, 'valid').n_inp, 'vocab': None if vocab is None else [*vocab], 'lr': lr,
              'wd': learn.wd, 'wd_bn_bias': learn.wd_bn_bias, 'moms': tuple(learn.moms), 'train_bn': learn.train_bn}
    return {name: plain(value, name) for name, value in config.items()}


# Programs for serving

def sample_inputs(dls: Any) -> tuple[Any, ...]:
    "Return the inputs of a batch, of the first validation loader where there is one."
    name, dl = next(iter(evaluation_loaders(dls)), ('train', dls.train))
    try: return form_of(dls, name).split(first_batch(dl), predicting=True)[0]
    except OptionError as e: raise OptionError(f'{e} Pass `sample=`, the inputs of a batch.') from None


def two_rows(xb: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Tensor]]:
    "Return zeros like two samples of a batch, and those of them that have a row a sample; others stay as they are."
    n, cut = count_stacked(xb), []  # one row alone would be taken for a fixed size

    def rows(t: Tensor) -> Tensor:
        t = t.detach().cpu().as_subclass(Tensor)
        if not t.ndim or len(t) != n: return t
        cut.append(t.new_zeros((2, *t.shape[1:])))
        return cut[-1]
    return tuple(map_tensors(xb, rows)), cut


def on_cpu(model: nn.Module) -> nn.Module:
    "Return the model itself if it is on the CPU, else a copy there; the memory of its device is not used."
    tensors = [*model.parameters(), *model.buffers()]
    if all(t.device.type == 'cpu' for t in tensors): return model
    copies: dict[int, Any] = {id(t): t.detach().cpu() for t in tensors}
    for p in model.parameters(): copies[id(p)] = nn.Parameter(copies[id(p)], requires_grad=p.requires_grad)
    return deepcopy(model, copies)


def program_of(
    model: nn.Module,
    xb: tuple[Any, ...],    # inputs
    cut: list[Tensor],      # those tensors of them that have a row a sample
    act: Callable[[Any], Any] | None,
) -> Any:
    "Export a model with a batch dimension of any size in its inputs. Raises `ModelError`."
    from torch.export import Dim, ShapesCollection, export
    names = passed_names(model, xb)
    kwargs = {k: xb[0][k] if isinstance(xb[0], Mapping) else getattr(xb[0], k) for k in names} if names else None
    args = () if names else xb
    batch, ids = Dim('batch', min=1), {id(t) for t in cut}
    shapes: Any = ShapesCollection()  # that `export` takes one, its types do not say

    def mark(t: Tensor) -> Tensor:
        if id(t) in ids: shapes[t] = {0: batch}
        return t
    map_tensors((args, kwargs), mark)
    hook = model.register_forward_hook(lambda module, xb, out: out if act is None else act(out))
    try: return export(model, args, kwargs, dynamic_shapes=shapes)
    except Exception as e:
        reason = next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise ModelError(f'{type(model).__name__} cannot be exported: {reason}') from e
    finally: hook.remove()
