"""The model of the checks of memory: 135 million parameters in SmolLM2's geometry, with 8,192
positions.
"""

from tramontane.proto.model_args import ModelArgs

LAYERS = 30
MODEL_135M = ModelArgs(
    dim=576,
    n_layers=LAYERS,
    head_dim=64,
    hidden_dim=1536,
    n_heads=9,
    n_kv_heads=3,
    norm_eps=1e-5,
    vocab_size=49152,
    rope_theta=1e5,
    max_seq_len=8192,
    windows=(None,) * LAYERS,
    tied_embeddings=True,
    dtype="bfloat16",
)
