// Register tiles of the matrix kernel, compiled once per Highway target (see gemm.h for the order of the
// sums).
//
// A tile is some rows by kVectors vectors of outputs, held in registers over all k's. AVX-512 (32 registers):
// up to 6 x 4 vectors = 24 accumulators, 4 weights, 1 broadcast, or up to 14 x 2 vectors = 28 + 2 + 1. More
// rows share the widening of a bfloat16 weight, which takes a slot of the two multiply-add ports: 6 x 4
// spends 24 of 28 slots on multiply-adds, 14 x 2 spends 28 of 30, and 16 x 1 would spend 16 of 17 but need as
// many loads. AVX2 (16 registers): 6 x 2 vectors = 12 + 2 + 1.
#if defined(TESSERA_OPS_COMMON_GEMM_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_OPS_COMMON_GEMM_TILE_INL_H_
#undef TESSERA_OPS_COMMON_GEMM_TILE_INL_H_
#else
#define TESSERA_OPS_COMMON_GEMM_TILE_INL_H_
#endif

#include <cmath>
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "ops/common/half.h"
#include "ops/common/packed_matrix.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
namespace {  // each file has its own
#if HWY_TARGET != HWY_SCALAR

namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<float, 16>;
using TagU = hn::RebindToUnsigned<Tag>;
using Vector = hn::Vec<Tag>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(Tag()));
constexpr int kNarrowRows = 6;  // up to here AVX-512 takes all four vectors of a block at once
constexpr int kTileRows = kLanes == 16 ? 14 : 6;
// Weights come from the last-level cache or memory at decode: asking for them 16 steps (4 KiB of a full
// block) ahead, over the page borders at which the hardware prefetcher stops, makes one sequence's decode 15
// % faster.
constexpr int64_t kPrefetchSteps = 16;
// Of two blocks side by side. All their lines are asked for: fetching ahead by the processor itself ends with
// each page, and the experts of a token come from memory when the last steps chose others.
constexpr int64_t kPairPrefetchSteps = 32;

// Some k's of a block of `columns` outputs: words as packed_matrix.h says.
struct BlockSlice {
    const uint32_t* words = nullptr;
    int64_t columns = 0;
    int64_t first = 0;  // the columns [first, end) are computed
    int64_t end = 0;
    int64_t count = 0;               // k's
    bool resume = false;             // go on from the sums in `out`; else they start at zero
    const uint32_t* next = nullptr;  // words to fetch meanwhile, laid out as these; null: none
    const uint32_t* also = nullptr;  // words for another pass over the slice to fetch; null: none
    bool pairs = false;              // the second-level cache fetches lines in pairs
};

struct BFloat16Weight {
    static constexpr int kPerWord = 2;
    template <int kHalf>
    static HWY_INLINE Vector widen(hn::Vec<TagU> pair) {
        const TagU du;
        if constexpr (kHalf == 0) {
            return hn::BitCast(Tag(), hn::ShiftLeft<16>(pair));
        } else {
            return hn::BitCast(Tag(), hn::And(pair, hn::Set(du, 0xFFFF0000u)));
        }
    }
};

struct Float32Weight {
    static constexpr int kPerWord = 1;
    template <int kHalf>
    static HWY_INLINE Vector widen(hn::Vec<TagU> word) {
        return hn::BitCast(Tag(), word);
    }
};

// Codes as floats, without their scale. A word's eight k's are read in a loop.
struct Int4Weight {
    static constexpr int kPerWord = 8;
    static HWY_INLINE Vector widen(const uint32_t* words, int index) {
        const hn::RebindToSigned<Tag> di;
        const auto up = hn::ShiftLeftSame(hn::BitCast(di, hn::LoadU(TagU(), words)), 28 - 4 * index);
        return hn::ConvertTo(Tag(), hn::ShiftRight<28>(up));
    }
};

template <int kRows, int kVectors>
HWY_INLINE void multiply_add(const float* const (&x)[kRows], int64_t k, const Vector (&w)[kVectors],
                             Vector (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
        const Vector broadcast = hn::Set(Tag(), x[r][k]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            sums[r][v] = hn::MulAdd(broadcast, w[v], sums[r][v]);
        }
    }
}

template <int kRows, int kVectors>
HWY_INLINE void int4_steps(const float* const (&x)[kRows], int64_t k, const uint32_t* words,
                           Vector (&sums)[kRows][kVectors]) {
#pragma GCC unroll 1
    for (int i = 0; i < Int4Weight::kPerWord; ++i) {
        Vector w[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            w[v] = Int4Weight::widen(words + v * kLanes, i);
        }
        multiply_add<kRows, kVectors>(x, k + i, w, sums);
    }
}

template <int kRows, int kVectors, class Weight, int kHalf>
HWY_INLINE void step(const float* const (&x)[kRows], int64_t k, const hn::Vec<TagU> (&words)[kVectors],
                     Vector (&sums)[kRows][kVectors]) {
    Vector w[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
        w[v] = Weight::template widen<kHalf>(words[v]);
    }
    multiply_add<kRows, kVectors>(x, k, w, sums);
}

template <int kVectors>
HWY_INLINE void load_words(const uint32_t* words, hn::Vec<TagU> (&loaded)[kVectors]) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
        loaded[v] = hn::LoadU(TagU(), words + v * kLanes);
    }
}

// The k's of some words. A load of 64 bytes takes a cycle, as a multiply-add does, so words are loaded once
// where the registers hold them beside the sums, and once for each k elsewhere.
template <int kRows, int kVectors, class Weight>
HWY_INLINE void steps(const float* const (&x)[kRows], int64_t k, const uint32_t* words,
                      Vector (&sums)[kRows][kVectors]) {
    constexpr int kRegisters = kLanes == 16 ? 32 : 16;
    constexpr bool kOnce = (kRows + 2) * kVectors + 2 <= kRegisters;
    hn::Vec<TagU> loaded[kVectors];
    load_words<kVectors>(words, loaded);
    step<kRows, kVectors, Weight, 0>(x, k, loaded, sums);
    if constexpr (Weight::kPerWord == 2) {
        if constexpr (!kOnce) {
            load_words<kVectors>(words, loaded);
        }
        step<kRows, kVectors, Weight, 1>(x, k + 1, loaded, sums);
    }
}

// out [kRows][kBlockOutputs] = rows * slice (or +=), on kVectors vectors of columns from `column` on.
template <int kRows, int kVectors, class Weight, bool kPairs>
HWY_INLINE void tile(const float* const* rows, const BlockSlice& slice, int64_t column, float* out) {
    const Tag d;
    const float* x[kRows];
    Vector sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
        x[r] = rows[r];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            sums[r][v] =
                slice.resume ? hn::LoadU(d, out + r * kBlockOutputs + column + v * kLanes) : hn::Zero(d);
        }
    }
    const uint32_t* words = slice.words + column;
    // From `words` to what is fetched; in 4-byte words, as the rows need all the address registers.
    int64_t ahead = kPrefetchSteps * slice.columns;
    const int64_t next = slice.next == nullptr ? ahead : slice.next - slice.words;
    // The k at which words + ahead reaches the end of the slice; negative in a short one.
    const int64_t turn = (slice.count / Weight::kPerWord - kPrefetchSteps) * Weight::kPerWord;
    int64_t k = 0;
    for (; k + Weight::kPerWord <= slice.count; k += Weight::kPerWord) {
        if constexpr (kRows <= kNarrowRows) {
            if (k == turn && slice.next != nullptr) {
                ahead = slice.next + column - words;
            }
        }
#pragma GCC unroll 8
        for (int64_t line = 0; line < kVectors * kLanes; line += 16) {
            if constexpr (kRows <= kNarrowRows) {
                // Into the second level: what waits for memory must not hold the places for misses of the
                // first, which its own lines need. One or two rows are all reading: there the cache's
                // fetching of pairs is faster than asking for every line.
                if (kRows > 2 || line % 32 == 0) {
                    __builtin_prefetch(words + ahead + line, 0, 2);
                }
            } else {  // bound by arithmetic: the whole of `next`, into the second level
                hwy::Prefetch(words + kPrefetchSteps * kBlockOutputs + line);
                if (!kPairs || line % 32 == 0) {  // asking for the other line of a pair too would fill the
                                                  // few places for misses, and stall the loads
                    __builtin_prefetch(words + next + line, 0, 2);
                }
            }
        }
        if constexpr (Weight::kPerWord == 8) {
            int4_steps<kRows, kVectors>(x, k, words, sums);
        } else {
            steps<kRows, kVectors, Weight>(x, k, words, sums);
        }
        words += slice.columns;
    }
    if constexpr (Weight::kPerWord < 8) {
        if (k < slice.count) {
            hn::Vec<TagU> loaded[kVectors];
            load_words<kVectors>(words, loaded);
            step<kRows, kVectors, Weight, 0>(x, k, loaded, sums);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            hn::StoreU(sums[r][v], d, out + r * kBlockOutputs + column + v * kLanes);
        }
    }
}

// One row by each of two whole blocks, side by side: two streams of memory, and chains enough to hide the
// latency of a multiply-add.
struct PairSlice {
    const float* x[2] = {};
    const uint32_t* words[2] = {};
    const uint32_t* next[2] = {};  // words to fetch meanwhile; null: none
    int64_t count = 0;             // k's
    float* out[2] = {};            // [kBlockOutputs]
};

// kVectors vectors of each block, from `column` on.
template <int kVectors, class Weight>
HWY_INLINE void pair_tile(const PairSlice& slice, int64_t column) {
    const float* const xa[1] = {slice.x[0]};
    const float* const xb[1] = {slice.x[1]};
    Vector a[1][kVectors];
    Vector b[1][kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
        a[0][v] = b[0][v] = hn::Zero(Tag());
    }
    const uint32_t* words = slice.words[0] + column;
    const int64_t other = slice.words[1] - slice.words[0];
    int64_t ahead = kPairPrefetchSteps * kBlockOutputs;
    int64_t ahead_b = other + ahead;
    const int64_t turn = (slice.count / Weight::kPerWord - kPairPrefetchSteps) * Weight::kPerWord;
    int64_t k = 0;
    for (; k + Weight::kPerWord <= slice.count; k += Weight::kPerWord, words += kBlockOutputs) {
        if (k == turn) {  // past its end lie blocks of other threads: rather nothing than those
            ahead = slice.next[0] == nullptr ? 0 : slice.next[0] + column - words;
            ahead_b = slice.next[1] == nullptr ? other : slice.next[1] + column - words;
        }
#pragma GCC unroll 8
        for (int64_t line = 0; line < kVectors * kLanes; line += 16) {
            __builtin_prefetch(words + ahead + line, 0, 2);
            __builtin_prefetch(words + ahead_b + line, 0, 2);
        }
        steps<1, kVectors, Weight>(xa, k, words, a);
        steps<1, kVectors, Weight>(xb, k, words + other, b);
    }
    if (k < slice.count) {
        hn::Vec<TagU> loaded[kVectors];
        load_words<kVectors>(words, loaded);
        step<1, kVectors, Weight, 0>(xa, k, loaded, a);
        load_words<kVectors>(words + other, loaded);
        step<1, kVectors, Weight, 0>(xb, k, loaded, b);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
        hn::StoreU(a[0][v], Tag(), slice.out[0] + column + v * kLanes);
        hn::StoreU(b[0][v], Tag(), slice.out[1] + column + v * kLanes);
    }
}

template <class Weight>
HWY_NOINLINE void pair_columns(const PairSlice& slice) {
    for (int64_t column = 0; column < kBlockOutputs; column += 4 * kLanes) {
        pair_tile<4, Weight>(slice, column);
    }
}

// All columns of the slice, as many vectors at a time as registers allow.
template <int kRows, class Weight, bool kPairs>
HWY_NOINLINE void tile_columns(const float* const* rows, const BlockSlice& slice, float* out) {
    constexpr int kVectorsMax = (kLanes == 16 && kRows <= kNarrowRows) || kRows <= 2 ? 4 : 2;
    int64_t column = slice.first;
    for (; column + kVectorsMax * kLanes <= slice.end; column += kVectorsMax * kLanes) {
        tile<kRows, kVectorsMax, Weight, kPairs>(rows, slice, column, out);
    }
    for (; column + 2 * kLanes <= slice.end; column += 2 * kLanes) {
        tile<kRows, 2, Weight, kPairs>(rows, slice, column, out);
    }
    for (; column < slice.end; column += kLanes) {
        tile<kRows, 1, Weight, kPairs>(rows, slice, column, out);
    }
}

// row_count <= kTileRows.
template <class Weight, int kRows = kTileRows>
HWY_INLINE void tile_rows(const float* const* rows, int row_count, const BlockSlice& slice, float* out) {
    if constexpr (kRows > 1) {
        if (row_count < kRows) {
            return tile_rows<Weight, kRows - 1>(rows, row_count, slice, out);
        }
    }
    if constexpr (kRows > kNarrowRows) {
        if (!slice.pairs) {
            return tile_columns<kRows, Weight, false>(rows, slice, out);
        }
    }
    tile_columns<kRows, Weight, true>(rows, slice, out);
}

// e4m3_row_scale (half.h) of a row.
HWY_INLINE float row_scale(const float* x, int64_t n) {
    const Tag d;
    Vector largest = hn::Zero(d);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        largest = hn::Max(largest, hn::Abs(hn::LoadU(d, x + i)));
    }
    float most = hn::GetLane(hn::MaxOfLanes(d, largest));
    for (; i < n; ++i) {
        most = std::fmax(most, std::fabs(x[i]));
    }
    return e4m3_row_scale(most);
}

// The vector twin of round_to_e4m3 (half.h): out[i] = e4m3(x[i] / scale).
HWY_INLINE void round_row_to_e4m3(const float* x, int64_t n, float scale, float* out) {
    const Tag d;
    const TagU du;
    const Vector divisor = hn::Set(d, scale);
    const Vector magic = hn::Set(d, 0x1.8p14f);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const Vector q = hn::Div(hn::LoadU(d, x + i), divisor);
        const Vector magnitude = hn::Min(hn::Set(d, kE4m3Max), hn::Abs(q));  // lets a NaN through
        const auto bits = hn::BitCast(du, magnitude);
        const auto odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(du, 1u));
        const auto rounded =
            hn::And(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFFu)), odd), hn::Set(du, 0xFFF00000u));
        const Vector small = hn::Sub(hn::Add(magnitude, magic), magic);
        const Vector value =
            hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0x1p-6f)), small, hn::BitCast(d, rounded));
        const Vector with_nan = hn::IfThenElse(hn::IsNaN(q), q, value);
        hn::StoreU(hn::CopySign(with_nan, q), d, out + i);
    }
    for (; i < n; ++i) {
        out[i] = round_to_e4m3(x[i] / scale);
    }
}

#endif  // HWY_TARGET != HWY_SCALAR
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#endif  // TESSERA_OPS_COMMON_GEMM_TILE_INL_H_
