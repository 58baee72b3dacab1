#include "ops/common/gemm.h"

#include "ops/common/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/common/gemm.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>

#include "base/check.h"
#include "ops/common/exp-inl.h"
#include "ops/common/exp.h"
#include "ops/common/gemm_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

void gemm_block_simd(const GemmBlockArgs& args) { gemm_block_ref(args); }

void silu_multiply_simd(const float* gate, const float* up, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        out[i] = silu_f32(gate[i]) * up[i];
    }
}

#else

// Rows from which widening a bfloat16 block once into float32 costs less than widening it in every tile.
constexpr int64_t kWidenRows = 3 * kTileRows;
constexpr int64_t kChunk = 256;  // k's per pass where a block is widened or rows are quantised; even

struct Rows {
    const float* pointers[kGemmRowsMax];
};

// out += rows[., first .. first + count) * block over the same k's, in tiles of up to kTileRows rows of even size.
template <class Weight>
void multiply(const float* const* rows, int64_t row_count, const BlockSlice& slice, float* out) {
    const int64_t tiles = (row_count + kTileRows - 1) / kTileRows;
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t end = row_count * (t + 1) / tiles;
        tile_rows<Weight>(rows + row, static_cast<int>(end - row), slice, out + row * kBlockOutputs);
        row = end;
    }
}

void quantise_rows(const float* const* rows, int64_t row_count, int64_t count, float input_scale, float* out) {
    for (int64_t r = 0; r < row_count; ++r) {
        round_row_to_e4m3(rows[r], count, input_scale, out + r * kChunk);
    }
}

// The general path: k in chunks, each with its rows quantised and its weights widened where that is asked for.
void multiply_chunked(const GemmBlockArgs& args, const BlockSlice& whole, bool widen) {
    const PackedMatrix& weight = *args.weight;
    alignas(64) float wide[kChunk * kBlockOutputs];
    alignas(64) float quantised[kGemmRowsMax * kChunk];
    Rows rows;
    for (int64_t k = 0; k < weight.inputs; k += kChunk) {
        const int64_t count = std::min(kChunk, weight.inputs - k);
        for (int64_t r = 0; r < args.row_count; ++r) {
            rows.pointers[r] = args.rows[r] + k;
        }
        if (weight.input_scale > 0) {
            quantise_rows(rows.pointers, args.row_count, count, weight.input_scale, quantised);
            for (int64_t r = 0; r < args.row_count; ++r) {
                rows.pointers[r] = quantised + r * kChunk;
            }
        }
        BlockSlice slice = whole;
        slice.count = count;
        if (weight.dtype == DType::kFloat32) {
            slice.words = whole.words + k * whole.columns;
            multiply<Float32Weight>(rows.pointers, args.row_count, slice, args.out);
            continue;
        }
        slice.words = whole.words + k / 2 * whole.columns;
        if (!widen) {
            multiply<BFloat16Weight>(rows.pointers, args.row_count, slice, args.out);
            continue;
        }
        widen_slice(slice, wide);
        slice.words = reinterpret_cast<const uint32_t*>(wide);
        multiply<Float32Weight>(rows.pointers, args.row_count, slice, args.out);
    }
}

void gemm_block_simd(const GemmBlockArgs& args) {
    const PackedMatrix& weight = *args.weight;
    const int64_t columns = weight.block_panels(args.block) * kPanelOutputs;
    for (int64_t r = 0; r < args.row_count; ++r) {
        std::fill_n(args.out + r * kBlockOutputs, columns, 0.0f);
    }
    const BlockSlice slice{reinterpret_cast<const uint32_t*>(weight.block_data(args.block)), columns, weight.inputs};
    const bool widen = weight.dtype == DType::kBFloat16 && args.row_count >= kWidenRows;
    if (weight.input_scale > 0 || widen) {
        multiply_chunked(args, slice, widen);
    } else if (weight.dtype == DType::kBFloat16) {
        multiply<BFloat16Weight>(args.rows, args.row_count, slice, args.out);
    } else {
        multiply<Float32Weight>(args.rows, args.row_count, slice, args.out);
    }
    if (weight.column_scale == nullptr) {
        return;
    }
    const float in = weight.input_scale > 0 ? weight.input_scale : 1.0f;
    const float* scales = weight.column_scale + args.block * kBlockOutputs;
    for (int64_t r = 0; r < args.row_count; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            args.out[r * kBlockOutputs + c] *= scales[c] * in;
        }
    }
}

void silu_multiply_simd(const float* gate, const float* up, float* out, int64_t n) {
    const Tag d;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        hn::StoreU(hn::Mul(silu_simd(d, hn::LoadU(d, gate + i)), hn::LoadU(d, up + i)), d, out + i);
    }
    for (; i < n; ++i) {
        out[i] = silu_f32(gate[i]) * up[i];
    }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera {

HWY_EXPORT(gemm_block_simd);
HWY_EXPORT(silu_multiply_simd);

void gemm_block(const GemmBlockArgs& args) {
    check(args.row_count >= 1 && args.row_count <= kGemmRowsMax, "gemm_block: too many rows");
    HWY_DYNAMIC_DISPATCH(gemm_block_simd)(args);
}

void silu_multiply(const float* gate, const float* up, float* out, int64_t n) {
    HWY_DYNAMIC_DISPATCH(silu_multiply_simd)(gate, up, out, n);
}

}  // namespace tessera
#endif
