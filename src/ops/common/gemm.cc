#include "ops/common/gemm.h"

#include "ops/common/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/common/gemm.cc"
#include <hwy/foreach_target.h>
//
#include <algorithm>
#include <cmath>
#include <hwy/highway.h>

#include "base/check.h"
#include "ops/common/exp-inl.h"
#include "ops/common/gemm_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
namespace {  // each file has its own

#if HWY_TARGET == HWY_SCALAR

void gemm_block_simd(const GemmBlockArgs& args) {
    gemm_block_ref(args);
}

void gemm_block_pair_simd(const GemmBlockArgs& a, const GemmBlockArgs& b) {
    gemm_block_ref(a);
    gemm_block_ref(b);
}

void swiglu_block_simd(const SwigluBlockArgs& args) {
    swiglu_block_ref(args);
}

#else

constexpr int64_t kChunk = 256;  // k's per pass where rows are rounded to e4m3; even

struct Rows {
    const float* pointers[kGemmRowsMax];
};

// Whether the second-level cache fetches lines in pairs, as Intel's do.
bool fetches_pairs() {
#if defined(__x86_64__)
    return __builtin_cpu_is("intel") != 0;
#else
    return false;
#endif
}

// out = rows * slice (or += where the slice resumes), in tiles of up to kTileRows rows, all of about one
// size.
template <class Weight>
void multiply(const float* const* rows, int64_t row_count, const BlockSlice& slice, float* out) {
    const int64_t tiles = (row_count + kTileRows - 1) / kTileRows;
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t end = row_count * (t + 1) / tiles;
        BlockSlice part = slice;
        // The slice's own words are near after the first tile; with several, the first fetches `also`.
        part.next = t + 1 == tiles ? slice.next : t == 0 ? slice.also : nullptr;
        tile_rows<Weight>(rows + row, static_cast<int>(end - row), part, out + row * kBlockOutputs);
        row = end;
    }
}

template <class Weight>
void multiply_rounded(const GemmBlockArgs& args, const BlockSlice& whole) {
    alignas(64) float rounded[kGemmRowsMax * kChunk];
    Rows rows;
    for (int64_t k = 0; k < whole.count; k += kChunk) {
        BlockSlice slice = whole;
        slice.count = std::min(kChunk, whole.count - k);
        slice.words += k / Weight::kPerWord * whole.columns;
        slice.resume = k > 0;
        slice.next = whole.next == nullptr ? nullptr : whole.next + (slice.words - whole.words);
        slice.also = whole.also == nullptr ? nullptr : whole.also + (slice.words - whole.words);
        for (int64_t r = 0; r < args.row_count; ++r) {
            rows.pointers[r] = rounded + r * kChunk;
            round_row_to_e4m3(args.rows[r] + k, slice.count, args.weight->input_scale, rounded + r * kChunk);
        }
        multiply<Weight>(rows.pointers, args.row_count, slice, args.out);
    }
}

template <class Weight>
void multiply_block(const GemmBlockArgs& args, const BlockSlice& slice) {
    if (args.weight->input_scale > 0) {
        multiply_rounded<Weight>(args, slice);
    } else {
        multiply<Weight>(args.rows, args.row_count, slice, args.out);
    }
}

// out += scales[c] * part, for one group.
void add_group(const GemmBlockArgs& args, const float* part, const float* scales, int64_t end) {
    for (int64_t r = 0; r < args.row_count; ++r) {
        float* out = args.out + r * kBlockOutputs;
        for (int64_t c = args.first; c < end; c += kLanes) {  // whole panels
            const Tag d;
            const Vector sum = hn::LoadU(d, out + c);
            const Vector add = hn::LoadU(d, part + r * kBlockOutputs + c);
            hn::StoreU(hn::MulAdd(hn::LoadU(d, scales + c), add, sum), d, out + c);
        }
    }
}

// The groups one after another, each with sums of its own.
template <class Weight>
void multiply_groups(const GemmBlockArgs& args, const BlockSlice& whole) {
    alignas(64) float rounded[kGemmRowsMax * kGroupInputs];
    alignas(64) float part[kGemmRowsMax * kBlockOutputs];
    float in[kGemmRowsMax];
    Rows rows;
    const PackedMatrix& weight = *args.weight;
    for (int64_t r = 0; r < args.row_count; ++r) {
        in[r] = weight.input_dynamic ? row_scale(args.rows[r], weight.inputs) : 0.0f;
        std::fill_n(args.out + r * kBlockOutputs + whole.first, whole.end - whole.first, 0.0f);
    }
    for (int64_t k = 0; k < whole.count; k += kGroupInputs) {
        BlockSlice slice = whole;
        slice.count = std::min(kGroupInputs, whole.count - k);
        slice.words += k / Weight::kPerWord * whole.columns;
        slice.next = whole.next == nullptr ? nullptr : whole.next + (slice.words - whole.words);
        slice.also = whole.also == nullptr ? nullptr : whole.also + (slice.words - whole.words);
        for (int64_t r = 0; r < args.row_count; ++r) {
            rows.pointers[r] = args.rows[r] + k;
            if (weight.input_dynamic) {
                round_row_to_e4m3(args.rows[r] + k, slice.count, in[r], rounded + r * kGroupInputs);
                rows.pointers[r] = rounded + r * kGroupInputs;
            }
        }
        multiply<Weight>(rows.pointers, args.row_count, slice, part);
        add_group(args, part,
                  weight.group_scale + k / kGroupInputs * weight.outputs + args.block * kBlockOutputs,
                  whole.end);
    }
    for (int64_t r = 0; weight.input_dynamic && r < args.row_count; ++r) {
        for (int64_t c = whole.first; c < whole.end; ++c) {
            args.out[r * kBlockOutputs + c] *= in[r];
        }
    }
}

void scale_columns(const GemmBlockArgs& args, int64_t end) {
    const float in = args.weight->input_scale > 0 ? args.weight->input_scale : 1.0f;
    const float* scales = args.weight->column_scale + args.block * kBlockOutputs;
    for (int64_t r = 0; r < args.row_count; ++r) {
        for (int64_t c = args.first; c < end; ++c) {
            args.out[r * kBlockOutputs + c] *= scales[c] * in;
        }
    }
}

void gemm_block_simd(const GemmBlockArgs& args) {
    const PackedMatrix& weight = *args.weight;
    const int64_t columns = weight.block_panels(args.block) * kPanelOutputs;
    const BlockSlice slice{.words = reinterpret_cast<const uint32_t*>(weight.block_data(args.block)),
                           .columns = columns,
                           .first = args.first,
                           .end = std::min(columns, args.first + args.columns),
                           .count = weight.inputs,
                           .next = reinterpret_cast<const uint32_t*>(args.next),
                           .also = reinterpret_cast<const uint32_t*>(args.also),
                           .pairs = fetches_pairs()};
    if (weight.dtype == DType::kInt4) {
        multiply_groups<Int4Weight>(args, slice);
    } else if (weight.group_scale != nullptr) {
        multiply_groups<BFloat16Weight>(args, slice);
    } else if (weight.dtype == DType::kBFloat16) {
        multiply_block<BFloat16Weight>(args, slice);
    } else {
        multiply_block<Float32Weight>(args, slice);
    }
    if (weight.column_scale != nullptr) {
        scale_columns(args, slice.end);
    }
}

// Whether gemm_block() is no more than sums over the whole of a full block.
bool is_plain(const GemmBlockArgs& args) {
    const PackedMatrix& weight = *args.weight;
    return args.row_count == 1 && weight.group_scale == nullptr && weight.input_scale == 0 &&
           weight.block_panels(args.block) == kBlockPanels && args.first == 0 &&
           args.columns == kBlockOutputs;
}

void gemm_block_pair_simd(const GemmBlockArgs& a, const GemmBlockArgs& b) {
    const bool alike = a.weight->dtype == b.weight->dtype && a.weight->inputs == b.weight->inputs;
    if (!alike || !is_plain(a) || !is_plain(b)) {
        gemm_block_simd(a);
        gemm_block_simd(b);
        return;
    }
    const auto words = [](const std::byte* data) { return reinterpret_cast<const uint32_t*>(data); };
    const PairSlice slice{
        .x = {a.rows[0], b.rows[0]},
        .words = {words(a.weight->block_data(a.block)), words(b.weight->block_data(b.block))},
        .next = {words(a.next), words(b.next)},
        .count = a.weight->inputs,
        .out = {a.out, b.out}};
    if (a.weight->dtype == DType::kBFloat16) {
        pair_columns<BFloat16Weight>(slice);
    } else {
        pair_columns<Float32Weight>(slice);
    }
    for (const GemmBlockArgs* args : {&a, &b}) {
        if (args->weight->column_scale != nullptr) {
            scale_columns(*args, kBlockOutputs);
        }
    }
}

void swiglu_block_simd(const SwigluBlockArgs& args) {
    const Tag d;
    for (int64_t r = 0; r < args.rows; ++r) {
        for (int64_t p = 0; p < args.pairs; ++p) {
            const float* gate = args.out + r * kBlockOutputs + 2 * p * kPanelOutputs;
            float* y = args.y + r * args.y_stride + p * kPanelOutputs;
            for (int64_t i = 0; i < kPanelOutputs; i += kLanes) {
                const Vector up = hn::LoadU(d, gate + kPanelOutputs + i);
                hn::StoreU(hn::Mul(silu_simd(d, hn::LoadU(d, gate + i)), up), d, y + i);
            }
        }
    }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera {

HWY_EXPORT(gemm_block_simd);
HWY_EXPORT(gemm_block_pair_simd);
HWY_EXPORT(swiglu_block_simd);

void gemm_block(const GemmBlockArgs& args) {
    check(args.row_count >= 1 && args.row_count <= kGemmRowsMax, "gemm_block: too many rows");
    HWY_DYNAMIC_DISPATCH(gemm_block_simd)(args);
}

void gemm_block_pair(const GemmBlockArgs& a, const GemmBlockArgs& b) {
    check(a.row_count == 1 && b.row_count == 1, "gemm_block_pair: one row each");
    HWY_DYNAMIC_DISPATCH(gemm_block_pair_simd)(a, b);
}

void swiglu_block(const SwigluBlockArgs& args) {
    HWY_DYNAMIC_DISPATCH(swiglu_block_simd)(args);
}

}  // namespace tessera
#endif
