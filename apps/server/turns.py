"""Threads that compute in turns, so that long work of one does not delay the others.

Each has its own stack and thread-locals, such as the mode of PyTorch, but only one runs between two calls of
`pass_on`, so that nothing else has to be safe for threads.
"""

import threading
import time


class _Turn:
    """For one thread, the seconds that it has computed, and since when it computes or waits."""

    used = since = 0.0


class Turns:
    """
    One thread at a time has the turn, and passes it on at its next `pass_on` when it has computed long enough. The turn
    goes alternately to the thread that has computed least, so that new work begins soon, and to the one that has waited
    longest, so that long work continues.

    Args:
        seconds (`float`): How long a turn takes while others wait.
        first_seconds (`float`): How long new work has the turn at first: short work is done then.
    """

    def __init__(self, seconds: float = 0.1, first_seconds: float = 0.5):
        self.seconds, self.first_seconds = seconds, first_seconds
        self._own = threading.local()
        self._change = threading.Condition()
        self._holder: _Turn | None = None
        self._waiting: list[_Turn] = []
        self._new_first = False

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn."""
        return getattr(self._own, "turn", None) is not None

    def take(self) -> None:
        """Wait for a turn for new work; `give` it back at the end."""
        self._own.turn = _Turn()
        self._take()

    def give(self) -> None:
        """The work of this thread is done."""
        self._give()
        self._own.turn = None

    def pass_on(self) -> None:
        """Let others compute, if any wait and this thread's turn is over. Does nothing in threads without a turn."""
        if not self.is_mine:
            return
        turn = self._own.turn
        with self._change:
            seconds = time.monotonic() - turn.since
            if self._waiting and seconds >= (self.seconds if turn.used else self.first_seconds):
                self._leave(turn)
                self._queue(turn)

    def wait(self, event: threading.Event, seconds: float | None = None) -> None:
        """Wait for another thread's work without the turn, `seconds` at most."""
        if not self.is_mine:
            event.wait(seconds)
            return
        self._give()
        try:
            event.wait(seconds)
        finally:
            self._take()

    def _take(self) -> None:
        with self._change:
            self._queue(self._own.turn)

    def _give(self) -> None:
        with self._change:
            self._leave(self._own.turn)

    def _queue(self, turn: _Turn) -> None:
        turn.since = time.monotonic()
        self._waiting.append(turn)
        if self._holder is None:
            self._choose()
        self._change.wait_for(lambda: self._holder is turn)
        turn.since = time.monotonic()

    def _leave(self, turn: _Turn) -> None:
        turn.used += time.monotonic() - turn.since
        self._holder = None
        if self._waiting:
            self._choose()

    def _choose(self) -> None:
        self._new_first = not self._new_first
        self._holder = min(self._waiting, key=lambda turn: (turn.used if self._new_first else 0.0, turn.since))
        self._waiting.remove(self._holder)
        self._change.notify_all()
