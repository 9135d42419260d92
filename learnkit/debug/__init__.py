"""Tools to inspect a training run: help, explanations, traces, representations and reports."""
