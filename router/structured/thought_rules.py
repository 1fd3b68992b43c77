"""Rules of a grammar for what a model thinks before it says what the grammar requires; thoughts
themselves are free.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tramontane.router.tokenization.reasoning_parser import ReasoningFormat

START, SAID = "start:", "said:"


@dataclass(frozen=True, slots=True)
class ThoughtRules:
    """How thoughts are marked, and whether the prompt has begun one already, so that the grammar
    begins inside of it.

    Else a thought is optional, as the model decides.
    """

    form: ReasoningFormat
    is_open: bool

    def before(self, rules: Sequence[str]) -> list[str]:
        """Return the rules of a grammar, of which the first is ``start``, after a thought."""
        first, *others = rules
        begin = "" if self.is_open else f"{self._marker(self.form.begin, self.form.begin_id)} "
        # Line breaks after the marker belong to it.
        after = " BREAKS?" if self.form.trims else ""
        start = f"{START} {'thought' if self.is_open else 'thought?'} said"
        made = [start, first.replace(START, SAID, 1), *others]
        if self.form.end_id is None:  # the text up to the first marker
            made += [
                f"thought: {begin}to_end{after}",
                f"to_end[lazy]: /(.|\\n)*{self._pattern(self.form.end)}/",
            ]
        else:
            made += [
                f"thought: {begin}THOUGHT? <[{self.form.end_id}]>{after}",
                r"THOUGHT: /(.|\n)+/",
            ]
        return made + [r"BREAKS: /\n{1,2}/"] * self.form.trims

    @staticmethod
    def _marker(text: str, token_id: int | None) -> str:
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    @staticmethod
    def _pattern(text: str) -> str:
        return text.replace("/", r"\/")
