// y[M, N] = x[M, K] @ W on Hopper's warpgroup tensor cores (capability 9.0 exactly), from the same packed words as
// tensor_core.cu.
//
// The idea. `wgmma` takes one factor from registers. Computing yᵀ = Wᵀ xᵀ, that factor is Wᵀ, and a word of the device
// format is a lane's share of its fragment as it stands: codes go from shared memory to registers, become W there, and
// never return. x is the other factor and stays in shared memory, where the copy engine puts it.
//
//   one thread          boxes of words, of scale and of δ        ─► ring of W_STAGES, `full` ─┐
//   two warps           scale and δ as decoding takes them       ─► beside them, `ready` ─────┤
//   one thread          x: a box of 64 k × BM rows, swizzled     ─► ring of X_STAGES, `full` ─┤  and `empty` back
//   consumers, 128 each words of chunk c+2 ─lds─► registers ─► W of chunk c+1, while another's wgmma run
//
// The rings are two because words are needed two chunks before their rows of x, and take less room: an eighth at 256 rows.
//
// A chunk, which is what a stage holds, is four to sixteen wgmma of 64 columns × BM rows × 16 k for a consumer: the more,
// the less its barriers count. Of a lane's four words warp w takes word w or, for few rows, lanes 8i … 8i + 7 of it word
// (w + i) % 4: so no two lanes meet in a bank, a fragment may be of any sixteen columns, and what it costs is paid when a
// tile leaves. Decoding one takes 13 instructions in fp16 and 15 or 19 in bf16 (weight.cuh) and serves BM rows; δ is in
// it. Consumers divide the columns of a tile; two TEAMS of them divide the k of each stage as well, for narrow tiles, of
// which there are more to fill the chip. A wgmma that has W in registers blocks its warp while it is issued, so two
// consumers take turns: one decodes while the other multiplies.
//
// Work, in one of three ways. The grid is one block per multiprocessor at most: `whole` tiles are dealt out in rounds, one
// to each block; of the rest, too few for a round, all chunks of k are laid end to end and cut into equal pieces, one per
// block. Blocks that hold a later piece of a tile leave fp32 sums in global memory, and the one that holds its first adds
// them in the order of k. Or all tiles are whole. Or each has a cluster of SPLITS blocks, which divide K; each gets a part
// of the rows from all of them into its shared memory, and nothing goes through global memory. Repeats are bitwise equal.

#ifndef BM
#define BM 256   // rows of x per tile: 32, 64, 128 or 256
#define CW 2     // consumer warpgroups along the columns, 64 each
#define TEAMS 1  // of consumers, which divide the k of each stage, so that more warps decode
#define DEPTH 128 // k per stage, 128 or 256
#define RUNS 1   // of parameters per stage: as many as groups may begin in it
#define X_STAGES 4
#define W_STAGES 5
#define SPLITS 1 // blocks of a cluster that divide K of one tile and add through each other's shared memory
#endif

constexpr int BN = 64 * CW, CONSUMERS = CW * TEAMS, CONSUMER_THREADS = CONSUMERS * 128, THREADS = CONSUMER_THREADS + 128;
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8, PRODUCER_REGISTERS = CONSUMERS > 2 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * 128) / CONSUMER_THREADS / 8 * 8;
constexpr int STEPS = DEPTH / 16 / TEAMS;  // of 16 k of a stage: a consumer's
constexpr int TEAM_RUNS = RUNS > TEAMS ? RUNS / TEAMS : 1;
constexpr int X_BOX = BM * 128, X_BYTES = BM * DEPTH * 2, W_STEP = CW * 512, W_BYTES = DEPTH / 16 * W_STEP;
constexpr int SCALES = W_BYTES, DELTAS = SCALES + RUNS * CW * SCALE_BYTES;  // where in a stage what begins
constexpr int COLUMNS = DELTAS + RUNS * CW * DELTA_BYTES, COLUMNS_BYTES = CW * 512;  // ready parameters; of a run
constexpr int W_STAGE_BYTES = COLUMNS + RUNS * COLUMNS_BYTES;
constexpr int OUT_STRIDE = 64 + 8;  // of a consumer's tile on its way out; the 8 against bank conflicts
constexpr bool TURNS = CONSUMERS == 2 && !(BM == 128 && CW == 2 && RUNS == 4);  // two alternate, unless registers are short
constexpr bool SPREAD = BM <= 64 || (BM == 128 && DEPTH == 256 && (CW > 1 || RUNS > 2));  // words, over the banks
constexpr int ACC = BM / 2, QUADS = ACC / 4;  // registers of sums, four at a time
constexpr int PARTS = SPLITS * TEAMS, ROWS = BM / PARTS, OWN_QUADS = QUADS / PARTS;  // of K; of a tile that each part writes
constexpr int MOST_ROWS = RUNS == 8 ? 32 : 64;  // on their way out: parameters of eight runs take room
constexpr int OUT_ROWS = ROWS < MOST_ROWS ? ROWS : MOST_ROWS, OUT_BYTES = OUT_ROWS * OUT_STRIDE * 2;
constexpr int WORDS = X_STAGES * X_BYTES, OUT = WORDS + W_STAGES * W_STAGE_BYTES;  // where what begins
constexpr int SUMS = SPLITS > 1 ? 0 : OUT + CONSUMERS * OUT_BYTES;  // over the stages, where a block has one tile
constexpr int SUMS_BYTES = QUADS * CW * 128 * 16;
constexpr int X_BARRIERS = OUT + CONSUMERS * OUT_BYTES + (TEAMS > 1 ? SUMS_BYTES : 0), W_BARRIERS = X_BARRIERS + X_STAGES * 16;
constexpr int READY_BARRIERS = W_BARRIERS + W_STAGES * 16, SUMS_BARRIER = READY_BARRIERS + W_STAGES * 8;
static_assert(TEAMS == 1 || (TEAMS == 2 && SPLITS == 1), "teams add two and two, within a block");
static_assert(SPLITS == 1 || SUMS_BYTES <= OUT, "a tile's sums stand in the stages");

struct alignas(64) TensorMap {
    u64 opaque[16];
};

struct Problem {
    TensorMap x;     // [M][K], boxes of 64 k × box_rows rows, 128-byte swizzle, zeros outside
    TensorMap words; // [K/16][blocks64·64] words in pairs, boxes of a stage's steps × CW blocks, zeros outside
    TensorMap scale; // [groups][blocks64·64], boxes of RUNS groups, or of one, × CW blocks, zeros outside
    TensorMap delta; // likewise
    u16* y;          // [M][N]
    float4* partial; // [pieces][OWN_QUADS][CONSUMER_THREADS]
    u32* arrived;    // [cut tiles][CONSUMERS], zero between launches
    int M, N;
    int blocks64, chunks;  // chunks: the last may reach beyond K, to zeros of x and words
    int runs_per_group, runs_per_box;
    int row_tiles, box_rows;
    int whole;       // tiles that are dealt out whole
    int piece, total;  // chunks of the cut tiles: per block, at most a tile's, and altogether
};

struct Arguments {
    Problem p;
    const u16* bias;  // [N], or null
};

// v, which is the same in all lanes of a warp, said so that addresses made of it go to uniform registers.
DEVICE int uniform(int v) { return __shfl_sync(0xffffffff, v, 0); }

// ---- barriers, the copy engine, wgmma --------------------------------------------------------------------------------

// What this thread has read of a stage is read before the copy engine, to whom a barrier alone says nothing of it, writes
// there again.
DEVICE void reads_done() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void load_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

DEVICE int cluster_rank() {
    u32 rank = 0;
    if (SPLITS > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

template <int REGISTERS> DEVICE void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS> DEVICE void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Rows of x in a stage as wgmma reads them: 128-byte rows, swizzled in groups of eight.
DEVICE u64 x_descriptor(u32 at) { return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }

#if BF16
#define TYPES "f32.bf16.bf16"
#else
#define TYPES "f32.f16.f16"
#endif
#define D8(i) "%" #i "0,%" #i "1,%" #i "2,%" #i "3,%" #i "4,%" #i "5,%" #i "6,%" #i "7,%" #i "8,%" #i "9"
#define D10_30 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," D8(1) "," D8(2)
#define F(i) "+f"(d[i])
#define F8(i) F(i), F(i + 1), F(i + 2), F(i + 3), F(i + 4), F(i + 5), F(i + 6), F(i + 7)
#define F32(i) F8(i), F8(i + 8), F8(i + 16), F8(i + 24)

// d [64 × BM] += a [64 × 16] · x [16 × BM]; lanes as in mma (ptx.cuh), warp w holding rows 16w … 16w + 15.
DEVICE void wgmma(float (&d)[ACC], const u32 (&a)[4], u64 x) {
#if BM == 32
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16." TYPES
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
                 : F8(0), F8(8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
#elif BM == 64
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16." TYPES " {" D10_30 ",%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
                 : F32(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
#elif BM == 128
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16." TYPES " {" D10_30 "," D8(3) "," D8(4) "," D8(5)
                 ",%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
                 : F32(0), F32(32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
#else
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16." TYPES " {" D10_30 "," D8(3) "," D8(4) "," D8(5) "," D8(6) "," D8(7)
                 "," D8(8) "," D8(9) "," D8(10) "," D8(11) ",%120,%121,%122,%123,%124,%125,%126,%127}, {%128,%129,%130,%131}, "
                 "%132, 1, 1, 1, 0;"
                 : F32(0), F32(32), F32(64), F32(96)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
#endif
}

DEVICE void store_matrices(u32 at, u32 a, u32 b) {  // transposing: a lane's two neighbours end up in two rows
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

DEVICE void store_shared8(u32 at, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(v.x), "r"(v.y) : "memory");
}

DEVICE int load_acquire(const u32* at) {
    int v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

DEVICE void add_release(u32* at, u32 v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

// ---- work ------------------------------------------------------------------------------------------------------------

struct Item {  // chunks first … end − 1 of a tile
    int tile, first, end;
};

// Where block b's piece of the cut tiles begins, among their chunks laid end to end.
DEVICE int cut(const Problem& p, int b) { return min(p.piece * b, p.total); }

// What this block does, one item after another: its piece of the cut tiles, which is the end of one and the beginning
// of the next, then whole tiles. Of SPLITS blocks, each takes its part of one tile's chunks.
struct Schedule {
    const Problem& p;
    int tile, chunk, left;  // in its piece
    int whole;

    DEVICE explicit Schedule(const Problem& p) : p(p), whole(blockIdx.x / SPLITS) {
        const int at = cut(p, blockIdx.x);
        tile = p.whole + at / p.chunks, chunk = at % p.chunks, left = cut(p, blockIdx.x + 1) - at;
    }

    DEVICE bool next(Item& item) {
        if (left > 0) {
            item = Item{tile++, chunk, min(p.chunks, chunk + left)};
            left -= item.end - item.first;
            chunk = 0;
            return true;
        }
        if (whole >= p.whole) return false;
        const int rank = cluster_rank();  // a cluster has one tile, so that its sums may lie over the stages
        item = Item{whole, p.chunks * rank / SPLITS, p.chunks * (rank + 1) / SPLITS};
        whole += gridDim.x / SPLITS;
        return true;
    }
};

// The rows and columns of a tile. Neighbouring tiles share columns of W, eight row tiles at a time, so that x and W both
// come from the L2 cache.
DEVICE void place(const Problem& p, int tile, int& row_tile, int& column_tile) {
    constexpr int RASTER = 8;
    const int in_band = RASTER * ((p.blocks64 + CW - 1) / CW), band = tile / in_band;
    const int rows = min(p.row_tiles - band * RASTER, RASTER), within = tile - band * in_band;
    row_tile = band * RASTER + within % rows, column_tile = within / rows;
}

// The row of x where a tile begins. The last tile begins early enough to end with x, since the copy engine takes up to
// twice as long for boxes that reach outside; it does not write the rows of the tile before. Where x has fewer rows
// than a tile, a box has as many, to the next eight, and what stands behind them gives rows that are not written.
DEVICE int first_row(const Problem& p, int row_tile) { return max(0, min(row_tile * BM, p.M - BM)); }

// A position in a ring of stages. A stage has two barriers: `full` when its bytes are there, `empty` when all have read
// it; and one of words a third, `ready`.
template <int STAGES, int FIRST_BARRIER> struct Ring {
    int slot = 0;
    u32 parity = 0;

    DEVICE u32 full(u32 memory) const { return memory + FIRST_BARRIER + slot * 16; }
    DEVICE u32 empty(u32 memory) const { return full(memory) + 8; }
    DEVICE void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

using XRing = Ring<X_STAGES, X_BARRIERS>;
using WRing = Ring<W_STAGES, W_BARRIERS>;

DEVICE u32 ready(const WRing& ring, u32 memory) { return memory + READY_BARRIERS + ring.slot * 8; }

// A stage's barriers, by a lane of the warp that fills it.
DEVICE void init_words(u32 memory, int lane) {
    if (lane < W_STAGES) {
        barrier_init(memory + W_BARRIERS + lane * 16, 1);
        barrier_init(memory + W_BARRIERS + lane * 16 + 8, CONSUMERS * 4);
        barrier_init(memory + READY_BARRIERS + lane * 8, 64);  // all lanes: racecheck takes one's word for no other's
    }
    if (SPLITS > 1 && lane == 31) {
        barrier_init(memory + SUMS_BARRIER, 1);
        barrier_expect(memory + SUMS_BARRIER, SUMS_BYTES);
    }
    barriers_made();
}

DEVICE void init_x(u32 memory, int lane) {
    if (lane < X_STAGES) {
        barrier_init(memory + X_BARRIERS + lane * 16, 1);
        barrier_init(memory + X_BARRIERS + lane * 16 + 8, CONSUMERS * 4);
    }
    barriers_made();
}

// Copies chunk after chunk of the weight. Nothing but weights, so that it need not wait for the kernel before.
DEVICE void load_words(const Problem& p, u32 memory) {
    WRing ring;
    Item item;
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.words) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.scale) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.delta) : "memory");
    for (Schedule schedule(p); schedule.next(item);) {
        int row_tile, column_tile;
        place(p, item.tile, row_tile, column_tile);
        const int column = column_tile * BN;
        int group = item.first * RUNS / p.runs_per_group, in_group = item.first * RUNS % p.runs_per_group;
#pragma unroll 1
        for (int chunk = item.first; chunk < item.end; chunk++) {
            const bool params = RUNS > 1 || in_group == 0 || chunk == item.first;
            const u32 full = ring.full(memory), to = memory + WORDS + ring.slot * W_STAGE_BYTES;
            barrier_wait(full + 8, ring.parity ^ 1);
            barrier_expect(full, params ? COLUMNS : W_BYTES);
            ring.advance();
            load_box(to, &p.words, column, chunk * (DEPTH / 16), full);
#pragma unroll 1
            for (int run = 0; run < RUNS; run += p.runs_per_box) {
                if (params) {
                    load_box(to + SCALES + run * (CW * SCALE_BYTES), &p.scale, column, group, full);
                    load_box(to + DELTAS + run * (CW * DELTA_BYTES), &p.delta, column, group, full);
                }
                in_group++;
                if (in_group == p.runs_per_group) group += p.runs_per_box, in_group = 0;
            }
        }
    }
}

// Copies chunk after chunk of x.
DEVICE void load_x(const Problem& p, u32 memory) {
    XRing ring;
    Item item;
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.x) : "memory");
    wait_for_predecessor();
    for (Schedule schedule(p); schedule.next(item);) {
        int row_tile, column_tile;
        place(p, item.tile, row_tile, column_tile);
        const int row0 = first_row(p, row_tile);
#pragma unroll 1
        for (int chunk = item.first; chunk < item.end; chunk++) {
            const u32 to = memory + ring.slot * X_BYTES, full = ring.full(memory);
            barrier_wait(full + 8, ring.parity ^ 1);
            barrier_expect(full, p.box_rows * (DEPTH * 2));
#pragma unroll
            for (int box = 0; box < DEPTH / 64; box++)
                load_box(to + box * X_BOX, &p.x, chunk * DEPTH + box * 64, row0, full);
            ring.advance();
        }
    }
}

// Make parameters ready, which each of four lanes would else do for itself. Of 64 columns, a lane has one; the two of word
// j in lanes 4r … 4r + 3 go to unit 8j + r of sixteen bytes, so that sixteen lanes fill 128. Several runs and blocks at a
// time, so that they need not wait for one another's shared memory and division.
DEVICE void prepare(const Problem& p, u32 memory) {
    constexpr int BLOCKS = RUNS * CW, BATCH = BLOCKS % 4 == 0 ? 4 : BLOCKS % 3 == 0 ? 3 : BLOCKS;
    const int at = threadIdx.x % 64, j = at / 16, r = at / 2 % 8, i = 2 * j + at % 2;
    WRing ring;
    Item item;
    for (Schedule schedule(p); schedule.next(item);) {
        int in_group = item.first % p.runs_per_group;
#pragma unroll 1
        for (int chunk = item.first; chunk < item.end; chunk++) {
            barrier_wait(ring.full(memory), ring.parity);
            if (RUNS > 1 || in_group == 0 || chunk == item.first) {
                const u32 stage = memory + WORDS + ring.slot * W_STAGE_BYTES;
                u32 scale = stage + SCALES + param_offset<SCALE_BYTES / 64>(r, i), delta = stage + DELTAS + param_offset<4>(r, i);
                u32 to = stage + COLUMNS + at * 8;
#pragma unroll 1
                for (int b = 0; b < BLOCKS; b += BATCH) {
                    u32 s[BATCH], d[BATCH];
#pragma unroll
                    for (int e = 0; e < BATCH; e++) s[e] = stored_scale(scale + e * SCALE_BYTES), d[e] = load_shared4(delta + e * DELTA_BYTES);
#pragma unroll
                    for (int e = 0; e < BATCH; e++) store_shared8(to + e * 512, ready_column(s[e], d[e]));
                    scale += BATCH * SCALE_BYTES, delta += BATCH * DELTA_BYTES, to += BATCH * 512;
                }
            }
            reads_done();
            barrier_arrive(ready(ring, memory));
            ring.advance();
            if (++in_group == p.runs_per_group) in_group = 0;
        }
    }
}

struct Consumer {
    const Problem& p;
    const u16* bias;
    const u32 memory;
    const int thread, consumer, team, warp, lane, r;  // thread and warp within the warpgroup; its 64 columns are `consumer`
    const int own;                                    // which of its lane's words a warp takes
    XRing rows;                                       // where wgmma is
    WRing words;                                      // where words are read
    u32 read;                                         // the barrier `empty` of the stage that is decoded
    uint4 columns[TEAM_RUNS];                         // parameters of the chunk that is decoded, two columns each
    int group_left;                                   // chunks that begin in its group and are not read yet

    DEVICE Consumer(const Problem& p, const u16* bias, u32 memory)
        : p(p), bias(bias), memory(memory), thread(threadIdx.x % 128), consumer(uniform(threadIdx.x / 128) % CW),
          team(uniform(threadIdx.x / 128) / CW), warp(uniform(thread / 32)), lane(thread % 32), r(lane / 4),
          own(SPREAD ? (warp + lane / 8) % 4 : warp) {}

    DEVICE void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(team * CW + consumer + 1) : "memory"); }
    DEVICE void sync_all() const { asm volatile("bar.sync %0, %1;" ::"n"(CONSUMERS + 1), "n"(CONSUMER_THREADS) : "memory"); }

    // At the tensor cores, by barriers 6 and 7: issuing takes as long as running.
    DEVICE void take_turn() const {
        if (TURNS) asm volatile("{ .reg .u32 own;\nadd.u32 own, %0, 6;\nbar.sync own, 256; }" ::"r"(team + consumer) : "memory");
    }

    DEVICE void give_turn() const {
        if (TURNS) asm volatile("{ .reg .u32 other;\nsub.u32 other, 7, %0;\nbar.arrive other, 256; }" ::"r"(team + consumer) : "memory");
    }

    // Words of the next chunk, and its columns' scale and δ, unless its group has begun before.
    DEVICE void read_chunk(u32 (&word)[STEPS]) {
        barrier_wait(ready(words, memory), words.parity);
        const u32 stage = memory + WORDS + words.slot * W_STAGE_BYTES;
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            asm volatile("ld.shared.u32 %0, [%1];"
                         : "=r"(word[s])
                         : "r"(stage + (team * STEPS + s) * W_STEP + consumer * 512 + lane * 16 + own * 4));
        if (RUNS > 1 || group_left-- <= 0) {
            group_left = p.runs_per_group - 1;
            const u32 at = stage + COLUMNS + team * RUNS / TEAMS * COLUMNS_BYTES + consumer * 512 + (own * 8 + r) * 16;
#pragma unroll
            for (int u = 0; u < TEAM_RUNS; u++) columns[u] = load_shared16(at + u * COLUMNS_BYTES);
        }
        read = words.empty(memory);
        words.advance();
    }

    DEVICE void decode(u32 (&a)[STEPS][4], const u32 (&word)[STEPS]) {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const uint4 c = columns[s * TEAM_RUNS / STEPS];
            weights(a[s], word[s], ::column(make_uint2(c.x, c.y)), ::column(make_uint2(c.z, c.w)));
        }
    }

    // By one lane, once all have read.
    DEVICE void give_words_back() {
        reads_done();
        __syncwarp();
        if (lane == 0) barrier_arrive(read);
    }

    // A chunk on its way through the pipeline, the one at `rows`, with W in `now`; `left` of them with it. Left over when
    // it returns: W of the next chunk in `next`, words of the one after on their way to `word`.
    DEVICE void step(float (&acc)[ACC], u32 (&now)[STEPS][4], u32 (&next)[STEPS][4], u32 (&word)[STEPS], int left) {
        barrier_wait(rows.full(memory), rows.parity);
        take_turn();
        wgmma_fence();
        const int first = team * STEPS;
        const u64 x = x_descriptor(memory + rows.slot * X_BYTES + first / 4 * X_BOX + first % 4 * 32);
#pragma unroll
        for (int s = 0; s < STEPS; s++) wgmma(acc, now[s], x + s / 4 * (X_BOX >> 4) + s % 4 * 2);
        wgmma_commit();
        give_turn();
        if (left > 1) decode(next, word), give_words_back();
        wgmma_wait();
        if (lane == 0) barrier_arrive(rows.empty(memory));
        rows.advance();
        if (left > 2) read_chunk(word);
    }

    DEVICE void product(float (&acc)[ACC], const Item& item) {
        u32 a[STEPS][4], b[STEPS][4], word[STEPS];
        int left = item.end - item.first;
        if (SPLITS > 1 && left == 0) return;  // more blocks in the cluster than chunks
        group_left = 0;
        read_chunk(word);
        group_left -= item.first % p.runs_per_group;
        decode(a, word);
        give_words_back();
        if (left > 1) read_chunk(word);
        for (; left > 0; left -= 2) {
            step(acc, a, b, word, left);
            if (left > 1) step(acc, b, a, word, left - 1);
        }
    }

    // Column of the tile for this lane's accumulators of rows r (half 0) and r + 8 (half 1) of its warp.
    DEVICE int column(int half) const { return consumer * 64 + own * 16 + half * 8 + r; }

    // Of a cut tile: leave these sums for the block that has the tile's first chunk, or be that block, and add what the
    // others left, in the order of k. True for the latter. It had the tile last and the others had it first, so that
    // it seldom waits.
    DEVICE bool reduce(float (&acc)[ACC], const Item& item) {
        const int cut_tile = item.tile - p.whole, start = cut_tile * p.chunks;
        const int first = start / p.piece, last = (start + p.chunks - 1) / p.piece;
        u32* arrived = p.arrived + cut_tile * CONSUMERS + team * CW + consumer;
        float4* partial = p.partial + threadIdx.x;
        if (item.first > 0) {
            partial += (i64)blockIdx.x * OWN_QUADS * CONSUMER_THREADS;
#pragma unroll
            for (int q = 0; q < OWN_QUADS; q++) {
                const float* v = acc + q * 4;
                __stcg(partial + (i64)q * CONSUMER_THREADS, make_float4(v[0], v[1], v[2], v[3]));
            }
            sync();
            if (thread == 0) add_release(arrived, 1);
            return false;
        }
        if (thread == 0) {
            while (load_acquire(arrived) != last - first) __nanosleep(32);
            *arrived = 0;
        }
        sync();
        constexpr int BATCH = OWN_QUADS < 8 ? OWN_QUADS : 8;  // quads that are on their way at a time
        for (int b = first + 1; b <= last; b++) {
            const float4* from = partial + (i64)b * OWN_QUADS * CONSUMER_THREADS;
#pragma unroll
            for (int q0 = 0; q0 < OWN_QUADS; q0 += BATCH) {
                float4 f[BATCH];
#pragma unroll
                for (int q = 0; q < BATCH; q++) f[q] = __ldcg(from + (i64)(q0 + q) * CONSUMER_THREADS);
#pragma unroll
                for (int q = 0; q < BATCH; q++) add4(acc + (q0 + q) * 4, f[q]);
            }
        }
        return true;
    }

    // Add what the blocks of the cluster have of the tile; each gets the sums of its own ROWS rows, first in acc.
    DEVICE void add_splits(float (&acc)[ACC]) const {
        sync_all();
        cluster_arrive();
        cluster_wait();  // the stages of all are free
        const u32 at = memory + SUMS + threadIdx.x * 16, from = at + cluster_rank() * (OWN_QUADS * CONSUMER_THREADS * 16);
#pragma unroll
        for (int rank = 0; rank < SPLITS; rank++)
#pragma unroll
            for (int q = 0; q < OWN_QUADS; q++)
                send(rank, from + q * CONSUMER_THREADS * 16, acc + (rank * OWN_QUADS + q) * 4, memory + SUMS_BARRIER);
        barrier_wait(memory + SUMS_BARRIER, 0);
#pragma unroll
        for (int q = 0; q < OWN_QUADS; q++) {
            float* v = acc + q * 4;
            v[0] = v[1] = v[2] = v[3] = 0.f;
#pragma unroll
            for (int rank = 0; rank < SPLITS; rank++) add4(v, load_floats(at + (rank * OWN_QUADS + q) * CONSUMER_THREADS * 16));
        }
    }

    // Add what the two teams have of the tile: each leaves the other's half of the rows, and gets its own, first in acc.
    DEVICE void add_teams(float (&acc)[ACC]) const {
        const u32 at = memory + SUMS + (consumer * 128 + thread) * 16, own = team * (OWN_QUADS * CW * 128 * 16);
        sync_all();  // the sums of the tile before have been read
#pragma unroll
        for (int q = 0; q < OWN_QUADS; q++) {
            float* v = acc + q * 4;
            float* w = v + ACC / 2;
            const float4 other = team ? make_float4(v[0], v[1], v[2], v[3]) : make_float4(w[0], w[1], w[2], w[3]);
            if (team) v[0] = w[0], v[1] = w[1], v[2] = w[2], v[3] = w[3];
            store_shared16(at + (OWN_QUADS * CW * 128 * 16 - own) + q * CW * 128 * 16, other);
        }
        sync_all();
#pragma unroll
        for (int q = 0; q < OWN_QUADS; q++)
            add4(acc + q * 4, load_floats(at + own + q * CW * 128 * 16));
    }

    DEVICE int part() const { return cluster_rank() * TEAMS + team; }

    // Round, transpose through shared memory, and write those of ROWS rows from row0 on that are not before `first`,
    // OUT_ROWS at a time.
    DEVICE void write(float (&acc)[ACC], int row0, int first, int column0) {
        const u32 out = memory + OUT + (team * CW + consumer) * OUT_BYTES;
        float add[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = column0 + column(h);
            add[h] = bias && n < p.N ? f32_of(bias[n]) : 0.f;
        }
#pragma unroll
        for (int pass = 0; pass < ROWS / OUT_ROWS; pass++) {
#pragma unroll
            for (int i = 0; i < OUT_ROWS / 8; i++) {
                const float* v = acc + (pass * (OUT_ROWS / 8) + i) * 4;
                const int row = i * 8 + (lane & 7), at = warp * 16 + (lane >> 3 & 1) * 8;
                store_matrices(out + (row * OUT_STRIDE + at) * 2, pack2(v[0] + add[0], v[1] + add[0]),
                               pack2(v[2] + add[1], v[3] + add[1]));
            }
            sync();
            write_rows(out, row0 + pass * OUT_ROWS, first, column0 + consumer * 64);
            sync();
        }
    }

    // Eight neighbouring columns of a row of the tile, two of each warp where words are spread. Rows take turns with the
    // warps, so that no two threads meet in a bank.
    DEVICE uint4 gather(u32 at, int piece, int turn) const {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int two = (i + turn) % 4, from = (piece / 2 - two + 4) % 4;
            v[i] = load_shared4(at + from * 32 + piece % 2 * 16 + two * 4);
        }
        const bool odd = turn & 1, far = turn & 2;
        const u32 w[4] = {odd ? v[3] : v[0], odd ? v[0] : v[1], odd ? v[1] : v[2], odd ? v[2] : v[3]};
        return far ? make_uint4(w[2], w[3], w[0], w[1]) : make_uint4(w[0], w[1], w[2], w[3]);
    }

    DEVICE void write_rows(u32 out, int row0, int first, int column0) {
        constexpr int PIECES = 8;  // of sixteen bytes, in a row
        for (int i = thread; i < OUT_ROWS * PIECES; i += 128) {
            const int row = i / PIECES, c = i % PIECES * 8, n = column0 + c;
            if (row0 + row >= p.M) break;
            if (n >= p.N || row0 + row < first) continue;
            const u32 at = out + row * (OUT_STRIDE * 2);
            const uint4 v = SPREAD ? gather(at, i % PIECES, row) : load_shared16(at + c * 2);
            u16* to = p.y + (i64)(row0 + row) * p.N + n;
            if (p.N % 8 == 0) {
                *(uint4*)to = v;
            } else {
                const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int e = 0; e < 8; e++)
                    if (n + e < p.N) to[e] = (u16)(word[e / 2] >> e % 2 * 16);
            }
        }
    }

    DEVICE void run() {
        const bool first = team + consumer == 0;
        if (!first) give_turn();
        Item item;
        for (Schedule schedule(p); schedule.next(item);) {
            float acc[ACC];
#pragma unroll
            for (int i = 0; i < ACC; i++) acc[i] = 0.f;
            product(acc, item);
            if (SPLITS > 1) add_splits(acc);
            if (TEAMS > 1) add_teams(acc);
            if (SPLITS == 1 && item.end - item.first < p.chunks && !reduce(acc, item)) continue;
            int row_tile, column_tile;
            place(p, item.tile, row_tile, column_tile);
            write(acc, first_row(p, row_tile) + part() * ROWS, row_tile * BM, column_tile * BN);
        }
        if (first) take_turn();  // the last one given, so that no barrier is left half full
    }
};

#if SPLITS > 1
#define IN_CLUSTERS __cluster_dims__(SPLITS, 1, 1)
#else
#define IN_CLUSTERS
#endif

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) hopper(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 memory = shared_address(shared);
    release_successor();
    if (threadIdx.x >= CONSUMER_THREADS) {
        registers_down<PRODUCER_REGISTERS>();
        const int warp = threadIdx.x / 32 - CONSUMERS * 4, lane = threadIdx.x % 32;
        if (warp == 0) init_words(memory, lane);
        if (warp == 1) init_x(memory, lane);
        if (warp < 2) {  // who need not wait for each other
            asm volatile("bar.arrive 0, %0;" ::"n"(THREADS) : "memory");
            if (lane == 0 && warp == 0) load_words(arguments.p, memory);
            if (lane == 0 && warp == 1) load_x(arguments.p, memory);
        } else {
            asm volatile("bar.sync 0, %0;" ::"n"(THREADS) : "memory");
            prepare(arguments.p, memory);
        }
    } else {
        registers_up<CONSUMER_REGISTERS>();
        asm volatile("bar.sync 0, %0;" ::"n"(THREADS) : "memory");
        Consumer(arguments.p, arguments.bias, memory).run();
    }
}
