"""Quantised folders: checkpoints packed by the software that owns each format, code by code; what contradicts itself,
and what gets refused with which sentence."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinyloop import container
from tinyloop.checkpoint import Checkpoint
from tinyloop.errors import FormatError, TinyLoopError, UnsupportedError
from tinyloop.importers import import_model
from tinyloop.importers.parts import reordered
from tinyloop.model import Model
from tinyloop.weight import DenseWeight, QuantWeight, pack_nibbles

FIXTURES = Path(__file__).parent / "fixtures"
sys.path.insert(0, str(FIXTURES))
import make_checkpoints as made  # noqa: E402

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
LAYER = "model.layers.0."
PARTS = {
    "attn_qkv": [f"self_attn.{n}_proj" for n in "qkv"], "attn_out": ["self_attn.o_proj"],
    "mlp_gate": ["mlp.gate_proj"], "mlp_up": ["mlp.up_proj"], "mlp_down": ["mlp.down_proj"],
}  # fmt: skip
Q, DOWN = f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.down_proj"


def fixture(kind: str, to: Path, change: Callable[[Tensors], Any] | None = None, **settings: Any) -> Path:
    """A copy of a checkpoint, its tensors changed, and its quantisation settings; ... removes one."""
    to.mkdir(exist_ok=True)
    tensors = load_file(FIXTURES / kind / "model.safetensors")
    if change:
        change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, to / "model.safetensors")
    values = json.loads((FIXTURES / kind / "config.json").read_text())
    key = "quantization" if kind == "mlx" else "quantization_config"
    values[key] = {k: v for k, v in (values[key] | settings).items() if v is not ...}
    (to / "config.json").write_text(json.dumps(values))
    return to


def reconfigure(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def truths(kind: str, ours: str) -> list[made.Truth]:
    shapes = made.linears()
    return [made.truth(kind, f"{LAYER}{part}", *shapes[f"{LAYER}{part}"]) for part in PARTS[ours]]


def input_codes(w: QuantWeight) -> Tensor:  # uint8 [K, N], in the order of the inputs
    return w.codes() if w.perm is None else w.codes()[w.perm.argsort()]


def zero_points(w: QuantWeight) -> Tensor:  # fp32 [groups, N]
    return -w.zero.float() / w.scale.float()


def refused(folder: Path, error: type[TinyLoopError], text: str) -> None:
    with pytest.raises(error, match=text):
        import_model(folder)


def notes(checkpoint: Checkpoint) -> list[str]:
    return [note for note in checkpoint.notes if "tokenizer" not in note]


# --- what the original packers made ---


@pytest.mark.parametrize("kind", [kind for kind in made.KINDS if kind != "mlx"])
def test_every_code_and_parameter(kind: str) -> None:
    checkpoint = import_model(FIXTURES / kind)
    for ours in PARTS:
        w, parts = checkpoint.weights[f"layers.0.{ours}"], truths(kind, ours)
        assert isinstance(w, QuantWeight)
        assert w.integer_zero
        assert w.group_size == parts[0].group
        assert (w.perm is not None) == made.KINDS[kind].act_order
        assert torch.equal(input_codes(w), torch.cat([t.q for t in parts], dim=1)), ours
        assert torch.equal(w.scale.float(), torch.cat([t.scale for t in parts], dim=1).float()), ours
        assert torch.equal(zero_points(w).round(), torch.cat([t.z for t in parts], dim=1).float()), ours
        assert torch.equal(w.dequantize(), torch.cat([t.weight for t in parts]).t()), ours
    assert notes(checkpoint) == []
    assert checkpoint.source["quantisation"] == {"gp": "gptq", "aw": "awq", "ct": "compressed-tensors"}[kind[:2]]


@pytest.mark.parametrize("kind", made.KINDS)
def test_weights_and_logits_are_the_packers_own(kind: str) -> None:
    """Its dequantiser rounds products to fp16; the one of compressed-tensors works in fp32 and is matched exactly."""
    checkpoint = import_model(FIXTURES / kind)
    expected = load_file(FIXTURES / kind / "expected.safetensors")
    W, want = checkpoint.weights["layers.0.attn_qkv"].dequantize()[:, :32], expected[f"{Q}.weight"].t()
    ulp = 0 if want.dtype == torch.float32 else 2**-11
    if kind == "mlx":  # q·scale is rounded before the sum
        assert ((W - want.float()).abs() <= 2**-11 * (16 * 0.2 + W.abs())).all()
    else:
        assert ((W - want.float()).abs() <= ulp * W.abs()).all()
    logits = Model(checkpoint, torch.float32).logits(made.TOKENS)
    error = float((logits - expected["logits"]).norm() / expected["logits"].norm())
    assert error <= (1e-6 if ulp == 0 else 4 * 2**-11)


@pytest.mark.parametrize("kind", ["gptq-act-order", "awq", "mlx"])
def test_file_holds_what_was_imported(tmp_path: Path, kind: str) -> None:
    checkpoint = import_model(FIXTURES / kind)
    read = container.read(container.write(checkpoint, tmp_path / "m.tinyloop"))
    for name, w in checkpoint.weights.items():
        assert torch.equal(read.weights[name].dequantize(), w.dequantize())
    assert checkpoint.nbytes == read.nbytes


def test_mlx_is_our_formula() -> None:
    checkpoint, tensors = import_model(FIXTURES / "mlx"), load_file(FIXTURES / "mlx" / "model.safetensors")
    w = checkpoint.weights["layers.0.mlp_down"]
    assert isinstance(w, QuantWeight)
    assert not w.integer_zero
    assert torch.equal(w.scale, tensors[f"{DOWN}.scales"].t())
    assert torch.equal(w.zero, tensors[f"{DOWN}.biases"].t())


@pytest.mark.parametrize("group", [128, -1])
def test_marlins_order(tmp_path: Path, group: int) -> None:
    """k and down as AutoGPTQ's layer packs them; the others, of other codes, by `marlin_pack_symmetric`."""
    from tinyloop.marlin import marlin_pack_symmetric

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
             "num_key_value_heads": 4, "vocab_size": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
             "tie_word_embeddings": True, "model_type": "llama", "hidden_act": "silu"}  # fmt: skip
    g = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(8, 256, generator=g), "model.norm.weight": torch.ones(256)}
    tensors |= {f"{LAYER}{n}_layernorm.weight": torch.ones(256) for n in ("input", "post_attention")}
    codes: dict[str, tuple[Tensor, Tensor]] = {}
    theirs, truth = load_file(FIXTURES / "marlin" / "linear.safetensors"), made.marlin_truths()[group]
    for module in made.linears():
        tensors[f"{module}.workspace"] = torch.zeros(4, dtype=torch.int32)
        if module in (f"{LAYER}self_attn.k_proj", DOWN):
            codes[module] = truth.q, truth.scale
            tensors[f"{module}.B"], tensors[f"{module}.s"] = theirs["B"].clone(), theirs[f"s.{group}"].clone()
            continue
        q = torch.randint(0, 16, (256, 256), generator=g, dtype=torch.uint8)
        scale = (torch.rand(1 if group == -1 else 2, 256, generator=g) + 0.5).half()
        codes[module] = q, scale
        tensors[f"{module}.B"], tensors[f"{module}.s"] = marlin_pack_symmetric(q, scale, group)
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quant_method": "gptq", "checkpoint_format": "marlin", "bits": 4, "group_size": group}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"quantization_config": settings}))
    checkpoint = import_model(tmp_path)
    for ours, names in PARTS.items():
        w = checkpoint.weights[f"layers.0.{ours}"]
        assert isinstance(w, QuantWeight)
        assert torch.equal(w.codes(), torch.cat([codes[LAYER + name][0] for name in names], dim=1))
        assert torch.equal(w.scale, torch.cat([codes[LAYER + name][1] for name in names], dim=1))
        assert torch.equal(w.zero, -8 * w.scale)
    W = checkpoint.weights["layers.0.mlp_down"].dequantize()
    assert torch.equal(W.half(), truth.weight.half().t())  # what AutoGPTQ's layer was given to pack
    save_file(tensors | {f"{Q}.s": tensors[f"{Q}.s"][:, :128].clone()}, tmp_path / "model.safetensors")
    refused(tmp_path, FormatError, r"q_proj\.s is torch\.float16 .* needs float16")
    save_file(tensors | {f"{Q}.B": tensors[f"{Q}.B"][:, :100].clone()}, tmp_path / "model.safetensors")
    refused(tmp_path, FormatError, r"q_proj\.B has shape \[16, 100\]; it needs \[a multiple of 8, a multiple of 128\]")


def test_test_vectors_of_the_formats() -> None:
    """Eight codes 0 … 7 along the packed axis are the word 76543210₁₆; AWQ's columns 0 … 7 are 75316420₁₆."""
    from tinyloop.importers import awq, parts

    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    pairs = torch.tensor([0x10, 0x32, 0x54, 0x76], dtype=torch.uint8)
    assert parts.lanes(word).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert torch.equal(parts.codes_along_columns(word)[:, 0], pairs)
    assert torch.equal(parts.codes_along_rows(word, 8)[:, 0], pairs)
    assert awq.in_order(parts.lanes(torch.tensor([[0x75316420]], dtype=torch.int32))).tolist() == [[*range(8)]]
    # IMP-01: what AutoAWQ reads out of 76543210₁₆.
    assert awq._codes(word).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]


# --- one checkpoint in many shapes ---


def shard(folder: Path) -> list[Path]:
    """Split model.safetensors in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, files = sorted(tensors), [folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for file, half in zip(files, halves, strict=True):
        save_file({name: tensors[name] for name in half}, file)
    index = {name: file.name for file, half in zip(files, halves, strict=True) for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return files


def same(a: Checkpoint, b: Checkpoint) -> bool:
    return all(torch.equal(a.weights[n].dequantize(), b.weights[n].dequantize()) for n in a.weights)


@pytest.mark.parametrize("kind", ["gptq-act-order", "ct-asym"])
def test_load03_shards(tmp_path: Path, kind: str) -> None:
    folder = fixture(kind, tmp_path)
    shard(folder)
    assert same(import_model(folder), import_model(FIXTURES / kind))


def test_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    """quantize_config.json, as AutoGPTQ writes it: no method, and a model file named after the settings."""
    folder = fixture("gptq-act-order", tmp_path)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    del settings["quant_method"]
    reconfigure(folder, quantization_config=...)
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-16g.safetensors")
    assert same(import_model(folder), import_model(FIXTURES / "gptq-act-order"))
    folder = fixture("awq", tmp_path / "awq")
    reconfigure(folder, quantization_config=...)
    (folder / "quant_config.json").write_text(
        json.dumps({"w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"})
    )
    assert same(import_model(folder), import_model(FIXTURES / "awq"))


def test_imp02_g_idx(tmp_path: Path) -> None:
    """Missing and trivial are one; out of range, negative and uneven are errors."""
    plain = import_model(fixture("gptq-sym", tmp_path, lambda t: [t.pop(n) for n in list(t) if n.endswith("g_idx")]))
    assert same(plain, import_model(FIXTURES / "gptq-sym"))

    def with_order(values: Tensor) -> Path:
        return fixture("gptq-sym", tmp_path, lambda t: t.update({f"{DOWN}.g_idx": values}))

    order = torch.arange(64, dtype=torch.int32) // 16
    refused(with_order(order + 1), FormatError, r"down_proj: g_idx spans 1\.\.4; K=64, group 16 has groups 0\.\.3")
    refused(with_order(order - 1), FormatError, r"down_proj: g_idx spans -1\.\.2; .* groups 0\.\.3")
    refused(with_order(order * 0), FormatError, r"down_proj: g_idx gives group 0 64 inputs; every group has 16")
    refused(
        with_order(order[:-1]), FormatError, r"down_proj\.g_idx is torch\.int32 \[63\]; .* needs int32 or int64 \[64\]"
    )
    refused(with_order(order.float()), FormatError, r"down_proj\.g_idx is torch\.float32 \[64\]")
    lost = fixture("gptq-act-order", tmp_path, lambda t: t.pop(f"{DOWN}.g_idx"))
    refused(lost, FormatError, r"down_proj has no g_idx, but desc_act is true")


def test_orders_of_q_k_and_v_that_differ_become_dense(tmp_path: Path) -> None:
    def swap(t: Tensors) -> None:
        t[f"{LAYER}self_attn.k_proj.g_idx"] = t[f"{LAYER}self_attn.k_proj.g_idx"].flip(0)

    checkpoint = import_model(fixture("gptq-act-order", tmp_path, swap))
    w = checkpoint.weights["layers.0.attn_qkv"]
    assert isinstance(w, DenseWeight)
    q, k, v = truths("gptq-act-order", "attn_qkv")
    swapped = made.Truth(k.q, k.z, k.scale, k.g_idx.flip(0), k.group)
    assert torch.equal(w.weight, torch.cat([q.weight, swapped.weight, v.weight]))
    assert re.search(r"inputs have different orders, .* one dense weight .*q_proj, .*v_proj\.$", notes(checkpoint)[0])
    assert isinstance(checkpoint.weights["layers.0.mlp_down"], QuantWeight)
    assert Model(checkpoint, torch.float32).logits(made.TOKENS).isfinite().all()


def keep_dense(kind: str, module: str) -> Callable[[Tensors], None]:
    """A module as its writer leaves one out."""

    def change(t: Tensors) -> None:
        for name in [n for n in t if n.startswith(f"{module}.")]:
            del t[name]
        t[f"{module}.weight"] = made.truth(kind, module, *made.linears()[module]).weight.half()

    return change


@pytest.mark.parametrize("kind", ["gptq-sym", "awq", "ct-asym"])
def test_imp06_modules_that_stay_dense(tmp_path: Path, kind: str) -> None:
    checkpoint = import_model(fixture(kind, tmp_path, keep_dense(kind, DOWN), modules_to_not_convert=["down_proj"]))
    w = checkpoint.weights["layers.0.mlp_down"]
    assert isinstance(w, DenseWeight)
    assert torch.equal(w.weight, truths(kind, "mlp_down")[0].weight.half())
    assert isinstance(checkpoint.weights["layers.0.mlp_up"], QuantWeight)


def test_a_dense_k_beside_quantised_q_and_v(tmp_path: Path) -> None:
    k = f"{LAYER}self_attn.k_proj"
    checkpoint = import_model(fixture("gptq-sym", tmp_path, keep_dense("gptq-sym", k)))
    w, parts = checkpoint.weights["layers.0.attn_qkv"], truths("gptq-sym", "attn_qkv")
    assert isinstance(w, DenseWeight)
    assert torch.equal(w.weight, torch.cat([parts[0].weight, parts[1].weight.half().float(), parts[2].weight]))
    assert "Not all have codes" in notes(checkpoint)[0]


def test_imp06_overrides(tmp_path: Path) -> None:
    """A group size of its own, by GPTQModel's pattern: here k has one group, q and v two each."""
    k = f"{LAYER}self_attn.k_proj"

    def one_group(t: Tensors) -> None:
        t[f"{k}.scales"], t[f"{k}.qzeros"] = t[f"{k}.scales"][:1], t[f"{k}.qzeros"][:1]
        t[f"{k}.g_idx"] = t[f"{k}.g_idx"] * 0

    dynamic = {r"-:.*lm_head.*": {}, r"+:.*\.k_proj": {"group_size": 32}}
    checkpoint = import_model(fixture("gptq-sym", tmp_path, one_group, dynamic=dynamic))
    w, (q, k_, v) = checkpoint.weights["layers.0.attn_qkv"], truths("gptq-sym", "attn_qkv")
    assert isinstance(w, QuantWeight)
    assert w.group_size == 16
    alone = made.Truth(k_.q, k_.z[:1], k_.scale[:1], k_.g_idx * 0, 32)
    assert torch.equal(w.dequantize(), torch.cat([q.weight, alone.weight, v.weight]).t())
    refused(fixture("gptq-sym", tmp_path, dynamic={r".*\.mlp\.": {"bits": 8}}), UnsupportedError,
            r"mlp\.gate_proj: dynamic bits=8 is not read; codes have 4 bits")  # fmt: skip
    checkpoint = import_model(fixture("gptq-sym", tmp_path, dynamic={r"-:.*\.mlp\.": {}}))
    assert notes(checkpoint) == [f"dynamic says not quantised, the file has codes: read as codes: {LAYER}mlp.gate_proj "
                                 "and 2 more."]  # fmt: skip


def test_ignored_modules_with_codes_are_read_as_codes(tmp_path: Path) -> None:
    for kind, settings in (("awq", {"modules_to_not_convert": ["down_proj"]}), ("ct-asym", {"ignore": [r"re:.*down"]})):
        checkpoint = import_model(fixture(kind, tmp_path, **settings))
        assert isinstance(checkpoint.weights["layers.0.mlp_down"], QuantWeight)
        assert "the file has codes: read as codes" in notes(checkpoint)[0]


def test_schemes_of_compressed_tensors(tmp_path: Path) -> None:
    """The scheme that names a module comes before the one for all linears."""
    one, all_ = made.ct_group(False, 64), made.ct_group(False, 16)
    wrong = fixture("ct-asym", tmp_path, config_groups={"a": all_, "b": one | {"targets": [r"re:.*down_proj"]}})
    refused(wrong, FormatError, r"down_proj\.weight_scale is .* \[32, 4\]; .* group 64 needs .* \[32, 1\]")
    refused(fixture("ct-asym", tmp_path, config_groups={"a": one | {"targets": [DOWN]}}), FormatError,
            r"q_proj has codes, but no config_groups target fits it")  # fmt: skip
    right = fixture("ct-asym", tmp_path, config_groups={"a": one, "b": all_ | {"targets": [r"re:.*proj"]}})
    assert same(import_model(right), import_model(FIXTURES / "ct-asym"))


def test_a_sparsity_that_says_dense_changes_nothing(tmp_path: Path) -> None:
    folder = fixture("ct-asym", tmp_path, sparsity_config={"format": "dense", "targets": []})
    assert same(import_model(folder), import_model(FIXTURES / "ct-asym"))


def test_imp10_zero_points_of_older_releases(tmp_path: Path) -> None:
    def unpacked(t: Tensors) -> None:
        for module, shape in made.linears().items():
            t[f"{module}.weight_zero_point"] = (made.truth("ct-asym", module, *shape).z.to(torch.int8) - 8).t()

    assert same(import_model(fixture("ct-asym", tmp_path, unpacked)), import_model(FIXTURES / "ct-asym"))


@pytest.mark.parametrize("z", [100, -100, 120, 8, -9])
def test_zero_points_beyond_four_bits_are_refused(tmp_path: Path, z: int) -> None:
    name = f"{DOWN}.weight_zero_point"
    folder = fixture("ct-asym", tmp_path, lambda t: t.update({name: torch.full((32, 4), z, dtype=torch.int8)}))
    refused(folder, FormatError, rf"{re.escape(name)} holds {z}; zero points of 4 bits lie in -8\.\.7: copy the file")


@pytest.mark.parametrize("N", [16, 12])  # shifted in words of eight bytes, and byte by byte
@pytest.mark.parametrize("K", [300, 61])
def test_codes_in_another_order(K: int, N: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(16, (K, N), generator=generator, dtype=torch.uint8)
    perm = torch.randperm(K, generator=generator)
    packed, want = pack_nibbles(q), pack_nibbles(q[perm])
    for given in (packed, packed.t().contiguous().t()):
        assert torch.equal(reordered(given, perm.to(torch.int32)), want)


def test_g_idx_of_compressed_tensors(tmp_path: Path) -> None:
    t = truths("ct-asym", "mlp_down")[0]
    g_idx = t.g_idx[torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    folder = fixture("ct-asym", tmp_path, lambda x: x.update({f"{DOWN}.weight_g_idx": g_idx.int()}))
    w = import_model(folder).weights["layers.0.mlp_down"]
    assert torch.equal(w.dequantize(), made.Truth(t.q, t.z, t.scale, g_idx, 16).weight.t())


def test_inputs_that_fill_no_word(tmp_path: Path) -> None:
    """weight_shape cuts the padding: K = 61 of 64, the last group short, the last byte half."""

    def cut(t: Tensors) -> None:
        t[f"{DOWN}.weight_shape"] = torch.tensor([32, 61])

    folder = fixture("ct-asym", tmp_path, cut)
    with pytest.raises(FormatError, match=r"mlp_down is K=61, N=32; the configuration needs K=64, N=32"):
        import_model(folder)
    from tinyloop.importers.parts import codes_along_rows

    words = load_file(FIXTURES / "ct-asym" / "model.safetensors")[f"{DOWN}.weight_packed"]
    packed = codes_along_rows(words, 61)
    assert packed.shape == (31, 32)
    assert (packed[-1] == truths("ct-asym", "mlp_down")[0].q[60]).all()


def test_biases(tmp_path: Path) -> None:
    """Of zeros, which some writers give every linear: left out. Others are kept, though the configuration has none."""

    def add(t: Tensors) -> None:
        for module, (_, N) in made.linears().items():
            t[f"{module}.bias"] = torch.zeros(N, dtype=torch.float16)
        t[f"{LAYER}self_attn.k_proj.bias"] += 1
        t[f"{DOWN}.bias"] += 2

    weights = import_model(fixture("gptq-sym", tmp_path, add)).weights
    qkv, down = weights["layers.0.attn_qkv"].bias, weights["layers.0.mlp_down"].bias
    assert qkv is not None
    assert down is not None
    assert qkv.tolist() == [0] * 32 + [1] * 32 + [0] * 32
    assert down.tolist() == [2] * 32
    assert weights["layers.0.mlp_up"].bias is None
    assert import_model(FIXTURES / "awq").weights["layers.0.attn_qkv"].bias is not None
    missing = fixture("awq", tmp_path, lambda t: t.pop(f"{Q}.bias"))
    refused(missing, FormatError, r"tensor .*q_proj\.bias is missing")
    refused(fixture("gptq-sym", tmp_path, lambda t: t.update({f"{DOWN}.bias": torch.zeros(7)})), FormatError,
            r"down_proj\.bias is torch\.float32 \[7\]; its module needs .* \[32\]")  # fmt: skip


# --- labels that contradict the data ---


def nibbles(words: Tensor, values: Tensor) -> Tensor:
    """`words` with other lanes: uint8 [groups, N]."""
    lanes = values.to(torch.int64).view(len(values), -1, 8) << torch.arange(0, 32, 4)
    return lanes.sum(-1).to(torch.uint32).view(torch.int32).view(words.shape)


def with_zeros(value: Tensor | int, kind: str = "gptq-sym") -> Callable[[Tensors], None]:
    """Stored zeros of every linear; a tensor is repeated along both axes."""

    def change(t: Tensors) -> None:
        for module, (_, N) in made.linears().items():
            name = f"{module}.qzeros"
            groups = t[name].shape[0]
            pattern = torch.as_tensor(value).reshape(-1).repeat(groups * N)[: groups * N].view(groups, N)
            t[name] = nibbles(t[name], pattern)

    return change


@pytest.mark.parametrize(("stored", "label"), [(7, "gptq"), (8, "gptq_v2"), (8, "gptq"), (7, "gptq_v2")])
@pytest.mark.parametrize("sym", [True, False])
def test_grp10_version_labels(tmp_path: Path, stored: int, label: str, sym: bool) -> None:
    """Zeros that are all alike are 8, whichever version is named: 8 under v1 would be 9, 7 under v2 would be 7."""
    checkpoint = import_model(fixture("gptq-sym", tmp_path, with_zeros(stored), checkpoint_format=label, sym=sym))
    assert same(checkpoint, import_model(FIXTURES / "gptq-sym"))
    expected = (stored, label) in ((7, "gptq"), (8, "gptq_v2"))
    assert (notes(checkpoint) == []) == expected
    if not expected:
        assert re.search(
            r"Labelled gptq.*read as v[12]: model\.layers\.0\.self_attn\.q_proj and 6 more", notes(checkpoint)[0]
        )


def test_grp11_zero_points_0_8_and_15_survive(tmp_path: Path) -> None:
    """GPTQModel's word of v1 borrows from the lane above a 0."""
    z = torch.tensor([0, 8, 15, 0, 0, 1, 2, 15])
    word = sum(int(v) << 4 * i for i, v in enumerate(z)) - 0x11111111 & 0xFFFFFFFF
    stored = torch.tensor([word >> 4 * i & 15 for i in range(8)])
    assert stored.tolist() == [15, 6, 14, 15, 14, 15, 0, 14]
    for quantizer in ("gptqmodel:4.0", ["gptqmodel:4.0"]):
        meta = {"quantizer": quantizer}
        model = fixture("gptq-sym", tmp_path, with_zeros(stored), sym=False, meta=meta)
        w = import_model(model).weights["layers.0.mlp_down"]
        assert isinstance(w, QuantWeight)
        assert torch.equal(zero_points(w).round(), z.repeat(4, 4).float())
    refused(fixture("gptq-sym", tmp_path, with_zeros(stored), sym=False), FormatError,
            r'q_proj: \d+ zero points have two readings in format v1.* put "meta": \{"quantizer": "gptq')  # fmt: skip
    by_lane = import_model(
        fixture("gptq-sym", tmp_path, with_zeros(stored), sym=False, meta={"quantizer": "auto_gptq"})
    )
    w = by_lane.weights["layers.0.mlp_down"]
    assert isinstance(w, QuantWeight)
    assert torch.equal(zero_points(w).round(), (stored + 1 & 15).repeat(4, 4).float())


def test_grp11_autogptqs_overwritten_lanes_are_told(tmp_path: Path) -> None:
    """A 0 beside others: −1 of 32 bits covers the lanes above, and only there is nothing but 15 above a 15."""
    stored = torch.tensor([3, 6, 15, 15, 15, 15, 15, 15])
    checkpoint = import_model(fixture("gptq-sym", tmp_path, with_zeros(stored), sym=False))
    w = checkpoint.weights["layers.0.mlp_down"]
    assert isinstance(w, QuantWeight)
    assert zero_points(w)[0, :8].round().tolist() == [4, 7, 0, 0, 0, 0, 0, 0]
    assert "Zero points 0 in format v1: AutoGPTQ's word loses" in notes(checkpoint)[0]


def test_grp12_symmetric_label_on_asymmetric_zeros(tmp_path: Path) -> None:
    checkpoint = import_model(fixture("gptq-sym", tmp_path, with_zeros(torch.tensor([3, 7, 12]))))
    w = checkpoint.weights["layers.0.mlp_down"]
    assert isinstance(w, QuantWeight)
    assert set(zero_points(w).round().flatten().tolist()) == {4, 8, 13}
    assert "Labelled symmetric, but has zeros other than 8: read with its zeros" in notes(checkpoint)[0]
    refused(
        fixture("awq", tmp_path, zero_point=False), FormatError, "q_proj: zero_point is false, but qzeros are not all 8"
    )
    symmetric = {"config_groups": {"a": made.ct_group(True, 16)}}
    refused(
        fixture("ct-asym", tmp_path, **symmetric),
        FormatError,
        "q_proj is labelled symmetric, but has a weight_zero_point",
    )
    asymmetric = {"config_groups": {"a": made.ct_group(False, -1)}}
    refused(fixture("ct-sym", tmp_path, **asymmetric), FormatError, r"tensor .*q_proj\.weight_zero_point is missing")


# --- tied heads ---


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["absent", "the embedding", "another", "codes"])
def test_tied_flag_against_file_content(tmp_path: Path, tied: bool, head: str) -> None:
    def change(t: Tensors) -> None:
        embedding = t["model.embed_tokens.weight"]
        if head in ("the embedding", "another"):
            t["lm_head.weight"] = embedding.clone() * (1 if head == "the embedding" else 2)
        if head == "codes":
            up = {n.rpartition(".")[2]: v for n, v in t.items() if n.startswith(f"{LAYER}mlp.up_proj.")}
            t |= {f"lm_head.{n}": torch.cat((v, v), -1)[..., : v.shape[-1] * 48 // 64] for n, v in up.items()}
            t["lm_head.g_idx"] = up["g_idx"].clone()

    folder = fixture("gptq-sym", tmp_path, change)
    reconfigure(folder, tie_word_embeddings=tied)
    if head == "absent" and not tied:
        refused(folder, FormatError, "lm_head has no qweight, and no weight either; the checkpoint is incomplete")
        return
    checkpoint = import_model(folder)
    stays = tied and head in ("absent", "the embedding")
    assert checkpoint.config.tie_word_embeddings == stays
    assert ("head" in checkpoint.weights) == (not stays)
    assert any("another head: kept apart" in note for note in checkpoint.notes) == (tied and not stays)
    if head == "codes":
        assert isinstance(checkpoint.weights["head"], QuantWeight)


# --- what bad input gets ---


def test_load01_missing_shard_and_stale_index(tmp_path: Path) -> None:
    folder = fixture("gptq-act-order", tmp_path)
    files = shard(folder)
    whole = files[1].read_bytes()
    files[1].unlink()
    refused(folder, FormatError, r"model-00002-of-00002\.safetensors is missing; .* copy the shard again")
    files[1].write_bytes(whole[:-10])
    refused(folder, FormatError, r"model-00002-of-00002\.safetensors cannot be read .*truncated")
    files[1].write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": names | {f"{Q}.qweight": files[0].name}}))
    refused(folder, FormatError, rf"00001-of-00002\.safetensors does not hold tensor {Q}\.qweight, which")
    index.write_text(json.dumps({"weight_map": {k: v for k, v in names.items() if k != f"{Q}.qweight"}}))
    refused(folder, FormatError, rf"holds tensor {Q}\.qweight, which .* does not put there")


MISSING = {"gptq-sym": ("qweight", "qzeros", "scales"), "awq": ("qweight", "qzeros", "scales"),
           "ct-asym": ("weight_packed", "weight_zero_point", "weight_scale", "weight_shape"),
           "mlx": ("weight", "biases")}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in MISSING.items() for name in names])
def test_load01_missing_tensors(tmp_path: Path, kind: str, name: str) -> None:
    codes = "no qweight, and" if name == "qweight" else "no weight_packed, and" if name == "weight_packed" else None
    text = f"q_proj has {codes} no weight either" if codes else rf"tensor {Q}\.{name} is missing"
    refused(fixture(kind, tmp_path, lambda t: t.pop(f"{Q}.{name}")), FormatError, text)


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def change(t: Tensors) -> None:
        t[name] = make(t[name])

    return change


WRONG: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    ("gptq-sym", "qzeros", lambda t: t.float(), r"qzeros is torch\.float32 \[2, 4\]; K=32, N=32, group 16 needs int32"),
    ("gptq-sym", "qzeros", lambda t: t.to(torch.uint8), r"qzeros is torch\.uint8 \[2, 4\]; .* needs int32 \[2, 4\]"),
    ("gptq-sym", "qzeros", lambda t: t.t(), r"qzeros is torch\.int32 \[4, 2\]; .* needs int32 \[2, 4\]"),
    ("gptq-sym", "qzeros", lambda t: t.repeat(1, 8), r"qzeros is torch\.int32 \[2, 32\]; .* needs int32 \[2, 4\]"),
    ("gptq-sym", "qweight", lambda t: t.long(), r"qweight is torch\.int64 \[4, 32\]; a linear of 4-bit codes"),
    ("gptq-sym", "qweight", lambda t: t[0], r"qweight has shape \[32\]; it must have two sizes"),
    ("gptq-sym", "qweight", lambda t: t[:3], r"g_idx is .* \[32\]; K=24, N=32, group 16 needs .* \[24\]"),
    ("gptq-sym", "qweight", lambda t: t[:, :31], r"q_proj has N=31 columns: eight zeros share a word"),
    ("gptq-sym", "scales", lambda t: t[:1], r"scales is torch\.float16 \[1, 32\]; .* group 16 needs .* \[2, 32\]"),
    ("gptq-sym", "scales", lambda t: t.int(), r"scales is torch\.int32 \[2, 32\]; .* needs float16 or bfloat16"),
    ("gptq-sym", "scales", lambda t: t * float("nan"), r"q_proj: 64 scales are NaN or infinite"),
    ("awq", "qzeros", lambda t: t.half(), r"qzeros is torch\.float16 \[2, 4\]; .* needs int32"),
    ("awq", "qweight", lambda t: t.t(), r"scales is .* \[2, 32\]; K=4, N=256, group 4 needs"),
    ("ct-asym", "weight_zero_point", lambda t: t.half(), r"weight_zero_point is torch\.float16 .* int32 \[4, 2\]"),
    ("ct-asym", "weight_zero_point", lambda t: t[:3], r"weight_zero_point is torch\.int32 \[3, 2\]; .* \[4, 2\]"),
    ("ct-asym", "weight_packed", lambda t: t[:, :3], r"weight_packed is .* \[32, 3\]; weight_shape N=32, K=32"),
    ("ct-asym", "weight_shape", lambda t: t.float(), r"weight_shape is torch\.float32 \[2\]; .* needs int64"),
    ("ct-sym", "weight_scale", lambda t: t / 0, r"q_proj: 32 scales are NaN or infinite"),
    ("mlx", "scales", lambda t: t.repeat(1, 2), r"scales is .* \[32, 2\]; K=32, N=32, group 32 needs .* \[32, 1\]"),
    ("mlx", "biases", lambda t: t * float("inf"), r"q_proj: \d+ biases are NaN or infinite"),
    ("mlx", "weight", lambda t: t.to(torch.int64), r"weight is torch\.int64 \[32, 4\]; .* needs uint32"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "make", "text"), WRONG, ids=[f"{k} {t[:30]}" for k, _, _, t in WRONG])
def test_grp04_wrong_types_and_shapes(
    tmp_path: Path, kind: str, name: str, make: Callable[[Tensor], Tensor], text: str
) -> None:
    refused(fixture(kind, tmp_path, put(f"{Q}.{name}", make)), TinyLoopError, text)


def test_a_weight_beside_codes_is_refused(tmp_path: Path) -> None:
    folder = fixture("gptq-sym", tmp_path, lambda t: t.update({f"{Q}.weight": torch.zeros(32, 32)}))
    refused(folder, FormatError, r"q_proj\.weight stands beside .*q_proj\.qweight; remove the one that is out of date")


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    folder = fixture("awq", tmp_path, lambda t: t.update({f"{LAYER}mlp.act.scales": torch.ones(64)}))
    refused(folder, UnsupportedError, r"1 tensors have no place .* first is model\.layers\.0\.mlp\.act\.scales")


READ = r"GPTQ of 4 bits .*; AWQ of 4 bits .*; compressed-tensors pack-quantized .*; MLX affine"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gptq-sym", {"quant_method": "bitsandbytes"}, rf"quant_method='bitsandbytes', which is not read; read are {READ}"),
    ("gptq-sym", {"quant_method": "hqq"}, rf"quant_method='hqq', which is not read; read are {READ}"),
    ("gptq-sym", {"quant_method": "torchao"}, "quant_method='torchao', which is not read"),
    ("gptq-sym", {"quant_method": "auto-round"}, "quant_method='auto-round', which is not read"),
    ("gptq-sym", {"quant_method": 4}, "quant_method=4, which is not read"),
    ("gptq-sym", {"bits": 3}, "bits=3 is not read; codes have 4 bits"),
    ("gptq-sym", {"bits": ...}, "bits=None is not read"),
    ("gptq-sym", {"checkpoint_format": "bitblas"}, "checkpoint_format='bitblas' is not read; of GPTQ, read are"),
    ("gptq-sym", {"rotation": "hadamard"}, "rotation='hadamard' is not read"),
    ("gptq-sym", {"pack_dtype": "int8"}, "pack_dtype='int8' is not read"),
    ("awq", {"version": "gemv"}, "AWQ version 'gemv' is not read; of AWQ, read is the version gemm"),
    ("awq", {"version": "gemv_fast"}, "AWQ version 'gemv_fast' is not read"),
    ("awq", {"version": "marlin"}, "AWQ version 'marlin' is not read"),
    ("awq", {"bits": 8}, "bits=8 is not read"),
    ("ct-asym", {"format": "int-quantized"}, "compressed-tensors format 'int-quantized' is not read; read is pack"),
    ("ct-asym", {"format": "marlin-24"}, "format 'marlin-24' is not read"),
    ("ct-asym", {"transform_config": {"a": 1}}, "transform_config is set, which is not read"),
    ("ct-asym", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is set"),
    ("ct-asym", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is set"),
    ("mlx", {"bits": 8}, "q_proj: bits=8 is not read; codes have 4 bits"),
    ("mlx", {"mode": "mxfp4"}, "MLX mode 'mxfp4' is not read; read is affine"),
    ("mlx", {DOWN: {"bits": 6}}, "down_proj: bits=6 is not read"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "text"), REFUSED, ids=[t[:40] for _, _, t in REFUSED])
def test_imp09_methods_that_are_not_read(tmp_path: Path, kind: str, settings: dict[str, Any], text: str) -> None:
    refused(fixture(kind, tmp_path, **settings), UnsupportedError, text)


def scheme(**changes: Any) -> dict[str, Any]:
    group = made.ct_group(False, 16)
    weights = group["weights"] | {k: v for k, v in changes.items() if k not in group and k != "input_activations"}
    return group | {"weights": weights} | {k: v for k, v in changes.items() if k in ("input_activations", "format")}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_bits": 8}, "q_proj: num_bits=8, type=int is not read; codes are integers of 4 bits"),
        ({"type": "float"}, "num_bits=4, type=float is not read"),
        ({"strategy": "block"}, "strategy='block' is not read; read are group and channel"),
        ({"input_activations": {"num_bits": 8}}, "input_activations are quantised"),
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not read"),
    ],
)
def test_schemes_that_are_not_read(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    refused(fixture("ct-asym", tmp_path, config_groups={"a": scheme(**changes)}), UnsupportedError, text)


def test_settings_of_the_wrong_kind(tmp_path: Path) -> None:
    refused(fixture("ct-asym", tmp_path, config_groups=...), FormatError, "has no config_groups")
    refused(
        fixture("gptq-sym", tmp_path, group_size="a"), FormatError, "group_size='a' must be a whole number ≥ 1, or -1"
    )
    refused(fixture("gptq-sym", tmp_path, group_size=0), FormatError, "group_size=0 must be")
    folder = fixture("gptq-sym", tmp_path)
    reconfigure(folder, quantization_config="gptq")
    refused(folder, FormatError, "config.json has quantization_config='gptq'; it must be an object")


@pytest.mark.parametrize(("kind", "label", "text"), [
    ("gptq-sym", {"checkpoint_format": "marlin"}, r"says marlin, whose codes are named B, .*qweight, as gptq or awq"),
    ("gptq-sym", {"is_marlin_format": True}, r"config: quantization_config says marlin, .*; correct quant_method or"),
    ("awq", {"quant_method": "marlin"}, r"says marlin, whose codes are named B, .*qweight, as gptq or awq writes it"),
    ("ct-asym", {"quant_method": "gptq", "bits": 4}, r"says gptq, .* named qweight, .*weight_packed, as compressed"),
    ("gptq-sym", {"quant_method": "mlx"}, r"says mlx, whose codes are named weight, .*qweight, as gptq or awq"),
    ("mlx", {"quant_method": "awq"}, r"says awq, whose codes are named qweight, .*\.weight, as mlx writes it"),
])  # fmt: skip
def test_imp09_a_label_of_another_format(tmp_path: Path, kind: str, label: dict[str, Any], text: str) -> None:
    refused(fixture(kind, tmp_path, **label), FormatError, text.replace("config: ", r"config\.json: "))


@pytest.mark.parametrize(
    ("kind", "method"), [("gptq-sym", "GPTQ or AWQ"), ("ct-sym", "compressed-tensors"), ("mlx", "MLX")]
)
def test_codes_without_settings(tmp_path: Path, kind: str, method: str) -> None:
    folder = fixture(kind, tmp_path)
    reconfigure(folder, quantization_config=..., quantization=...)
    refused(folder, FormatError, rf"as {method} writes it, but no quantization_config .* quantize_config\.json or")


def test_bitsandbytes_is_told_by_its_tensors(tmp_path: Path) -> None:
    folder = fixture("gptq-sym", tmp_path, lambda t: t.update({f"{Q}.weight.absmax": torch.ones(4)}))
    reconfigure(folder, quantization_config=...)
    refused(folder, FormatError, r"q_proj\.weight\.absmax, as bitsandbytes writes it")


def test_settings_without_codes_are_a_dense_checkpoint(tmp_path: Path) -> None:
    """A folder that was dequantised, and kept its settings."""

    def dense(t: Tensors) -> None:
        for module in made.linears():
            keep_dense("gptq-sym", module)(t)

    checkpoint = import_model(fixture("gptq-sym", tmp_path, dense))
    assert all(isinstance(w, DenseWeight) for w in checkpoint.weights.values())


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    """Codes are deferred, and not kept; outlines know the sizes."""
    folder = fixture("ct-asym", tmp_path)
    checkpoint = import_model(folder)
    outline = checkpoint.outlines["layers.0.mlp_down"]
    assert isinstance(outline, QuantWeight)
    assert outline.packed.is_meta
    assert [w.nbytes for w in checkpoint.outlines.values()] == [w.nbytes for w in checkpoint.weights.values()]
    assert checkpoint.weights["layers.0.mlp_down"] is not checkpoint.weights["layers.0.mlp_down"]


# --- settings and shapes that nobody writes, and a damaged file may have ---


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        ("gptqmodel-v2", {"dynamic": "x"}, r"dynamic='x' must be an object"),
        ("gptqmodel-v2", {"sym": "false"}, r"sym='false' must be true or false"),
        ("gptqmodel-v2", {"desc_act": "no"}, r"desc_act='no' must be true or false"),
        ("gptqmodel-v2", {"is_marlin_format": "False"}, r"is_marlin_format='False' must be true or false"),
        ("gptqmodel-v2", {"dynamic": {"+:.*": 5}}, r"\+:\.\*=5 must be an object"),
        ("gptqmodel-v2", {"dynamic": {"[": {}}}, r"'\[' is no regular expression"),
        ("gptqmodel-v2", {"meta": [1]}, r"meta=\[1\] must be an object"),
        ("awq", {"modules_to_not_convert": 3.5}, r"modules_to_not_convert=3\.5 must be a list"),
        ("awq", {"zero_point": "false"}, r"zero_point='false' must be true or false"),
        ("ct-asym", {"config_groups": {"g": scheme(symmetric="false")}}, r"symmetric='false' must be true or false"),
        ("ct-asym", {"ignore": 1}, r"ignore=1 must be a list"),
        ("ct-asym", {"ignore": ["re:["]}, r"'\[' is no regular expression"),
        ("ct-asym", {"sparsity_config": "4"}, r"sparsity_config='4' must be an object"),
        ("ct-asym", {"config_groups": "4"}, r"config_groups='4' must be an object"),
        ("ct-asym", {"config_groups": {"group_0": 1}}, r"group_0=1 must be an object"),
        ("ct-asym", {"config_groups": {"g": {"targets": "Linear"}}}, r"targets='Linear' must be a list"),
        ("ct-asym", {"config_groups": {"g": {"targets": ["Linear"], "weights": 4}}}, r"weights=4 must be an object"),
    ],
)
def test_settings_of_wrong_types(tmp_path: Path, kind: str, settings: dict[str, Any], text: str) -> None:
    refused(fixture(kind, tmp_path, **settings), FormatError, text)


def test_settings_that_tolerate_other_types(tmp_path: Path) -> None:
    assert same(import_model(fixture("ct-asym", tmp_path / "ct", ignore=[1])), import_model(FIXTURES / "ct-asym"))
    folder = fixture("gptqmodel-v2", tmp_path / "gptq", meta={"quantizer": 5}, dynamic=None)
    assert same(import_model(folder), import_model(FIXTURES / "gptqmodel-v2"))


@pytest.mark.parametrize(
    ("kind", "key"), [("gptq-sym", "checkpoint_format"), ("awq", "version"), ("ct-asym", "format")]
)
def test_a_setting_that_is_null_is_none(tmp_path: Path, kind: str, key: str) -> None:
    assert same(import_model(fixture(kind, tmp_path, **{key: None})), import_model(FIXTURES / kind))


def test_nothing_says_which_group_an_input_is_of(tmp_path: Path) -> None:
    def drop(t: Tensors) -> None:
        for name in [name for name in t if name.endswith("g_idx")]:
            del t[name]

    checkpoint = import_model(fixture("gptq-sym", tmp_path, drop, desc_act=...))
    assert same(checkpoint, import_model(FIXTURES / "gptq-sym"))
    assert any(
        re.match(r"Neither g_idx nor desc_act says .*: read as groups in order: .* and 6", n) for n in notes(checkpoint)
    )
    assert not notes(import_model(fixture("gptq-sym", tmp_path, drop, desc_act=False)))


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("gptq-sym", f"{Q}.qweight", lambda t: t[:0]),
        ("awq", f"{Q}.qweight", lambda t: t[:0]),
        ("mlx", f"{Q}.weight", lambda t: t[:, :0]),
        ("ct-asym", f"{Q}.weight_shape", lambda t: t * 0),
    ],
)
def test_linears_without_inputs(tmp_path: Path, kind: str, name: str, change: Callable[[Tensor], Tensor]) -> None:
    folder = fixture(kind, tmp_path, lambda t: t.update({name: change(t[name])}))
    refused(folder, FormatError, "q_proj has codes for K=0 inputs")


def test_mlx_words_in_one_row(tmp_path: Path) -> None:
    folder = fixture("mlx", tmp_path, lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].flatten()}))
    refused(folder, FormatError, r"q_proj\.weight has shape \[\d+\]; it must have two sizes")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": 10**30}, r"more than 10000 layers are taken for a damaged file"),
        *(({key: "false"}, rf"{key}='false' must be true or false") for key in ("tie_word_embeddings", "mlp_bias")),
        ({"auto_map": 3.5}, r"auto_map=3\.5; it must be an object"),
        ({"partial_rotary_factor": "4"}, r"partial_rotary_factor='4' must be in \(0, 1\]"),
    ],
)
def test_configuration_of_wrong_types(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    folder = fixture("gptq-sym", tmp_path)
    reconfigure(folder, **changes)
    refused(folder, FormatError, text)


def test_small_files_of_garbage(tmp_path: Path) -> None:
    folder = fixture("gptq-sym", tmp_path)
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe")
    refused(folder, FormatError, r"tokenizer\.json cannot be read")
    (folder / "config.json").write_text("[" * 100_000)
    refused(folder, FormatError, r"config\.json is not JSON: maximum recursion")
