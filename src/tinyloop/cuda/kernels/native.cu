// The native INT4 product: one thread per output element, canonical codes, fp32 throughout. Right for every shape, group
// size, number of bits and dtype, and for the rounding of any loop iteration: the yardstick of all other kernels.
//
//     thread (m, n):  walks down column n of the codes [⌈K/2⌉, N], two codes a byte; a warp reads 32 neighbouring
//                     bytes of a row of codes, and one value of x for all of its lanes
//
// A loop iteration may round otherwise than the stored codes (CHANNEL; the rule is that of docs/format.md):
//   1  frac4     code + [f > θ] − [f ≥ 8]    θ = (hash(k·N + n) + iteration·0x9E3779B9) >> 28
//   2  sign_bit  code ± b in odd iterations, − where the hash is 2³¹ or more

#ifndef BITS
#define BITS 4
#define CHANNEL 0
#define PARAM32 0  // scale and zero are fp32
#define X32 0      // x and y are fp32
#endif

struct Canonical {
    const u8* codes;    // [⌈K/2⌉][N], or [K][N] at 8 bits
    const void* scale;  // [⌈K/G⌉][N]
    const void* zero;
    const u8* channel;  // [⌈K/2⌉][N] frac4, [⌈K/8⌉][N] sign_bit, or null
    const void* bias;   // [N] as x, or null
    int N, K, group_size, iteration;
};

struct Rows {
    const void* x;  // [M][ldx] with elements step apart
    void* y;        // [M][N]
    i64 ldx, step, M;
};

struct Native {
    Rows p;
    Canonical w;
};

struct Dequantize {
    void* W;  // [K][N]
    Canonical w;
};

DEVICE float param(const void* p, i64 at) { return PARAM32 ? ((const float*)p)[at] : f32_of_half(((const u16*)p)[at]); }

DEVICE float number(const void* p, i64 at) { return X32 ? ((const float*)p)[at] : f32_of(((const u16*)p)[at]); }

DEVICE u32 hash32(u32 h) {
    h ^= h >> 16, h *= 0x7FEB352D;
    h ^= h >> 15, h *= 0x846CA68B;
    return h ^ h >> 16;
}

DEVICE int code_of(const Canonical& w, int k, int n) {
    const i64 N = w.N;
    if (BITS == 8) return w.codes[k * N + n];
    const int shift = (k & 1) * 4, q = w.codes[(k >> 1) * N + n] >> shift & 15;
    const u32 hash = hash32((u32)k * (u32)w.N + (u32)n);
    if (CHANNEL == 1) {
        const int f = w.channel[(k >> 1) * N + n] >> shift & 15;
        return q + (f > (int)((hash + (u32)w.iteration * 0x9E3779B9u) >> 28)) - (f >> 3);
    }
    if (CHANNEL == 2 && (w.iteration & 1)) {
        const int b = w.channel[(k >> 3) * N + n] >> (k & 7) & 1;
        return hash >> 31 ? q - b : q + b;
    }
    return q;
}

extern "C" __global__ void __launch_bounds__(128) native(const Native arguments) {
    const Rows& p = arguments.p;
    const Canonical& w = arguments.w;
    const int columns = (w.N + 127) / 128, n = blockIdx.x % columns * 128 + threadIdx.x;
    const i64 m = blockIdx.x / columns;
    if (n >= w.N) return;
    float sum = 0.f;
    for (int first = 0, g = 0; first < w.K; first += w.group_size, g++) {
        const float scale = param(w.scale, (i64)g * w.N + n), zero = param(w.zero, (i64)g * w.N + n);
        const int end = min(w.K - first, w.group_size) + first;
        for (int k = first; k < end; k++)
            sum = fmaf(number(p.x, m * p.ldx + k * p.step), fmaf((float)code_of(w, k, n), scale, zero), sum);
    }
    if (w.bias) sum += number(w.bias, n);
    const i64 at = m * w.N + n;
    if (X32)
        ((float*)p.y)[at] = sum;
    else
        ((u16*)p.y)[at] = round16(sum);
}

// W [K, N], each weight rounded once: a thread per column and 16 rows.
extern "C" __global__ void __launch_bounds__(128) dequantize(const Dequantize arguments) {
    const Canonical& w = arguments.w;
    const int columns = (w.N + 127) / 128, n = blockIdx.x % columns * 128 + threadIdx.x;
    const int first = blockIdx.x / columns * 16;
    if (n >= w.N) return;
    for (int k = first; k < min(first + 16, w.K); k++) {
        const i64 g = (i64)(k / w.group_size) * w.N + n, at = (i64)k * w.N + n;
        // product and sum each rounded, as QuantWeight.dequantize does
        const float v = __fadd_rn(__fmul_rn((float)code_of(w, k, n), param(w.scale, g)), param(w.zero, g));
        if (X32)
            ((float*)arguments.W)[at] = v;
        else
            ((u16*)arguments.W)[at] = round16(v);
    }
}
