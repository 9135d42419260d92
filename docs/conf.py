"""Configuration of Sphinx for the site: guides (nbs/), pages (docs/) and docstrings. `make docs` builds the site."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import learnkit  # noqa: E402  # the folders above come first

# pages are written again when the code that generates them has changed
site_code = sha256(b''.join(path.read_bytes() for path in sorted(HERE.glob('*.py')))).hexdigest()

project = 'learnkit'
author = 'the learnkit authors'
copyright = 'the learnkit authors, Apache 2.0'
version = release = learnkit.__version__

extensions = [
    'myst_nb',
    'sphinx.ext.autodoc',
    'sphinx.ext.viewcode',
    'site_pages',
    'site_docstrings',
    'site_names',
]
exclude_patterns = ['_build']
nitpicky = True
# other projects' names: nothing is fetched to look them up
nitpick_ignore_regex = [('py:.*', r'(?!learnkit\.).*')]
suppress_warnings = ['toc.empty_glob']  # an empty kind of page

nb_execution_mode = 'off'  # the outputs are saved in the notebooks, and the tests run them
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # nothing is loaded from other hosts
myst_heading_anchors = 3
smartquotes = False  # 'auto' is displayed as it is typed

autodoc_default_options = {'member-order': 'bysource', 'show-inheritance': True}
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = 'hide'

pygments_dark_style = 'github-dark'

html_theme = 'furo'
html_favicon = 'static/icon.svg'
html_title = f'learnkit {version}'
html_static_path = ['static']
html_css_files = ['site.css']
html_search_scorer = str(HERE / 'search_scorer.js')
html_copy_source = False
html_show_sphinx = False
