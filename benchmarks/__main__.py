"""Run the quick set of every benchmark: `python -m benchmarks`, in less than 3 minutes."""
import sys

from benchmarks import step

if __name__ == '__main__': sys.exit(step.main())
