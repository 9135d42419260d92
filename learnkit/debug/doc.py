"""Help with what stands in signatures: `doc(Learner.fit)`, `doc('after_loss')`, `doc(my_callback)`.

Comments of parameters are read from the sources when they are asked for, and never before."""

from __future__ import annotations

import ast
import inspect
import re
import tokenize
from functools import partial
from html import escape
from importlib import import_module
from io import StringIO
from textwrap import dedent
from types import ModuleType
from typing import Any, NamedTuple

from learnkit.core.errors import CancelException, OptionError, did_you_mean
from learnkit.core.html import never_raising, table
from learnkit.engine.callback import Callback, own_handler
from learnkit.engine.events import ALIASES, CONTEXTS, EVENTS, INNER_EVENTS, LEVELS, LIFECYCLE

__all__ = ['Doc', 'Parameter', 'comments', 'doc', 'open_levels']

# what stands behind it is of it
_EVALUATION = next(i for i, m in enumerate(LIFECYCLE) if m.event == 'before_eval')
_SIGNS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: '*',
    inspect.Parameter.VAR_KEYWORD: '**',
}


class Parameter(NamedTuple):
    "A parameter as it stands in a signature."

    text: str  # 'lr: float = 0.1'
    comment: str  # what is said of it there, '' for nothing


class Doc:
    "What is known about something; shown as text, in a notebook with tables."

    def __init__(
        self,
        title: str,  # what it is called
        where: str = '',  # the module that has it
        parameters: list[Parameter] | None = None,  # of what can be called
        returns: Parameter | None = None,  # what comes back
        text: str = '',  # its docstring
        lists: dict[str, list[tuple[str, str]]] | None = None,  # by heading: names and what each is
    ) -> None:
        self.title, self.where, self.parameters, self.returns = title, where, parameters, returns
        self.text, self.lists = text, {head: rows for head, rows in (lists or {}).items() if rows}

    def signature(self) -> str:
        "Return the signature, a parameter a line, each with its comment."
        if self.parameters is None:
            return self.title
        arrow = f' -> {self.returns.text}' if self.returns and self.returns.text else ''
        if not self.parameters:
            return f'{self.title}(){arrow}'
        width = min(max(len(p.text) for p in self.parameters), 60) + 1
        lines = [
            f'    {p.text + ",":<{width}}{f"  # {p.comment}" if p.comment else ""}'.rstrip()
            for p in self.parameters
        ]
        remark = f'  # {self.returns.comment}' if self.returns and self.returns.comment else ''
        return '\n'.join([f'{self.title}(', *lines, f'){arrow}{remark}'])

    def __repr__(self) -> str:
        parts = [
            self.signature(),
            self.text,
            *(_listed(head, rows) for head, rows in self.lists.items()),
        ]
        return '\n\n'.join(filter(None, [*parts, f'From {self.where}.' if self.where else '']))

    @never_raising
    def _repr_html_(self) -> str:
        call = '' if self.parameters is None else '()'
        returns = (
            f' &rarr; {_code(self.returns.text)}' if self.returns and self.returns.text else ''
        )
        parts = [
            f'<div><b>{_code(self.title + call)}</b>{returns} <small>{escape(self.where)}</small></div>'
        ]
        if self.parameters:
            parts.append(_coded(table(['parameter', 'meaning'], self.parameters)))
        parts += map(_html_of, re.split(r'\n\s*\n', self.text)) if self.text else []
        parts += [
            _coded(table([head, ''], rows, max_rows=len(rows))) for head, rows in self.lists.items()
        ]
        return ''.join(parts)


def doc(
    what: Any,  # a class, a function, a method, a callback, an event, a name in `learnkit.all`
) -> Doc:
    """Return the help for something: signature with the comments of its parameters, text, example, what goes with it.

    Names may be given as text: `doc('fit')` is `doc(Learner.fit)`, and `doc('after_loss')` tells what is true at this
    event, which Cancel exceptions are legal there, and who handles it. A callback itself, `doc(learn.recorder)`, also
    shows how it is set. Your own classes and functions may be given, too.

    Raises `OptionError` for a name that is not known, and for what has no documentation.

    >>> print(doc('params').signature())
    params(
        m: nn.Module,
    ) -> list[nn.Parameter]
    >>> doc('after_bacth')
    Traceback (most recent call last):
    learnkit.core.errors.OptionError: There is nothing called 'after_bacth'. Did you mean `after_batch`? ...
    """
    if isinstance(what, str):
        return _of_name(what)
    if isinstance(what, property):
        return Doc(_title(what.fget), what.fget.__module__, text=_text_of(what))
    if isinstance(what, type):
        return _of_class(what)
    if isinstance(what, Callback):
        return _of_callback(what)
    if isinstance(what, ModuleType):
        return _of_module(what)
    if inspect.isroutine(what) or isinstance(what, partial):
        return _of_function(what)
    if (cls := type(what)).__module__ == 'builtins' or not cls.__doc__:
        raise OptionError(
            f'There is no help for a {cls.__name__}: give a class, a function, a callback, or a name.'
        )
    return _of_class(cls)


# What is given


def _of_name(name: str) -> Doc:
    if (event := ALIASES.get(name, name)) in EVENTS:
        return _of_event(event)
    first, *others = name.split('.')
    known = _names()
    learner = known['Learner']
    if first == 'learn' and others:
        found: Any = learner
    elif first in known:
        found = known[first]
    elif not others and hasattr(learner, name):
        found, others = learner, [name]
    else:
        found = None
    for part in others:
        found = getattr(found, part, None)
    if found is not None and not (isinstance(found, str) and found in EVENTS):
        return doc(found)
    near = did_you_mean(
        name, [*EVENTS, *known, *(n for n in dir(learner) if not n.startswith('_'))]
    )
    raise OptionError(
        f'There is nothing called {name!r}.{near} Give the name of an event, or of what '
        '`from learnkit.all import *` brings.'
    )


def _of_function(f: Any) -> Doc:
    (parameters, returns), inner = _signature(f), _inside(f)
    return Doc(
        _title(f), getattr(inner, '__module__', '') or '', parameters, returns, _text_of(inner)
    )


def _inside(f: Any) -> Any:
    "Return the function without the partials around it."
    while isinstance(f, partial):
        f = f.func
    return f


def _of_class(cls: type) -> Doc:
    if issubclass(cls, BaseException):
        return Doc(cls.__name__, cls.__module__, None, None, _text_of(cls), _caught(cls))
    made: Any = cls.__init__
    parameters, _ = _signature(made if inspect.isfunction(made) else cls)
    lists: dict[str, list[tuple[str, str]]] = {}
    if issubclass(cls, Callback):
        lists = {f'Runs at (order {cls.order:g}{_only(cls)})': _handled(cls)}
    return Doc(
        cls.__name__,
        cls.__module__,
        parameters,
        None,
        _text_of(cls),
        {**lists, 'Methods': _methods(cls)},
    )


def _of_callback(cb: Callback) -> Doc:
    found = _of_class(type(cb))
    found.lists = {
        head: rows for head, rows in found.lists.items() if not head.startswith('Runs at')
    }
    on = f', of a {type(cb.learn).__name__},' if cb.learn is not None else ''
    if runs := _handled(cb):
        found.lists = {f'{cb!r}{on} runs at (order {cb.order:g}{_only(cb)})': runs, **found.lists}
    return found


def _of_module(module: ModuleType) -> Doc:
    names = [(name, _first_line(getattr(module, name))) for name in getattr(module, '__all__', ())]
    return Doc(module.__name__, text=_text_of(module), lists={'Names': names})


def _of_event(event: str) -> Doc:
    moments = [(i, m) for i, m in enumerate(LIFECYCLE) if m.event == event]
    text = '; '.join(dict.fromkeys(m.doc for _, m in moments)) + '.'
    if event in INNER_EVENTS:
        text += '\n\nIt belongs to a batch: `run_train` and `run_valid` of a callback apply.'
    if names := ', '.join(m.composer for _, m in moments if m.composer):
        text += f'\n\nIn Composer: {names}.'
    text += (
        f"\n\n`learn.explain('{event}')` lists who runs here in your own Learner, in order; "
        '`learn.show_training_loop()` shows the events around it.'
    )
    orders = sorted(
        (cls.order, name)
        for name, cls in _names().items()
        if isinstance(cls, type) and issubclass(cls, Callback) and _has_handler(cls, event)
    )
    lists = {
        'May be raised here': _legal([i for i, _ in moments]),
        'Callbacks that handle it': [(name, f'order {order:g}') for order, name in orders],
    }
    return Doc(f'{event} (an event)', 'learnkit.engine.events', text=text, lists=lists)


def _legal(places: list[int]) -> list[tuple[str, str]]:
    "Return the Cancel exceptions that may be raised at an event, which stands at these places of `LIFECYCLE`."
    rows = []
    for name, level in LEVELS.items():
        there = [i for i in places if name in open_levels(i)]
        phase = (
            ''
            if there == places
            else ' In training.'
            if min(there, default=0) < _EVALUATION
            else ' In evaluation.'
        )
        if there:
            rows.append((level.exception.__name__, _first_line(level.exception) + phase))
    return rows


def open_levels(
    i: int,  # the place of a moment in `LIFECYCLE`
) -> list[str]:
    """Return the levels of the loop that are open at a moment, those whose Cancel exception is legal there.

    >>> open_levels(next(i for i, m in enumerate(LIFECYCLE) if m.event == 'after_epoch'))
    ['fit']
    """

    def is_open(level: str) -> bool:
        known = LEVELS[level]
        last = next(
            (
                m.event
                for m in reversed(LIFECYCLE[: i + 1])
                if m.event in (known.before, known.after_cancel, known.after)
            ),
            '',
        )
        return last == known.before

    return [level for level in LEVELS if is_open(level)]


# Signatures


def comments(
    f: Any,  # a function, written over several lines
) -> dict[str, str]:
    """Return the comments that stand in a signature, by parameter; 'return' has that of what is returned.

    A comment at the end of a line is about every parameter of that line. What has no source has none.

    >>> comments(doc)['what'][:32]
    'a class, a function, a method, a'
    """
    f = inspect.unwrap(getattr(f := _inside(f), '__func__', f))
    if not inspect.isfunction(f) or f.__code__.co_filename == '<string>':
        return {}
    try:
        source = dedent(inspect.getsource(f))
        node = ast.parse(source).body[0]
        notes = {
            t.start[0]: t.string.lstrip('#').strip()
            for t in tokenize.generate_tokens(StringIO(source).readline)
            if t.type == tokenize.COMMENT
        }
    except (OSError, SyntaxError, ValueError, tokenize.TokenError):
        return {}
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {}
    a = node.args
    args = [arg for arg in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if arg]
    found = {
        arg.arg: notes[arg.lineno]
        for arg in args
        if arg.lineno > node.lineno and arg.lineno in notes
    }
    if node.returns and (line := node.returns.lineno) > node.lineno and line in notes:
        found['return'] = notes[line]
    return {name: text for name, text in found.items() if not text.startswith(('type:', 'noqa'))}


def _signature(f: Any) -> tuple[list[Parameter] | None, Parameter | None]:
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):
        return None, None
    told, found = comments(f), []
    listed = [p for name, p in signature.parameters.items() if name not in ('self', 'cls')]
    for last, p in zip([None, *listed], listed, strict=False):
        named = p.kind is p.KEYWORD_ONLY and (
            last is None or last.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        )
        if last is not None and last.kind is p.POSITIONAL_ONLY is not p.kind:
            found.append(Parameter('/', ''))
        if named:
            found.append(Parameter('*', ''))
        found.append(Parameter(_declared(p), told.get(p.name, '')))
    returned = signature.return_annotation
    return found, Parameter(
        '' if returned is signature.empty else _shown(returned), told.get('return', '')
    )


def _declared(p: inspect.Parameter) -> str:
    text = _SIGNS.get(p.kind, '') + p.name
    if p.annotation is not p.empty:
        text += f': {_shown(p.annotation)}'
    if p.default is not p.empty:
        text += f'{" = " if ":" in text else "="}{_shown(p.default, repr(p.default))}'
    return text


def _shown(value: Any, text: str | None = None) -> str:
    "Return how a type or a default is written."
    if inspect.isroutine(value) or isinstance(value, type):
        return value.__name__
    return text if text is not None else value if isinstance(value, str) else str(value)


# Texts and lists


def _names() -> dict[str, Any]:
    everything = import_module('learnkit.all')  # it loads everything, so only when someone asks
    return {name: getattr(everything, name) for name in everything.__all__}


def _learner_class() -> type:
    return _names()['Learner']


def _title(f: Any) -> str:
    f = _inside(f)
    name, owner = getattr(f, '__name__', repr(f)), getattr(f, '__self__', None)
    if owner is not None and not isinstance(owner, ModuleType):
        return f'{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}'
    own = inspect.getattr_static(
        _learner_class(), name, None
    )  # it has most of its methods from parts of it
    return (
        f'Learner.{name}'
        if f in (own, getattr(own, 'fget', None))
        else getattr(f, '__qualname__', name)
    )


def _text_of(value: Any) -> str:
    return inspect.cleandoc(inspect.getdoc(value) or '')


def _first_line(value: Any) -> str:
    if not (callable(value) or isinstance(value, (property, ModuleType))):
        return ''
    return (inspect.getdoc(value) or '').partition('\n')[0]


def _caught(cls: type[BaseException]) -> dict[str, list[tuple[str, str]]]:
    if issubclass(cls, CancelException):
        rows = [
            (level.before, f'then {level.after_cancel}, {level.after}')
            for level in LEVELS.values()
            if issubclass(level.exception, cls)
        ]
        return {'From this event on it may be raised': rows}
    own = [c for c in cls.__mro__[1:] if c not in (Exception, BaseException, object)]
    return {'Also caught as': [(c.__name__, _first_line(c)) for c in own]}


def _methods(cls: type) -> list[tuple[str, str]]:
    "Return the public methods and properties of a class that have a docstring, those of a callback without events."
    seen: dict[str, str] = {}
    for base in cls.__mro__:
        if base is object or (base is Callback is not cls):
            break
        for name, value in vars(base).items():
            f = value.fget if isinstance(value, property) else getattr(value, '__func__', value)
            is_event = name in EVENTS and issubclass(cls, Callback)
            if name.startswith('_') or is_event or not inspect.isfunction(f) or not f.__doc__:
                continue
            seen.setdefault(name, _first_line(f))
    return list(seen.items())


def _handled(cb: Callback | type[Callback]) -> list[tuple[str, str]]:
    "Return the events that a callback, or its class, handles, each with the first line of what is said of it."
    if isinstance(cb, type):
        found = {e: getattr(cb, e) for e in (*EVENTS, *CONTEXTS.values()) if _has_handler(cb, e)}
    else:
        found = {
            e: h for e in (*EVENTS, *CONTEXTS.values()) if (h := own_handler(cb, e)) is not None
        }
    return [(event, _first_line(handler)) for event, handler in found.items()]


def _has_handler(cls: type, event: str) -> bool:
    return inspect.isfunction(inspect.getattr_static(cls, event, None))


def _only(cb: Any) -> str:
    return ''.join(
        f', {text}'
        for on, text in ((cb.run_train, 'not in training'), (cb.run_valid, 'not in evaluation'))
        if not on
    )


def _listed(head: str, rows: list[tuple[str, str]]) -> str:
    if not any(what for _, what in rows):
        return f'{head}: {", ".join(name for name, _ in rows)}'
    width = min(max(len(name) for name, _ in rows), 30)
    return '\n'.join(
        [f'{head}:', *(f'    {name:<{width}}  {what}'.rstrip() for name, what in rows)]
    )


# HTML


def _code(text: str) -> str:
    return f'<code>{escape(text)}</code>'


def _coded(html: str) -> str:
    "Return HTML in which what stands in backticks is code."
    return re.sub(r'`([^`<]+)`', r'<code>\1</code>', html)


def _html_of(block: str) -> str:
    "Return a paragraph of a docstring, or its example."
    if block.lstrip().startswith('>>>') or all(
        line.startswith('    ') for line in block.split('\n')
    ):
        return f'<pre style="font-family:monospace">{escape(dedent(block))}</pre>'
    return f'<p>{_coded(escape(block, quote=False))}</p>'
