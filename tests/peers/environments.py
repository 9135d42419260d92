"""Make a virtual environment for each package that the bench compares with, over the project's own.

A package is installed without its dependencies: what the project has is seen through a `.pth` file, what is missing is
named here. `TORCHVISION` is the release for the torch that is installed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.environments import FOLDER, create_empty, install

TORCHVISION = f'torchvision==0.{int(version("torch").split(".")[1]) + 15}.*'


@dataclass(frozen=True)
class Peer:
    "A package that the bench compares with; its bench is the module `tests.peers.<name>_bench`."

    name: str
    # installed without dependencies; a peer without requirements runs in the project's environment
    requirements: tuple[str, ...] = ()


PEERS = [
    Peer(
        'fastai',
        (
            'fastai==2.8.12',
            'accelerate==1.15.*',
            'beartype==0.23.*',
            'fastdownload==0.0.8',
            'fastprogress==1.0.*',
            'fasttransform==0.0.5',
            'plum-dispatch==2.9.*',
            TORCHVISION,
        ),
    ),
    Peer(
        'composer',
        (
            'mosaicml==0.32.1',
            'antlr4-python3-runtime==4.9.*',
            'arrow==1.4.*',
            'backoff==2.2.*',
            'coolname==5.0.*',
            'gql==4.4.*',
            'graphql-core==3.2.*',
            'mosaicml-cli==0.8.*',
            'omegaconf==2.4.*',
            'py-cpuinfo==9.0.*',
            'pynvml==13.0.*',
            'questionary==2.1.*',
            'ruamel.yaml==0.19.*',
            'tenacity==9.2.*',
            'torch-optimizer==0.3.*',
            'validators==0.36.*',
            'websockets==17.*',
            TORCHVISION,
        ),
    ),
    Peer('lightning', ('lightning==2.6.*',)),
    # Noether is on no index: `ksuit_callbacks` states what its callbacks ask for
    Peer('ksuit'),
    Peer('hf'),  # transformers is in the project's own environment
    Peer(
        'keras',
        ('h5py==3.16.*', 'keras==3.15.*', 'namex==0.1.*', 'optree==0.20.*'),
    ),
]


# the environment of Noether's own code, which runs from a copy of its repository
NOETHER = Peer(
    'noether',
    (
        'einops==0.8.*',
        'omegaconf==2.3.*',
        'antlr4-python3-runtime==4.9.*',
        'pydantic==2.*',
        'loguru==0.7.*',
    ),
)


# the environment of programs that Lightning's users wrote, which run from copies of their repositories
SCRIPTS = Peer('scripts', ('lightning==2.6.*', TORCHVISION))


class InstallError(Exception):
    "A package could not be installed; the message is pip's last line."


def make_environment(peer: Peer) -> Path:
    """Return the Python of a peer's environment, which is made and filled when its requirements have changed.

    Raises `InstallError` where pip fails."""
    if not peer.requirements:
        return Path(sys.executable)
    folder = FOLDER / peer.name
    python = folder / 'bin' / 'python'
    stamp = folder / 'installed.txt'
    requirements = '\n'.join([version('torch'), *peer.requirements])
    if stamp.exists() and stamp.read_text('utf-8') == requirements:
        return python
    create_empty(folder)
    error = install(folder, *peer.requirements)
    if error is not None:
        raise InstallError(error)
    stamp.write_text(requirements, 'utf-8')
    return python
