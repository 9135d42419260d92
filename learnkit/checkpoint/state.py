"""Checkpoints: what is in one, and how it is put into a Learner, so that training goes on as if it had not stopped."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from learnkit.checkpoint.folder import find
from learnkit.checkpoint.saving import ensure_optimizer, move_to_device
from learnkit.checkpoint.weights import check_weights, load_weights, own_state, weights_differ
from learnkit.core.dtensor import (
    distribute_like,
    host_mesh,
    is_dtensor,
    local,
    mesh_of,
    on_host,
    whole_state,
)
from learnkit.core.errors import CheckpointError
from learnkit.core.model import bare_model, model_device
from learnkit.core.plain import plain
from learnkit.core.random import capture_rng, restore_rng
from learnkit.core.validation import warn_user
from learnkit.data.position import LoaderPosition, check_position
from learnkit.engine.callback_state import States
from learnkit.engine.loop import Loop
from learnkit.engine.resume import PLACES, ResumeState
from learnkit.engine.run import add_note

__all__ = ['Checkpoints', 'host_copy']

COUNTERS = ('epoch', 'iter', 'train_iter', 'pct_train', 'training', 'phase', 'dl_name')  # of the loop, as they are
ENTRIES = ('model', 'loss_func', 'optimizer', 'grads', 'frozen', 'loop', 'rng', 'position', 'callbacks')


class Checkpoints(Loop, States):
    "The part of the Learner that makes checkpoints and goes on from them."
    path: Path
    _cover_params: Callable[[], None]
    logger: Callable[[Any], Any]

    def checkpoint_state(self) -> dict[str, Any]:
        """Return everything that training depends on, copied to host memory, as plain values and tensors.

        It is what the callback `Checkpoint` writes: model, loss function and optimizers, pending gradients, counters,
        history and every callback's state by its key, all random generators, and the place in the training data.
        `fit(n, resume=state)` goes on from it, exactly, when it was taken at `batch_checkpoint`, `epoch_checkpoint` or
        `iteration_checkpoint`. Outside of a fit it can be put back by `load_checkpoint_state`.

        Raises `CheckpointError` elsewhere in a run, where half of the callbacks have handled an event, and
        `CallbackError` for a callback's state that would not load safely.

        >>> from learnkit.testing import synth_learner
        >>> state = synth_learner().checkpoint_state()
        >>> sorted(state)  # doctest: +NORMALIZE_WHITESPACE
        ['buffers', 'callbacks', 'frozen', 'grads', 'loop', 'loss_func', 'model', 'optimizer', 'position', 'rng',
         'wall_clock']
        """
        if self._depth and not self._place:
            raise CheckpointError('checkpoint_state() in the middle of a run has no place to go on from. Call it at '
                                  'batch_checkpoint, epoch_checkpoint or iteration_checkpoint.')
        return host_copy(whole_state(self._gather(self._place)))

    def load_checkpoint_state(
        self,
        state: Mapping[str, Any],   # from `checkpoint_state`, of this Learner or of one made in the same way
    ) -> None:
        """Put a checkpoint's state into this Learner, outside of a fit; nothing of `state` is shared or changed.

        Weights, optimizers, counters, history, callbacks' states and random generators are then as they were. To train
        on from the very batch, use `fit(n, resume=state)`. Everything is compared before anything changes. Raises
        `WeightsError` with every difference, and `CheckpointError` for what is no such state.
        """
        if self._depth: raise CheckpointError('load_checkpoint_state() inside a run: it would go on with the other '
                                              'state in half of its parts. Call it before `fit`.')
        r = ResumeState(checked(state))
        with ensure_optimizer(self, needed=state['optimizer'] is not None): self._check_fits(r)
        self._load_weights_of(r)
        self._put(r)

    # -- what is in one ------------------------------------------------------------------------------------------------

    def _gather(self, place: str) -> dict[str, Any]:
        "Return the state by reference."
        opt = self.opt
        params = [] if opt is None else list(opt.parameters())
        return {
            **self._what_is_trained(),
            'buffers': _loose_buffers(self.model),
            'grads': {str(i): _in_parts(p.grad) for i, p in enumerate(params) if p.grad is not None},
            'frozen': {'names': [n for n, p in bare_model(self.model).named_parameters() if not p.requires_grad],
                       'frozen_idx': getattr(opt, 'frozen_idx', 0)},
            'loop': self._loop_state(place),
            'rng': capture_rng(),
            'position': self._position(place),
            'callbacks': self.callback_states(),
            'wall_clock': self._wall_clock(),
        }

    def _what_is_trained(self) -> dict[str, Any]:
        opt, loss_func = self.opt, self.loss_func
        return {'model': own_state(self.model),
                'loss_func': own_state(loss_func) if isinstance(loss_func, nn.Module) else None,
                'optimizer': None if opt is None else plain(opt.state_dict(), "The optimizer's state")}

    def _loop_state(self, place: str) -> dict[str, Any]:
        loss = getattr(self, 'loss', None)
        n_drawn = self.iter + 1 if PLACES.get(place) == 'batch' else self._n_drawn
        return {**{name: getattr(self, name) for name in COUNTERS}, 'place': place, 'n_drawn': n_drawn,
                'stage': self._stage, 'n_iter': self.n_iter, 'n_epoch': self.n_epoch, 'stopping': self._stopping,
                'done': dict(self._done),
                'n_steps': getattr(self.opt, 'n_steps', 0), 'seconds': self._finished('sec'),
                'loss': loss.detach() if isinstance(loss, Tensor) else None, 'fitting_size': self._fitting_size,
                'evaluations': self._evaluation_state(before=place in ('within', 'evaluation'))}

    def _position(self, place: str) -> dict[str, Any] | None:
        if place and self._is_stream():
            stream = self._stream
            if stream is None or stream.dl is not self.dls.train:
                return LoaderPosition(self.dls.train).state_dict(0)
            return stream.drawing.state_dict(stream.n)
        last = self._drawing
        if not place or (last is None and PLACES[place] == 'batch'): return None
        if last is None: return LoaderPosition(self.dls.train).state_dict(0)  # nothing was drawn, or in a way of its own
        if PLACES[place] == 'batch': return last.state_dict(self.iter + 1)
        if last.start is None: return last.state_dict(0)  # it stands between epochs already
        return LoaderPosition(self.dls.train, n_before=last.n_before + self._n_drawn).state_dict(0)

    # -- putting one in place ------------------------------------------------------------------------------------------

    def _find_checkpoint(self, resume: Any) -> ResumeState | None:
        "Return the checkpoint that `fit(resume=...)` means, None where the fit is to start afresh."
        if resume is False or resume is None: return None
        if isinstance(resume, ResumeState): return resume
        if isinstance(resume, Mapping): r = ResumeState(checked(resume))
        else:
            folders = [f() for cb in self.cbs if (f := getattr(cb, 'checkpoint_folder', None)) is not None]
            found = find(resume, folders[0] if folders else self.path/'checkpoints', self.world.is_first)
            if found is None: return None
            r = ResumeState(checked(self._with_parts(found[1], found[0]), found[0]), found[0], found[2])
        if not r.loop['place']:
            raise CheckpointError('This state was taken outside of a fit, where there is nothing to go on with: put it '
                                  'back by `learn.load_checkpoint_state(state)`, and fit.')
        return r

    def _with_parts(self, state: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
        "Read the tensors that lie beside a checkpoint's file; where the model is cut, this process's parts of them."
        if 'parts' not in state: return state
        from learnkit.checkpoint.dcp import with_parts  # of checkpoints with such tensors alone
        mesh = mesh_of(bare_model(self.model))
        return with_parts(state, path, None if mesh is None else host_mesh(mesh))

    def _begin_resume(self, r: ResumeState | None) -> None:
        "Load weights and optimizers; the rest follows when the events have fired at which a fit begins."
        self._resumption, self.resumed, self._resumes_at, self._drawing = r, False, 0, None
        if r is None: return
        self._stream = None
        self._check_fits(r)
        self._note_beginning()
        if (position := r.state['position']) is not None: check_position(self.dls.train, position)
        self._load_weights_of(r)
        if r.path is not None and self.logger is not noop: print(f'Going on from {r.path}, {self._what_is_next(r)}')
        self.resumed = True
        if r.at == 'batch': self._resumes_at = r.loop['n_drawn']
        elif r.at == 'evaluation': self._resumes_at = r.loop['n_iter'] or 0
        loop, n = r.loop, r.loop['n_epoch']
        if n != self.n_epoch and not (r.at == 'epoch' and (r.loop['stopping'] or r.loop['epoch'] + 1 == n)):
            warn_user(f'The checkpoint is of a fit of {n or "so many"} epochs, this one has '
                      f'{self.n_epoch or "a budget"}: schedules go on from the share of it that is done.')
        if loop['stopping'] and n and self.n_epoch and self.n_epoch > n:
            warn_user(f'The fit of the checkpoint was stopped in epoch {loop["epoch"]}, and this one ends there, too. '
                      'To train on, put it back by `learn.load_checkpoint_state(state)`, and fit without `resume`.')

    def _what_is_next(self, r: ResumeState) -> str:
        loop, n, i = r.loop, self.n_epoch, r.loop['epoch'] + (r.at == 'epoch')
        if loop['stopping'] or (r.at == 'epoch' and n is not None and i >= n): return f'after epoch {i - 1}, its last.'
        of = f' of {n}' if n else ''
        if r.at == 'epoch': return f'with epoch {i}{of}.'
        batches = f'{loop["n_drawn"]} of {loop["n_iter"]}' if loop['n_iter'] else loop['n_drawn']
        return f'in epoch {i}{of}, after {batches} batches.'

    def _check_fits(self, r: ResumeState) -> None:
        "Raise `WeightsError` with everything that differs; nothing has changed then."
        state = r.state
        self._cover_params_of(state)
        differences = weights_differ(self.model, state['model'])
        if isinstance(self.loss_func, nn.Module) and state['loss_func'] is not None:
            differences += [f'loss_func: {d}' for d in weights_differ(self.loss_func, state['loss_func'])]
        if state['optimizer'] is not None:
            differences += self.opt.differences(state['optimizer'], bare_model(self.model))
        check_weights(r.path or 'The checkpoint', differences, self.model, ' Make model and optimizer as they were.')

    def _cover_params_of(self, state: Mapping[str, Any]) -> None:
        "Let the optimizer take in what a checkpoint's run began to train after its first step."
        if state['optimizer'] is None: return
        own, frozen = set(self.opt.parameters()), set(state['frozen']['names'])
        later = [p for name, p in bare_model(self.model).named_parameters()
                 if name not in frozen and not p.requires_grad and p not in own]
        if not later: return
        for p in later: p.requires_grad_(True)
        self._cover_params()
        for p in later: p.requires_grad_(False)  # until everything is put in place

    def _load_weights_of(self, r: ResumeState) -> None:
        "Load weights and optimizers, and keep those that were there until everything is in place."
        lazy = any(map(is_lazy, (*self.model.parameters(), *self.model.buffers())))  # then there are none yet
        r.before = None if lazy else host_copy(self._what_is_trained())
        self('before_load')
        self._put_weights(r.state)
        self('after_load')

    def _put_weights(self, state: Mapping[str, Any]) -> None:
        load_weights(self.model, state['model'])
        if isinstance(self.loss_func, nn.Module) and state['loss_func'] is not None:
            load_weights(self.loss_func, state['loss_func'])
        if state['optimizer'] is None: return
        # the optimizer's state goes where the parameters are, and they would move in a moment
        move_to_device(self)
        self.opt.load_state_dict(state['optimizer'])

    def _put(self, r: ResumeState) -> None:
        "Put everything in place, random generators last."
        self._end_resume()
        state, loop = r.state, r.loop
        self._put_weights(state)
        _put_loose_buffers(self.model, state.get('buffers', {}))
        self._put_flags(state)
        with self._all_or_nothing(r):
            self._put_counters(loop)
            self.load_callback_states(host_copy(state['callbacks']))
            if r.path is not None: self._read_own_files(r.path.parent)
        r.before = None
        restore_rng(state['rng'])

    def _put_counters(self, loop: Mapping[str, Any]) -> None:
        share, n_epoch = self.pct_train, self.n_epoch if self._depth else loop['n_epoch']
        for name in COUNTERS: setattr(self, name, loop[name])
        self.n_iter, self._n_drawn, self.n_epoch = loop['n_iter'], loop['n_drawn'], n_epoch
        if loop['n_epoch'] != n_epoch: self.pct_train = self._share_of(loop) if n_epoch else share
        self._stopping, self._done, self._fitting_size = loop['stopping'], dict(loop['done']), loop['fitting_size']
        self._load_evaluation_state(loop['evaluations'])
        if self.opt is not None: self.opt.n_steps = loop['n_steps']
        self._seconds = loop['seconds']
        if self._started is not None: self._started = perf_counter()
        if loop['loss'] is not None: self.loss = loop['loss'].to(self._device or 'cpu', copy=True)

    @contextmanager
    def _all_or_nothing(self, r: ResumeState) -> Iterator[None]:
        "If the block fails, put back weights, optimizers, callbacks' states and what was counted over all fits."
        states, done, n_steps = host_copy(self.callback_states()), self._done, getattr(self.opt, 'n_steps', 0)
        try: yield
        except Exception as e:
            if r.path is not None: add_note(e, f'while {r.path} was put in place')
            if r.before is not None: self._put_weights(r.before)
            self._done = done
            if self.opt is not None: self.opt.n_steps = n_steps
            with suppress(Exception): self.load_callback_states(states)  # the first error is the one to tell
            raise

    def _read_own_files(self, folder: Path) -> None:
        "Let callbacks read what they keep in files of their own."
        for cb in self.cbs:
            if read := getattr(cb, 'resume_from_checkpoint', None): read(folder, self.model)

    def _put_flags(self, state: Mapping[str, Any]) -> None:
        "Freeze what was frozen, and give back the gradients that wait for their step."
        opt, frozen = self.opt, set(state['frozen']['names'])
        if opt is not None and opt.frozen_idx != state['frozen']['frozen_idx']:
            opt.freeze_to(state['frozen']['frozen_idx'])
        for name, p in bare_model(self.model).named_parameters(): p.requires_grad_(name not in frozen)
        if opt is None: return
        for i, p in enumerate(opt.parameters()):
            grad = state['grads'].get(str(i))
            p.grad = None if grad is None else distribute_like(_whole(grad), p).to(p.device, copy=True)

    def _share_of(self, loop: Mapping[str, Any]) -> float:
        "Return how much of this fit is done, which has another length than that of the checkpoint."
        assert self.n_epoch
        done = loop['n_drawn'] / loop['n_iter'] if loop['n_iter'] and PLACES[loop['place']] == 'batch' else 1
        return (loop['epoch'] + done) / self.n_epoch


def checked(state: Any, path: Path | None = None) -> Mapping[str, Any]:
    "Return a checkpoint's state if it has all entries; raise `CheckpointError`."
    missing = [e for e in ENTRIES if e not in state] if isinstance(state, Mapping) else list(ENTRIES)
    if not missing: return state
    raise CheckpointError(f'{path or "This state"} is no checkpoint of a Learner: it lacks {", ".join(missing)}. '
                          'Weights alone are loaded by `learn.load(path)`.')


def _loose_buffers(model: nn.Module) -> dict[str, Tensor]:
    "Return the buffers that a state dict leaves out, those that a file can hold."
    return {f'{path}.{name}'.removeprefix('.'): b for path, module in bare_model(model).named_modules()
            for name in module._non_persistent_buffers_set
            if type(b := module._buffers.get(name)) is Tensor and b.layout is torch.strided and not b.is_meta}


def _put_loose_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    modules = dict(bare_model(model).named_modules())
    for place, value in buffers.items():
        path, _, name = place.rpartition('.')
        if path not in modules or name not in modules[path]._buffers: continue
        there = modules[path]._buffers[name]
        if there is None: modules[path]._buffers[name] = value.to(model_device(modules[path], None), copy=True)
        elif there.shape != value.shape or there.dtype != value.dtype:
            modules[path]._buffers[name] = value.to(there.device, copy=True)
        elif not torch.equal(there.cpu(), value): there.copy_(value)  # constants may be views, or shared


def _in_parts(grad: Tensor) -> Tensor | dict[str, Any]:
    "Return a gradient as a file can hold it: a sparse one as its indices and values."
    if not grad.is_sparse: return grad
    return {'indices': grad._indices(), 'values': grad._values(), 'size': list(grad.shape)}


def _whole(grad: Tensor | dict[str, Any]) -> Tensor:
    if isinstance(grad, Tensor): return grad
    return torch.sparse_coo_tensor(grad['indices'], grad['values'], grad['size'], check_invariants=True)


def host_copy(state: Any, buffers: dict[str, Tensor] | None = None) -> Any:
    """Return a nested state with its tensors copied to host memory; what shares memory is copied once.

    Tensors of the last copy that fit are filled again, where `buffers` is given and kept from call to call.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    copies: dict[Any, Tensor] = {}
    buffers = {} if buffers is None else buffers

    def copy(value: Any, where: str) -> Any:
        if type(value) is int:  # the state of Python's random generator has 625
            return value
        if is_dtensor(value): return on_host(value, copy(local(value), where))
        if isinstance(value, Tensor):
            value = value.detach()
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
            if value.numel() and key in copies: return copies[key]
            new = buffers.get(where)
            if new is None or new.shape != value.shape or new.dtype != value.dtype:
                new = torch.empty_like(value, device='cpu', pin_memory=value.is_cuda)
            buffers[where] = copies[key] = new
            pairs.append((new, value))
            return new
        if isinstance(value, Mapping): return {k: copy(v, f'{where}.{k}') for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(copy(v, f'{where}.{i}') for i, v in enumerate(value))
        return value

    copied = copy(state, '')
    if pairs:
        with torch.no_grad(): torch._foreach_copy_([new for new, _ in pairs], [t for _, t in pairs], non_blocking=True)
        if any(t.is_cuda for _, t in pairs): torch.cuda.synchronize()  # once, not for each of them
    return copied
