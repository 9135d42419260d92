"""Build the package from settings.ini, which holds its name, version, requirements and extras."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).resolve().parent
ini = ConfigParser(interpolation=None)
ini.read_string((root / 'settings.ini').read_text(encoding='utf-8'))
cfg = ini['DEFAULT']
repository = cfg['repository'].rstrip('/')


def lines(key: str) -> list[str]:
    "The lines under `key`."
    return cfg[key].strip().splitlines()


def describe() -> str:
    "README with links that work outside the repository: absolute ones, or none as long as it has no address."
    text = (root / 'README.md').read_text(encoding='utf-8')
    if not repository:
        text = re.sub(r'!\[[^\]]*\]\((?!https?:)[^)]+\)\n*', '', text)
        return re.sub(r'\[([^\]]+)\]\((?!https?:|#)[^)]+\)', r'\1', text)
    text = re.sub(r'(!\[[^\]]*\])\((?!https?:)([^)]+)\)', rf'\1({repository}/raw/main/\2)', text)
    return re.sub(
        r'(?<!!)(\[[^\]]+\])\((?!https?:|#)([^)]+)\)', rf'\1({repository}/blob/main/\2)', text
    )


setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=describe(),
    long_description_content_type='text/markdown',
    author=cfg['author'],
    keywords=cfg['keywords'].split(),
    classifiers=lines('classifiers'),
    url=repository or None,
    project_urls={'Changelog': f'{repository}/blob/main/CHANGELOG.md'} if repository else {},
    license=cfg['license'],
    license_files=['LICENSE'],
    python_requires=f'>={cfg["min_python"]}',
    # the root named as a folder makes an editable install a path, which type checkers read
    package_dir={'': '.'},
    packages=find_packages(include=['learnkit', 'learnkit.*']),
    package_data={'': ['py.typed', '*.pyi']},
    install_requires=lines('requirements'),
    extras_require={
        key.removesuffix('_requirements'): lines(key)
        for key in cfg
        if key.endswith('_requirements')
    },
)
