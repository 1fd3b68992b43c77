"""The log of cached keys: who follows it has the keys that every pool has, whenever it looks."""

import random

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.router.scheduling import prefix_cache
from tramontane.router.scheduling.page_allocator import PagePool
from tramontane.router.scheduling.prefix_cache import (
    KEY_BYTES,
    KeyChanges,
    PrefixHashLog,
    split_keys,
)


def _key(number: int) -> bytes:
    """Return a key as long as those of blocks; keys in a digest are their beginnings."""
    return number.to_bytes(KEY_BYTES, "big") + b"." * 24


def _numbers(joined: bytes) -> list[int]:
    return [int.from_bytes(key, "big") for key in split_keys(joined)]


def _log_of(*numbers: int) -> PrefixHashLog:
    log = PrefixHashLog(1)
    for number in numbers:
        log.add(_key(number))
    return log


def _seen(changes: KeyChanges) -> tuple[bool, list[int], list[int]]:
    return changes.is_whole, _numbers(changes.added), _numbers(changes.removed)


def test_changes_are_those_since_the_version() -> None:
    log = _log_of(1, 2, 3)
    log.remove(_key(1))
    assert log.since(0).version == 4
    assert _seen(log.since(2)) == (False, [3], [1])
    assert _seen(log.since(3)) == (False, [], [1])
    assert _seen(log.since(4)) == (False, [], [])


def test_a_key_that_changes_often_is_in_the_changes_once() -> None:
    log = _log_of(1, 2)
    for _ in range(3):
        log.remove(_key(1))
        log.add(_key(1))
    log.add(_key(3))
    log.remove(_key(3))
    is_whole, added, removed = _seen(log.since(2))
    assert (is_whole, added, removed) == (False, [1], [3])
    assert _seen(log.since(0)) == (False, [1, 2], [3])


def test_a_version_that_the_log_has_not_had_gets_all_keys() -> None:
    log = _log_of(1, 2)
    log.remove(_key(1))
    for version in (-1, 4, 1000):
        assert _seen(log.since(version)) == (True, [2], [])


def test_a_version_that_is_too_old_gets_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "MAX_CHANGES", 4)
    log = _log_of(1, 2, 3, 4, 5)
    log.remove(_key(2))
    assert _seen(log.since(2)) == (False, [3, 4, 5], [2])
    assert _seen(log.since(1)) == (True, [1, 3, 4, 5], [])


def test_what_was_cleared_is_gone_for_all_who_follow() -> None:
    log = _log_of(1, 2)
    before = log.since(-1).version
    log.clear()
    assert _seen(log.since(before)) == (True, [], [])
    log.add(_key(2))
    for version in range(before + 1):
        assert _seen(log.since(version)) == (True, [2], []), "what it knows of 1 would stay"
    assert _seen(log.since(before + 1)) == (False, [2], [])
    log.clear()
    assert log.since(before + 1).is_whole


def test_a_key_counts_while_every_pool_has_a_page_of_it() -> None:
    log = PrefixHashLog(3)
    for _ in range(2):
        log.add(_key(1))
    assert _seen(log.since(0)) == (False, [], [])
    log.add(_key(1))
    log.add(_key(2))
    assert _seen(log.since(0)) == (False, [1], [])
    log.remove(_key(1))
    assert _seen(log.since(1)) == (False, [], [1])
    log.remove(_key(1))
    log.add(_key(1))
    assert _seen(log.since(2)) == (False, [], [])
    log.add(_key(1))
    assert _seen(log.since(2)) == (False, [1], [])


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    num_pools=st.integers(1, 3),
    most_kept=st.sampled_from([1, 5, 1000]),
)
def test_who_follows_has_the_keys_that_all_pools_have(
    seed: int, num_pools: int, most_kept: int
) -> None:
    """However often they look, and whatever pools do to their pages."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "MAX_CHANGES", most_kept)
        log = PrefixHashLog(num_pools)
    pools = [PagePool(rng.randint(1, 9), log) for _ in range(num_pools)]
    held: list[list[int]] = [[] for _ in pools]
    followers: list[tuple[int, set[int]]] = [(-1, set()) for _ in range(3)]
    for _ in range(120):
        index = rng.randrange(num_pools)
        _disturb(rng, pools[index], held[index])
        if rng.random() < 0.02:
            for pool, pages in zip(pools, held, strict=True):
                pool.give_back(pages)
                pages.clear()
                pool.forget_contents()
            log.clear()
        number = rng.randrange(9)
        if number < len(followers):
            followers[number] = _follow(log, *followers[number])
            assert followers[number][1] == {
                n for n in range(12) if all(pool.find([_key(n)]) != [None] for pool in pools)
            }


def _disturb(rng: random.Random, pool: PagePool, held: list[int]) -> None:
    """Take a page and fill it, share one that is cached, or give one back."""
    key = _key(rng.randrange(12))
    if rng.random() < 0.5 and pool.num_idle:
        [page] = pool.find([key])
        if page is None:
            pool.register(key, page := pool.take())
        else:
            pool.share([page])
        held.append(page)
    elif held:
        pool.give_back([held.pop(rng.randrange(len(held)))])


def _follow(log: PrefixHashLog, version: int, known: set[int]) -> tuple[int, set[int]]:
    changes = log.since(version)
    before = set() if changes.is_whole else known
    return changes.version, (before - set(_numbers(changes.removed))) | set(_numbers(changes.added))
