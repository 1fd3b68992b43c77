"""Prefix-aware routing: chooses a request's pipeline by the cached prefix and the load of each
pipeline.

Routers describe their caches by digests (``PrefixDigest``), which an ingress queries at intervals.
A request is sent to the pipeline that is predicted to finish it first: the sum of the seconds of
its pending work and of the request's uncached tokens. Tokens of a prefix that only another pipeline
has count twice: they are computed again, and the copy displaces other cached tokens.

A prompt of 1,000 tokens at 1 ms each. Pipeline a has 900 of them and work for 2 s, pipeline b has
none of them and work for 1 s: 2.1 s against 1 + 1 + 0.9 = 2.9 s, so a gets it. With work for 3 s a
would be done after 3.1 s, so b gets it.
"""

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from tramontane.proto.request import NUM_PRIORITIES, Request
from tramontane.router.scheduling.policy import BatchWork
from tramontane.router.scheduling.prefix_cache import KEY_BYTES, BlockHasher, KeyChanges, split_keys
from tramontane.router.scheduling.running_set import MIN_DECODES
from tramontane.router.scheduling.scheduler import Scheduler

MAX_AGE_S = 10.0  # a pipeline with an older digest is not chosen
# requests that were sent to a pipeline less than so long before the query of its digest may be
# missing in the digest
LATE_S = 0.5
# a fit may find that a further token takes no time; all requests would then go to that pipeline
MIN_TOKEN_S = 1e-5
# blocks of a prompt that are compared, 32k tokens: their keys take the ingress about a millisecond
MAX_BLOCKS = 2048
SAMPLE_TOKENS = 256  # tokens of the prompt whose time per token is reported

Known = tuple[int, int]  # number of a replica's router, and version of its cached keys


@dataclass(frozen=True, slots=True)
class PrefixDigest:
    """The cached keys of a pipeline, as changes since a version, and the load of the pipeline.

    ``busy_s``: seconds of its busiest stage for all work that is at least as urgent as a priority,
    by priority. ``prefill_s``, ``decode_s``: seconds for one further token.
    """

    replica: str  # replica of the router
    router: int  # number of the router in this replica; each router begins with an empty cache
    changes: KeyChanges
    page_size: int
    busy_s: tuple[float, ...]
    prefill_s: float
    decode_s: float

    @property
    def known(self) -> Known:
        """The version that an ingress with this digest knows."""
        return self.router, self.changes.version


def make_digest(
    replica: str, router: int, scheduler: Scheduler, known: Known | None
) -> PrefixDigest:
    """Make the digest for an ingress that knows ``known``."""
    version = known[1] if known is not None and known[0] == router else -1
    seconds = scheduler.policy.seconds
    return PrefixDigest(
        replica,
        router,
        scheduler.allocator.prefix_hashes.since(version),
        scheduler.allocator.cache.page_size,
        busy_s=tuple(map(seconds, scheduler.measure_load().left)),
        prefill_s=seconds(BatchWork(SAMPLE_TOKENS, SAMPLE_TOKENS**2 // 2)) / SAMPLE_TOKENS,
        decode_s=seconds(BatchWork(0, 0, 1, SAMPLE_TOKENS)),
    )


class TokenSeconds(NamedTuple):
    """Seconds for one further token of a prompt, and of an output."""

    prefill: float
    decode: float

    @classmethod
    def of(cls, digests: Sequence[PrefixDigest]) -> "TokenSeconds":
        """Return the mean over pipelines, because their fits differ."""
        prefill_s, decode_s = (
            fmean(each.prefill_s for each in digests),
            fmean(each.decode_s for each in digests),
        )
        return cls(max(prefill_s, MIN_TOKEN_S), max(decode_s, MIN_TOKEN_S))


class KeyIndex:
    """The pipelines that have a key, as bits of one number: one look-up for all pipelines."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, bit: int, keys: Iterable[bytes]) -> None:
        """Add a pipeline to the holders of the keys."""
        for key in keys:
            self._holders[key] = self._holders.get(key, 0) | bit

    def discard(self, bit: int, keys: Iterable[bytes]) -> None:
        """Remove a pipeline from the holders of the keys."""
        for key in keys:
            if left := self._holders.get(key, 0) & ~bit:
                self._holders[key] = left
            else:
                self._holders.pop(key, None)

    def longest(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Return, by the bit of a pipeline, the position of the last key of a prompt's blocks that
        it holds; earlier keys may be missing. Of the keys a b c it holds a and c: 3.
        """
        found: dict[int, int] = {}
        missing = -1
        for number in range(len(keys), 0, -1):
            new = self._holders.get(keys[number - 1], 0) & missing
            missing &= ~new
            while new:
                bit = new & -new
                found[bit], new = number, new ^ bit
        return found


class Choice(NamedTuple):
    """The pipeline that a request is sent to, for ``PrefixAwareRouting.release`` when the request
    has ended.
    """

    replica: str  # replica of the router
    number: int  # number of the request


@dataclass(slots=True)
class _SentRequest:
    """The work of a request that this ingress sends to a pipeline. Times are by the clock of the
    ingress.
    """

    priority: int
    prefill_tokens: int  # tokens that the pipeline has not cached, as far as is known
    decodes: int
    sent_at: float
    ended_at: float = math.inf

    def seconds(self, token_s: TokenSeconds) -> float:
        return self.prefill_tokens * token_s.prefill + self.decodes * token_s.decode


@dataclass(slots=True)
class _Pipeline:
    """A pipeline as an ingress knows it: the last digest, and the requests of this ingress.

    Many requests end before the next digest arrives. The requests that this ingress has sent are
    known at any time (``sent``); the other work of the pipeline counts as it was when the digest
    was queried (``others_s``, by priority, as in ``PrefixDigest.busy_s``). The pipeline's keys,
    from the digest and of sent requests, are in ``index`` under ``bit``.
    """

    digest: PrefixDigest
    at: float
    index: KeyIndex
    bit: int
    others_s: list[float] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)
    sent: dict[int, _SentRequest] = field(default_factory=dict)
    # Sums over the requests that were sent and have not ended, by priority: an ingress may have
    # thousands of streams when it chooses.
    open_prefill_tokens: list[int] = field(default_factory=lambda: [0] * NUM_PRIORITIES)
    open_decodes: list[int] = field(default_factory=lambda: [0] * NUM_PRIORITIES)
    sent_hashes: dict[bytes, float] = field(
        default_factory=dict
    )  # keys of requests, and their time

    def update(self, digest: PrefixDigest, asked_at: float) -> None:
        self.digest, self.at = digest, asked_at
        added, removed = split_keys(digest.changes.added), split_keys(digest.changes.removed)
        if digest.changes.is_whole:
            removed = list(self.keys.difference(added))
        expired = [key for key, at in self.sent_hashes.items() if at < asked_at - LATE_S]
        self.keys.difference_update(removed)
        self.keys.update(added)
        for key in expired:
            del self.sent_hashes[key]
        self.index.add(self.bit, added)
        self.index.discard(
            self.bit,
            [k for k in (*removed, *expired) if k not in self.keys and k not in self.sent_hashes],
        )
        token_s = TokenSeconds.of([digest])
        self.others_s = [
            max(s - self._sent_s(level, asked_at, token_s), 0.0)
            for level, s in enumerate(digest.busy_s)
        ]
        self.sent = {
            number: each for number, each in self.sent.items() if each.ended_at == math.inf
        }

    def forget(self) -> None:
        """Remove the pipeline's keys from the index."""
        self.index.discard(self.bit, self.keys)
        self.index.discard(self.bit, self.sent_hashes)

    def busy_s(self, priority: int, token_s: TokenSeconds) -> float:
        tokens, decodes = (
            sum(self.open_prefill_tokens[: priority + 1]),
            sum(self.open_decodes[: priority + 1]),
        )
        return self.others_s[priority] + tokens * token_s.prefill + decodes * token_s.decode

    def _sent_s(self, priority: int, at: float, token_s: TokenSeconds) -> float:
        """Return the seconds of the requests of this ingress that were in progress at a time, as if
        none of their tokens were computed yet.
        """
        sent = (
            each
            for each in self.sent.values()
            if each.priority <= priority and each.sent_at <= at < each.ended_at
        )
        return sum(each.seconds(token_s) for each in sent)

    def record(self, number: int, request: _SentRequest, keys: Sequence[bytes]) -> None:
        self.sent[number] = request
        self.open_prefill_tokens[request.priority] += request.prefill_tokens
        self.open_decodes[request.priority] += request.decodes
        self.sent_hashes.update(dict.fromkeys(keys, request.sent_at))
        self.index.add(self.bit, keys)

    def record_end(self, number: int, now: float) -> None:
        """Count the end of a request, if it was sent after this pipeline became known."""
        if (request := self.sent.get(number)) is None or request.ended_at < math.inf:
            return
        request.ended_at = now
        self.open_prefill_tokens[request.priority] -= request.prefill_tokens
        self.open_decodes[request.priority] -= request.decodes


class PrefixAwareRouting:
    """The choice of a pipeline, from the digests of all pipelines.

    ``salt_of``: the salt of a tenant's keys. ``clock``: in seconds.
    """

    def __init__(self, salt_of: Callable[[str], str], clock: Callable[[], float]) -> None:
        self._salt_of, self._clock = salt_of, clock
        self._pipelines: dict[str, _Pipeline] = {}  # by replica of the router
        self._index = KeyIndex()
        self._numbers = itertools.count()  # numbers of requests

    @property
    def known(self) -> Mapping[str, Known]:
        """The known version of each replica's keys, for the next query."""
        return {replica: pipeline.digest.known for replica, pipeline in self._pipelines.items()}

    def update(self, digests: Collection[PrefixDigest], asked_at: float) -> None:
        """Take the answers of replicas; the other replicas are not chosen until they answer.
        ``asked_at``: the time of the query, by the clock.
        """
        by_replica = {digest.replica: digest for digest in digests}
        for replica in self._pipelines.keys() - by_replica.keys():
            self._pipelines.pop(replica).forget()
        for replica, digest in by_replica.items():
            if replica not in self._pipelines and digest.changes.is_whole:
                self._pipelines[replica] = _Pipeline(
                    digest, asked_at, self._index, self._free_bit()
                )
            if replica in self._pipelines:
                self._pipelines[replica].update(digest, asked_at)

    def _free_bit(self) -> int:
        taken = sum(pipeline.bit for pipeline in self._pipelines.values())
        return ~taken & (taken + 1)

    def choose(
        self, request: Request, excluded: Collection[str] = (), only: str = ""
    ) -> Choice | None:
        """Choose the pipeline of a request, which counts as sent until ``release``; None if fewer
        than two pipelines are known.

        ``only``: the replica to which it is sent in any case; the result is None if that replica is
        not known. The sequences of a request stay together. With several prompts the prefix of the
        first prompt counts.
        """
        now, priority = self._clock(), request.priority
        found = {
            name: each
            for name, each in self._pipelines.items()
            if name not in excluded and now < each.at + MAX_AGE_S
        }
        if only:
            found = {name: each for name, each in found.items() if name == only}
        if len(found) < (1 if only else 2):
            return None
        prompts = {id(each.prompt_ids): len(each.prompt_ids) for each in request.sequences}
        num_prompt = sum(prompts.values())
        num_decodes = sum(min(each.sampling.max_tokens, MIN_DECODES) for each in request.sequences)
        keys = self._keys(request, next(iter(found.values())).digest.page_size)
        token_s = TokenSeconds.of([each.digest for each in found.values()])
        num_blocks = self._index.longest(keys)
        works = {
            name: _SentRequest(
                priority,
                num_prompt - num_blocks.get(each.bit, 0) * each.digest.page_size,
                num_decodes,
                now,
            )
            for name, each in found.items()
        }
        done_s = {
            name: each.busy_s(priority, token_s) + works[name].seconds(token_s)
            for name, each in found.items()
        }
        fewest = min(each.prefill_tokens for each in works.values())
        again_s = {
            name: (each.prefill_tokens - fewest) * token_s.prefill for name, each in works.items()
        }
        chosen = min(found, key=lambda name: (done_s[name] + again_s[name], random.random()))
        found[chosen].record(number := next(self._numbers), works[chosen], keys)
        return Choice(chosen, number)

    def release(self, choice: Choice) -> None:
        """Record that the chosen pipeline has finished or refused the request."""
        if (pipeline := self._pipelines.get(choice.replica)) is not None:
            pipeline.record_end(choice.number, self._clock())

    def _keys(self, request: Request, page_size: int) -> list[bytes]:
        """Return the keys of the first prompt's first blocks without its last token, because the
        last token is computed in any case.
        """
        hasher, prompt_ids = (
            BlockHasher(self._salt_of(request.cache_salt)),
            request.sequences[0].prompt_ids,
        )
        num_blocks = min((len(prompt_ids) - 1) // page_size, MAX_BLOCKS)
        hasher.extend(prompt_ids[: num_blocks * page_size], page_size)
        return [key[:KEY_BYTES] for key in hasher.keys]
