"""Cross-iteration rounding on a trained looped model: perplexity by loop count, error of the state by iteration.

    python bench/looped_study.py FOLDER HELDOUT --plot looped-error.png

FOLDER is a looped checkpoint with one loop segment at its end, such as examples/looped-12m; HELDOUT an .xz of works
separated by <|endoftext|>. The first is scored, the others calibrate.

One pass of the longest loop count gives every shorter one: the state after iteration i does not know how many follow,
and there is no block after the loop. x_i is the residual stream after iteration i; its error is ‖x_i − x_i*‖/‖x_i*‖
over all tokens, x* from the dense fp16 weights. Arithmetic is fp32 unless a row says otherwise. A loss in perplexity
comes with the standard error of its mean over windows, each paired with the same window of the dense model. Prints
Markdown tables; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import tinyloop as tl
from tinyloop.quantize.gptq import QuantSpec
from tinyloop.quantize.pipeline import Settings, quantize_weights
from tinyloop.weight import DenseWeight, QuantWeight

Tensor = torch.Tensor
LOOPS = (2, 4, 8, 16)
WINDOW = 1024
BOS = "<|endoftext|>"  # token 0
LOOP_ONLY = "loop block only, "
CHANNELS: tuple[str | None, ...] = (None, "sign_bit", "frac4")


@dataclass(frozen=True)
class Variant:
    name: str
    model: tl.Model
    block_bytes: int  # of all weights but the embedding


@dataclass(frozen=True)
class Outcome:
    """nats [windows, len(LOOPS)]: mean loss of each window; error [iterations]: of the state after each."""

    name: str
    block_bytes: int
    nats: Tensor
    error: Tensor


def works(path: Path) -> list[str]:
    return [w.strip("\n") for w in lzma.decompress(path.read_bytes()).decode().split(BOS) if w.strip("\n")]


def windows(checkpoint: tl.Checkpoint, text: str, count: int) -> Tensor:  # int64 [count, WINDOW]
    """Evenly spread over the text; each begins with token 0, which begins a text."""
    tokenizer = tl.Model(checkpoint).tokenizer
    assert tokenizer is not None
    ids = torch.tensor(tokenizer.encode(text))
    step = (len(ids) - WINDOW) // max(1, count - 1)
    rows = [torch.cat((torch.zeros(1, dtype=torch.int64), ids[i * step : i * step + WINDOW - 1])) for i in range(count)]
    return torch.stack(rows)


@torch.inference_mode()
def states(model: tl.Model, tokens: Tensor) -> Iterator[Tensor]:  # [1, T] → fp32 [1, T, D] after each iteration
    """The forward pass of `Model.hidden`, which ends at the last state, opened up at every iteration."""
    positions = torch.arange(tokens.shape[1])[None]
    rope, x = model.rope(positions), model.embed(tokens)
    applications = list(model.config.applications())
    last = model.config.num_layers - 1
    for layer, i in applications:
        at = f"layers.{layer}"
        h = model._norm(x, None, f"{at}.attn_norm")
        h = model._ops.attention(model._apply(h, f"{at}.attn_qkv", i), model._attention[layer], rope, positions, None)
        h = model._norm(x, model._apply(h, f"{at}.attn_out", i), f"{at}.mlp_norm")
        gate, up = (model._apply(h, f"{at}.{name}", i) for name in ("mlp_gate", "mlp_up"))
        x += model._apply(model._ops.swiglu(gate, up), f"{at}.mlp_down", i)
        if layer == last:
            yield x


def measure(variant: Variant, tokens: Tensor, exact: list[list[Tensor]] | None) -> tuple[Outcome, list[list[Tensor]]]:
    """Losses at each loop count, and the error of each state against `exact` (None: keep the states, no error)."""
    kept, nats, off, size = [], [], [], []
    for w, row in enumerate(tokens):
        mine, losses = [], []
        for i, x in enumerate(states(variant.model, row[None])):
            if exact is None:
                mine.append(x.clone())
            else:
                off.append((x - exact[w][i]).double().square().sum())
                size.append(exact[w][i].double().square().sum())
            if i + 1 in LOOPS:
                hidden = variant.model._norm(x.clone(), None, "final_norm")[0]
                losses.append(variant.model.losses(hidden[:-1], row[1:]).double().mean())
        kept.append(mine)
        nats.append(torch.stack(losses))
    n = max(LOOPS)
    if exact is None:
        error = torch.zeros(n)
    else:
        error = (torch.stack(off).view(-1, n).sum(0) / torch.stack(size).view(-1, n).sum(0)).sqrt()
    return Outcome(variant.name, variant.block_bytes, torch.stack(nats), error), kept


def quantised(dense: tl.Checkpoint, calibration: Tensor, settings: Settings) -> tl.Checkpoint:
    """Made for the checkpoint's own loop count, whatever it is then run with."""
    tokens = calibration if settings.method == "gptq" else None
    return quantize_weights(dense, tokens, settings)[0]


def variants(dense: tl.Checkpoint, calibration: Tensor) -> Iterator[Variant]:
    yield variant("dense fp16", dense)
    yield variant("dense fp16, bf16 arithmetic", dense, dtype=torch.bfloat16)
    for method in ("nearest", "gptq"):
        for channel in CHANNELS:
            q = quantised(dense, calibration, Settings(QuantSpec(channel=channel), method))
            yield variant(f"{method}{suffix(channel)}", q)
            if channel:
                yield variant(f"{method}{suffix(channel)}, off", q, on=False)
            if channel == "frac4":
                mean = variant(f"{method} + frac4, its mean", mean_of(q))
                yield dataclasses.replace(mean, block_bytes=block_bytes(q))
        q = quantised(dense, calibration, Settings(QuantSpec(group_size=32), method))
        yield variant(f"{method}, G = 32", q)
    for channel in CHANNELS:
        rules = tuple((f"layers.{i}.*", None) for i in range(dense.config.num_layers - 1))
        q = quantised(dense, calibration, Settings(QuantSpec(channel=channel), "nearest", rules))
        yield variant(f"{LOOP_ONLY}nearest{suffix(channel)}", q)


def suffix(channel: str | None) -> str:
    return f" + {channel}" if channel else ""


def variant(name: str, checkpoint: tl.Checkpoint, on: bool = True, dtype: torch.dtype = torch.float32) -> Variant:
    longest = dataclasses.replace(checkpoint, config=checkpoint.config.with_loops(max(LOOPS)))
    return Variant(name, tl.Model(longest, dtype, cross_iter_round=on), block_bytes(checkpoint))


def block_bytes(checkpoint: tl.Checkpoint) -> int:
    return sum(w.nbytes for n, w in checkpoint.weights.items() if n != "embed")


def mean_of(checkpoint: tl.Checkpoint) -> tl.Checkpoint:
    """Every frac4 weight replaced by its mean: the same bits read as one finer code, in every iteration."""

    def dense(w: tl.QuantWeight | tl.DenseWeight) -> tl.QuantWeight | tl.DenseWeight:
        return DenseWeight(w.mean().t().contiguous(), w.bias) if isinstance(w, QuantWeight) and w.channel else w

    return dataclasses.replace(checkpoint, weights={n: dense(w) for n, w in checkpoint.weights.items()})


def perplexities(outcomes: list[Outcome], weights: int) -> str:
    base = outcomes[0].nats
    lines = ["| weights | bits a weight | " + " | ".join(f"loops {n}" for n in LOOPS) + " |", "|---" * 6 + "|"]
    for o in outcomes:
        cells = []
        for j in range(len(LOOPS)):
            d = o.nats[:, j] - base[:, j]
            loss, spread = 100 * math.expm1(d.mean()), 100 * float(d.std()) / math.sqrt(len(d))
            ppl = math.exp(o.nats[:, j].mean())
            cells.append(f"{ppl:.3f}" + (f" ({loss:+.2f} ± {spread:.2f} %)" if o is not outcomes[0] else ""))
        bits = 8 * o.block_bytes / weights
        lines.append(f"| {o.name} | {bits:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def errors(outcomes: list[Outcome]) -> str:
    shown = (1, 2, 3, 4, 6, 8, 12, 16)
    lines = ["| weights | " + " | ".join(f"i = {i}" for i in shown) + " |", "|---" * (1 + len(shown)) + "|"]
    lines += [f"| {o.name} | " + " | ".join(f"{o.error[i - 1]:.4f}" for i in shown) + " |" for o in outcomes[1:]]
    return "\n".join(lines)


def plot(outcomes: list[Outcome], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), sharey=True)
    prefixes = {
        "nearest": "all blocks, nearest",
        "gptq": "all blocks, GPTQ",
        f"{LOOP_ONLY}nearest": LOOP_ONLY + "nearest",
    }
    by_name = {o.name: o for o in outcomes}
    for ax, (prefix, title) in zip(axes, prefixes.items(), strict=True):
        for channel in CHANNELS:
            error = by_name[prefix + suffix(channel)].error
            ax.plot(range(1, len(error) + 1), 100 * error, marker=".", label=channel or "plain")
        ax.set(title=title, xlabel="iteration", xticks=range(2, max(LOOPS) + 1, 2))
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("error of the state, %")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--calibration-windows", type=int, default=16)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    dense = tl.import_model(args.folder)
    scored, *others = works(args.heldout)
    tokens = windows(dense, scored, args.windows)
    calibration = windows(dense, "\n\n".join(others), args.calibration_windows)
    outcomes: list[Outcome] = []
    exact: list[list[Tensor]] | None = None
    for v in variants(dense, calibration):
        outcome, kept = measure(v, tokens, exact)
        exact = kept if exact is None else exact
        outcomes.append(outcome)
        print(
            f"{v.name}: {math.exp(outcome.nats[:, 2].mean()):.3f} at loops 8, error {outcome.error[7]:.4f}", flush=True
        )
    weights = sum(w.K * w.N for n, w in dense.weights.items() if n != "embed")
    print(perplexities(outcomes, weights), errors(outcomes), sep="\n\n")
    if args.plot:
        plot(outcomes, args.plot)
    rows = [{"name": o.name, "bytes": o.block_bytes, "error": o.error.tolist(), "nats": o.nats.mean(0).tolist()}
            for o in outcomes]  # fmt: skip
    print(json.dumps({"bench": "looped_study", "tokens": tokens[:, 1:].numel(), "loops": LOOPS, "rows": rows}))


if __name__ == "__main__":
    main()
