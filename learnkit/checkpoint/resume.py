# SPDX-License-Identifier: Apache-2.0
"""Find a checkpoint, and restore it, so that training resumes exactly.

`fit(resume=...)` takes these steps:

1. `find_checkpoint` finds a checkpoint (`checkpoint/folder.py`), and reads and verifies it (`checkpoint/file.py`).
2. `begin_resume` compares weights and optimizers with the Learner's, and loads them (`checkpoint/weights.py`).
3. The fit begins, and the loop skips to the epoch and the batch of the checkpoint (`engine/resumed_run.py`).
4. `restore_state` restores everything there: weights again, counters, callbacks (`engine/callback_state.py`),
   the files of callbacks, and random generators last.

If the fit ends before that, `resumed` restores everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fastcore.basics import noop
from torch import Tensor
from torch.nn.parameter import is_lazy

from learnkit.checkpoint.buffers import add_buffers, restore_loose_buffers
from learnkit.checkpoint.dcp import load_shards
from learnkit.checkpoint.folder import find, read_own_files
from learnkit.checkpoint.host import copy_to_host
from learnkit.checkpoint.optimizer_state import decode_optimizer
from learnkit.checkpoint.save_load import ensure_optimizer
from learnkit.checkpoint.schema import check_state
from learnkit.checkpoint.weights import (
    Stored,
    add_frozen_weights,
    check_weights,
    compare_stored,
    load_stored,
)
from learnkit.comm.dtensor import distribute_like, find_reading_mesh
from learnkit.core.errors import CheckpointError, add_note
from learnkit.core.model import bare_model
from learnkit.core.random import restore_own, restore_rng
from learnkit.core.validation import warn_user
from learnkit.data.position import count_in_batches, describe_drawn, warn_of_missing_generators
from learnkit.data.shard import Shard
from learnkit.engine.callback_state import load_states, warn_of_changed_callbacks
from learnkit.engine.fields import SAVED
from learnkit.engine.optimizer import cover_params
from learnkit.engine.pause import PausedState
from learnkit.engine.resumed_run import (
    SAVE_POINTS,
    ResumeState,
    find_checkpoint_folder,
    list_checkpoint_folders,
    list_checkpoint_writers,
)
from learnkit.engine.snapshot import restored
from learnkit.engine.stopper import ask_stoppers

if TYPE_CHECKING:
    from learnkit.learner import Learner
from learnkit.checkpoint.state import list_owners, samples_per_step


def load_checkpoint_state(learn: Learner, *, state: Mapping[str, Any]) -> None:
    "Restore a checkpoint's state outside of a fit. `state` is copied, not modified."
    if learn.run.depth:
        raise CheckpointError(
            'load_checkpoint_state() inside a run: the run would continue with the other '
            'state in half of its parts. Call it before `fit`.'
        )
    state = add_frozen_weights(learn.model, check_state(state))
    r = learn.parts.processes.take_own_state(learn, ResumeState(state, restore_state))
    has_opt = ensure_optimizer(learn, needed=state['optimizer'] is not None)
    with has_opt, restored(learn, on_host=True) as before:
        _check_fits(learn, r)
        _load_weights(learn, r)
        restore_state(learn, r)
        before.pop_all()  # nothing is restored without an error
    if learn.opt is not None:
        learn.opt.last_lrs = learn.opt.lrs  # no rates that the user has set for the next fit


def find_checkpoint(learn: Learner, resume: Any) -> ResumeState | None:
    "Return the checkpoint for `fit(resume=...)`; None if the fit starts from the beginning."
    if hasattr(resume, 'begin_branch'):  # a `Moment` of `learn.rewind`
        resume = resume.begin_branch(learn)
    r: ResumeState | None = learn.parts.processes.find_checkpoint(
        learn, resume, partial(_find_on_rank, learn)
    )
    return r


def _find_on_rank(learn: Learner, resume: Any) -> ResumeState | None:
    "Return this rank's checkpoint for `fit(resume=...)`."
    if resume is False or resume is None:
        return None
    if isinstance(resume, ResumeState):
        return resume
    if isinstance(resume, Mapping):
        r = ResumeState(check_state(resume), restore_state)
    else:
        folder = find_checkpoint_folder(learn)
        mirrors = [cb.mirror for cb in list_checkpoint_writers(learn)]
        found = find(resume, folder, mirrors[0] if mirrors else None)
        if found is None:
            if not list_checkpoint_folders(learn):
                warn_user(
                    f'resume={resume!r}: {folder.absolute()} has no checkpoint, and no callback writes one. The fit '
                    'starts from the beginning: add `Checkpoint()` to the callbacks.'
                )
            learn.run.starts_over = not learn.parts.counters.batches
            return None
        path, state, info = found
        state = load_shards(state, path, find_reading_mesh(bare_model(learn.model)))
        state = check_state(state, path)
        r = ResumeState(state, restore_state, path, info, is_owner=True)
    if not r.loop['point']:
        raise CheckpointError(
            'This state was taken outside of a fit, so there is nothing to resume: restore it with '
            '`learn.load_checkpoint_state(state)`, and fit.'
        )
    return r


@contextmanager
def resumed(learn: Learner, r: ResumeState) -> Iterator[None]:
    """Resume a fit within a context.

    After an error before the end of the first batch, and after a Cancel exception before the checkpoint is restored,
    everything is as it was before the fit. A paused fit is resumed in memory: it changes nothing before that.
    """
    if isinstance(r, PausedState):
        r.begin(learn, r)
        yield
        return
    before = r.before = restored(learn, on_host=True)
    try:
        begin_resume(learn, r)
        yield
        if learn.run.resuming is None:
            r.keep()
        else:
            warn_user(
                'The fit was cancelled before its checkpoint was restored: weights, counters and callbacks are as '
                'they were before the fit.'
            )
    except Exception as e:
        if r.before is not None and r.path is not None:
            add_note(e, f'while the fit resumed from {r.path}: everything is as it was before')
        raise
    finally:
        if r.before is not None:
            r.before = None
            before.close()


def begin_resume(learn: Learner, resume: ResumeState) -> None:
    "Load weights and optimizers; `restore_state` loads the rest after the first events of the fit."
    resume.state = add_frozen_weights(learn.model, resume.state, resume.path)
    r = learn.run.resuming = learn.parts.processes.take_own_state(learn, resume)
    _check_fits(learn, r)
    fit_position(learn, r)
    _load_weights(learn, r)
    if r.path is not None and learn.logger is not noop:
        print(f'Resuming from {r.path}, {_describe_next(learn, r)}')
    learn.resumed = True
    if r.point == 'batch':
        r.next_batch = r.loop['n_drawn']
    _warn_of_differences(learn, r)


def fit_position(learn: Learner, r: ResumeState) -> None:
    """Count the position in batches of this run, which may have another size if a step has as many samples.

    Raises `CheckpointError` if the data cannot be resumed by these processes."""
    saved = r.state['position']
    if saved is None:
        return
    n_saved, n = len(r.state.get('processes', [{}])), learn.world.data_size
    was_split = n_saved == 1 or saved['ranks'] != 1
    is_split = n == 1 or isinstance(learn.dls.train, Shard)
    if r.point == 'batch' and n_saved != n and not (was_split and is_split):
        raise CheckpointError(
            f'The checkpoint was taken within an epoch of {n_saved} processes, now {n}, and each process '
            f'loads its own data: start {n_saved}, or resume from the end of an epoch.'
        )
    step = samples_per_step(learn)
    position = count_in_batches(learn.dls.train, saved, step is not None and step == r.loop['step'])
    if r.point != 'batch' or position is saved:
        r.state = {**r.state, 'position': position}
        return
    if r.state['grads']:
        raise CheckpointError(
            'The checkpoint was taken between two batches of one step, and batches have another size now: keep the '
            'size, or take checkpoints between steps, `Checkpoint(every="100st")`.'
        )
    move_loop(r, position)


def move_loop(
    r: ResumeState,
    position: Mapping[str, Any],  # the position in the data, in batches of another size
) -> None:
    "Count the batches of the epoch as a position in the data does, whose share of the epoch is the same."
    n_drawn, n_iter = position['n'], position['drawn']['batches']
    loop = {**r.loop, 'n_drawn': n_drawn, 'iter': n_drawn - 1, 'n_iter': n_iter, 'length': None}
    if loop['n_epoch']:
        loop['pct_train'] = (loop['epoch'] + min(1.0, n_drawn / n_iter)) / loop['n_epoch']
    r.state = {**r.state, 'position': position, 'loop': loop}


def _warn_of_differences(learn: Learner, r: ResumeState) -> None:
    "Warn if the fit has another length, or another number of ranks, than the fit that it resumes."
    loop = r.loop
    n = loop['n_epoch']
    was_over = r.point == 'epoch' and (loop['stopping'] or loop['epoch'] + 1 == n)
    if n != learn.n_epoch and not was_over:
        warn_user(
            f'The checkpoint is of a fit of {n or "so many"} epochs, this one has '
            f'{learn.n_epoch or "a budget"}: schedules continue from the finished share.'
        )
    n_processes = len(r.state.get('processes', [{}]))
    n_now = learn.world.data_size
    if r.point == 'epoch' or n_processes == n_now:
        return
    sizes = describe_drawn(learn.dls.train)
    if sizes['batches'] is None and sizes['batch size'] is None:
        warn_user(
            f'The batch size of {sizes["type"]} is not known. {n_now} processes resume exactly only if a '
            f'batch of all has as many samples as of {n_processes}.'
        )
    warn_user(
        f'The checkpoint is of {n_processes} processes, this run has {n_now}: the metrics of this epoch '
        "so far are the first process's."
    )


def _warn_of_stop(learn: Learner, r: ResumeState) -> None:
    "Warn if a longer fit ends at once, because the fit of the checkpoint was stopped."
    n = r.loop['n_epoch']
    if learn.run.stopping and learn.run.depth and n and learn.n_epoch and learn.n_epoch > n:
        warn_user(
            f'The fit of the checkpoint was stopped in epoch {r.loop["epoch"]}, and this one ends there, too. To '
            'continue, set more patience or a later limit in the callback that stopped it; or restore the state with '
            '`learn.load_checkpoint_state(state)`, and fit without `resume`.'
        )


def _describe_next(learn: Learner, r: ResumeState) -> str:
    "Describe the epoch and batch at which a resumed fit starts."
    loop = r.loop
    n = learn.n_epoch
    total = f' of {n}' if n else ''
    if r.point == 'batch':
        n_iter = f' of {loop["n_iter"]}' if loop['n_iter'] else ''
        return f'in epoch {loop["epoch"]}{total}, after {loop["n_drawn"]}{n_iter} batches.'
    if loop['stopping']:
        return f'after epoch {loop["epoch"]}, in which it was stopped.'
    if loop['epoch'] + 1 == n:
        return f'after epoch {loop["epoch"]}, its last.'
    return f'with epoch {loop["epoch"] + 1}{total}.'


def _check_fits(learn: Learner, r: ResumeState) -> None:
    "Raise `WeightsError` with every difference, before anything has changed."
    _add_unfrozen_params(learn, r.state)
    add_buffers(learn.model, r.state['model'], r.state['persistent'])
    differences = compare_stored(learn, _find_trained(r.state))
    if not differences and learn.opt is not None:
        differences = _compare_grads(list(learn.opt.parameters()), r.state['grads'])
    source = r.path or 'The checkpoint'
    check_weights(source, differences, learn.model, ' Make model and optimizer as they were.')


def _compare_grads(params: list[Tensor], grads: Mapping[str, Any]) -> list[str]:
    "Return a line for each accumulated gradient that fits no parameter; a lazy one gets its shape when it is loaded."
    shapes = {str(i): p.shape for i, p in enumerate(params) if not is_lazy(p)}
    lazy = {str(i) for i, p in enumerate(params) if is_lazy(p)}
    return [
        f'gradient: {i} is{list(grad.shape)}, for a parameter {list(shapes[i]) if i in shapes else "that is not there"}'
        for i, grad in grads.items()
        if i not in lazy and (i not in shapes or grad.shape != shapes[i])
    ]


def _add_unfrozen_params(learn: Learner, state: Mapping[str, Any]) -> None:
    "Add to the optimizer the parameters that the checkpoint's run has unfrozen after its first step."
    if state['optimizer'] is None:
        return
    optimized = set(learn.opt.parameters())
    others = {*state['frozen']['names'], *state['frozen']['left_out']}
    unfrozen = [
        p
        for name, p in bare_model(learn.model).named_parameters()
        if name not in others and not p.requires_grad and p not in optimized
    ]
    if not unfrozen:
        return
    for p in unfrozen:
        p.requires_grad_(True)
    cover_params(learn)
    for p in unfrozen:
        p.requires_grad_(False)  # `_restore_flags` sets the flags


def _load_weights(learn: Learner, r: ResumeState) -> None:
    "Load weights and optimizers, between the events of a load."
    learn('before_load')
    load_stored(learn, _find_trained(r.state))
    learn('after_load')


def _find_trained(state: Mapping[str, Any]) -> Stored:
    "Return the states of the model, the optimizer and the loss function in a checkpoint."
    return Stored(state['model'], decode_optimizer(state['optimizer']), state['loss_func'])


def restore_state(learn: Learner, resume: ResumeState) -> None:
    """Restore all state, random generators last. Afterwards `resume` holds no large tensors.

    If nothing else refers to the tensors of the state, the optimizers use them as their own.
    """
    learn.run.resuming = None
    learn.resumed = False
    state = resume.state
    load_stored(learn, _find_trained(state), copy=not resume.is_owner)
    restore_loose_buffers(learn.model, state['buffers'])
    restore_loose_buffers(learn.loss_func, state['loss_buffers'])
    _restore_flags(learn, state)
    _restore_counters(learn, resume.loop)
    _load_callbacks(learn, resume)
    ask_stoppers(learn)
    _warn_of_stop(learn, resume)
    if resume.path is not None:
        read_own_files(learn, resume.path)
    restore_rng(state['rng'])
    for name, owner in list_owners(learn):
        missing = restore_own(owner, state['generators'].get(name, {}))
        warn_of_missing_generators(name, missing)
    learn.parts.processes.after_restore(learn, resume)
    # a fit holds `resume` until its end
    resume.state = {
        **state,
        'model': {},
        'loss_func': None,
        'optimizer': None,
        'callbacks': {},
        'grads': {},
    }


def _load_callbacks(learn: Learner, resume: ResumeState) -> None:
    "Load the callbacks' states; warn once of callbacks that were added or removed since a file was written."
    states = copy_to_host(resume.state['callbacks'])
    names = resume.info.get('callback_names')
    if names is None:
        learn.load_callback_states(states)
        return
    warn_of_changed_callbacks(learn, names)
    load_states(learn, states)


def _restore_counters(learn: Learner, loop: Mapping[str, Any]) -> None:
    "Restore the counters of the loop, but not the length of the fit; compute the completed share from this length."
    counters = learn.parts.counters
    lengths = learn.parts.lengths
    pct_train = learn.pct_train
    n_epoch = learn.n_epoch if learn.run.depth else loop['n_epoch']
    for name in SAVED:
        setattr(learn, name, loop[name])
    learn.n_iter = loop['n_iter']
    lengths.correct(learn.dls.train, loop['length'])
    lengths.usual = loop['usual_length']
    lengths.was_resumed = True
    learn.parts.positions.n_drawn = loop['n_drawn']
    learn.n_epoch = n_epoch
    if loop['n_epoch'] != n_epoch:
        learn.pct_train = pct_train
        if n_epoch:
            is_within = loop['n_iter'] and SAVE_POINTS[loop['point']] == 'batch'
            epoch_share = min(1.0, loop['n_drawn'] / loop['n_iter']) if is_within else 1.0
            learn.pct_train = (loop['epoch'] + epoch_share) / n_epoch
    learn.run.stopping = loop['stopping']
    counters.load_units(loop['done'])
    learn.parts.microbatches.fitting_size = loop['fitting_size']
    learn.parts.evaluations.load_state_dict(loop['evaluations'])
    if learn.opt is not None:
        learn.opt.n_steps = loop['n_steps']
    counters.seconds = loop['seconds']
    if counters.fit_began is not None:
        counters.fit_began = perf_counter()
    if loop['loss'] is not None:
        learn.loss = loop['loss'].to(learn.run.batch_device or 'cpu', copy=True)


def _restore_flags(learn: Learner, state: Mapping[str, Any]) -> None:
    "Restore the frozen parameters, and the gradients that were accumulated but not yet used for a step."
    opt = learn.opt
    frozen = set(state['frozen']['names'])
    if opt is not None and opt.frozen_idx != state['frozen']['frozen_idx']:
        opt.freeze_to(state['frozen']['frozen_idx'])
    for name, p in bare_model(learn.model).named_parameters():
        p.requires_grad_(name not in frozen)
    if opt is None:
        return
    for i, p in enumerate(opt.parameters()):
        grad = state['grads'].get(str(i))
        p.grad = None if grad is None else distribute_like(grad, p).to(p.device, copy=True)
