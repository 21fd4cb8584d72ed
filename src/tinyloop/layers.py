"""What lies between the linear products of a block, in plain torch: runs for every dtype, shape and device.

`cpu/rows.py` exports the same four functions, compiled; the model holds one of the two modules and a parity test runs
both. Residual stream, norms, angles and scores are fp32; results are rounded once, to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
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


class Places:
    """Where T new tokens a row stand: row b's are first[b] … first[b] + T − 1.

    The host knows them, and everything that shapes depend on is answered there: no layer waits for a device.
    """

    def __init__(self, first: Iterable[int], T: int, device: torch.device | str = "cpu"):
        self.first, self.T = [int(p) for p in first], T
        self.positions = (torch.tensor(self.first)[:, None] + torch.arange(T)).to(device, non_blocking=True)  # [B, T]
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    @property
    def end(self) -> int:
        """One beyond the last position of any row."""
        return max(self.first) + self.T

    def mask(self, keys: int, window: int | None) -> Tensor | None:  # bool [B, 1, T, keys]
        """Key j is seen from position i when i − window < j ≤ i. None where plain causal attention says the same."""
        if keys == self.T and (window is None or window >= self.T):
            return None
        if self.T == 1 and (window is None or window >= keys) and all(p == keys - 1 for p in self.first):
            return None
        if (keys, window) not in self._masks:  # layers ask for the same ones
            j, i = torch.arange(keys, device=self.positions.device), self.positions[:, :, None]
            seen = j <= i
            if window is not None:
                seen &= j > i - window
            self._masks[keys, window] = seen[:, None]
        return self._masks[keys, window]


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
    places: Places,
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
        k, v = append(slot, places, k, v)
    mask = places.mask(k.shape[2], spec.window)
    if H != HKV and _wants_equal_heads(q, mask):
        k, v = k.repeat_interleave(H // HKV, 1), v.repeat_interleave(H // HKV, 1)
    causal = mask is None and T > 1
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=k.shape[1] != H)
    return y.transpose(1, 2).reshape(B, T, H * D)


def _wants_equal_heads(q: Tensor, mask: Tensor | None) -> bool:
    """Whether torch would write all scores to memory for heads that share keys: its CUDA kernels that take a mask or
    fp32 want a key for every query head."""
    return q.is_cuda and (mask is not None or q.dtype == torch.float32)


def losses(logits: Tensor, targets: Tensor) -> Tensor:  # [M, V], int64 [M] → fp32 [M]
    """Cross-entropy of each row in nats: log Σ e^logits − logits[target]."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, H, T, D]; cos, sin [B, 1, T, r] → fp32
    """RoPE, rotate-half layout, on the first 2r channels of each head."""
    r = cos.shape[-1]
    a, b, rest = x[..., :r].float(), x[..., r : 2 * r].float(), x[..., 2 * r :].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def append(slot: tuple[Tensor, Tensor], places: Places, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Store keys and values [B, HKV, T, D] at their rows' positions; returns all that any row may see."""
    for kept, new in zip(slot, (k, v), strict=True):
        if len(set(places.first)) == 1:
            kept[:, :, places.end - places.T : places.end] = new
        else:
            for b, first in enumerate(places.first):
                kept[b, :, first : first + places.T] = new[b]
    return slot[0][:, :, : places.end], slot[1][:, :, : places.end]
