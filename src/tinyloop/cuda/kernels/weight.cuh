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
constexpr int UNITS = HALVES ? 2 : 1;
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

// W = (1 + q/128)·step + base in fp32, from scale and δ. Rounding `base` loses 2⁻¹⁷ of a scale at most.
struct Affine {
    float step, base;
};

DEVICE Affine affine(float scale, float delta) { return Affine{128.f * scale, fmaf(-136.f, scale, delta)}; }

// W of bytes I and J of `bytes`, each 128 + q: put under the exponent of 1.0, such a byte is 1 + q/128.
template <int I, int J> DEVICE u32 weights2(u32 bytes, Affine c) {
    const float a = __uint_as_float(__byte_perm(bytes, 0x3f000000, 0x7044 + I * 0x100));
    const float b = __uint_as_float(__byte_perm(bytes, 0x3f000000, 0x7044 + J * 0x100));
    return pack2(fmaf(a, c.step, c.base), fmaf(b, c.step, c.base));
}

// Eight codes of a word as W, each rounded once: the fragment of columns r (`low`) and r + 8 (`high`).
DEVICE void weights(u32 (&a)[4], u32 w, Affine low, Affine high) {
    const u32 even = and_or<0x0f0f0f0f, 0x80808080>(w), odd = and_or<0x0f0f0f0f, 0x80808080>(w >> 4);
    a[0] = weights2<0, 2>(even, low);
    a[2] = weights2<0, 2>(odd, low);
    a[1] = weights2<1, 3>(even, high);
    a[3] = weights2<1, 3>(odd, high);
}
