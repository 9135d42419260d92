"""Version of the package, which checkpoints and saved Learners record."""

__all__ = ['VERSION']

VERSION = '0.1.0'  # the same in settings.ini
