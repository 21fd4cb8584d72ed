"""Trains a small looped language model from plain text and writes it as a checkpoint folder.

In: a folder of .txt or .txt.xz files (works may be separated by a line `<|endoftext|>`), a held-out file of the same
form, and a number of minutes. Out: a checkpoint folder (see looped_model.py) and a curve of held-out bits per byte.

    python examples/train_looped.py --text DIR --heldout FILE --out DIR --minutes 10
    python examples/looped_model.py DIR --heldout FILE

The second command reads the folder back and scores it.

Why this way. The model is a plain Llama whose middle layer runs `loops` times, so that a file of 12 M parameters does
the work of ten layers. Half the steps use the nominal loop count, the others a count drawn from 1 to twice that, so
that each count from 1 to 16 gives a sensible model. The learning rate follows the clock: whatever the machine, a run
ends on time with its decay complete. Ctrl-C, or `--until 0.5`, keeps the state; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from looped_model import BOS, BOS_TEXT, Model, Params, Shape, Work, bits_per_byte, heldout_works, read_works, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    minutes: float
    until: float = 1.0
    batch: int = 64
    matrix_lr: float = 0.02
    vector_lr: float = 0.003
    weight_decay: float = 0.1
    momentum: float = 0.95
    ema: float = 0.998
    hold: float = 0.4  # share of the schedule at full rate; then linear to zero
    seed: int = 0


def pieces(works: Sequence[str], size: int = 1 << 16) -> Iterator[str]:
    """The same text in parts that end at a line end, so that the tokenizer can use every core."""
    for work in works:
        start = 0
        while start < len(work):
            cut = work.find("\n", start + size)
            end = len(work) if cut < 0 else cut + 1
            yield work[start:end]
            start = end


def train_tokenizer(works: Sequence[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TEXT],  # takes id 0 = BOS
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces(works), trainer)
    return tokenizer


def encode(works: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """All works in one stream [n] uint16, each after a BOS."""
    stream: list[np.ndarray] = []
    for work in works:
        stream.append(np.array([BOS], np.uint16))
        stream += [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch_fast(list(pieces([work])))]
    return np.concatenate(stream)


def initial_params(s: Shape, seed: int) -> Params:
    """fp32 under Llama names. What writes into the residual stream starts at zero, so each block starts as identity."""
    g = torch.Generator().manual_seed(seed)
    D, F_ = s.hidden_size, s.intermediate_size
    q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
    rows = {"self_attn.q": q, "self_attn.k": kv, "self_attn.v": kv, "mlp.gate": F_, "mlp.up": F_}
    params = {"model.embed_tokens.weight": torch.randn(s.vocab_size, D, generator=g) * 0.02}
    for i in range(s.pre_layers + s.loop_layers + s.coda_layers):
        at = f"model.layers.{i}"
        params[f"{at}.input_layernorm.weight"] = torch.ones(D)
        params[f"{at}.post_attention_layernorm.weight"] = torch.ones(D)
        for name, n in rows.items():
            params[f"{at}.{name}_proj.weight"] = torch.randn(n, D, generator=g) * D**-0.5
        params[f"{at}.self_attn.o_proj.weight"] = torch.zeros(D, q)
        params[f"{at}.mlp.down_proj.weight"] = torch.zeros(D, F_)
    params["model.norm.weight"] = torch.ones(D)
    return params


def orthogonal(g: Tensor) -> Tensor:
    """[n, a, b] → about U·Vᵀ of each matrix, by five Newton–Schulz steps in bf16."""
    tall = g.shape[1] > g.shape[2]
    x = (g.mT if tall else g).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).to(g.dtype)


class Optimizer:
    """Muon for the matrices of the blocks, Adam for the embedding and the norms, and an average of all weights."""

    def __init__(self, params: Params, recipe: Recipe):
        self.params, self.recipe, self.steps = params, recipe, 0
        matrices = [n for n, p in params.items() if ".layers." in n and p.ndim == 2]
        shapes = sorted({tuple(params[n].shape) for n in matrices})
        self.groups = {shape: [n for n in matrices if params[n].shape == shape] for shape in shapes}
        self.momentum = {n: torch.zeros_like(params[n]) for n in matrices}
        vectors = [p for n, p in params.items() if n not in self.momentum]
        self.adam = torch.optim.AdamW(vectors, lr=recipe.vector_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.average = {n: p.detach().clone() for n, p in params.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        r = self.recipe
        for (rows, cols), names in self.groups.items():
            grads = torch.stack([self.params[n].grad for n in names])
            momentum = torch.stack([self.momentum[n] for n in names]).lerp_(grads, 1 - r.momentum)
            lr = r.matrix_lr * rate
            update = orthogonal(grads.lerp(momentum, r.momentum)) * max(1.0, rows / cols) ** 0.5
            for n, m, u in zip(names, momentum, update, strict=True):
                self.momentum[n].copy_(m)
                self.params[n].mul_(1 - lr * r.weight_decay).sub_(u, alpha=lr)
        self.adam.param_groups[0]["lr"] = r.vector_lr * rate
        self.adam.step()
        self.steps += 1
        weight = max(1 - r.ema, 1 / self.steps)
        torch._foreach_lerp_(list(self.average.values()), [p.data for p in self.params.values()], weight)
        for p in self.params.values():
            p.grad = None

    def state(self) -> dict:
        return {"params": self.params, "average": self.average, "momentum": self.momentum, "steps": self.steps,
                "adam": self.adam.state_dict()}  # fmt: skip

    @torch.no_grad()
    def restore(self, state: dict) -> None:
        for name in ("params", "average", "momentum"):
            for n, t in getattr(self, name).items():
                t.copy_(state[name][n])
        self.adam.load_state_dict(state["adam"])
        self.steps = state["steps"]


def windows(stream: Tensor, T: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets) [batch, T]: every epoch cuts the stream at another offset, in another order."""
    g = torch.Generator().manual_seed(seed)
    span = torch.arange(T, device=stream.device)
    while True:
        offset = int(torch.randint(T, (1,), generator=g))
        order = torch.randperm((len(stream) - offset) // T, generator=g) * T + offset
        for starts in order.to(stream.device).split(batch)[:-1] or [order.to(stream.device)]:
            targets = stream[starts[:, None] + span].long()
            yield F.pad(targets[:, :-1], (1, 0), value=BOS), targets


def rate_at(progress: float, hold: float) -> float:
    """Warm-up over 1 %, full rate until `hold`, then linear to zero."""
    return min(1.0, 0.02 + progress / 0.01, max(0.0, (1 - progress) / (1 - hold)))


class Trainer:
    def __init__(self, s: Shape, recipe: Recipe, out: Path, device: torch.device, began: float):
        self.shape, self.recipe, self.out, self.began = s, recipe, out, began
        self.model = Model(s, device, compiled=device.type == "cuda")
        params = {n: p.to(device).requires_grad_() for n, p in initial_params(s, recipe.seed).items()}
        self.optimizer = Optimizer(params, recipe)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.progress, self.stopped = 0.0, False
        if (state := out / "state" / "training.pt").exists():
            saved = torch.load(state, map_location=device, weights_only=True)
            if saved["shape"] != asdict(s):
                raise SystemExit(f"{state} is of another model, {saved['shape']}; use another --out or the same sizes")
            self.optimizer.restore(saved)
            self.progress = saved["progress"]
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self.stopped = True

    def step(self, batch: tuple[Tensor, Tensor], loops: int) -> Tensor:
        """Mean loss in nats per token, still on the device."""
        loss = self.model.nll(self.optimizer.params, *batch, loops, self.dtype) / batch[1].numel()
        loss.backward()
        self.optimizer.step(rate_at(self.progress, self.recipe.hold))
        return loss.detach()

    def heldout(self, works: Sequence[Work]) -> str:
        """Bits per byte of the averaged weights on each work."""
        nats = [
            self.model.score(self.optimizer.average, w, self.shape.loops, self.dtype, self.recipe.batch) for w in works
        ]
        return " ".join(f"{bits_per_byte(n, w):.4f}" for n, w in zip(nats, works, strict=True))

    def draw_loops(self, draw: random.Random) -> int:
        nominal = self.shape.loops
        return nominal if draw.random() < 0.5 else draw.randint(1, 2 * nominal)

    def run(self, stream: Tensor, works: Sequence[Work]) -> None:
        """Trains from the saved progress to `until`, which the clock reaches `minutes` after the program began."""
        r, T, seed = self.recipe, self.shape.max_position_embeddings, self.recipe.seed + self.optimizer.steps
        draw, batches = random.Random(seed), windows(stream, T, r.batch, seed)
        last = self.step(next(batches), self.shape.loops)
        self.heldout(works)  # compiled by now: the schedule's clock starts here
        start = shown = time.monotonic()
        first, seconds = self.progress, max(1.0, self.began + 60 * r.minutes - start)
        count, mean = 0, 0.0
        while self.progress < r.until and not self.stopped:
            loss = self.step(next(batches), self.draw_loops(draw))
            value, last, count = last.item(), loss, count + 1  # waits for the step before, so the clock stays honest
            mean += (value - mean) * max(0.02, 1 / count)
            now = time.monotonic()
            self.progress = first + (r.until - first) * min(1.0, (now - start) / seconds)
            if now - shown > 15 or self.progress >= r.until:
                shown, speed = now, count * r.batch * T / (now - start)
                clock = f"{self.progress:6.1%}  step {self.optimizer.steps}  {max(0, start + seconds - now):.0f} s left"
                print(
                    f"{clock}  {speed / 1e3:.0f}k tokens/s  loss {mean:.3f}  bits/byte {self.heldout(works)}",
                    flush=True,
                )

    def save_state(self) -> None:
        path = self.out / "state" / "training.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = {**self.optimizer.state(), "progress": self.progress, "shape": asdict(self.shape)}
        torch.save(saved, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def prepare(out: Path, text: Path, vocab_size: int) -> tuple[Tokenizer, np.ndarray]:
    """Tokenizer and token stream, kept beside the state so that a resumed run has the same ones."""
    folder = out / "state"
    if (folder / "tokens.npy").exists():
        return Tokenizer.from_file(str(folder / "tokenizer.json")), np.load(folder / "tokens.npy")
    folder.mkdir(parents=True, exist_ok=True)
    works = read_works(text)
    tokenizer = train_tokenizer(works, vocab_size)
    tokens = encode(works, tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    np.save(folder / "unfinished.npy", tokens)
    (folder / "unfinished.npy").replace(folder / "tokens.npy")
    return tokenizer, tokens


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder of training text")
    parser.add_argument("--heldout", type=Path, required=True, help="text that is never trained on")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder; delete state/ in it when done")
    parser.add_argument("--minutes", type=float, default=10.0, help="wall time of this run, preparation included")
    parser.add_argument("--until", type=float, default=1.0, help="share of the schedule at which this run ends")
    for name in ("batch", "matrix_lr", "vector_lr", "weight_decay", "seed"):
        default = getattr(Recipe, name)
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    for f in fields(Shape):
        parser.add_argument("--" + f.name.replace("_", "-"), type=type(f.default), default=f.default)
    return parser


def main() -> None:
    began = time.monotonic()
    args = vars(argument_parser().parse_args())
    shape = Shape(**{f.name: args[f.name] for f in fields(Shape)})
    recipe = Recipe(**{f.name: args[f.name] for f in fields(Recipe) if f.name in args})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, tokens = prepare(args["out"], args["text"], shape.vocab_size)
    works = heldout_works(args["heldout"], tokenizer)
    trainer = Trainer(shape, recipe, args["out"], device, began)
    size = sum(p.numel() for p in trainer.optimizer.params.values())
    print(f"{len(tokens) / 1e6:.1f} M tokens, {size / 1e6:.2f} M parameters, {recipe}", flush=True)
    if trainer.progress < recipe.until:
        trainer.run(torch.from_numpy(tokens.astype(np.int32)).to(device), works)
        trainer.save_state()
    save_model(args["out"], shape, trainer.optimizer.average, tokenizer)
    print(f"{trainer.progress:.1%} of the schedule done; averaged weights are in {args['out']}")


if __name__ == "__main__":
    main()
