"""Prefix-aware routing: the choice of a request's pipeline by the prefix that its cache has, and by how busy it is.

Routers describe their caches by digests (``PrefixDigest``), which an ingress queries at intervals. A request goes to the pipeline
that is predicted to be done with it first: the seconds of work that the pipeline has, and of the tokens it would have to compute.

A prompt of 1,000 tokens at 1 ms each. Pipeline a has 900 of them and work for 2 s, pipeline b has none of them and work for
1 s: 2.1 s against 2 s, so b gets it. With work for 1.5 s a would be done first, after 1.6 s.
"""

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from tramontane.proto.request import SequenceRequest
from tramontane.router.scheduling.cached_key_log import KEY_BYTES, KeyChanges, split_keys
from tramontane.router.scheduling.policy import BatchWork
from tramontane.router.scheduling.prefix_cache import BlockHasher
from tramontane.router.scheduling.running_set import MIN_DECODES
from tramontane.router.scheduling.scheduler import Scheduler

MAX_AGE_S = 10.0  # of a digest that is believed
LATE_S = 0.5  # for so long before it was queried, what was sent to a pipeline may not have arrived when its digest was made
MIN_TOKEN_S = 1e-5  # a fit may find that a token more takes no time; all requests would then go to that pipeline
MAX_BLOCKS = 2048  # of a prompt that are compared, 32k tokens: their keys take about a millisecond of the ingress
SAMPLE_TOKENS = 256  # of the prompt whose time per token is reported

Known = tuple[int, int]  # number of a replica's router, and version of its cached keys


@dataclass(frozen=True, slots=True)
class PrefixDigest:
    """What is cached in a pipeline, as changes since a version, and how busy the pipeline is.

    ``busy_s``: seconds of its busiest stage for all work that is at least as urgent as a priority, by priority.
    ``prefill_s``, ``decode_s``: for one token more.
    """

    replica: str  # of the router
    router: int  # its number in this replica; each begins with an empty cache
    changes: KeyChanges
    page_size: int
    busy_s: tuple[float, ...]
    prefill_s: float
    decode_s: float

    @property
    def known(self) -> Known:
        """What an ingress knows that has this digest."""
        return self.router, self.changes.version


def make_digest(replica: str, router: int, scheduler: Scheduler, known: Known | None) -> PrefixDigest:
    """Make the digest for an ingress that knows ``known``."""
    version = known[1] if known is not None and known[0] == router else -1
    seconds = scheduler.policy.seconds
    return PrefixDigest(
        replica,
        router,
        scheduler.allocator.cached_keys.since(version),
        scheduler.allocator.cache.page_size,
        busy_s=tuple(map(seconds, scheduler.measure_load().left)),
        prefill_s=seconds(BatchWork(SAMPLE_TOKENS, SAMPLE_TOKENS**2 // 2)) / SAMPLE_TOKENS,
        decode_s=seconds(BatchWork(0, 0, 1, SAMPLE_TOKENS)),
    )


class KeyIndex:
    """Which pipelines have a key: one look-up for all of them, of which each is a bit."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, bit: int, keys: Iterable[bytes]) -> None:
        """Add a pipeline to the holders of these keys."""
        for key in keys:
            self._holders[key] = self._holders.get(key, 0) | bit

    def discard(self, bit: int, keys: Iterable[bytes]) -> None:
        """Remove a pipeline from the holders of these keys."""
        for key in keys:
            if left := self._holders.get(key, 0) & ~bit:
                self._holders[key] = left
            else:
                self._holders.pop(key, None)

    def longest(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Return up to which of these keys of a prompt each pipeline has it, by bit: of a and c, with b elsewhere, up to 3."""
        found: dict[int, int] = {}
        missing = -1
        for number in range(len(keys), 0, -1):
            new = self._holders.get(keys[number - 1], 0) & missing
            missing &= ~new
            while new:
                bit = new & -new
                found[bit], new = number, new ^ bit
        return found


@dataclass(slots=True)
class _Pipeline:
    """What an ingress knows of a pipeline. ``sent``: time, priority and seconds of work of requests that its digest may lack.

    Its keys, known and sent, are in ``index`` under ``bit``.
    """

    digest: PrefixDigest
    at: float
    index: KeyIndex
    bit: int
    keys: set[bytes] = field(default_factory=set)
    sent: deque[tuple[float, int, float]] = field(default_factory=deque)
    sent_keys: dict[bytes, float] = field(default_factory=dict)  # and when

    def update(self, digest: PrefixDigest, asked_at: float) -> None:
        self.digest, self.at = digest, asked_at
        added, removed = split_keys(digest.changes.added), split_keys(digest.changes.removed)
        if digest.changes.is_whole:
            removed = list(self.keys.difference(added))
        expired = [key for key, at in self.sent_keys.items() if at < asked_at - LATE_S]
        self.keys.difference_update(removed)
        self.keys.update(added)
        for key in expired:
            del self.sent_keys[key]
        self.index.add(self.bit, added)
        self.index.discard(self.bit, [k for k in (*removed, *expired) if k not in self.keys and k not in self.sent_keys])
        while self.sent and self.sent[0][0] < asked_at - LATE_S:
            self.sent.popleft()

    def forget(self) -> None:
        """Remove its keys from the index."""
        self.index.discard(self.bit, self.keys)
        self.index.discard(self.bit, self.sent_keys)

    def busy_s(self, priority: int) -> float:
        return self.digest.busy_s[priority] + sum(seconds for _, level, seconds in self.sent if level <= priority)

    def record(self, now: float, priority: int, seconds: float, keys: Sequence[bytes]) -> None:
        self.sent.append((now, priority, seconds))
        self.sent_keys.update(dict.fromkeys(keys, now))
        self.index.add(self.bit, keys)


class PrefixAwareRouting:
    """The choice of a pipeline, from the digests of all.

    ``salt_of``: the salt of a tenant's keys. ``clock``: in seconds.
    """

    def __init__(self, salt_of: Callable[[str], str], clock: Callable[[], float]) -> None:
        self._salt_of, self._clock = salt_of, clock
        self._pipelines: dict[str, _Pipeline] = {}  # by replica of the router
        self._index = KeyIndex()

    @property
    def known(self) -> Mapping[str, Known]:
        """What is known of each replica, for the next query."""
        return {replica: pipeline.digest.known for replica, pipeline in self._pipelines.items()}

    def update(self, digests: Collection[PrefixDigest], asked_at: float) -> None:
        """Take what replicas have answered; the others are not chosen until they answer. ``asked_at``: by the clock."""
        by_replica = {digest.replica: digest for digest in digests}
        for replica in self._pipelines.keys() - by_replica.keys():
            self._pipelines.pop(replica).forget()
        for replica, digest in by_replica.items():
            if replica not in self._pipelines and digest.changes.is_whole:
                self._pipelines[replica] = _Pipeline(digest, asked_at, self._index, self._free_bit())
            if replica in self._pipelines:
                self._pipelines[replica].update(digest, asked_at)

    def _free_bit(self) -> int:
        taken = sum(pipeline.bit for pipeline in self._pipelines.values())
        return ~taken & (taken + 1)

    def choose(self, specs: Sequence[SequenceRequest], excluded: Collection[str] = ()) -> str | None:
        """Return the replica that a request should be sent to, which then counts as sent; None if fewer than two are known.

        The sequences of a request stay together. Of several prompts the prefix of the first one counts.
        """
        now = self._clock()
        found = {name: each for name, each in self._pipelines.items() if name not in excluded and now < each.at + MAX_AGE_S}
        if len(found) < 2:
            return None
        prompts = {id(spec.prompt_ids): len(spec.prompt_ids) for spec in specs}
        num_prompt = sum(prompts.values())
        num_decodes = sum(min(spec.sampling.max_tokens, MIN_DECODES) for spec in specs)
        keys = self._keys(specs[0], next(iter(found.values())).digest.page_size)
        prefill_s, decode_s = _token_s([each.digest for each in found.values()])
        num_blocks = self._index.longest(keys)
        num_left = {name: num_prompt - num_blocks.get(each.bit, 0) * each.digest.page_size for name, each in found.items()}
        own_s = {name: left * prefill_s + num_decodes * decode_s for name, left in num_left.items()}
        chosen = min(found, key=lambda name: (found[name].busy_s(specs[0].priority) + own_s[name], random.random()))
        found[chosen].record(now, specs[0].priority, own_s[chosen], keys)
        return chosen

    def _keys(self, spec: SequenceRequest, page_size: int) -> list[bytes]:
        """Return the keys of the first blocks before the last token, which is computed in any case."""
        hasher = BlockHasher(self._salt_of(spec.cache_salt))
        num_blocks = min((len(spec.prompt_ids) - 1) // page_size, MAX_BLOCKS)
        hasher.extend(spec.prompt_ids[: num_blocks * page_size], page_size)
        return [key[:KEY_BYTES] for key in hasher.keys]


def _token_s(digests: Sequence[PrefixDigest]) -> tuple[float, float]:
    """Return the seconds of one token more of a prompt and of an output, on average over pipelines, whose fits differ."""
    prefill_s, decode_s = (fmean(times) for times in zip(*((each.prefill_s, each.decode_s) for each in digests), strict=True))
    return max(prefill_s, MIN_TOKEN_S), max(decode_s, MIN_TOKEN_S)
