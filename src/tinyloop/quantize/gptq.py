"""A dense weight → 4-bit codes and group parameters: by rounding each weight to the nearest, or by GPTQ.

    nearest   q = round((W − zero)/scale), scale and zero from the group's smallest and largest weight
    GPTQ      minimises Σ‖x·W − x·Ŵ‖² over calibration inputs x, known through H = Σ xᵀx  (Frantar et al. 2022,
              arXiv 2210.17323): inputs k are rounded one after another, and each rounding error is handed on to the
              inputs that are still open, through the Cholesky factor of H⁻¹

Inputs with much energy go first, when many others can still make up for their error. Groups stay contiguous in the
stored order, so no permutation is needed at run time: whole groups are visited in order of their energy, and inputs
within a group likewise; a group's parameters are set from its weights as they then are. All arithmetic is fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..errors import InputError, whole
from ..weight import QuantWeight
from . import rounding
from .rounding import LEVELS

Tensor = torch.Tensor
BLOCK = 128  # inputs whose errors are gathered before the rest of the weight is updated


@dataclass(frozen=True)
class QuantSpec:
    """How to quantise one weight. `group_size` None is one group per column.

    `integer_zero`: zero = −z·scale with z in 0..15, the form that GPTQ and AWQ files hold; otherwise zero is a free
    fp16 number, which fits one-sided groups better. `clip`: shrink a group's range where that lowers its error.
    `order`: visit inputs by energy. `damp`: share of the mean energy that is added to every input's, more if H is
    singular even so. `channel` "sign_bit" or "frac4" adds one for cross-iteration rounding: codes and errors are then
    those of the mean over iterations. `scales`: "float16" for scales of eleven bits, or "bfloat16" for such of eight,
    which both types hold: with them products in bf16 are as fast as in fp16. None takes the latter for weights in bf16,
    which have eight bits themselves.
    """

    group_size: int | None = 128
    integer_zero: bool = False
    clip: bool = True
    order: bool = True
    damp: float = 0.01
    channel: str | None = None
    scales: str | None = None

    def __post_init__(self) -> None:
        rounding.check(self.channel)
        if self.scales not in (None, "float16", "bfloat16"):
            raise InputError(f"scales={self.scales!r} is none of None, 'float16', 'bfloat16'")
        if self.group_size is not None:
            whole("group_size", self.group_size, 1, ", or None for one group per column")
        if not 0 < self.damp <= 1:
            raise InputError(f"damp={self.damp} must be in (0, 1]")


@dataclass(frozen=True)
class Quantized:
    """A weight, its loss tr((W − Ŵ)ᵀ H (W − Ŵ)), and a sentence where the method had to give way, or None."""

    weight: QuantWeight
    loss: float
    note: str | None = None


def nearest(W: Tensor, spec: QuantSpec, bias: Tensor | None = None) -> QuantWeight:  # any float [K, N]
    """Round to nearest, without calibration."""
    spec, W = _with_scales(spec, W), _checked(W)
    G = spec.group_size or W.shape[0]
    return _finish(W, *_round_all(W, G, spec), G, spec, bias)


def gptq_quantize(W: Tensor, H: Tensor, spec: QuantSpec, bias: Tensor | None = None) -> QuantWeight:
    """`gptq` without the report."""
    return gptq(W, H, spec, bias).weight


def gptq(W: Tensor, H: Tensor, spec: QuantSpec, bias: Tensor | None = None) -> Quantized:
    """Quantise W [K, N] (any float) for inputs with second moment H [K, K] (fp32, unscaled).

    An input that never fired (H[k, k] = 0) is rounded to nearest. Where none fired, H holds NaN, or it stays singular
    under all the damping there is, the whole weight is rounded to nearest, and the note says so. Raises InputError for
    shapes that disagree and for weights that are not finite.
    """
    spec, W = _with_scales(spec, W), _checked(W)
    K = W.shape[0]
    if list(H.shape) != [K, K]:
        raise InputError(f"H has shape {list(H.shape)}; K={K} needs [{K}, {K}]")
    G = spec.group_size or K
    H = H.float()
    energy = H.diagonal()
    order = _visits(energy, G) if spec.order else torch.arange(K)
    factor = _inverse_factor(H[order][:, order], spec.damp)
    if isinstance(factor, str):
        w = nearest(W, spec, bias)
        return Quantized(w, loss(W, w, H), f"{factor}: rounded to nearest instead")
    w = _finish(W, *_descend(W, energy, factor, order, G, spec), G, spec, bias)
    return Quantized(w, loss(W, w, H))


def loss(W: Tensor, w: QuantWeight, H: Tensor) -> float:
    """tr((W − Ŵ)ᵀ H (W − Ŵ)): the squared error of the outputs, summed over what H was summed over."""
    error = W.float() - w.mean()
    return float((error * (H.float() @ error)).sum(dtype=torch.float64))


def _with_scales(spec: QuantSpec, W: Tensor) -> QuantSpec:
    if spec.scales is not None:
        return spec
    return dataclasses.replace(spec, scales="bfloat16" if W.dtype == torch.bfloat16 else "float16")


def _checked(W: Tensor) -> Tensor:
    if W.dim() != 2 or not W.is_floating_point():
        raise InputError(f"W is {W.dtype} {list(W.shape)}; give floats [K, N]")
    if not torch.isfinite(W).all():
        raise InputError("W holds NaN or infinite values; the source weight is damaged")
    return W.float()


def _visits(energy: Tensor, G: int) -> Tensor:  # [K] → a permutation of K
    """Whole groups by their mean energy, inputs within a group by their own; ties keep their order."""
    groups = list(torch.split(torch.arange(len(energy)), G))
    groups.sort(key=lambda ks: -float(energy[ks].mean()))
    return torch.cat([ks[energy[ks].sort(descending=True, stable=True).indices] for ks in groups])


def _inverse_factor(H: Tensor, damp: float) -> Tensor | str:
    """The upper Cholesky factor of (H + damping)⁻¹, in the order of visits, or why there is none.

    H is first divided by its mean energy: the factor's scale cancels in the descent, and neither very large nor very
    small activations leave fp32's range.
    """
    if not torch.isfinite(H).all():
        return "H holds NaN or infinite values"
    fired = H.diagonal() > 0
    if not fired.any():
        return "no input ever fired"
    H = H / H.diagonal()[fired].double().mean().float()
    while damp <= 1:
        damped = H + torch.diag(torch.where(fired, damp, 1.0))
        lower: Tensor
        upper: Tensor
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and torch.isfinite(upper).all():
                return upper
        damp *= 10
    return "H stays singular under damping"


def _descend(
    W: Tensor, energy: Tensor, factor: Tensor, order: Tensor, G: int, spec: QuantSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """GPTQ proper: codes [K, N] and parameters [K/G, N], in the stored order.

    Within a block each error is handed on at once, to the inputs after the block when it ends. A group that starts here
    and ends later takes its parameters from what is left after every error so far, so its late members get those first.
    """
    K, N = W.shape
    left = W[order]  # what is to be represented, corrected as errors arrive
    group_of = (order // G).tolist()
    q = torch.empty(K, N, dtype=torch.float32)
    scale, zero = (torch.empty(-(-K // G), N, dtype=torch.float32) for _ in range(2))
    for first in range(0, K, BLOCK):
        end = min(first + BLOCK, K)
        errors = torch.empty(end - first, N, dtype=torch.float32)
        with _one_thread():
            for i in range(first, end):
                g = group_of[i]
                if i == 0 or g != group_of[i - 1]:
                    last = i + min(
                        G, K - g * G
                    )  # the last group in the stored order may be short, wherever it is visited
                    now = left[i:last]
                    if last > end:
                        late = left[end:last] - factor[first:i, end:last].t() @ errors[: i - first]
                        now = torch.cat((left[i:end], late))
                    scale[g], zero[g] = parameters(now, energy[order[i:last]], spec)
                q[order[i]] = code = rounding.nearest_mean((left[i] - zero[g]) / scale[g], spec.channel)
                errors[i - first] = error = (left[i] - (code * scale[g] + zero[g])) / factor[i, i]
                left[i + 1 : end] -= factor[i, i + 1 : end, None] * error
        left[end:] -= factor[first:end, end:].t() @ errors
    return q, scale, zero


@contextmanager
def _one_thread() -> Iterator[None]:
    """Rows are too small to share. Two threads save a tenth of the time at N = 1536, for twice the CPU time; where the
    machine is busy they wait for each other some ten times a row, and a layer of 0.6 s took 37 s."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _round_all(W: Tensor, G: int, spec: QuantSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and parameters of every group, rounded to nearest."""
    pairs = [parameters(part, torch.ones(part.shape[0], dtype=torch.float32), spec) for part in torch.split(W, G)]
    scale, zero = (torch.stack(t) for t in zip(*pairs, strict=True))
    group = torch.arange(W.shape[0]) // G
    return rounding.nearest_mean((W - zero[group]) / scale[group], spec.channel), scale, zero


def parameters(part: Tensor, energy: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """scale and zero [N] of one group [G, N], fp16 values (fp32 where a group is too small for fp16) in fp32.

    With `clip`, of 8 ranges shrunk about the centre the one with the least Σ_k energy[k]·error² per column.
    """
    low, high = part.amin(0), part.amax(0)
    best_scale, best_zero = _affine(low, high, spec)
    if not spec.clip:
        return best_scale, best_zero
    best = _error(part, energy, best_scale, best_zero, spec.channel)
    for shrink in (0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79):
        rim = (high - low) * (1 - shrink) / 2
        scale, zero = _affine(low + rim, high - rim, spec)
        error = _error(part, energy, scale, zero, spec.channel)
        better = error < best
        best = torch.where(better, error, best)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _error(part: Tensor, energy: Tensor, scale: Tensor, zero: Tensor, channel: str | None) -> Tensor:
    """Σ_k energy[k]·error² [N], of the mean: clipping is the one error that no iteration undoes."""
    code = rounding.nearest_mean((part - zero) / scale, channel)
    return energy @ (code.mul_(scale).add_(zero) - part).square_()


def _affine(low: Tensor, high: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """scale and zero that put code 0 at `low` and code 15 at `high`; a constant group is met exactly."""
    flat = low == high
    if spec.integer_zero:
        raw = (high.clamp(min=0) - low.clamp(max=0)) / LEVELS
        # constant: code 1 over z = 0, or code 0 over z = 1
        scale = torch.where(flat, low.abs(), _kept(raw, spec.scales))
        scale = torch.where(scale == 0, 1.0, scale)
        return scale, -(-low / scale).round().clamp(0, LEVELS) * scale
    raw = (high - low) / LEVELS
    scale = _kept(raw, spec.scales)
    zero = low.to(torch.float16).float()
    zero = torch.where((zero - low).abs() <= scale / 16, zero, low)  # a narrow group far from 0 needs fp32
    flat |= scale == 0
    return torch.where(flat, 1.0, scale), torch.where(flat, low, zero)


def _kept(scale: Tensor, scales: str | None) -> Tensor:
    """scale rounded to fp16, or to the eight bits of bf16, except where fp16 would hold it with fewer than 11 bits or
    not at all."""
    half = scale.to(getattr(torch, scales or "float16")).to(torch.float16).float()
    return torch.where((scale >= 2.0**-14) & torch.isfinite(half), half, scale)


def _finish(
    W: Tensor, q: Tensor, scale: Tensor, zero: Tensor, G: int, spec: QuantSpec, bias: Tensor | None
) -> QuantWeight:
    codes, values = rounding.split(q, spec.channel)
    G = min(G, W.shape[0])
    w = QuantWeight.from_codes(codes, scale, zero, G, bias=bias, integer_zero=spec.integer_zero)
    return w if values is None or spec.channel is None else w.with_channel(spec.channel, values)
