"""The first signal is noted, the second acts; work that may be interrupted ends at once."""

from __future__ import annotations

import os
import signal
import time

import pytest

from mmclip.training.signals import Interrupted, SignalHandler


def send(signum: int) -> None:
    """A signal to this process, which may have threads: then it arrives a moment later, and two at once become one."""
    os.kill(os.getpid(), signum)
    time.sleep(0.3)


def test_the_first_signal_is_noted_a_second_one_acts_and_the_handlers_come_back() -> None:
    stock, term = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process of pytest-xdist ignores it
    with pytest.raises(KeyboardInterrupt), SignalHandler() as handler:
        assert handler.signum == 0
        send(signal.SIGTERM)
        assert handler.signum == signal.SIGTERM
        send(signal.SIGINT)
    assert signal.signal(signal.SIGINT, stock) == signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == term


def test_interruptible_work_ends_at_once_and_no_handler_of_exceptions_can_swallow_it() -> None:
    with SignalHandler() as handler:
        with pytest.raises(Interrupted), handler.interruptible():
            try:
                send(signal.SIGTERM)
            except Exception:
                pytest.fail("swallowed")
        with pytest.raises(Interrupted), handler.interruptible():
            pytest.fail("not even begun after a signal")
