"""How fast a sharded checkpoint becomes a .tinyloop file, and in how much memory.

    python bench/import_speed.py [FOLDER] [--kind gptq] [--gigabytes 4] [--shard 1]

Makes a checkpoint of random tensors with the layers of an 8B model in FOLDER (default: a temporary one), in shards,
and imports it in a process of its own. Input bytes are those of all shards; seconds are those of import and write,
the fsync at the end included; peak memory is the process's, with every mapped page that it touched. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from tinyloop import safefile

D, F, KV, V, G = 4096, 14336, 1024, 32000, 128
LINEARS = {
    "self_attn.q_proj": (D, D), "self_attn.k_proj": (D, KV), "self_attn.v_proj": (D, KV), "self_attn.o_proj": (D, D),
    "mlp.gate_proj": (D, F), "mlp.up_proj": (D, F), "mlp.down_proj": (F, D),
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": G, "sym": False, "checkpoint_format": "gptq_v2"}
CT = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": G}
SETTINGS: dict[str, dict[str, object] | None] = {
    "gptq": GPTQ,
    "act-order": GPTQ | {"desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": G, "version": "gemm", "zero_point": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": CT}}
    },
    "bf16": None,
}  # fmt: skip


@functools.cache
def pool() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, 1 << 28, dtype=np.uint8)


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits from a pool of 256 MB; floats are random in [0.5, 1.5)."""
    size = int(np.prod(shape)) * dtype.itemsize
    begin = random.randrange((len(pool()) - size) // 64 + 1) * 64
    t = torch.from_numpy(pool()[begin : begin + size]).view(dtype).view(shape)
    if dtype == torch.int32:
        return t
    bits, exponent, one = (torch.int16, 0x3FF, 0x3800) if dtype == torch.float16 else (torch.int16, 0x7F, 0x3F00)
    return (t.view(bits) & exponent | one).view(dtype)


def linear(kind: str, name: str, K: int, N: int) -> Iterator[tuple[str, torch.Tensor]]:
    groups, i32, half = K // G, torch.int32, torch.float16
    if kind == "bf16":
        yield f"{name}.weight", noise(torch.bfloat16, N, K)
    elif kind == "compressed-tensors":
        yield f"{name}.weight_packed", noise(i32, N, K // 8)
        yield f"{name}.weight_zero_point", noise(i32, N // 8, groups)
        yield f"{name}.weight_scale", noise(half, N, groups)
        yield f"{name}.weight_shape", torch.tensor([N, K])
    else:
        yield f"{name}.qweight", noise(i32, K, N // 8) if kind == "awq" else noise(i32, K // 8, N)
        yield f"{name}.qzeros", noise(i32, groups, N // 8)
        yield f"{name}.scales", noise(half, groups, N)
        if kind != "awq":
            order = torch.arange(K, dtype=i32) // G
            shared = torch.Generator().manual_seed(K)  # q, k and v see the same inputs
            yield f"{name}.g_idx", order[torch.randperm(K, generator=shared)] if kind == "act-order" else order


def tensors(kind: str, layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    half = torch.bfloat16 if kind == "bf16" else torch.float16
    yield "model.embed_tokens.weight", noise(half, V, D)
    for i in range(layers):
        for name, (K, N) in LINEARS.items():
            yield from linear(kind, f"model.layers.{i}.{name}", K, N)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{i}.{name}.weight", noise(half, D)
    yield "model.norm.weight", noise(half, D)


def make(folder: Path, kind: str, size: float, shard: float) -> tuple[int, int]:
    """The checkpoint; returns bytes of all shards and of the largest."""
    per_layer = sum(t.nbytes for name, (K, N) in LINEARS.items() for _, t in linear(kind, name, K, N))
    layers = max(1, round((size * 1e9 - 2 * V * D) / per_layer))
    index: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    sizes: list[int] = []

    def flush() -> None:
        file = f"model-{len(sizes) + 1:05}.safetensors"
        safefile.write(folder / file, {"format": "pt"}, held, held.items())
        sizes.append((folder / file).stat().st_size)
        index.update(dict.fromkeys(held, file))
        held.clear()

    for name, t in tensors(kind, layers):
        if held and sum(x.nbytes for x in held.values()) + t.nbytes > shard * 1e9:
            flush()
        held[name] = t
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {"model_type": "llama", "vocab_size": V, "hidden_size": D, "intermediate_size": F,
              "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": KV // 128, "head_dim": 128,
              "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
              "tie_word_embeddings": True}  # fmt: skip
    settings = SETTINGS[kind]
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": settings} if settings else {})))
    return sum(sizes), max(sizes)


def peak() -> int:
    """Bytes, of this process alone: ru_maxrss starts from that of the process which started it."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def child(folder: Path) -> None:
    import tinyloop as tl

    started, before = time.perf_counter(), peak()
    checkpoint = tl.import_model(folder)
    read = time.perf_counter()
    tl.save(checkpoint, folder / "out.tinyloop")
    done = time.perf_counter()
    print(json.dumps({"import_s": read - started, "save_s": done - read, "peak": peak(), "before": before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--kind", choices=SETTINGS, action="append")
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--shard", type=float, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.folder)
        return
    results = []
    for kind in args.kind or list(SETTINGS):
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            size, largest = make(folder, kind, args.gigabytes, args.shard)
            command = [sys.executable, __file__, str(folder), "--child"]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        finally:
            shutil.rmtree(folder)
        seconds = found["import_s"] + found["save_s"]
        row = {"kind": kind, "input_gb": size / 1e9, "largest_shard_gb": largest / 1e9, "seconds": seconds,
               "mb_per_s": size / 1e6 / seconds, "peak_gb": found["peak"] / 1e9,
               "allowed_gb": 1.2 * largest / 1e9 + 0.5, "before_gb": found["before"] / 1e9,
               "import_s": found["import_s"], "load": os.getloadavg()[0]}  # fmt: skip
        results.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
        print(", ".join(f"{k} {v}" for k, v in results[-1].items()), file=sys.stderr)
    print(json.dumps({"bench": "import_speed", "cores": os.cpu_count(), "results": results}))


if __name__ == "__main__":
    main()
