"""What learnkit costs, measured against loops written by hand: `python -m benchmarks`.

Each module is one question (`step.py`: what does a step cost?) and runs alone too: `python -m benchmarks.step --help`.
`harness.py` measures, `subjects.py` holds what is measured."""
