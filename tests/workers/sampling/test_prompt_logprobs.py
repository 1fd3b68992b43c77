"""Log-probabilities of a prompt in chunks: what is kept between two of them."""

import torch
from torch import Tensor

from tramontane.proto.request import Logprobs, SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.sampling.logprobs import LogprobTracker

VOCAB, DIM = 12, 5
PROMPT = (3, 1, 4, 1, 5, 9)
WANTING = SamplingParams(prompt_logprobs=2)


def _run(
    tracker: LogprobTracker,
    hidden_TD: Tensor,
    start: int,
    head_DV: Tensor,
    freed: tuple[int, ...] = (),
) -> list[Logprobs]:
    """Send a chunk of the prompt; ``hidden_TD`` has its rows."""
    token_ids = PROMPT[start : start + len(hidden_TD)]
    sampling = WANTING if start == 0 else None
    chunk = Chunk(
        7,
        start,
        token_ids,
        ((),),
        sampling,
        needs_sample=False,
        num_prompt=len(PROMPT) if start == 0 else 0,
    )
    batch = MicroBatch(0, 0, (chunk,), freed)
    tracker.update(batch)
    found = tracker.prompts(batch, hidden_TD, lambda rows_RD: rows_RD @ head_DV)
    return [logprobs for _, logprobs in found if logprobs is not None]


def test_the_last_row_of_a_chunk_is_kept_by_value_and_alone() -> None:
    """The memory of the rows may be used again, and that of the other rows is not held, as long as
    the prompt takes.
    """
    generator = torch.Generator().manual_seed(0)
    head_DV, hidden_TD = (
        torch.randn(DIM, VOCAB, generator=generator),
        torch.randn(len(PROMPT), DIM, generator=generator),
    )
    (whole,) = _run(LogprobTracker(VOCAB), hidden_TD.clone(), 0, head_DV)
    tracker = LogprobTracker(VOCAB)
    rows = hidden_TD[:4].clone()
    (first,) = _run(tracker, rows, 0, head_DV)
    rows.fill_(torch.nan)
    (second,) = _run(tracker, hidden_TD[4:].clone(), 4, head_DV)
    assert (first.start, second.start, len(whole.logprobs)) == (1, 4, 5)
    torch.testing.assert_close(first.logprobs + second.logprobs, whole.logprobs)
    assert [ids for ids, _ in sum(first.top + second.top, ())] == [
        ids for ids, _ in sum(whole.top, ())
    ]
    assert tracker.num_sequences == 0, "the prompt is complete"


def test_a_prompt_that_ends_early_is_forgotten() -> None:
    tracker, head_DV = LogprobTracker(VOCAB), torch.ones(DIM, VOCAB)
    _run(tracker, torch.zeros(3, DIM), 0, head_DV)
    assert tracker.num_sequences == 1
    tracker.update(MicroBatch(0, 1, (), (7,)))
    assert tracker.num_sequences == 0
