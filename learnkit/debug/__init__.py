"""Tools that look inside a training run."""
