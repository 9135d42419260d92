"""Installation: an editable install, the contents of the archives, metadata, and the command."""

import re
import subprocess
import sys
import tarfile
from email.parser import Parser
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from zipfile import ZipFile

import pytest

import learnkit
from learnkit.__main__ import main
from learnkit.core.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
FILES = 'setup.py settings.ini setup.cfg pyproject.toml MANIFEST.in README.md CHANGELOG.md LICENSE'.split()


@pytest.fixture(scope='module')
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "Build an editable wheel and a source archive from a copy of the sources, into `out`."
    pytest.importorskip('setuptools')
    clone = tmp_path_factory.mktemp('above') / 'learnkit'  # the name that a clone has
    clone.mkdir()
    for name in FILES:
        copy(ROOT / name, clone / name)
    copytree(ROOT / 'learnkit', clone / 'learnkit', ignore=ignore_patterns('__pycache__'))
    copytree(ROOT / 'tests' / 'project', clone / 'tests' / 'project')
    out = clone.parent / 'out'
    setup = ['editable_wheel', '--dist-dir', str(out)], ['sdist', '--dist-dir', str(out)]
    for command in setup:
        subprocess.run(
            [sys.executable, 'setup.py', '-q', *command],
            cwd=clone,
            check=True,
            capture_output=True,
            timeout=600,
        )
    return clone


@pytest.fixture
def editable(built: Path, tmp_path: Path) -> tuple[Path, Path]:
    "Return the folder of the editable install, and the clone."
    (wheel,) = (built.parent / 'out').glob('*.whl')
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return tmp_path, built


def test_type_checkers_find_an_editable_install(editable: tuple[Path, Path]) -> None:
    site, clone = editable
    (path_file,) = site.glob('*.pth')
    lines = path_file.read_text('utf-8').split()
    # type checkers follow lines that are folders, and run no lines of code
    assert [Path(line).resolve() for line in lines] == [clone.resolve()]
    assert (clone / 'learnkit' / 'py.typed').exists()


def test_metadata(editable: tuple[Path, Path]) -> None:
    (path,) = editable[0].glob('*.dist-info/METADATA')
    metadata = Parser().parsestr(path.read_text('utf-8'))
    assert metadata['Name'] == 'learnkit-torch' and metadata['Version'] == learnkit.__version__
    assert metadata['Author'] == 'learnkit contributors'
    assert 'Typing :: Typed' in metadata.get_all('Classifier', [])
    extras = set(metadata.get_all('Provides-Extra', []))
    assert {'demo', 'plots', 'notebook', 'all', 'test', 'dev'} <= extras
    for requirement in metadata.get_all('Requires-Dist', []):
        name, own_extras = re.match(r'([\w.-]+)(?:\[([\w,]+)\])?', requirement).groups()  # type: ignore[union-attr]
        if name == 'learnkit-torch':
            assert own_extras and set(own_extras.split(',')) <= extras
        assert name != 'learnkit'
    links = re.findall(r'\]\(([^)]+)\)', metadata.get_payload())
    assert [link for link in links if not link.startswith(('http', '#'))] == []


def test_the_source_archive_has_the_package_and_no_tests_that_cannot_run(built: Path) -> None:
    (path,) = (built.parent / 'out').glob('*.tar.gz')
    with tarfile.open(path) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    assert {
        'setup.py',
        'settings.ini',
        'LICENSE',
        'learnkit/py.typed',
        'learnkit/__init__.pyi',
    } <= names
    assert not [name for name in names if name.startswith('tests')]


# ------------------------------------------------------------------------- the command, other files


def test_version_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(['--version'])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f'learnkit {VERSION}\n'


@pytest.mark.parametrize('argv', [[], ['train'], ['--all']])
def test_other_commands_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and 'usage: python -m learnkit' in capsys.readouterr().err


def test_a_release_has_one_version_and_its_notes() -> None:
    def release(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / '.github' / 'release.py'), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    tag = f'v{VERSION}'
    assert release('check', tag).returncode == 0
    wrong = release('check', 'v99.0')
    assert wrong.returncode == 1 and 'CITATION.cff' in wrong.stderr
    assert release('notes', tag).stdout.strip()
    assert 'no section 99.0' in release('notes', 'v99.0').stderr
