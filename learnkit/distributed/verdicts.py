"""What the reports of all processes say: whether one of them hangs, has left or is gone, and which."""
from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ['Report', 'Verdict', 'judge']

SETTLED_S = 0.5     # after which all have told of a timeout that the first has told of
UNKNOWN_S = 3.      # after which a lost connection stays unexplained


class Verdict(NamedTuple):
    "What has ended a run."
    kind: str    # 'failed', 'hang', 'left', 'gone', or 'lost' for a connection
    rank: int    # of the process that did
    text: str


class Report(NamedTuple):
    "How a process is, by itself."
    beat: int = 0                        # grows while its watch is there
    inside: bool = False                 # in a run
    left: bool = False                   # its watch has been closed
    order: tuple[float, ...] = ()        # smaller, the earlier in the training it is
    text: str = ''                       # where it is
    stuck_s: float = 0.                  # for how long
    stack: str = ''                      # of its run, where that stands still
    lost: str = ''                       # what came out of a collective
    lost_s: float = 0.                   # how long ago
    timed_out: bool = False              # that was a timeout

    def json(self) -> str: return json.dumps(self)

    @classmethod
    def of(
        cls,
        text: bytes,    # as `json` gives it; nothing where a process has not reported yet
    ) -> Report:
        "Read a report."
        report = cls(*json.loads(text)) if text else cls()
        return report._replace(order=tuple(report.order))


def judge(
    reports: Sequence[Report],    # of each process, in the order of ranks
    silent_s: Sequence[float],    # since when each has not been heard of
    timeout_s: float,             # after which a process that stands still hangs, and a silent one is gone
    silence_s: float = 1.,        # after which a silent one is gone, when one of the others has lost a connection
) -> Verdict | None:
    """Tell what has gone wrong, where something has.

    A process that does something new is alive, however long the others wait for it. One hangs when all stand still for
    `timeout_s`, and it is behind the others; all at one place are busy with the same thing, as a compilation.

    >>> waits = Report(1, True, False, (1, 7), 'backward', 5.2)
    >>> hangs = Report(1, True, False, (1, 3), 'after_loss', 5.1)
    >>> judge([waits, hangs], [0, 0], timeout_s=5).text
    'Process 1 of 2 has been in after_loss for 5.1 s, while process 0 waits for it in backward. If ...'
    >>> judge([waits, hangs._replace(stuck_s=0.2)], [0, 0], timeout_s=5) is None
    True
    """
    ranks, size = range(len(reports)), len(reports)
    inside = [r for r in ranks if reports[r].inside and not reports[r].left]
    if not inside: return None
    lost = [r for r in inside if reports[r].lost]
    silent = [r for r in ranks if not reports[r].left and silent_s[r] > (silence_s if lost else timeout_s)]
    if silent: return _gone(reports, silent[0], silent_s[silent[0]], any(not reports[r].timed_out for r in lost))

    left = [r for r in ranks if reports[r].left]
    stuck = all(reports[r].stuck_s >= timeout_s for r in ranks if r not in left)
    if left and (lost or stuck):
        return Verdict('left', left[0], f'Process {left[0]} of {size} has left the training, while '
                                        f'{_named(inside)} waits for it in {reports[inside[0]].text}.')
    gave_up = [r for r in lost if reports[r].timed_out and reports[r].lost_s >= SETTLED_S]
    rest = [r for r in ranks if r not in gave_up]
    if (gave_up and rest) or (stuck and len({reports[r].order for r in ranks}) > 1):
        return _hangs(reports, min(rest or ranks, key=lambda r: reports[r].order), gave_up if rest else ())
    for r in lost:
        if reports[r].lost_s >= UNKNOWN_S: return Verdict('lost', r, f'Process {r} of {size} has lost its connection '
                                                                     f'in {reports[r].text}: {reports[r].lost}')
    return None


def _gone(reports: Sequence[Report], rank: int, silent_s: float, closed: bool) -> Verdict:
    where = f'; it was last in {reports[rank].text}' if reports[rank].inside else ''
    heard = f'nothing has been heard of it for {silent_s:.1f} s{where}'
    if closed: text = f'is gone: its connection was closed, and {heard}. Was it killed, for want of memory perhaps?'
    else: text = f'does not answer: {heard}. It was killed or stopped, or hangs in code that keeps Python\'s lock.'
    return Verdict('gone', rank, f'Process {rank} of {len(reports)} {text}')


def _hangs(reports: Sequence[Report], rank: int, gave_up: Sequence[int]) -> Verdict:
    own = reports[rank]
    others = gave_up or [r for r in range(len(reports)) if reports[r].order > own.order]
    text = f'Process {rank} of {len(reports)} has been in {own.text} for {own.stuck_s:.1f} s, while ' \
           f'{_named(others)} waits for it in {reports[others[0]].text}. If nothing in there takes so long, they ' \
           'have decided differently before, by a Cancel exception in one of them alone, or by a call there of what ' \
           'all do together (fit, validate, get_preds, gather): let `self.world.any(...)` take such a decision.'
    return Verdict('hang', rank, f'{text}\n{own.stack}'.rstrip())


def _named(ranks: Sequence[int]) -> str:
    more = f' (and {len(ranks) - 1} more)' if len(ranks) > 1 else ''
    return f'process {ranks[0]}{more}'
