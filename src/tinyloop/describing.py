"""What is in a `.tinyloop` file, for eyes and for machines: `tinyloop inspect`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from .container import TOKENIZER_TENSOR, Description


def facts(about: Description) -> dict[str, Any]:
    """Everything that is shown, JSON-ready."""
    c = about.config
    parameters = sum(math.prod(shape) for shape in c.linear_shapes().values()) + sum(c.norm_shapes().values())
    weight_bytes = sum(end - begin for name, (_, _, begin, end) in about.tensors.items() if name != TOKENIZER_TENSOR)
    slots = sum(1 for _ in c.applications())
    return {
        "architecture": c.architecture,
        "segments": [{"name": s.name, "layers": s.layers, "repeats": s.repeats} for s in c.segments],
        "loops": c.loops,
        "layers": c.num_layers,
        "kv_slots": slots,
        "kv_bytes_per_token_bf16": 2 * 2 * slots * c.num_key_value_heads * c.head_dim,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "heads": c.num_attention_heads,
        "kv_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "context": c.max_position_embeddings,
        "tied_head": c.tie_word_embeddings,
        "qk_norm": c.qk_norm,
        "sliding_windows": sorted({w for w in c.sliding_window if w}),
        "parameters": parameters,
        "bytes": about.file_bytes,
        "bits_per_weight": round(8 * weight_bytes / parameters, 3),
        "weights": _groups(about),
        "tokenizer": about.tokenizer,
        "source": about.source,
    }


def _groups(about: Description) -> list[dict[str, Any]]:
    """Weights that agree in everything but their layer, with the bytes of all their tensors."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, spec in about.weights.items():
        pattern = re.sub(r"^layers\.\d+\.", "layers.*.", name)
        spec = spec | ({"act_order": f"{name}.perm" in about.tensors} if spec["kind"] == "affine" else {})
        key = (pattern, *sorted(spec.items()))
        group = groups.setdefault(key, {"name": pattern, "count": 0, **spec, "bytes": 0})
        group["count"] += 1
        parts = ("q", "scale", "zero", "perm", "weight", "bias", "frac4", "sign_bit")
        group["bytes"] += sum(t[3] - t[2] for part in parts if (t := about.tensors.get(f"{name}.{part}")))
    return list(groups.values())


def render(f: dict[str, Any]) -> Iterator[RenderableType]:
    """The same for eyes."""
    segments = ", ".join(
        f"{s['name']} {s['layers']}" + (f" × {s['repeats']} loops" if s["name"] == "loop" else "")
        for s in f["segments"]
    )
    lines = {
        "architecture": f"{f['architecture']}, {f['layers']} layers ({segments})",
        "KV slots": f"{f['kv_slots']}, {f['kv_bytes_per_token_bf16']:,} bytes a token in bf16",
        "sizes": f"hidden {f['hidden_size']}, FFN {f['intermediate_size']}, heads {f['heads']} of {f['head_dim']} "
        f"({f['kv_heads']} KV), vocabulary {f['vocab_size']}{', tied head' if f['tied_head'] else ''}"
        f"{', QK norm' if f['qk_norm'] else ''}",
        "context": f"{f['context']} tokens"
        + (f", windows of {', '.join(map(str, f['sliding_windows']))}" if f["sliding_windows"] else ""),
        "parameters": f"{f['parameters']:,} at {f['bits_per_weight']} bits; file {f['bytes']:,} bytes",
        "tokenizer": _tokenizer(f["tokenizer"]),
        "source": "; ".join(f"{k}: {v}" for k, v in f["source"].items()) or "not recorded",
    }
    grid = Table.grid(padding=(0, 2))
    for name, text in lines.items():
        grid.add_row(f"[bold]{name}[/]", escape(text))
    yield grid
    table = Table("weight", "kind", "bits", "group", "K", "N", "MB")
    for g in f["weights"]:
        name = f"{g['name']} ×{g['count']}" if g["count"] > 1 else g["name"]
        kind = "4-bit codes with integer zero" if g.get("integer_zero") else g["kind"]
        kind += f" and {g['channel']}" if g.get("channel") else ""
        kind += ", act-order" if g.get("act_order") else ""
        numbers = (str(g.get(k, "")) for k in ("bits", "group_size", "K", "N"))
        table.add_row(escape(name), kind, *numbers, f"{g['bytes'] / 1e6:.2f}")
    yield table


def _tokenizer(t: dict[str, Any] | None) -> str:
    if t is None:
        return "none: this model takes token ids only"
    begins = f"bos {t['bos']}{'' if t['add_bos'] else ', not added'}" if t["bos"] is not None else "no bos"
    ends = ", ".join(map(str, t["eos"])) or "none"
    return f"{begins}; eos {ends}; chat template: {'yes' if t['chat_template'] else 'no'}"
