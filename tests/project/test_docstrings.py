"""Docstrings have working examples, and the claims of the repository's text files hold."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import learnkit
from learnkit import Callback, DataLoaders, Learner, Recorder
from learnkit.engine.events import CONTEXTS, EVENTS

ROOT = Path(__file__).resolve().parents[2]
NAMED = {name: value for name in learnkit.__all__ if callable(value := getattr(learnkit, name))}
ERRORS = {
    name: value
    for name, value in NAMED.items()
    if isinstance(value, type) and issubclass(value, Exception)
}

# Classes of things that are held, not of what is done: their first line may say what one is.
THINGS = set(
    'ClassificationInterpretation DataLoaders History Interpretation OptimWrapper Time Timestamp'.split()
)
# 'Returns' and 'Running' are no imperatives, 'Pass' is one
NO_VERB = re.compile(
    r'(a|an|the|this|that|it|its|one|what|whether|how|if|when|of|for|to|class|callback|function|'
    r'\w+ing|\w*[^s]s)\b',
    re.I,
)

# Methods of which users call each sooner or later.
OFTEN = {
    Learner: """add_cb callback_states check_resume checkpoint_state compile explain export find_batch_size fine_tune
        fit fit_flat_cos fit_one_cycle fit_sgdr fit_until freeze get_preds load log lr_find metric_names predict
        predict_iter remove_cb replay report save save_learner show_results stop summary to_bf16
        trace tta unfreeze validate""",
    DataLoaders: 'from_datasets from_tensors one_batch show_batch to',
}


def first_line(value: Any) -> str:
    return (value.__doc__ or '').strip().partition('\n')[0]


@pytest.mark.parametrize('name', NAMED)
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    doc = vars(NAMED[name]).get('__doc__') if isinstance(NAMED[name], type) else NAMED[name].__doc__
    assert doc, 'it has no docstring of its own'
    assert first_line(NAMED[name]).endswith('.'), 'its first line is no sentence'
    assert '>>> ' in doc, 'it has no example'


@pytest.mark.parametrize('name', sorted(NAMED.keys() - ERRORS.keys() - THINGS))
def test_first_lines_are_imperatives(name: str) -> None:
    assert first_line(NAMED[name])[0].isupper() and not NO_VERB.match(first_line(NAMED[name])), (
        first_line(NAMED[name])
    )


@pytest.mark.parametrize(
    'name', [name for name in ERRORS if not name.startswith('Cancel') or name == 'CancelError']
)
def test_first_lines_of_errors_state_what_is_wrong(name: str) -> None:
    says = r'\b(cannot|is|was|gave|lacks|has|does not|called|contradicts|got|holds|named|given|raises)\b'
    assert re.search(says, first_line(ERRORS[name])), first_line(ERRORS[name])


def members(cls: type) -> dict[str, Any]:
    "Return the public methods and properties that a class of the package defines, without its events."
    found = {
        name: inspect.getattr_static(cls, name) for name in dir(cls) if not name.startswith('_')
    }
    functions = {
        name: v.fget if isinstance(v, property) else getattr(v, '__func__', v)
        for name, v in found.items()
    }
    own = {
        name: f
        for name, f in functions.items()
        if inspect.isfunction(f) and f.__module__.startswith('learnkit')
    }
    return {name: f for name, f in own.items() if name not in (*EVENTS, *CONTEXTS.values())}


@pytest.mark.parametrize(
    'cls', [Learner, Callback, DataLoaders, Recorder], ids=lambda cls: cls.__name__
)
def test_every_method_has_a_docstring(cls: type) -> None:
    assert len(members(cls)) > 4
    assert not [name for name, f in members(cls).items() if not first_line(f).endswith('.')]


@pytest.mark.parametrize(
    ('cls', 'name'), [(cls, name) for cls, names in OFTEN.items() for name in names.split()]
)
def test_methods_that_are_called_often_have_an_example(cls: type, name: str) -> None:
    assert '>>> ' in members(cls)[name].__doc__


# Members that modules of the package call on each other, and not users.
INNER = set(
    """callback_changed clear_pass do_evaluation end_iteration end_resume ends_iteration evaluate_within_epoch
    evaluated_weights fire_checkpoint forget_run note_error open_optimize_call
    repeat_optimize_call repeat_passes run_microbatches set_loader""".split()
)


def learner_docs() -> dict[str, str]:
    "Return the docstrings of all public methods and properties of a Learner."
    found = {}
    for cls in reversed(Learner.__mro__):
        for name, value in vars(cls).items():
            is_member = inspect.isroutine(value) or isinstance(value, property)
            if cls.__module__.startswith('learnkit') and is_member and not name.startswith('_'):
                found[name] = value.__doc__ or ''
    return found


def test_every_member_of_the_learner_is_in_an_example() -> None:
    docs = learner_docs()
    code = re.findall(
        r'^ *(?:>>>|\.\.\.) (.*)', '\n'.join([Learner.__doc__ or '', *docs.values()]), re.M
    )
    shown = {name for line in code for name in re.findall(r'(?:\.|def )(\w+)', line)}
    missing = {name for name, doc in docs.items() if '>>> ' not in doc and name not in shown}
    assert sorted(missing - INNER) == [], 'write an example, or name it in one of a sibling'
    assert docs.keys() >= INNER, 'members that are no more'


# -- the files beside the package ------------------------------------------------------------------

PAGES = [ROOT / name for name in ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'SECURITY.md')]


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_files_and_links_of_a_page_are_there(page: Path) -> None:
    text = page.read_text('utf-8')
    links = [link for link in re.findall(r'\]\(([^)#]+)\)', text) if not link.startswith('http')]
    paths = re.findall(r'`((?:tests|docs|learnkit|nbs|benchmarks|\.ci)/[\w./-]+)`', text)
    there = [
        path
        for path in [*links, *paths]
        if '<' not in path and '_build' not in path and '/shots' not in path
    ]
    assert [path for path in there if not (ROOT / path).exists()] == []


def test_the_tests_that_security_rests_on_are_there() -> None:
    text = (ROOT / 'SECURITY.md').read_text('utf-8')
    named = re.findall(r'test_f\d\d_\w+\.py', text)
    assert len(named) == 5 and all((ROOT / 'tests' / 'faults' / name).exists() for name in named)


def test_nothing_in_the_package_unpickles_or_evaluates() -> None:
    for path in sorted((ROOT / 'learnkit').rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text('utf-8'))):
            if isinstance(node, ast.Import):
                assert not {a.name for a in node.names} & {'pickle', 'marshal'}, path
            if isinstance(node, ast.ImportFrom) and node.module == 'pickle':
                assert {a.name for a in node.names} <= {'UnpicklingError', 'PicklingError'}, path
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called == 'torch.export.load':
                assert path.name == 'export.py', path  # of what it has just written
            assert called not in ('eval', 'exec', 'torch.jit.load', 'np.load'), path
            if called == 'torch.load' and path.name == 'launch.py':  # of what has started it
                assert ast.unparse(node.args[0]) == 'folder / _PAYLOAD', path
            elif called == 'torch.load' and path.name == 'comm.py':
                # from the ranks of one job, never from a file
                assert ast.unparse(node.args[0]) == 'BytesIO(data)', path
            elif called == 'torch.load':
                assert {k.arg: ast.unparse(k.value) for k in node.keywords}.get(
                    'weights_only'
                ) == 'True', path
