"""How fast a plain step and a round could be if only bytes counted, and the fraction reached.

    python profiling/roofline.py [--dtype auto] [--compile off] [--context 256]

A step reads every weight that its rows multiply with (a tied embedding once, as the head) and the
committed K/V; a round adds the drafter's weights once per level. The ceiling is the bandwidth of
reading a large tensor, measured in the same minute. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json

import torch
from round_breakdown import interleaved

from eagle4 import Eagle4Drafter, Eagle4ForCausalLM, SpeculativeConfig, demo
from eagle4.engine.canvas import TreeLimits
from eagle4.engine.parts import Stage
from eagle4.engine.warmup import warm_up
from eagle4.evaluation.environment import describe_environment

MEGABYTES = 256


def linear_bytes(model: torch.nn.Module) -> int:
    """Weights of all linears, tied ones once."""
    weights = {m.weight.data_ptr(): m.weight for m in model.modules() if hasattr(m, "in_features")}
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def kv_bytes(config, context: int, element_size: int) -> int:
    """Keys and values of ``context`` tokens in all layers."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        2 * config.num_hidden_layers * config.num_key_value_heads * width * context * element_size
    )


def measure(model: Eagle4ForCausalLM, context: int, repeats: int) -> dict[str, float]:
    """Milliseconds of reading a large tensor, a plain step, a verification and a drafter level."""
    assert model.drafter is not None and model._packed is not None
    graphs, device = model.graphs(), model.adapter.device
    big = torch.zeros(MEGABYTES << 18, device=device)  # float32
    with torch.no_grad(), model._packed.active():
        limits = TreeLimits.of(SpeculativeConfig(), model.drafter)
        warm_up(graphs, model.adapter, model.drafter, 1, limits)
        with model.adapter.attached(run_blocks=graphs.blocks):
            stage = Stage(model.adapter, model.drafter, 1, context, graphs, limits)
            cases = {
                "read": lambda: float(big.sum()),
                "plain": lambda: stage.verify(0),
                "verify_12": lambda: stage.verify(11),
                "level_4": lambda: stage.level(4),
            }
            return interleaved(cases, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--launch", default="auto", choices=("auto", "direct", "graphs"))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    target, _ = demo.smollm2(dtype=args.dtype, device=args.device)
    drafter = Eagle4Drafter.from_pretrained(demo.drafter_path())
    model = Eagle4ForCausalLM(target, drafter, compile=args.compile, launch=args.launch)
    ms = measure(model, args.context, args.repeats)
    bandwidth = (MEGABYTES << 20) / ms["read"] * 1e3
    size = torch.finfo(model.adapter.dtype).bits // 8
    step = linear_bytes(target) + kv_bytes(model.adapter.config, args.context, size)
    # Of the full head a level reads the candidates' rows only.
    level = linear_bytes(drafter)
    limits = {"plain": step, "verify_12": step, "level_4": level}
    result = {
        "bandwidth_GB_s": round(bandwidth / 1e9, 1),
        "ms": ms,
        "limit_ms": {name: round(1e3 * b / bandwidth, 2) for name, b in limits.items()},
        "fraction": {n: round(1e3 * b / bandwidth / ms[n], 3) for n, b in limits.items()},
        "compiled": model.graphs().compiled,
        "dtype": str(model.adapter.dtype),
        "environment": describe_environment(),
    }
    for name in ("bandwidth_GB_s", "ms", "limit_ms", "fraction"):
        print(f"{name}: {result[name]}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
