"""Steps with prompts by piecewise CUDA graphs, on the CPU: see ``graph_tape.py``."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from graph_tape import Replays
from harness import random_ids, run_in_process
from tiny_models import (
    few_experts,
    latent_args,
    random_model,
    sparse_args,
    split_model,
    tiny_args,
    tiny_plan,
)
from torch import Tensor

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.presets import PRESETS, tiny_variant
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.proto.weight_format import Quantization, WeightFormat
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.sdpa_backend import PagedDecode, SdpaPrefill
from tramontane.workers.kernels import head_products
from tramontane.workers.kernels.row_invariance import RowProducts
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage import stage_worker
from tramontane.workers.stage.cuda_graphs import Compute, Cut
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.hidden_states import HiddenStates
from tramontane.workers.stage.piecewise_graphs import padded_tokens, piece_sizes
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights import loader
from tramontane.workers.weights.loader import allocate_contiguous
from tramontane.workers.weights.tensor_specs import stage_tensors

KERNELS = AttentionKernels(SdpaPrefill(), PagedDecode())
BUDGET = 128  # tokens of a step: sizes of 64 and 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
SHORT = [random_ids(length, length) for length in (70, 1, 23, 40, 2)]
WITH_GRAPHS = [name for name, args in PRESETS.items() if not args.sparse]
LOGGER = "tramontane.workers.stage.piecewise_graphs"


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix is packed for kernels in C, which are no operations of torch."""
    monkeypatch.setattr(loader, "pack_linears", lambda *_: {})
    monkeypatch.setattr(head_products, "packed_matmul", lambda *_: None)


def _plan(
    args: ModelArgs, num_stages: int = 1, budget: int = BUDGET, **changes: object
) -> PipelinePlan:
    return tiny_plan(args, num_stages, page_size=4, max_num_batched_tokens=budget, **changes)


def _backend(recorder: Replays | None) -> DeviceBackend:
    return DeviceBackend(KERNELS, piecewise_capture=recorder and recorder.in_pieces)


def _workers(plan: PipelinePlan, backend: DeviceBackend) -> list[StageWorker]:
    """Return stages with the experts of a layer in one place, and their pieces recorded, if the
    backend does that.
    """
    state, workers = random_model(plan.args).state_dict(), []
    for stage in plan.stages:
        with torch.device("meta"):
            model = StageModel(plan.args, stage.layers).eval()
        places = allocate_contiguous(
            stage_tensors(plan.args, stage.layers), WeightFormat("float32", stored="float32"), "cpu"
        )
        own = {
            name: places[name].copy_(state[name]) if name in places else state[name]
            for name in model.state_dict()
        }
        model.load_state_dict(own, assign=True)
        workers.append(StageWorker(stage, model, backend=backend))
        workers[-1].prepare()
    return workers


def _assert_same(plan: PipelinePlan, sampling: SamplingParams = GREEDY, **options: Any) -> None:
    """Assert that stages with pieces answer as those without do, and count as many tokens of each
    expert.
    """
    recorder, answers, loads, budget = Replays(), [], [], plan.stages[0].max_num_batched_tokens
    for each in (recorder, None):
        workers = _workers(plan, _backend(each))
        answers.append(run_in_process(plan, workers, SHORT, sampling, budget=budget, **options))
        loads.append(
            {layer: load for worker in workers for layer, load in worker.model.expert_load.items()}
        )
    assert answers[0] == answers[1]
    assert loads[0] == loads[1], "neither padding nor what was tried is counted"
    assert recorder.num_recorded == len(piece_sizes(budget)) * sum(
        len(stage.layers) + 1 for stage in plan.stages
    )
    assert recorder.num_replayed > recorder.num_recorded, "tried once, and used"


@pytest.mark.parametrize(
    ("name", "num_stages"), [(name, 1 + i % 3) for i, name in enumerate(WITH_GRAPHS)]
)
def test_the_same_tokens_with_every_kind_of_model(name: str, num_stages: int) -> None:
    """In one stage, or as first, middle and last ones. Of prompts, of the ends of longer ones, and
    next to decodes.
    """
    args = few_experts(replace(tiny_variant(PRESETS[name]), quantization=None, dtype="float32"))
    _assert_same(
        _plan(replace(args, max_seq_len=min(args.max_seq_len, 512)), num_stages, budget=64)
    )


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_same_tokens_with_windows_of_several_kinds(num_stages: int, moe: bool) -> None:
    plan = _plan(tiny_args(n_layers=4, windows=(24, None, 7, 24), moe=moe), num_stages)
    _assert_same(plan, SamplingParams(seed=5, max_tokens=4))


def test_the_same_tokens_with_keys_and_values_in_fp8() -> None:
    _assert_same(_plan(tiny_args(n_layers=2, moe=False), kv_cache_dtype="fp8"))


def test_the_same_tokens_of_steps_that_begin_with_tokens_on_the_device() -> None:
    """Those of decodes next to prompts are filled in before the first piece."""
    _assert_same(_plan(tiny_args(n_layers=2, moe=False)), async_scheduling=True, max_in_flight=2)


@pytest.mark.parametrize("quantize", [*Quantization])
def test_the_same_tokens_with_quantized_weights(quantize: Quantization) -> None:
    plan, recorder = _plan(tiny_args(n_layers=2, moe=False), quantize=quantize), Replays()
    plain = StageWorker.load(plan.stages[0], RandomWeights(), "cpu")
    recording = StageWorker(plan.stages[0], plain.model, backend=_backend(recorder))
    recording.prepare()
    answers = [
        run_in_process(plan, [worker], SHORT, GREEDY, budget=BUDGET)
        for worker in (plain, recording)
    ]
    assert answers[0] == answers[1]
    assert recorder.num_replayed > recorder.num_recorded


# The second of three stages: what it makes of hidden states.


def _row_by_row(x_CK: Tensor, weight_NK: Tensor, _scale_N: Tensor | None) -> Tensor:
    """A product in which a row's bits depend on that row alone."""
    return torch.cat([row_1K @ weight_NK.T for row_1K in x_CK.split(1)])


def _in_groups(
    x_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, _scale_EN: Tensor | None
) -> Tensor:
    """The same by each row's expert, which is found on the device. Rows after the last group are
    not numbers.
    """
    experts_C = (torch.arange(len(x_CK))[:, None] >= ends_E).sum(1)
    weight_CNK = weight_ENK[experts_C.clamp(max=len(weight_ENK) - 1)]
    return (
        (weight_CNK * x_CK[:, None])
        .sum(2)
        .masked_fill((experts_C == len(weight_ENK))[:, None], torch.nan)
    )


def _middle(args: ModelArgs, recorder: Replays | None, **changes: Any) -> StageWorker:
    """Return the second of three stages, whose products are row by row."""
    backend = replace(_backend(recorder), row_products=RowProducts(_row_by_row, _in_groups))
    plan = _plan(args, 3, **changes)
    (worker,) = _workers(replace(plan, stages=plan.stages[1:2]), backend)
    worker.fence(0)
    assert worker.pieces is None or worker.pieces.sizes == [64, 128]
    return worker


def _steps(args: ModelArgs, *sizes: tuple[int, ...]) -> list[tuple[MicroBatch, Tensor]]:
    """Return steps of new chunks of these lengths, single tokens last, and random hidden states."""
    generator, seq_ids, pages, steps = torch.Generator().manual_seed(3), count(), count(), []
    for step_id, lens in enumerate(sizes):
        chunks = [
            Chunk(
                seq_id,
                0,
                (0,) * length,
                (tuple(next(pages) for _ in range(-(-length // 4))),),
                SamplingParams(),
                False,
            )
            for seq_id, length in zip(seq_ids, lens, strict=False)
        ]
        steps.append(
            (
                MicroBatch(0, step_id, tuple(chunks)),
                torch.randn(sum(lens), args.dim, generator=generator),
            )
        )
    return steps


def _hidden(worker: StageWorker, batch: MicroBatch, hidden_TD: Tensor) -> Tensor:
    done_TD = worker.launch(batch, HiddenStates(hidden_TD, ())).hidden_TD
    assert done_TD is not None
    return done_TD


LATENT = replace(latent_args(n_layers=6), moe=None)
KINDS = {
    "dense": tiny_args(n_layers=6, moe=False, window=None),
    "experts": tiny_args(n_layers=6, window=None),
    "latent": LATENT,
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_padding_holds_it_changes_no_bit_of_the_rows(kind: str) -> None:
    """A step that is not numbers leaves that in the rows behind the next ones."""
    args = KINDS[kind]
    steps = _steps(args, (100, 20), (60, 1, 1), (30, 40))
    worker, clean = (_middle(args, Replays()) for _ in range(2))
    _hidden(worker, steps[0][0], torch.full((120, args.dim), torch.nan))
    _hidden(clean, *steps[0])
    for batch, hidden_TD in steps[1:]:
        found_TD = _hidden(worker, batch, hidden_TD)
        assert found_TD.isfinite().all()
        assert torch.equal(found_TD, _hidden(clean, batch, hidden_TD))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_caches_are_those_of_steps_without_pieces(kind: str) -> None:
    """Nothing else is written to a cache: rows of pages that no sequence has stay zeros."""
    args = KINDS[kind]
    with_pieces, without = _middle(args, Replays()), _middle(args, None)
    for batch, hidden_TD in _steps(args, (50, 1), (64,), (65, 30, 1, 1), (1, 1)):
        torch.testing.assert_close(
            _hidden(with_pieces, batch, hidden_TD),
            _hidden(without, batch, hidden_TD),
            rtol=1e-4,
            atol=1e-4,
        )
    for layer in with_pieces.plan.layers:
        found, expected = (worker.cache.layers[layer] for worker in (with_pieces, without))
        for found_NGd, expected_NGd in (
            (found.k_NGd, expected.k_NGd),
            (found.v_NGd, expected.v_NGd),
        ):
            assert torch.equal(found_NGd == 0, expected_NGd == 0)
            torch.testing.assert_close(found_NGd, expected_NGd, rtol=1e-4, atol=1e-4)


def test_what_is_returned_stays_as_it_is_in_the_next_step() -> None:
    args = KINDS["dense"]
    worker, steps = _middle(args, Replays()), _steps(args, (50,), (50,))
    first_TD = _hidden(worker, *steps[0])
    kept_TD = first_TD.clone()
    _hidden(worker, *steps[1])
    assert torch.equal(first_TD, kept_TD)


# Sizes, and stages and steps without pieces.


def test_sizes_are_those_of_the_examples() -> None:
    assert (
        list(piece_sizes(8192)) == list(piece_sizes(512)) == [64, 128, 192, 256, 320, 384, 448, 512]
    )
    assert list(piece_sizes(100)) == [64, 128]
    assert [padded_tokens(number) for number in (1, 64, 65, 513)] == [64, 64, 128, 576]


def test_larger_steps_are_computed_as_before() -> None:
    args, recorder = tiny_args(n_layers=3, moe=False, window=None), Replays()
    plan = tiny_plan(args, 1, max_num_batched_tokens=600)
    (worker,) = _workers(plan, _backend(recorder))
    assert worker.pieces is not None
    assert worker.pieces.sizes[-1] == 512
    before, prompts = recorder.num_replayed, [random_ids(513, 0)]
    one_token = SamplingParams(temperature=0.0, max_tokens=1)
    found = run_in_process(plan, [worker], prompts, one_token, budget=600)
    assert recorder.num_replayed == before
    assert found == run_in_process(
        plan, _workers(plan, _backend(None)), prompts, one_token, budget=600
    )
    run_in_process(plan, [worker], [prompts[0][:512]], one_token, budget=600)
    assert recorder.num_replayed == before + 4


def test_steps_whose_expert_choices_are_wanted_are_computed_as_before() -> None:
    recorder = Replays()
    plan = _plan(tiny_args(n_layers=2))
    workers = _workers(plan, _backend(recorder))
    before = recorder.num_replayed
    run_in_process(plan, workers, SHORT, replace(GREEDY, return_experts=(0,)), budget=BUDGET)
    assert recorder.num_replayed == before


def test_steps_of_decodes_alone_have_no_pieces() -> None:
    recorder, plan = Replays(), _plan(tiny_args(n_layers=3, moe=False))
    (worker,) = _workers(plan, _backend(recorder))
    before = recorder.num_replayed
    run_in_process(plan, [worker], [[1]], GREEDY, budget=BUDGET)
    assert recorder.num_replayed == before + 4, "of the prompt"


@pytest.mark.parametrize(
    "args", [sparse_args(), tiny_args(n_layers=2)], ids=["sparse attention", "experts one by one"]
)
def test_models_whose_layers_wait_for_the_device_have_none(args: ModelArgs) -> None:
    plan, recorder = _plan(args), Replays()
    (worker,) = split_model(random_model(args), plan, backend=_backend(recorder))
    assert worker.pieces is None


def test_stages_whose_experts_are_on_actors_have_none() -> None:
    plan = _plan(tiny_args(n_layers=2))
    stage = replace(plan.stages[0], experts_inside=False)
    worker = StageWorker(
        stage,
        StageModel(plan.args, stage.layers, experts_inside=False),
        backend=_backend(Replays()),
    )
    assert worker.pieces is None


class _Broken(Replays):
    """A device that records, and replays something else: a piece is missing, or it refuses the
    second size.
    """

    def __init__(self, refusal: Exception | None) -> None:
        super().__init__()
        self._refusal = refusal

    def in_pieces(self, compute: Callable[[Cut], Tensor]) -> list[Compute]:
        pieces = super().in_pieces(compute)
        if self._refusal is not None and self.num_recorded > len(pieces):
            raise self._refusal
        first, *others = pieces
        return pieces if self._refusal else [first, *others[:-2], others[-1], others[-1]]


@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        (None, "differs by"),
        (torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory"),
        (SyntaxError("at 7:4:\nx\nunsupported type"), "at 7:4: ... unsupported type"),
    ],
    ids=["other numbers", "no memory", "a compiler's error"],
)
def test_pieces_that_do_not_work_are_not_used_and_that_is_said_once(
    refusal: Exception | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = _plan(tiny_args(n_layers=2, moe=False))
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        workers = _workers(plan, _backend(_Broken(refusal)))
        found = run_in_process(plan, workers, SHORT, GREEDY, budget=BUDGET)
    assert found == run_in_process(
        plan, _workers(plan, _backend(None)), SHORT, GREEDY, budget=BUDGET
    )
    (record,) = caplog.records
    said = "launches steps with prompts kernel by kernel: their CUDA graphs cannot be used"
    assert said in record.getMessage()
    assert why in record.getMessage()
    assert workers[0].pieces is not None
    assert workers[0].pieces.sizes == []


def _leaking(x_CK: Tensor, weight_NK: Tensor, scale_N: Tensor | None) -> Tensor:
    """A product in which what is not a number in one row is so in all."""
    return _row_by_row(x_CK, weight_NK, scale_N) + 0 * x_CK.sum()


def test_pieces_in_which_padding_reaches_other_rows_are_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = replace(_backend(Replays()), row_products=RowProducts(_leaking, _in_groups))
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        (worker,) = _workers(_plan(tiny_args(n_layers=2, moe=False)), backend)
    assert worker.pieces is not None
    assert worker.pieces.sizes == []
    assert "differs by nan" in caplog.text


@pytest.mark.parametrize("is_row_wise", [False, True])
def test_a_batch_invariant_stage_uses_only_pieces_that_change_no_bits(
    is_row_wise: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch's products on CPUs give some rows other bits in other company; those of
    ``_row_by_row`` do not.
    """
    plan = _plan(tiny_args(n_layers=3, moe=False))
    stage, products = (
        replace(plan.stages[0], batch_invariant=True),
        RowProducts(_row_by_row if is_row_wise else _biased, _in_groups),
    )
    backend = replace(_backend(Replays()), row_products=products)
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        (worker,) = _workers(replace(plan, stages=(stage,)), backend)
    assert worker.pieces is not None
    assert worker.pieces.sizes == ([64, 128] if is_row_wise else [])
    assert ["other bits than alone" in record.getMessage() for record in caplog.records] == [
        True
    ] * (not is_row_wise)


def _biased(x_CK: Tensor, weight_NK: Tensor, scale_N: Tensor | None) -> Tensor:
    """A product in which a full tile of 64 rows is rounded otherwise."""
    return _row_by_row(x_CK, weight_NK, scale_N) * (1 + 1e-6 * (len(x_CK) % 64 == 0))


def test_a_stage_that_is_loaded_has_recorded_its_pieces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, sizes = Replays(), list[int]()
    backend = replace(
        _backend(recorder),
        piecewise_capture=lambda compute: (
            sizes.append(compute.args[0]),
            recorder.in_pieces(compute),
        )[1],
    )
    monkeypatch.setattr(stage_worker, "select_backend", lambda *_: backend)
    plan = _plan(tiny_args(n_layers=2, moe=False))
    with caplog.at_level(logging.INFO, logger=LOGGER):
        worker = StageWorker.load(plan.stages[0], RandomWeights())
    assert worker.pieces is not None
    assert worker.pieces.sizes == [64, 128]
    assert sizes == [128, 64], "the smaller one fits into the larger one's memory"
    (record,) = (each for each in caplog.records if each.name == LOGGER)
    assert "recorded 6 CUDA graphs" in record.getMessage()
    assert record.getMessage().endswith("for steps with prompts of up to 128 tokens")
