"""What lies between the linear products of a block, in plain torch: runs for every dtype and shape.

`cpu/rows.py` exports the same four functions, compiled; the model holds one of the two modules and a parity test runs
both. Residual stream, norms, angles and scores are fp32; results are rounded once, to the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


@dataclass(frozen=True)
class Attention:
    """What one layer's attention is. `window`: keys i − window < j ≤ i are seen, None for all; norms are [head_dim]."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    eps: float
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x += y, in place, fp32 [..., D]; returns RMSNorm(x)·weight in `dtype`."""
    if y is not None:
        x += y
    return F.rms_norm(x, weight.shape, weight, eps).to(dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up, in gate's memory."""
    return F.silu(gate, inplace=True).mul_(up)


def attention(
    qkv: Tensor,  # [B, T, (heads + 2·kv_heads)·head_dim]
    spec: Attention,
    rope: tuple[Tensor, Tensor],  # cos, sin fp32 [B, T, r], 2r ≤ head_dim
    positions: Tensor,  # int64 [B, T], consecutive in each row
    slot: tuple[Tensor, Tensor] | None,  # keys and values of one KV slot, [B, kv_heads, capacity, head_dim]
) -> Tensor:  # [B, T, heads·head_dim]
    """Causal attention of new tokens over the slot's keys and their own, which are appended to the slot."""
    B, T, _ = qkv.shape
    H, HKV, D = spec.heads, spec.kv_heads, spec.head_dim
    q, k, v = torch.split(qkv.view(B, T, H + 2 * HKV, D).transpose(1, 2), [H, HKV, HKV], dim=1)  # [B, ·, T, D]
    if spec.q_norm is not None and spec.k_norm is not None:
        q = F.rms_norm(q.float(), (D,), spec.q_norm, spec.eps)
        k = F.rms_norm(k.float(), (D,), spec.k_norm, spec.eps)
    cos, sin = rope[0][:, None], rope[1][:, None]
    q, k = rotate(q, cos, sin).to(qkv.dtype), rotate(k, cos, sin).to(qkv.dtype)
    if slot is not None:
        k, v = append(slot, positions, k, v)
    mask = attention_mask(positions, k.shape[2], spec.window)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1, enable_gqa=H != HKV)
    return y.transpose(1, 2).reshape(B, T, H * D)


def losses(logits: Tensor, targets: Tensor) -> Tensor:  # [M, V], int64 [M] → fp32 [M]
    """Cross-entropy of each row in nats: log Σ e^logits − logits[target]."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, H, T, D]; cos, sin [B, 1, T, r] → fp32
    """RoPE, rotate-half layout, on the first 2r channels of each head."""
    r = cos.shape[-1]
    a, b, rest = x[..., :r].float(), x[..., r : 2 * r].float(), x[..., 2 * r :].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def append(slot: tuple[Tensor, Tensor], positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Store keys and values [B, HKV, T, D] at their rows' positions; returns all that any row may see."""
    for b in range(k.shape[0]):
        first, end = int(positions[b, 0]), int(positions[b, -1]) + 1
        slot[0][b, :, first:end] = k[b]
        slot[1][b, :, first:end] = v[b]
    longest = int(positions[:, -1].max()) + 1
    return slot[0][:, :, :longest], slot[1][:, :, :longest]


def attention_mask(positions: Tensor, keys: int, window: int | None) -> Tensor | None:  # bool [B, 1, T, keys]
    """Key j is seen from position i when i − window < j ≤ i. None where plain causal attention says the same."""
    T = positions.shape[1]
    if keys == T and (window is None or window >= T):
        return None
    if T == 1 and (window is None or window >= keys) and bool((positions == keys - 1).all()):
        return None
    j, i = torch.arange(keys), positions[:, :, None]
    seen = j <= i
    if window is not None:
        seen &= j > i - window
    return seen[:, None]
