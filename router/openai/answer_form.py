"""In what the answers of endpoints differ, and what a whole answer is made of."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tramontane.router.openai.choice_text import ChoiceText
from tramontane.router.openai.completion_request import CompletionRequest
from tramontane.router.openai.logprobs import ChosenToken, completion_logprobs, joined_logprobs
from tramontane.router.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Of one endpoint. ``choices``: one for each sequence; ``grammar``: of every answer."""

    choices: Sequence[ChoiceText]
    logprobs: Callable[[Tokenizer | None, Sequence[ChosenToken], int], dict[str, Any]] = completion_logprobs
    joined_logprobs: Callable[[Iterable[dict[str, Any] | None]], dict[str, Any]] = joined_logprobs
    grammar: str = ""

    def whole(self, changes: Sequence[dict[str, Any]], request: CompletionRequest) -> dict[str, Any]:
        """One choice, from all of its changes."""
        layers = request.return_experts
        text = "".join(change["text"] for change in changes)
        whole = changes[0] | {"text": text, "finish_reason": changes[-1]["finish_reason"]}
        if "token_ids" in whole:
            whole["token_ids"] = [token_id for change in changes for token_id in change["token_ids"]]
        if request.logprobs is not None:
            whole["logprobs"] = self.joined_logprobs(change["logprobs"] for change in changes)
        for name in ("prompt_experts", "experts") if layers else ():
            parts = [change.get(name, {}) for change in changes]
            whole[name] = {str(layer): [ids for part in parts for ids in part.get(str(layer), ())] for layer in layers}
        return whole
