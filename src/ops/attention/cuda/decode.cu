// Decode attention.
//
// Roofline: K and V are read once, sum of lengths * kv_heads * 2 * 128 * element bytes. Reads alone
// reach 4.65 TB/s: 64 x 4,096 slots at 8 KV heads take 231 us in bfloat16 and 116 us in fp8. A multiprocessor
// gets a tile of 64 slots of fp8 in about 800 cycles; the tensor cores need a tenth of that.
//
// Persistent blocks attend the pieces of their bin (ops/attention/decode_plan.h). One warp brings K and V by
// the bulk copy engine into a ring that runs on over the borders of pieces, so that memory never waits for an
// epilogue. A warpgroup has the slots of a tile as the rows of wgmma and the queries as its columns: S^T = K
// Q^T, O^T += V^T P^T. Nothing is padded beyond 8 columns, and the sums are few registers.
//
// fp8: bfloat16 queries, scaled by a power of two for each row, are the sum of two e4m3 terms (the second
// scaled by 16), exactly but for elements below 2^-14 of the largest; probabilities likewise to 2^-8. The
// terms are columns of their own, which the matrix unit has to spare. V^T comes to registers through a
// transposing load of byte pairs; the order of slots that this gives is that in which probabilities are
// stored. wgmma keeps few bits below the largest term in e4m3, so each tile's product is added to O in
// float32.
#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/attention/cuda/decode_layout.cuh"
#include "ops/attention/cuda/decode_mma.cuh"
#include "ops/attention/cuda/decode_producer.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/common/cuda/tensor_map.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = kMathThreads + kWarp;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLowTerm = 16;  // the second term of an fp8 pair is stored times this

// The warpgroup that computes. In a product's sums, thread (warp w, lane 4 g + t) has rows 16 w + g and
// 16 w + g + 8, columns 8 j + 2 t and the next: [4 j + {0, 1}] of the former row, [4 j + {2, 3}] of the
// latter.
template <bool Fp8, int Rows, bool Scaled>
class Consumer {
    using S = Shared<Fp8, Rows, Scaled>;
    static constexpr int kBlocks = Rows / 8;  // of 8 columns
    static constexpr int kSums = S::kColumns / 2;
    static constexpr int kStepsOfScores = kHeadDim * (Fp8 ? 1 : 2) / kMmaStepBytes;
    static constexpr int kStepsOfValues = kDecodeTileSlots * (Fp8 ? 1 : 2) / kMmaStepBytes;
    static constexpr float kShift = Fp8 ? 8 : 0;  // probabilities are stored times 2^kShift
    // Halves of the dimensions multiplied at once; one alone where both would need too many registers.
    static constexpr int kHalves = Fp8 && Rows > 16 ? 1 : 2;
    static constexpr bool kPipelined = kHalves == 2;

  public:
    __device__ Consumer(const DecodeKernelArgs& args, const S& shared)
        : args_(args),
          shared_(shared),
          lane_(static_cast<int>(threadIdx.x) % kWarp),
          warp_(static_cast<int>(threadIdx.x) / kWarp) {}

    __device__ __forceinline__ void run() {
        if (!args_.decode.settled) {
            wait_for_previous_kernel();
        }
        DecodeWalk walk(args_);
        wait_for_previous_kernel();
        let_next_kernel_start();
        DecodeWork work;
        DecodeWork continued;  // the piece of a sequence that begins in an earlier bin
        while (walk.next(work)) {
            if (work.slots == 0) {
                write_empty(work.piece.sequence);
                continue;
            }
            if (args_.decode.settled && queries_ == 0 && warp_ == 0) {
                copy_queries(args_, shared_, work.piece.sequence, 0);
            }
            begin();
            if constexpr (kPipelined) {
                multiply_keys();
            }
            for (int tile = work.piece.begin; tile + 1 < work.piece.end; ++tile) {
                attend<kPipelined>(work, tile * kDecodeTileSlots);
            }
            attend<false>(work, (work.piece.end - 1) * kDecodeTileSlots);
            add_sums();
            finish(work);
            if (work.piece.begin > 0) {
                continued = work;
            }
        }
        merge(continued);
    }

  private:
    __device__ __forceinline__ int head() const { return static_cast<int>(blockIdx.x) % args_.rows.heads; }
    __device__ __forceinline__ int kv_head() const { return head() / args_.rows.parts; }
    __device__ __forceinline__ int part() const { return head() % args_.rows.parts; }
    __device__ __forceinline__ void release(uint32_t barrier) const {
        __syncwarp();
        barrier_arrive_for_all(barrier, lane_ == 0);
    }

    // Queries to the operand of the first product, and the state of the softmax to its begin.
    __device__ __forceinline__ void begin() {
        const int at = queries_ & 1;
        barrier_wait(shared_.query_full(at), queries_ >> 1 & 1);
        queries_ += 1;
        const float scale = args_.decode.scale * (Scaled ? 1 : args_.decode.kv.k_scale) * kLog2E;
#pragma unroll
        for (int i = 0; i < Rows / 8; ++i) {
            const int row = i * 8 + static_cast<int>(threadIdx.x) / 16;
            const int piece16 = static_cast<int>(threadIdx.x) % 16;
            uint4 raw =
                load_shared_16(shared_.raw(at) + static_cast<uint32_t>(row * kQueryBytes + piece16 * 16));
            if (row >= args_.rows.each) {
                raw = make_uint4(0, 0, 0, 0);
            }
            store_queries(raw, row, piece16, scale);
        }
        release(shared_.query_empty(at));
        fence_proxy_async();
        group_barrier(kMathBarrier, kMathThreads);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            const float2 scales =
                Fp8 ? load_shared_float2(scales_at(8 * j + lane_ % 4 * 2)) : make_float2(scale, scale);
            scale_[j][0] = scales.x;
            scale_[j][1] = scales.y;
        }
        sums_.clear();
    }
    __device__ __forceinline__ void store_queries(const uint4& raw, int row, int piece16, float scale) const {
        if constexpr (Fp8) {
            const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
            float values[8];
            float most = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                values[i] = i % 2 == 0 ? low_bf16(words[i / 2]) : high_bf16(words[i / 2]);
                most = fmaxf(most, fabsf(values[i]));
            }
            most = warp_reduce<16>(most, Max{});
            // 2^up takes the largest to [128, 256).
            const int up = 7 - min(max(static_cast<int>(__float_as_uint(most) >> 23) - 127, -100), 100);
            const float factor = __uint_as_float(static_cast<uint32_t>(up + 127) << 23);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                values[i] *= factor;
            }
            const uint2 a = split(make_float4(values[0], values[1], values[2], values[3]));
            const uint2 b = split(make_float4(values[4], values[5], values[6], values[7]));
            const uint32_t inside = static_cast<uint32_t>(piece16 % 2 * 8);
            store_shared(shared_.operand() + swizzle_128(row, piece16 / 2) + inside, make_uint2(a.x, b.x));
            store_shared(shared_.operand() + swizzle_128(Rows + row, piece16 / 2) + inside,
                         make_uint2(a.y, b.y));
            if (piece16 == 0) {
                store_shared(scales_at(row), scale * __uint_as_float(static_cast<uint32_t>(127 - up) << 23));
            }
        } else {
            const uint32_t block = static_cast<uint32_t>(piece16 / 8 * Rows * kSwizzleRowBytes);
            store_shared(shared_.operand() + block + swizzle_128(row, piece16 % 8), raw);
        }
    }
    // Four values as two e4m3 terms: x the first, y the second.
    __device__ static __forceinline__ uint2 split(float4 v) {
        const uint32_t high = pack_e4m3x4(v.x, v.y, v.z, v.w);
        const float2 xy = unpack_e4m3(static_cast<uint16_t>(high));
        const float2 zw = unpack_e4m3(static_cast<uint16_t>(high >> 16));
        return make_uint2(high, pack_e4m3x4((v.x - xy.x) * kLowTerm, (v.y - xy.y) * kLowTerm,
                                            (v.z - zw.x) * kLowTerm, (v.w - zw.y) * kLowTerm));
    }

    __device__ __forceinline__ uint32_t scales_at(int row) const {
        return shared_.floats() + static_cast<uint32_t>((2 * kMathWarps * Rows + row) * 4);
    }
    __device__ __forceinline__ uint32_t maxima_at(int warp, int row) const {
        return shared_.floats() + static_cast<uint32_t>((warp * Rows + row) * 4);
    }
    __device__ __forceinline__ uint32_t sums_at(int warp, int row) const {
        return maxima_at(kMathWarps + warp, row);
    }

    // One tile, from slot `slot` on. Next: starts the scores of the tile after it, whose end the next call
    // awaits.
    template <bool Next>
    __device__ __forceinline__ void attend(const DecodeWork& work, int slot) {
        if constexpr (!kPipelined) {
            multiply_keys();
        }
        const DecodePlanCudaArgs& plan = args_.decode.plan;
        const bool edge = slot < plan.first_slot || slot + kDecodeTileSlots > work.slots - plan.q_len + 1;
        const uint32_t key_empty = shared_.empty(cursor_.stage);
        const uint32_t key_scales = shared_.scales(cursor_.stage);
        cursor_.template advance<S::kStages>();
        const uint32_t value_empty = shared_.empty(cursor_.stage);
        const uint32_t values = shared_.half(cursor_.stage);
        barrier_wait(shared_.full(cursor_.stage), cursor_.parity);
        cursor_.template advance<S::kStages>();
        if (edge) {
            clear_values(work, slot, values);
        }
        uint32_t turned[kHalves][2][4];
        if constexpr (Fp8 && kHalves == 2) {
            turn_values(values, 0, turned);
        }
        mma_wait<0>();
        mma_pin(scores_);
        float weights[kBlocks][4];
        scale_scores(weights);
        if constexpr (Scaled) {
            scale_slots(key_scales, weights);
        }
        release(key_empty);
        if (edge) {
            hide(work, slot, weights);
        }
        float factors[kBlocks][2];
        soften(weights, factors);
        fence_proxy_async();
        group_barrier(kMathBarrier, kMathThreads);
        float products[kHalves][kSums];
#pragma unroll
        for (int first = 0; first < 2; first += kHalves) {
            if constexpr (Fp8 && kHalves == 1) {
                turn_values(values, first, turned);
            }
            multiply_values(values, first, turned, products);
            if constexpr (Next) {
                multiply_keys();
                mma_wait<1>();
            } else {
                mma_wait<0>();
            }
            add_products(first, products, factors);
        }
        release(value_empty);
    }

    // Starts the scores of the tile at the cursor.
    __device__ __forceinline__ void multiply_keys() {
        barrier_wait(shared_.full(cursor_.stage), cursor_.parity);
        const uint32_t keys = shared_.half(cursor_.stage);
        mma_begin();
#pragma unroll
        for (int s = 0; s < kStepsOfScores; ++s) {
            const auto inside = static_cast<uint32_t>(s % 4 * kMmaStepBytes);
            const uint64_t a = mma_descriptor(
                keys + static_cast<uint32_t>(s / 4 * kDecodeTileSlots * kSwizzleRowBytes) + inside);
            const uint64_t b = mma_descriptor(
                shared_.operand() + static_cast<uint32_t>(s / 4 * Rows * kSwizzleRowBytes) + inside);
            if constexpr (Fp8) {
                mma_fp8(scores_, a, b, s > 0);
            } else {
                mma_bf16<false>(scores_, a, b, s > 0);
            }
        }
        mma_commit();
    }

    // Zeros where no query looks: what lies there may be NaN.
    __device__ __forceinline__ void clear_values(const DecodeWork& work, int slot, uint32_t values) const {
        constexpr int kPieces = S::kHalfBytes / kMathThreads / 16;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const int index = i * kMathThreads + static_cast<int>(threadIdx.x);
            const int at = slot + index / (kSwizzleRowBytes / 16) % kDecodeTileSlots;
            if (at < args_.decode.plan.first_slot || at >= work.slots) {
                store_shared(values + static_cast<uint32_t>(index * 16), make_uint4(0, 0, 0, 0));
            }
        }
        fence_proxy_async();
        group_barrier(kMathBarrier, kMathThreads);
    }

    // V^T as the first operand of m64nNk32, from half `first` on: [half p][step][register]. Row g of half p
    // is dimension 32 w + 16 p + 2 g, row g + 8 the next one. Position 16 h + 2 i + e along the slots is slot
    // 16 h + i + 8 e.
    __device__ __forceinline__ void turn_values(uint32_t values, int first,
                                                uint32_t (&turned)[kHalves][2][4]) const {
#pragma unroll
        for (int p = 0; p < kHalves; ++p) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                uint32_t pairs[4];
                load_matrices_transposed(values + swizzle_128(32 * s + lane_, 2 * warp_ + first + p), pairs);
                turned[p][s][0] = __byte_perm(pairs[0], pairs[1], 0x6240);
                turned[p][s][1] = __byte_perm(pairs[0], pairs[1], 0x7351);
                turned[p][s][2] = __byte_perm(pairs[2], pairs[3], 0x6240);
                turned[p][s][3] = __byte_perm(pairs[2], pairs[3], 0x7351);
            }
        }
    }

    __device__ __forceinline__ void scale_scores(float (&weights)[kBlocks][4]) const {
#pragma unroll
        for (int i = 0; i < Rows / 2; ++i) {
            float score = scores_[i];
            if constexpr (Fp8) {
                score = fmaf(scores_[Rows / 2 + i], 1 / kLowTerm, score);
            }
            weights[i / 4][i % 4] = score * scale_[i / 4][i % 2];
        }
    }

    __device__ __forceinline__ void scale_slots(uint32_t scales, float (&weights)[kBlocks][4]) const {
        const uint32_t own = scales + static_cast<uint32_t>((warp_ * 16 + lane_ / 4) * 4);
        const float factors[2] = {load_shared_float(own), load_shared_float(own + 8 * 4)};
#pragma unroll
        for (int i = 0; i < Rows / 2; ++i) {
            weights[i / 4][i % 4] *= factors[i % 4 / 2];
        }
    }

    __device__ __forceinline__ void hide(const DecodeWork& work, int slot,
                                         float (&weights)[kBlocks][4]) const {
        const DecodePlanCudaArgs& plan = args_.decode.plan;
        const int first_row = part() * args_.rows.each;
#pragma unroll
        for (int i = 0; i < Rows / 2; ++i) {
            const int row = first_row + i / 4 * 8 + lane_ % 4 * 2 + i % 2;
            const int at = slot + warp_ * 16 + lane_ / 4 + i % 4 / 2 * 8;
            const int limit = work.slots - plan.q_len + row / args_.rows.group;
            const bool visible = at >= plan.first_slot && at <= limit;
            weights[i / 4][i % 4] = visible ? weights[i / 4][i % 4] : -INFINITY;
        }
    }

    // Scores to probabilities, against the running maximum of all slots, and to shared memory as P^T.
    __device__ __forceinline__ void soften(float (&weights)[kBlocks][4], float (&factors)[kBlocks][2]) {
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            float2 most =
                make_float2(fmaxf(weights[j][0], weights[j][2]), fmaxf(weights[j][1], weights[j][3]));
#pragma unroll
            for (int offset = 4; offset < kWarp; offset *= 2) {
                most.x = fmaxf(most.x, __shfl_xor_sync(kFullWarp, most.x, offset));
                most.y = fmaxf(most.y, __shfl_xor_sync(kFullWarp, most.y, offset));
            }
            if (lane_ < 4) {
                store_shared(maxima_at(warp_, 8 * j + 2 * lane_), most);
            }
        }
        group_barrier(kMathBarrier, kMathThreads);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            float most[2] = {sums_.base[j][0], sums_.base[j][1]};
#pragma unroll
            for (int w = 0; w < kMathWarps; ++w) {
                const float2 other = load_shared_float2(maxima_at(w, 8 * j + lane_ % 4 * 2));
                most[0] = fmaxf(most[0], other.x);
                most[1] = fmaxf(most[1], other.y);
            }
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float base = most[c] == -INFINITY ? 0.0f : most[c];
                factors[j][c] = exp2_fast(sums_.base[j][c] - base);
                sums_.base[j][c] = most[c];
                weights[j][c] = exp2_fast(weights[j][c] - (base - kShift));
                weights[j][c + 2] = exp2_fast(weights[j][c + 2] - (base - kShift));
                sums_.sum[j][c] = fmaf(sums_.sum[j][c], factors[j][c], weights[j][c] + weights[j][c + 2]);
            }
            store_weights(weights[j], j);
        }
    }
    __device__ __forceinline__ void store_weights(const float (&p)[4], int j) const {
        const int row = j * 8 + lane_ % 8;
        if constexpr (Fp8) {
            const uint2 terms = split(make_float4(p[0], p[2], p[1], p[3]));
            store_transposed_2(shared_.weights() + swizzle_128(lane_ / 8 % 2 * Rows + row, warp_), terms.x,
                               terms.y);
        } else {
            store_transposed_2(shared_.weights() + swizzle_128(row, 2 * warp_ + lane_ / 8 % 2),
                               pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3]));
        }
    }

    // Starts V^T P^T for the halves from `first` on.
    __device__ __forceinline__ void multiply_values(uint32_t values, int first,
                                                    const uint32_t (&turned)[kHalves][2][4],
                                                    float (&products)[kHalves][kSums]) const {
        mma_begin();
#pragma unroll
        for (int p = 0; p < kHalves; ++p) {
#pragma unroll
            for (int s = 0; s < kStepsOfValues; ++s) {
                const uint64_t b =
                    mma_descriptor(shared_.weights() + static_cast<uint32_t>(s * kMmaStepBytes));
                if constexpr (Fp8) {
                    mma_fp8(products[p], turned[p][s], b, s > 0);
                } else {
                    const int offset = ((first + p) * kDecodeTileSlots + s * 16) * kSwizzleRowBytes;
                    mma_bf16<true>(products[p],
                                   mma_descriptor_transposed(values + static_cast<uint32_t>(offset), 1024), b,
                                   s > 0);
                }
            }
        }
        mma_commit();
    }
    // O^T = O^T * factors + V^T P^T.
    __device__ __forceinline__ void add_products(int first, float (&products)[kHalves][kSums],
                                                 const float (&factors)[kBlocks][2]) {
#pragma unroll
        for (int p = 0; p < kHalves; ++p) {
            mma_pin(products[p]);
#pragma unroll
            for (int i = 0; i < Rows / 2; ++i) {
                float product = products[p][i];
                if constexpr (Fp8) {
                    product = fmaf(products[p][Rows / 2 + i], 1 / kLowTerm, product);
                }
                sums_.out[first + p][i] = fmaf(sums_.out[first + p][i], factors[i / 4][i % 2], product);
            }
        }
    }

    // The dimension of sums_.out[p][.. 0 and 1] in lanes 4 place + t; that of [.. 2 and 3] is kNextDim
    // further.
    static constexpr int kNextDim = Fp8 ? 1 : 8;
    __device__ static __forceinline__ int dim_of(int warp, int p, int place) {
        return Fp8 ? warp * 32 + p * 16 + place * 2 : p * 64 + warp * 16 + place;
    }

    // The piece's sums over all threads, to each of them.
    __device__ __forceinline__ void add_sums() {
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            float2 sum = make_float2(sums_.sum[j][0], sums_.sum[j][1]);
#pragma unroll
            for (int offset = 4; offset < kWarp; offset *= 2) {
                sum.x += __shfl_xor_sync(kFullWarp, sum.x, offset);
                sum.y += __shfl_xor_sync(kFullWarp, sum.y, offset);
            }
            if (lane_ < 4) {
                store_shared(sums_at(warp_, 8 * j + 2 * lane_), sum);
            }
        }
        group_barrier(kMathBarrier, kMathThreads);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            float2 sum = make_float2(0, 0);
#pragma unroll
            for (int w = 0; w < kMathWarps; ++w) {
                const float2 other = load_shared_float2(sums_at(w, 8 * j + lane_ % 4 * 2));
                sum.x += other.x;
                sum.y += other.y;
            }
            sums_.sum[j][0] = sum.x;
            sums_.sum[j][1] = sum.y;
        }
    }

    __device__ __forceinline__ void finish(const DecodeWork& work) {
        const DecodePieces& all = work.all;
        if (all.index > 0 || all.count > kDecodeCollected) {
            parts().publish(all.slot(all.index), args_.rows.each, sums_);
            return;
        }
        if (all.count > 1) {
            parts().collect(all, args_.rows.each, sums_);
        }
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                write_row({8 * j + lane_ % 4 * 2 + c, warp_}, lane_ / 4, sums_.share(j, c),
                          work.piece.sequence);
            }
        }
    }
    __device__ __forceinline__ void merge(const DecodeWork& work) const {
        if (work.all.count > kDecodeCollected) {
            parts().merge(work.all, args_.rows.each,
                          [&](const DecodeSlice& slice, int place, const DecodeShare& share) {
                              write_row(slice, place, share, work.piece.sequence);
                          });
        }
    }
    __device__ __forceinline__ DecodeParts<Rows> parts() const {
        return DecodeParts<Rows>(args_.layout.partials, shared_.weights());
    }
    __device__ __forceinline__ void write_row(const DecodeSlice& slice, int place, const DecodeShare& share,
                                              int32_t sequence) const {
        if (slice.row >= args_.rows.each) {
            return;
        }
        float factor = __fdividef(args_.decode.kv.v_scale, share.sum);
        if (Fp8 && args_.decode.kv.v_scales != nullptr) {
            factor = __fdividef(args_.decode.kv.v_scales[kv_head()], share.sum);
        }
        const int64_t to = output_place(sequence, slice.row);
        const int first = dim_of(slice.warp, 0, place);
        const int second = dim_of(slice.warp, 1, place);
        write(to + first, share.out.x * factor);
        write(to + first + kNextDim, share.out.y * factor);
        write(to + second, share.out.z * factor);
        write(to + second + kNextDim, share.out.w * factor);
        if (slice.warp == 0 && place == 0 && args_.decode.lse != nullptr) {
            args_.decode.lse[lse_place(sequence, slice.row)] =
                (share.base - kShift + log2f(share.sum)) * kLn2;
        }
    }

    __device__ __forceinline__ void write(int64_t place, float value) const {
        const DecodeCudaArgs& decode = args_.decode;
        // With 32 rows there are no registers left for it.
        if constexpr (Rows <= kDecodeCudaRowsOfE4m3) {
            if (decode.out8 != nullptr) {
                const float code = args_.out8_divide.for_e4m3(round_bf16(value));
                decode.out8[place] = static_cast<uint8_t>(pack_e4m3(code, 0));
                return;
            }
        }
        static_cast<__nv_bfloat16*>(decode.out)[place] = __float2bfloat16_rn(value);
    }

    __device__ __forceinline__ int64_t token_of(int32_t sequence, int row) const {
        const int of_head = part() * args_.rows.each + row;
        return int64_t{sequence} * args_.decode.plan.q_len + of_head / args_.rows.group;
    }
    __device__ __forceinline__ int head_of(int row) const {
        const int of_head = part() * args_.rows.each + row;
        return kv_head() * args_.rows.group + of_head % args_.rows.group;
    }
    __device__ __forceinline__ int64_t output_place(int32_t sequence, int row) const {
        return token_of(sequence, row) * args_.decode.out_stride + head_of(row) * kHeadDim;
    }
    __device__ __forceinline__ int64_t lse_place(int32_t sequence, int row) const {
        return token_of(sequence, row) * args_.decode.plan.shape.q_heads + head_of(row);
    }
    __device__ __forceinline__ void write_empty(int32_t sequence) const {
        for (int row = 0; row < args_.rows.each; ++row) {
            write(output_place(sequence, row) + threadIdx.x, 0);
            if (threadIdx.x == 0 && args_.decode.lse != nullptr) {
                args_.decode.lse[lse_place(sequence, row)] = -INFINITY;
            }
        }
    }

    const DecodeKernelArgs& args_;
    const S shared_;
    const int lane_;
    const int warp_;
    Cursor cursor_;
    uint32_t queries_ = 0;
    float scale_[kBlocks][2];
    DecodeSums<Rows> sums_;
    float scores_[kSums];
};

template <bool Fp8, int Rows, bool Scaled>
__global__ void __launch_bounds__(kThreads, kDecodeBlocksOfSm)
    decode_kernel(const __grid_constant__ DecodeKernelArgs args, const __grid_constant__ CUtensorMap k,
                  const __grid_constant__ CUtensorMap v) {
    extern __shared__ __align__(1024) uint8_t memory[];
    using S = Shared<Fp8, Rows, Scaled>;
    const S shared{shared_address(memory)};
    if (threadIdx.x == 0) {
        prefetch_map(&k);
        prefetch_map(&v);
        for (int stage = 0; stage < S::kStages; ++stage) {
            barrier_init(shared.full(stage), 1);
            barrier_init(shared.empty(stage), kMathWarps * kWarpArrivals);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared.query_full(i), 1);
            barrier_init(shared.query_empty(i), kMathWarps * kWarpArrivals);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= kMathThreads) {
        Producer<Fp8, Rows, Scaled>(args, &k, &v, shared).run();
    } else {
        Consumer<Fp8, Rows, Scaled>(args, shared).run();
    }
}

template <bool Fp8, int Rows, bool Scaled>
void launch_rows(cudaStream_t stream, const DecodeKernelArgs& args) {
    constexpr int kBytes = Shared<Fp8, Rows, Scaled>::kBytes;
    // A page's blocks lie far from the next page's, and a copy asks for whole lines anyway: without the
    // cache's fetching twice as much, reads are a tenth faster.
    constexpr bool kPromote = false;
    const auto kernel = decode_kernel<Fp8, Rows, Scaled>;
    const PagedKvCuda& kv = args.decode.kv;
    const int64_t heads = args.decode.plan.shape.kv_heads;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    int resident = 0;
    cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, kBytes));
    check(resident >= kDecodeBlocksOfSm, "attention decode: blocks that wait for others must be resident");
    cuda_check(launch_dependent(
        {dim3(static_cast<unsigned>(args.layout.bin_count * args.rows.heads)), kThreads, kBytes, stream},
        kernel, args, make_page_map(kv.pool + kv.k_offset, kv.dtype, heads, kv.page_stride, kPromote),
        make_page_map(kv.pool + kv.v_offset, kv.dtype, heads, kv.page_stride, kPromote)));
}

template <bool Fp8, bool Scaled>
void launch_decode(cudaStream_t stream, const DecodeKernelArgs& args) {
    if (args.rows.padded == 8) {
        launch_rows<Fp8, 8, Scaled>(stream, args);
    } else if (args.rows.padded == 16) {
        launch_rows<Fp8, 16, Scaled>(stream, args);
    } else {
        launch_rows<Fp8, 32, Scaled>(stream, args);
    }
}

}  // namespace
}  // namespace tessera::cuda

namespace tessera {

void attention_decode_cuda(cudaStream_t stream, const DecodeCudaArgs& args) {
    const cuda::DecodeKernelArgs kernel_args{.decode = args,
                                             .layout = cuda::make_decode_layout(args.plan),
                                             .rows = cuda::make_decode_rows(args.plan),
                                             .out8_divide = {args.out8_scale, 1 / args.out8_scale}};
    check(args.out8 == nullptr || kernel_args.rows.padded <= kDecodeCudaRowsOfE4m3,
          "attention decode: out8 takes at most 16 rows of a KV head");
    const bool scaled = args.kv.k_scales_offset >= 0;
    if (args.kv.dtype == DType::kFloat8E4M3) {
        scaled ? cuda::launch_decode<true, true>(stream, kernel_args)
               : cuda::launch_decode<true, false>(stream, kernel_args);
    } else {
        check(args.kv.dtype == DType::kBFloat16 && !scaled && args.kv.v_scales == nullptr,
              "attention decode: KV in bfloat16 without scales, or e4m3");
        cuda::launch_decode<false, false>(stream, kernel_args);
    }
}

}  // namespace tessera
