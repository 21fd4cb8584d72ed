// The correction pair: what a symmetric product (q − 8)·scale leaves out of an asymmetric weight is free of k inside a
// group, so it is a small product of its own,
//
//     y[m, n] = c[m, n] + Σ_g a_sum[m, g] · δ[g, n]        a_sum[m, g] = Σ_{k in g} x[m, k]
//
//     x [M, K] ──a_group_sum──► a_sum [M, K/G] fp32 ─┐
//     c [M, N] fp32, the symmetric product ──────────┴─correction_accum──► y [M, N], rounded once
//
// Everything between is fp32: in fp16 a_sum overflows from |x| = 512 on, and c and the correction can be huge and of
// opposite sign.

constexpr int SUM_THREADS = 128, ROWS = 8;

struct Sums {
    const u16* x;  // [M][ldx], any alignment
    float* a_sum;  // [M][groups]
    i64 ldx;
    int M, K, group_size, groups;
};

// One warp per (m, g): each lane sums its share in order, then a tree.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) a_group_sum(const Sums p) {
    release_successor();
    wait_for_predecessor();
    const i64 job = (i64)blockIdx.x * (SUM_THREADS / 32) + threadIdx.x / 32, m = job / p.groups;
    const int g = (int)(job % p.groups), end = min(p.K, (g + 1) * p.group_size);
    if (m >= p.M) return;
    float sum = 0.f;
#pragma unroll 4
    for (int k = g * p.group_size + threadIdx.x % 32; k < end; k += 32) sum += f32_of(p.x[m * p.ldx + k]);
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (threadIdx.x % 32 == 0) p.a_sum[job] = sum;
}

struct Correction {
    const float* c;      // [M][N]
    const float* a_sum;  // [M][groups]
    const void* S;       // [groups][padded N] fp16 or fp32, permuted
    const u32* delta;    // as S
    const u16* bias;     // [N], or null
    u16* y;              // [M][N]
    int M, N, groups, padded;
};

// Where column n stands in δ's order.
DEVICE int permuted(int n) {
    const int a = n >> 3, r = n & 7;
    if (COLUMN) return (n & ~31) + (r >> 1) * 8 + (a & 3) * 2 + (r & 1);
    return (n & ~63) + r * 8 + (a & 7);
}

// One thread per column and eight rows, so that δ is read once for eight; the rows' sums pass through shared memory, some
// groups at a time.
extern "C" __global__ void __launch_bounds__(128, 1) correction_accum(const Correction p) {
    constexpr int GROUPS = 32;
    __shared__ float sums[GROUPS][ROWS];
    release_successor();
    wait_for_predecessor();
    const int columns = (p.N + 127) / 128, n = blockIdx.x % columns * 128 + threadIdx.x;
    const i64 m0 = (i64)(blockIdx.x / columns) * ROWS;
    const int rows = (int)min(p.M - m0, (i64)ROWS);
    const int own = permuted(min(n, p.N - 1));
    float sum[ROWS] = {}, c[ROWS];  // c is on its way while the sums are added
#pragma unroll
    for (int i = 0; i < ROWS; i++) c[i] = i < rows && n < p.N ? p.c[(m0 + i) * p.N + n] : 0.f;
    for (int first = 0; first < p.groups; first += GROUPS) {
        const int count = min(p.groups - first, GROUPS);
        __syncthreads();
        for (int i = threadIdx.x; i < count * ROWS; i += 128) {
            const int g = i / ROWS, m = i % ROWS;
            sums[g][m] = m < rows ? p.a_sum[(m0 + m) * p.groups + first + g] : 0.f;
        }
        __syncthreads();
#pragma unroll 8
        for (int g = 0; g < count; g++) {
            const i64 at = (i64)(first + g) * p.padded + own;
            const float d = delta_of(scale_of(SCALE32 ? ((const u32*)p.S)[at] : ((const u16*)p.S)[at]), p.delta[at]);
#pragma unroll
            for (int i = 0; i < ROWS; i++) sum[i] = fmaf(sums[g][i], d, sum[i]);
        }
    }
    if (n >= p.N) return;
    const float bias = p.bias ? f32_of(p.bias[n]) : 0.f;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const i64 at = (m0 + i) * p.N + n;
        if (i < rows) p.y[at] = round16(c[i] + sum[i] + bias);
    }
}
