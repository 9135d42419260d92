# SPDX-License-Identifier: Apache-2.0
"""Traits: attributes and optional methods of callbacks that one feature of the package asks for.

Each trait is declared here once, with its default and the feature that asks for it. `trait_of` reads a trait, and
raises `KeyError` for a name that is not declared."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


@dataclass(frozen=True)
class Trait:
    "An attribute or optional method of a callback."

    name: str
    heading: str  # name, of a method with its parameters
    default: Any  # value for a callback that does not define it; None for a method
    asked_by: str  # feature that asks for it
    meaning: str
    is_public: bool  # whether the documentation lists it


# name and parameters | default | feature that asks | meaning; the documentation lists those with a star
_TABLE = """
* receive_log(name, value, weight, shown) | None | `learn.log` | receives the arguments of `learn.log`
* receive_images(name, images) | None | `ImageVisualizer` | receives the images that a callback logs
  log_images(step, name, images) | None | `ImageVisualizer` | the same, of a callback without `receive_images`
* will_step() | None | the loop, DDP | False if the batch ends without a step; its gradients are kept for the next one
  samples_per_step(bs) | None | a resume with other ranks | number of samples of a step, of batches of `bs` samples
  needs_events | True | custom loops | a warning names the callback if its events do not fire
  reads_train_metrics | False | the Recorder | it reads the metrics of training batches, which may have no column
  sets_lr | False | `ParamScheduler` | it sets the learning rate
* compiled_step() | None | `compile(step=True)` | functions of tensors that a compiled step calls in place of handlers
  draws_for_batch | False | a repeated batch | it draws random numbers between the draw of a batch and its forward pass
  clip_step_gradients() | None | optimizers with a closure | clips the gradients, also of each evaluation within a step
  needs_whole | '' | strategy 'fsdp' | 'weights' or 'layers': it reads them whole, and is refused if they are divided
* remove_on_find | False | `lr_find`, `find_batch_size`, `replay` | it is removed during `lr_find`
* remove_on_fetch | False | `FetchPredsCallback` | it is removed while `FetchPredsCallback` predicts
  writes_files | False | `rewind`, `check_resume`, mirrors | it writes files, and is left out where training is repeated
  needed_to_rewind | True | `rewind` | a rewound run must have it
  logs_to_service | False | mirrors | a service keeps what it writes
  where() | None | mirrors | the place that it writes to
  on_added() | None | `add_cb` | called when it is added
  on_removed() | None | `remove_cb` | called before it is removed
  on_run_failed() | None | runs | called when an evaluation within a run fails
  on_weights_restored() | None | strategy 'fsdp' | called when the model's weights were lost with a failed rank
* nondeterministic_state | () | comparisons of runs | entries of its state that measure time
* machine_dependent | False | comparisons of runs | its columns of the history differ from machine to machine
  saved_of_model() | None | the rehearsal | names of the model's attributes that its state holds
"""


def _parse_row(row: str) -> Trait:
    heading, default, asked_by, meaning = (cell.strip() for cell in row[2:].split('|'))
    name = heading.partition('(')[0]
    return Trait(name, heading, literal_eval(default), asked_by, meaning, row.startswith('*'))


TRAITS = {trait.name: trait for trait in map(_parse_row, _TABLE.strip('\n').splitlines())}


def trait_of(cb: object, name: str) -> Any:
    """Return a trait of a callback, of this package or of fastai; the Learner's attributes are not searched.

    Raises `KeyError` for a trait that is not declared in `TRAITS`.

    >>> class Quick: remove_on_find = True
    >>> trait_of(Quick(), 'remove_on_find'), trait_of(Quick(), 'nondeterministic_state')
    (True, ())
    """
    return own_attribute(cb, name, TRAITS[name].default)


def own_attribute(cb: object, name: str, default: Any = None) -> Any:
    "Return an attribute that a callback or its class defines; the Learner's attributes are not searched."
    is_own = name in getattr(cb, '__dict__', {}) or hasattr(type(cb), name)
    # raising an AttributeError takes several times as long as the question
    return object.__getattribute__(cb, name) if is_own else default


def trait_like(
    name: str,
    others: Sequence[str] = (),  # further names that may be meant
) -> str | None:
    """Return the public trait that a slightly different name means, or None.

    >>> [trait_like(name) for name in ('remove_on_fnd', 'recieve_log', 'remove_on_find', 'find_logs')]
    ['remove_on_find', 'receive_log', None, None]
    """
    if name in TRAITS or name in others:
        return None
    public = [trait.name for trait in TRAITS.values() if trait.is_public]
    close = get_close_matches(name, [*public, *others], n=1, cutoff=0.9)
    return close[0] if close else None


def traits_markdown() -> str:
    "Return the public traits as a Markdown table, which `docs/lifecycle.md` contains."
    rows = [
        f'| `{trait.heading}` | {trait.meaning} | {trait.asked_by} |'
        for trait in TRAITS.values()
        if trait.is_public
    ]
    return '\n'.join(['| name | meaning | asked for by |', '|---|---|---|', *rows, ''])
