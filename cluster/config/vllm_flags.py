"""The flags of ``vllm serve`` that are no options here, and what ``tramontane serve`` says of each.

Flags that mean the same are options: by the same name, or by ``other_names`` of their key. The
table of docs/from-vllm.md is checked against this one.
"""

from dataclasses import dataclass
from types import MappingProxyType

from tramontane.proto.errors import ConfigError

ANY = "any"  # instead of a list of values: all of them
ON, OFF = "on", "off"  # of a switch: --name and --no-name

# Short names of vLLM for our options, which have long ones only.
SHORT_NAMES = MappingProxyType({"-pp": "stages", "-dp": "replicas", "-q": "quantize"})


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """A flag of ``vllm serve``.

    ``done``: the values that ask for what this server does anyway, and are accepted without effect,
    with ``why`` as the reason. ``instead``: what takes the place of all other values, which are
    refused. ``short``: its short name. ``key``: the option of ours with this name, which other
    values are left to.
    """

    name: str
    done: tuple[str, ...] = ()
    why: str = ""
    instead: str = ""
    is_switch: bool = False
    short: str = ""
    key: str = ""

    @property
    def parameter(self) -> str:
        """The name of its parameter: that of the key, or one that no key has."""
        return self.key or f"vllm_{self.name.removeprefix('--').replace('-', '_')}"

    def accepts(self, value: str) -> bool:
        """Return True if the value asks for what this server does anyway."""
        return ANY in self.done or value.lower() in self.done

    def shown(self, value: str) -> str:
        """Return the flag as it was given."""
        if self.is_switch:
            return self.name if value == ON else f"--no-{self.name.removeprefix('--')}"
        return f"{self.name} {value}"


def note_on(flag: VllmFlag, value: str) -> str:
    """Return the line about a flag without effect. Raises ConfigError for a value that would change
    what the server does.
    """
    if flag.accepts(value):
        return f"{flag.shown(value)} has no effect: {flag.why}"
    raise ConfigError(f"{flag.shown(value)} is a flag of vLLM: {flag.instead}")


def _switch(name: str, why: str, instead: str = "") -> VllmFlag:
    """Return a switch that asks for what is done anyway; ``instead``: where it is turned off."""
    return VllmFlag(name, (ON,) if instead else (ON, OFF), why, instead, is_switch=True)


def _refused_switch(name: str, instead: str, why: str = "this is the default") -> VllmFlag:
    """Return a switch that has no effect where it is turned off."""
    return VllmFlag(name, (OFF,), why, instead, is_switch=True)


_LOG = "requests are logged with --log-level info only"
_TOOLS = "tool calls are recognized by Mistral's control token, never by similar text"
_KERNELS = "each stage chooses kernels and CUDA graphs for its GPU when it starts"
_LOCAL = "nothing is downloaded; MODEL is a folder"
_SAMPLING = (
    "requests without a sampling parameter have the default of the API (docs/http-api.md); let"
    " clients send it"
)
_NO_ADAPTERS = "adapters are not supported; merge one into its base model"
_ALL = "the origins of --allowed-origins may use all, and no option narrows them"
_NO_TLS = "the server has no TLS; put a gateway in front of it (SECURITY.md)"

FLAGS = (
    VllmFlag(
        "--tensor-parallel-size",
        ("1",),
        "layers are not divided; stages are groups of layers",
        "layers are not divided over GPUs; --stages N divides the model into groups of layers, one"
        " for each GPU",
        short="-tp",
    ),
    VllmFlag(
        "--gpu-memory-utilization",
        ("0.9", "0.90"),
        "the planner leaves a tenth of each GPU, or what a stage needs besides weights and cache",
        "--gpu-memory SIZE is the memory of each GPU that may be planned, such as 40GiB",
    ),
    _switch(
        "--enable-chunked-prefill",
        "prompts are always computed in chunks",
        "prompts are always computed in chunks; --max-num-batched-tokens bounds a chunk",
    ),
    VllmFlag(
        "--distributed-executor-backend", (ANY,), "every stage is a Ray actor, also on one machine"
    ),
    _refused_switch(
        "--enable-expert-parallel",
        "--expert-actors N and --expert-memory SIZE put the experts on actors of their own",
    ),
    VllmFlag("--tool-call-parser", ("mistral",), _TOOLS, _TOOLS),
    _switch(
        "--enable-auto-tool-choice",
        "tools are offered with tool_choice auto where the checkpoint's format has them",
        "requests without tools, or with tool_choice none, call none",
    ),
    VllmFlag(
        "--reasoning-parser", (ANY,), "thoughts are recognized by their tokens or the chat template"
    ),
    VllmFlag(
        "--chat-template",
        (),
        instead="the chat template is the checkpoint's own; a file chat_template.jinja in the"
        " folder of a model with tokenizer.json replaces it",
    ),
    VllmFlag(
        "--tokenizer-mode",
        ("auto", "mistral"),
        "the tokenizer is detected from the folder's files",
        "the tokenizer is detected from the folder's files (docs/models.md)",
    ),
    VllmFlag(
        "--tokenizer", (), instead="the tokenizer is that of the model's folder (docs/models.md)"
    ),
    VllmFlag(
        "--config-format",
        ("auto", "hf", "mistral"),
        "the layout is detected from the folder's files",
        "the layout is Hugging Face's or Mistral's, and is detected from the folder's files",
    ),
    VllmFlag(
        "--load-format",
        ("mistral", "safetensors", "hf"),
        "the layout of the weights is detected from the folder's files",
        "it is auto or dummy; only safetensors files are opened",
        key="load_format",
    ),
    _switch("--trust-remote-code", "no Python of a checkpoint is ever run"),
    VllmFlag("--revision", (ANY,), _LOCAL),
    VllmFlag("--download-dir", (ANY,), _LOCAL),
    VllmFlag(
        "--hf-overrides", (), instead="change config.json or params.json in a copy of the folder"
    ),
    VllmFlag(
        "--limit-mm-per-prompt",
        (ANY,),
        "the text model is served; an image since the last answer is refused, earlier ones are"
        " [image omitted]",
    ),
    VllmFlag("--generation-config", ("vllm",), "sampling has the defaults of the API", _SAMPLING),
    VllmFlag("--override-generation-config", (), instead=_SAMPLING),
    VllmFlag(
        "--max-logprobs", ("20",), "20 is the bound of the API", "20 is the bound, and no option"
    ),
    VllmFlag(
        "--seed",
        (),
        instead="a request without a seed gets a random one; let clients send seed",
    ),
    VllmFlag(
        "--scheduling-policy",
        ("fcfs",),
        "requests of one API key start in the order of their arrival",
        "requests have no priority here; API keys share the capacity (docs/http-api.md)",
    ),
    _switch("--enforce-eager", _KERNELS),
    VllmFlag("--compilation-config", (ANY,), _KERNELS),
    VllmFlag("--attention-backend", (ANY,), _KERNELS),
    VllmFlag(
        "--swap-space",
        (ANY,),
        "there is no swap space; sequences that lose their pages are computed again",
    ),
    VllmFlag(
        "--cpu-offload-gb",
        ("0",),
        "weights stay in the memory of the GPUs",
        "weights stay in the memory of the GPUs; more --stages, or --quantize, need less of each",
    ),
    VllmFlag(
        "--num-gpu-blocks-override", (), instead="--kv-cache-memory SIZE is the cache of a stage"
    ),
    _refused_switch("--enable-lora", _NO_ADAPTERS),
    VllmFlag("--lora-modules", (), instead=_NO_ADAPTERS),
    VllmFlag(
        "--structured-outputs-config", (ANY,), "one library makes grammars, and there is no choice"
    ),
    VllmFlag(
        "--api-server-count",
        ("1",),
        "one ingress replica answers, and more only where there are several pipelines",
        "the key ingress_replicas of a --config file is their number",
        short="-asc",
    ),
    _refused_switch("--enable-log-requests", "--log-level info logs them", _LOG),
    _switch("--disable-log-requests", _LOG),
    _switch("--disable-log-stats", "statistics are metrics, and no lines in a log"),
    _switch("--disable-uvicorn-access-log", _LOG),
    VllmFlag("--uvicorn-log-level", (ANY,), "--log-level is the level of what is logged"),
    _switch("--enable-prompt-tokens-details", "usage always has cached_tokens"),
    _switch("--enable-server-load-tracking", "/load always has the number"),
    _switch("--enable-request-id-headers", "every answer has x-request-id"),
    _refused_switch(
        "--enable-force-include-usage", "let clients send stream_options.include_usage: true"
    ),
    VllmFlag("--root-path", (ANY,), "a gateway removes its prefix, and no answer depends on it"),
    VllmFlag("--ssl-keyfile", (), instead=_NO_TLS),
    VllmFlag("--ssl-certfile", (), instead=_NO_TLS),
    VllmFlag("--allowed-methods", ("*", '["*"]'), _ALL, _ALL),
    VllmFlag("--allowed-headers", ("*", '["*"]'), _ALL, _ALL),
    VllmFlag(
        "--otlp-traces-endpoint",
        (),
        instead="--tracing-exporter otlp, with the address in OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
)
