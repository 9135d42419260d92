# SPDX-License-Identifier: Apache-2.0
"""Rehearse a resume at the first checkpoint of a fit: find what has changed since its start and no checkpoint holds.

A resumed process makes its objects as they were before the fit's first batch. An attribute that differs now, and that
the state does not contain, would be lost. Attributes are compared by their fingerprints (`checkpoint/fingerprint.py`);
an attribute whose content cannot be read, such as an iterator, is always named. docs/checkpoints.md lists what is not
looked at."""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn, optim
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.data import DataLoader, Dataset

from learnkit.checkpoint.digest import digest
from learnkit.checkpoint.fingerprint import (
    COMPUTED,
    UNREADABLE,
    Entries,
    Fingerprints,
    Held,
    Mark,
    class_attributes,
    is_empty,
    is_function,
    is_installed,
    is_iterator,
    is_plain,
)
from learnkit.checkpoint.optimizer_state import list_left_out
from learnkit.core.errors import OptionError
from learnkit.core.model import bare_model, has_extra_state
from learnkit.core.plain import own_attributes, to_plain
from learnkit.core.random import MODULE_INTERNALS, OPTIMIZER_INTERNALS, own_generators, state_setter
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.loader_state import LISTS, NUMBERS, find_own_parts, find_parts
from learnkit.data.shard import unshard
from learnkit.data.torch_loader import belongs_to_sampler
from learnkit.engine.callback_state import keeps_attributes, unsaved_attributes
from learnkit.engine.traits import trait_of

if TYPE_CHECKING:
    from learnkit.learner import Learner

# by the name of an attribute: its fingerprint, and what to do
Inventory = dict[str, tuple[Mark, str]]

SUMMARY = (
    'These attributes changed since the fit began and are not saved; a resumed run would lose them:'
)

_IN_MODULE = 'make it a buffer, or save it by `get_extra_state`'
_IN_MODULE_TENSOR = f'harmless if each forward pass computes it again; else {_IN_MODULE}'
_IN_HOOK = 'keep it in a buffer of the module'
_IN_DATA = 'safe to ignore if it is only a cache'
_IN_CALLBACK = 'define `state_dict` and `load_state_dict` in the callback'
_IN_LOSS = 'make the loss an `nn.Module`, and this a buffer of it'
_IN_LEARNER = 'keep it in a callback, as an attribute'
_IN_OPTIMIZER = "keep it in the optimizer's `state` or `param_groups`"
_IN_SAMPLER = 'harmless if each pass makes it again; else keep it as a number, or in a callback'
# methods by which the class of a module saves more than parameters and buffers
_SAVERS = ('get_extra_state', '_save_to_state_dict', 'state_dict')
_LAZY = 'lazy'  # mark of a module that gets its sizes at the first batch
_BY_RANK = 'it differs by rank, and every rank of a resumed run gets the value of the first'
_ABSENT: tuple[Mark, str] = (None, '')
# attributes that torch itself sets on a loader
_LOADER_NAMES = frozenset(vars(DataLoader(cast('Dataset[Any]', [0]))))


def take_inventory(learn: Learner) -> Inventory:
    "Return a fingerprint of each attribute that no checkpoint holds, by its name."
    held = _find_held(learn)
    loss = learn.loss_func
    found = _list_module(bare_model(learn.model), 'model', held)
    if isinstance(loss, nn.Module):
        found |= _list_module(loss, 'loss_func', held)
    elif loss is not None and id(getattr(loss, '__self__', None)) not in held.ids:
        # a callback sets its own method again, as fastai's MixUp does
        found['loss_func'] = Fingerprints(held).mark(loss), _IN_LOSS
    found |= _list_data(learn.dls.train, held)
    found |= _list_learner(learn, held)
    for opt in getattr(learn.opt, 'optimizers', {}).values():
        found |= _list_optimizer(opt, held)
    for cb in learn.cbs:
        found |= _list_callback(cb, held)
    for cb in learn.cbs:
        for name in (trait_of(cb, 'saved_of_model') or tuple)():
            found.pop(name, None)
    return found


def list_data(learn: Learner) -> Inventory:
    "Return a fingerprint of each attribute of the training loader and its parts that no checkpoint holds."
    return _list_data(learn.dls.train, _find_held(learn))


def find_rank_states(learn: Learner) -> list[str]:
    "Return a line for each extra state of the model that differs by rank: a checkpoint has the first rank's."
    if learn.world.size == 1:
        return []
    own = {
        _join('model', name, 'get_extra_state'): _digest_extra_state(module)
        for name, module in bare_model(learn.model).named_modules()
        if has_extra_state(module)
    }
    of_ranks = learn.world.gather(own, 'extra state') if own else []
    places = [place for place in own if len({states.get(place) for states in of_ranks}) > 1]
    return [f'{place}: {_BY_RANK}' for place in places]


def _join(*names: str) -> str:
    "Return a path of attributes; the root's own name is empty."
    return '.'.join(filter(None, names))


def _digest_extra_state(module: nn.Module) -> str | None:
    try:
        return digest(to_plain(module.get_extra_state(), 'extra state'))
    except OptionError:
        return None  # no checkpoint can have it


def find_lost(before: Inventory, now: Inventory) -> list[str]:
    "Return a line for each attribute that has changed, is new or cannot be read, with what to do."
    lost = []
    for name, (mark, fix) in now.items():
        first = before.get(name, _ABSENT)[0]
        if mark == UNREADABLE:
            lost.append(f'{name}: its content cannot be read; {fix}')
        elif mark != first and not _is_made_again(name, first, mark, fix, before):
            lost.append(f'{name}: {fix}')
    return lost


def note_computed(before: Inventory, now: Inventory) -> Inventory:
    "Return an inventory in which the results of the latest forward pass, which have a graph now, are marked as such."
    return before | {name: entry for name, entry in now.items() if entry[0] == COMPUTED}


def _is_made_again(name: str, first: Mark, now: Mark, fix: str, before: Inventory) -> bool:
    "Return True for a changed attribute that a resumed run recreates."
    if COMPUTED in (first, now) or before.get(name.rpartition('.')[0], _ABSENT)[0] == _LAZY:
        return True
    if isinstance(first, Entries) and isinstance(now, Entries):
        return first.entries <= now.entries  # a cache has grown
    is_new = first in (None, Fingerprints().mark(None))
    # such as a progress bar, a list that a hook empties again, the order of a sampler's pass
    return is_new and (is_empty(now) or fix == _IN_SAMPLER)


def _find_held(learn: Learner) -> Held:
    "Return what checkpoints hold, and what is listed separately."
    loss = learn.loss_func
    roots = [m for m in (learn.model, loss) if isinstance(m, nn.Module)]
    weights = [t for m in roots for t in (*m.parameters(), *m.buffers())]
    loaders = [learn.dls.train, *(dl for _, dl in evaluation_loaders(learn.dls))]
    datasets = [getattr(dl, 'dataset', dl) for dl in loaders]
    source = unshard(loaders[0])
    samplers = [part for place, part in find_parts(source) if belongs_to_sampler(place)]
    restored = [*roots, source]
    generators = [g for owner in restored for g in own_generators(owner).values()]
    optimizers = [learn.opt, *getattr(learn.opt, 'optimizers', {}).values()]
    modules = [part for m in roots for part in m.modules()]
    objects = [learn, learn.dls, *modules, *weights, *loaders, *datasets, *samplers, *learn.cbs]
    return Held([*objects, *generators, *optimizers], weights)


# -- owners of attributes --------------------------------------------------------------------------


def _list_module(module: nn.Module, root: str, held: Held) -> Inventory:
    "Return the attributes of a module and its parts, without parameters, buffers and modules, and their hooks."
    found: Inventory = {}
    for path, m in module.named_modules():
        place = _join(root, path)
        found |= _list_hooks(m, place, held)
        if isinstance(m, LazyModuleMixin):
            found[place] = _LAZY, ''
        elif not is_installed(type(m)) and not _saves_itself(m):
            found |= _list_class(type(m), _IN_MODULE, held)
            for name, value in own_attributes(m).items():
                if state_setter(value) is not None:
                    found[f'{place}.{name}'] = '', 'make the generator in `__init__`'
                elif name not in MODULE_INTERNALS:
                    fix = _IN_MODULE_TENSOR if isinstance(value, Tensor) else _IN_MODULE
                    found[f'{place}.{name}'] = Fingerprints(held).mark(value), fix
    return found


def _saves_itself(module: nn.Module) -> bool:
    "Return True for a class that adds to the module's state dict by one of the methods for it."
    return any(getattr(type(module), name) is not getattr(nn.Module, name) for name in _SAVERS)


def _list_hooks(module: nn.Module, place: str, held: Held) -> Inventory:
    "Return the hooks of a module; tensors that they keep are of the latest batch, mostly."
    found: Inventory = {}
    for name in MODULE_INTERNALS:
        entries = vars(module).get(name)
        hooks = [f for f in entries.values() if callable(f)] if isinstance(entries, dict) else []
        if hooks and not isinstance(hooks[0], nn.Module):
            mark = Fingerprints(held, with_tensors=False).mark(hooks)
            found[f'{place}.{name}'] = mark, _IN_HOOK
    return found


def _list_data(dl: Any, held: Held) -> Inventory:
    "Return the attributes of the data set, the collate function, the samplers and a loader of the user's."
    dl = unshard(dl)
    if hasattr(type(dl), 'load_state_dict'):
        return {}
    found: Inventory = {}
    for place, part in find_parts(dl):
        if belongs_to_sampler(place):
            found |= _list_sampler(part, place, held)
    parts = find_own_parts(dl)
    counted = {id(part) for _, part in parts}
    owners = {'': dl, **{name: getattr(dl, name, None) for name in ('dataset', 'collate_fn')}}
    owners |= {path: part for path, part in parts if _is_entry(path)}
    for path, owner in owners.items():
        place = _join('training loader', path)
        if is_function(owner):
            found[place] = Fingerprints(held).mark(owner), _IN_DATA
        elif not is_installed(type(owner)):
            found |= _list_class(type(owner), _IN_DATA, held)
            for name, value in own_attributes(owner).items():
                is_restored = id(owner) in counted and type(value) in NUMBERS
                is_cache = isinstance(getattr(type(owner), name, None), cached_property)
                if not is_restored and not is_cache and name not in (*_LOADER_NAMES, *LISTS):
                    found[f'{place}.{name}'] = _mark_of_data(value, held), _IN_DATA
    return found


def _is_entry(path: str) -> bool:
    "Return True for the path of an entry of a list of data sets or stages."
    return path.rpartition('.')[2].isdigit() and not belongs_to_sampler(path)


def _mark_of_data(value: Any, held: Held) -> Mark:
    marks = Fingerprints(held)
    return marks.mark_cache(value) if type(value) is dict else marks.mark(value)


def _list_sampler(sampler: Any, place: str, held: Held) -> Inventory:
    "Return the attributes of a sampler, without numbers and generators, which are restored."
    found = _list_class(type(sampler), _IN_SAMPLER, held)
    for name, value in own_attributes(sampler).items():
        if type(value) not in NUMBERS:
            found[f'{place}.{name}'] = Fingerprints(held).mark(value), _IN_SAMPLER
    return found


def _list_learner(learn: Learner, held: Held) -> Inventory:
    "Return what the user's code keeps in the Learner; a tensor is the batch's, mostly."
    of_classes = [name for base in type(learn).__mro__ if is_installed(base) for name in vars(base)]
    known = learn.own_names.union(of_classes)
    return _list_class(type(learn), _IN_LEARNER, held) | _list_plain(
        learn, 'learn', known, _IN_LEARNER, held
    )


def _list_optimizer(opt: Any, held: Held) -> Inventory:
    "Return the attributes of an optimizer, and what its state leaves out."
    name = type(opt).__name__
    found: Inventory = {}
    # an optimizer with its own `state_dict` saves its attributes
    if not is_installed(type(opt)) and type(opt).state_dict is optim.Optimizer.state_dict:
        found |= _list_class(type(opt), _IN_OPTIMIZER, held)
        found |= _list_plain(opt, name, OPTIMIZER_INTERNALS, _IN_OPTIMIZER, held)
    for place, value in list_left_out(opt.state_dict()):
        found[f'{name}.{place}'] = Fingerprints(held).mark(value), _IN_OPTIMIZER
    return found


def _list_callback(cb: Any, held: Held) -> Inventory:
    "Return the attributes of a callback that its state does not contain, and the attributes of its class."
    found = _list_class(type(cb), _IN_CALLBACK, held)
    if keeps_attributes(cb):
        for name, value in unsaved_attributes(cb).items():
            restored = Held([*own_generators([value]).values()])
            mark = Fingerprints(held | restored).mark(value)
            found[f'{type(cb).__name__}.{name}'] = mark, _IN_CALLBACK
    return found


def _list_plain(owner: Any, place: str, known: Container[str], fix: str, held: Held) -> Inventory:
    "Return the attributes that are plain data or iterators."
    own = {k: v for k, v in own_attributes(owner).items() if k not in known and k[0] != '_'}
    return {
        f'{place}.{name}': (Fingerprints(held).mark(value), fix)
        for name, value in own.items()
        if is_plain(value) or is_iterator(value)
    }


def _list_class(kind: type, fix: str, held: Held) -> Inventory:
    "Return the attributes of the user's classes."
    return {
        f'{kind.__name__}.{name}': (Fingerprints(held).mark(value), fix)
        for name, value in class_attributes(kind).items()
    }
