"""Predictions over a loader, interpretation, and sample tables."""
