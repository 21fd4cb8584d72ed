// y[M, N] = x[M, K] @ W on Hopper's warpgroup tensor cores (capability 9.0 exactly), from the same packed words as
// tensor_core.cu.
//
// The idea. `wgmma` takes one factor from registers. Computing yᵀ = Wᵀ xᵀ, that factor is Wᵀ, and a word of the device
// format is a lane's share of its fragment as it stands: codes go from shared memory to registers, become W there, and
// never return. x is the other factor and stays in shared memory, where the copy engine puts it.
//
//   producer (1 thread)    x: TMA, 64 k × BM rows, swizzled      words, scale, δ: bulk copies      ─► stage s, `full[s]`
//   consumer (CW × 128)    words of unit u+2 ─lds─► registers ─► W of unit u+1 │ wgmma of unit u in flight │ `empty[s]`
//
// A unit is four wgmma of 64 columns × BM rows × 16 k. Warp w of a consumer owns NJ words of a lane's four, so a consumer
// covers 64·NJ columns; NJ·BM ≤ 256 keeps the accumulators in 128 registers. Decoding one word takes 23 instructions and
// serves BM rows. δ, as in tensor_core.cu's `decode`, costs nothing: W is computed in fp32 and rounded once.
//
// Work. The grid is one block per multiprocessor. `whole` tiles are dealt out in rounds, one to each block; of the rest,
// too few for a round, all chunks of k are laid end to end and cut into equal pieces, one per block. Blocks that
// hold a piece of a tile leave fp32 sums in global memory, and the last to arrive adds them in the order of k.

#ifndef BM
#define BM 256   // rows of x per tile: 64, 128 or 256
#define NJ 1     // words per lane and step
#define CW 2     // consumer warpgroups
#define STAGES 4
#endif

constexpr int BLOCKS64 = NJ * CW, BN = 64 * BLOCKS64, CONSUMER_THREADS = CW * 128, THREADS = CONSUMER_THREADS + 128;
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8, PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * 128) / CONSUMER_THREADS / 8 * 8;
constexpr int STEPS = 4 / NJ, CHUNK_UNITS = NJ;  // steps of 16 k per unit, units per chunk
constexpr int X_BYTES = BM * CHUNK * 2, W_BYTES = BLOCKS64 * CHUNK * 32;
constexpr int RUN_BYTES = BLOCKS64 * (SCALE_BYTES + DELTA_BYTES);
constexpr int STAGE_BYTES = X_BYTES + (W_BYTES + UNITS * RUN_BYTES + 1023) / 1024 * 1024;
constexpr int OUT_STRIDE = 64 * NJ + 8;  // of a consumer's tile on its way out; the 8 against bank conflicts
constexpr int OUT_BYTES = BM * OUT_STRIDE * 2, BARRIERS = STAGES * STAGE_BYTES + CW * OUT_BYTES;
constexpr int ACC = BM / 2, QUADS = NJ * ACC / 4;  // registers per wgmma, four at a time

struct alignas(64) TensorMap {
    u64 opaque[16];
};

struct Problem {
    TensorMap x;     // [M][K], boxes of 64 k × BM rows, 128-byte swizzle, zeros outside
    u16* y;          // [M][N]
    float4* partial; // [2 pieces of a block][QUADS][CONSUMER_THREADS]
    u32* arrived;    // [tiles][CW], zero between launches
    int M, N;
    int blocks64, chunks, units_per_group;
    int row_tiles, column_tiles;
    int whole;       // tiles that are dealt out whole
    int piece, total;  // chunks of the cut tiles: per block, and altogether
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
#if BM == 64
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

DEVICE void store_matrices(u32 at, const u32 (&d)[4]) {  // transposing: a lane's two neighbours end up in two rows
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(d[0]), "r"(d[1]), "r"(d[2]),
                 "r"(d[3]) : "memory");
}

DEVICE void store_shared4(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }

// ---- work ------------------------------------------------------------------------------------------------------------

struct Item {  // chunks first … end − 1 of a tile
    int tile, first, end;
};

// Where block b's piece of the cut tiles begins, among their chunks laid end to end.
DEVICE int cut(const Problem& p, int b) { return min(p.piece * b, p.total); }

// What this block does, one item after another: its piece of the cut tiles, then whole tiles.
struct Schedule {
    const Problem& p;
    int tile, chunk, left;  // in its piece
    int whole;

    DEVICE explicit Schedule(const Problem& p) : p(p), whole(blockIdx.x) {
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
        item = Item{whole, 0, p.chunks};
        whole += gridDim.x;
        return true;
    }
};

// Neighbouring tiles share columns of W, eight row tiles at a time, so that x and W both come from the L2 cache.
DEVICE void place(const Problem& p, int tile, int& row_tile, int& column_tile) {
    constexpr int RASTER = 8;
    const int band = tile / (RASTER * p.column_tiles), rows = min(p.row_tiles - band * RASTER, RASTER);
    const int within = tile - band * RASTER * p.column_tiles;
    row_tile = band * RASTER + within % rows, column_tile = within / rows;
}

struct Ring {  // position in the stages
    int slot = 0;
    u32 parity = 0;
    DEVICE void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

// The copies of chunk after chunk. x may be written by the kernel before; words and parameters are not.
struct Producer {
    const Problem& p;
    const Weight& w;
    const u32 memory;
    Ring ring, x_ring;
    const uint4* words;
    int block0, blocks, group, units_left, row;

    DEVICE void start(const Item& item) {
        int row_tile, column_tile;
        place(p, item.tile, row_tile, column_tile);
        block0 = column_tile * BLOCKS64, blocks = min(BLOCKS64, p.blocks64 - block0), row = row_tile * BM;
        group = item.first * UNITS / p.units_per_group;
        units_left = p.units_per_group - item.first * UNITS % p.units_per_group;
        words = w.B + ((i64)item.first * 4 * p.blocks64 + block0) * 32;
    }

    DEVICE void load_weight() {
        const u32 full = memory + BARRIERS + ring.slot * 16;
        u32 to = memory + ring.slot * STAGE_BYTES + X_BYTES;
        barrier_wait(full + 8, ring.parity ^ 1);
        barrier_expect(full, X_BYTES + blocks * (CHUNK * 32 + UNITS * (SCALE_BYTES + DELTA_BYTES)));
#pragma unroll
        for (int step = 0; step < 4; step++, to += BLOCKS64 * 512, words += (i64)p.blocks64 * 32)
            load_bulk(to, words, blocks * 512, full);
#pragma unroll
        for (int u = 0; u < UNITS; u++, to += RUN_BYTES) {
            const i64 run = (i64)group * p.blocks64 + block0;
            load_bulk(to, w.S + run * SCALE_BYTES, blocks * SCALE_BYTES, full);
            if (DELTA_BYTES) load_bulk(to + BLOCKS64 * SCALE_BYTES, w.delta + run * 64, blocks * DELTA_BYTES, full);
            if (--units_left == 0) group++, units_left = p.units_per_group;
        }
        ring.advance();
    }

    DEVICE void load_x(int chunk) {
        load_box(memory + x_ring.slot * STAGE_BYTES, &p.x, chunk * CHUNK, row, memory + BARRIERS + x_ring.slot * 16);
        x_ring.advance();
    }

    DEVICE void run() {
        Schedule schedule(p);
        Item item;
        bool waited = false;
        while (schedule.next(item)) {
            start(item);
            const int ready = waited ? item.first : min(item.end, item.first + STAGES) - 1;
            int x_chunk = item.first;
            for (int chunk = item.first; chunk < item.end; chunk++) {
                load_weight();
                if (chunk < ready) continue;
                if (!waited) wait_for_predecessor(), waited = true;
                while (x_chunk <= chunk) load_x(x_chunk++);
            }
        }
    }
};

struct Consumer {
    const Problem& p;
    const Weight& w;
    const u32 memory;
    const int thread, consumer, warp, lane, r, t;  // thread and warp within the warpgroup
    const int block, word0;                        // this warp's 64 columns among the tile's, and its first word
    Ring issue, read;                              // where wgmma is, and where words are read
    Affine columns[UNITS][2 * NJ];                 // of the chunk that is decoded

    DEVICE Consumer(const Problem& p, const Weight& w, u32 memory)
        : p(p), w(w), memory(memory), thread(threadIdx.x % 128), consumer(threadIdx.x / 128), warp(thread / 32), lane(thread % 32),
          r(lane / 4), t(lane % 4), block(consumer * NJ + warp * NJ / 4), word0(warp * NJ % 4) {}

    DEVICE u32 full(const Ring& ring) const { return memory + BARRIERS + ring.slot * 16; }

    DEVICE void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(consumer + 1) : "memory"); }

    DEVICE void read_params() {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const u32 runs = memory + read.slot * STAGE_BYTES + X_BYTES + W_BYTES + u * RUN_BYTES;
#pragma unroll
            for (int i = 0; i < 2 * NJ; i++) {
                const float scale = scale_at(runs + block * SCALE_BYTES, r, 2 * word0 + i);
                const float delta = delta_at(runs + BLOCKS64 * SCALE_BYTES + block * DELTA_BYTES, r, 2 * word0 + i);
                columns[u][i] = affine(scale, delta);
            }
        }
    }

    DEVICE void read_words(u32 (&word)[4], int unit) const {
        const u32 at = memory + read.slot * STAGE_BYTES + X_BYTES + block * 512 + lane * 16 + word0 * 4;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const u32 from = at + (unit * STEPS + s) * BLOCKS64 * 512;
            if constexpr (NJ == 4)
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(from));
            else if constexpr (NJ == 2)
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(word[2 * s]), "=r"(word[2 * s + 1]) : "r"(from));
            else
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word[s]) : "r"(from));
        }
    }

    DEVICE void decode(u32 (&a)[4][4], const u32 (&word)[4], int unit) const {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int half = UNITS == 1 ? 0 : (unit * STEPS + e / NJ) / 2, j = e % NJ;
            weights(a[e], word[e], columns[half][2 * j], columns[half][2 * j + 1]);
        }
    }

    // One unit on its way through the pipeline: `unit` of the chunk at `issue`, with W in `now`.
    // Left over when it returns: W of the next unit in `next`, words of the one after in `word`.
    DEVICE void unit_step(float (&acc)[NJ][ACC], u32 (&now)[4][4], u32 (&next)[4][4], u32 (&word)[4], int unit, int& to_decode, int& to_read) {
        wgmma_fence();
        const u64 x = x_descriptor(memory + issue.slot * STAGE_BYTES) + unit * STEPS * 2;
#pragma unroll
        for (int e = 0; e < 4; e++) wgmma(acc[e % NJ], now[e], x + e / NJ * 2);
        wgmma_commit();
        if (to_decode > 0) decode(next, word, (unit + 1) % CHUNK_UNITS), to_decode--;
        if (to_read > 0) {
            const int ahead = (unit + 2) % CHUNK_UNITS;
            barrier_wait(full(read), read.parity);
            read_words(word, ahead);
            if (ahead == 0) read_params();
            if (ahead == CHUNK_UNITS - 1) read.advance();
            to_read--;
        }
        wgmma_wait();
        if (unit == CHUNK_UNITS - 1) {
            if (lane == 0) barrier_arrive(full(issue) + 8);
            issue.advance();
        }
    }

    DEVICE void product(float (&acc)[NJ][ACC], int chunks) {
        u32 a[4][4], b[4][4], word[4];
        int units = chunks * CHUNK_UNITS, to_decode = units, to_read = units;
        auto read_next = [&](int unit) {
            barrier_wait(full(read), read.parity);
            read_words(word, unit);
            if (unit == 0) read_params();
            if (unit == CHUNK_UNITS - 1) read.advance();
            to_read--;
        };
        read_next(0);
        decode(a, word, 0), to_decode--;
        if (to_read > 0) read_next(1 % CHUNK_UNITS);
        for (int unit = 0; unit < units; unit += 2) {
            unit_step(acc, a, b, word, unit % CHUNK_UNITS, to_decode, to_read);
            if (unit + 1 < units) unit_step(acc, b, a, word, (unit + 1) % CHUNK_UNITS, to_decode, to_read);
        }
    }

    // Column of the tile's 64·BLOCKS64 for accumulator [j], rows r (half 0) and r + 8 (half 1).
    DEVICE int column(int j, int half) const { return block * 64 + (word0 + j) * 16 + half * 8 + r; }

    // Leave the sums of this piece; true for the block that arrives last, with the sum of all pieces in acc.
    DEVICE bool reduce(float (&acc)[NJ][ACC], const Item& item) {
        const u32 before_at = memory + BARRIERS + STAGES * 16 + consumer * 4;
        const int cut_tile = item.tile - p.whole, start = cut_tile * p.chunks;
        const int first = start / p.piece, last = (start + p.chunks - 1) / p.piece;
        auto piece = [&](int b) {  // a block's first piece of a tile, or its second
            return p.partial + (i64)(2 * b + (cut(p, b) < start)) * QUADS * CONSUMER_THREADS + consumer * 128 + thread;
        };
        float4* mine = piece(blockIdx.x);
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const float (&v)[ACC] = acc[q / (ACC / 4)];
            const int i = q % (ACC / 4) * 4;
            __stcg(mine + (i64)q * CONSUMER_THREADS, make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
        }
        __threadfence();
        sync();
        u32* arrived = p.arrived + cut_tile * CW + consumer;
        if (thread == 0) store_shared4(before_at, atomicAdd(arrived, 1));
        sync();
        if (__float_as_int(load_shared4(before_at)) != last - first) return false;
        __threadfence();
        if (thread == 0) *arrived = 0;
        constexpr int BATCH = 8;  // quads that are on their way at a time
#pragma unroll
        for (int q0 = 0; q0 < QUADS; q0 += BATCH) {
            float4 sum[BATCH] = {};
            for (int b = first; b <= last; b++) {
                const float4* from = piece(b) + (i64)q0 * CONSUMER_THREADS;
                float4 f[BATCH];
#pragma unroll
                for (int q = 0; q < BATCH; q++) f[q] = __ldcg(from + (i64)q * CONSUMER_THREADS);
#pragma unroll
                for (int q = 0; q < BATCH; q++)
                    sum[q].x += f[q].x, sum[q].y += f[q].y, sum[q].z += f[q].z, sum[q].w += f[q].w;
            }
#pragma unroll
            for (int q = 0; q < BATCH; q++) {
                float* v = acc[(q0 + q) / (ACC / 4)] + (q0 + q) % (ACC / 4) * 4;
                v[0] = sum[q].x, v[1] = sum[q].y, v[2] = sum[q].z, v[3] = sum[q].w;
            }
        }
        return true;
    }

    // Round, transpose through shared memory, and write rows.
    DEVICE void write(float (&acc)[NJ][ACC], int row0, int column0) {
        const u32 out = memory + STAGES * STAGE_BYTES + consumer * OUT_BYTES;
        const int local = (block - consumer * NJ) * 64 + word0 * 16;  // this warp's first column among the consumer's
#pragma unroll
        for (int j = 0; j < NJ; j++) {
            float bias[2] = {0.f, 0.f};
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (w.bias && column0 + column(j, h) < p.N) bias[h] = f32_of(w.bias[column0 + column(j, h)]);
#pragma unroll
            for (int i = 0; i < BM / 8; i += 2) {
                u32 d[4];
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    const float* v = acc[j] + (i + q / 2) * 4 + (q & 1) * 2;
                    d[q] = pack2(v[0] + bias[q & 1], v[1] + bias[q & 1]);
                }
                const int row = (i + (lane >> 4)) * 8 + (lane & 7), at = local + j * 16 + (lane >> 3 & 1) * 8;
                store_matrices(out + (row * OUT_STRIDE + at) * 2, d);
            }
        }
        sync();
        constexpr int PIECES = 8 * NJ;  // of sixteen bytes, in a row
        for (int i = thread; i < BM * PIECES; i += 128) {
            const int row = i / PIECES, c = i % PIECES * 8, n = column0 + consumer * 64 * NJ + c;
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
        sync();
    }

    DEVICE void run() {
        Schedule schedule(p);
        Item item;
        while (schedule.next(item)) {
            float acc[NJ][ACC];
#pragma unroll
            for (int j = 0; j < NJ; j++)
#pragma unroll
                for (int i = 0; i < ACC; i++) acc[j][i] = 0.f;
            product(acc, item.end - item.first);
            if (item.end - item.first < p.chunks && !reduce(acc, item)) continue;
            int row_tile, column_tile;
            place(p, item.tile, row_tile, column_tile);
            write(acc, row_tile * BM, column_tile * BN);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 memory = shared_address(shared);
    release_successor();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(memory + BARRIERS + s * 16, 1);
            barrier_init(memory + BARRIERS + s * 16 + 8, CW * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMER_THREADS) {
        registers_down<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMER_THREADS) Producer{arguments.p, arguments.w, memory}.run();
    } else {
        registers_up<CONSUMER_REGISTERS>();
        wait_for_predecessor();
        Consumer(arguments.p, arguments.w, memory).run();
    }
}
