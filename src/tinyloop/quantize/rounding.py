"""Target codes → stored codes and a channel for cross-iteration rounding (see ../channel.py for what reads them).

    target t, real, in codes ─ nearest_mean → m, a multiple of 1, 1/2 or 1/16 ─ split → q and the channel's values

m is what the roundings of a weight tend to on average, so it is against m that GPTQ measures the error that it hands
on: the error of one rounding is undone by the next iterations, that of the mean never. Without a channel m is q.
"""

from __future__ import annotations

import numpy as np
import torch

from ..channel import FRAC4, SIGN_BIT, STEPS, hashes, sign
from ..errors import InputError

Tensor = torch.Tensor
LEVELS = 15  # steps between the smallest and the largest code


def check(channel: str | None) -> None:
    if channel not in STEPS:
        raise InputError(f"channel={channel!r} is none of None, {SIGN_BIT!r}, {FRAC4!r}")


def nearest_mean(target: Tensor, channel: str | None) -> Tensor:  # any float, overwritten → the same
    """The nearest mean of codes 0..15 that the channel can express."""
    n = STEPS[channel]
    return target.mul_(n).round_().clamp_(0, LEVELS * n).div_(n)


def split(mean: Tensor, channel: str | None) -> tuple[Tensor, Tensor | None]:  # fp32 [K, N] → uint8 [K, N] each
    """Codes to store, and the channel's values. Means in 0..15 keep every iteration's code in 0..15."""
    if channel is None:
        return mean.to(torch.uint8), None
    u = (mean * STEPS[channel]).to(torch.int16)
    if channel == FRAC4:
        q = (u + 8) >> 4
        return q.to(torch.uint8), (u - 16 * q & 15).to(torch.uint8)
    down = torch.from_numpy(sign(hashes(0, *u.shape)) < np.int8(0))  # stepping down starts from the upper code
    b = u & 1
    return ((u >> 1) + b * down).to(torch.uint8), b.to(torch.uint8)
