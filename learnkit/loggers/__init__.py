"""Loggers for files, services such as TensorBoard and Weights & Biases, and the console, with one interface."""

from learnkit.loggers.aim import AimLogger
from learnkit.loggers.api import log_images, log_params, log_text
from learnkit.loggers.base import Logger
from learnkit.loggers.comet import CometLogger
from learnkit.loggers.console import ConsoleLogger
from learnkit.loggers.files import CSVLogger, JSONLinesLogger, read_log
from learnkit.loggers.mlflow import MlflowLogger
from learnkit.loggers.tensorboard import TensorBoardLogger
from learnkit.loggers.wandb import WandbLogger

__all__ = [
    'Logger',
    'AimLogger',
    'CometLogger',
    'ConsoleLogger',
    'CSVLogger',
    'JSONLinesLogger',
    'MlflowLogger',
    'TensorBoardLogger',
    'WandbLogger',
    'log_images',
    'log_params',
    'log_text',
    'read_log',
]
