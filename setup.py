"""Build the package from settings.ini, which holds its name, version, requirements and extras."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).resolve().parent
ini = ConfigParser(interpolation=None)
ini.read_string((root / 'settings.ini').read_text(encoding='utf-8'))
cfg = ini['DEFAULT']


def lines(key: str) -> list[str]:
    "The requirements under `key`."
    return cfg[key].strip().splitlines()


setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=(root / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    keywords=cfg['keywords'].split(),
    license=cfg['license'],
    license_files=['LICENSE'],
    python_requires=f'>={cfg["min_python"]}',
    packages=find_packages(include=[cfg['lib_name'], f'{cfg["lib_name"]}.*']),
    package_data={'': ['py.typed', '*.pyi']},
    install_requires=lines('requirements'),
    extras_require={
        key.removesuffix('_requirements'): lines(key)
        for key in cfg
        if key.endswith('_requirements')
    },
)
