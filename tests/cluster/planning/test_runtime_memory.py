"""What a stage takes of a GPU besides weights and cache: against the tensors of real layers, and
what was measured.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_models import latent_args, random_model, split_model, tiny_args, tiny_plan
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline.draft_model import plan_draft_model
from tramontane.cluster.planning.hardware import Gpu, Hardware
from tramontane.cluster.planning.plan_search import plan_pipeline
from tramontane.cluster.planning.planner import MEMORY_SHARE, StageBudget
from tramontane.cluster.planning.runtime_memory import (
    BLOCK_NUMBERS,
    COUNT_BYTES,
    HELD_SHARE,
    HELD_TIMES,
    LOGIT_BYTES,
    MIB,
    SAMPLING_BYTES,
    SORTED_LOGITS,
    SORTING_BYTES,
    RuntimeMemory,
    config_runtime,
    count_rows,
    gpu_runtime,
    kept_bytes,
    padded_rows,
    piece_sizes,
    widest_activations,
)
from tramontane.proto.errors import PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.presets import PRESETS
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import NO_TOKEN, Chunk, MicroBatch
from tramontane.proto.units import GIB
from tramontane.proto.weight_format import Quantization
from tramontane.workers.attention.rolling_cache import LayerCache
from tramontane.workers.kernels import linear
from tramontane.workers.model.rotary import rotary_tables
from tramontane.workers.sampling import integer_sampler, logprobs
from tramontane.workers.sampling.integer_sampler import choose_plainly
from tramontane.workers.sampling.logits_processors import LogitsProcessor, TokenCounts
from tramontane.workers.sampling.logprobs import LogprobTracker, token_logprobs
from tramontane.workers.sampling.sampler import sample
from tramontane.workers.stage import cuda_graphs, piecewise_graphs

MISTRAL = PRESETS["mistral-7b-v0.1"]


class _LiveBytes(TorchDispatchMode):
    """The most bytes that the tensors made in its block had at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {
            key: (ref, size) for key, (ref, size) in self._made.items() if not ref.expired()
        }
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return out


@contextmanager
def _live_bytes() -> Iterator[_LiveBytes]:
    with torch.inference_mode(), _LiveBytes() as live:
        yield live


@pytest.mark.parametrize(
    "args",
    [tiny_args(n_layers=2, moe=False), tiny_args(n_layers=2), latent_args(n_layers=2)],
    ids=["dense", "experts", "latent"],
)
def test_activations_are_those_of_a_layer(args: ModelArgs) -> None:
    """Here without fused operations, which need somewhat more; so less than what is planned, and
    not by an order of magnitude.
    """
    num_tokens, model = 256, split_model(random_model(args), tiny_plan(args))[0].model

    def attend(_layer: int, q_THd: Tensor, *_: object) -> Tensor:
        return torch.zeros_like(q_THd)

    hidden_TD = torch.randn(num_tokens, args.dim)
    rotary = rotary_tables(torch.arange(num_tokens), args, torch.float32, model.rotary_frequencies)
    with _live_bytes() as live:
        model(hidden_TD, rotary, attend)
    needed = widest_activations(args, experts_inside=True) * 4 * num_tokens
    assert needed / 2 < live.peak <= needed * HELD_TIMES / HELD_SHARE


class _NoKernel:
    """A kernel that computes nothing, on any grid."""

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


PENALIZED = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    top_k=50,
    seed=1,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias=((3, 1.0),),
    min_tokens=5,
    max_tokens=9,
    logprobs=20,
)


def _first_batch(num_seqs: int) -> MicroBatch:
    """The prompts of sequences that ask for all that changes logits, and for log-probabilities."""
    chunks = [
        Chunk(s, 0, (1, 2, 3), ((),), sampling=PENALIZED, needs_sample=True, num_prompt=3)
        for s in range(num_seqs)
    ]
    return MicroBatch(0, 0, tuple(chunks), ())


def test_logits_are_counted_as_they_are_processed() -> None:
    """All sequences have penalties; their counts of tokens are apart from what is free again after
    the step.
    """
    (num_seqs, vocab), processor = (64, 1000), LogitsProcessor(1000, (2,), torch.device("cpu"))
    processor.update(_first_batch(num_seqs))
    with _live_bytes() as live:
        processor.apply(torch.randn(num_seqs, vocab), range(num_seqs), [3] * num_seqs)
    assert 0.8 * SAMPLING_BYTES < live.peak / (num_seqs * vocab) - LOGIT_BYTES <= SAMPLING_BYTES


def test_the_kernel_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to it are the logits with penalties, and those that a grammar allows."""
    triton_sampler = pytest.importorskip("tramontane.workers.sampling.triton_sampler")
    monkeypatch.setattr(triton_sampler, "_kernel", _NoKernel())
    logits_SV = torch.randn(64, 1000)
    with _live_bytes() as live:
        sample(logits_SV, [PENALIZED] * 64, range(64), triton_sampler.choose_tokens)
    assert 2 * logits_SV.nbytes + live.peak < SAMPLING_BYTES * logits_SV.numel()
    assert live.peak >= logits_SV.nbytes


def test_pytorch_samples_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_SV, params = torch.randn(63, 1000), [replace(PENALIZED, seed=seed) for seed in range(63)]
    with _live_bytes() as live:
        expected = sample(logits_SV, params, range(63), choose_plainly).tolist()
    assert 0.5 * SORTING_BYTES < live.peak / logits_SV.numel() <= SORTING_BYTES
    monkeypatch.setattr(integer_sampler, "MAX_LOGITS", 8_999)
    with _live_bytes() as live:
        assert sample(logits_SV, params, range(63), choose_plainly).tolist() == expected
    assert live.peak <= 8_999 * SORTING_BYTES


def test_sampled_tokens_are_scored_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_SV, found, peaks = torch.randn(63, 1000), [], []
    tokens = [7, NO_TOKEN, *range(8, 69)]
    for most in (2**22, 8_999):
        monkeypatch.setattr(logprobs, "MAX_LOGITS", most)
        tracker = LogprobTracker(1000, has_exact_sums=True)
        batch = _first_batch(63)
        chunks = [  # each sequence asks for another number of tokens
            chunk._replace(sampling=replace(PENALIZED, logprobs=1 + chunk.seq_id % 4))
            for chunk in batch.chunks
        ]
        tracker.update(replace(batch, chunks=tuple(chunks)))
        with _live_bytes() as live:
            found.append(list(tracker.sampled(logits_SV, tokens, range(63), [3] * 63)))
        peaks.append(live.peak)
    assert found[0] == found[1]
    assert [row for row, _ in found[0]] == [0, *range(2, 63)]
    numbers = [len(scored.top[0]) for _, scored in found[0] if scored is not None]
    assert numbers == [1 + row % 4 for row in (0, *range(2, 63))]
    assert peaks[1] <= 8_999 * SORTING_BYTES < peaks[0]


def test_counts_of_tokens_are_counted_as_they_grow() -> None:
    for number in (1, 4, 5, 9, 33, 64):
        counts = TokenCounts(10, torch.device("cpu"))
        for _ in range(number):
            counts.allocate()
        output_RV, prompt_RV = counts._output_NV, counts._prompt_NV
        assert output_RV.nbytes + prompt_RV.nbytes == count_rows(number) * 10 * COUNT_BYTES


def _without_kernels(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setattr(module, name, _NoKernel())


@pytest.mark.parametrize("heads", [(32, 8, 128), (96, 8, 128), (16, 16, 64)])
def test_what_batch_invariant_attention_keeps(
    heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_attention = pytest.importorskip("tramontane.workers.attention.triton_attention")
    _without_kernels(triton_attention, monkeypatch, "_kernel", "_combine")
    num_heads, kv_heads, head_dim = heads
    args, kept = replace(MISTRAL, n_heads=num_heads, n_kv_heads=kv_heads, head_dim=head_dim), []
    for num_tokens, num_pages in product((1, 2, 3, 4, 6, 8, 16), (1, 64, 1000, 3000, 8000, 16_000)):
        q_BHd = torch.empty(num_tokens, num_heads, head_dim, dtype=torch.bfloat16, device="meta")
        keys = LayerCache(
            *torch.empty(2, 16, kv_heads, head_dim, dtype=torch.bfloat16, device="meta").unbind()
        )
        tiles, pages = (
            torch.empty(num_tokens, 4, device="meta"),
            torch.empty(num_tokens, num_pages, device="meta"),
        )
        with _live_bytes() as live:
            triton_attention.TritonDecode().attend(
                q_BHd, keys, triton_attention.TileMask(2**30, 16, tiles, pages)
            )
        kept.append(live.peak - q_BHd.nbytes)
    assert kept_bytes(args, batch_invariant=False) == 0
    assert (
        0.6 * kept_bytes(args, batch_invariant=True)
        < max(kept)
        <= kept_bytes(args, batch_invariant=True)
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_latent_attention_keeps(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_latent = pytest.importorskip("tramontane.workers.attention.triton_latent")
    _without_kernels(triton_latent, monkeypatch, "_attend", "_combine")
    args, kept = PRESETS["mistral-small-4-119b"], []
    assert args.latent is not None
    for num_tokens, parts in product((1, 3, 200, 1000), (2, 16, 128)):
        q_THd = torch.empty(
            num_tokens, args.n_heads, args.head_dim, dtype=torch.bfloat16, device="meta"
        )
        keys_NGd = torch.empty(16, 1, args.head_dim, dtype=torch.bfloat16, device="meta")
        index_T = torch.empty(num_tokens, device="meta")
        places = triton_latent.KeyPlaces(
            2**30, 16, index_T, index_T, torch.empty(num_tokens, 64, device="meta")
        )
        kernel = triton_latent.LatentKernel(
            args.latent.kv_lora_rank, 64, triton_latent.Tile(32, 32, 4, 5, 2), parts
        )
        with _live_bytes() as live:
            out_THc = kernel.attend(q_THd, keys_NGd, places)
        kept.append(live.peak - out_THc.nbytes)
    assert 0.8 * kept_bytes(args, batch_invariant) < max(kept) <= kept_bytes(args, batch_invariant)


def test_what_of_quantized_matrices_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For many tokens, some rows of a matrix at a time."""
    assert linear.BLOCK_ELEMENTS["cuda"] == BLOCK_NUMBERS
    monkeypatch.setitem(linear.BLOCK_ELEMENTS, "cpu", 10_000)
    x_TK, numbers_NK = torch.randn(3, 1000), torch.ones(95, 1000, dtype=torch.int8)
    with _live_bytes() as live:
        out_TN = linear.blockwise_linear(x_TK, numbers_NK, torch.float32, torch.ones(95))
    assert 10_000 * 4 <= live.peak - out_TN.nbytes < 1.2 * 10_000 * 4
    plain, quantized = (
        config_runtime(_config(quantize=each), MISTRAL, "bfloat16", 128, 4096)
        for each in (None, Quantization.INT8)
    )
    assert quantized.workspaces - plain.workspaces == quantized.graphs - plain.graphs == 32 * MIB


def test_what_attention_keeps_is_planned_for_steps_and_for_graphs() -> None:
    plain, invariant = (
        config_runtime(_config(batch_invariant=each), MISTRAL, "bfloat16", 128, 4096)
        for each in (None, True)
    )
    assert invariant.workspaces - plain.workspaces == invariant.graphs - plain.graphs == 65 * MIB
    assert invariant.total - plain.total == 130 * MIB


@pytest.mark.parametrize("has_exact_sums", [False, True])
def test_logits_of_prompts_are_counted_as_they_are_scored(has_exact_sums: bool) -> None:
    logits_RV = torch.randn(64, 1000)
    with _live_bytes() as live:
        token_logprobs(logits_RV, [1] * 64, [20] * 64, has_exact_sums)
    assert live.peak <= SORTING_BYTES * logits_RV.numel()
    assert SORTED_LOGITS == logprobs.MAX_LOGITS


def test_the_sums_are_those_of_the_example() -> None:
    found = gpu_runtime(MISTRAL, "bfloat16", 4096, 128, num_sampled=128)
    kept = 8 * 33 * 2**16
    pieces = 512 * (55_296 + 14_336) * 2 + 512 * 16 + kept
    assert round(pieces / MIB, 1) == 84.5
    logits = 128 * 32_000 * (4 + 28 + 5) + 2**22 * (4 + 48)
    assert found.as_data() == {
        "context": 800 * MIB,
        "workspaces": 64 * MIB,
        "activations": 432 * MIB * 9 // 2,
        "graphs": int(13.5 * MIB) + int(15.625 * MIB) + pieces,
        "logits": logits,
        "total": found.total,
    }
    assert found.total == 800 * MIB + 64 * MIB + 1944 * MIB + int(29.125 * MIB) + pieces + logits


def test_the_widest_part_of_a_layer() -> None:
    """Of Small 4 the experts, a shared one too, or without them attention; of Large 4 a dense
    layer, if it were wide.
    """
    small, large = PRESETS["mistral-small-4-119b"], PRESETS["mistral-large-4-1t"]
    assert (
        widest_activations(small, experts_inside=True)
        == 3 * 4096 + 4 * (3 * 4096 + 3 * 2048) + 3 * 2048
    )
    attention = 32 * (128 + 256 + 2 * 320) + 2 * 320
    assert widest_activations(small, experts_inside=False) == 3 * 4096 + attention
    wide = replace(large, hidden_dim=100_000)
    assert widest_activations(wide, experts_inside=True) == 3 * 6144 + 3 * 100_000


def test_what_was_measured_is_less() -> None:
    """On an H100: two stages of a tiny model, and one with half of Mistral 7B, besides weights and
    cache, 2,794 MiB.
    """
    assert gpu_runtime(tiny_args(), "bfloat16", 512, 64, num_sampled=64).total > 840 * MIB
    assert (
        2794 * MIB
        < gpu_runtime(MISTRAL, "bfloat16", 4096, 128, num_sampled=128).total
        < 1.2 * 2794 * MIB
    )


def test_a_step_samples_no_more_than_its_tokens() -> None:
    few, many = (
        gpu_runtime(MISTRAL, "bfloat16", 512, 512, num_sampled=number).logits
        for number in (512, 4096)
    )
    assert few == many


def test_drafts_are_sampled_too_and_experts_elsewhere_take_nothing() -> None:
    config = EngineConfig(max_num_seqs=16)
    drafting = _config(max_num_seqs=16, speculative_config={"num_speculative_tokens": 3})
    plain, drafted = (
        config_runtime(each, MISTRAL, "bfloat16", 16, 512).logits for each in (config, drafting)
    )
    assert drafted - plain == 16 * 32_000 * 32
    mixtral = PRESETS["mixtral-8x7b"]
    inside, outside = (
        config_runtime(config, mixtral, "bfloat16", 16, 512, experts_inside=each).activations
        for each in (True, False)
    )
    assert inside > 2 * outside


def test_graphs_have_room_for_the_most_decodes() -> None:
    for number in range(1, 600):
        assert cuda_graphs.padded_rows(number) <= padded_rows(number) < number + 16


def test_pieces_have_room_for_their_largest_step() -> None:
    for number in range(1, 3000):
        sizes = piecewise_graphs.piece_sizes(number)
        assert piece_sizes(number) == (sizes[-1], len(sizes))


def test_models_without_graphs_of_pieces_need_no_memory_for_them() -> None:
    """Experts on actors and sparse attention; between pieces latent attention has one vector of
    each key and value.
    """
    mixtral, latent = PRESETS["mixtral-8x7b"], PRESETS["mistral-small-4-119b"]

    def graphs(args: ModelArgs, **options: bool) -> int:
        return gpu_runtime(args, "bfloat16", 1024, 16, num_sampled=16, **options).graphs

    decodes = 16 * (widest_activations(mixtral, experts_inside=False) * 2 + mixtral.vocab_size * 4)
    assert graphs(mixtral, experts_inside=False) == decodes
    large = PRESETS["mistral-large-4-1t"]
    assert graphs(large) == 16 * (
        widest_activations(large, experts_inside=True) * 2 + large.vocab_size * 4
    ) + kept_bytes(large, False)
    assert latent.latent is not None
    widest = widest_activations(latent, experts_inside=True)
    between = (
        latent.dim
        + (latent.n_heads + 1) * latent.head_dim
        + latent.n_heads * latent.latent.kv_lora_rank
    )
    kept = 8 * (latent.n_layers + 1) * 2**16
    pieces = 512 * (widest + between) * 2 + 512 * 16 + kept
    converted = kept_bytes(latent, False) + BLOCK_NUMBERS * 2 * (latent.quantization is not None)
    assert graphs(latent) == 16 * (widest * 2 + latent.vocab_size * 4) + pieces + converted


@pytest.mark.parametrize(
    ("memory", "runtime", "usable"),
    [(80, None, 72), (80, 3, 72), (20, 3, 17), (30, 3, 27), (2, 3, 0)],
)
def test_a_tenth_is_left_and_more_where_it_is_needed(
    memory: int, runtime: int | None, usable: int
) -> None:
    needed = None if runtime is None else RuntimeMemory(runtime * GIB, 0, 0, 0, 0)
    assert StageBudget(memory * GIB, runtime=needed).usable == usable * GIB


@pytest.mark.parametrize("stages_per_gpu", [1, 2, 4])
def test_stages_that_share_a_gpu_leave_room_for_each_process(stages_per_gpu: int) -> None:
    """The figures of the H100; of four stages each would have had 1.98 GiB left by the share
    alone.
    """
    config = EngineConfig(
        stages_per_gpu=stages_per_gpu,
        max_num_batched_tokens=4096,
        max_num_seqs=10_000,
        max_model_len=8192,
        dtype="bfloat16",
    )
    total, runtime = 85_017_493_504, config_runtime(config, MISTRAL, "bfloat16", 10_000, 4096).total
    hardware = Hardware((16,), (GIB,), (Gpu("H100", total),))
    plan = plan_pipeline(config, MISTRAL, hardware)
    assert len(plan.stages) == stages_per_gpu
    taken = [stage.packed_bytes + stage.cache_bytes for stage in plan.stages]
    share = total // stages_per_gpu
    assert max(taken) <= min(share * MEMORY_SHARE, share - runtime)
    assert sum(taken) + stages_per_gpu * runtime <= total
    assert max(taken) > 0.98 * min(share * MEMORY_SHARE, share - runtime), "it is used"


def test_without_a_gpu_nothing_else_is_counted() -> None:
    config = EngineConfig(stages=1, max_num_seqs=10_000, max_model_len=64)
    (stage,) = plan_pipeline(config, tiny_args(n_layers=2), Hardware((2,), (4 * MIB,))).stages
    assert 0.8 * 4 * MIB < stage.packed_bytes + stage.cache_bytes <= 4 * MIB * MEMORY_SHARE


def test_a_model_that_does_not_fit_with_the_rest_is_refused_with_it() -> None:
    config = _config(max_model_len=64)
    with pytest.raises(PlanError) as refused:
        plan_pipeline(config, tiny_args(n_layers=2), Hardware((2,), (GIB,), (Gpu("L4", GIB),)))
    runtime = config_runtime(config, tiny_args(), "float32", 64, 512).total
    said = (
        f"and may use 0 B, as CUDA, activations and logits take {runtime / GIB:.3g} GiB of 1 GiB;"
        " possible: 1 GPU of 2 GiB"
    )
    assert said in str(refused.value)


def _config(**settings: Any) -> EngineConfig:
    return EngineConfig.build(None, settings)


def test_a_draft_model_leaves_room_for_its_process() -> None:
    drafts = {"method": "draft_model", "model": "/draft", "num_speculative_tokens": 2}
    config = _config(
        max_num_seqs=1000, max_model_len=1024, speculative_config=drafts, dtype="float32"
    )
    gpu = Gpu("L4", 4 * GIB)
    args = tiny_args(n_layers=2, max_seq_len=1024, window=None)
    target = plan_pipeline(
        _config(max_num_seqs=1000, max_model_len=1024), args, Hardware((2,), (GIB,), (gpu,))
    )
    # 16 MiB for a sequence
    small = replace(args, dim=4096, vocab_size=32_000, n_heads=8, n_kv_heads=8, head_dim=128)
    stage = plan_draft_model(config, small, target, Hardware((2,), (GIB,), (gpu, gpu)))
    runtime = config_runtime(config, small, "float32", 1000, stage.max_num_batched_tokens).total
    assert runtime > 4 * GIB * (1 - MEMORY_SHARE)
    assert 0.98 * (4 * GIB - runtime) < stage.packed_bytes + stage.cache_bytes <= 4 * GIB - runtime
