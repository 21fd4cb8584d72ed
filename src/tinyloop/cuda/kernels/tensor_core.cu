// y[M, N] = x[M, K] @ W on tensor cores, W from 4-bit codes in the device format, for capability 8.0 and later.
//
// The idea. The product is computed as yᵀ = Wᵀ xᵀ, because one 32-bit word of the device format is, without a shuffle,
// one lane's share of a 16×16 fragment of Wᵀ, and because rows of x then come in eights: one row costs what eight do.
//
//             64 columns of a warp, or of two             a lane's sixteen bytes (words j = 0..3)
//            ┌────┬────┬────┬────┐                        word j, nibble    7 6 5 4 3 2 1 0
//   16 k  →  │ j=0│ j=1│ j=2│ j=3│  one 16-byte load      column 16j + r    . . x x . . x x
//            └────┴────┴────┴────┘  per lane              column 16j+8+r    x x . . x x . .
//                                                         k (r = ℓ/4, t = ℓ%4): 2t, 2t+8 low, 2t+1, 2t+9 high
//
//   HBM ──cp.async──► stages in shared memory ──► registers ──lop3──► fragment of Wᵀ ─┐
//         x rows, words, scale and δ of a 64-k chunk     ──ldmatrix──► fragment of xᵀ ─┴─ mma ──► fp32
//
// A block computes BM rows × BN columns over a slice of K. Its warps form WK teams of WM × WN warps; teams divide the
// slice of K, the warps of a team divide rows and columns and share the stages. At the end teams are summed in shared
// memory, then blocks: in global memory by the one that finishes last, or, where the blocks of a tile are a cluster,
// each block a part of the tile, which the others send into its shared memory. Always in the same order: repeats are
// bitwise equal, and nothing is rounded to 16 bits before the one final cast.
//
// Two ways with scale and zero point, W = (q − 8)·scale + δ:
//   fold    (DECODE 0)  fragments are exact integers q − MIDDLE. After each group  acc += scale·part + rest·Σx,  with Σx
//                       from one more mma whose Wᵀ is all ones. No multiplication per weight; a second set of
//                       accumulators, so few rows only.
//                       Of one row the other seven of its mma are free. With HALVES these take other 32 k, and eight such
//                       units are folded at once, each by the lanes that have its sums.
//   decode  (DECODE 1)  fragments are W itself in 16 bits, rounded as weight.cuh says.
// With SYMMETRIC there is no δ, and y stays in fp32 for the correction pair (correction.cu).
//
// PAIR computes silu(x @ W) · (x @ W2): of 64 columns every second are W2's, and the epilogue combines.

#ifndef MT
#define MT 1      // tiles of eight rows per warp
#define WM 1      // warps along the rows
#define WN 1      // warps along the columns
#define WORDS 4   // of a lane's four that a warp takes, sixteen columns each
#define WK 4      // teams along K
#define STAGES 4
#define DECODE 0
#define PAIR 0
#endif
#ifndef ONE_ROW
#define ONE_ROW 0 // x has one: fold eight HALVES at once
#endif
#ifndef HALVES
#define HALVES 0  // groups begin at multiples of 32 of k, not of 64: parameters twice per chunk
#endif

constexpr int CHUNK = 64;  // k per stage
constexpr int UNITS = HALVES ? 2 : 1;
constexpr int UNIT_STEPS = CHUNK / 16 / UNITS;
constexpr int BLOCKS = WN * WORDS / 4, PARTS = 4 / WORDS;  // of 64 columns, in a tile; warps that share one
constexpr int BM = WM * MT * 8, BN = BLOCKS * 64, TEAM = WM * WN * 32, THREADS = TEAM * WK;
constexpr int X_BYTES = BM * CHUNK * 2, W_BYTES = BLOCKS * CHUNK * 32;
constexpr int PARAM_BYTES = SCALE_BYTES + DELTA_BYTES;  // of 64 columns
constexpr int STAGE_BYTES = X_BYTES + W_BYTES + BLOCKS * UNITS * PARAM_BYTES;
static_assert(STAGE_BYTES % 128 == 0, "addresses within a row are swapped in place");
constexpr int TILE_STRIDE = BN + 4;  // floats; the 4 keeps the transposing writes free of bank conflicts

// The tiles leave through the memory of the stages, in as many passes as that takes.
__device__ constexpr int passes(int n) { return BM / n * TILE_STRIDE * 4 <= STAGES * STAGE_BYTES ? n : passes(2 * n); }
constexpr int PASSES = passes(1);
static_assert(PASSES <= MT, "the stages are too small for the tile of one row of fragments");
static_assert(WORDS == 2 || WORDS == 4, "two warps, or one, to a lane's words");
static_assert(WORDS % WM == 0, "each warp copies as many steps of words");
static_assert(!PAIR || BLOCKS % 2 == 0, "blocks of two weights take turns");
static_assert(WORDS == 4 || DECODE, "folding takes the parameters of all 64 columns");
// Read a step's words and x while the one before is computed: 4 % where few large warps are alone on a multiprocessor;
// nothing where two blocks share one, 2 to 16 % slower for few rows, and 512 threads lack the registers.
constexpr bool AHEAD = MT == 8 && THREADS > 128 && THREADS <= 384;
static_assert(!AHEAD || DECODE, "folding reads parameters after the stage was given back");

struct Problem {
    const u16* x;       // [M][ldx], sixteen-byte aligned rows
    void* y;            // [M][N], 16-bit; fp32 where SYMMETRIC
    float* partial;     // [cut tiles][splits][BM][BN]; null, as the next, where clusters add
    u32* arrived;       // [cut tiles], zero between launches
    i64 ldx;
    int M, N, K;        // as the caller knows them: B, S and delta are padded
    int blocks64;       // 64-column blocks of B
    int chunks;         // of B's K
    int units_per_group;
    int row_tiles;
    int whole, splits;  // tiles of a block each; of the blocks after them, so many divide K of a tile
    int lead;           // chunks of the first of two such blocks, where they differ; else 0
    int clustered;      // whether those are a cluster
};

template <int COUNT> DEVICE void load_words(u32 (&v)[COUNT], u32 at) {
#pragma unroll
    for (int i = 0; i < COUNT / 4 * 4; i += 4) {
        const uint4 four = load_shared16(at + i * 4);
        v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    }
    if constexpr (COUNT % 4 == 2) {
        const uint2 two = load_shared8(at + (COUNT - 2) * 4);
        v[COUNT - 2] = two.x, v[COUNT - 1] = two.y;
    }
}

// Eight codes of a word as exact integers q − MIDDLE.
#if BF16 && !SYMMETRIC
constexpr int MIDDLE = -16;  // the codes are the upper bits of the fraction of 16.0

DEVICE void integers(u32 (&a)[4], u32 w) {
    a[0] = and_or<0x00780078, 0x41804180>(w << 3);
    a[2] = and_or<0x00780078, 0x41804180>(w >> 1);
    a[1] = and_or<0x00780078, 0x41804180>(w >> 5);
    a[3] = and_or<0x00780078, 0x41804180>(w >> 9);
}
#else
constexpr int MIDDLE = 8;

DEVICE void integers(u32 (&a)[4], u32 w) {
#if BF16
    a[0] = fma2(and_or<0x000f000f, 0x43004300>(w), 0x3f803f80, 0xc308c308);  // 128 + q − 136
    a[2] = fma2(and_or<0x000f000f, 0x43004300>(w >> 4), 0x3f803f80, 0xc308c308);
    a[1] = fma2(and_or<0x000f000f, 0x43004300>(w >> 8), 0x3f803f80, 0xc308c308);
    a[3] = fma2(and_or<0x000f000f, 0x43004300>(w >> 12), 0x3f803f80, 0xc308c308);
#else
    u32 v = w >> 8;
    a[0] = fma2(and_or<0x000f000f, 0x64006400>(w), 0x3c003c00, 0xe408e408);  // 1024 + q − 1032
    a[2] = fma2(and_or<0x00f000f0, 0x54005400>(w), 0x3c003c00, 0xd480d480);  // 64 + q − 72
    a[1] = fma2(and_or<0x000f000f, 0x64006400>(v), 0x3c003c00, 0xe408e408);
    a[3] = fma2(and_or<0x00f000f0, 0x54005400>(v), 0x3c003c00, 0xd480d480);
#endif
}
#endif

// Parameters of COUNT of the eight columns of a lane, i ↔ column 8i + r of the 64, as they stand in a stage.
template <int COUNT> struct Stored {
    static constexpr int WORDS_OF_SCALE = COUNT * SCALE_BYTES / 256;
    u32 scales[WORDS_OF_SCALE], deltas[COUNT];

    DEVICE void load(u32 at, int r, int first) {  // COLUMN has them elsewhere
        load_words(scales, at + (r * 8 + first) * (SCALE_BYTES / 64));
        if (!SYMMETRIC) load_words(deltas, at + SCALE_BYTES + (r * 8 + first) * 4);
    }

    DEVICE u32 scale(int i) const { return SCALE32 ? scales[i % WORDS_OF_SCALE] : scales[i / 2 % WORDS_OF_SCALE] >> i % 2 * 16 & 0xffff; }
    DEVICE u32 delta(int i) const { return SYMMETRIC ? 0 : deltas[i]; }
};

// Of all eight, for `fold`: W = (q − MIDDLE)·scale + rest.
struct Params {
    float scale[8], rest[8];

    DEVICE void set(int i, u32 stored_scale, u32 delta) {
        scale[i] = scale_of(stored_scale);
        rest[i] = delta_of(scale[i], delta);
        if (MIDDLE != 8) rest[i] = fmaf(MIDDLE - 8, scale[i], rest[i]);  // for 8 δ is what is left of W
    }

    DEVICE explicit Params(const Stored<8>& from) {
#pragma unroll
        for (int i = 0; i < 8; i++) set(i, from.scale(i), from.delta(i));
    }

    DEVICE Params(u32 at, int r) {
#if COLUMN
#pragma unroll
        for (int i = 0; i < 8; i++) set(i, scale_at(at, r, i), delta_at(at + SCALE_BYTES, r, i));
#else
        Stored<8> stored;
        stored.load(at, r, 0);
        *this = Params(stored);
#endif
    }
};

// Those of a warp's words, from column `first` on, ready for `weights`. Where that takes more than two instructions, each
// of the four lanes with these columns computes its share and hands it on; one group over K is begun once, and there each
// computes all.
DEVICE void load_columns(uint2 (&c)[2 * WORDS], u32 at, int first, int lane) {
    const int r = lane >> 2;
#if IN_PARTS && !BF16
    Stored<2 * WORDS> stored;
    stored.load(at, r, first);
#pragma unroll
    for (int i = 0; i < 2 * WORDS; i++) c[i] = ready_column(stored.scale(i), stored.delta(i));
#else
    auto ready = [&](int i) { return ready_column(scale_at(at, r, first + i), delta_at(at + SCALE_BYTES, r, first + i)); };
#if COLUMN
#pragma unroll
    for (int i = 0; i < 2 * WORDS; i++) c[i] = ready(i);
#else
    constexpr int OWN = WORDS / 2;
    uint2 own[OWN];
#pragma unroll
    for (int e = 0; e < OWN; e++) own[e] = ready((lane & 3) * OWN + e);
#pragma unroll
    for (int i = 0; i < 2 * WORDS; i++) c[i] = make_uint2(from_quad(own[i % OWN].x, i / OWN), from_quad(own[i % OWN].y, i / OWN));
#endif
#endif
}

struct Arguments {
    Problem p;
    Weight w, w2;  // w2 in a PAIR only
};

DEVICE float silu(float v) { return v / (1.f + __expf(-v)); }

// Rows of x in a stage are 128 bytes, their sixteen-byte units swapped so that reads down a column meet no bank twice.
DEVICE u32 x_offset(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }

// v as it is, which the compiler would else compute again in every round of a loop.
DEVICE u32 kept(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}
DEVICE i64 kept_wide(i64 v) {
    asm volatile("" : "+l"(v));
    return v;
}

// What a thread copies of each chunk: pieces of sixteen bytes of x, of the words, and of scale and δ. All pointers run
// along K; a piece's place in its stage never changes.
struct Loader {
    static constexpr int X_PIECES = (BM * 8 + TEAM - 1) / TEAM, W_PIECES = WORDS / WM, ROW_STEP = TEAM / 8;
    static constexpr int SCALE_PIECES = SCALE_BYTES / 16, PARAM_PIECES = PARAM_BYTES / 16;

    const u16* x;
    const uint4* words;
    const u8* params;
    i64 x_step, w_step, param_step;  // from piece to piece, from step to step, from group to group
    int k_left, units_left;          // of K; of units in the group
    int units_per_group, rows;       // rows: how many of this thread's pieces of x are rows of x
    u32 x_to, w_to, param_to;
    int unit16;                      // where this thread's column of x begins, in bytes from the chunk's
    bool in_weight, in_params;       // whether this thread's columns exist; whether it copies parameters

    DEVICE Loader(const Problem& p, const Weight& w, i64 row0, int block64, int wm, int wn, int lane, int chunk) {
        const int thread = (wm * WN + wn) * 32 + lane, row = thread >> 3, unit = thread & 7;
        x_step = p.ldx * ROW_STEP;
        x = p.x + (row0 + row) * p.ldx + chunk * CHUNK + unit * 8;
        k_left = p.K - chunk * CHUNK, unit16 = unit * 16;
        rows = kept((u32)(max(min(p.M - row0 - row + ROW_STEP - 1, (i64)X_PIECES * ROW_STEP), 0ll) / ROW_STEP));
        x_to = kept(x_offset(row, unit));

        const int step = (wn % PARTS * WM + wm) * W_PIECES, own = wn / PARTS;  // the first that this warp copies; which block
        in_weight = block64 < p.blocks64;
        w_step = (i64)p.blocks64 * 32;
        words = w.B + ((i64)(chunk * 4 + step) * p.blocks64 + block64) * 32 + lane;
        w_to = kept(X_BYTES + ((own * 4 + step) * 32 + lane) * 16);

        const bool scale = lane < SCALE_PIECES;
        const int unit0 = chunk * UNITS, group = unit0 / p.units_per_group;
        units_per_group = p.units_per_group;
        units_left = units_per_group - unit0 % units_per_group;
        param_step = kept_wide((i64)p.blocks64 * (scale ? SCALE_BYTES : 256));
        params = (scale ? w.S + lane * 16 : w.delta + (lane - SCALE_PIECES) * 16) + group * param_step +
                 (i64)block64 * (scale ? SCALE_BYTES : 256);
        param_to = kept(X_BYTES + W_BYTES + own * UNITS * PARAM_BYTES + lane * 16);
        in_params = kept((u32)(in_weight && step == 0 && lane < PARAM_PIECES));
    }

    // Where piece i of x goes, and whether it is one of the tile's.
    DEVICE u32 x_piece(u32 stage, int i) const {
        const int row = i * ROW_STEP;  // a multiple of 8, which leaves the swizzle, or of 4, which flips a bit
        return stage + ((x_to + row * 128) ^ ((row & 7) << 4));
    }
    DEVICE bool in_tile(int i) const { return BM * 8 % TEAM == 0 || (x_to >> 7) + i * ROW_STEP < BM; }

    // Rows of the tile that x does not have are zeros, in every stage, once and for all.
    DEVICE void clear_x(u32 stage) const {
#pragma unroll
        for (int i = 0; i < X_PIECES; i++)
            if (in_tile(i) && i >= rows) store_shared16(x_piece(stage, i), make_float4(0.f, 0.f, 0.f, 0.f));
    }

    DEVICE void load_x(u32 stage) {
        const bool whole = k_left >= CHUNK;
#pragma unroll
        for (int i = 0; i < X_PIECES; i++)
            if (whole && in_tile(i) && i < rows) copy_async(x_piece(stage, i), x + i * x_step);
        if (!whole) {  // beyond K there are zeros
#pragma unroll 1
            for (int i = 0; i < X_PIECES; i++)
                if (in_tile(i) && i < rows) copy_async(x_piece(stage, i), x + i * x_step, min(max(k_left * 2 - unit16, 0), 16));
        }
        x += CHUNK;
        k_left -= CHUNK;
    }

    DEVICE void load_weight(u32 stage) {
        if (in_weight) {
#pragma unroll
            for (int i = 0; i < W_PIECES; i++) copy_async(stage + w_to + i * 512, words + i * w_step);
        }
        words += 4 * w_step;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            if (in_params) copy_async(stage + param_to + u * PARAM_BYTES, params);
            if (--units_left == 0) params += param_step, units_left = units_per_group;
        }
    }
};

struct Place {  // of a warp within its block
    int team, wm, wn, lane;
};

// Where the warps of a team wait for each other. A barrier in shared memory, because teams pass theirs a different number
// of times, and of the chip's numbered ones racecheck (compute-sanitizer) then loses count. On Hopper it costs nothing that
// could be measured; on chips of 8.x, which have no wait that sleeps, it was not.
struct Meeting {
    u32 at, parity = 0;

    DEVICE explicit Meeting(int team) {
        __shared__ u64 barriers[WK];
        at = shared_address(barriers + team);
        if (TEAM == 32) return;
        if (threadIdx.x < WK) barrier_init(shared_address(barriers + threadIdx.x), TEAM);
        __syncthreads();
    }

    DEVICE void operator()() {
        if (TEAM == 32) return __syncwarp();
        barrier_arrive(at);
        barrier_wait(at, parity);
        parity ^= 1;
    }
};

// Where a lane begins to read rows of x: at its row of an 8×8 matrix, of which there are two next to each other, and two
// below them where a warp has more tiles than one.
DEVICE u32 x_lane(int lane) {
    const int matrix = lane >> 3;
    return x_offset((MT == 1 ? 0 : matrix >> 1) * 8 + (lane & 7), matrix & 1);
}

// The step's 16 k of `TILES` tiles of rows, from where the lane begins.
template <int TILES> DEVICE void load_x(u32 (&x)[TILES][2], u32 at, int step) {
    at ^= step << 5;  // two units on, and swapped: bits 5 and 6 are the units' alone, as rows and stages are of 128 bytes
    if constexpr (TILES == 1) {
        load_matrices(x[0], at);
    } else {
#pragma unroll
        for (int i = 0; i < TILES; i += 2) {
            u32 d[4];
            load_matrices(d, at + i * 1024);
            x[i][0] = d[0], x[i][1] = d[1], x[i + 1][0] = d[2], x[i + 1][1] = d[3];
        }
    }
}

// acc += scale·part + rest·Σx, and both sums begin anew.
DEVICE void fold(float (&acc)[WORDS][MT][4], float (&part)[WORDS][MT][4], float (&sum)[MT][4], const Params& g) {
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int j = 0; j < WORDS; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                int column = 2 * j + (c >> 1);
                if (!SYMMETRIC) acc[j][i][c] = fmaf(g.rest[column], sum[i][c & 1], acc[j][i][c]);
                acc[j][i][c] = fmaf(g.scale[column], part[j][i][c], acc[j][i][c]);
                part[j][i][c] = 0.f;
            }
        sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.f;
    }
}

#if ONE_ROW
static_assert(HALVES && MT == 1 && !DECODE && !SYMMETRIC, "a chunk is two of the eight");
// Eight units of k, each a row of the mma's sums: for unit u, row u of the fragment of x is x, and the others are zeros. A
// lane has the sums of two rows, and the parameters of these units.
struct Eight {
    Stored<8> own[2];
    int unit = 0;  // the chunk's first

    // Where the lane that reads row j finds it for unit u of the chunk: at row j ^ (unit + u) of the stage, of whose rows
    // the first is x and the others are zeros.
    DEVICE u32 row(u32 at, int u) const { return at ^ ((unit + u) * 0x90); }

    DEVICE void load(u32 at, int u, int lane) {
        if ((lane & 3) == unit / 2) own[u].load(at, lane >> 2, 0);
    }

    // Whether eight are complete, or all are done.
    DEVICE bool advance(bool last) {
        unit = (unit + UNITS) % 8;
        return unit == 0 || last;
    }

    // acc += scale·part + rest·Σx of this lane's units, in the first of its rows, and both sums begin anew.
    DEVICE void fold(float (&acc)[WORDS][MT][4], float (&part)[WORDS][MT][4], float (&sum)[MT][4]) const {
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const Params g(own[u]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float &to = acc[i / 2][0][i % 2 * 2], &from = part[i / 2][0][i % 2 * 2 + u];
                to = fmaf(g.scale[i], from, fmaf(g.rest[i], sum[0][u], to));
                from = 0.f;
            }
        }
        sum[0][0] = sum[0][1] = sum[0][2] = sum[0][3] = 0.f;
    }

    // The sums of all units, in all lanes of the same columns.
    DEVICE static void add(float (&acc)[WORDS][MT][4]) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float& v = acc[i / 2][0][i % 2 * 2];
            v += __shfl_xor_sync(0xffffffff, v, 1);
            v += __shfl_xor_sync(0xffffffff, v, 2);
        }
    }
};
#endif

// What a lane takes of a step from shared memory: its words, and fragments of x.
struct Step {
    u32 word[WORDS], x[MT][2];

    DEVICE void load(u32 words, u32 rows, int step) {
        load_words(word, words + step * 512);
        load_x(x, rows, step);
    }
};

// The chunks of one team, from `first` on, into acc.
DEVICE void team_product(float (&acc)[WORDS][MT][4], const Problem& p, Loader& load, Meeting& meet, u32 memory, Place at,
                         int first, int chunks) {
    constexpr int STEPS = CHUNK / 16, EARLY = AHEAD ? STAGES : STAGES - 1;  // chunks on their way before the first is read
    const int lane = at.lane;
#if !DECODE
    float part[WORDS][MT][4] = {}, sum[MT][4] = {};
#if !SYMMETRIC
    const u32 one = BF16 ? 0x3f803f80 : 0x3c003c00;
    const u32 ones[4] = {one, one, one, one};
#endif
#if ONE_ROW
    Eight eight = {};
#else
    int units_left = p.units_per_group - first * UNITS % p.units_per_group;
#endif
#else
    uint2 columns[2 * WORDS];
    int units_left = 0, units = p.units_per_group - first * UNITS % p.units_per_group;  // of this group and of the next
#endif
    const u32 end = memory + STAGES * STAGE_BYTES, x_at = kept(at.wm * MT * 1024 + x_lane(lane));
    const u32 words_at = kept(X_BYTES + at.wn / PARTS * 2048 + lane * 16 + at.wn % PARTS * (WORDS * 4));
    u32 stage = memory, free = AHEAD ? memory : memory + EARLY * STAGE_BYTES;
    auto after = [&](u32 at) { return at + STAGE_BYTES == end ? memory : at + STAGE_BYTES; };
    // The next chunk is here for all, and all are done with the one whose stage is `free`.
    auto meet_and_copy = [&](bool more) {
        wait_copies<STAGES - 2>();
        meet();
        if (more) load.load_weight(free), load.load_x(free);
        commit_copies();
        free = after(free);
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) load.clear_x(memory + i * STAGE_BYTES);
#pragma unroll
    for (int i = 0; i < EARLY; i++)
        if (i < chunks) load.load_weight(memory + i * STAGE_BYTES);
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
        if (i < chunks) load.load_x(memory + i * STAGE_BYTES);
        commit_copies();
    }
    Step steps[2];
    if (AHEAD) {
        wait_copies<STAGES - 1>();
        meet();
        steps[0].load(stage + words_at, stage + x_at, 0);
    }
    while (chunks > 0) {
        chunks--;
        if (!AHEAD) meet_and_copy(chunks >= EARLY);
        const u32 now = stage;
        stage = after(stage);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int u = step / UNIT_STEPS;
            const u32 params = now + X_BYTES + W_BYTES + (at.wn / PARTS * UNITS + u) * PARAM_BYTES;
#if DECODE
            if (step % UNIT_STEPS == 0) {
                if (units_left == 0) {
                    load_columns(columns, params, at.wn % PARTS * (2 * WORDS), lane);
                    units_left = units, units = p.units_per_group;
                }
                units_left--;
            }
#endif
            Step& s = steps[AHEAD ? step % 2 : 0];
            if (!AHEAD) {
#if ONE_ROW
                s.load(now + words_at, now + eight.row(x_at, u), step);
#else
                s.load(now + words_at, now + x_at, step);
#endif
            } else if (step + 1 < STEPS) {
                steps[(step + 1) % 2].load(now + words_at, now + x_at, step + 1);
            } else if (chunks > 0) {  // all of this chunk is in registers
                meet_and_copy(chunks >= EARLY);
                steps[0].load(stage + words_at, stage + x_at, 0);
            }
#pragma unroll
            for (int j = 0; j < WORDS; j++) {
                u32 a[4];
#if DECODE
                weights(a, s.word[j], column(columns[2 * j]), column(columns[2 * j + 1]));
#pragma unroll
                for (int i = 0; i < MT; i++) mma(acc[j][i], a, s.x[i][0], s.x[i][1]);
#else
                integers(a, s.word[j]);
#pragma unroll
                for (int i = 0; i < MT; i++) mma(part[j][i], a, s.x[i][0], s.x[i][1]);
#endif
            }
#if !DECODE
#if !SYMMETRIC
#pragma unroll
            for (int i = 0; i < MT; i++) mma(sum[i], ones, s.x[i][0], s.x[i][1]);
#endif
#if ONE_ROW
            if (step % UNIT_STEPS == 0) eight.load(params, u, lane);
            if (step == STEPS - 1 && eight.advance(chunks == 0)) eight.fold(acc, part, sum);
#else
            if (step % UNIT_STEPS == UNIT_STEPS - 1 && (--units_left == 0 || (chunks == 0 && u == UNITS - 1))) {
                fold(acc, part, sum, Params(params, lane >> 2));
                units_left = p.units_per_group;
            }
#endif
#endif
        }
    }
#if ONE_ROW
    Eight::add(acc);
#endif
    wait_copies<0>();
}

// Four neighbouring outputs of one row. In a PAIR, v is of W and v2 of W2.
DEVICE void store4(const Problem& p, const u16* bias, const u16* bias2, i64 m, int n, float (&v)[4], const float (&v2)[4]) {
    const i64 at = m * p.N + n;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        if (bias && n + c < p.N) v[c] += f32_of(bias[n + c]);
#if PAIR
        v[c] = silu(v[c]) * (bias2 && n + c < p.N ? v2[c] + f32_of(bias2[n + c]) : v2[c]);
#endif
    }
    if (!SYMMETRIC && p.N % 4 == 0) {
        if (n < p.N) *(uint2*)((u16*)p.y + at) = make_uint2(pack2(v[0], v[1]), pack2(v[2], v[3]));
        return;
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        if (n + c >= p.N) continue;
        if (SYMMETRIC)
            ((float*)p.y)[at + c] = v[c];
        else
            ((u16*)p.y)[at + c] = round16(v[c]);
    }
}

// Column of the output for column c of the block's tile.
DEVICE int output_column(int block, int c) {
    return PAIR ? block * (BN / 2) + (c >> 7) * 64 + (c & 63) : block * BN + c;
}

// Whether this block is the last of a tile's to be done, which adds the slices in their order.
DEVICE bool last_to_arrive(u32* arrived, int splits) {
    __shared__ int before;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) before = (int)atomicAdd(arrived, 1);
    __syncthreads();
    if (before != splits - 1) return false;
    __threadfence();
    if (threadIdx.x == 0) *arrived = 0;  // ready for the next launch
    return true;
}

// Rows of a pass: those of MT/PASSES tiles of every warp.
DEVICE int row_of(int pass, int m) {
    constexpr int ROWS = MT / PASSES * 8;  // per warp
    return m / ROWS * (MT * 8) + pass * ROWS + m % ROWS;
}

// Quads of columns in a row of the tile that are the output's, and where one begins: in a PAIR, columns of W and W2
// alternate by 64.
constexpr int QUADS = PAIR ? BN / 8 : BN / 4;
DEVICE int quad_column(int q) { return PAIR ? (q >> 4) * 128 + (q & 15) * 4 : q * 4; }
DEVICE int quad_of(int c) { return PAIR ? (c >> 7) * 16 + (c & 63) / 4 : c / 4; }

// f(m, c) for each row of a run and each quad of columns that is one of the output's, or of the tile's.
template <typename F> DEVICE void for_quads(int rows, bool pairs, F f) {
    const int quads = pairs ? QUADS : BN / 4;
    for (int i = threadIdx.x; i < rows * quads; i += THREADS) f(i / quads, pairs ? quad_column(i % quads) : i % quads * 4);
}

// The blocks that divide K of a tile, where they are a cluster. Of its quads, row by row, block `rank` adds every
// `splits`-th, and has of all blocks what is to be added in its own shared memory: [splits][slots].
#if __CUDA_ARCH__ >= 900
struct Cluster {
    static constexpr int VALUES = PAIR ? 2 : 1;  // quads of sums for a quad of outputs
    const bool exists;
    const int splits, rank, quads, slots;  // quads: of those rows of the tile that are rows of x
    const u32 sums;
    u32 barrier;

    DEVICE Cluster(const Problem& p, u32 sums, int splits, int rank, i64 row0)
        : exists(p.clustered && splits > 1), splits(splits), rank(rank), quads((int)min((i64)BM, p.M - row0) * QUADS),
          slots(BM * QUADS / splits), sums(sums) {
        __shared__ u64 arrived;
        barrier = shared_address(&arrived);
        if (!exists) return;
        if (threadIdx.x == 0) barrier_init(barrier, 1), barrier_expect(barrier, own() * splits * (VALUES * 16));
        barriers_made();
        cluster_arrive();
    }

    DEVICE int own() const { return (quads - rank + splits - 1) / splits; }

    DEVICE void meet() const {
        if (exists) cluster_wait();
    }

    DEVICE void send_quad(int quad, const float (&v)[4], const float (&v2)[4]) const {
        const u32 to = sums + (rank * slots + quad / splits) * (VALUES * 16);
        send(quad % splits, to, v, barrier);
        if (PAIR) send(quad % splits, to + 16, v2, barrier);
    }

    DEVICE void finish(const Problem& p, const u16* bias, const u16* bias2, int block, i64 row0) const {
        barrier_wait(barrier, 0);
        for (int slot = threadIdx.x; slot < own(); slot += THREADS) {
            float v[4] = {}, v2[4] = {};
            for (int s = 0; s < splits; s++) {
                const u32 from = sums + (s * slots + slot) * (VALUES * 16);
                add4(v, load_floats(from));
                if (PAIR) add4(v2, load_floats(from + 16));
            }
            const int quad = slot * splits + rank;
            store4(p, bias, bias2, row0 + quad / QUADS, output_column(block, quad_column(quad % QUADS)), v, v2);
        }
    }
};
#else  // no such thing
struct Cluster {
    static constexpr bool exists = false;
    DEVICE Cluster(const Problem&, u32, int, int, i64) {}
    DEVICE void meet() const {}
    DEVICE void send_quad(int, const float (&)[4], const float (&)[4]) const {}
    DEVICE void finish(const Problem&, const u16*, const u16*, int, i64) const {}
};
#endif

// Sum the teams' tiles [WK][BM/PASSES][TILE_STRIDE]; write outputs, or send them to the cluster, or write them as
// partial sums, where there are such.
DEVICE void finish_pass(const Problem& p, const u16* bias, const u16* bias2, const float* tiles, float* partial,
                        const Cluster& cluster, int pass, int block, i64 row0) {
    auto sum = [&](int m, int c, float (&v)[4]) {
        for (int k = 0; k < WK; k++) add4(v, *(const float4*)(tiles + (k * (BM / PASSES) + m) * TILE_STRIDE + c));
    };
    for_quads(BM / PASSES, PAIR && !partial, [&](int m, int c) {
        const int row = row_of(pass, m);
        if (row0 + row >= p.M) return;
        float v[4] = {}, v2[4] = {};
        sum(m, c, v);
        if (partial) {
            __stcg((float4*)(partial + row * BN + c), make_float4(v[0], v[1], v[2], v[3]));
            return;
        }
        if (PAIR) sum(m, c + 64, v2);
        if (cluster.exists) return cluster.send_quad(row * QUADS + quad_of(c), v, v2);
        store4(p, bias, bias2, row0 + row, output_column(block, c), v, v2);
    });
}

// Sum the slices' partial sums [splits][BM][BN] and write outputs.
// Several quads at a time, as each takes as long as the way to global memory.
DEVICE void finish_slices(const Problem& p, const u16* bias, const u16* bias2, const float* from, int block, i64 row0) {
    constexpr int TOTAL = BM * QUADS, ROUNDS = TOTAL < THREADS ? 1 : TOTAL / THREADS, MOST = THREADS > 256 ? 4 : 8;
    constexpr int AT_ONCE = ROUNDS < MOST ? ROUNDS : MOST;
    for (int first = threadIdx.x; first < TOTAL; first += AT_ONCE * THREADS) {
        float v[AT_ONCE][4] = {}, v2[AT_ONCE][4] = {};
        auto at = [&](int u) {
            const int quad = first + u * THREADS;
            return quad / QUADS * BN + quad_column(quad % QUADS);
        };
        auto is_row = [&](int u) { return first + u * THREADS < TOTAL && row0 + (first + u * THREADS) / QUADS < p.M; };
        for (int slice = 0; slice < p.splits; slice++) {
            float4 t[AT_ONCE] = {}, t2[AT_ONCE] = {};
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++)
                if (is_row(u)) {
                    t[u] = __ldcg((const float4*)(from + slice * (BM * BN) + at(u)));
                    if (PAIR) t2[u] = __ldcg((const float4*)(from + slice * (BM * BN) + at(u) + 64));
                }
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                add4(v[u], t[u]);
                if (PAIR) add4(v2[u], t2[u]);
            }
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int quad = first + u * THREADS;
            if (is_row(u)) store4(p, bias, bias2, row0 + quad / QUADS, output_column(block, quad_column(quad % QUADS)), v[u], v2[u]);
        }
    }
}

// The rows and the columns of a tile. Neighbours share columns of W, up to a thousand rows of x at a time, so that both
// come from the L2 cache.
DEVICE void place(const Problem& p, int tile, int& row_tile, int& block) {
    constexpr int BAND = 1024 / BM, OWN = PAIR ? BLOCKS / 2 : BLOCKS;
    const int in_band = BAND * ((p.blocks64 + OWN - 1) / OWN), band = tile / in_band;
    const int rows = min(p.row_tiles - band * BAND, BAND), within = tile - band * in_band;
    row_tile = band * BAND + within % rows, block = within / rows;
}

// One block per multiprocessor is enough: shared memory allows no more of most tiles, and without the 1 ptxas spills to
// fit a second one.
extern "C" __global__ void __launch_bounds__(THREADS, 1) tensor_core(const __grid_constant__ Arguments arguments) {
    const Problem& p = arguments.p;
    release_successor();
    extern __shared__ __align__(128) u8 memory[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const Place at{warp / (WM * WN), warp % (WM * WN) / WN, warp % WN, lane};
    // Whole tiles first, then slices of K; first slices before second ones where they differ.
    const int after = (int)blockIdx.x - p.whole, splits = after < 0 ? 1 : p.splits, cut = ((int)gridDim.x - p.whole) / splits;
    const int split = after < 0 ? 0 : p.lead ? after / cut : after % splits;
    const int tile = after < 0 ? blockIdx.x : p.whole + (p.lead ? after % cut : after / splits);
    int row_tile, block;
    place(p, tile, row_tile, block);
    const i64 row0 = (i64)row_tile * BM;
    const int own = at.wn / PARTS, block64 = PAIR ? block * (BLOCKS / 2) + own / 2 : block * BLOCKS + own;
    auto slice_begin = [&](int s) { return p.lead && s == 1 && splits == 2 ? p.lead : (int)((i64)p.chunks * s / splits); };
    const int slice0 = slice_begin(split), slice = slice_begin(split + 1) - slice0;
    const int first = slice0 + slice * at.team / WK, chunks = slice0 + slice * (at.team + 1) / WK - first;

    float acc[WORDS][MT][4] = {};
    const bool second = PAIR && (own & 1);
    const Weight w{second ? arguments.w2.B : arguments.w.B, second ? arguments.w2.S : arguments.w.S,
                   second ? arguments.w2.delta : arguments.w.delta, nullptr};
    Loader load(p, w, row0, block64, at.wm, at.wn, lane, first);
    Meeting meet(at.team);
    const Cluster cluster(p, shared_address(memory) + WK * STAGES * STAGE_BYTES, splits, split, row0);
    team_product(acc, p, load, meet, shared_address(memory) + at.team * STAGES * STAGE_BYTES, at, first, chunks);

    cluster.meet();
    float* tiles = (float*)memory;
    float* partials = p.partial + (i64)(tile - p.whole) * splits * BM * BN;
    float* partial = splits > 1 && !cluster.exists ? partials + (i64)split * BM * BN : nullptr;
    const int r = lane >> 2, t = lane & 3;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        __syncthreads();  // the stages, or the tiles of the last pass, are free
#pragma unroll
        for (int j = 0; j < WORDS; j++)
#pragma unroll
            for (int i = 0; i < MT / PASSES; i++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int m = (at.wm * (MT / PASSES) + i) * 8 + 2 * t + (c & 1), n = (at.wn * WORDS + j) * 16 + r + (c >> 1) * 8;
                    tiles[(at.team * (BM / PASSES) + m) * TILE_STRIDE + n] = acc[j][pass * (MT / PASSES) + i][c];
                }
        __syncthreads();
        finish_pass(p, arguments.w.bias, arguments.w2.bias, tiles, partial, cluster, pass, block, row0);
    }
    if (cluster.exists)
        cluster.finish(p, arguments.w.bias, arguments.w2.bias, block, row0);
    else if (splits > 1 && last_to_arrive(p.arrived + tile - p.whole, splits))
        finish_slices(p, arguments.w.bias, arguments.w2.bias, partials, block, row0);
}
