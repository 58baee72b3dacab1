// The two inner kernels of attention, compiled once per Highway target. Both are register-blocked matrix
// products in which every output element is one chain of fused multiply-adds, so the blocking changes no bit.
#if defined(TESSERA_OPS_ATTENTION_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_OPS_ATTENTION_KERNELS_INL_H_
#undef TESSERA_OPS_ATTENTION_KERNELS_INL_H_
#else
#define TESSERA_OPS_ATTENTION_KERNELS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <hwy/highway.h>

#include "ops/attention/attention_scratch.h"
#include "ops/attention/kv_stream.h"
#include "ops/common/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR

namespace hn = hwy::HWY_NAMESPACE;

// A group of rows against one tile. Slots outside [begin, keys) may be loaded but count for nothing.
struct TileArgs {
    int64_t head_dim = 0;
    const float* q = nullptr;      // [head_dim / 2][width][2]
    const float* k = nullptr;      // [64][head_dim]
    const float* v = nullptr;      // [64][head_dim]
    KvStream* stream = nullptr;    // fetched meanwhile where there are eight rows, as in decode
    int32_t begin = 0;             // first visible key: 1 in the first tile of the MTP layer
    int32_t keys = 0;              // one past the last visible key
    float* scores = nullptr;       // [keys, padded][width]: scores, then probabilities
    int64_t width = 0;             // rows in a line of scores
    int32_t rows = 0;              // rows that exist; the others up to width are padding
    bool masked = false;           // some row does not see all keys
    float first_slot = 0;          // slot of key 0
    const float* limit = nullptr;  // [width] last slot that a row sees
    float* max = nullptr;          // [width]
    float* sum = nullptr;          // [width]
    float* alpha = nullptr;        // [width]
    float* output = nullptr;       // [rows][head_dim]
};

// scores[key][row] = sum over e of k[key][e] * q[row][e], for kKeys keys from `key`. A pair of a key's
// elements is broadcast against pairs of 8 (or 4) rows' elements, so K is read as it lies in its page, every
// lane of the widest vectors has work when a group has only 8 rows, and a lane's chain runs over the even or
// the odd elements. kVectors vectors hold the width's pairs. kHeadDim = 0: any; a constant makes the keys'
// distances part of the addresses, where 16 pointers would not fit the registers.
template <int kHeadDim, int kVectors, int kKeys>
HWY_INLINE void score_block(const TileArgs& t, int32_t key) {
    const hn::ScalableTag<float> d;
    const hn::Repartition<uint64_t, decltype(d)> pairs;
    using V = hn::Vec<decltype(d)>;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    const int64_t head_dim = kHeadDim == 0 ? t.head_dim : kHeadDim;
    const float* k = t.k + key * head_dim;
    constexpr bool kFetch = kVectors * static_cast<int>(hn::MaxLanes(d)) == 16;  // pairs of eight rows
    [[maybe_unused]] const float* fetch = kFetch ? t.stream->take(head_dim * kKeys) : nullptr;
    V acc[kKeys * kVectors];
#pragma GCC unroll 32
    for (V& sum : acc) {
        sum = hn::Zero(d);
    }
    const float* q = t.q;
    for (int64_t e = 0; e < head_dim; e += 2, q += kVectors * lanes, k += 2) {
        asm("" : "+r"(k));  // one pointer, and the keys at constant distances from it
        V qv[kVectors];
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) {
            qv[j] = hn::LoadU(d, q + j * lanes);
        }
        if constexpr (kFetch) {
            for (int line = 0; line < 2 * kKeys; line += 16) {
                __builtin_prefetch(fetch + e * kKeys + line, 0, 2);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < kKeys; ++i) {
            uint64_t pair;
            std::memcpy(&pair, k + i * head_dim, sizeof pair);
            const V kv = hn::BitCast(d, hn::Set(pairs, pair));
#pragma GCC unroll 8
            for (int j = 0; j < kVectors; ++j) {
                acc[i * kVectors + j] = hn::MulAdd(kv, qv[j], acc[i * kVectors + j]);
            }
        }
    }
    // Two neighbouring vectors of pairs are one of scores.
    float* out = t.scores + key * t.width;
#pragma GCC unroll 16
    for (int i = 0; i < kKeys * kVectors; i += 2, out += lanes) {
        const V even = hn::ConcatEven(d, acc[i + 1], acc[i]);
        const V odd = hn::ConcatOdd(d, acc[i + 1], acc[i]);
        hn::StoreU(hn::Add(even, odd), d, out);
    }
}

// exp of values that are not above 0 (or NaN), the same bits as exp_simd. AVX-512 scales by 2^n in one
// instruction, which is half of the work.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_of_score(D d, V x) {
#if HWY_TARGET <= HWY_AVX3
    using C = ExpConstants;
    x = hn::Max(hn::Set(d, C::kMin), x);
    const V round = hn::Set(d, C::kRound);
    const V n = hn::Sub(hn::MulAdd(x, hn::Set(d, C::kLog2E), round), round);
    V r = hn::MulAdd(n, hn::Set(d, -C::kLn2High), x);
    r = hn::MulAdd(n, hn::Set(d, -C::kLn2Low), r);
    V p = hn::Set(d, C::kPoly[C::kDegree]);
#pragma GCC unroll 8
    for (int i = C::kDegree - 1; i >= 0; --i) {
        p = hn::MulAdd(p, r, hn::Set(d, C::kPoly[i]));
    }
    if constexpr (sizeof(V) == 64) {
        return V{_mm512_scalef_ps(p.raw, n.raw)};
    } else {
        return V{_mm256_scalef_ps(p.raw, n.raw)};
    }
#else
    return exp_simd(d, x);
#endif
}

// Scores -> probabilities, the running maximum and sum, and alpha = exp(old maximum - new). A score of a slot
// that the row does not see becomes -inf, hence probability 0, which adds nothing anywhere.
template <int kVectors, class D>
HWY_INLINE void softmax_block(D d, const TileArgs& t) {
    using V = hn::Vec<D>;
    const size_t lanes = hn::Lanes(d);
    V max[kVectors];
    V sum[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
        max[j] = hn::LoadU(d, t.max + j * lanes);
        sum[j] = hn::Zero(d);
    }
    if (t.masked) {
        const V minus_inf = hn::Set(d, -std::numeric_limits<float>::infinity());
        for (int32_t key = t.begin; key < t.keys; ++key) {
            float* s = t.scores + key * t.width;
            const V slot = hn::Set(d, t.first_slot + static_cast<float>(key));
            for (int j = 0; j < kVectors; ++j) {
                const auto hidden = hn::Gt(slot, hn::LoadU(d, t.limit + j * lanes));
                hn::StoreU(hn::IfThenElse(hidden, minus_inf, hn::LoadU(d, s + j * lanes)), d, s + j * lanes);
            }
        }
    }
    V late[kVectors];  // a second chain for every other key: the maximum has no order
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
        late[j] = max[j];
    }
    int32_t key = t.begin;
    for (; key + 2 <= t.keys; key += 2) {
        const float* s = t.scores + key * t.width;
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            max[j] = hn::Max(max[j], hn::LoadU(d, s + j * lanes));
            late[j] = hn::Max(late[j], hn::LoadU(d, s + t.width + j * lanes));
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
        if (key < t.keys) {
            max[j] = hn::Max(max[j], hn::LoadU(d, t.scores + key * t.width + j * lanes));
        }
        max[j] = hn::Max(max[j], late[j]);
    }
    for (key = t.begin; key < t.keys; ++key) {
        float* s = t.scores + key * t.width;
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            const V p = exp_of_score(d, hn::Sub(hn::LoadU(d, s + j * lanes), max[j]));
            hn::StoreU(p, d, s + j * lanes);
            sum[j] = hn::Add(sum[j], p);
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
        const V alpha = exp_of_score(d, hn::Sub(hn::LoadU(d, t.max + j * lanes), max[j]));
        hn::StoreU(alpha, d, t.alpha + j * lanes);
        hn::StoreU(max[j], d, t.max + j * lanes);
        hn::StoreU(hn::MulAdd(hn::LoadU(d, t.sum + j * lanes), alpha, sum[j]), d, t.sum + j * lanes);
    }
}

// Decode's eight rows go through value_block together where registers allow, or in two halves.
inline constexpr int kDecodeRows = HWY_TARGET == HWY_AVX2 ? 4 : 8;

// output[row][columns] = output * alpha + sum over keys of p[key][row] * v[key][columns], for kRows rows from
// `row` and kVectors vectors from `column`.
template <int kRows, int kVectors, class D>
HWY_INLINE void value_block(D d, const TileArgs& t, int32_t row, int64_t column) {
    using V = hn::Vec<D>;
    const size_t lanes = hn::Lanes(d);
    float* output = t.output + row * t.head_dim + column;
    V acc[kRows][kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
        const V alpha = hn::Set(d, t.alpha[row + i]);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            acc[i][j] = hn::Mul(hn::LoadU(d, output + i * t.head_dim + j * lanes), alpha);
        }
    }
    const float* p = t.scores + t.begin * t.width + row;
    const float* v = t.v + t.begin * t.head_dim + column;
    constexpr int kStep = kRows * kVectors * static_cast<int>(hn::MaxLanes(d)) / 8;  // floats used by a step
    constexpr bool kFetch = kRows == kDecodeRows;
    [[maybe_unused]] const float* fetch = kFetch ? t.stream->take((t.keys - t.begin) * kStep) : nullptr;
    for (int32_t key = t.begin; key < t.keys; ++key, p += t.width, v += t.head_dim) {
        if constexpr (kFetch) {
            for (int line = 0; line < kStep; line += 16) {
                __builtin_prefetch(fetch + line, 0, 2);
            }
            fetch += kStep;
        }
        V vv[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            vv[j] = hn::LoadU(d, v + j * lanes);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            const V pv = hn::Set(d, p[i]);
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; ++j) {
                acc[i][j] = hn::MulAdd(pv, vv[j], acc[i][j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            hn::StoreU(acc[i][j], d, output + i * t.head_dim + j * lanes);
        }
    }
}

template <int kRows>
HWY_NOINLINE void value_rows(const TileArgs& t, int32_t row) {
    const hn::ScalableTag<float> d;
    // 6 rows x this many fill the registers; 8 rows x half of them read each value once.
    constexpr int kVectors = (HWY_TARGET == HWY_AVX2 ? 2 : 4) / (kRows == 8 ? 2 : 1);
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    int64_t column = 0;
    for (; column + kVectors * lanes <= t.head_dim; column += kVectors * lanes) {
        value_block<kRows, kVectors>(d, t, row, column);
    }
    for (; column < t.head_dim; column += lanes) {
        value_block<kRows, 1>(d, t, row, column);
    }
}

HWY_INLINE void value_tile(const TileArgs& t) {
    int32_t row = 0;
    for (; row + 6 <= t.rows && row + 8 != t.rows; row += 6) {
        value_rows<6>(t, row);
    }
    if (row + 8 == t.rows) {  // more chains in flight than 6 + 2
        if constexpr (kDecodeRows == 8) {
            return value_rows<8>(t, row);
        }
        value_rows<4>(t, row);
        return value_rows<4>(t, row + 4);
    }
    switch (t.rows - row) {
        case 5:
            return value_rows<5>(t, row);
        case 4:
            return value_rows<4>(t, row);
        case 3:
            return value_rows<3>(t, row);
        case 2:
            return value_rows<2>(t, row);
        case 1:
            return value_rows<1>(t, row);
        default:
            return;
    }
}

// All scores of the tile; a block of keys may reach past the last one, not past the tile.
template <int kHeadDim, int kVectors>
HWY_INLINE void score_tile(const TileArgs& t) {
    constexpr unsigned kAccumulators = HWY_TARGET == HWY_AVX2 ? 12 : 24;  // of 16 or 32 registers
    constexpr int kKeys = static_cast<int>(std::bit_floor(kAccumulators / kVectors));
    for (int32_t key = 0; key < t.keys; key += kKeys) {
        score_block<kHeadDim, kVectors, kKeys>(t, key);
    }
}

// All of one tile for a group of kVectors vectors of rows.
template <int kVectors, class D>
HWY_NOINLINE void tile_step(D d, const TileArgs& t) {
    constexpr int kPairVectors = 2 * kVectors * static_cast<int>(hn::MaxLanes(d)) /
                                 static_cast<int>(hn::MaxLanes(hn::ScalableTag<float>()));
    if (t.head_dim == 128) {
        score_tile<128, kPairVectors>(t);
    } else {
        score_tile<0, kPairVectors>(t);
    }
    softmax_block<kVectors>(d, t);
    value_tile(t);
}

#endif  // HWY_TARGET != HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#endif  // TESSERA_OPS_ATTENTION_KERNELS_INL_H_
