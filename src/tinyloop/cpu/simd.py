"""The inner loop of the CPU kernels, written once in LLVM's vector types and lowered to AVX-512, AVX2 or NEON.

One call consumes one group of one panel tile (32 columns, see panel.py) for R rows of x:

    y[r, n] += scale[n] · Σ_k x[r, k]·q[k, n]  +  zero[n] · Σ_k x[r, k]

Decoding costs one mask: a byte b = lo + 16·hi converts to a float as it is, and

    x0·lo + x1·hi = (x0 − x1/16)·lo + (x1/16)·b

so the activation is prepared once (`kernels.prepare`) as pairs (x0 − x1/16, x1/16), and neither a shift nor a second
mask runs per weight: 6 vector operations for 32 codes instead of 7. x1/16 is exact; the difference rounds like any
other fp32 sum. Product and sum of the group's parameters are rounded separately, so that a one-hot x returns the
dequantised weight bit for bit.

numba has no vector types and no fp16 on the CPU; hence these few functions emit IR. All operate on addresses.
"""
# mypy: ignore-errors

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16  # fp32 lanes of one vector value; narrower machines split it
VECTORS = 2  # vectors in a tile of 32 columns
PREFETCH = 1024  # bytes ahead in the panel; 0 loses 13 % on two cores (log, 2026-11-29)

_i8, _i16, _i32, _i64, _f16, _f32 = (ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(),
                                     ir.FloatType())  # fmt: skip
_vf32, _vi32, _vi8 = (ir.VectorType(t, LANES) for t in (_f32, _i32, _i8))


def _at(b, address, offset, kind, align):
    """Load `kind` from address + offset bytes."""
    place = b.inttoptr(b.add(address, ir.Constant(_i64, offset)), kind.as_pointer())
    value = b.load(place)
    value.align = align
    return value


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


def _group_loop(b, rows, step):
    """`step(i, sums) -> sums` for i in 0..rows−1; returns the last sums. `sums` start at zero."""
    count = step.sums
    entry, body, done = b.block, b.append_basic_block("row"), b.append_basic_block("rows.done")
    b.branch(body)
    b.position_at_end(body)
    i = b.phi(_i64)
    sums = [b.phi(_vf32) for _ in range(count)]
    i.add_incoming(ir.Constant(_i64, 0), entry)
    for s in sums:
        s.add_incoming(ir.Constant(_vf32, [0.0] * LANES), entry)
    new = step(i, sums)
    following = b.add(i, ir.Constant(_i64, 1))
    i.add_incoming(following, body)
    for s, value in zip(sums, new, strict=True):
        s.add_incoming(value, body)
    b.cbranch(b.icmp_signed("<", following, rows), body, done)
    b.position_at_end(done)
    return new


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
            dots = _group_loop(b, rows, step)
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
                    value = b.fadd(_at(b, out, 0, _vf32, 4), b.fmul(dots[r * VECTORS + v], scale))
                    value = b.fadd(value, b.fmul(_splat(b, total), zero))
                    b.store(value, b.inttoptr(out, _vf32.as_pointer())).align = 4
            return context.get_dummy_value()

        return signature, lower

    return group_dot


dot4_half_1, dot4_half_4 = _group_dot(4, True, 1), _group_dot(4, True, 4)
dot4_full_1, dot4_full_4 = _group_dot(4, False, 1), _group_dot(4, False, 4)
dot8_half_1, dot8_half_4 = _group_dot(8, True, 1), _group_dot(8, True, 4)
dot8_full_1, dot8_full_4 = _group_dot(8, False, 1), _group_dot(8, False, 4)


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
def power_of_two(typing, n):
    """2^n as fp32 for n in −126..127, by its exponent bits."""

    def lower(context, b, signature, args):
        biased = b.add(args[0], ir.Constant(_i32, 127))
        return b.bitcast(b.shl(biased, ir.Constant(_i32, 23)), _f32)

    return types.float32(types.int32), lower


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
