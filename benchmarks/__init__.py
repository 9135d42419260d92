"""Cost of learnkit compared with hand-written loops: `python -m benchmarks`.

Each module answers one question (`step.py`: what does a step cost?) and can be run separately:
`python -m benchmarks.step --help`. `harness.py` measures, `subjects.py` has the training programs."""
