"""Words that neither the code nor the documentation uses, because the field has others: one list
for both.
"""

import re

WORDS = (
    *(
        "whoever",
        "nobody",
        "told",
        "goes on",
        "meanwhile",
        "beside",
        "lest",
        "for ever",
        "door",
        "doors",
        "house",
        "houses",
    ),
    *("ledger", "ledgers", "stranger", "strangers", "patience", "impatient"),
)
PARTS = ("colour", "behaviour", "neighbour", "quantis")  # of any word
BREAK = r"[\s#*]+"  # what may be between the words of a phrase, also over the lines of a comment
UNWANTED = re.compile(
    rf"\b(?:{'|'.join(word.replace(' ', BREAK) for word in WORDS)}|\w*(?:{'|'.join(PARTS)})\w*)\b",
    re.IGNORECASE,
)


def find_unwanted(text: str) -> list[tuple[int, str]]:
    """Return the line and the word of each unwanted word of a text; of a phrase over two lines the
    first one.
    """
    return [
        (text.count("\n", 0, match.start()) + 1, re.sub(BREAK, " ", match[0]))
        for match in UNWANTED.finditer(text)
    ]
