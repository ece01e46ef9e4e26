"""Early stopping and the counts a resume needs."""

from __future__ import annotations

from lockstep.engine.progress import Progress


def test_counts_steps_tokens_and_overflows() -> None:
    progress = Progress()
    progress.note(3.0, 10, overflow=False, min_delta=0.0)
    progress.note(float("nan"), 10, overflow=True, min_delta=0.0)
    progress.note(float("nan"), 10, overflow=True, min_delta=0.0)
    assert (progress.step, progress.tokens, progress.skipped, progress.overflow_run) == (3, 30, 2, 2)
    assert progress.smoothed_loss == 3.0, "an overflowed step says nothing about the loss"


def test_patience_counts_steps_without_improvement_of_the_smoothed_loss() -> None:
    progress = Progress()
    for loss in (5.0, 4.0, 3.0):
        progress.note(loss, 1, overflow=False, min_delta=1e-4)
    assert progress.stale_steps == 0
    best = progress.best_loss
    for _ in range(4):
        progress.note(9.0, 1, overflow=False, min_delta=1e-4)
    assert progress.stale_steps == 4
    assert progress.best_loss == best


def test_a_single_lucky_step_is_not_an_improvement() -> None:
    progress = Progress()
    progress.note(2.0, 1, overflow=False, min_delta=0.1)
    progress.note(1.0, 1, overflow=False, min_delta=0.1)  # smoothed 1.98: less than min_delta better
    assert progress.stale_steps == 1


def test_round_trip() -> None:
    progress = Progress()
    progress.note(2.0, 7, overflow=False, min_delta=0.0)
    assert Progress.from_state_dict(progress.state_dict()) == progress
