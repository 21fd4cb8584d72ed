"""An explanation agrees with what the dispatcher does, and names every refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tinyloop as tl
from helpers import tiny_checkpoint
from tinyloop import ops
from tinyloop.dispatch import CPU_KERNELS, Problem, plan
from tinyloop.explain import ROWS, explain


@pytest.fixture(scope="module")
def model() -> tl.Model:
    return tl.Model(tiny_checkpoint(tied=False), dtype=torch.float32)


def test_layers_that_agree_are_one_line(model: tl.Model) -> None:
    got = explain(model)
    assert [(w.name, w.count) for w in got.weights] == [
        ("layers.*.attn_qkv", 3),
        ("layers.*.attn_out", 3),
        ("layers.*.mlp_gate", 3),
        ("layers.*.mlp_up", 3),
        ("layers.*.mlp_down", 3),
        ("head", 1),
    ]
    qkv = got.weights[0]
    assert (qkv.K, qkv.N, qkv.G, qkv.bits) == (64, 128, 32, 4)


def test_layers_that_differ_are_told_apart() -> None:
    model = tl.Model(tiny_checkpoint(), dtype=torch.float32)
    model.weights["layers.1.attn_out"].keep_dense = False
    got = {w.name: w.count for w in explain(model).weights}
    assert got["layers.0.attn_out …"] == 2
    assert got["layers.1.attn_out …"] == 1
    assert "embed" in got


def test_the_kernels_shown_are_those_that_run(model: tl.Model) -> None:
    for w in explain(model).weights:
        for M, p in zip(ROWS, w.plans, strict=True):
            ops.calls.clear()
            tl.quant_gemm(torch.zeros(M, w.K), model.weights[w.name.replace("*", "0")])
            assert dict(ops.calls) == {p.kernel: 1}


def test_every_refusal_is_printed(model: tl.Model) -> None:
    got = explain(model)
    text = " ".join(str(got).split())
    for w in got.weights:
        for M, p in zip(ROWS, w.plans, strict=True):
            for kernel, reason in p.refused:
                assert f"not {kernel}: {reason.replace(f'M={M} ', 'M ')}" in text
    assert "layers.*.attn_qkv ×3" in text
    assert "Decode step:" in text
    assert json.loads(json.dumps(got.to_dict()))["weights"][0]["kernels"].keys() == {str(M) for M in ROWS}


def test_decode_step_and_its_refusal() -> None:
    dense = tl.Model(tiny_checkpoint(quantized=False), dtype=torch.float32)
    assert "is dense" in str(explain(dense).decode)
    model = tl.Model(tiny_checkpoint(), dtype=torch.float32)
    if model.fused_refusal() is None:
        assert "fused" in str(explain(model).decode)


def test_a_problem_alone() -> None:
    p = Problem(M=7, N=64, K=100, G=30, bits=4, dtype=torch.float16)
    got = explain(p)
    assert got.rows == (7,)
    assert got.weights[0].plans == (plan(p),)
    assert {k.name for k in CPU_KERNELS} >= {r["kernel"] for r in got.refusals()}
    assert got.decode is None


def test_a_file(tmp_path: Path) -> None:
    path = tl.save(tiny_checkpoint(), tmp_path / "m.tinyloop")
    assert [w.name for w in explain(path).weights] == [w.name for w in explain(str(path)).weights]
