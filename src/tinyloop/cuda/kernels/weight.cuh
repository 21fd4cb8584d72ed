// How tensor-core kernels read a weight in the device format: where its parameters stand, and W from a word of codes.
// Prepended, after ptx.cuh, to the kernels that do.

#ifndef COLUMN
#define COLUMN 0   // one group over K, whose parameters are permuted as per-column ones
#endif
#ifndef SCALE32
#define SCALE32 0  // scales are fp32, where fp16 would lose bits
#endif
#ifndef HALVES
#define HALVES 0   // groups begin at multiples of 32 of k, not of 64: parameters twice per chunk
#endif
#ifndef SYMMETRIC
#define SYMMETRIC 0  // no δ
#endif

constexpr int CHUNK = 64;  // k per stage
constexpr int UNITS = HALVES ? 2 : 1, UNIT_STEPS = CHUNK / 16 / UNITS;
constexpr int SCALE_BYTES = SCALE32 ? 256 : 128, DELTA_BYTES = SYMMETRIC ? 0 : 256;  // of 64 columns

struct Weight {
    const uint4* B;      // [K/16][N/64][32 lanes]
    const u8* S;         // [groups][N] fp16 or fp32, permuted
    const float* delta;  // [groups][N], permuted alike
    const u16* bias;     // [N], or null
};

// Byte offset of column 8i + r within a run of 64 parameters of SIZE bytes.
template <int SIZE> DEVICE u32 param_offset(int r, int i) {
    if (COLUMN) return ((i >> 2) * 32 + (r >> 1) * 8 + (i & 3) * 2 + (r & 1)) * SIZE;
    return (r * 8 + i) * SIZE;
}

DEVICE float scale_at(u32 run, int r, int i) {
#if SCALE32
    return load_shared4(run + param_offset<4>(r, i));
#else
    return f32_of_half(load_shared2(run + param_offset<2>(r, i)));
#endif
}

DEVICE float delta_at(u32 run, int r, int i) { return SYMMETRIC ? 0.f : load_shared4(run + param_offset<4>(r, i)); }

// W of two codes: `low` and `high` carry them in bits 19–22 of 1.0, so each float is 1 + q/16.
DEVICE u32 weights2(u32 low, u32 high, float step, float base) {
    float a = __uint_as_float(and_or<0x00780000, 0x3f800000>(low));
    float b = __uint_as_float(and_or<0x00780000, 0x3f800000>(high));
    return pack2(fmaf(a, step, base), fmaf(b, step, base));
}

// Eight codes of a word as W = (1 + q/16)·16·scale + (δ − 24·scale).
DEVICE void weights(u32 (&a)[4], u32 w, const float (&step)[8], const float (&base)[8], int j) {
    a[0] = weights2(w << 19, w << 3, step[2 * j], base[2 * j]);
    a[2] = weights2(w << 15, w >> 1, step[2 * j], base[2 * j]);
    a[1] = weights2(w << 11, w >> 5, step[2 * j + 1], base[2 * j + 1]);
    a[3] = weights2(w << 7, w >> 9, step[2 * j + 1], base[2 * j + 1]);
}

