"""Drafts of a draft model: what it is asked for, and which of its drafts still fit when they
come.
"""

from collections.abc import Collection, Sequence

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.proto.request import SamplingParams
from tramontane.proto.step import DraftRequest
from tramontane.router.scheduling.model_drafter import DraftQueue, ModelDrafter

GREEDY = SamplingParams(temperature=0.0)


def _drafter(
    queue: DraftQueue, tokens: list[int], seq_id: int = 7, num_tokens: int = 3, max_len: int = 99
) -> ModelDrafter:
    return ModelDrafter(tokens, seq_id, GREEDY, num_tokens, max_len, queue)


class FakeModel:
    """Keeps the texts of sequences as a draft model does, and drafts by ``next_token``. It forgets
    those in ``lost``.
    """

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.num_tokens = 0  # that were sent

    def next_token(self, text: Sequence[int]) -> int:
        return sum(text) % 5

    def draft(
        self, requests: Sequence[DraftRequest], ended: Collection[int]
    ) -> list[tuple[int, ...] | None]:
        for seq_id in ended:
            self.texts.pop(seq_id, None)
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> tuple[int, ...] | None:
        text = self.texts.get(request.seq_id, [])
        if request.num_kept > len(text):
            return None
        self.num_tokens += len(request.token_ids)
        text[request.num_kept :] = request.token_ids
        length = len(text)
        for _ in range(request.num_tokens):
            text.append(self.next_token(text))
        self.texts[request.seq_id] = text
        return tuple(text[length:])


def _answer(queue: DraftQueue, model: FakeModel) -> None:
    drafters, ended = queue.take()
    for drafter, drafts in zip(
        drafters, model.draft([each.request() for each in drafters], ended), strict=True
    ):
        drafter.receive(drafts)


def test_drafts_come_after_they_were_asked_for() -> None:
    queue, requested = DraftQueue(), list[int]()
    queue.on_request = lambda: requested.append(1)
    tokens = [5, 6, 7]
    drafter = _drafter(queue, tokens)
    assert drafter.draft(2) == drafter.draft(3) == ()
    assert requested == [1], "one request is enough"
    ((waiting,), ended) = queue.take()
    assert (waiting, ended) == (drafter, [])
    assert drafter.request() == DraftRequest(7, 0, (5, 6, 7), 3, GREEDY)
    assert drafter.draft(3) == ()
    assert queue.take() == ([], []), "it waits for the first one"
    drafter.receive((8, 9, 2))
    assert drafter.draft(2) == (8, 9)
    assert queue.take() == ([], [])
    assert drafter.draft(5) == (8, 9, 2)
    assert queue.take() == ([drafter], []), "five were wanted"
    assert drafter.request() == DraftRequest(7, 6, (), 3, GREEDY), "as if those were right"


def test_after_a_wrong_draft_the_model_begins_where_it_was_wrong() -> None:
    queue, tokens = DraftQueue(), [5, 6, 7]
    drafter = _drafter(queue, tokens)
    drafter.draft(3)
    queue.take()
    drafter.request()
    drafter.receive((8, 9, 2))
    tokens += (8, 4)
    assert drafter.draft(3) == ()
    assert drafter.request() == DraftRequest(7, 4, (4,), 3, GREEDY)
    drafter.receive((1, 1, 1))
    tokens += (1,)
    assert drafter.draft(2) == (1, 1)


def test_drafts_that_come_too_late_are_used_as_far_as_they_still_fit() -> None:
    queue, tokens = DraftQueue(), [5]
    drafter = _drafter(queue, tokens)
    drafter.draft(3)
    queue.take()
    drafter.request()
    tokens += (6, 7)
    drafter.receive((6, 7, 8))
    assert drafter.draft(1) == (8,)
    other, others = _drafter(queue, more := [5]), queue
    other.draft(3)
    others.take()
    other.request()
    more += (6, 3)
    other.receive((6, 7, 8))
    assert other.draft(1) == ()


def test_a_model_that_has_lost_the_sequence_gets_all_of_it() -> None:
    queue, tokens = DraftQueue(), [5, 6]
    drafter = _drafter(queue, tokens)
    drafter.draft(3)
    queue.take()
    drafter.request()
    drafter.receive((7, 8, 9))
    drafter.draft(9)
    queue.take()
    drafter.request()
    drafter.receive(None)
    assert drafter.draft(3) == ()
    assert queue.take() == ([], []), "not before there is another token"
    tokens.append(1)
    assert drafter.draft(3) == ()
    assert queue.take() == ([drafter], [])
    assert drafter.request() == DraftRequest(7, 0, (5, 6, 1), 3, GREEDY)
    drafter.receive(())
    assert drafter.draft(3) == ()
    assert queue.take() == ([], []), "the model has nothing to say here"


def test_nothing_is_asked_for_beyond_the_longest_text() -> None:
    queue, tokens = DraftQueue(), [5, 6]
    drafter = _drafter(queue, tokens, max_len=4)
    drafter.draft(3)
    queue.take()
    assert drafter.request().num_tokens == 2
    drafter.receive((7, 8))
    assert drafter.draft(3) == (7, 8)
    assert queue.take() == ([], [])


def test_a_sequence_that_has_ended_waits_no_longer_and_is_forgotten() -> None:
    queue = DraftQueue()
    drafter, other = _drafter(queue, [5]), _drafter(queue, [6], seq_id=8)
    drafter.draft(1)
    queue.take()[0][0].receive((1,))
    drafter.draft(2)
    other.draft(1)
    drafter.close()
    assert queue.take() == ([other], [7])


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_all_drafts_are_what_the_model_drafts_after_the_text(data: st.DataObject) -> None:
    """Whenever drafts come, and whatever has been sampled since, of several sequences; also by a
    model that forgets.
    """
    model, queue = FakeModel(), DraftQueue()
    texts = [[seq_id + 1] for seq_id in range(3)]
    drafters = [_drafter(queue, text, seq_id) for seq_id, text in enumerate(texts)]
    num_drafts = 0
    for _ in range(data.draw(st.integers(1, 40))):
        number = data.draw(st.integers(0, 2))
        match data.draw(st.sampled_from(["draft", "grow", "answer", "answer", "forget"])):
            case "draft":
                drafts, expected = (
                    drafters[number].draft(data.draw(st.integers(1, 6))),
                    list(texts[number]),
                )
                for _ in drafts:
                    expected.append(model.next_token(expected))
                assert list(drafts) == expected[len(texts[number]) :]
                num_drafts += len(drafts)
            case "grow":
                right = model.next_token(texts[number])
                texts[number].append(right if data.draw(st.booleans()) else 9)
            case "answer":
                _answer(queue, model)
            case "forget":
                model.texts.pop(number, None)
    for number, drafter in enumerate(drafters):
        for _ in range(4):  # one for what was lost, one for what is new
            texts[number].append(9)
            drafter.draft(3)
            _answer(queue, model)
        assert len(drafter.draft(3)) == 3, number


def test_sequences_that_the_model_does_not_know_leave_no_ids() -> None:
    """As on a server that is too busy for drafts: neither those that never asked nor those that no
    call has taken.
    """
    queue, model = DraftQueue(), FakeModel()
    for seq_id in range(1000):
        drafter = _drafter(queue, [1, 2, 3], seq_id)
        if seq_id % 2:
            drafter.draft(2)
        drafter.close()
    assert queue.take() == ([], [])
    known = _drafter(queue, [1, 2, 3], 1000)
    known.draft(2)
    _answer(queue, model)
    known.close()
    known.close()
    assert queue.take() == ([], [1000])
    assert queue.take() == ([], [])


def test_a_sequence_that_ends_during_its_call_is_forgotten_with_the_next_one() -> None:
    queue, model = DraftQueue(), FakeModel()
    drafter = _drafter(queue, [1, 2, 3])
    drafter.draft(2)
    (waiting,), ended = queue.take()
    drafter.close()
    waiting.receive(model.draft([waiting.request()], ended)[0])
    assert model.texts.keys() == {7}
    _answer(queue, model)
    assert model.texts == {}
