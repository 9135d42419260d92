"""Copy the pages that are not in docs/ into it: guides from nbs/, the API, examples, and the project's own documents.

The copies are written when a build starts, and git ignores them. A link to another file of the repository becomes a
link to its page. A file without a page is an error, since the link would lead nowhere on the site."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import architecture_svg
import lifecycle_svg
from site_api import index_page, learner_page, task_page
from site_tasks import LEARNER_PAGES, TASKS

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAPERS = 'CHANGELOG', 'CONTRIBUTING', 'SECURITY'
CODE = {
    '.py': 'python',
    '.sh': 'bash',
    '': 'text',
}  # languages of the files that are shown as they are
MADE = 'guides', 'project', 'api', 'code'  # folders of generated pages
CODE_BLOCK = re.compile(r'(^```.*?^```)', re.MULTILINE | re.DOTALL)
LINK = re.compile(r'(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)')


def pages() -> dict[Path, str]:
    "Return the path of each page on the site, by its file in the repository."
    found = {ROOT / 'README.md': 'index.md', DOCS / 'index.md': 'index.md'}
    found |= {path: path.name for path in sorted(DOCS.glob('*.md')) if path.stem != 'index'}
    found |= {path: f'howto/{path.name}' for path in sorted(DOCS.glob('howto/*.md'))}
    found |= {path: f'guides/{path.name}' for path in sorted((ROOT / 'nbs').glob('*.ipynb'))}
    found |= {
        path: f'project/{name.lower()}.md'
        for name in PAPERS
        if (path := ROOT / f'{name}.md').exists()
    }
    examples = sorted((ROOT / 'examples').iterdir())
    files = [
        *(path for path in examples if path.suffix in CODE and path.is_file()),
        ROOT / 'LICENSE',
    ]
    found |= {path: f'code/{path.name}.md' for path in files}
    for task in TASKS:
        modules = [ROOT / 'learnkit' / f'{name.replace(".", "/")}.py' for name in task.modules]
        found |= dict.fromkeys(modules, f'api/{task.slug}.rst')
    return found


def relinked(text: str, folder: Path, known: dict[Path, str]) -> str:
    """Return Markdown of a file in `folder`, with links to files of the repository replaced by links to pages.

    Raises `LookupError` for a link to a file without a page, or to no file.
    """

    def one(match: re.Match[str]) -> str:
        label = match[1]
        target = match[2]
        anchor = match[3] or ''
        path = (folder / target).resolve()
        if path in known:
            return f'[{label}](/{known[path]}{anchor})'
        if ':' in target:
            return match[0]
        raise LookupError(f'{folder}: [{label}]({target}) leads to no page of the site.')

    parts = CODE_BLOCK.split(text)  # every second part is a block of code
    parts[::2] = [LINK.sub(one, part) for part in parts[::2]]
    return ''.join(parts)


def guide(path: Path, known: dict[Path, str]) -> str:
    "Return a notebook with links to files of the repository replaced by links to pages."
    notebook = json.loads(path.read_text('utf-8'))
    for cell in notebook['cells']:
        if cell['cell_type'] == 'markdown':
            cell['source'] = relinked(''.join(cell['source']), path.parent, known)
    return json.dumps(notebook, ensure_ascii=False, indent=1)


def code_page(path: Path) -> str:
    "Return a page that shows a file."
    name = path.relative_to(ROOT).as_posix()
    language = CODE[path.suffix]
    return f'---\norphan: true\n---\n\n# {name}\n\n````{language}\n{path.read_text("utf-8")}````\n'


def made() -> dict[str, str]:
    "Return every generated page, by its path on the site."
    known = pages()
    contents = {'api/index.rst': index_page()}
    contents |= {f'api/{task.slug}.rst': task_page(task) for task in TASKS}
    contents |= {f'api/{page.slug}.rst': learner_page(page) for page in LEARNER_PAGES}
    for path, page in known.items():
        if page.startswith('guides/'):
            contents[page] = guide(path, known)
        if page.startswith('project/'):
            contents[page] = relinked(path.read_text('utf-8'), path.parent, known)
        if page.startswith('code/'):
            contents[page] = code_page(path)
    drawings = architecture_svg, lifecycle_svg
    return contents | {drawing.FILE.name: drawing.draw() for drawing in drawings}


def write_pages(app: Any, config: Any) -> None:
    """Write pages that have changed, and delete pages that no longer exist.

    If a page of the API has changed, the pages with the source code are deleted: they link to the API, and
    `sphinx.ext.viewcode` otherwise writes only those of changed modules."""
    contents = made()
    changed = False
    for page, text in contents.items():
        path = DOCS / page
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text('utf-8') != text:
            path.write_text(text, 'utf-8')
            changed |= page.startswith('api/')
    for folder in MADE:
        for path in (DOCS / folder).iterdir():
            if f'{folder}/{path.name}' not in contents:
                path.unlink()
    if changed:
        shutil.rmtree(Path(app.outdir) / '_modules', ignore_errors=True)


def relink_page(app: Any, docname: str, content: list[str]) -> None:
    "Replace the links of a page in docs/."
    if docname.split('/')[0] in MADE:
        return
    content[0] = relinked(content[0], (DOCS / docname).parent, pages())


def setup(app: Any) -> dict[str, bool]:
    "Connect the functions of this module to the events of Sphinx."
    app.add_config_value('site_code', '', 'env')
    app.connect('config-inited', write_pages)
    app.connect('source-read', relink_page)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
