"""Asked to stop: patience while training, at once otherwise, and each signal with its exit code."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from lockstep.errors import ExitCode, Stopped
from lockstep.runtime.signals import EXIT_CODES, StopRequest, behind, listening

CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.TERMINATED,
    signal.SIGUSR1: ExitCode.PREEMPTED,
    signal.SIGUSR2: ExitCode.PREEMPTED,
}


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Whatever a test does, pytest gets its handlers back."""
    before = {number: signal.getsignal(number) for number in CODES}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_the_first_signal_waits_for_the_step(number: signal.Signals) -> None:
    request = StopRequest()
    request.patient = True
    assert not request
    request.receive(number, None)
    assert request
    assert request.error().exit_code == CODES[number]
    assert str(request.error()) == f"stopped by {number.name}"


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_while_nothing_is_to_be_saved_it_raises_at_once(number: signal.Signals) -> None:
    with pytest.raises(Stopped) as caught:
        StopRequest().receive(number, None)
    assert caught.value.exit_code == CODES[number]


def test_the_second_sigint_never_waits() -> None:
    request = StopRequest()
    request.patient = True
    request.receive(signal.SIGINT, None)
    with pytest.raises(Stopped) as caught:
        request.receive(signal.SIGINT, None)
    assert caught.value.exit_code == ExitCode.INTERRUPTED


def test_other_second_signals_do_wait_and_the_first_one_counts() -> None:
    """A scheduler that repeats its signal must not cut the save that the first one asked for."""
    request = StopRequest()
    request.patient = True
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        request.receive(number, None)
    assert request.error().exit_code == ExitCode.PREEMPTED
    with pytest.raises(Stopped) as caught:  # and Ctrl-C after it does end the waiting, with the first signal's code
        request.receive(signal.SIGINT, None)
    assert caught.value.exit_code == ExitCode.PREEMPTED


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_real_signal_is_heard_and_the_handlers_come_back(number: signal.Signals) -> None:
    mine = lambda *_: None  # noqa: E731 - a handler that can be recognised
    signal.signal(number, mine)
    with listening() as request:
        request.patient = True
        os.kill(os.getpid(), number)
        assert request.signal == number
    assert signal.getsignal(number) is mine


def test_nohup_keeps_its_promise() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with listening() as request:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not request
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == request.receive, "only what was ignored stays ignored"


def test_a_thread_cannot_listen_and_does_not_fail() -> None:
    heard: list[object] = []

    def work() -> None:
        with listening() as request:
            heard.append((bool(request), signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert heard == [(False, before)]


def test_every_signal_has_a_code_here() -> None:
    assert EXIT_CODES == CODES


@pytest.mark.parametrize("asked", [Stopped("stopped by SIGTERM", exit_code=ExitCode.TERMINATED), None])
def test_a_stop_is_found_behind_errors_also_where_their_chain_is_a_ring(asked: Stopped | None) -> None:
    first, later = ValueError("first"), RuntimeError("later")
    first.__cause__, later.__cause__, later.__context__ = later, asked or first, asked
    assert behind(first) is asked
