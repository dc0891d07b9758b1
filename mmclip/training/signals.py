"""SIGTERM and Ctrl-C while a run trains: save first, then leave."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Cut(BaseException):
    """Raised inside ``Interrupts.cutting`` by a signal: work that need not be finished ends at once.

    No Exception: code that takes any failure of a picture for a bad sample must not swallow it.
    """


class Interrupts:
    """While it is open, the first SIGTERM or SIGINT only sets ``signum``; a second one acts as if nobody listened.

    ``then``: what the run says that it does about it. Outside the main thread Python delivers no signals, and this does
    nothing.
    """

    def __init__(self, then: str = "saving, then leaving") -> None:
        self.signum, self.then = 0, then
        self._cutting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._before[signum] = signal.signal(signum, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @contextlib.contextmanager
    def cutting(self) -> Iterator[None]:
        """Work inside that a signal may end at once, by a Cut."""
        if self.signum:
            raise Cut
        self._cutting = True
        try:
            yield
        finally:
            self._cutting = False

    def _take(self, signum: int, frame: FrameType | None) -> None:
        if self.signum:
            self.__exit__()
            os.kill(os.getpid(), signum)
            return
        self.signum = signum
        name = signal.Signals(signum).name
        # os.write: the interrupted code may be inside a print to the same stream, which is not reentrant
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{name}: {self.then}\n".encode())
        if self._cutting:
            raise Cut
