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


def test_a_step_without_targets_says_nothing_about_the_loss() -> None:
    """Of a few short rows masked-LM may choose no token: 0 is then a sum over nothing, and no improvement."""
    progress = Progress()
    progress.note(3.0, 10, overflow=False, min_delta=0.0, targets=2)
    before = (progress.smoothed_loss, progress.best_loss, progress.stale_steps, progress.epoch_loss)
    progress.note(0.0, 10, overflow=False, min_delta=0.0, targets=0)
    assert (progress.smoothed_loss, progress.best_loss, progress.stale_steps, progress.epoch_loss) == before
    assert (progress.step, progress.tokens) == (2, 20)


def test_of_an_epoch_that_somebody_else_has_trained_no_loss_is_known() -> None:
    """A documented file of another program tells the step and no more: 0 would be a loss."""
    progress = Progress(step=7)
    progress.close_epochs(2, 1.5)
    assert progress.train_losses == [None, None]
    assert progress.val_losses == [1.5, 1.5]
    assert Progress.from_state_dict(progress.state_dict()) == progress


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


def test_who_is_stale_by_the_patience_and_the_min_delta_of_today() -> None:
    progress = Progress()
    assert not progress.is_stale(1, min_delta=100.0), "nothing is known yet"
    for loss in (2.0, 1.0, 1.0):
        progress.note(loss, 1, overflow=False, min_delta=100.0)
    assert progress.stale_steps == 2
    assert [progress.is_stale(patience, min_delta=100.0) for patience in (0, 1, 2, 3)] == [False, True, True, False]
    assert not progress.is_stale(2, min_delta=0.0), "it was better all the time"
    assert Progress(smoothed_loss=2.0, best_loss=2.0, stale_steps=2).is_stale(2, min_delta=0.0), "no better"


def test_the_best_validation_is_the_lowest_that_was_a_number() -> None:
    progress = Progress()
    for loss in (None, 2.0, None, 1.5, 3.0):
        progress.note_validation(loss)
    assert progress.best_val_loss == 1.5


def test_round_trip() -> None:
    progress = Progress()
    progress.note_validation(2.5)
    progress.note(2.0, 7, overflow=False, min_delta=0.0)
    assert Progress.from_state_dict(progress.state_dict()) == progress
