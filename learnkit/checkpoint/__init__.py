"""Checkpoints, weight files, and exported models."""
