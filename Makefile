# What is done often, with .venv's Python where there is one.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

.PHONY: docs test quick lint peers sweeps wheel constraints lowest latest

docs:  # the site, into docs/_build/html; what Sphinx warns of is an error
	$(PYTHON) -m sphinx -W --keep-going -q -d docs/_build/doctrees docs docs/_build/html \
		|| { rm -rf docs/_build/doctrees; exit 1; }  # else the next build would not warn again

test:
	$(PYTHON) -m pytest -n 2 --dist worksteal

quick:  # for every save: each test once, without the slow ones
	$(PYTHON) -m pytest -n 2 --dist worksteal -q --quick

lint:
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	$(PYTHON) -m tests.house  # the last two are reports, and fail nothing
	$(PYTHON) -m tests.taste

# The tests with the oldest releases that settings.ini names, and with the newest of everything. uv resolves the oldest.
lowest: OPTIONS = --resolution lowest-direct
latest: OPTIONS = --upgrade
lowest latest:
	python3 -m venv .venv-$@
	.venv-$@/bin/pip install -q uv
	.venv-$@/bin/uv pip install -q --python .venv-$@/bin/python $(OPTIONS) -e '.[dev]'
	.venv-$@/bin/python -m pytest -n 2 --dist worksteal --slow=all

peers:  # other packages' callbacks, in learnkit and in their own trainers; into docs/compatibility.md
	$(PYTHON) -m tests.peers --write

sweeps:  # loaders, optimizers, metrics, modules ... of the installed libraries; into docs/checkpoints.md and docs/support.md
	$(PYTHON) -W ignore -m tests.sweeps --write

wheel:  # the package as it is uploaded, into dist/
	$(PYTHON) -m pip wheel -q --no-deps -w dist .

constraints:  # the versions that are installed, into constraints.txt
	{ head -2 constraints.txt; $(PYTHON) -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt
