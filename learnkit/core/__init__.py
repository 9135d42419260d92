"""Modules that all other packages use: errors, time, batches, random state, files, HTML."""
