"""Link names of the package that are marked as `code` in any text to their descriptions.

A class or function of `learnkit.all`, a method (`Learner.fit`), and one of the Learner (`learn.fit(5)`)."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from docutils import nodes
from site_api import get, home, modules, page_of, public
from sphinx import addnodes
from sphinx.util.nodes import make_refnode

import learnkit

CALL = re.compile(r'(?:(\w+)\.)?(\w+)(?:\(.*\))?', re.S)
_drawn: dict[tuple[Any, ...], str] = {}
NO_LINKS = nodes.reference, nodes.title, addnodes.desc_signature, addnodes.pending_xref


@cache
def names() -> dict[str, str]:
    "Return the full names of the members of `learnkit.all`."
    found = {name: home('learnkit.all', name) for name in public('learnkit.all')}
    return {name: f'{module}.{name}' for name, module in found.items() if module}


def full_names(text: str) -> list[str]:
    "Return the full names that a piece of code may mean; a method may belong to several classes."
    if (match := CALL.fullmatch(text)) is None:
        return []
    owner, name = match.groups()
    if owner is None:
        return [names()[name]] if name in names() else []
    cls = (
        learnkit.Learner
        if owner == 'learn'
        else get('learnkit.all', owner)
        if owner in names()
        else None
    )
    return [f'{base.__module__}.{base.__qualname__}.{name}' for base in getattr(cls, '__mro__', ())]


def link_names(app: Any, doctree: nodes.document, docname: str) -> None:
    "Wrap the names of a page in links, except within the description of the same name."
    known = app.env.domains.python_domain.objects
    for literal in list(doctree.findall(nodes.literal)):
        around = list(parents(literal))
        if any(isinstance(node, NO_LINKS) for node in around):
            continue
        full = next((name for name in full_names(literal.astext()) if name in known), None)
        if full is None or any(full in node.get('ids', ()) for node in signatures(around)):
            continue
        entry = known[full]
        link = make_refnode(
            app.builder, docname, entry.docname, entry.node_id, [literal.deepcopy()], full
        )
        literal.replace_self(link)


def parents(node: nodes.Node) -> Any:
    "Yield the parents of a node, innermost first."
    while (node := node.parent) is not None:
        yield node


def signatures(around: list[nodes.Node]) -> list[Any]:
    "Return the signatures of the descriptions in `around`."
    return [
        child
        for node in around
        if isinstance(node, addnodes.desc)
        for child in node.children
        if isinstance(child, addnodes.desc_signature)
    ]


def leave_inner_names(
    app: Any, env: Any, node: addnodes.pending_xref, shown: nodes.Element
) -> nodes.Element | None:
    "Show a name of learnkit without a link if no page describes it."
    target = node.get('reftarget', '')
    module = target.rpartition('.')[0]
    return shown if module in modules() and target not in page_of() else None


def forget_builtins(app: Any) -> list[Any]:
    "Remove modules without source code from viewcode's list: it links to pages that it does not write."
    found = getattr(app.env, '_viewcode_modules', {})
    for name in [name for name, source in found.items() if not source]:
        del found[name]
    return []


def share_navigation(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    "Render the navigation once per folder for pages outside of it (source code of modules), where it does not change."
    if page in app.env.found_docs or 'toctree' not in context:
        return
    draw = context['toctree']
    folder = page.rpartition('/')[0]

    def drawn(**options: Any) -> str:
        key = folder, *sorted(options.items())
        if key not in _drawn:
            _drawn[key] = draw(**options)
        return _drawn[key]

    context['toctree'] = drawn


def show_drawing(app: Any, doctree: nodes.document) -> None:
    "Embed SVG files in the page, so that they have its colors and selectable text."
    for image in list(doctree.findall(nodes.image)):
        path = app.srcdir / image['uri']
        if path.suffix != '.svg' or not path.exists():
            continue
        drawing = nodes.raw('', path.read_text('utf-8'), format='html')
        image.replace_self(nodes.container('', drawing, classes=['drawing']))


def setup(app: Any) -> dict[str, bool]:
    "Connect the functions of this module to the events of Sphinx."
    app.connect('doctree-read', show_drawing)
    app.connect('doctree-resolved', link_names)
    app.connect('missing-reference', leave_inner_names)
    app.connect('html-collect-pages', forget_builtins, priority=100)  # before viewcode
    app.connect('html-page-context', share_navigation, priority=100)  # before the theme asks for it
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
