"""Values of options in the notations of ``vllm serve``, which files may have, too."""

import re
from decimal import Decimal
from types import MappingProxyType

NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kKmMgG]?)")
MULTIPLES = MappingProxyType(
    {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
)
OF_THE_MODEL = ("auto", "-1")  # a length: the checkpoint's
DTYPES = MappingProxyType({"half": "float16", "float": "float32"})


def parse_number(value: object) -> object:
    """Return the number of a text such as 4096, 32k (32,000), 32K (32,768) or 1.5M; other values as
    they are, for pydantic to refuse.
    """
    found = NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None or ("." in found[1] and not found[2]):
        return value
    return int(Decimal(found[1]) * MULTIPLES[found[2]])


def parse_length(value: object) -> object:
    """Return the number of a text, None for ``auto`` and -1, which ask for the checkpoint's
    length.
    """
    return None if str(value).strip() in OF_THE_MODEL else parse_number(value)


def parse_dtype(value: object) -> object:
    """Return ``float16`` for ``half`` and ``float32`` for ``float``."""
    return DTYPES.get(value, value) if isinstance(value, str) else value


def parse_names(value: object) -> object:
    """Return a file's list of names as a text with commas between them."""
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return ",".join(value) if is_list and isinstance(value, list) else value
