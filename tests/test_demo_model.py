"""The built-in model: what its card promises, and that it still is the model that was trained."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from tiny import GIB
from torch.nn import functional as F

from tramontane.cluster.config import DEMO_MODEL
from tramontane.cluster.planner import PlanRequest, StageRoom, make_plan
from tramontane.proto.model_folder import read_model_args
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.router.tokenizer_kinds import SentencePieceTokenizer
from tramontane.workers.stage_worker import StageWorker

# Sonnet 18: public domain, and not among the plays it was trained on
SONNET = "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"


def _logits(dtype: str, ids: tuple[int, ...]) -> torch.Tensor:
    args = read_model_args(DEMO_MODEL)
    plan = make_plan(args, PlanRequest((StageRoom(GIB),), dtype, args.max_seq_len, 1, 16))
    worker = StageWorker.load(plan.stages[0], DEMO_MODEL)
    worker.fence(0)
    pages = (tuple(range(plan.cache.classes[0].pages_for(len(ids), 16))),)
    batch = MicroBatch(0, 0, (Chunk(0, 0, ids, pages, SamplingParams(), True),))
    worker.table.update(batch)
    with torch.inference_mode():
        hidden, _ = worker._forward(batch, None)
        return worker.model.head(hidden)


def test_geometry_and_size() -> None:
    args = read_model_args(DEMO_MODEL)
    assert (args.n_layers, args.moe and args.moe.num_experts, args.moe and args.moe.num_experts_per_tok) == (8, 8, 2)
    assert args.window_classes == (64,)
    assert (args.max_seq_len, args.vocab_size, args.dtype) == (2048, 1000, "bfloat16")
    assert (DEMO_MODEL / "model.safetensors").stat().st_size <= 12_000_000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_knows_its_shakespeare(dtype: str) -> None:
    """Bits per byte on two lines it has never seen: far below the 8 of noise, in both dtypes."""
    ids = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model").encode(SONNET)
    logits = _logits(dtype, ids)
    nats = F.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum").item()
    assert nats / math.log(2) / len(SONNET.encode()) < 3.0


def test_bfloat16_stays_close_to_float32() -> None:
    ids = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model").encode(SONNET)
    exact, rounded = _logits("float32", ids), _logits("bfloat16", ids)
    assert 0 < (exact - rounded).norm() / exact.norm() < 0.05


def test_the_card_is_complete_and_no_expert_is_idle() -> None:
    card = (DEMO_MODEL / "MODEL_CARD.md").read_text()
    for fact in ("data:", "parameters:", "training:", "date:", "command:", "held out:"):
        assert f"* {fact}" in card
    assert float(re.search(r"([\d.]+) bits per byte", card)[1]) <= 2.5  # type: ignore[index]
    counts = [[int(n) for n in re.findall(r"\d+", row)[1:]] for row in re.findall(r"^\| \d.*$", card, re.MULTILINE)]
    assert [len(row) for row in counts] == [8] * 8
    assert min(min(row) for row in counts) > 0


def test_held_out_bits_per_byte_as_the_card_says() -> None:
    """Recomputed from the text, where it is at hand (it is not part of the project)."""
    text_path = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"
    if not text_path.is_file():
        pytest.skip("needs tinyshakespeare.txt, which is not part of the project")
    text = text_path.read_text(encoding="utf-8")
    held_out = text[len(text) * 9 // 10 :]
    ids = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model").encode(held_out)[1:]
    nats = 0.0
    for first in range(0, len(ids), 2047):
        part = (1, *ids[first : first + 2047])
        nats += F.cross_entropy(_logits("float32", part[:-1]), torch.tensor(part[1:]), reduction="sum").item()
    bits = nats / math.log(2) / len(held_out.encode())
    card = (DEMO_MODEL / "MODEL_CARD.md").read_text()
    assert f"{bits:.2f}" == f"{float(re.search(r'([0-9.]+) bits per byte', card)[1]):.2f}"  # type: ignore[index]
    assert json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"] == 1000
