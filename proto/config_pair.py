"""Combination of ``config.json`` and ``params.json`` of one folder, for weights in either
layout.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from tramontane.proto.errors import CheckpointError
from tramontane.proto.hf_config import checkpoint_errors, has_magnitude, text_config
from tramontane.proto.mistral_params import (
    magnitudes,
    stated_context_lens,
    stated_window,
    windows_of,
)
from tramontane.proto.model_args import LatentArgs, ModelArgs
from tramontane.proto.presets import context_len

# Keys of config.json by keys of params.json; fields of ``ModelArgs`` where their names differ from
# the latter.
SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
# with latent attention both are computed from its widths
HEADS = {"head_dim": "head_dim", "n_kv_heads": "num_key_value_heads"}
EXPERTS = {
    "num_experts": ("num_experts", "number of experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_tok"),
    "expert_hidden_dim": ("expert_dim", "moe_intermediate_size"),
    "num_shared_experts": ("n_shared_experts", "n_shared_experts"),
    "first_k_dense_replace": ("first_k_dense_replace", "first_k_dense_replace"),
    "num_expert_groups": ("n_group", "n_group"),
    "num_expert_groups_per_tok": ("topk_group", "topk_group"),
    "routed_scale": ("routed_scaling_factor", "routed_scaling_factor"),
}
YARN = {
    "factor": ("factor", "factor"),
    "original_max_position_embeddings": (
        "original_max_seq_len",
        "original_max_position_embeddings",
    ),
    "beta": ("beta_fast", "beta_fast"),
    "alpha": ("beta_slow", "beta_slow"),
}

Difference = tuple[str, object, str, object]  # key and value of config.json, and of params.json


def join_configs(
    args: ModelArgs, config: Mapping[str, Any], params: Mapping[str, Any], source: str
) -> ModelArgs:
    """Add the values that only ``params`` has to ``args``, which ``config`` describes. Raises
    CheckpointError if the two contradict.

    Values that a file lacks are not compared, nor values that the tensors show: vocabulary, tied
    embeddings, types and formats. The context is the longer one. ``params`` alone has the windows
    of layers that differ, where config.json has one window or none (Ministral 8B), and the use of
    YaRN's magnitude, where config.json does not mention it.
    """
    with checkpoint_errors(source):
        text = text_config(config)
        joined = _with_magnitude(_with_windows(args, text, params), text, params)
        differences = [
            each for each in _differences(joined, params) if not _is_same(each[1], each[3])
        ]
    if differences:
        said = "; ".join(
            f"{key} is {ours} in config.json, {name} is {theirs} in params.json"
            for key, ours, name, theirs in differences
        )
        raise CheckpointError(
            f"{source}: config.json and params.json describe different models: {said}; "
            "correct the file that is wrong, or remove it"
        )
    return replace(
        joined, max_seq_len=context_len(joined, args.max_seq_len, *stated_context_lens(params))
    )


def _with_windows(args: ModelArgs, text: Mapping[str, Any], params: Mapping[str, Any]) -> ModelArgs:
    """Return ``args`` with a pattern of windows that a config class with one window cannot
    express.
    """
    if (
        not isinstance(stated_window(params), list)
        or text.get("layer_types")
        or params.get("n_layers") != args.n_layers
    ):
        return args
    windows = windows_of(params)
    return replace(args, windows=windows) if {*args.windows} <= {*windows, None} else args


def _with_magnitude(
    args: ModelArgs, text: Mapping[str, Any], params: Mapping[str, Any]
) -> ModelArgs:
    if (
        not args.rope_scaling
        or has_magnitude(text)
        or (params.get("yarn") or {}).get("apply_scale") is None
    ):
        return args
    attention_factor, score_factor = magnitudes(params)
    return replace(
        args,
        rope_scaling=replace(
            args.rope_scaling, attention_factor=attention_factor, score_factor=score_factor
        ),
    )


def _differences(args: ModelArgs, params: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the values that both files have, equal or not."""
    for name, key in (SIZES if args.latent else SIZES | HEADS).items():
        if params.get(name) is not None:
            yield key, getattr(args, name), name, params[name]
    for field in fields(LatentArgs):
        if params.get(field.name) is not None:
            yield field.name, getattr(args.latent, field.name, None), field.name, params[field.name]
    yield from _block("moe", EXPERTS, params.get("moe"), args.moe)
    yield from _block("yarn", YARN, params.get("yarn"), args.rope_scaling)
    llama4 = {"beta": ("llama4_beta", "llama_4_scaling_beta")}
    yield from _block("llama_4_scaling", llama4, params.get("llama_4_scaling"), args.rope_scaling)
    if args.rope_scaling and (params.get("yarn") or {}).get("apply_scale") is not None:
        ours = args.rope_scaling.attention_factor * math.sqrt(args.rope_scaling.score_factor)
        name = f"yarn.apply_scale is {str(params['yarn']['apply_scale']).lower()} and the factor"
        yield (
            "YaRN's factor of queries and keys",
            ours,
            name,
            magnitudes(params)[0] * math.sqrt(magnitudes(params)[1]),
        )
    if stated_window(params) is not None and params.get("n_layers") == args.n_layers:
        yield from _window_differences(args, windows_of(params))


def _block(
    block: str, names: Mapping[str, tuple[str, str]], given: Mapping[str, Any] | None, ours: object
) -> Iterator[Difference]:
    for name, (field, key) in names.items():
        if (given or {}).get(name) is not None:
            assert given is not None
            yield key, getattr(ours, field, None), f"{block}.{name}", given[name]


def _window_differences(args: ModelArgs, windows: tuple[int | None, ...]) -> Iterator[Difference]:
    """Yield the window of the first layer where the files differ; a window as long as the context
    counts as none.
    """
    for layer, pair in enumerate(zip(args.windows, windows, strict=True)):
        ours, theirs = (
            None if window is not None and window >= args.max_seq_len else window for window in pair
        )
        if ours != theirs:
            yield f"the window of layer {layer}", ours, "sliding_window", theirs
            return


def _is_same(ours: object, theirs: object) -> bool:
    """Compare values; numbers up to rounding, since files write 1e-05 and 0.00001."""
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return ours == theirs
