"""Cross-iteration rounding: which code a weight has in loop iteration i, from its stored code and a channel beside it.

    frac4     s in −8..7 as four bits in two's complement    mean over iterations → q + s/16
    sign_bit  b in 0..1                                       mean of iterations 2j and 2j + 1 = q ± b/2

The stored codes alone are the best single rounding (frac4: the nearest; sign_bit: that of even iterations), so whoever
knows no channels, or has switched them off, reads them and is right. A step leads to a neighbouring code, decided by
a hash of the weight's place, so that neighbours do not step together: docs/format.md states it bit for bit.

    h  = hash32(k·N + n)                                  32 bits, spread evenly over places
    θᵢ = ((h + i·0x9E3779B9) mod 2³²) >> 28               0..15, a golden-ratio sequence over i with offset h
    frac4     q + [f > θᵢ] − [f ≥ 8]                      f = s mod 16
    sign_bit  q for even i, for odd i q + b where h < 2³¹, else q − b
"""

from __future__ import annotations

import numpy as np
import torch

Tensor = torch.Tensor
FRAC4, SIGN_BIT = "frac4", "sign_bit"
PER_BYTE = {FRAC4: 2, SIGN_BIT: 8}  # values of one column that share a byte
STEPS = {None: 1, SIGN_BIT: 2, FRAC4: 16}  # means between one code and the next
GOLDEN = 0x9E3779B9  # 2³² / φ, to the nearest odd number


def hashes(first: int, end: int, N: int) -> np.ndarray:  # uint32 [end − first, N]
    """h of rows first … end − 1 of a weight with N columns."""
    h = np.arange(first * N, end * N, dtype=np.uint64).astype(np.uint32)  # place modulo 2³²
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    return h.reshape(end - first, N)


def steps(channel: str, values: Tensor, first: int, iteration: int) -> Tensor:  # uint8 [R, N] → int8 [R, N]
    """What iteration `iteration` adds to the codes of rows first … first + R − 1, in −1..1."""
    v = values.cpu().numpy()
    h = hashes(first, first + v.shape[0], v.shape[1])
    if channel == FRAC4:
        h += np.uint32(iteration * GOLDEN & 0xFFFFFFFF)
        step = (v > h >> np.uint32(28)).astype(np.int8) - (v >> 3).astype(np.int8)
    else:
        step = sign(h) * v.astype(np.int8) * np.int8(iteration % 2)
    return torch.from_numpy(step).to(values.device)


def sign(h: np.ndarray) -> np.ndarray:  # uint32 → int8, 1 or −1
    """Direction in which a sign_bit steps."""
    direction: np.ndarray = 1 - 2 * (h >> np.uint32(31)).astype(np.int8)
    return direction


def means(channel: str, values: Tensor, first: int) -> Tensor:  # uint8 [R, N] → fp32 [R, N]
    """What the iterations add to the codes on average: multiples of 1/16 or 1/2."""
    if channel == FRAC4:
        return (values.float() - 16 * (values >> 3)) / 16
    h = hashes(first, first + values.shape[0], values.shape[1])
    return values * torch.from_numpy(sign(h)).to(values.device) / 2


def distinct(channel: str, iteration: int) -> int:
    """The first iteration whose rounding is that of `iteration`."""
    return iteration % 2 if channel == SIGN_BIT else iteration


def roundings(channel: str, iterations: int) -> int:
    """How many different roundings `iterations` iterations use."""
    return min(2, iterations) if channel == SIGN_BIT else iterations


def pack_bits(b: Tensor) -> Tensor:  # uint8 [K, N] of 0 and 1 → uint8 [⌈K/8⌉, N]
    """Bit j of byte (i, n) = b[8i + j, n]; rows beyond K are 0."""
    return torch.from_numpy(np.packbits(b.cpu().numpy(), axis=0, bitorder="little")).to(b.device)


def unpack_bits(packed: Tensor, K: int) -> Tensor:  # uint8 [⌈K/8⌉, N] → uint8 [K, N]
    """Inverse of `pack_bits`."""
    bits = np.unpackbits(packed.cpu().numpy(), axis=0, count=K, bitorder="little")
    return torch.from_numpy(bits).to(packed.device)
