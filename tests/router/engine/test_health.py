"""What a router notes of its failures and of what was done."""

import itertools

from tramontane.router.engine.health import HealthTracker, Recovery


def test_a_recovery_is_noted_from_the_failure_to_the_first_token() -> None:
    times = itertools.count(1.0)
    progress = HealthTracker(lambda: next(times))
    progress.on_fenced()
    progress.on_tokens()
    assert progress.last_recovery is None, "nothing has failed yet"
    progress.on_failure("stage 1 died")
    assert progress.last_recovery == Recovery("stage 1 died", 3.0)
    assert not progress.is_fenced
    progress.on_fenced()
    progress.on_tokens()
    progress.on_tokens()
    progress.on_fenced()
    assert progress.last_recovery == Recovery("stage 1 died", 3.0, fenced_at=4.0, resumed_at=5.0), (
        "later ones change nothing"
    )
    assert progress.num_recoveries == 1


def test_progress_is_what_was_done_of_late() -> None:
    now = [10.0]
    progress = HealthTracker(lambda: now[0])
    now[0] = 12.0
    assert progress.progressed_within(2.5)
    assert not progress.progressed_within(2.0)
    progress.record_progress()
    assert progress.progressed_within(2.0)
