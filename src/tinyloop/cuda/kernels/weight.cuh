// How tensor-core kernels read a weight in the device format: where its parameters stand, and W from a word of codes.
// Prepended, after ptx.cuh, to the kernels that do.

#ifndef COLUMN
#define COLUMN 0   // one group over K, whose parameters are permuted as per-column ones
#endif
#ifndef SCALE32
#define SCALE32 0  // scales are fp32, where fp16 would lose bits
#endif
#ifndef IN_PARTS
#define IN_PARTS 0 // δ is in two parts, as 16-bit arithmetic takes it
#endif
#ifndef COARSE
#define COARSE 0   // bf16 holds every scale, too
#endif
#ifndef SYMMETRIC
#define SYMMETRIC 0  // no δ
#endif

constexpr int SCALE_BYTES = SCALE32 ? 256 : 128, DELTA_BYTES = SYMMETRIC ? 0 : 256;  // of 64 columns

static_assert(!IN_PARTS || !(SCALE32 || COLUMN || SYMMETRIC), "two parts stand beside scales in fp16, of small groups");

struct Weight {
    const uint4* B;   // [K/16][N/64][32 lanes]
    const u8* S;      // [groups][N] fp16 or fp32, permuted
    const u8* delta;  // [groups][N] four bytes, permuted alike
    const u16* bias;  // [N], or null
};

// Byte offset of column 8i + r within a run of 64 parameters of SIZE bytes.
template <int SIZE> DEVICE u32 param_offset(int r, int i) {
    if (COLUMN) return ((i >> 2) * 32 + (r >> 1) * 8 + (i & 3) * 2 + (r & 1)) * SIZE;
    return (r * 8 + i) * SIZE;
}

DEVICE u32 stored_scale(u32 at) { return SCALE32 ? load_shared4(at) : load_shared2(at); }

DEVICE u32 scale_at(u32 run, int r, int i) { return stored_scale(run + param_offset<SCALE_BYTES / 64>(r, i)); }

DEVICE u32 delta_at(u32 run, int r, int i) { return DELTA_BYTES == 0 ? 0 : load_shared4(run + param_offset<4>(r, i)); }

DEVICE float scale_of(u32 stored) { return SCALE32 ? __uint_as_float(stored) : low_f16(stored); }

// δ is fp32, or in two parts (8 − z)·scale + rest, z being the whole number next to where W crosses zero: 8 − z in fp16 in
// the upper half, rest in fp16 in the lower.
DEVICE float delta_of(float scale, u32 stored) {
#if IN_PARTS
    return fmaf(high_f16(stored), scale, low_f16(stored));
#else
    return __uint_as_float(stored);
#endif
}

// A column's parameters as `weights` takes them, and in eight bytes, as they are kept: 16-bit arithmetic, unless the pack
// has scales in fp32.
#if SCALE32

// W = (1 + q/128)·step + base in fp32. Rounding `base` loses 2⁻¹⁷ of a scale at most.
struct Column {
    float step, base;
};

DEVICE uint2 ready_column(u32 scale, u32 delta) {
    const float s = scale_of(scale);
    return make_uint2(__float_as_uint(128.f * s), __float_as_uint(fmaf(-136.f, s, delta_of(s, delta))));
}

DEVICE Column column(uint2 v) { return Column{__uint_as_float(v.x), __uint_as_float(v.y)}; }

// W of bytes I and J of `bytes`, each 128 + q: put under the exponent of 1.0, such a byte is 1 + q/128.
template <int I, int J> DEVICE u32 weights2(u32 bytes, Column c) {
    const float a = __uint_as_float(__byte_perm(bytes, 0x3f000000, 0x7044 + I * 0x100));
    const float b = __uint_as_float(__byte_perm(bytes, 0x3f000000, 0x7044 + J * 0x100));
    return pack2(fmaf(a, c.step, c.base), fmaf(b, c.step, c.base));
}

// Eight codes of a word as W, each rounded once: the fragment of columns r (`low`) and r + 8 (`high`).
DEVICE void weights(u32 (&a)[4], u32 w, Column low, Column high) {
    const u32 even = and_or<0x0f0f0f0f, 0x80808080>(w), odd = and_or<0x0f0f0f0f, 0x80808080>(w >> 4);
    a[0] = weights2<0, 2>(even, low);
    a[2] = weights2<0, 2>(odd, low);
    a[1] = weights2<1, 3>(even, high);
    a[3] = weights2<1, 3>(odd, high);
}

#else

// The same in 16-bit arithmetic, 13 instructions a word in fp16, 19 in bf16, 15 if COARSE, where the above takes 23. Both
// constants of an affine weight would lose bits there, so W = (q − z)·scale + rest, z being the whole number next to where
// W crosses zero: q − z is exact and |rest| half a scale at most, so that what its rounding costs is a fraction of W's own.
struct Column {  // each constant twice, for two weights at a time
    u32 scale, rest;
#if BF16
    u32 minus, fine;  // −(128 + z); of scale, what bf16 does not hold of its eleven bits, unless COARSE
#else
    u32 minus, minus_high;  // −(1024 + z), −(64 + z)
#endif
};

#if IN_PARTS && !BF16
DEVICE uint2 ready_column(u32 scale, u32 delta) {
    return make_uint2(__byte_perm(scale, delta, 0x5410), add2(high_twice(delta), 0xd480e408));  // −1032, −72
}
#else
DEVICE uint2 ready_column(u32 scale, u32 delta) {
    const float s = scale_of(scale);
#if IN_PARTS
    const float eight = high_f16(delta), rest = low_f16(delta);  // 8 − z
#else
#if BF16
    const float limit = 100.f;  // to which −(128 + z) is exact. MarlinWeight.of sees to it that weights keep it
#else
    const float limit = 1000.f;
#endif
    const float whole = 12582912.f;  // a sum with 1.5·2²³ has no room for less than whole numbers
    const float d = __uint_as_float(delta);
    const float shifted = fmaf(d, reciprocal(s), whole);  // of scale 0 a limit comes, and any number would do
    const float eight = fmaxf(whole - limit, fminf(shifted, whole + limit)) - whole;
    const float rest = fmaf(-eight, s, d);
#endif
    const u32 first = pack2(s, rest);
#if BF16
    return make_uint2(first, pack2(eight - 136.f, s - low_half(first)));
#else
    return make_uint2(first, add2(pack2(eight, eight), 0xd480e408));
#endif
}
#endif

DEVICE Column column(uint2 v) { return Column{low_twice(v.x), high_twice(v.x), low_twice(v.y), high_twice(v.y)}; }

DEVICE u32 scaled(u32 whole, Column c) {  // two q − z as W
#if BF16 && !COARSE
    return fma2(whole, c.scale, fma2(whole, c.fine, c.rest));
#else
    return fma2(whole, c.scale, c.rest);
#endif
}

DEVICE void weights(u32 (&a)[4], u32 w, Column low, Column high) {
    u32 v = w >> 8;
#if BF16
    a[0] = scaled(add2(and_or<0x000f000f, 0x43004300>(w), low.minus), low);  // 128 + q − (128 + z)
    a[2] = scaled(add2(and_or<0x000f000f, 0x43004300>(w >> 4), low.minus), low);
    a[1] = scaled(add2(and_or<0x000f000f, 0x43004300>(v), high.minus), high);
    a[3] = scaled(add2(and_or<0x000f000f, 0x43004300>(v >> 4), high.minus), high);
#else
    a[0] = scaled(add2(and_or<0x000f000f, 0x64006400>(w), low.minus), low);  // 1024 + q − (1024 + z)
    a[2] = scaled(add2(and_or<0x00f000f0, 0x54005400>(w), low.minus_high), low);  // 64 + q − (64 + z)
    a[1] = scaled(add2(and_or<0x000f000f, 0x64006400>(v), high.minus), high);
    a[3] = scaled(add2(and_or<0x00f000f0, 0x54005400>(v), high.minus_high), high);
#endif
}

#endif
