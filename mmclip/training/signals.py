"""SIGTERM and Ctrl-C during a run: save first, then leave."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """Raised by a signal inside ``SignalHandler.interruptible``.

    Not an Exception: code that catches any failure of an image must not swallow it.
    """


class SignalHandler:
    """Context in which the first SIGTERM or SIGINT only sets ``signum``; a second one acts as without a handler.

    The first one prints ``action``. Outside the main thread, to which Python delivers no signals, it does nothing.
    """

    def __init__(self, action: str = "saving, then leaving") -> None:
        self.signum, self.action, self._interruptible = 0, action, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalHandler:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context that a signal ends at once by :class:`Interrupted`."""
        if self.signum:
            raise Interrupted
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.signum:
            self.__exit__()
            os.kill(os.getpid(), signum)
            return
        self.signum = signum
        name = signal.Signals(signum).name
        # os.write: the interrupted code may be inside a print to the same stream, which is not reentrant
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{name}: {self.action}\n".encode())
        if self._interruptible:
            raise Interrupted
