"""What every other package uses: errors, time, batches, random state, files, HTML."""
