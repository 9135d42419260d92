"""Help that includes the comments of parameters: `doc(Learner.fit)`, `doc('after_loss')`, `doc(my_callback)`.

The comments are read from the source code when help is requested.
"""

from __future__ import annotations

import inspect
import re
from functools import partial
from html import escape
from importlib import import_module
from textwrap import dedent
from types import ModuleType
from typing import Any, NamedTuple

from learnkit.core.errors import CancelException, OptionError, did_you_mean
from learnkit.core.html import never_raising, table
from learnkit.core.model import unwrap_partial
from learnkit.engine.callback import Callback, get_own_handler
from learnkit.engine.events import ALIASES, CONTEXTS, EVENTS, INNER_EVENTS, LEVELS, LIFECYCLE, Level

__all__ = ['Doc', 'Parameter', 'comments', 'doc', 'open_levels']

# index of the first moment of an evaluation in `LIFECYCLE`
_EVALUATION = next(i for i, m in enumerate(LIFECYCLE) if m.event == 'before_eval')
PARAMETERS = '\n\nParameters\n----------\n'  # heading that `add_parameters` adds to docstrings
_STARS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: '*',
    inspect.Parameter.VAR_KEYWORD: '**',
}


class Parameter(NamedTuple):
    "Parameter of a signature."

    text: str  # name, type and default: 'lr: float = 0.1'
    comment: str  # comment in the source code, or ''


class Doc:
    "Help for an object, with a text representation and an HTML representation with tables."

    def __init__(
        self,
        title: str,  # name of the object
        where: str = '',  # name of its module
        parameters: list[Parameter] | None = None,  # parameters; None: not callable
        returns: Parameter | None = None,  # return type and its comment
        text: str = '',  # docstring
        lists: dict[str, list[tuple[str, str]]] | None = None,  # names and descriptions by heading
    ) -> None:
        self.title = title
        self.where = where
        self.parameters = parameters
        self.returns = returns
        self.text = text
        self.lists = {head: rows for head, rows in (lists or {}).items() if rows}

    def signature(self) -> str:
        "Return the signature, with one parameter and its comment per line."
        if self.parameters is None:
            return self.title
        arrow = f' -> {self.returns.text}' if self.returns and self.returns.text else ''
        if not self.parameters:
            return f'{self.title}(){arrow}'
        width = min(max(len(p.text) for p in self.parameters), 60) + 1
        lines = []
        for p in self.parameters:
            comment = f'  # {p.comment}' if p.comment else ''
            lines.append(f'    {p.text + ",":<{width}}{comment}'.rstrip())
        comment = f'  # {self.returns.comment}' if self.returns and self.returns.comment else ''
        return '\n'.join([f'{self.title}(', *lines, f'){arrow}{comment}'])

    def __repr__(self) -> str:
        lists = [_format_list(head, rows) for head, rows in self.lists.items()]
        origin = f'From {self.where}.' if self.where else ''
        return '\n\n'.join(filter(None, [self.signature(), self.text, *lists, origin]))

    @never_raising
    def _repr_html_(self) -> str:
        call = '' if self.parameters is None else '()'
        arrow = (
            f' &rarr; {_make_code(self.returns.text)}' if self.returns and self.returns.text else ''
        )
        title = _make_code(self.title + call)
        parts = [f'<div><b>{title}</b>{arrow} <small>{escape(self.where)}</small></div>']
        if self.parameters:
            parts.append(_mark_code(table(['parameter', 'meaning'], self.parameters)))
        if self.text:
            parts += map(_make_paragraph, re.split(r'\n\s*\n', self.text))
        for head, rows in self.lists.items():
            parts.append(_mark_code(table([head, ''], rows, max_rows=len(rows))))
        return ''.join(parts)


def doc(
    what: Any,  # a class, a function, a method, a callback, an event, a name in `learnkit.all`
) -> Doc:
    """Return the help for an object: signature with the comments of its parameters, docstring, methods.

    `what` may also be a string: `doc('fit')` is `doc(Learner.fit)`, and `doc('after_loss')` describes the event: the
    state of the run, the Cancel exceptions that may be raised there, and the callbacks that handle the event. For an
    instance of a callback, `doc(learn.recorder)`, the options are included. User-defined classes and functions are
    supported, too.

    Raises `OptionError` for an unknown name, and for an object without documentation.

    >>> print(doc('params').signature())
    params(
        m: nn.Module,
    ) -> list[nn.Parameter]
    >>> doc('after_bacth')
    Traceback (most recent call last):
    learnkit.core.errors.OptionError: There is nothing called 'after_bacth'. Did you mean `after_batch`? ...
    """
    if isinstance(what, str):
        return _describe_name(what)
    if isinstance(what, property):
        return Doc(_get_title(what.fget), what.fget.__module__, text=_get_docstring(what))
    if isinstance(what, type):
        return _describe_class(what)
    if isinstance(what, Callback):
        return _describe_callback(what)
    if isinstance(what, ModuleType):
        return _describe_module(what)
    if inspect.isroutine(what) or isinstance(what, partial):
        return _describe_function(what)
    cls = type(what)
    if cls.__module__ == 'builtins' or not cls.__doc__:
        raise OptionError(
            f'There is no help for a {cls.__name__}: give a class, a function, a callback, or a name.'
        )
    return _describe_class(cls)


# -- kinds of objects ------------------------------------------------------------------------------


def _describe_name(name: str) -> Doc:
    event = ALIASES.get(name, name)
    if event in EVENTS:
        return _describe_event(event)
    known = _get_public_names()
    learner = known['Learner']
    first, *others = name.split('.')
    if first in known:
        found = known[first]
    elif first == 'learn' and others:
        found = learner
    else:
        found = getattr(learner, name, None)
    for part in others:
        found = getattr(found, part, None)
    if found is not None and not (isinstance(found, str) and found in EVENTS):
        return doc(found)
    learner_names = [n for n in dir(learner) if not n.startswith('_')]
    hint = did_you_mean(name, [*EVENTS, *known, *learner_names])
    raise OptionError(
        f'There is nothing called {name!r}.{hint} Give the name of an event, or a name that '
        '`from learnkit.all import *` imports.'
    )


def _describe_function(f: Any) -> Doc:
    parameters, returns = _read_signature(f)
    function = unwrap_partial(f)
    module = getattr(function, '__module__', '') or ''
    return Doc(_get_title(f), module, parameters, returns, _get_docstring(function))


def _describe_class(
    cls: type,
    cb: Callback | None = None,  # callback to describe; None: the class
    head: str = 'Runs at',  # start of the heading of a callback's events
) -> Doc:
    text = _get_docstring(cls)
    if issubclass(cls, BaseException):
        return Doc(cls.__name__, cls.__module__, text=text, lists=_list_exception_uses(cls))
    init: Any = cls.__init__
    parameters, _ = _read_signature(init if inspect.isfunction(init) else cls)
    lists: dict[str, list[tuple[str, str]]] = {}
    if issubclass(cls, Callback):
        source = cls if cb is None else cb
        head = f'{head} (order {source.order:g}{_format_limits(source)})'
        lists[head] = _list_handlers(source)
    lists['Methods'] = _list_methods(cls)
    return Doc(cls.__name__, cls.__module__, parameters, None, text, lists)


def _describe_callback(cb: Callback) -> Doc:
    owner = f', of a {type(cb.learn).__name__},' if cb.learn is not None else ''
    return _describe_class(type(cb), cb, f'{cb!r}{owner} runs at')


def _describe_module(module: ModuleType) -> Doc:
    names = [(name, _first_line(getattr(module, name))) for name in getattr(module, '__all__', ())]
    return Doc(module.__name__, text=_get_docstring(module), lists={'Names': names})


def _describe_event(event: str) -> Doc:
    moments = [(i, m) for i, m in enumerate(LIFECYCLE) if m.event == event]
    text = '; '.join(dict.fromkeys(m.doc for _, m in moments)) + '.'
    if event in INNER_EVENTS:
        text += '\n\nIt belongs to a batch: `run_train` and `run_valid` of a callback apply.'
    composer_names = ', '.join(m.composer for _, m in moments if m.composer)
    if composer_names:
        text += f'\n\nIn Composer: {composer_names}.'
    text += (
        f"\n\n`learn.explain('{event}')` lists the callbacks of a Learner that run here, in order; "
        '`learn.show_training_loop()` shows the events around it.'
    )
    orders = sorted(
        (cls.order, name)
        for name, cls in _get_public_names().items()
        if isinstance(cls, type) and issubclass(cls, Callback) and _has_handler(cls, event)
    )
    lists = {
        'May be raised here': _list_cancel_exceptions([i for i, _ in moments]),
        'Callbacks that handle it': [(name, f'order {order:g}') for order, name in orders],
    }
    return Doc(f'{event} (an event)', 'learnkit.engine.events', text=text, lists=lists)


def _list_cancel_exceptions(indices: list[int]) -> list[tuple[str, str]]:
    "Return the Cancel exceptions that may be raised at an event, given the event's indices in `LIFECYCLE`."
    rows = []
    for name, level in LEVELS.items():
        legal_indices = [i for i in indices if name in open_levels(i)]
        if not legal_indices:
            continue
        phase = ''
        if legal_indices != indices:
            is_training = legal_indices[0] < _EVALUATION
            phase = ' In training.' if is_training else ' In evaluation.'
        rows.append((level.exception.__name__, _first_line(level.exception) + phase))
    return rows


def open_levels(
    i: int,  # index of a moment in `LIFECYCLE`
) -> list[str]:
    """Return the levels of the loop that are open at a moment, whose Cancel exceptions may be raised there.

    >>> open_levels(next(i for i, m in enumerate(LIFECYCLE) if m.event == 'after_epoch'))
    ['fit']
    """

    def is_open(level: Level) -> bool:
        for moment in reversed(LIFECYCLE[: i + 1]):
            if moment.event in (level.before, level.after_cancel, level.after):
                return moment.event == level.before
        return False

    return [name for name, level in LEVELS.items() if is_open(level)]


# -- signatures ------------------------------------------------------------------------------------


def comments(
    f: Any,  # function or method
) -> dict[str, str]:
    """Return the comments in a signature by parameter, with the comment of the return type under 'return'.

    fastcore's `docments` reads them: a comment at the end of a line, or above it, applies to the last parameter of the
    line; NumPy-style docstrings are read as well. Without source code the dict is empty.

    >>> comments(doc)['what'][:32]
    'a class, a function, a method, a'
    """
    from fastcore.docments import docments  # only on request: it imports slowly

    try:
        found = docments(unwrap_partial(f), args_kwargs=True)
    except (OSError, SyntaxError, TypeError, ValueError):  # no source code, or none that parses
        return {}
    directives = ('type:', 'noqa')
    return {name: text for name, text in found.items() if text and not text.startswith(directives)}


def _read_signature(f: Any) -> tuple[list[Parameter] | None, Parameter | None]:
    "Return the parameters, with separators '/' and '*', and the return type; `(None, None)` without a signature."
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):
        return None, None
    notes = comments(f)
    rows = []
    last_kind: Any = None
    for name, p in signature.parameters.items():
        if name in ('self', 'cls'):
            continue
        if last_kind is p.POSITIONAL_ONLY and p.kind is not p.POSITIONAL_ONLY:
            rows.append(Parameter('/', ''))
        can_be_positional = last_kind in (None, p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        if p.kind is p.KEYWORD_ONLY and can_be_positional:
            rows.append(Parameter('*', ''))
        rows.append(Parameter(_format_parameter(p), notes.get(name, '')))
        last_kind = p.kind
    annotation = signature.return_annotation
    returned = '' if annotation is signature.empty else _format_value(annotation)
    return rows, Parameter(returned, notes.get('return', ''))


def _format_parameter(p: inspect.Parameter) -> str:
    text = _STARS.get(p.kind, '') + p.name
    if p.annotation is not p.empty:
        text += f': {_format_value(p.annotation)}'
    if p.default is not p.empty:
        equals = ' = ' if ':' in text else '='
        text += equals + _format_value(p.default, repr(p.default))
    return text


def _format_value(value: Any, text: str | None = None) -> str:
    "Return a type or a default value as it appears in source code."
    if inspect.isroutine(value) or isinstance(value, type):
        return value.__name__
    return str(value) if text is None else text


# -- strings and lists -----------------------------------------------------------------------------


def _get_public_names() -> dict[str, Any]:
    package = import_module('learnkit.all')  # imports all modules, so only on request
    return {name: getattr(package, name) for name in package.__all__}


def _get_title(f: Any) -> str:
    f = unwrap_partial(f)
    name = getattr(f, '__name__', repr(f))
    owner = getattr(f, '__self__', None)
    if owner is not None and not isinstance(owner, ModuleType):
        cls = owner if isinstance(owner, type) else type(owner)
        return f'{cls.__name__}.{name}'
    # a method that the Learner inherits is documented as the Learner's
    attribute = inspect.getattr_static(_get_public_names()['Learner'], name, None)
    if f in (attribute, getattr(attribute, 'fget', None)):
        return f'Learner.{name}'
    return getattr(f, '__qualname__', name)


def _get_docstring(value: Any) -> str:
    text = inspect.getdoc(value) or ''
    return text.partition(PARAMETERS)[0]  # the signature already has the parameters


def _first_line(value: Any) -> str:
    if not (callable(value) or isinstance(value, (property, ModuleType))):
        return ''
    return (inspect.getdoc(value) or '').partition('\n')[0]


def _list_exception_uses(cls: type[BaseException]) -> dict[str, list[tuple[str, str]]]:
    "Return the events at which a Cancel exception may be raised, or the base classes of an error."
    if issubclass(cls, CancelException):
        rows = [
            (level.before, f'then {level.after_cancel}, {level.after}')
            for level in LEVELS.values()
            if issubclass(level.exception, cls)
        ]
        return {'From this event on it may be raised': rows}
    bases = [c for c in cls.__mro__[1:] if c not in (Exception, BaseException, object)]
    return {'Also caught as': [(c.__name__, _first_line(c)) for c in bases]}


def _list_methods(cls: type) -> list[tuple[str, str]]:
    """Return the public methods and properties of a class that have a docstring.

    For a callback, the handlers of events and the methods of `Callback` are excluded.
    """
    rows: dict[str, str] = {}
    for base in cls.__mro__:
        if base is object or (base is Callback is not cls):
            break
        for name, value in vars(base).items():
            f = value.fget if isinstance(value, property) else getattr(value, '__func__', value)
            is_event = name in EVENTS and issubclass(cls, Callback)
            if name.startswith('_') or is_event or not inspect.isfunction(f) or not f.__doc__:
                continue
            rows.setdefault(name, _first_line(f))
    return list(rows.items())


def _list_handlers(cb: Callback | type[Callback]) -> list[tuple[str, str]]:
    "Return the events that a callback or a callback class handles, each with the first line of its docstring."
    events = (*EVENTS, *CONTEXTS.values())
    if isinstance(cb, type):
        return [(e, _first_line(getattr(cb, e))) for e in events if _has_handler(cb, e)]
    handlers = [(e, get_own_handler(cb, e)) for e in events]
    return [(e, _first_line(handler)) for e, handler in handlers if handler is not None]


def _has_handler(cls: type, event: str) -> bool:
    return inspect.isfunction(inspect.getattr_static(cls, event, None))


def _format_limits(cb: Any) -> str:
    text = '' if cb.run_train else ', not in training'
    return text if cb.run_valid else f'{text}, not in evaluation'


def _format_list(head: str, rows: list[tuple[str, str]]) -> str:
    if not any(description for _, description in rows):
        return f'{head}: {", ".join(name for name, _ in rows)}'
    width = min(max(len(name) for name, _ in rows), 30)
    lines = [f'    {name:<{width}}  {description}'.rstrip() for name, description in rows]
    return '\n'.join([f'{head}:', *lines])


# -- HTML ------------------------------------------------------------------------------------------


def _make_code(text: str) -> str:
    return f'<code>{escape(text)}</code>'


def _mark_code(html: str) -> str:
    "Replace backticks in HTML by code elements."
    return re.sub(r'`([^`<]+)`', r'<code>\1</code>', html)


def _make_paragraph(block: str) -> str:
    "Return the HTML of a docstring's paragraph, or of an example."
    is_indented = all(line.startswith('    ') for line in block.split('\n'))
    if is_indented or block.lstrip().startswith('>>>'):
        return f'<pre style="font-family:monospace">{escape(dedent(block))}</pre>'
    return f'<p>{_mark_code(escape(block, quote=False))}</p>'
