// Device format → dense 16-bit W [N, K], for the products that a dense kernel does faster.
//
//     a warp takes 64 k × 64 columns:  32 words a lane in four 16-byte loads, decoded as in tensor_core.cu,
//     then rows of 128 bytes through shared memory, so that what is written is whole lines
//
// [N, K] is the order in which cuBLAS multiplies x [M, K] fastest.

struct Unpack {
    const uint4* B;    // [K/16][blocks64][32]
    const void* S;     // [groups][64·blocks64] fp16 or fp32, permuted
    const u32* delta;  // as S
    u16* W;            // [N][ldw]
    i64 ldw;
    int N, K, blocks64, chunks, group_size;  // group_size is a multiple of 32, or at least K
};

DEVICE int place(int n) {  // of column n among the 64 parameters of its run
    const int a = n >> 3, r = n & 7;
    return COLUMN ? (n & 32) + (r >> 1) * 8 + (a & 3) * 2 + (r & 1) : r * 8 + a;
}

constexpr int WARPS = 4, STRIDE = 33;  // words of a row in shared memory: 64 k are 32 words, and one against conflicts

extern "C" __global__ void __launch_bounds__(WARPS * 32) unpack(const Unpack p) {
    __shared__ u32 tile[WARPS][64 * STRIDE];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2, t = lane & 3;
    const i64 job = (i64)blockIdx.x * WARPS + warp;
    const int chunk = (int)(job % p.chunks), block = (int)(job / p.chunks);
    if (block >= p.blocks64) return;
    u32* mine = tile[warp];
    float scale[8], zero[8];
#pragma unroll
    for (int s = 0; s < 4; s++) {
        if (s % 2 == 0) {
            const int group = (chunk * 64 + s * 16) / p.group_size;
            const i64 run = ((i64)group * p.blocks64 + block) * 64;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const i64 at = run + place(8 * i + r);
                scale[i] = scale_of(SCALE32 ? ((const u32*)p.S)[at] : ((const u16*)p.S)[at]);
                zero[i] = fmaf(-8.f, scale[i], delta_of(scale[i], p.delta[at]));
            }
        }
        const uint4 words = p.B[((i64)(chunk * 4 + s) * p.blocks64 + block) * 32 + lane];
        const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {  // nibbles i and i + 4 are neighbours in k
                const int column = 2 * j + (i >> 1);
                const float low = (float)(word[j] >> (4 * i) & 15), high = (float)(word[j] >> (4 * i + 16) & 15);
                mine[(8 * column + r) * STRIDE + s * 8 + (i & 1) * 4 + t] =
                    pack2(fmaf(low, scale[column], zero[column]), fmaf(high, scale[column], zero[column]));
            }
    }
    __syncwarp();
    for (int row = 0; row < 64; row++) {
        const i64 n = (i64)block * 64 + row;
        const int k = chunk * 64 + lane * 2;
        if (n < p.N && k < p.ldw) *(u32*)(p.W + n * p.ldw + k) = mine[row * STRIDE + lane];
    }
}
