"""The command line. A command parses, calls one function of the library, and prints what it returns."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from . import __version__, cli_quantize
from .errors import InputError
from .terminal import Guarded, bar, say, stdout

if TYPE_CHECKING:
    from .generate import Generation, Options
    from .model import Model
    from .score import Score

app = typer.Typer(
    cls=Guarded, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)

ModelFile = Annotated[Path, typer.Argument(metavar="FILE", help="A .tinyloop file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or cuda:1 for a second GPU.")]
_DTYPES = "float32, bfloat16, float16 (GPU only), or auto: float16 on a GPU, bfloat16 on a CPU that multiplies it."
Dtype = Annotated[str, typer.Option(help=_DTYPES)]
Loops = Annotated[int | None, typer.Option(help="Loop count of a looped model. [default: the file's]")]


def main() -> None:
    app(prog_name="tinyloop")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tinyloop {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """4-bit asymmetric language models, looped and ordinary, from file to perplexity and text.

    \b
    tinyloop demo                                     see it work
    tinyloop import model.gguf model.tinyloop         bring a model
    tinyloop score model.tinyloop book.txt            measure it
    tinyloop generate model.tinyloop "Once upon"      use it
    """


@app.command(name="import")
def import_(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="A .gguf file or a Hugging Face folder.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The .tinyloop file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite DST.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a model of another format, without loss.

    \b
    tinyloop import SmolLM2-135M-Instruct.Q4_1.gguf smol.tinyloop
    tinyloop import ~/models/qwen3-0.6b qwen.tinyloop --force
    tinyloop import ~/models/Llama-3-8B-GPTQ llama.tinyloop
    """
    from . import container
    from .loading import import_model

    if dst.exists() and not force:  # before the work, not after it
        raise InputError(f"{dst} exists; give another name, or allow overwriting with --force")
    started = time.perf_counter()
    with bar("importing") as update:
        checkpoint = import_model(src, progress=update)
    with bar("writing") as update:
        container.write(checkpoint, dst, overwrite=force, progress=update)
    result = {"path": str(dst), "bytes": dst.stat().st_size, "seconds": round(time.perf_counter() - started, 3),
              "source": dict(checkpoint.source), "notes": list(checkpoint.notes)}  # fmt: skip
    if as_json:
        print(json.dumps(result))
        return
    print(f"{dst}: {result['bytes']:,} bytes in {result['seconds']:.1f} s")
    for note in checkpoint.notes:
        print(f"  {note}")


@app.command()
def export(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="A .tinyloop file, or what can be imported.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The Hugging Face folder to write.")],
    format: Annotated[str, typer.Option(help="gptq_v2, compressed-tensors, fp16 or bf16.")] = "gptq_v2",
    force: Annotated[bool, typer.Option("--force", help="Overwrite DST.")] = False,
    as_json: Json = False,
) -> None:
    """Write a model as a folder that other software reads.

    gptq_v2 and compressed-tensors keep every code, and need integer zero points; fp16 and bf16 round every weight.

    \b
    tinyloop export smol.tinyloop smol-bf16 --format bf16
    tinyloop export qwen.tinyloop qwen-gptq --format gptq_v2 --force
    """
    from .loading import export as exported

    started = time.perf_counter()
    with bar("exporting") as update:
        exported(src, dst, format, overwrite=force, progress=update)
    size = sum(file.stat().st_size for file in dst.iterdir())
    result = {"path": str(dst), "format": format, "bytes": size, "seconds": round(time.perf_counter() - started, 3)}
    print(json.dumps(result) if as_json else f"{dst}: {size:,} bytes in {result['seconds']:.1f} s")


app.command()(cli_quantize.quantize)


@app.command()
def inspect(file: ModelFile, as_json: Json = False) -> None:
    """Show what is in a file: architecture, loops, groups, bytes, tokenizer, source. Reads no weights.

    \b
    tinyloop inspect smol.tinyloop
    tinyloop inspect smol.tinyloop --json
    """
    from . import describing
    from .container import describe

    facts = describing.facts(describe(file))
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        stdout().print(*describing.render(facts), sep="\n")


@app.command()
def explain(
    file: ModelFile,
    rows: Annotated[list[int] | None, typer.Option("--rows", "-m", min=1, help="M; may be repeated.")] = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Show which kernel runs for each weight at M rows, and why each other one was refused.

    \b
    tinyloop explain smol.tinyloop
    tinyloop explain smol.tinyloop -m 1 -m 512 --dtype float32
    """
    from .explain import ROWS
    from .explain import explain as explained
    from .loading import load

    found = explained(load(file, device, _dtype(dtype), verify=False), tuple(rows or ROWS))
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        stdout().print(found)


@app.command()
def score(
    file: ModelFile,
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="UTF-8 files; - is standard input.")],
    window: Annotated[int | None, typer.Option(help="Tokens a pass reads. [default: 1024, or the context]")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens a pass scores. [default: the window]")] = None,
    bos: Annotated[str, typer.Option(help="First token of every window: auto, none, or its spelling.")] = "auto",
    loops: Loops = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Perplexity and bits per byte of texts. Ctrl-C shows the score so far.

    \b
    tinyloop score smol.tinyloop book.txt
    tinyloop score smol.tinyloop a.txt b.txt --window 512 --stride 256 --dtype float32
    cat *.txt | tinyloop score smol.tinyloop - --json
    """
    from .score import Protocol, ScoreInterrupted

    for text in texts:  # before the model is loaded
        if str(text) != "-" and not text.is_file():
            raise InputError(f"{text} is {'a folder' if text.is_dir() else 'not there'}; give a text file")
    model = _load(file, device, dtype)
    protocol = Protocol(window, stride, _bos(model, bos), loops)
    scores: list[tuple[Path, Score]] = []
    try:
        for text in texts:
            scores.append((text, _score_one(model, text, protocol)))
    except ScoreInterrupted as stopped:
        scores.append((texts[len(scores)], stopped.partial))
        _print_scores(model, scores, as_json)
        raise
    _print_scores(model, scores, as_json)


def _score_one(model: Model, text: Path, protocol: Any) -> Score:
    from .score import score as scored

    with bar(f"scoring {text.name}") as update:

        def show(so_far: Score, part: float | None) -> None:
            note = f"perplexity {so_far.perplexity:.2f}, {so_far.tokens_per_second:.0f} tokens/s"
            update(int(1000 * (part or 0)), 1000 if part else 0, note)  # type: ignore[call-arg]

        source = sys.stdin.buffer if str(text) == "-" else text
        return scored(model, source, protocol, progress=show)


def _print_scores(model: Model, scores: list[tuple[Path, Score]], as_json: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    first = scores[0][1]
    dtype = str(model.dtype).removeprefix("torch.")
    begins = None if first.bos is None or model.tokenizer is None else model.tokenizer.decode([first.bos], False)
    if as_json:
        shared = {"dtype": dtype} | {name: getattr(first, name) for name in ("window", "stride", "bos", "loops")}
        print(json.dumps({**shared, "scores": [{"text": str(text), **_numbers(s)} for text, s in scores]}))
        return
    table = Table("text", "perplexity", "bits/byte", "tokens", "bytes", "tokens/s")
    for text, s in scores:
        name = f"{text} (PARTIAL: interrupted)" if s.partial else str(text)
        perplexity, bits = (f"{n:.4f}" if n is not None else "" for n in (_finite(s.perplexity), s.bits_per_byte))
        table.add_row(escape(name), perplexity, bits, f"{s.tokens:,}", f"{s.bytes:,}", f"{s.tokens_per_second:.0f}")
    stdout().print(table)
    head = f"{begins} (id {first.bos}) first in each" if begins else "no token put before them"
    loops = f", {first.loops} loops" if first.loops else ""
    windows = f"Windows of {first.window} tokens, {head}, {first.stride} scored in each; nothing carried over"
    print(f"{windows}; {dtype}{loops}.")


def _numbers(s: Score) -> dict[str, Any]:
    values = {"perplexity": _finite(s.perplexity), "bits_per_byte": s.bits_per_byte, "nll": s.nll, "tokens": s.tokens}
    rest = {"bytes": s.bytes, "seconds": s.seconds, "tokens_per_second": s.tokens_per_second, "partial": s.partial}
    return values | rest


def _finite(x: float) -> float | None:
    return x if x == x else None


def _bos(model: Model, spelling: str) -> int | bool | None:
    if spelling in ("auto", "none"):
        return None if spelling == "auto" else False
    found = None if model.tokenizer is None else model.tokenizer.id_of(spelling)
    if found is None:
        raise InputError(f"--bos {spelling!r} is no token of this model; give auto, none, or a token's exact spelling")
    return found


@app.command()
def generate(
    file: ModelFile,
    prompt: Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="Text; without it, standard input.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template; without PROMPT, converse.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="At most so many new tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Only the k most probable; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the most probable with this share together.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only those this fraction as probable as the best.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help=r"End before this text (\n is a line break); repeatable.")
    ] = None,
    loops: Loops = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Show text as it comes.")] = True,
    as_json: Json = False,
) -> None:
    """Continue a prompt, or converse.

    \b
    tinyloop generate smol.tinyloop "Once upon a time" --max-tokens 100
    tinyloop generate smol.tinyloop --chat
    tinyloop generate smol.tinyloop "Name a colour." --chat --temperature 0.8 --top-p 0.9 --seed 7
    echo "A list:" | tinyloop generate smol.tinyloop --stop '\\n\\n' --json
    """
    from .generate import Chat, Options
    from .sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    stops = tuple(s.replace("\\n", "\n").replace("\\t", "\t") for s in stop or ())
    options = Options(max_tokens, sampling, stops, loops)
    if system is not None and not chat:
        raise InputError("--system needs --chat; or write it into the prompt")
    if chat and prompt is None and as_json:
        raise InputError("--json needs a PROMPT; a conversation is for people")
    if prompt is None and not chat:
        prompt = _stdin_text()
    model = _load(file, device, dtype)
    if chat and prompt is None:
        from .chatting import converse

        converse(Chat(model, options, system))
        return
    _generate_one(model, _messages(prompt or "", system) if chat else prompt or "", options, stream, as_json)


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def _stdin_text() -> str:
    if sys.stdin.isatty():
        raise InputError('no prompt; give one, as in: tinyloop generate FILE "Once upon a time", or use --chat')
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt on standard input is not UTF-8: byte {error.start}; convert it first") from error


def _generate_one(model: Model, prompt: Any, options: Options, stream: bool, as_json: bool) -> None:
    from .generate import generate as generated

    pieces = generated(model, prompt, options)
    try:
        for piece in pieces:
            if stream and not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
    finally:
        if not as_json:
            print("" if stream else pieces.result.text, flush=True)
    if as_json:
        print(json.dumps(_outcome(pieces.result), ensure_ascii=False))
    elif pieces.result.note:
        say(f"tinyloop: stopped, {pieces.result.note}")
    elif sys.stderr.isatty():
        r = pieces.result
        say(f"({len(r.tokens)} tokens, {r.tokens_per_second:.0f} tokens/s, ended by {r.finish})")


def _outcome(r: Generation) -> dict[str, Any]:
    counts = {"text": r.text, "tokens": list(r.tokens), "finish": r.finish, "prompt_tokens": r.prompt_tokens}
    times = {"prefill_seconds": r.prefill_seconds, "decode_seconds": r.decode_seconds}
    return counts | times | {"tokens_per_second": r.tokens_per_second, "note": r.note}


@app.command()
def demo(
    model: Annotated[Path | None, typer.Option(help="The looped model's folder. [default: the bundled one]")] = None,
    save: Annotated[Path | None, typer.Option(help="Keep the GPTQ model under this name.")] = None,
    smollm2: Annotated[bool, typer.Option("--smollm2", help="Show SmolLM2-135M instead: 93 MB, once.")] = False,
    cache: Annotated[Path | None, typer.Option(help="Where SmolLM2 is kept. [default: the user's cache]")] = None,
    as_json: Json = False,
) -> None:
    """Quantise the bundled looped model, score it in fp16 and 4 bits, and let it write; offline.

    With --smollm2: download SmolLM2-135M, import it without loss, score a text, write one, and show the numbers.

    \b
    tinyloop demo
    tinyloop demo --save looped.tinyloop
    tinyloop demo --smollm2
    """
    from . import demo as looped
    from . import demo_smollm2

    found = demo_smollm2.run(cache) if smollm2 else looped.run(model, save)
    if as_json:
        print(json.dumps(found))
    else:
        stdout().print(*(demo_smollm2 if smollm2 else looped).render(found), sep="\n")


def _load(file: Path, device: str, dtype: str) -> Model:
    from .loading import load

    with bar("loading") as update:
        return load(file, device, _dtype(dtype), progress=update)


def _dtype(name: str) -> torch.dtype | None:
    known = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise InputError(f"--dtype {name} is none of {', '.join(known)}")
    return known[name]
