"""Parsing of the quantization in a checkpoint's configuration: the supported format, and the names
of unsupported ones.

Formats differ in the files and keys that their programs write: transformers'
``quantization_config``, AutoAWQ's ``quant_config.json``, AutoGPTQ's ``quantize_config.json``,
modelopt's ``hf_quant_config.json`` and MLX's ``quantization``.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tramontane.proto.errors import CheckpointError
from tramontane.proto.weight_format import Quantization

# Files other than the configuration that say how weights are quantized, and by which program.
QUANTIZATION_FILES = MappingProxyType(
    {"quant_config.json": "AWQ", "quantize_config.json": "GPTQ", "hf_quant_config.json": "modelopt"}
)
NAMES = MappingProxyType({"awq": "AWQ", "gptq": "GPTQ"})
# keys of bitsandbytes, whose old files have no method
LOADED_IN = MappingProxyType({"load_in_4bit": 4, "load_in_8bit": 8})
# Layers that every FP8 checkpoint lists as not quantized: none of them is quantized here.
OUTSIDE = re.compile(r"vision|multi_modal|patch_merger|(gate|norm)(\.weight)?\$?$")
OF_LAYERS = re.compile(r"layers|_proj|self_attn|attention|mlp|experts|feed_forward")
# Suffixes of tensor names that only one format has, the most specific first.
TENSOR_ENDS = MappingProxyType(
    {
        ".g_idx": "GPTQ",
        ".qweight": "AWQ or GPTQ",
        ".weight_scale_2": "modelopt (NVFP4)",
        ".weight_packed": "compressed-tensors",
        ".absmax": "bitsandbytes",
        ".SCB": "bitsandbytes",
        ".scales": "MLX",
    }
)
SCALE_ENDS = (".weight_scale", ".weight_scale_inv", ".qscale_weight")


def parse_quantization(given: Mapping[str, Any] | None, source: str) -> Quantization | None:
    """Return the format of a checkpoint's matrices. Raises CheckpointError, with the required
    format, for unsupported formats.
    """
    if not given:
        return None
    block = given.get("weight_block_size") or ()
    if given.get("quant_method") != "fp8":
        raise unsupported_quantization(describe_quantization(given), source)
    if block:
        raise unsupported_quantization(f"FP8 {_in_blocks(block)}", source)
    for key in ("ignored_layers", "modules_to_not_convert"):
        if kept := next(
            (str(name) for name in given.get(key) or () if _is_matrix(str(name))), None
        ):
            raise CheckpointError(
                f"{source}: {key} names {kept:.100}; layers of which only some are quantized are"
                " not supported; use a folder with all of them in FP8, or the model's folder"
                " without quantization"
            )
    return Quantization.FP8


def describe_quantization(given: Mapping[str, Any], program: str = "") -> str:
    """Return a description of a configuration's format: ``AWQ (4 bits)``, ``modelopt (NVFP4)``.

    ``program``: a program that writes no ``quant_method``; if it is not given, MLX is recognized by
    its ``group_size``.
    """
    program = program or ("MLX" if given.get("group_size") else "an unknown format")
    method = str(
        given.get("quant_method") or ("bitsandbytes" if any(map(given.get, LOADED_IN)) else program)
    )
    details = [str(given["quant_algo"])] if given.get("quant_algo") else []
    groups = [group for group in (given.get("config_groups") or {}).values() if group]
    details += sorted(
        {
            str(each)
            for each in (given.get("format"), *(group.get("format") for group in groups))
            if each
        }
    )
    blocks = [
        weights.get("block_structure") for group in groups if (weights := group.get("weights"))
    ]
    details += sorted({_in_blocks(block) for block in blocks if block})
    bits = (
        given.get("bits")
        or given.get("w_bit")
        or next((n for key, n in LOADED_IN.items() if given.get(key)), None)
    )
    details += [f"{bits} bits"] if bits else []
    return NAMES.get(method, method) + f" ({', '.join(details)})" * bool(details)


def check_quantization_file(given: Mapping[str, Any], name: str, source: str) -> None:
    """Raise CheckpointError for a file of ``QUANTIZATION_FILES`` unless it specifies unquantized
    weights, or FP8.
    """
    inner = given.get("quantization", given)
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{source}: quantization is {inner!r:.100}; it must be an object")
    if name == "hf_quant_config.json" and not inner.get("quant_algo"):
        return  # of the key/value cache only
    if inner.get("quant_method") == "fp8":
        parse_quantization(inner, source)
        return
    raise unsupported_quantization(describe_quantization(inner, QUANTIZATION_FILES[name]), source)


def check_tensor_names(names: Iterable[str], is_quantized: bool, source: str) -> None:
    """Raise CheckpointError for tensors that only an unsupported format has, regardless of
    configurations.
    """
    found = sorted(names)
    for end, name in TENSOR_ENDS.items():
        if tensor := next((each for each in found if each.endswith(end)), None):
            raise unsupported_quantization(f"{name}, as the tensor {tensor[:100]!r} shows,", source)
    if not is_quantized and (
        scale := next((each for each in found if each.endswith(SCALE_ENDS)), None)
    ):
        raise CheckpointError(
            f"{source} has the tensor {scale[:100]!r}, a scale of quantized weights, and no"
            " configuration says how they are quantized; fetch the folder again, with all its"
            " .json files"
        )


def unsupported_quantization(name: str, source: str) -> CheckpointError:
    """Return the error for a checkpoint that is quantized in an unknown format."""
    return CheckpointError(
        f"{source}: weights quantized as {name} are not supported: they need kernels of their own;"
        " supported are FP8 with one scale for each matrix, as Mistral publishes it, and weights"
        " in bfloat16, float16 or float32; use the model's folder without quantization: --quantize"
        " makes its weights smaller while they are loaded"
    )


def _in_blocks(block: Iterable[int]) -> str:
    return f"with a scale for each block of {' x '.join(map(str, block))} numbers"


def _is_matrix(name: str) -> bool:
    """Return whether an entry of a list of unquantized layers names a matrix that has to be
    quantized.
    """
    return OF_LAYERS.search(name) is not None and OUTSIDE.search(name) is None
