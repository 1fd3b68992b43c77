"""The choice of a pipeline by what it has cached and how busy it is: digests of real schedulers,
and a clock of the test's.
"""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from fake_pipeline import FakePipeline, new_cache, new_pipeline, new_sequence

from tramontane.proto.request import NUM_PRIORITIES, Request, SamplingParams, SequenceRequest
from tramontane.router.engine import prefix_aware_routing
from tramontane.router.engine.prefix_aware_routing import (
    LATE_S,
    MAX_AGE_S,
    Choice,
    KeyIndex,
    PrefixAwareRouting,
    PrefixDigest,
    TokenSeconds,
    make_digest,
)
from tramontane.router.scheduling.prefix_cache import (
    KEY_BYTES,
    BlockHasher,
    KeyChanges,
    cache_salt,
    split_keys,
)
from tramontane.router.scheduling.sequence import Sequence

PAGE = 8
MODEL = "mark"
TEXT, OTHER = (tuple(random.Random(seed).choices(range(10, 900), k=200)) for seed in range(2))
TURN_S = 1.0  # between two queries
ONE_TOKEN = SamplingParams(max_tokens=1)


class Fleet:
    """Pipelines by the names of their replicas, and an ingress. A token takes a pipeline a
    millisecond: no times are known.
    """

    def __init__(self, *names: str, model: str = MODEL) -> None:
        self.pipes = {name: _pipeline() for name in names}
        self.routers = dict.fromkeys(names, 0)
        self.now = 1000.0
        self.routing = PrefixAwareRouting(partial(cache_salt, model), lambda: self.now)
        self._next_id = 0

    def digest(self, name: str) -> PrefixDigest:
        return make_digest(
            name, self.routers[name], self.pipes[name].scheduler, self.routing.known.get(name)
        )

    def query(self, *names: str, after_s: float = TURN_S) -> None:
        """Query the digests of these pipelines, of all by default."""
        self.now += after_s
        self.routing.update([self.digest(name) for name in names or self.pipes], self.now)

    def restart(self, name: str) -> None:
        self.pipes[name] = _pipeline()
        self.routers[name] += 1

    def give(
        self,
        name: str,
        prompt: tuple[int, ...],
        tenant: str = "",
        priority: int = 0,
        num_new: int = 1,
    ) -> None:
        """Let a request reach a pipeline."""
        self._next_id += 1
        sampling, salt = SamplingParams(max_tokens=num_new), cache_salt(MODEL, tenant)
        sequence = Sequence(
            self._next_id, prompt, sampling, len(prompt) + num_new, priority, cache_salt=salt
        )
        self.pipes[name].scheduler.add(sequence)

    def cache(self, name: str, prompt: tuple[int, ...], tenant: str = "") -> None:
        self.give(name, prompt, tenant)
        self.pipes[name].drain()

    def busy(self, name: str, num_tokens: int, priority: int = 0) -> None:
        """Let a pipeline have work for so many milliseconds."""
        while num_tokens:
            part = min(num_tokens, 100)
            self.give(
                name,
                (1, *random.Random(self._next_id).choices(range(2, 900), k=part - 2)),
                "busy",
                priority,
            )
            num_tokens -= part

    def send(
        self, prompt: tuple[int, ...], *excluded: str, only: str = "", **fields: object
    ) -> Choice | None:
        return self.routing.choose(_request(prompt, **fields), excluded, only)

    def choose(self, prompt: tuple[int, ...], *excluded: str, **fields: object) -> str | None:
        choice = self.send(prompt, *excluded, **fields)
        return choice and choice.replica

    def busy_s(self, name: str, priority: int = 0) -> float:
        """Return for how long the ingress takes a pipeline to be busy."""
        return self.routing._pipelines[name].busy_s(priority, TokenSeconds(1e-3, 1e-3))


def _pipeline() -> FakePipeline:
    return new_pipeline(new_cache(PAGE, 64, None, 64), seqs=32)


def _request(
    prompt: tuple[int, ...], sampling: SamplingParams = ONE_TOKEN, **fields: object
) -> Request:
    return replace(Request.of(prompt, sampling), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "expected"), [(200, "b"), (130, "b"), (74, "b"), (73, "b")])
def test_a_request_goes_where_most_of_it_is_cached(length: int, expected: str) -> None:
    fleet = Fleet("a", "b", "c")
    fleet.cache("a", TEXT[:64])
    fleet.cache("b", TEXT[:72])
    fleet.query()
    assert fleet.choose(TEXT[:length]) == expected


def test_of_a_long_prompt_only_the_beginning_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_aware_routing, "MAX_BLOCKS", 4)
    fleet = Fleet("a", "b")
    fleet.cache("a", (*OTHER[: 5 * PAGE], *TEXT[:PAGE]))
    fleet.cache("b", (*OTHER[: 3 * PAGE], *TEXT[: 9 * PAGE]))
    fleet.query()
    assert fleet.choose((*OTHER[: 3 * PAGE], *TEXT[: 9 * PAGE])) == "b", (
        "of whose blocks all four are there"
    )
    assert {len(pipeline.sent_hashes) for pipeline in fleet.routing._pipelines.values()} == {0, 4}


def test_what_is_not_cached_anywhere_goes_where_least_is_to_do() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.cache("a", TEXT)
    fleet.busy("a", 2)
    fleet.busy("c", 3)
    fleet.query()
    assert fleet.choose(OTHER) == "b"


@pytest.mark.parametrize(("more_to_do", "expected"), [(0, "a"), (127, "a"), (129, "b"), (300, "b")])
def test_a_prefix_is_worth_twice_the_work_that_it_saves(more_to_do: int, expected: str) -> None:
    """Eight pages of eight tokens, a millisecond each."""
    fleet = Fleet("a", "b")
    fleet.cache("a", TEXT[:70])
    fleet.busy("a", 20 + more_to_do)
    fleet.busy("b", 20)
    fleet.query()
    assert fleet.choose(TEXT[:90]) == expected


@pytest.mark.parametrize(
    ("busy_s", "expected"),
    [((2.0, 1.0), "a"), ((3.0, 1.0), "b"), ((2.79, 1.0), "a"), ((2.81, 1.0), "b")],
)
def test_the_example_of_the_module(busy_s: tuple[float, float], expected: str) -> None:
    hasher = BlockHasher(cache_salt(MODEL, ""))
    prompt = tuple(range(1001))
    hasher.extend(prompt[:900], 100)
    known = b"".join(key[:KEY_BYTES] for key in hasher.keys)
    routing = PrefixAwareRouting(partial(cache_salt, MODEL), lambda: 5.0)
    digests = [
        PrefixDigest(
            name, 0, KeyChanges(9, True, keys, b""), 100, (busy,) * NUM_PRIORITIES, 1e-3, 1e-3
        )
        for name, busy, keys in zip("ab", busy_s, (known, b""), strict=True)
    ]
    routing.update(digests, 4.0)
    choice = routing.choose(_request(prompt))
    assert choice is not None
    assert choice.replica == expected


# Between two digests


def test_a_burst_is_spread() -> None:
    """Of other prompts evenly; of one prompt, too, as soon as what it saves is less than the work
    that waits.
    """
    fleet = Fleet("a", "b", "c")
    fleet.query()
    counts = Counter(fleet.choose((number, *OTHER[:99])) for number in range(30))
    assert counts == {"a": 10, "b": 10, "c": 10}
    fleet.query(after_s=LATE_S + TURN_S)
    counts = Counter(
        fleet.choose(TEXT[:65], sampling=SamplingParams(max_tokens=30)) for _ in range(60)
    )
    assert all(18 <= counts[name] <= 22 for name in "abc")


def test_what_was_just_sent_is_a_prefix_for_the_next() -> None:
    """It goes after the first one, 17 ms of work after 81, although the other pipeline would be
    idle in 50.
    """
    fleet = Fleet("a", "b")
    fleet.busy("b", 50)
    fleet.query()
    sent = [fleet.send(prompt) for prompt in (TEXT[:80], (*TEXT[:64], *OTHER[:16]))]
    for choice in sent:
        assert choice is not None
        assert choice.replica == "a"
        fleet.routing.release(choice)
    fleet.query(after_s=LATE_S + TURN_S)
    assert fleet.choose(TEXT[:80]) == "a"
    fleet.query(after_s=LATE_S + TURN_S)
    assert not fleet.routing._pipelines["a"].sent_hashes, "if it was true, digests say so now"


def test_what_was_sent_counts_once_whether_or_not_a_digest_has_it() -> None:
    fleet = Fleet("a", "b")
    fleet.query()
    chosen = fleet.choose(TEXT[:99])
    assert chosen is not None
    assert fleet.busy_s(chosen) == pytest.approx(0.1)
    fleet.query()
    assert fleet.busy_s(chosen) == pytest.approx(0.1), "the request has not arrived"
    fleet.give(chosen, TEXT[:99])
    fleet.query()
    assert fleet.busy_s(chosen) == pytest.approx(0.1)
    fleet.busy(chosen, 30)
    fleet.query()
    assert fleet.busy_s(chosen) == pytest.approx(0.13), "others have sent something, too"


def test_what_has_ended_does_not_count_although_the_digest_has_it() -> None:
    """Two requests of 100 ms each, of which the second ends while its digest is on its way."""
    fleet = Fleet("a", "b")
    fleet.busy("a", 7)
    fleet.query()
    first, second = (fleet.send(text[:99], only="a") for text in (TEXT, OTHER))
    assert first is not None
    assert second is not None
    for text in (TEXT, OTHER):
        fleet.give("a", text[:99])
    fleet.query()
    assert fleet.busy_s("a") == pytest.approx(0.207)
    fleet.routing.release(first)
    fleet.routing.release(first)
    assert fleet.busy_s("a") == pytest.approx(0.107), "without another digest, and once"
    digests, asked_at = [fleet.digest(name) for name in "ab"], fleet.now
    fleet.now += 0.01
    fleet.routing.release(second)
    fleet.routing.update(digests, asked_at)
    assert fleet.busy_s("a") == pytest.approx(0.107), (
        "of these only the first had ended when the digest was queried"
    )
    fleet.pipes["a"].drain()
    fleet.query()
    assert not fleet.busy_s("a")
    assert not fleet.routing._pipelines["a"].sent


def test_a_release_after_the_pipeline_has_gone_does_nothing() -> None:
    fleet = Fleet("a", "b")
    fleet.query()
    choice = fleet.send(TEXT, only="a")
    assert choice is not None
    fleet.query("b")
    fleet.routing.release(choice)
    fleet.query()
    fleet.routing.release(choice)
    assert not fleet.busy_s("a")


def test_where_a_request_is_sent_in_any_case_it_counts() -> None:
    fleet = Fleet("a", "b")
    fleet.busy("a", 50)
    fleet.query("a")
    assert fleet.send(TEXT, only="gone") is None
    assert fleet.send(TEXT[:99], only="a") is not None, "also with one pipeline"
    assert fleet.busy_s("a") == pytest.approx(0.15)


# Which pipelines are known


def test_a_digest_that_is_too_old_is_not_believed() -> None:
    fleet = Fleet("a", "b")
    fleet.query()
    fleet.now += MAX_AGE_S - 0.01
    assert fleet.choose(TEXT) is not None
    fleet.now += 0.01
    assert fleet.choose(TEXT) is None
    fleet.query()
    assert fleet.choose(TEXT) is not None


def test_without_two_to_choose_from_none_is_chosen() -> None:
    fleet = Fleet("a", "b", "c")
    assert fleet.choose(TEXT) is None
    fleet.cache("a", TEXT)
    fleet.query("a")
    assert fleet.choose(TEXT) is None
    fleet.query()
    assert fleet.choose(TEXT) == "a"
    assert fleet.choose(TEXT, "b", "c") is None
    assert fleet.choose(TEXT, "a") in ("b", "c")
    assert fleet.choose(TEXT, "a", "b", "gone") is None


def test_a_replica_that_does_not_answer_is_not_chosen_until_it_does() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.cache("a", TEXT)
    fleet.query()
    assert fleet.choose(TEXT) == "a"
    late = fleet.digest("a")
    assert not late.changes.is_whole
    fleet.query("b", "c")
    assert fleet.choose(TEXT) in ("b", "c")
    fleet.routing.update([late, fleet.digest("b"), fleet.digest("c")], fleet.now)
    assert fleet.choose(TEXT, "b") is None, "changes of what is not known any more are of no use"
    fleet.query(after_s=LATE_S + TURN_S)
    assert fleet.choose(TEXT) == "a"


def test_a_router_that_was_started_again_has_an_empty_cache() -> None:
    """As many changes as before mean nothing: versions are of one router."""
    fleet = Fleet("a", "b")
    fleet.cache("a", TEXT)
    fleet.query()
    fleet.restart("a")
    fleet.cache("a", OTHER)
    assert fleet.digest("a").changes.is_whole
    assert fleet.digest("a").changes.version == fleet.routing.known["a"][1]
    fleet.busy("a", 2)
    fleet.query()
    assert fleet.choose(TEXT) == "b"
    assert fleet.choose(OTHER) == "a"
    assert not fleet.digest("a").changes.is_whole


def test_what_a_fence_has_cost_is_forgotten() -> None:
    fleet = Fleet("a", "b")
    fleet.cache("a", TEXT)
    fleet.query()
    fleet.pipes["a"].scheduler.restart(5)
    fleet.busy("a", 2)
    fleet.query()
    assert fleet.choose(TEXT) == "b"


# Tenants, models, priorities


def test_a_tenants_text_is_found_for_this_tenant_only() -> None:
    fleet = Fleet("a", "b")
    fleet.cache("a", TEXT, "mine")
    fleet.busy("a", 2)
    fleet.query()
    assert fleet.choose(TEXT, cache_salt="mine") == "a"
    for other in ("", "theirs"):
        assert _again(fleet).choose(TEXT, cache_salt=other) == "b"


@pytest.mark.parametrize(("model", "expected"), [(MODEL, "a"), ("", "b"), ("other weights", "b")])
def test_what_another_model_has_computed_is_not_found(model: str, expected: str) -> None:
    fleet = Fleet("a", "b", model=model)
    fleet.cache("a", TEXT)
    fleet.busy("a", 2)
    fleet.query()
    assert fleet.choose(TEXT) == expected


def test_batch_work_makes_no_pipeline_busy_for_interactive_requests() -> None:
    fleet = Fleet("a", "b")
    fleet.busy("a", 300, priority=5)
    fleet.busy("b", 30)
    fleet.query()
    assert fleet.choose(TEXT, priority=0) == "a"
    fleet = _again(fleet)
    assert fleet.choose(TEXT, priority=5) == "b"
    assert fleet.choose(TEXT[:20], priority=5) == "b"
    assert fleet.busy_s("b", 5) == pytest.approx(0.03 + 0.201 + 0.005)
    assert fleet.busy_s("b", 4) == pytest.approx(0.03), "also what was just sent"


def test_a_prompt_of_several_choices_is_computed_once() -> None:
    fleet = Fleet("a", "b")
    fleet.query()
    choices = [SequenceRequest(TEXT, SamplingParams(max_tokens=20))] * 3
    other = SequenceRequest(OTHER, SamplingParams(max_tokens=1000))
    choice = fleet.routing.choose(Request((*choices, other)))
    assert choice is not None
    assert fleet.busy_s(choice.replica) == pytest.approx(0.4 + 3 * 0.02 + 0.064)


def test_who_gets_changes_knows_what_is_cached() -> None:
    """Whatever is cached, evicted or lost between two queries."""
    rng, fleet = random.Random(5), Fleet("a", "b")
    for name in fleet.pipes:
        fleet.pipes[name] = new_pipeline(new_cache(PAGE, 2, None, 24), seqs=4)
    num_removed = 0
    for _ in range(150):
        name = rng.choice("ab")
        prompt = (
            *rng.choice((TEXT, OTHER))[: rng.randrange(100)],
            *rng.choices(range(900, 999), k=9),
        )
        fleet.give(name, prompt, rng.choice(["", "mine"]), num_new=rng.randrange(1, 9))
        for _ in range(rng.randrange(4)):
            fleet.pipes[name].submit()
        if rng.random() < 0.05:
            fleet.pipes[name].scheduler.restart(fleet.pipes[name].scheduler.epoch + 1)
            fleet.pipes[name].fence()
        fleet.pipes[name].drain()
        if rng.random() < 0.4:
            num_removed += len(fleet.digest(name).changes.removed)
            fleet.query()
            for each, pipe in fleet.pipes.items():
                whole = pipe.scheduler.allocator.prefix_hashes.since(-1)
                assert fleet.routing._pipelines[each].keys == set(split_keys(whole.added))
            _check_index(fleet.routing)
    assert num_removed


def _check_index(routing: PrefixAwareRouting) -> None:
    """Assert that the index has just what is known of the caches and what was sent."""
    expected: dict[bytes, int] = {}
    for pipeline in routing._pipelines.values():
        for key in pipeline.keys | pipeline.sent_hashes.keys():
            expected[key] = expected.get(key, 0) + pipeline.bit
    assert routing._index._holders == expected


def test_the_index_follows_pipelines_that_come_and_go() -> None:
    """Also what was only sent; of one that has gone nothing is left, and its bit is given to
    another one.
    """
    rng, fleet, bits = random.Random(6), Fleet(*"abcde"), set[int]()
    for turn in range(80):
        name = rng.choice("abcde")
        fleet.cache(name, (*rng.choice((TEXT, OTHER))[: rng.randrange(150)], turn + 1))
        if rng.random() < 0.1:
            fleet.restart(name)
        fleet.query(*rng.sample("abcde", k=rng.randint(1, 5)), after_s=rng.choice([0.1, TURN_S]))
        for text in (TEXT, OTHER):
            fleet.choose((*text[: rng.randrange(1, 150)], turn + 1))
        _check_index(fleet.routing)
        bits |= {pipeline.bit for pipeline in fleet.routing._pipelines.values()}
    assert bits == {1, 2, 4, 8, 16}
    fleet.routing.update([], fleet.now)
    assert not len(fleet.routing._index)


def test_each_key_of_a_prompt_is_looked_up_once_for_all_pipelines() -> None:
    """In one pipeline after the other, 64 of them would keep an ingress from its streams for tenths
    of a second.
    """

    class Counting(dict[bytes, int]):
        num_gets = 0

        def get(self, key: bytes, default: int = 0) -> int:  # type: ignore[override]
            Counting.num_gets += 1
            return super().get(key, default)

    fleet = Fleet(*(f"p{number}" for number in range(20)))
    fleet.cache("p7", TEXT[:64])
    fleet.query()
    fleet.routing._index._holders = Counting(fleet.routing._index._holders)
    assert fleet.choose(TEXT) == "p7"
    assert Counting.num_gets <= 2 * len(TEXT) // PAGE, "once to choose and once to record"


def test_how_far_each_pipeline_has_a_prompt() -> None:
    index = KeyIndex()
    index.add(1, [b"a", b"c"])
    index.add(2, [b"b"])
    index.add(4, [b"x"])
    assert index.longest([b"a", b"b", b"c"]) == {1: 3, 2: 2}
    index.discard(1, [b"c", b"never there"])
    assert index.longest([b"a", b"b", b"c"]) == {1: 1, 2: 2}
    assert index.longest([]) == {}


def _again(fleet: Fleet) -> Fleet:
    """Return the same pipelines with an ingress that has sent nothing."""
    again = Fleet()
    again.pipes, again.routers = fleet.pipes, fleet.routers
    again.query()
    return again


def test_a_digest_describes_its_scheduler() -> None:
    pipe = _pipeline()
    pipe.scheduler.add(new_sequence(0, 50, 10, priority=2))
    digest = make_digest("a", 3, pipe.scheduler, None)
    assert (digest.replica, digest.known, digest.page_size) == ("a", (3, 0), PAGE)
    assert digest.busy_s == pytest.approx([0, 0, *[0.06] * (NUM_PRIORITIES - 2)])
    assert (digest.prefill_s, digest.decode_s) == pytest.approx((1e-3, 1e-3))
