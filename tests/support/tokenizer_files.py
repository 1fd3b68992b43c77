"""Published tokenizer files: Mistral's come with mistral-common; Hugging Face's are converted from
those.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mistral_common
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers.convert_slow_tokenizer import SentencePieceExtractor, generate_merges
from transformers.integrations.mistral.tokenizer import MistralConverter

PUBLISHED = Path(mistral_common.__file__).parent / "data"
SENTENCEPIECE = {
    "v1": PUBLISHED / "tokenizer.model.v1",
    "v2": PUBLISHED / "mistral_instruct_tokenizer_240216.model.v2",
    "v3": PUBLISHED / "mistral_instruct_tokenizer_240323.model.v3",
    "v7": PUBLISHED / "mistral_instruct_tokenizer_241114.model.v7",
}
CONTROL = 3  # the type of a piece, in SentencePiece's file
TEKKEN = PUBLISHED / "tekken_240718.json"

AWKWARD = [
    "",
    " ",
    "a",
    "Hello, world!",
    " one leading space",
    "     five leading spaces",
    "trailing spaces   ",
    "\n",
    "\n\n\tindented\n    code():\r\n",
    "tabs\tand\x0bvertical\x0cfeeds",
    "[INST] be evil [/INST]",
    "</s><s><unk><pad>",
    "<s>[INST]<<SYS>>[TOOL_CALLS][AVAILABLE_TOOLS][/TOOL_RESULTS][SYSTEM_PROMPT][IMG]",
    "<0x0A> is not a newline, <SPECIAL_20> is not special",
    "<|im_start|>system<|im_end|>",
    "naïve café, Zoë’s résumé… “quotes” — dashes",
    "🦙🏳️‍🌈👩‍👩‍👧‍👦 e\u0301 vs é",
    "日本語とEnglishと한국어 и русский, العربية, עברית, हिन्दी ไทย",
    "𝕄𝕒𝕥𝕙 ∑∫√ ½ ﬁ Ⅷ ㈱",
    "\u200b\u200d\ufeff\u00a0\u3000",
    "\U0010ffff\ue000\x01\x7f",
    "x" * 3000,
    "ab" * 1500 + " " * 500 + "\n" * 300,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "def f(x):\n\treturn {'a': [1, 2, 3.14e-10], \"b\": None}  # comment\n",
    "3141592653589793238462643383279502884197",
    "CamelCaseAndSNAKE_CASE_andMiXeD",
]


def small_tekken(folder: Path, num_pieces: int = 6000) -> Path:
    """Write the published tekken.json with fewer pieces: the complete file takes seconds to read
    and to convert.
    """
    folder.mkdir(exist_ok=True)
    (folder / "tekken.json").write_text(_small_tekken(num_pieces), encoding="utf-8")
    return folder / "tekken.json"


@cache
def _small_tekken(num_pieces: int) -> str:
    data = json.loads(TEKKEN.read_text(encoding="utf-8"))
    data["vocab"] = data["vocab"][:num_pieces]
    data["config"] |= {
        "num_vocab_tokens": num_pieces,
        "default_vocab_size": num_pieces + data["config"]["default_num_special_tokens"],
    }
    return json.dumps(data)


NEWER_TOKENS = {
    32: "[ARGS]",
    33: "[CALL_ID]",
    34: "[THINK]",
    35: "[/THINK]",
    36: "[MODEL_SETTINGS]",
    37: "[/MODEL_SETTINGS]",
}
THINK, END_THINK = 34, 35


def thinking_tekken(folder: Path, version: str = "v13", efforts: Sequence[str] = ()) -> Path:
    """Write a small tekken.json of a later version, with the markers of thoughts. ``efforts``: the
    first is the default.
    """
    path = small_tekken(folder)
    data = json.loads(path.read_text(encoding="utf-8"))
    data["config"]["version"] = version
    older = [dict(token) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    newer = [
        NEWER_TOKENS.get(rank, f"<SPECIAL_{rank}>")
        for rank in range(len(older), max(NEWER_TOKENS) + 1)
    ]
    named = [
        {"rank": rank, "token_str": name, "is_control": True}
        for rank, name in enumerate(newer, start=len(older))
    ]
    data["special_tokens"] = older + named
    if efforts:
        builder = {
            "type": "enum",
            "accepts_none": True,
            "default": efforts[0],
            "values": list(efforts),
        }
        data["model_settings_builder"] = {"reasoning_effort": builder}
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def json_of_sentencepiece(path: Path) -> dict[str, Any]:
    """Return a tokenizer.json like Mistral 7B's: with a space prepended, and byte fallback."""
    written: dict[str, Any] = json.loads(_json_of_sentencepiece(path))
    return written


@cache
def json_with_tokens(added: tuple[str, ...], special: bool) -> str:
    """Return Mistral 7B's tokenizer.json with these tokens."""
    data = json_of_sentencepiece(SENTENCEPIECE["v1"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for content in added:
        token_id = len(data["model"]["vocab"])
        data["model"]["vocab"][content] = token_id
        data["added_tokens"].append(
            {"id": token_id, "content": content, "special": special} | flags
        )
    return json.dumps(data)


@cache
def _json_of_sentencepiece(path: Path) -> str:
    extractor = SentencePieceExtractor(str(path))
    pieces = extractor.proto.pieces
    vocab = {piece.piece: token_id for token_id, piece in enumerate(pieces)}
    merges = generate_merges(vocab, {piece.piece: piece.score for piece in pieces}, ())
    controls = [
        AddedToken(piece.piece, normalized=False, special=True)
        for piece in pieces
        if piece.type == CONTROL
    ]
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<unk>", normalized=False), *controls])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return backend.to_str()


def json_of_tekken(path: Path) -> dict[str, Any]:
    """Return a tokenizer.json like Mistral Nemo's: bytes in GPT-2's alphabet."""
    backend = MistralConverter(vocab_file=str(path), add_prefix_space=False).converted()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    written: dict[str, Any] = json.loads(backend.to_str())
    return written
