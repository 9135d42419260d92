"""What the sweeps by claim share: a claim's verdict, and the table of subjects and claims."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from learnkit import Callback
from learnkit.core import validation
from learnkit.core.errors import LearnkitError
from tests.helpers.forks import HarnessError, Planned, reached, start
from tests.sweeps.verdicts import Subject, Verdict, count_libraries, find_version, shorten

EQUAL = 'equal'
NAMED = 'named'  # a typed error or a warning, or the loop by hand fails too
WRONG = 'WRONG'
KINDS = (EQUAL, NAMED, WRONG)
TIMEOUT_S = 300
# part of a warning that names layers or numbers -> the same without them
SAME_WARNINGS = {
    'sees each microbatch': 'norm layers see each microbatch on its own',
    'see each microbatch': 'norm layers see each microbatch on its own',
    'is not a mean over samples': 'the loss is not a mean over samples',
}
Weights = dict[str, Tensor]
# f(subject, folder) -> what differs from the loop by hand
Claim = Callable[[Subject, Path], list[str]]


class Inapplicable(Exception):
    "Raised by a claim that a loop by hand does not fulfil either; the message is the reason."


class NothingToTry(Exception):
    "Raised by a claim that says nothing about a subject; there is no verdict."


def by_hand(run: Callable[[], Any]) -> Any:
    "Return the result of a loop by hand; raise `Inapplicable` if it fails."
    try:
        return run()
    except Exception as e:
        text = shorten(f'{type(e).__name__}: {e}')
        raise Inapplicable(f'the loop by hand fails too: {text}') from e


class Killed(Callback):
    "The place at which a run is killed."

    order = -50

    def before_batch(self) -> None:
        reached('batch')

    def state_dict(self) -> None:
        return None


def weights_of(model: nn.Module) -> Weights:
    "Return a copy of the weights and buffers."
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def run_killed(
    train: Callable[[], Any],  # trains, or resumes from the newest checkpoint
    kills: Sequence[int],  # at which call of `reached('batch')` of its process a run is killed
) -> Any:
    "Run in new processes, of which each is killed by SIGKILL but the last, and return its result."
    for kill in (*kills, None):
        planned = None if kill is None else Planned('batch', kill, signal.SIGKILL, group=False)
        with start(partial(_catch_typed, train), planned) as child:
            code = child.wait(60)
            if kill is not None and code == -signal.SIGKILL:
                continue
            if code:
                raise child.error(f'ended with {code}')
            outcome: dict[str, Any] = child.result
            if outcome['error']:
                raise Inapplicable(outcome['error'])
            return outcome['result']


def _catch_typed(train: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {'error': '', 'result': train()}
    except LearnkitError as e:
        return {'error': shorten(f'{type(e).__name__}: {e}')}


def judge_claims(
    subject: Subject,
    claims: dict[str, Claim],
    folder: Path,  # an empty folder
) -> list[Verdict]:
    "Try a subject with each claim in a forked process, and return a verdict for each."
    with start(partial(_judge_all, subject, claims, folder)) as child:
        try:
            code = child.wait(TIMEOUT_S)
            error = f'ended with {code}: {child.stderr.strip()[-200:]}' if code else ''
        except HarnessError as e:
            error = shorten(str(e))
        found = [('', WRONG, error)] if error else child.result
    version = find_version(subject.library) or ''
    for claim, kind, note in found:
        if kind != EQUAL:
            print(f'{kind:6} {subject.name}, {claim}: {note}', flush=True)
    return [
        Verdict(subject.library, version, subject.title, kind, note, claim)
        for claim, kind, note in found
    ]


def _judge_all(
    subject: Subject, claims: dict[str, Claim], folder: Path
) -> list[tuple[str, str, str]]:
    found = []
    for claim, check in claims.items():
        own = folder / claim.replace(' ', '_')
        own.mkdir()
        try:
            found.append((claim, *judge_claim(partial(check, subject, own))))
        except NothingToTry:
            continue
    return found


def judge_claim(check: Callable[[], list[str]]) -> tuple[str, str]:
    "Return the verdict of a claim with the reason in words."
    warned: list[str] = []

    def note_warning(message: Any, *args: Any, **kwargs: Any) -> None:
        warned.append(str(message))

    before = validation.warn
    validation.warn = note_warning  # type: ignore[assignment]
    try:
        differing = check()
    except NothingToTry:
        raise
    except Inapplicable as e:
        return NAMED, str(e)
    except LearnkitError as e:
        return NAMED, shorten(f'{type(e).__name__}: {e}')
    except HarnessError as e:
        return WRONG, shorten(str(e).strip().splitlines()[-1])
    except Exception as e:
        return WRONG, shorten(f'{type(e).__name__}: {e}')
    finally:
        validation.warn = before
    if not differing:
        return EQUAL, ''
    if warned:
        return NAMED, f'a warning: {_shorten_warning(warned[0])}'
    return WRONG, ', '.join(differing)


def _shorten_warning(text: str) -> str:
    return next((same for part, same in SAME_WARNINGS.items() if part in text), shorten(text))


# -- the table -------------------------------------------------------------------------------------


def count_claims(verdicts: Sequence[Verdict], what: str) -> str:
    "Return a sentence with the number of subjects and of claims by verdict."
    subjects: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        subjects.setdefault((verdict.library, verdict.title), []).append(verdict.verdict)
    kinds = [verdict.verdict for verdict in verdicts]
    counts = ', '.join(f'{kinds.count(kind)} {kind}' for kind in KINDS if kind in kinds)
    n_equal = sum(set(found) == {EQUAL} for found in subjects.values())
    n_libraries = len({library for library, _ in subjects} - {''})
    return (
        f'{len(subjects)} {what}, {count_libraries(n_libraries)}: {n_equal} equal in every claim. '
        f'Of {len(kinds)} verdicts: {counts}.'
    )


def make_claims_table(verdicts: Sequence[Verdict], head: str) -> str:
    "Return a Markdown table with a row for all subjects of a library that have the same verdicts."
    outcomes: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for verdict in verdicts:
        reasons = outcomes.setdefault((verdict.library, verdict.version, verdict.title), {})
        if verdict.verdict != EQUAL:
            claims = reasons.setdefault(f'{verdict.verdict}: {verdict.note}', [])
            claims.append(verdict.claim)
    rows: dict[tuple[str, str], list[str]] = {}
    for (library, version, title), reasons in outcomes.items():
        cells = [f'{", ".join(claims)} {reason}' for reason, claims in reasons.items()]
        name = f'{library} {version}' if library else 'no library'
        rows.setdefault((name, '; '.join(cells) or EQUAL), []).append(title)
    lines = [f'| library | {head} | verdict |', '|---|---|---|']
    lines += [f'| {library} | {", ".join(t)} | {found} |' for (library, found), t in rows.items()]
    return '\n'.join(lines)
