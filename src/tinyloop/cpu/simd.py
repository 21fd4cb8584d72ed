"""The inner loop of the CPU kernels, written once in LLVM's vector types and lowered to AVX-512, AVX2 or NEON.

One call consumes one group of one panel tile (32 columns, see panel.py) for R rows of x:

    y[r, n] += (scale[n] · Σ_k x[r, k]·q[k, n]  +  zero[n] · Σ_k x[r, k])

Decoding costs one mask: a byte b = lo + 16·hi converts to a float as it is, and

    x0·lo + x1·hi = (x0 − x1/16)·lo + (x1/16)·b

so the activation is prepared once (`kernels.prepare`) as pairs (x0 − x1/16, x1/16), and neither a shift nor a second
mask runs per weight: 6 vector operations for 32 codes instead of 7. x1/16 is exact; the difference rounds like any
other fp32 sum. Product and sum of the group's parameters are rounded separately, so that a one-hot x returns the
dequantised weight bit for bit; and they meet before y does, since the two mostly cancel where x is off-centre.

numba has no vector types and no fp16 on the CPU; hence these few functions emit IR. All operate on addresses.
"""
# mypy: ignore-errors

from __future__ import annotations

import math

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16  # fp32 lanes of one vector value; narrower machines split it
VECTORS = 2  # vectors in a tile of 32 columns
PREFETCH = 1024  # bytes ahead in the panel; 0 loses 13 % on two cores (log, 2026-11-29)

HAS_DPBF16: bool = bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16", False))
"""Whether the CPU has the bf16 dot product that `dot_tile` is."""


class _BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


_i8, _i16, _i32, _i64, _f16, _f32 = (ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(),
                                     ir.FloatType())  # fmt: skip
_vf32, _vi32, _vi8 = (ir.VectorType(t, LANES) for t in (_f32, _i32, _i8))


def _at(b, address, offset, kind, align):
    """Load `kind` from address + offset bytes."""
    place = b.inttoptr(b.add(address, ir.Constant(_i64, offset)), kind.as_pointer())
    value = b.load(place)
    value.align = align
    return value


def _constant(value):
    return ir.Constant(_vf32, [value] * LANES)


def _splat(b, value):
    undef = ir.Constant(_vf32, ir.Undefined)
    first = b.insert_element(undef, value, ir.Constant(_i32, 0))
    return b.shuffle_vector(first, undef, ir.Constant(_vi32, [0] * LANES))


def _fma(b, x, y, acc):
    name = f"llvm.fma.v{LANES}f32"
    function = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(_vf32, [_vf32] * 3), name)
    return b.call(function, [x, y, acc])


def _prefetch(b, address):
    name = "llvm.prefetch.p0"
    kind = ir.FunctionType(ir.VoidType(), [_i8.as_pointer(), _i32, _i32, _i32])
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    place = b.inttoptr(b.add(address, ir.Constant(_i64, PREFETCH)), _i8.as_pointer())
    b.call(function, [place, ir.Constant(_i32, 0), ir.Constant(_i32, 3), ir.Constant(_i32, 1)])


def _parameters(b, address, half):
    """One vector of group parameters as fp32."""
    if half:
        return b.fpext(_at(b, address, 0, ir.VectorType(_f16, LANES), 2), _vf32)
    return _at(b, address, 0, _vf32, 4)


class _Rows4:
    """One byte row: 32 × 2 codes against R pairs of prepared activations. Low and high sums are separate chains."""

    def __init__(self, b, codes, x, x_stride, R):
        self.b, self.codes, self.x, self.x_stride, self.R = b, codes, x, x_stride, R
        self.sums = R * VECTORS * 2

    def __call__(self, i, sums):
        b, out = self.b, list(sums)
        row = b.add(self.codes, b.mul(i, ir.Constant(_i64, LANES * VECTORS)))
        _prefetch(b, row)
        pair = b.add(self.x, b.mul(i, ir.Constant(_i64, 8)))
        pairs = []
        for _ in range(self.R):
            pairs.append((_splat(b, _at(b, pair, 0, _f32, 4)), _splat(b, _at(b, pair, 4, _f32, 4))))
            pair = b.add(pair, self.x_stride)
        for v in range(VECTORS):
            byte = b.zext(_at(b, row, v * LANES, _vi8, 1), _vi32)
            low = b.sitofp(b.and_(byte, ir.Constant(_vi32, [15] * LANES)), _vf32)
            whole = b.sitofp(byte, _vf32)
            for r, (x_low, x_whole) in enumerate(pairs):
                s = 2 * (r * VECTORS + v)
                out[s] = _fma(b, low, x_low, out[s])
                out[s + 1] = _fma(b, whole, x_whole, out[s + 1])
        return out


class _Rows8:
    """One byte row: 32 codes of eight bits against R plain activations."""

    def __init__(self, b, codes, x, x_stride, R):
        self.b, self.codes, self.x, self.x_stride, self.R = b, codes, x, x_stride, R
        self.sums = R * VECTORS

    def __call__(self, i, sums):
        b, out = self.b, list(sums)
        row = b.add(self.codes, b.mul(i, ir.Constant(_i64, LANES * VECTORS)))
        _prefetch(b, row)
        place = b.add(self.x, b.mul(i, ir.Constant(_i64, 4)))
        for r in range(self.R):
            x = _splat(b, _at(b, place, 0, _f32, 4))
            place = b.add(place, self.x_stride)
            for v in range(VECTORS):
                code = b.sitofp(b.zext(_at(b, row, v * LANES, _vi8, 1), _vi32), _vf32)
                out[r * VECTORS + v] = _fma(b, code, x, out[r * VECTORS + v])
        return out


def _group_dot(bits, half, R):
    """The intrinsic `(record, rows, x, x_stride, sums, sum_stride, y, y_stride)`; strides in bytes, per row of x."""

    @intrinsic
    def group_dot(typing, record, rows, x, x_stride, sums, sum_stride, y, y_stride):
        signature = types.void(*[types.int64] * 8)

        def lower(context, b, _signature, args):
            record, rows, x, x_stride, sums, sum_stride, y, y_stride = args
            step = (_Rows4 if bits == 4 else _Rows8)(b, record, x, x_stride, R)
            dots = _loop(b, rows, [_constant(0.0)] * step.sums, step)
            if bits == 4:
                dots = [b.fadd(dots[2 * i], dots[2 * i + 1]) for i in range(R * VECTORS)]
            size = 2 if half else 4
            scales = b.add(record, b.mul(rows, ir.Constant(_i64, LANES * VECTORS)))
            for v in range(VECTORS):
                place = b.add(scales, ir.Constant(_i64, v * LANES * size))
                scale = _parameters(b, place, half)
                zero = _parameters(b, b.add(place, ir.Constant(_i64, VECTORS * LANES * size)), half)
                for r in range(R):
                    total = _at(b, b.add(sums, b.mul(sum_stride, ir.Constant(_i64, r))), 0, _f32, 4)
                    out = b.add(b.add(y, b.mul(y_stride, ir.Constant(_i64, r))), ir.Constant(_i64, v * LANES * 4))
                    group = b.fadd(b.fmul(dots[r * VECTORS + v], scale), b.fmul(_splat(b, total), zero))
                    value = b.fadd(_at(b, out, 0, _vf32, 4), group)
                    b.store(value, b.inttoptr(out, _vf32.as_pointer())).align = 4
            return context.get_dummy_value()

        return signature, lower

    return group_dot


dot4_half_1, dot4_half_2, dot4_half_4 = (_group_dot(4, True, R) for R in (1, 2, 4))
dot4_full_1, dot4_full_2, dot4_full_4 = (_group_dot(4, False, R) for R in (1, 2, 4))
dot8_half_1, dot8_half_2, dot8_half_4 = (_group_dot(8, True, R) for R in (1, 2, 4))
dot8_full_1, dot8_full_2, dot8_full_4 = (_group_dot(8, False, R) for R in (1, 2, 4))


def _row16(b, address, dtype):
    """16 consecutive elements of a key or value row as fp32; `dtype` is numba's: uint16 holds bf16."""
    if dtype == types.uint16:
        words = b.zext(_at(b, address, 0, ir.VectorType(_i16, LANES), 2), _vi32)
        return b.bitcast(b.shl(words, ir.Constant(_vi32, [16] * LANES)), _vf32)
    return _at(b, address, 0, _vf32, 4)


def _loop(b, count, carried, body):
    """`values = body(i, values)` for i in 0..count−1 (at least once); the values after the last."""
    entry, block, done = b.block, b.append_basic_block("loop"), b.append_basic_block("loop.done")
    b.branch(block)
    b.position_at_end(block)
    i = b.phi(_i64)
    values = [b.phi(v.type) for v in carried]
    i.add_incoming(ir.Constant(_i64, 0), entry)
    for phi, first in zip(values, carried, strict=True):
        phi.add_incoming(first, entry)
    new = body(i, values)
    following = b.add(i, ir.Constant(_i64, 1))
    i.add_incoming(following, b.block)
    for phi, value in zip(values, new, strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", following, count), block, done)
    b.position_at_end(done)
    return new


def _sum(b, vector):
    """The sum of the lanes, in the machine's order."""
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    reduce = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(_f32, [_f32, _vf32]), name)
    return b.call(reduce, [ir.Constant(_f32, -0.0), vector], fastmath=("reassoc",))


@intrinsic
def dot_row(typing, q, k, vectors, like):
    """Σ q·k over 16·vectors elements: addresses of an fp32 row and of a row of `like`'s dtype."""

    def lower(context, b, signature, args):
        q, k, vectors, _ = args
        size = 2 if like.dtype == types.uint16 else 4
        zero = _constant(0.0)

        def body(i, sums):
            query = _at(b, b.add(q, b.mul(i, ir.Constant(_i64, 4 * LANES))), 0, _vf32, 4)
            key = _row16(b, b.add(k, b.mul(i, ir.Constant(_i64, size * LANES))), like.dtype)
            return [_fma(b, query, key, sums[0])]

        (total,) = _loop(b, vectors, [zero], body)
        return _sum(b, total)

    return types.float32(types.int64, types.int64, types.int64, like), lower


def _weighted_rows(vectors):
    @intrinsic
    def weighted_rows(typing, weights, rows, count, stride, out, like):
        """out[0:16·vectors] = Σ_p weights[p] · rows[p, …] for count ≥ 1 rows `stride` bytes apart, `like`'s dtype."""

        def lower(context, b, signature, args):
            weights, rows, count, stride, out, _ = args
            size = 2 if like.dtype == types.uint16 else 4

            def body(p, sums):
                weight = _splat(b, _at(b, b.add(weights, b.mul(p, ir.Constant(_i64, 4))), 0, _f32, 4))
                row = b.add(rows, b.mul(p, stride))
                places = [b.add(row, ir.Constant(_i64, i * LANES * size)) for i in range(vectors)]
                return [_fma(b, weight, _row16(b, at, like.dtype), s) for at, s in zip(places, sums, strict=True)]

            for i, total in enumerate(_loop(b, count, [_constant(0.0)] * vectors, body)):
                _store16(b, total, b.add(out, ir.Constant(_i64, i * LANES * 4)), types.float32)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5, like), lower

    return weighted_rows


weighted_rows_1, weighted_rows_4 = _weighted_rows(1), _weighted_rows(4)


def _exp(b, x, terms=8):
    """e^x = 2^n · 2^f, f in [−½, ½]: 2^f by `terms` of its series (8: relative error 2e-7; 6: 3e-6), 2^n by its
    exponent bits. Below e^−88 the exponent field is empty, so the result is exactly 0."""
    t = b.fmul(x, _constant(1.4426950408889634))
    t = b.select(b.fcmp_ordered("<", t, _constant(-127.0)), _constant(-127.0), t)
    t = b.select(b.fcmp_ordered(">", t, _constant(127.0)), _constant(127.0), t)
    name = f"llvm.rint.v{LANES}f32"
    rint = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(_vf32, [_vf32]), name)
    n = b.call(rint, [t])
    f = b.fmul(b.fsub(t, n), _constant(0.6931471805599453))
    series = _constant(1 / math.factorial(terms - 1))
    for k in range(terms - 2, -1, -1):
        series = _fma(b, series, f, _constant(1 / math.factorial(k)))
    exponent = b.shl(b.add(b.fptosi(n, _vi32), ir.Constant(_vi32, [127] * LANES)), ir.Constant(_vi32, [23] * LANES))
    return b.fmul(series, b.bitcast(exponent, _vf32))


def _store16(b, value, address, dtype):
    """Store 16 fp32 as `dtype`: fp32, or bf16 (uint16) rounded to nearest even; finite values."""
    if dtype == types.uint16 and HAS_DPBF16:
        value = b.fptrunc(value, ir.VectorType(_BFloat(), LANES))
    elif dtype == types.uint16:
        word = b.bitcast(value, _vi32)
        odd = b.and_(b.lshr(word, ir.Constant(_vi32, [16] * LANES)), ir.Constant(_vi32, [1] * LANES))
        word = b.add(word, b.add(odd, ir.Constant(_vi32, [0x7FFF] * LANES)))
        value = b.trunc(b.lshr(word, ir.Constant(_vi32, [16] * LANES)), ir.VectorType(_i16, LANES))
    place = b.inttoptr(address, value.type.as_pointer())
    b.store(value, place).align = 2


def _row_at(b, source, i, dtype):
    """Vector i of a row of `dtype` as fp32."""
    return _row16(b, b.add(source, b.mul(i, ir.Constant(_i64, LANES * (2 if dtype == types.uint16 else 4)))), dtype)


@intrinsic
def largest(typing, source, vectors, like):
    """The largest of 16·vectors elements of `like`'s dtype."""

    def lower(context, b, signature, args):
        source, vectors, _ = args

        def body(i, tops):
            x = _row_at(b, source, i, like.dtype)
            return [b.select(b.fcmp_ordered(">", x, tops[0]), x, tops[0])]

        (top,) = _loop(b, vectors, [_constant(-3.0e38)], body)
        name = f"llvm.vector.reduce.fmax.v{LANES}f32"
        reduce = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(_f32, [_vf32]), name)
        return b.call(reduce, [top])

    return types.float32(types.int64, types.int64, like), lower


@intrinsic
def exp_sum(typing, source, vectors, top, like):
    """Σ exp(source − top) over 16·vectors elements of `like`'s dtype."""

    def lower(context, b, signature, args):
        source, vectors, top, _ = args
        shift = _splat(b, top)

        def body(i, sums):
            return [b.fadd(sums[0], _exp(b, b.fsub(_row_at(b, source, i, like.dtype), shift)))]

        return _sum(b, _loop(b, vectors, [_constant(0.0)], body)[0])

    return types.float32(types.int64, types.int64, types.float32, like), lower


@intrinsic
def exp_row(typing, source, vectors, top, out, like):
    """out ← exp(source − top) for 16·vectors fp32; returns the sum of the unrounded values. out has `like`'s dtype."""

    def lower(context, b, signature, args):
        source, vectors, top, out, _ = args
        size = 2 if like.dtype == types.uint16 else 4
        shift = _splat(b, top)

        def body(i, sums):
            x = _at(b, b.add(source, b.mul(i, ir.Constant(_i64, 4 * LANES))), 0, _vf32, 4)
            e = _exp(b, b.fsub(x, shift), 6 if like.dtype == types.uint16 else 8)
            _store16(b, e, b.add(out, b.mul(i, ir.Constant(_i64, size * LANES))), like.dtype)
            return [b.fadd(sums[0], e)]

        return _sum(b, _loop(b, vectors, [_constant(0.0)], body)[0])

    return types.float32(types.int64, types.int64, types.float32, types.int64, like), lower


@intrinsic
def swiglu_row(typing, gate, up, vectors, like):
    """gate ← silu(gate) · up for 16·vectors elements of `like`'s dtype at two addresses."""

    def lower(context, b, signature, args):
        gate, up, vectors, _ = args
        size = 2 if like.dtype == types.uint16 else 4

        def body(i, _):
            at = b.add(gate, b.mul(i, ir.Constant(_i64, size * LANES)))
            g = _row16(b, at, like.dtype)
            u = _row16(b, b.add(up, b.mul(i, ir.Constant(_i64, size * LANES))), like.dtype)
            e = _exp(b, b.fneg(g))
            _store16(b, b.fmul(b.fdiv(g, b.fadd(e, _constant(1.0))), u), at, like.dtype)
            return []

        _loop(b, vectors, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, like), lower


TILE_ROWS, TILE_VECTORS = 6, 4  # 24 sums, 4 right-hand vectors and a broadcast: the 32 registers of AVX-512


def _dpbf16(b, total, x, y):
    """total[n] += x[2n]·y[2n] + x[2n+1]·y[2n+1] for 16 pairs of bf16 held in 32-bit words."""
    pairs = ir.VectorType(_BFloat(), 2 * LANES)
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(_vf32, [_vf32, pairs, pairs]), name)
    return b.call(function, [total, b.bitcast(x, pairs), b.bitcast(y, pairs)])


@intrinsic
def dot_tile(typing, a, a_stride, right, right_stride, pairs, c, c_stride):
    """c[6, 64] = A[6, 2·pairs] @ B[2·pairs, 64], bf16 in, fp32 out; addresses, strides in bytes.

    A's rows are bf16 in order; row p of B is 64 words, word n = B[2p, n] | B[2p+1, n] << 16.
    """

    def lower(context, b, signature, args):
        a, a_stride, right, right_stride, pairs, c, c_stride = args
        rows = [b.add(a, b.mul(a_stride, ir.Constant(_i64, r))) for r in range(TILE_ROWS)]

        def body(p, sums):
            row = b.add(right, b.mul(p, right_stride))
            vectors = [_at(b, row, 4 * LANES * v, _vi32, 4) for v in range(TILE_VECTORS)]
            out = []
            for r in range(TILE_ROWS):
                word = _at(b, b.add(rows[r], b.mul(p, ir.Constant(_i64, 4))), 0, _i32, 2)
                first = b.insert_element(ir.Constant(_vi32, ir.Undefined), word, ir.Constant(_i32, 0))
                both = b.shuffle_vector(first, ir.Constant(_vi32, ir.Undefined), ir.Constant(_vi32, [0] * LANES))
                out += [_dpbf16(b, sums[r * TILE_VECTORS + v], both, vectors[v]) for v in range(TILE_VECTORS)]
            return out

        sums = _loop(b, pairs, [_constant(0.0)] * (TILE_ROWS * TILE_VECTORS), body)
        for i, total in enumerate(sums):
            at = b.add(c, b.mul(c_stride, ir.Constant(_i64, i // TILE_VECTORS)))
            _store16(b, total, b.add(at, ir.Constant(_i64, i % TILE_VECTORS * LANES * 4)), types.float32)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), lower


@intrinsic
def load_f32(typing, address):
    """The fp32 at an address."""

    def lower(context, b, signature, args):
        return _at(b, args[0], 0, _f32, 4)

    return types.float32(types.int64), lower


@intrinsic
def bf16_to_f32(typing, bits):
    """The fp32 of a bf16 given as uint16."""

    def lower(context, b, signature, args):
        return b.bitcast(b.shl(b.zext(args[0], _i32), ir.Constant(_i32, 16)), _f32)

    return types.float32(types.uint16), lower


@intrinsic
def f32_to_bf16(typing, value):
    """The bf16 nearest to an fp32 (ties to even) as uint16; finite values only."""

    def lower(context, b, signature, args):
        word = b.bitcast(args[0], _i32)
        odd = b.and_(b.lshr(word, ir.Constant(_i32, 16)), ir.Constant(_i32, 1))
        rounded = b.add(word, b.add(odd, ir.Constant(_i32, 0x7FFF)))
        return b.trunc(b.lshr(rounded, ir.Constant(_i32, 16)), _i16)

    return types.uint16(types.float32), lower


@intrinsic
def atomic_add(typing, address, amount):
    """Add to the int64 at an address, sequentially consistent; returns the old value."""

    def lower(context, b, signature, args):
        return b.atomic_rmw("add", b.inttoptr(args[0], _i64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), lower


@intrinsic
def atomic_load(typing, address):
    """The int64 at an address, acquired."""

    def lower(context, b, signature, args):
        return b.load_atomic(b.inttoptr(args[0], _i64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), lower


def _pointer(kind):
    @intrinsic
    def pointer(typing, address):
        """The address as a pointer that `numba.carray` takes."""

        def lower(context, b, signature, args):
            return b.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), lower

    return pointer


pointer_f32, pointer_u16, pointer_i64 = _pointer(types.float32), _pointer(types.uint16), _pointer(types.int64)
