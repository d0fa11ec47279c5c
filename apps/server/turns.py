"""Threads that compute in turns, so that long work of one does not delay the others.

A thread computes while it has a turn, and passes the turn as an argument to the functions that it calls. Only one
thread computes between two calls of `pass_on`, so nothing else has to be safe for threads.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from ...kv_cache_arcaligner import Turn
from .request import Request


class EndedError(Exception):
    """Some requests of a group have ended while all of them were computed together; their futures have the reason."""


class Turns:
    """
    Lets one thread compute at a time. When a thread has computed long enough, its next call of `pass_on` passes the
    turn on: alternately to the thread that has computed least, so that new work begins soon, and to the thread that has
    waited longest, so that long work continues.

    Args:
        seconds (`float`): How long a turn takes while others wait.
        first_seconds (`float`): How long the first turn of new work takes, so that short work is done in one turn.
    """

    def __init__(self, seconds: float = 0.1, first_seconds: float = 0.5):
        self.seconds, self.first_seconds = seconds, first_seconds
        self._change = threading.Condition()
        self._holder: ThreadTurn | None = None
        self._waiting: list[ThreadTurn] = []
        self._new_first = False

    def take(self) -> "ThreadTurn":
        """Wait for a turn for new work; `give` it back at the end."""
        turn = ThreadTurn(self)
        self.wait_for(turn)
        return turn

    def wait_for(self, turn: "ThreadTurn") -> None:
        """Wait until it is this thread's turn."""
        with self._change:
            self._queue(turn)

    def leave(self, turn: "ThreadTurn") -> None:
        """Let others compute."""
        with self._change:
            self._leave(turn)

    def pass_on(self, turn: "ThreadTurn") -> None:
        """Let others compute, if any wait and this turn is over."""
        with self._change:
            seconds = time.monotonic() - turn.since
            if self._waiting and seconds >= (self.seconds if turn.used else self.first_seconds):
                self._leave(turn)
                self._queue(turn)

    def _queue(self, turn: "ThreadTurn") -> None:
        turn.since = time.monotonic()
        self._waiting.append(turn)
        if self._holder is None:
            self._pass_to_next()
        self._change.wait_for(lambda: self._holder is turn)
        turn.since = time.monotonic()

    def _leave(self, turn: "ThreadTurn") -> None:
        turn.used += time.monotonic() - turn.since
        self._holder = None
        if self._waiting:
            self._pass_to_next()

    def _pass_to_next(self) -> None:
        self._new_first = not self._new_first
        self._holder = min(self._waiting, key=lambda turn: (turn.used if self._new_first else 0.0, turn.since))
        self._waiting.remove(self._holder)
        self._change.notify_all()


class ThreadTurn(Turn):
    """The turn of one thread, taken from `Turns`. Attributes: `used`, the seconds for which the thread has computed,
    and `since`, when it began to compute or to wait."""

    def __init__(self, turns: Turns):
        self.turns, self.used, self.since = turns, 0.0, 0.0

    def pass_on(self) -> None:
        """Let others compute, if any wait and this turn is over."""
        self.turns.pass_on(self)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Let others compute inside the `with` block."""
        self.turns.leave(self)
        try:
            yield
        finally:
            self.turns.wait_for(self)

    def give(self) -> None:
        """Give the turn back, because the work of this thread is done."""
        self.turns.leave(self)


class GroupTurn(Turn):
    """A thread's turn while it computes for several requests. If one of the requests ends, the computation ends as
    well, and its caller computes again for the others. So nothing is computed for a request without a client."""

    def __init__(self, turn: ThreadTurn, requests: Sequence[Request]):
        self.turn, self.requests = turn, requests
        self.check()

    def pass_on(self) -> None:
        """As [`ThreadTurn.pass_on`].

        Raises:
            `EndedError`: some of the requests have ended.
        """
        self.turn.pass_on()
        self.check()

    def away(self) -> contextlib.AbstractContextManager:
        """As [`ThreadTurn.away`]."""
        return self.turn.away()

    def check(self) -> None:
        """Raise `EndedError` if some of the requests have ended."""
        now = time.monotonic()
        if ended := [request for request in self.requests if now > request.deadline]:
            for request in ended:
                request.end()
            raise EndedError
