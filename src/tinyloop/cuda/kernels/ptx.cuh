// The words that the kernels are written in: small functions, most of them one PTX instruction. Prepended to every kernel
// file before it is compiled, so that no file includes anything. BF16 (0 or 1) chooses the 16-bit type.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef BF16
#define BF16 0
#endif

#define DEVICE __device__ __forceinline__

// ---- numbers ---------------------------------------------------------------------------------------------------

DEVICE float f32_of_half(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

DEVICE float low_f16(u32 v) { return f32_of_half((u16)v); }
DEVICE float high_f16(u32 v) { return f32_of_half((u16)(v >> 16)); }

DEVICE float f32_of(u16 v) {  // the kernel's 16-bit type
#if BF16
    return __uint_as_float((u32)v << 16);
#else
    return f32_of_half(v);
#endif
}

DEVICE u32 pack2(float low, float high) {  // two floats, each rounded once, in one word
    u32 d;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#endif
    return d;
}

DEVICE float low_half(u32 v) { return f32_of((u16)v); }

DEVICE u32 low_twice(u32 v) {  // either half twice; instructions on two halves take it so, at no cost
    u32 d;
    asm("{ .reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low}; }" : "=r"(d) : "r"(v));
    return d;
}

DEVICE u32 high_twice(u32 v) {
    u32 d;
    asm("{ .reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high}; }" : "=r"(d) : "r"(v));
    return d;
}

DEVICE void add4(float* v, float4 t) { v[0] += t.x, v[1] += t.y, v[2] += t.z, v[3] += t.w; }

DEVICE float reciprocal(float v) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
    return d;
}

DEVICE u16 round16(float v) { return (u16)pack2(v, 0.f); }

template <u32 MASK, u32 MAGIC> DEVICE u32 and_or(u32 w) {  // (w & MASK) | MAGIC, one LOP3
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(w), "n"(MASK), "n"(MAGIC));
    return d;
}

DEVICE u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
#if BF16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
    return d;
}

DEVICE u32 add2(u32 a, u32 b) {
#if BF16
    return fma2(a, 0x3f803f80, b);  // bf16 has no sum before Hopper
#else
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#endif
}

// ---- shared memory and asynchronous copies ---------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Sixteen bytes to shared memory, of which the first `bytes` are read and the rest are zeros.
DEVICE void copy_async(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

DEVICE void copy_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

DEVICE uint4 load_shared16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

DEVICE uint2 load_shared8(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}

DEVICE float4 load_floats(u32 at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}

DEVICE void store_shared16(u32 at, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

DEVICE u16 load_shared2(u32 at) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}

DEVICE u32 load_shared4(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

DEVICE void load_matrices(u32 (&d)[4], u32 at) {  // four 8×8 matrices of 16-bit values, a row address per lane
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(at)
                 : "memory");
}

DEVICE void load_matrices(u32 (&d)[2], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(at) : "memory");
}

// v of lane `from` of the four lanes 4r … 4r + 3 that this one is of.
DEVICE u32 from_quad(u32 v, int from) { return __shfl_sync(0xffffffff, v, from, 4); }

// ---- barriers in shared memory ---------------------------------------------------------------------------------

DEVICE void barrier_init(u32 at, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

DEVICE void barrier_arrive(u32 at) {
    asm volatile("{ .reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(at) : "memory");
}

#if __CUDA_ARCH__ >= 900
#define WAIT "try_wait"  // which sleeps for a while
#else
#define WAIT "test_wait"
#endif

DEVICE void barrier_wait(u32 at, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier." WAIT ".parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(at),
        "r"(parity)
        : "memory");
}

#if __CUDA_ARCH__ >= 900
DEVICE void barriers_made() {  // by other lanes of the warp, too
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
}

DEVICE void barrier_expect(u32 at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

// ---- clusters: blocks that run together and reach into each other's shared memory --------------------------------

// All blocks of the cluster have arrived. What they have written is not waited for, which takes a microsecond.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Four floats into the memory of a block of the cluster, counted by its barrier when they are there.
DEVICE void send(int rank, u32 at, const float* v, u32 barrier) {
    asm volatile(
        "{ .reg .u32 to, full;\n"
        "mapa.shared::cluster.u32 to, %0, %6;\n"
        "mapa.shared::cluster.u32 full, %1, %6;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%2, %3, %4, %5}, [full]; }" ::"r"(at),
        "r"(barrier), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(rank) : "memory");
}
#endif

// ---- launches that overlap -------------------------------------------------------------------------------------

// From here on the next kernel of the stream may be started; what it does before `wait_for_predecessor` runs beside us.
DEVICE void release_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The kernel before this one in the stream is done and its results are visible. Only weights are read before.
DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- tensor cores ----------------------------------------------------------------------------------------------

// d += a · b on one warp: a 16×16, b 16×8, d 16×8 in fp32. Lane ℓ, with r = ℓ/4 and t = ℓ%4, holds
//   a[0] (r, 2t..2t+1)   a[1] (r+8, 2t..)   a[2] (r, 2t+8..)   a[3] (r+8, 2t+8..)
//   b[0] (2t..2t+1, r)   b[1] (2t+8.., r)
//   d[0], d[1] (r, 2t..2t+1)                d[2], d[3] (r+8, 2t..2t+1)
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
