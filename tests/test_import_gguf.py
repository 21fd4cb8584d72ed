"""GGUF import: every value against `gguf.dequantize`, the rotation order against its definition, refusals by text."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tinyloop.errors import FormatError, InputError, UnsupportedError
from tinyloop.importers import import_model
from tinyloop.importers.gguf_tokenizer import _PRE, read_tokenizer
from tinyloop.model import Model
from tinyloop.rope import resolve
from tinyloop.tokenizer import Tokenizer
from tinyloop.weight import DenseWeight, QuantWeight

gguf = pytest.importorskip("gguf")
FIXTURES = Path(__file__).parent / "fixtures" / "gguf"
sys.path.insert(0, str(FIXTURES.parent))
import make_checkpoints as made  # noqa: E402

D, F, HEADS, KV, HEAD_DIM, V, LAYERS = 64, 96, 4, 2, 16, 288, 2
SHAPES = {  # theirs → [N, K]
    "attn_q": (HEADS * HEAD_DIM, D), "attn_k": (KV * HEAD_DIM, D), "attn_v": (KV * HEAD_DIM, D),
    "attn_output": (D, HEADS * HEAD_DIM), "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F),
}  # fmt: skip
OURS = {"attn_output": "attn_out", "ffn_gate": "mlp_gate", "ffn_up": "mlp_up", "ffn_down": "mlp_down"}
SMOLLM2 = sorted((Path(__file__).parents[1] / ".cache" / "smollm2").glob("*.gguf"))


def tokens() -> tuple[list[str], list[int], list[str]]:
    """Byte alphabet, three merges, controls first; padded to V."""
    from tokenizers import pre_tokenizers

    texts = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    merges = ["h e", "l l", "he ll"]
    texts += sorted(pre_tokenizers.ByteLevel.alphabet()) + [m.replace(" ", "") for m in merges]
    kinds = [3, 3, 3, 4] + [1] * (len(texts) - 4)
    return texts, kinds, merges


def default_fields(writer: Any) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    texts, kinds, merges = tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")


Quantised = tuple[np.ndarray, Any]


def default_tensors(types: dict[str, str] | None = None) -> dict[str, Quantised]:
    """name → (data, type). `types` says the type of a tensor by a part of its name; the rest is Q4_1, tables Q8_0."""
    rng = np.random.default_rng(0)
    tensors: dict[str, Quantised] = {"output_norm.weight": (rng.normal(1, 0.1, D).astype(np.float32), None)}
    shapes = {"token_embd": (V, D)} | {
        f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()
    }
    for name, shape in shapes.items():
        kind = next((v for k, v in (types or {}).items() if k in name), "Q8_0" if name == "token_embd" else "Q4_1")
        tensors[f"{name}.weight"] = quantised(rng.normal(0, 0.05, shape).astype(np.float32), kind)
    for i in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{name}.weight"] = (rng.normal(1, 0.1, D).astype(np.float32), None)
    return tensors


def quantised(values: np.ndarray, kind: str) -> Quantised:
    if kind == "F32":
        return values, None
    if kind == "F16":
        return values.astype(np.float16), None
    qtype = gguf.GGMLQuantizationType[kind]
    if kind == "Q4_K":  # the package reads this type only: random blocks, of which every one is valid
        rng = np.random.default_rng(len(values))
        blocks = rng.integers(0, 256, (len(values), values.shape[1] // 256, 144), dtype=np.uint8)
        d = rng.uniform(0.001, 0.002, (*blocks.shape[:2], 2)).astype(np.float16)
        blocks[..., :4] = d.view(np.uint8)
        return blocks.reshape(len(values), -1), qtype
    return gguf.quants.quantize(values, qtype), qtype


def write(
    path: Path,
    tensors: dict[str, Quantised] | None = None,
    fields: Callable[[Any], None] | None = None,
    architecture: str = "llama",
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    default_fields(writer)
    if fields:
        fields(writer)
    for name, (data, kind) in (tensors or default_tensors()).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def expected(tensors: dict[str, Quantised], name: str) -> torch.Tensor:  # fp32 [K, N], rows of q and k in head order
    data, kind = tensors[f"{name}.weight"]
    W = data.astype(np.float32) if kind is None else gguf.dequantize(data, kind)
    heads = {"attn_q": HEADS, "attn_k": KV}.get(name.split(".")[-1])
    if heads:
        # Row (h, 2i + half) of the file is row (h, half·head_dim/2 + i) of ours.
        order = [h * HEAD_DIM + 2 * i + half for h in range(heads) for half in (0, 1) for i in range(HEAD_DIM // 2)]
        W = W[order]
    return torch.from_numpy(np.ascontiguousarray(W)).t()


def expected_all(tensors: dict[str, Quantised]) -> dict[str, torch.Tensor]:
    want = {"embed": expected(tensors, "token_embd")}
    if "output.weight" in tensors:
        want["head"] = expected(tensors, "output")
    for i in range(LAYERS):
        parts = [expected(tensors, f"blk.{i}.attn_{n}") for n in "qkv"]
        want[f"layers.{i}.attn_qkv"] = torch.cat(parts, dim=1)
        want |= {f"layers.{i}.{ours}": expected(tensors, f"blk.{i}.{theirs}") for theirs, ours in OURS.items()}
    return want


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_0", "Q8_0", "F16", "BF16", "F32", "Q5_1"])
def test_every_weight_equals_dequantize(tmp_path: Path, kind: str) -> None:
    tensors = default_tensors({"blk": kind, "token_embd": kind})
    checkpoint = import_model(write(tmp_path / "m.gguf", tensors))
    want = expected_all(tensors)
    assert checkpoint.weights.keys() == want.keys()
    for name, W in want.items():
        assert torch.equal(checkpoint.weights[name].dequantize(), W), name
    w = checkpoint.weights["layers.1.attn_qkv"]
    if kind in ("Q4_1", "Q4_0"):
        assert isinstance(w, QuantWeight)
        assert (w.bits, w.group_size, w.integer_zero, w.scale.dtype) == (4, 32, kind == "Q4_0", torch.float16)
        assert w.packed.is_contiguous()
        assert not checkpoint.notes[1:]
    else:
        assert isinstance(w, DenseWeight)
        assert w.weight.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
        table = checkpoint.weights["embed"]
        assert isinstance(table, QuantWeight) == (kind == "Q8_0")
        counted = {"Q8_0": "14 tensors of type Q8_0", "Q5_1": "15 tensors of type Q5_1"}.get(kind)
        assert any(counted in note for note in checkpoint.notes) if counted else len(checkpoint.notes) == 1


@pytest.mark.parametrize("kind", made.GGUF)
def test_files_of_the_original_quantiser(kind: str) -> None:
    """Blocks by llama.cpp: values against the package's dequantiser, the order of rows by transformers' logits."""
    path = FIXTURES / f"{kind}.gguf"
    checkpoint = import_model(path)
    stored = {t.name.removesuffix(".weight"): t for t in gguf.GGUFReader(path).tensors}
    assert {t.tensor_type.name for t in stored.values()} >= {kind, "F32"}
    for theirs, ours in ({"token_embd": "embed"} | {f"blk.0.{t}": f"layers.0.{o}" for t, o in OURS.items()}).items():
        w = checkpoint.weights[ours]
        assert isinstance(w, QuantWeight)
        W = gguf.dequantize(stored[theirs].data, stored[theirs].tensor_type)
        assert torch.equal(w.dequantize(), torch.from_numpy(W).t()), ours
    qkv = checkpoint.weights["layers.0.attn_qkv"]
    assert isinstance(qkv, QuantWeight)
    rows = [gguf.dequantize(stored[f"blk.0.attn_{n}"].data, stored[f"blk.0.attn_{n}"].tensor_type) for n in "qkv"]
    order = [h * 16 + 2 * i + half for h in range(3) for half in (0, 1) for i in range(8)] + [*range(48, 64)]
    assert torch.equal(qkv.dequantize(), torch.from_numpy(np.concatenate(rows)[order]).t())
    logits, want = Model(checkpoint, torch.float32).logits(made.TOKENS), load_file(FIXTURES / "expected.safetensors")
    assert float((logits - want[f"{kind}.logits"]).norm() / want[f"{kind}.logits"].norm()) < 1e-6


def test_two_levels_of_scales_stay_codes() -> None:
    """Q4_K against the package's own dequantiser; d·s needs up to 17 bits, so parameters are fp32."""
    from tinyloop.importers.gguf import _affine

    data, kind = quantised(np.empty((96, 768), np.float32), "Q4_K")
    w = _affine(data, "Q4_K", None)
    assert (w.K, w.N, w.group_size, w.bits, w.integer_zero) == (768, 96, 32, 4, False)
    assert w.scale.dtype == torch.float32
    assert torch.equal(w.dequantize(), torch.from_numpy(gguf.dequantize(data, kind)).t())


def test_q4_k_in_a_file(tmp_path: Path) -> None:
    """Blocks of 256 along K, so a model with a hidden size of 256; rows of q and k are put in order as codes."""
    rng = np.random.default_rng(0)
    norm = (np.ones(256, np.float32), None)
    shapes = {"token_embd": (V, 256)} | {f"blk.0.{n}": (N * 256 // D, 256) for n, (N, _) in SHAPES.items()}
    shapes["blk.0.ffn_up"] = shapes["blk.0.ffn_gate"] = (512, 256)
    shapes["blk.0.ffn_down"] = (256, 512)
    tensors = {f"{n}.weight": quantised(rng.normal(0, 1, s).astype(np.float32), "Q4_K") for n, s in shapes.items()}
    tensors |= {f"{n}.weight": norm for n in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}

    def fields(writer: Any) -> None:
        for key, value in (("block_count", 1), ("embedding_length", 256), ("feed_forward_length", 512)):
            writer.kv_data[0][f"llama.{key}"].value = value

    checkpoint = import_model(write(tmp_path / "m.gguf", tensors, fields))
    assert all(isinstance(w, QuantWeight) for w in checkpoint.weights.values())
    for ours, theirs in OURS.items():
        W = torch.from_numpy(gguf.dequantize(*tensors[f"blk.0.{ours}.weight"])).t()
        assert torch.equal(checkpoint.weights[f"layers.0.{theirs}"].dequantize(), W)
    data, kind = tensors["blk.0.attn_q.weight"]
    order = [h * 64 + 2 * i + half for h in range(HEADS) for half in (0, 1) for i in range(32)]
    W = torch.from_numpy(gguf.dequantize(data, kind)[order]).t()
    assert torch.equal(checkpoint.weights["layers.0.attn_qkv"].dequantize()[:, :256], W)


def test_tables_of_eight_bits_stay_eight_bits(tmp_path: Path) -> None:
    tensors = default_tensors()
    tensors["output.weight"] = quantised(np.random.default_rng(1).normal(0, 1, (V, D)).astype(np.float32), "Q8_0")
    checkpoint = import_model(write(tmp_path / "m.gguf", tensors))
    assert not checkpoint.config.tie_word_embeddings
    for ours, theirs in (("embed", "token_embd"), ("head", "output")):
        w = checkpoint.weights[ours]
        assert isinstance(w, QuantWeight)
        assert (w.bits, w.group_size) == (8, 32)
        assert torch.equal(w.dequantize(), expected(tensors, theirs))


def test_large_scales_leave_fp16_rather_than_a_bit(tmp_path: Path) -> None:
    tensors = default_tensors({"token_embd": "Q8_0"})
    data, kind = tensors["token_embd.weight"]
    data.reshape(V, -1, 34)[3, 1, :2] = np.float16(1000.0).reshape(1).view(np.uint8)  # −128·1000 is no fp16
    checkpoint = import_model(write(tmp_path / "m.gguf", tensors))
    w = checkpoint.weights["embed"]
    assert w.scale.dtype == torch.float32
    assert torch.equal(w.dequantize(), torch.from_numpy(gguf.dequantize(data, kind)).t())


def test_floats_that_fit_fp16_are_halved(tmp_path: Path) -> None:
    tensors = default_tensors({"ffn_up": "F32"})
    data, kind = tensors["blk.0.ffn_up.weight"]
    tensors["blk.0.ffn_up.weight"] = data.astype(np.float16).astype(np.float32), kind
    checkpoint = import_model(write(tmp_path / "m.gguf", tensors))
    assert checkpoint.weights["layers.0.mlp_up"].weight.dtype == torch.float16
    assert checkpoint.weights["layers.1.mlp_up"].weight.dtype == torch.float32
    assert torch.equal(checkpoint.weights["layers.0.mlp_up"].dequantize(), expected(tensors, "blk.0.ffn_up"))


def test_qkv_of_different_types_become_dense_with_a_note(tmp_path: Path) -> None:
    tensors = default_tensors({"attn_v": "Q5_1"})
    checkpoint = import_model(write(tmp_path / "m.gguf", tensors))
    w = checkpoint.weights["layers.0.attn_qkv"]
    assert isinstance(w, DenseWeight)
    assert torch.equal(w.dequantize(), expected_all(tensors)["layers.0.attn_qkv"])
    assert "blk.0.attn_v.weight Q5_1: of different types, kept together in floating point." in checkpoint.notes[1]


def test_biases_follow_their_rows(tmp_path: Path) -> None:
    tensors = default_tensors()
    biases = {n: np.arange(SHAPES[f"attn_{n}"][0], dtype=np.float32) for n in "qkv"}
    for i in range(LAYERS):
        tensors |= {f"blk.{i}.attn_{n}.bias": (b, None) for n, b in biases.items()}
    checkpoint = import_model(write(tmp_path / "m.gguf", tensors))
    bias = checkpoint.weights["layers.1.attn_qkv"].bias
    assert bias is not None
    assert bias[:HEAD_DIM].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert torch.equal(bias[-KV * HEAD_DIM :], torch.from_numpy(biases["v"]))
    del tensors["blk.1.attn_k.bias"]
    with pytest.raises(FormatError, match=r"blk\.1\.attn_q\.bias is there, but not every one of"):
        import_model(write(tmp_path / "n.gguf", tensors))


def test_configuration_source_and_norms(tmp_path: Path) -> None:
    tensors = default_tensors()
    ticks: list[tuple[int, int]] = []
    checkpoint = import_model(write(tmp_path / "m.gguf", tensors), lambda done, total: ticks.append((done, total)))
    config = checkpoint.config
    assert (config.hidden_size, config.intermediate_size, config.vocab_size, config.num_layers) == (D, F, V, LAYERS)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, KV, HEAD_DIM)
    assert (config.rms_norm_eps, config.max_position_embeddings, config.tie_word_embeddings) == (1e-5, 128, True)
    assert config.loops is None
    assert checkpoint.source == {"format": "gguf", "file": "m.gguf", "name": "tiny", "license": "apache-2.0"}
    assert torch.equal(checkpoint.norms["layers.1.mlp_norm"], torch.from_numpy(tensors["blk.1.ffn_norm.weight"][0]))
    assert ticks == [(i, 11) for i in range(1, 12)]


def rope_of(path: Path, **scaling: Any) -> Any:
    def fields(writer: Any) -> None:
        for key, value in scaling.items():
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(f"llama.rope.{key.replace('scaling_', 'scaling.')}", value)

    return import_model(write(path, fields=fields)).config.rope


def test_rope_scaling_keys(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    plain, linear = resolve({}, HEAD_DIM, 128), resolve({"rope_type": "linear", "factor": 4.0}, HEAD_DIM, 128)
    assert rope_of(path).inv_freq == plain.inv_freq
    assert rope_of(path, scaling_type="none", scaling_factor=4.0).inv_freq == plain.inv_freq
    assert rope_of(path, scaling_type="linear", scaling_factor=4.0).inv_freq == linear.inv_freq
    assert rope_of(path, scale_linear=4.0).inv_freq == linear.inv_freq
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    read = rope_of(path, scaling_type="yarn", scaling_factor=4.0, scaling_original_context_length=32)
    want = resolve(yarn, HEAD_DIM, 128)
    assert (read.inv_freq, read.attention_scaling) == (want.inv_freq, want.attention_scaling)
    read = rope_of(path, scaling_type="yarn", scaling_factor=4.0, scaling_attn_factor=0.5)
    assert read.attention_scaling == pytest.approx(0.5 * want.attention_scaling, rel=1e-12)
    with pytest.raises(UnsupportedError, match=r"llama\.rope\.scaling\.type='longrope' is not supported"):
        rope_of(path, scaling_type="longrope", scaling_factor=4.0)


def test_rope_freqs_divide_the_frequencies(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, HEAD_DIM // 2).astype(np.float32)
    tensors = default_tensors() | {"rope_freqs.weight": (divisors, None)}
    rope = import_model(write(tmp_path / "m.gguf", tensors)).config.rope
    want = torch.tensor(resolve({}, HEAD_DIM, 128).inv_freq) / torch.from_numpy(divisors)
    assert rope.inv_freq == tuple(want.tolist())
    tensors["rope_freqs.weight"] = (divisors[:-1], None)
    with pytest.raises(FormatError, match=r"rope_freqs\.weight has 7 values"):
        import_model(write(tmp_path / "n.gguf", tensors))


def test_tokenizer(tmp_path: Path) -> None:
    checkpoint = import_model(write(tmp_path / "m.gguf"))
    data = checkpoint.tokenizer
    assert data is not None
    texts, _, _ = tokens()
    assert (data.bos, data.eos, data.add_bos) == (1, (2, 0), False)
    assert data.special == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = Tokenizer(data)
    ids = tokenizer.encode("<|im_start|>hello 42<think>é<|im_end|>")
    shown = [texts[i] for i in ids]
    assert shown == ["<|im_start|>", "hell", "o", "Ġ", "4", "2", "<think>", "Ã", "©", "<|im_end|>"]
    assert tokenizer.decode(ids) == "hello 42<think>é"
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "hi"
    assert "score text with it first" in checkpoint.notes[0]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", " 12345", "'", "S", "\r\n", "\n", "x"]),
        ("llama-bpe", ["a", " ", "123", "45", "'S", "\r\n\n", "x"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", "5", "'S", "\r\n\n", "x"]),
        ("smollm", ["a", " ", "1", "2", "3", "4", "5", "'", "S", "\r\n", "\n", "x"]),
    ],
)
def test_text_is_cut_as_the_file_names_it(pre: str, pieces: list[str]) -> None:
    text = "a 12345'S\r\n\nx"
    cut = [text[a:b] for _, (a, b) in _PRE[pre][0].pre_tokenize_str(text)]
    assert cut == pieces


def sentencepiece_fields(**changes: Any) -> dict[str, Any]:
    """Bytes, single characters, and pieces of which "ab" has a better score than "bc"."""
    pieces = ["▁", "a", "b", "c", "ab", "bc", "▁ab"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    fields = {"model": "llama", "tokens": texts, "scores": scores, "token_type": kinds, "bos_token_id": 1,
              "eos_token_id": 2, "unknown_token_id": 0} | changes  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    fields = sentencepiece_fields()
    data, notes = read_tokenizer(fields, 300)
    assert data is not None
    assert (data.bos, data.eos, data.add_bos, notes) == (1, (2,), True, [])
    tokenizer, texts = Tokenizer(data), fields["tokenizer.ggml.tokens"]

    def pieces(text: str) -> list[str]:
        return [texts[i] for i in tokenizer.encode(text)]

    assert pieces("ab") == ["<s>", "▁ab"]
    assert pieces("cbc") == ["<s>", "▁", "c", "bc"]
    assert pieces("cabc") == ["<s>", "▁", "c", "ab", "c"]
    assert pieces("bc é</s>") == ["<s>", "▁", "bc", "▁", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" abc  é")) == " abc  é"
    plain, _ = read_tokenizer(sentencepiece_fields(add_space_prefix=False, add_bos_token=False), 300)
    assert plain is not None
    assert [texts[i] for i in Tokenizer(plain).encode("ab")] == ["ab"]


def test_sentencepiece_refusals() -> None:
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.remove_extra_whitespaces is set"):
        read_tokenizer(sentencepiece_fields(remove_extra_whitespaces=True), 300)
    with pytest.raises(FormatError, match="266 tokens, 0 scores and 266 types"):
        read_tokenizer(sentencepiece_fields(scores=[]), 300)
    with pytest.raises(FormatError, match="has 1 tokens twice"):
        read_tokenizer(sentencepiece_fields(tokens=["a"] * 2, scores=[0.0] * 2, token_type=[1] * 2), 300)
    with pytest.raises(FormatError, match="266 tokens of 266 types for an embedding of 100 rows"):
        read_tokenizer(sentencepiece_fields(), 100)


def replacing(key: str, add: Callable[[Any], None]) -> Callable[[Any], None]:
    def fields(writer: Any) -> None:
        for shard in writer.kv_data:
            shard.pop(key, None)
        add(writer)

    return fields


REFUSED_FIELDS: list[tuple[Callable[[Any], None], type[Exception], str]] = [
    (lambda w: w.add_uint32("llama.expert_count", 8), UnsupportedError, r"llama\.expert_count=8; .* does 0 only"),
    (lambda w: w.add_uint32("llama.num_loops", 4), UnsupportedError, r"llama\.num_loops=4 is not known"),
    (lambda w: w.add_float32("llama.logit_scale", 2.0), UnsupportedError, r"llama\.logit_scale=2\.0 is not known"),
    (lambda w: w.add_uint32("llama.attention.value_length", 8), UnsupportedError, r"value_length=8 differs from the"),
    (lambda w: w.add_uint32("llama.rope.dimension_count", 8), UnsupportedError, r"rope\.dimension_count=8 differs"),
    (lambda w: w.add_uint16("split.count", 3), UnsupportedError, "one of 3 parts; join them"),
    (replacing("tokenizer.ggml.pre", lambda w: w.add_tokenizer_pre("tekken")), UnsupportedError,
     r"tokenizer\.ggml\.pre='tekken' is not supported; known are gpt-2"),
    (replacing("tokenizer.ggml.pre", lambda w: None), UnsupportedError, r"tokenizer\.ggml\.pre=None"),
    (replacing("tokenizer.ggml.model", lambda w: w.add_tokenizer_model("bert")), UnsupportedError,
     r"tokenizer\.ggml\.model='bert' is not supported"),
    (replacing("tokenizer.ggml.merges", lambda w: w.add_token_merges(["q q"])), FormatError, "merges do not fit"),
    (replacing("tokenizer.ggml.eos_token_id", lambda w: w.add_eos_token_id(9999)), FormatError,
     "eos_token_id=9999 is not in"),
    (replacing("llama.block_count", lambda w: None), FormatError, r"llama\.block_count=None must be a whole number"),
    (replacing("llama.block_count", lambda w: w.add_block_count(3)), FormatError, r"blk\.2\.attn_q\.weight is missing"),
    (replacing("llama.attention.head_count_kv", lambda w: w.add_head_count_kv([1, 2])), UnsupportedError,
     "head_count_kv differs between layers"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "error", "text"), REFUSED_FIELDS, ids=[t for _, _, t in REFUSED_FIELDS])
def test_metadata_refusals(tmp_path: Path, fields: Callable[[Any], None], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        import_model(write(tmp_path / "m.gguf", fields=fields))


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"general\.architecture='gemma' is not supported"):
        import_model(write(tmp_path / "m.gguf", architecture="gemma"))


def test_tensor_refusals(tmp_path: Path) -> None:
    def read(change: dict[str, Quantised]) -> None:
        import_model(write(tmp_path / "m.gguf", default_tensors() | change))

    zeros = np.zeros((8, D), np.float32)
    with pytest.raises(UnsupportedError, match=r"1 tensors have no place .* the first is blk\.0\.ffn_gate_inp\.weight"):
        read({"blk.0.ffn_gate_inp.weight": (zeros, None)})
    with pytest.raises(FormatError, match=r"blk\.0\.attn_k\.weight has 8 rows; the configuration needs 32"):
        read({"blk.0.attn_k.weight": quantised(zeros, "Q4_1")})
    with pytest.raises(UnsupportedError, match=r"output_norm\.weight is BF16"):
        read({"output_norm.weight": quantised(np.ones(D, np.float32), "BF16")})
    rows, kind = quantised(np.ones(SHAPES["ffn_up"], np.float32), "Q4_1")
    rows.reshape(F, -1, 20)[0, 0, :2] = np.float16(np.nan).reshape(1).view(np.uint8)
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_up\.weight \(Q4_1\): scale has 1 values that are NaN"):
        read({"blk.1.ffn_up.weight": (rows, kind)})
    tensors = default_tensors()
    del tensors["token_embd.weight"]
    path = write(tmp_path / "n.gguf", tensors)
    with pytest.raises(FormatError, match=r"token_embd\.weight is missing"):
        import_model(path)


@pytest.mark.parametrize("keep", [3, 20, 3000, -40000, -1])
def test_truncated_files(tmp_path: Path, keep: int) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:keep])
    with pytest.raises(FormatError, match=r"truncated or damaged|no model that can be imported"):
        import_model(cut)


def test_what_is_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="nothing is not there"):
        import_model(tmp_path / "nothing")
    with pytest.raises(
        FormatError, match=r"no model that can be imported; what is read: a \.gguf file of arch.*; a folder"
    ):
        import_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(FormatError, match="give the folder that holds it"):
        import_model(tmp_path / "model.safetensors")
    path = write(tmp_path / "m.gguf")
    with pytest.raises(FormatError, match=r"the folder has no config\.json, but m\.gguf"):
        import_model(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedError, match=re.escape("pip install tinyloop[gguf]")):
        import_model(path)


@pytest.mark.skipif(not SMOLLM2, reason="the SmolLM2 file is not in .cache/smollm2")
def test_smollm2() -> None:
    checkpoint = import_model(SMOLLM2[0])
    reader = gguf.GGUFReader(SMOLLM2[0])
    config, tensors = checkpoint.config, {t.name: t for t in reader.tensors}
    assert (config.num_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.eos == (2, 0)
    assert Tokenizer(checkpoint.tokenizer).encode("The capital of France is 42") == [
        504,
        3575,
        282,
        4649,
        314,
        216,
        36,
        34,
    ]
    for ours, theirs in (("embed", "token_embd"), ("layers.7.mlp_down", "blk.7.ffn_down")):
        t = tensors[f"{theirs}.weight"]
        want = torch.from_numpy(gguf.dequantize(t.data, t.tensor_type)).t()
        assert torch.equal(checkpoint.weights[ours].dequantize(), want)
    assert sum(isinstance(w, QuantWeight) for w in checkpoint.weights.values()) == 151


def test_a_damaged_number_of_layers_is_refused(tmp_path: Path) -> None:
    def fields(writer: Any) -> None:
        writer.kv_data[0]["llama.block_count"].value = 1 << 31

    with pytest.raises(FormatError, match="more than 10000 layers are taken for a damaged file"):
        import_model(write(tmp_path / "m.gguf", fields=fields))
