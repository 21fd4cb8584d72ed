// y[M, N] = x[M, K] @ W on Hopper's warpgroup tensor cores (capability 9.0 exactly), from the same packed words as
// tensor_core.cu.
//
// The idea. `wgmma` takes one factor from registers. Computing yᵀ = Wᵀ xᵀ, that factor is Wᵀ, and a word of the device
// format is a lane's share of its fragment as it stands: codes go from shared memory to registers, become W there, and
// never return. x is the other factor and stays in shared memory, where the copy engine puts it.
//
//   one thread             words, scale, δ: bulk copies              ─► ring of W_STAGES ┐
//   one thread             x: TMA, 64 k × BM rows, swizzled          ─► ring of X_STAGES ┤ `full`, and `empty` back
//   consumer (CW × 128)    words of unit u+2 ─lds─► registers ─► W of unit u+1 │ wgmma of unit u in flight
//
// The rings are two because words are needed two units before their rows of x, and take less room: an eighth at 256 rows.
//
// A unit is four wgmma of 64 columns × BM rows × 16 k, or eight where a stage is 128 k deep: what a unit costs beside
// them is spent half as often then. Warp w of a consumer owns NJ words of a lane's four, so a consumer covers 64·NJ
// columns; NJ·BM ≤ 256 keeps the accumulators in 128 registers. Decoding one word takes 13 instructions in fp16 and 19 in
// bf16 (weight.cuh, `Centred`) and serves BM rows; δ is in it.
//
// Work, in one of two ways. The grid is one block per multiprocessor: `whole` tiles are dealt out in rounds, one to each
// block; of the rest, too few for a round, all chunks of k are laid end to end and cut into equal pieces, one per block.
// Blocks that hold a later piece of a tile leave fp32 sums in global memory, and the one that holds its first adds them in
// the order of k. Or each tile has a cluster of SPLITS blocks, which divide K; each sums a part of the rows over the shared
// memories of all, and nothing goes through global memory. Repeats are bitwise equal either way.

#ifndef BM
#define BM 256   // rows of x per tile: 32, 64, 128 or 256
#define NJ 1     // words per lane and step
#define CW 2     // consumer warpgroups
#define DEPTH 64 // k per stage, 64 or 128
#define RUNS 1   // of parameters per stage: as many as groups may begin in it
#define X_STAGES 4
#define W_STAGES 5
#define SPLITS 1 // blocks of a cluster that divide K of one tile and add through each other's shared memory
#endif

constexpr int BLOCKS64 = NJ * CW, BN = 64 * BLOCKS64, CONSUMER_THREADS = CW * 128, THREADS = CONSUMER_THREADS + 128;
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8, PRODUCER_REGISTERS = 32;
constexpr int CONSUMER_REGISTERS = (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * 128) / CONSUMER_THREADS / 8 * 8;
constexpr int E = DEPTH / 16, STEPS = E / NJ, CHUNK_UNITS = NJ;  // words of a lane and steps of 16 k per unit, units per chunk
constexpr int X_BOX = BM * 128, X_BYTES = BM * DEPTH * 2, W_BYTES = BLOCKS64 * DEPTH * 32;
constexpr int RUN_BYTES = BLOCKS64 * (SCALE_BYTES + DELTA_BYTES);
constexpr int W_STAGE_BYTES = W_BYTES + RUNS * RUN_BYTES;
constexpr int OUT_STRIDE = 64 * NJ + 8;  // of a consumer's tile on its way out; the 8 against bank conflicts
constexpr int OUT_ROWS = BM / SPLITS < 64 ? BM / SPLITS : 64, OUT_BYTES = OUT_ROWS * OUT_STRIDE * 2;
constexpr int WORDS = X_STAGES * X_BYTES, OUT = WORDS + W_STAGES * W_STAGE_BYTES;  // where what begins
constexpr int X_BARRIERS = OUT + CW * OUT_BYTES, W_BARRIERS = X_BARRIERS + X_STAGES * 16;
constexpr int ACC = BM / 2, QUADS = NJ * ACC / 4;  // registers per wgmma, four at a time
constexpr int ROWS = BM / SPLITS;  // that a block writes
static_assert(SPLITS == 1 || QUADS * CONSUMER_THREADS * 16 <= OUT, "a tile's sums stand in the stages");

struct alignas(64) TensorMap {
    u64 opaque[16];
};

struct Problem {
    TensorMap x;     // [M][K], boxes of 64 k × BM rows, 128-byte swizzle, zeros outside
    u16* y;          // [M][N]
    float4* partial; // [pieces][QUADS][CONSUMER_THREADS]
    u32* arrived;    // [cut tiles][CW], zero between launches
    int M, N;
    int blocks64, chunks, runs_per_group;
    int row_tiles, column_tiles;
    int whole;       // tiles that are dealt out whole
    int piece, total;  // chunks of the cut tiles: per block, at most a tile's, and altogether
};

struct Arguments {
    Problem p;
    Weight w;
};

// ---- barriers, the copy engine, wgmma --------------------------------------------------------------------------------

DEVICE void barrier_init(u32 at, int arrivals) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals)); }

DEVICE void barrier_expect(u32 at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory"); }

DEVICE void barrier_wait(u32 at, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(at), "r"(parity) : "memory");
}

DEVICE void load_box(u32 to, const TensorMap* map, int k, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}

DEVICE void load_bulk(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier) : "memory");
}

// ---- clusters: blocks that run together and reach into each other's shared memory --------------------------------------

DEVICE int cluster_rank() {
    u32 rank = 0;
    if (SPLITS > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

DEVICE float4 load_from(int rank, u32 at) {
    u32 there;
    float4 v;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(there));
    return v;
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

DEVICE void store_shared16(u32 at, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

DEVICE int load_acquire(const u32* at) {
    int v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
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

// The rows and columns of a tile. Neighbouring tiles share columns of W, eight row tiles at a time, so that x and W both come from the L2 cache.
DEVICE void place(const Problem& p, int tile, int& row_tile, int& column_tile) {
    constexpr int RASTER = 8;
    const int band = tile / (RASTER * p.column_tiles), rows = min(p.row_tiles - band * RASTER, RASTER);
    const int within = tile - band * RASTER * p.column_tiles;
    row_tile = band * RASTER + within % rows, column_tile = within / rows;
}

// A position in a ring of stages. A stage has two barriers: `full` when its bytes are there, `empty` when all have read it.
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

// Copies chunk after chunk of the weight. Nothing but weights, so that it need not wait for the kernel before.
DEVICE void load_words(const Problem& p, const Weight& w, u32 memory) {
    WRing ring;
    Item item;
    for (Schedule schedule(p); schedule.next(item);) {
        int row_tile, column_tile;
        place(p, item.tile, row_tile, column_tile);
        const int block0 = column_tile * BLOCKS64, blocks = min(BLOCKS64, p.blocks64 - block0);
        const uint4* words = w.B + ((i64)item.first * (DEPTH / 16) * p.blocks64 + block0) * 32;
        int group = item.first * RUNS / p.runs_per_group;
        int runs_left = p.runs_per_group - item.first * RUNS % p.runs_per_group;
        bool params = true;  // whether the chunk's parameters are not in registers yet
        for (int chunk = item.first; chunk < item.end; chunk++) {
            const u32 full = ring.full(memory);
            u32 to = memory + WORDS + ring.slot * W_STAGE_BYTES;
            barrier_wait(full + 8, ring.parity ^ 1);
            barrier_expect(full, blocks * (DEPTH * 32 + (params ? RUNS * (SCALE_BYTES + DELTA_BYTES) : 0)));
            ring.advance();
#pragma unroll 1
            for (int step = 0; step < DEPTH / 16; step++, to += BLOCKS64 * 512, words += (i64)p.blocks64 * 32)
                load_bulk(to, words, blocks * 512, full);
            bool next = RUNS > 1;
#pragma unroll 1
            for (int run = 0; run < RUNS; run++, to += RUN_BYTES) {
                if (params) {
                    const i64 at = (i64)group * p.blocks64 + block0;
                    load_bulk(to, w.S + at * SCALE_BYTES, blocks * SCALE_BYTES, full);
                    load_bulk(to + BLOCKS64 * SCALE_BYTES, w.delta + at * 64, blocks * DELTA_BYTES, full);
                }
                if (--runs_left == 0) group++, runs_left = p.runs_per_group, next = true;
            }
            params = next;
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
        for (int chunk = item.first; chunk < item.end; chunk++) {
            const u32 to = memory + ring.slot * X_BYTES, full = ring.full(memory);
            barrier_wait(full + 8, ring.parity ^ 1);
            barrier_expect(full, X_BYTES);
#pragma unroll
            for (int box = 0; box < DEPTH / 64; box++)
                load_box(to + box * X_BOX, &p.x, chunk * DEPTH + box * 64, row_tile * BM, full);
            ring.advance();
        }
    }
}

// Scale and δ of a column as `weights` takes them: 16-bit arithmetic, unless the pack has its scales in fp32.
#if SCALE32
using Column = Affine;
DEVICE Column column_of(float scale, float delta) { return affine(scale, delta); }
#else
using Column = Centred;
DEVICE Column column_of(float scale, float delta) { return centred(scale, delta); }
#endif

struct Consumer {
    const Problem& p;
    const Weight& w;
    const u32 memory;
    const int thread, consumer, warp, lane, r, t;  // thread and warp within the warpgroup
    const int block, word0;                        // this warp's 64 columns among the tile's, and its first word
    XRing rows;                                    // where wgmma is
    WRing words;                                   // where words are read
    Column columns[RUNS][2 * NJ];                  // of the chunk that is decoded
    int group_left;                                // chunks that begin in its group and are not read yet

    DEVICE Consumer(const Problem& p, const Weight& w, u32 memory)
        : p(p), w(w), memory(memory), thread(threadIdx.x % 128), consumer(threadIdx.x / 128), warp(thread / 32), lane(thread % 32),
          r(lane / 4), t(lane % 4), block(consumer * NJ + warp * NJ / 4), word0(warp * NJ % 4) {}

    DEVICE void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(consumer + 1) : "memory"); }

    // Of the chunk whose first words were read: the columns' scale and δ, unless its group has begun before.
    DEVICE void read_params() {
        if (RUNS == 1 && group_left-- > 0) return;
        group_left = p.runs_per_group - 1;
#pragma unroll
        for (int u = 0; u < RUNS; u++) {
            const u32 runs = memory + WORDS + words.slot * W_STAGE_BYTES + W_BYTES + u * RUN_BYTES;
#pragma unroll
            for (int i = 0; i < 2 * NJ; i++) {
                const float scale = scale_at(runs + block * SCALE_BYTES, r, 2 * word0 + i);
                const float delta = delta_at(runs + BLOCKS64 * SCALE_BYTES + block * DELTA_BYTES, r, 2 * word0 + i);
                columns[u][i] = column_of(scale, delta);
            }
        }
    }

    DEVICE void read_words(u32 (&word)[E], int unit) const {
        const u32 at = memory + WORDS + words.slot * W_STAGE_BYTES + block * 512 + lane * 16 + word0 * 4;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const u32 from = at + (unit * STEPS + s) * BLOCKS64 * 512;
            if constexpr (NJ == 4)
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(word[4 * s]), "=r"(word[4 * s + 1]), "=r"(word[4 * s + 2]), "=r"(word[4 * s + 3])
                             : "r"(from));
            else if constexpr (NJ == 2)
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(word[2 * s]), "=r"(word[2 * s + 1]) : "r"(from));
            else
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word[s]) : "r"(from));
        }
    }

    DEVICE void decode(u32 (&a)[E][4], const u32 (&word)[E], int unit) const {
#pragma unroll
        for (int e = 0; e < E; e++) {
            const int run = (unit * STEPS + e / NJ) * RUNS * 16 / DEPTH, j = e % NJ;
            weights(a[e], word[e], columns[run][2 * j], columns[run][2 * j + 1]);
        }
    }

    // Words of the next unit that is not read yet, unit `unit` of its chunk, and what else the chunk needs.
    DEVICE void read_unit(u32 (&word)[E], int unit) {
        if (unit == 0) barrier_wait(words.full(memory), words.parity);
        read_words(word, unit);
        if (unit == 0) read_params();
        if (unit == CHUNK_UNITS - 1) {
            __syncwarp();
            if (lane == 0) barrier_arrive(words.empty(memory));
            words.advance();
        }
    }

    // One unit on its way through the pipeline: `unit` of the chunk at `rows`, with W in `now`.
    // Left over when it returns: W of the next unit in `next`, words of the one after in `word`.
    DEVICE void unit_step(float (&acc)[NJ][ACC], u32 (&now)[E][4], u32 (&next)[E][4], u32 (&word)[E], int unit, int& to_decode, int& to_read) {
        if (unit == 0) barrier_wait(rows.full(memory), rows.parity);
        wgmma_fence();
        const u64 x = x_descriptor(memory + rows.slot * X_BYTES);
#pragma unroll
        for (int e = 0; e < E; e++) {
            const int step = unit * STEPS + e / NJ;
            wgmma(acc[e % NJ], now[e], x + step / 4 * (X_BOX >> 4) + step % 4 * 2);
        }
        wgmma_commit();
        if (to_decode > 0) decode(next, word, (unit + 1) % CHUNK_UNITS), to_decode--;
        if (to_read > 0) read_unit(word, (unit + 2) % CHUNK_UNITS), to_read--;
        wgmma_wait();
        if (unit == CHUNK_UNITS - 1) {
            if (lane == 0) barrier_arrive(rows.empty(memory));
            rows.advance();
        }
    }

    DEVICE void product(float (&acc)[NJ][ACC], const Item& item) {
        u32 a[E][4], b[E][4], word[E];
        const int units = (item.end - item.first) * CHUNK_UNITS;
        int to_decode = units - 1, to_read = units - 1;
        if (SPLITS > 1 && units == 0) return;  // more blocks in the cluster than chunks
        group_left = 0;
        read_unit(word, 0);
        group_left -= item.first % p.runs_per_group;
        decode(a, word, 0);
        if (to_read > 0) read_unit(word, 1 % CHUNK_UNITS), to_read--;
        for (int unit = 0; unit < units; unit += 2) {
            unit_step(acc, a, b, word, unit % CHUNK_UNITS, to_decode, to_read);
            if (unit + 1 < units) unit_step(acc, b, a, word, (unit + 1) % CHUNK_UNITS, to_decode, to_read);
        }
    }

    // Column of the tile's 64·BLOCKS64 for accumulator [j], rows r (half 0) and r + 8 (half 1).
    DEVICE int column(int j, int half) const { return block * 64 + (word0 + j) * 16 + half * 8 + r; }

    // Of a cut tile: leave these sums for the block that has the tile's first chunk, or be that block, and add what the
    // others left, in the order of k. True for the latter. It had the tile last and the others had it first, so that
    // it seldom waits.
    DEVICE bool reduce(float (&acc)[NJ][ACC], const Item& item) {
        const int cut_tile = item.tile - p.whole, start = cut_tile * p.chunks;
        const int first = start / p.piece, last = (start + p.chunks - 1) / p.piece;
        u32* arrived = p.arrived + cut_tile * CW + consumer;
        float4* partial = p.partial + consumer * 128 + thread;
        if (item.first > 0) {
            partial += (i64)blockIdx.x * QUADS * CONSUMER_THREADS;
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                const float* v = acc[q / (ACC / 4)] + q % (ACC / 4) * 4;
                __stcg(partial + (i64)q * CONSUMER_THREADS, make_float4(v[0], v[1], v[2], v[3]));
            }
            __threadfence();
            sync();
            if (thread == 0) atomicAdd(arrived, 1);
            return false;
        }
        if (thread == 0) {
            while (load_acquire(arrived) != last - first) __nanosleep(32);
            *arrived = 0;
        }
        sync();
        constexpr int BATCH = QUADS < 8 ? QUADS : 8;  // quads that are on their way at a time
        for (int b = first + 1; b <= last; b++) {
            const float4* from = partial + (i64)b * QUADS * CONSUMER_THREADS;
#pragma unroll
            for (int q0 = 0; q0 < QUADS; q0 += BATCH) {
                float4 f[BATCH];
#pragma unroll
                for (int q = 0; q < BATCH; q++) f[q] = __ldcg(from + (i64)(q0 + q) * CONSUMER_THREADS);
#pragma unroll
                for (int q = 0; q < BATCH; q++) {
                    float* v = acc[(q0 + q) / (ACC / 4)] + (q0 + q) % (ACC / 4) * 4;
                    v[0] += f[q].x, v[1] += f[q].y, v[2] += f[q].z, v[3] += f[q].w;
                }
            }
        }
        return true;
    }

    // Add what the blocks of the cluster have of the tile; each gets the sums of its own ROWS rows, first in acc.
    DEVICE void add_splits(float (&acc)[NJ][ACC]) const {
        asm volatile("bar.sync %0, %1;" ::"n"(CW + 1), "n"(CONSUMER_THREADS) : "memory");  // the stages are free
        const u32 at = memory + threadIdx.x * 16;
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const float* v = acc[q / (ACC / 4)] + q % (ACC / 4) * 4;
            store_shared16(at + q * CONSUMER_THREADS * 16, make_float4(v[0], v[1], v[2], v[3]));
        }
        cluster_arrive();
        cluster_wait();
        const u32 own = at + cluster_rank() * (ROWS / 8) * CONSUMER_THREADS * 16;
#pragma unroll
        for (int j = 0; j < NJ; j++)
#pragma unroll
            for (int i = 0; i < ROWS / 8; i++) {
                float* v = acc[j] + i * 4;
                v[0] = v[1] = v[2] = v[3] = 0.f;
#pragma unroll
                for (int rank = 0; rank < SPLITS; rank++) {
                    const float4 f = load_from(rank, own + (j * (ACC / 4) + i) * CONSUMER_THREADS * 16);
                    v[0] += f.x, v[1] += f.y, v[2] += f.z, v[3] += f.w;
                }
            }
    }

    // Round, transpose through shared memory, and write ROWS rows, OUT_ROWS at a time.
    DEVICE void write(float (&acc)[NJ][ACC], int row0, int column0) {
        const u32 out = memory + OUT + consumer * OUT_BYTES;
        const int local = (block - consumer * NJ) * 64 + word0 * 16;  // this warp's first column among the consumer's
        float bias[NJ][2];
#pragma unroll
        for (int j = 0; j < NJ; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int n = column0 + column(j, h);
                bias[j][h] = w.bias && n < p.N ? f32_of(w.bias[n]) : 0.f;
            }
#pragma unroll
        for (int pass = 0; pass < ROWS / OUT_ROWS; pass++) {
#pragma unroll
            for (int j = 0; j < NJ; j++)
#pragma unroll
                for (int i = 0; i < OUT_ROWS / 8; i++) {
                    const float* v = acc[j] + (pass * (OUT_ROWS / 8) + i) * 4;
                    const int row = i * 8 + (lane & 7), at = local + j * 16 + (lane >> 3 & 1) * 8;
                    store_matrices(out + (row * OUT_STRIDE + at) * 2, pack2(v[0] + bias[j][0], v[1] + bias[j][0]),
                                   pack2(v[2] + bias[j][1], v[3] + bias[j][1]));
                }
            sync();
            write_rows(out, row0 + pass * OUT_ROWS, column0 + consumer * 64 * NJ);
            sync();
        }
    }

    DEVICE void write_rows(u32 out, int row0, int column0) {
        constexpr int PIECES = 8 * NJ;  // of sixteen bytes, in a row
        for (int i = thread; i < OUT_ROWS * PIECES; i += 128) {
            const int row = i / PIECES, c = i % PIECES * 8, n = column0 + c;
            if (row0 + row >= p.M) break;
            if (n >= p.N) continue;
            const uint4 v = load_shared16(out + (row * OUT_STRIDE + c) * 2);
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
        Item item;
        for (Schedule schedule(p); schedule.next(item);) {
            float acc[NJ][ACC];
#pragma unroll
            for (int j = 0; j < NJ; j++)
#pragma unroll
                for (int i = 0; i < ACC; i++) acc[j][i] = 0.f;
            product(acc, item);
            if (SPLITS > 1)
                add_splits(acc);
            else if (item.end - item.first < p.chunks && !reduce(acc, item))
                continue;
            int row_tile, column_tile;
            place(p, item.tile, row_tile, column_tile);
            write(acc, row_tile * BM + cluster_rank() * ROWS, column_tile * BN);
        }
        if (SPLITS > 1) cluster_arrive(), cluster_wait();  // the others may still read here
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
    if (threadIdx.x == 0) {
        for (int s = 0; s < X_STAGES; s++) {
            barrier_init(memory + X_BARRIERS + s * 16, 1);
            barrier_init(memory + X_BARRIERS + s * 16 + 8, CW * 4);
        }
        for (int s = 0; s < W_STAGES; s++) {
            barrier_init(memory + W_BARRIERS + s * 16, 1);
            barrier_init(memory + W_BARRIERS + s * 16 + 8, CW * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMER_THREADS) {
        registers_down<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMER_THREADS) load_words(arguments.p, arguments.w, memory);
        if (threadIdx.x == CONSUMER_THREADS + 32) load_x(arguments.p, memory);
    } else {
        registers_up<CONSUMER_REGISTERS>();
        Consumer(arguments.p, arguments.w, memory).run();
    }
}
