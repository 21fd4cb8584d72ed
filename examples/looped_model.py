"""A looped Llama in plain PyTorch: the model that train_looped.py trains, scores, writes and reads back.

In: a dictionary of weights under Llama names, and a `Shape`. Out: the negative log-likelihood of tokens for any loop
count, and a checkpoint folder (config.json, model.safetensors in fp16, tokenizer.json, tokenizer_config.json).

    python examples/looped_model.py DIR --heldout FILE [--dtype float16]

scores a written folder: perplexity and bits per byte of each held-out work for several loop counts.

Why this way. The forward pass is a page of functions over tensors, separate from the TinyLoop runtime on purpose: the
two agree only if both are right. Only one block is compiled, so every loop count runs the same code.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

BOS, BOS_TEXT = 0, "<|endoftext|>"
IGNORE = -100
Params = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    hidden_size: int = 512
    intermediate_size: int = 1152
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    pre_layers: int = 2
    loop_layers: int = 1
    coda_layers: int = 0
    loops: int = 8
    vocab_size: int = 8192
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def order(self, loops: int) -> list[int]:
        """Physical layer of every block application."""
        pre, loop, coda = self.pre_layers, self.loop_layers, self.coda_layers
        body = list(range(pre, pre + loop))
        return [*range(pre), *(body * loops), *range(pre + loop, pre + loop + coda)]


class Layer(NamedTuple):
    """One block's weights as a forward pass uses them: projections that read the same input are one matrix."""

    attn_norm: Tensor  # [D] fp32
    qkv: Tensor  # [(H + 2·Hkv)·hd, D]
    out: Tensor  # [D, H·hd]
    mlp_norm: Tensor  # [D] fp32
    gate_up: Tensor  # [2F, D]
    down: Tensor  # [D, F]


def layers_of(params: Params, s: Shape, dtype: torch.dtype) -> list[Layer]:
    """Casts and joins each matrix once per pass, not once per loop."""

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        w = {k.removeprefix(f"{at}.").split(".")[-2]: v for k, v in params.items() if k.startswith(f"{at}.")}
        return Layer(
            w["input_layernorm"].float(),
            torch.cat([w["q_proj"], w["k_proj"], w["v_proj"]]).to(dtype),
            w["o_proj"].to(dtype),
            w["post_attention_layernorm"].float(),
            torch.cat([w["gate_proj"], w["up_proj"]]).to(dtype),
            w["down_proj"].to(dtype),
        )

    return [layer(i) for i in range(s.pre_layers + s.loop_layers + s.coda_layers)]


def rope_table(s: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin [T, hd] fp32, rotate-half layout."""
    inv_freq = s.rope_theta ** (-torch.arange(0, s.head_dim, 2, device=device, dtype=torch.float64) / s.head_dim)
    angle = torch.outer(torch.arange(s.max_position_embeddings, device=device, dtype=torch.float64), inv_freq)
    angle = torch.cat([angle, angle], dim=-1).float()
    return angle.cos(), angle.sin()


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


def block(x: Tensor, w: Layer, cos: Tensor, sin: Tensor, s: Shape) -> Tensor:
    """[B, T, D] → [B, T, D]."""
    B, T, _ = x.shape
    H, Hkv, hd = s.num_attention_heads, s.num_key_value_heads, s.head_dim
    qkv = F.linear(rms_norm(x, w.attn_norm, s.rms_norm_eps), w.qkv).view(B, T, H + 2 * Hkv, hd).transpose(1, 2)
    q, k, v = qkv.split([H, Hkv, Hkv], dim=1)
    y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
    x = x + F.linear(y.transpose(1, 2).reshape(B, T, H * hd), w.out)
    gate, up = F.linear(rms_norm(x, w.mlp_norm, s.rms_norm_eps), w.gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, w.down)


def head_nll(x: Tensor, norm: Tensor, embed: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Sum of −ln p over the targets that are not IGNORE."""
    logits = F.linear(rms_norm(x, norm, eps), embed).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


class Model:
    """The forward pass over a dictionary of weights that the caller keeps."""

    def __init__(self, s: Shape, device: torch.device, compiled: bool = False):
        self.shape, self.device = s, device
        self.cos, self.sin = rope_table(s, device)
        self.block: Callable[..., Tensor] = torch.compile(block, dynamic=False) if compiled else block
        self.head: Callable[..., Tensor] = torch.compile(head_nll, dynamic=False) if compiled else head_nll

    def nll(self, params: Params, inputs: Tensor, targets: Tensor, loops: int, dtype: torch.dtype) -> Tensor:
        layers = layers_of(params, self.shape, dtype)
        embed = params["model.embed_tokens.weight"].to(dtype)
        x = F.embedding(inputs, embed)
        for i in self.shape.order(loops):
            x = self.block(x, layers[i], self.cos, self.sin, self.shape)
        return self.head(x, params["model.norm.weight"].float(), embed, targets, self.shape.rms_norm_eps)

    @torch.no_grad()
    def score(self, params: Params, work: Work, loops: int, dtype: torch.dtype, batch: int) -> float:
        """Nats of a work in windows of T tokens that each start with BOS and share nothing."""
        T = self.shape.max_position_embeddings
        rows = [F.pad(c, (0, T - len(c)), value=IGNORE) for c in work.tokens.split(T - 1)]
        rows += [torch.full((T,), IGNORE)] * (-len(rows) % batch)
        targets = torch.stack(rows).to(self.device)
        inputs = F.pad(targets[:, :-1], (1, 0), value=BOS).clamp(min=BOS)
        total = 0.0
        for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
            total += self.nll(params, x, y, loops, dtype).item()
        return total


class Work(NamedTuple):
    tokens: Tensor  # [n] long
    nbytes: int  # of its UTF-8 text


def read_works(path: Path) -> list[str]:
    """Every work in a .txt or .txt.xz file, or in all such files of a folder, in name order."""
    files = sorted(p for p in path.rglob("*") if p.name.endswith((".txt", ".txt.xz"))) if path.is_dir() else [path]
    raw = [lzma.decompress(p.read_bytes()) if p.suffix == ".xz" else p.read_bytes() for p in files]
    works = [w for text in raw for part in text.decode().split(BOS_TEXT) if (w := part.strip("\n"))]
    if not works:
        raise SystemExit(f"{path} holds no text; it must be a .txt or .txt.xz file, or a folder of them")
    return works


def heldout_works(path: Path, tokenizer: Tokenizer) -> list[Work]:
    return [Work(torch.tensor(tokenizer.encode(w).ids), len(w.encode())) for w in read_works(path)]


def save_model(folder: Path, s: Shape, params: Params, tokenizer: Tokenizer) -> None:
    weights = {n: p.detach().half().cpu().contiguous() for n, p in params.items()}
    if bad := [n for n, w in weights.items() if not w.isfinite().all()]:
        raise SystemExit(f"{bad[0]} does not fit fp16; nothing was written")
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "tinyloop", **asdict(s), "hidden_act": "silu", "tie_word_embeddings": True,
              "bos_token_id": BOS, "eos_token_id": BOS, "torch_dtype": "float16"}  # fmt: skip
    special = {"bos_token": BOS_TEXT, "eos_token": BOS_TEXT, "add_bos_token": True,
               "model_max_length": s.max_position_embeddings, "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    for name, value in (("config.json", config), ("tokenizer_config.json", special)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_model(folder: Path, device: torch.device) -> tuple[Shape, Params, Tokenizer]:
    """What `save_model` wrote, read back from the files alone."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(**{f.name: config[f.name] for f in fields(Shape)})
    params = {n: p.to(device) for n, p in load_file(folder / "model.safetensors").items()}
    return shape, params, Tokenizer.from_file(str(folder / "tokenizer.json"))


def bits_per_byte(nats: float, work: Work) -> float:
    return nats / (math.log(2) * work.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, params, tokenizer = load_model(args.folder, device)
    works = heldout_works(args.heldout, tokenizer)
    model = Model(shape, device)
    print(f"{args.dtype} on {device}; works of {[len(w.tokens) for w in works]} tokens: perplexity, bits/byte of each")
    for loops in (1, 2, 4, 6, 8, 12, 16):
        nats = [model.score(params, w, loops, getattr(torch, args.dtype), batch=16) for w in works]
        pairs = [(math.exp(n / len(w.tokens)), bits_per_byte(n, w)) for n, w in zip(nats, works, strict=True)]
        print(f"loops {loops:2d}  " + "  ".join(f"{ppl:8.2f} {bits:.4f}" for ppl, bits in pairs), flush=True)


if __name__ == "__main__":
    main()
