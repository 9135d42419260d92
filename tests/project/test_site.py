"""The site: it builds without a warning, no link of it is broken, nothing comes from elsewhere, and names are there."""

import re
import runpy
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

import learnkit
from learnkit.engine.events import EVENTS, LIFECYCLE
from tests.helpers.building import build
from tests.helpers.fresh import output_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / 'docs'
# by CSS, from another host
FETCHED = re.compile(r'(?:url\(|@import)\s*["\']?((?:https?:)?//[^"\')]+)')
site_test = pytest.mark.site


# ------------------------------------------------------------------------------------ the API pages


def list_public_values() -> Iterator[Any]:
    "Yield the classes and functions of the package that users import."
    public = 'all callbacks monitors metrics losses loggers optim data testing distributed interop checkpoint'
    for module in ('learnkit', *(f'learnkit.{name}' for name in public.split())):
        for name in getattr(import_module(module), '__all__', ()):
            value = getattr(import_module(module), name)
            if isinstance(value, type | FunctionType) and value.__module__.startswith('learnkit'):
                yield value


def test_the_module_of_every_public_name_belongs_to_an_api_page() -> None:
    tasks = runpy.run_path(str(DOCS / 'site_tasks.py'))['TASKS']
    on_pages = {f'learnkit.{module}' for task in tasks for module in task.modules}
    missing = {value.__module__ for value in list_public_values()} - on_pages
    assert not missing, 'add each module to a page of docs/site_tasks.py'


def test_every_public_member_of_the_learner_is_on_one_page_about_a_task() -> None:
    pages = runpy.run_path(str(DOCS / 'site_tasks.py'))['LEARNER_PAGES']
    listed = [name for page in pages for name in page.members]
    members = {
        name
        for cls in learnkit.Learner.__mro__
        for name, value in vars(cls).items()
        if not name.startswith('_') and isinstance(value, FunctionType | property)
    }
    assert sorted(listed) == sorted(members), 'list each once, in LEARNER_PAGES of site_tasks.py'


# -------------------------------------------------------------------------------------- the drawing


@cache
def drawing() -> str:
    "The lifecycle as it is drawn now."
    return output_of('import lifecycle_svg; print(lifecycle_svg.draw(), end="")', cwd=DOCS)


def test_the_drawing_has_every_event_in_order_and_is_what_the_page_shows() -> None:
    drawn = (DOCS / 'lifecycle.svg').read_text('utf-8')
    assert drawn == drawing(), 'write it again: python docs/lifecycle_svg.py'
    assert '](lifecycle.svg)' in (DOCS / 'lifecycle.md').read_text('utf-8')

    texts = re.findall(r'<text class="(\w+)[^>]*>(?:<title>[^<]*</title>)?([^<]+)', drawn)
    assert [text for kind, text in texts if kind != 'note'] == [
        m.event for m in LIFECYCLE if not m.is_note
    ]
    assert {text for kind, text in texts if kind != 'note'} == set(EVENTS)
    assert sum(kind == 'note' for kind, _ in texts) == sum(m.is_note for m in LIFECYCLE)


def test_the_map_is_what_its_script_draws_and_its_page_shows() -> None:
    drawn = (DOCS / 'architecture.svg').read_text('utf-8')
    expected = output_of(
        'import architecture_svg; print(architecture_svg.draw(), end="")', cwd=DOCS
    )
    assert drawn == expected, 'write it again: python docs/architecture_svg.py'
    assert '](architecture.svg)' in (DOCS / 'architecture.md').read_text('utf-8')


def test_the_first_page_shows_the_table_and_pictures_of_one_run() -> None:
    text = (DOCS / 'index.md').read_text('utf-8')
    right, total = re.search(r'(\d+) of (\d+) validation digits', text).groups()
    *_, last = re.search(r'```text\n(.*?)\n```', text, re.S)[1].split('\n')
    assert f'{int(right) / int(total):.6f}' in last
    assert all((DOCS / name).exists() for name in re.findall(r'\]\((static/[^)]+)\)', text))


# ---------------------------------------------------------------------------------------- the pages


class Page(HTMLParser):
    "What a page refers to, and what can be referred to in it."

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []  # where a reader may go
        self.loaded: list[str] = []  # what the browser fetches
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or '' for key, value in attrs}
        self.anchors |= {found[key] for key in ('id', 'name') if key in found}
        if tag == 'a' and 'href' in found:
            self.links.append(found['href'])
        elif 'href' in found and tag != 'use':
            self.loaded.append(found['href'])
        self.loaded += [found[key] for key in ('src', 'data', 'poster') if key in found]


def parts(url: str, page: Path) -> tuple[Path, str]:
    "The file and the anchor that a page's link without a host leads to."
    path, anchor = urldefrag(url)
    return (page.parent / unquote(urlsplit(path).path)).resolve() if path else page, unquote(anchor)


def broken(folder: Path) -> Iterator[str]:
    "Say of every link, within a folder of pages, that leads nowhere, and of everything that comes from another host."
    pages = {path.resolve(): Page(path.read_text('utf-8')) for path in folder.rglob('*.html')}
    for path, page in pages.items():
        for url in page.links + page.loaded:
            scheme = urlsplit(url).scheme or ('//' if url.startswith('//') else '')
            if scheme:
                if url in page.loaded and scheme != 'data':
                    yield f'{path.name} loads {url}'
                continue
            target, anchor = parts(url, path)
            if not target.exists():
                yield f'{path.name}: there is no {url}'
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f'{path.name}: no {url}'
    for path in folder.rglob('*.css'):
        yield from (f'{path.name} loads {url}' for url in FETCHED.findall(path.read_text('utf-8')))


@pytest.fixture(scope='module')
def site() -> Path:
    "Build the site: what has changed since the last time, and all of it the first time."
    return build()


@site_test
def test_the_site_builds_without_a_warning_and_without_a_broken_link(site: Path) -> None:
    assert not sorted(broken(site))


@site_test
def test_every_public_name_is_described_once_and_no_internal_one(site: Path) -> None:
    pages = {path.stem: Page(path.read_text('utf-8')) for path in (site / 'api').glob('*.html')}
    anchors = {anchor for page in pages.values() for anchor in page.anchors}
    for value in list_public_values():
        full = f'{value.__module__}.{value.__qualname__}'
        assert sum(full in page.anchors for page in pages.values()) == 1, full
    assert {
        'learnkit.learner.Learner.fit',
        'learnkit.engine.events.EVENTS',
        'learnkit.learner.Learner.lr_find',
        # from its base classes
        'learnkit.learner.Learner.add_cb',
    } <= anchors
    assert 'learnkit.engine.snapshot' not in ' '.join(anchors)
