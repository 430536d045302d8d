"""What a pipe was recorded for: each recording with its reason, in ``pipe.recordings`` and in the log."""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.trace.inputs.differences import Difference

_LOG = logging.getLogger("autosplit")
_USUAL = 2
"""How many recordings a script commonly needs: one to train, and one to evaluate."""
_MOST_IN_A_ROW = 5
_NAMED = 3
_OTHER_BATCH = "another batch of a kind that was recorded, for which no recording holds"


@dataclass(frozen=True)
class RecordingNote:
    """A recording of a pipe, and why it was made; its text is one line.

    Attributes:
        number: which of the pipe's recordings it is, counted from 1.
        reason: what differed from the kind of call before that is most like this one: "the first call", or which
            entries of the call's signature, with the values that they had and have.
        way_out: what to change in the script where such calls are to need no recording; "" for the first call.
        time_s: how long it took, with planning where there was no plan yet.
        refused: why no graph can follow such calls, which the model's own Python runs; "" where a graph does.
        differences: what differed, entry by entry.
    """

    number: int
    reason: str
    way_out: str
    time_s: float
    refused: str = ""
    differences: Sequence[Difference] = ()

    def __str__(self) -> str:
        refused = f"; no graph can follow it: {self.refused}" if self.refused else ""
        return f"recording {self.number}, {self.time_s:.2f} s: {self.reason}{refused}"


class History:
    """The recordings of a pipe. Logs each, and warns once where calls in a row are all recorded.

    The first two are logged at level DEBUG and later ones at INFO, or all so that they show where no logging is set up,
    with ``recordings`` among the words of ``AUTOSPLIT_LOGS`` in the environment.
    """

    def __init__(self, name: str) -> None:
        self.notes: list[RecordingNote] = []
        self.in_a_row = 0
        """How many of the last calls were recorded; set to 0 by a call that was not."""
        self._name = name
        self._warned = False
        self._shows_all = "recordings" in os.environ.get("AUTOSPLIT_LOGS", "").replace(",", " ").split()

    def add(self, differences: Sequence[Difference], time_s: float, *, other: str = "", refused: str = "") -> None:
        """Note a recording, which was made for some differences; ``other``: for what no signature tells."""
        reason, way_out = _said(differences)
        reason = reason or other or (_OTHER_BATCH if self.notes else "the first call")
        note = RecordingNote(len(self.notes) + 1, reason, way_out, time_s, refused, differences)
        self.notes.append(note)
        level = logging.WARNING if self._shows_all else logging.INFO if note.number > _USUAL else logging.DEBUG
        _LOG.log(level, "%s: %s%s", self._name, note, way_out and f" ({way_out})")
        self.in_a_row += 1
        if self.in_a_row >= _MOST_IN_A_ROW and not self._warned:
            self._warned = True
            warnings.warn(self._warning(), UserWarning, stacklevel=2)

    def _warning(self) -> str:
        """Return what is said where calls in a row were all recorded: which entries keep changing, and the ways out."""
        last = self.notes[-_MOST_IN_A_ROW:]
        counts = Counter(d.what for note in last for d in note.differences)
        latest = {d.what: d for note in last for d in note.differences}
        reason, way_out = _said([d for what, d in latest.items() if counts[what] == max(counts.values())])
        return (
            f"{self._name} was recorded in {len(last)} calls in a row, which took {sum(n.time_s for n in last):.1f} s; "
            f"what keeps changing: {reason or last[-1].reason}{way_out and f' ({way_out})'}. pipe.recordings lists all"
        )


def _said(differences: Sequence[Difference]) -> tuple[str, str]:
    """Return what differs, the first entries by name, and the ways out."""
    more = f"; and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
    ways = dict.fromkeys(difference.way_out for difference in differences[:_NAMED])
    return "; ".join(map(str, differences[:_NAMED])) + more, "; ".join(ways)
