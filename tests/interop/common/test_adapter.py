"""What the adapters of all libraries have in common, and what they may use of the rest of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import learnkit
from learnkit import Callback, CallbackError
from learnkit.interop import from_composer, from_hf, from_keras, from_ksuit, from_lightning
from learnkit.interop.common.adapter import CallbackAdapter, find_or_add, list_adapters
from tests.helpers.learners import quiet_synth_learner

OVERRIDABLE = ('_do_epoch_validate',)  # names of fastai that the lifecycle documents


class EveryHook:
    "A callback with a hook of each library, and an attribute that it changes."

    def __init__(self) -> None:
        self.n = 0

    def _count(self, *args: Any, **kwargs: Any) -> None:
        self.n += 1

    epoch_end = on_epoch_end = on_train_epoch_end = after_epoch = _count


FOLDER = Path(learnkit.__path__[0], 'interop')
PATHS = sorted(FOLDER.rglob('*.py'))
MAKERS = {
    'composer': from_composer,
    'hf': from_hf,
    'keras': from_keras,
    'ksuit': from_ksuit,
    'lightning': from_lightning,
}


@pytest.mark.parametrize('library', MAKERS)
def test_each_adapter_has_name_repr_and_state_of_its_callback(library: str) -> None:
    first, second = EveryHook(), EveryHook()
    adapter = MAKERS[library](first)
    assert isinstance(adapter, CallbackAdapter) and adapter.wrapped is first
    assert adapter.name == f'{library}_every_hook'
    assert repr(adapter) == f'from_{library}(EveryHook)'
    learn = quiet_synth_learner(n_train=2, n_valid=1, cbs=adapter)
    learn.fit(3)
    assert first.n == 3 and list_adapters(learn, library) == [adapter]

    other = MAKERS[library](second)
    quiet_synth_learner(cbs=other)
    other.load_state_dict(adapter.state_dict())
    assert second.n == 3


def test_no_adapter_is_found_without_a_callback_of_the_library() -> None:
    learn = quiet_synth_learner(cbs=from_keras(EveryHook()))
    assert list_adapters(learn, 'hf') == []


def test_a_callback_is_refused_with_the_name_of_the_library() -> None:
    adapter = CallbackAdapter()
    adapter.library, adapter.style = 'bell', 'Bell'
    with pytest.raises(CallbackError, match=r'Bell.*ring'):
        adapter.wrap(EveryHook(), ['ring'], {})
    assert adapter.wrapped is None


def test_a_shared_callback_is_added_once() -> None:
    class Shared(Callback):
        pass

    learn = quiet_synth_learner()
    shared = find_or_add(learn, Shared)
    assert find_or_add(learn, Shared) is shared
    assert [cb for cb in learn.cbs if isinstance(cb, Shared)] == [shared]


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_adapters_use_public_names_only(path: Path) -> None:
    "`docs/architecture.md` lists what they use: an adapter in another distribution could use the same."
    private = []
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
        if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('learnkit'):
            private += [alias.name for alias in node.names if alias.name.startswith('_')]
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition('.')[2]
            is_private = re.match(r'_[a-z]', node.attr) and owner == 'learn'
            is_private = is_private and node.attr not in OVERRIDABLE
            private += [ast.unparse(node)] if is_private or node.attr == 'parts' else []
    assert not private


def test_the_map_lists_the_names_of_the_engine_that_adapters_use() -> None:
    page = Path(learnkit.__path__[0]).parent / 'docs' / 'architecture.md'
    section = page.read_text('utf-8').partition('## What an adapter uses')[2].partition('\n## ')[0]
    listed = set(re.findall(r'`(\w+)`', section))
    used = set()
    for path in PATHS:
        for node in ast.walk(ast.parse(path.read_text('utf-8'))):
            if isinstance(node, ast.ImportFrom) and 'learnkit.engine' in (node.module or ''):
                used.update(alias.name for alias in node.names)
    assert used == listed - {'interop', 'CallbackAdapter'}
