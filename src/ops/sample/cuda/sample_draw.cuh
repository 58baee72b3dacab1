// The sampler's draw: one block of 32 warps a row, warp w owning piece w of the row. Sums are of integers, so
// their order does not matter and the token is the CPU backend's.
#pragma once

#include "ops/common/cuda/reduce.cuh"
#include "ops/sample/cuda/sample_row.cuh"

namespace tessera::cuda {

inline constexpr int kDrawThreads = 1024;
inline constexpr int kDrawBatch = 8;  // loads in flight
inline constexpr int kDrawHeld = 4;   // tokens with a weight that a lane keeps in registers
// Buckets by distance from the best token; exp(-22) rounds to no weight.
inline constexpr int kDrawBuckets = kDrawThreads;
inline constexpr float kDrawRange = 22.0f;
inline constexpr float kDrawBucketScale = static_cast<float>(kDrawBuckets) / kDrawRange;

struct DrawShared {
    uint64_t reduce[kWarp];
    uint64_t mass[kWarp];  // of each warp's kept tokens
    int32_t ties[kWarp];   // of each warp, at the cut
    int32_t token;
    uint32_t bucket_count[kDrawBuckets];
    unsigned long long bucket_mass[kDrawBuckets];
    int32_t bucket;          // that find_bucket() found
    uint64_t bucket_before;  // sum over the better ones
    int32_t member_count[kWarp];
    uint2 members[kWarp][kWarp * kDrawHeld];  // (key, weight) of each warp's tokens in a bucket
};

// The tokens of this warp's piece that have a weight, in order of ids.
struct DrawPiece {
    const uint32_t* keys = nullptr;  // ordered_bits() of the scaled logit
    const uint32_t* weights = nullptr;
    const int32_t* ids = nullptr;
    int32_t count = 0;
    uint32_t held_key[kDrawHeld] = {};  // of tokens lane + 32 i; weight 0 beyond the count
    uint32_t held_weight[kDrawHeld] = {};
};

// What is kept: tokens with a key above `key`, and the first `ties` in order of ids of those that equal it.
struct DrawCut {
    uint32_t key = 0;
    int32_t ties = 0x7FFFFFFF;
};

// f(key, weight) for each token of the warp's piece, spread over the lanes.
template <typename F>
__device__ __forceinline__ void for_each(const DrawPiece& piece, F f) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int i = 0; i < kDrawHeld; ++i) {
        if (lane + kWarp * i < piece.count) {
            f(piece.held_key[i], piece.held_weight[i]);
        }
    }
    for (int32_t i = lane + kWarp * kDrawHeld; i < piece.count; i += kWarp) {
        f(piece.keys[i], piece.weights[i]);
    }
}

// The row that is drawn from.
struct DrawRow {
    const SampleSlot& slot;
    const float* x;  // [vocab] after the edits; may be the memory of `keys`
    float max;       // the largest scaled logit
    int64_t vocab;
    uint32_t* keys;  // [vocab] each: the workspace
    int32_t* ids;
    uint32_t* weights;
};

// Weighs this warp's piece and keeps what has a weight; it writes no further than it has read.
__device__ inline DrawPiece weigh_piece(const DrawRow& row) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t warp = threadIdx.x / kWarp;
    const int64_t size = (row.vocab + kWarp - 1) / kWarp;
    const int64_t begin = min(warp * size, row.vocab);
    const int64_t end = min(begin + size, row.vocab);
    uint32_t* keys = row.keys + begin;
    int32_t* ids = row.ids + begin;
    uint32_t* weights = row.weights + begin;
    int32_t count = 0;
    for (int64_t i0 = begin; i0 < end; i0 += kWarp * kDrawBatch) {
        float value[kDrawBatch];
#pragma unroll
        for (int j = 0; j < kDrawBatch; ++j) {
            const int64_t i = i0 + kWarp * j + lane;
            value[j] = i < end ? row.x[i] : minus_infinity();
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kDrawBatch; ++j) {
            const float scaled = scaled_logit(value[j], row.slot.temperature);
            const uint32_t weight =
                scaled - row.max > -kDrawRange ? token_weight(scaled, row.max, row.slot.min_p) : 0;
            const uint32_t votes = __ballot_sync(kFullWarp, weight != 0);
            if (weight != 0) {
                const int32_t place = count + __popc(votes & ((1u << lane) - 1));
                keys[place] = ordered_bits(scaled);
                ids[place] = static_cast<int32_t>(i0 + kWarp * j + lane);
                weights[place] = weight;
            }
            count += __popc(votes);
        }
    }
    __syncwarp();
    DrawPiece piece{keys, weights, ids, count, {}, {}};
#pragma unroll
    for (int i = 0; i < kDrawHeld; ++i) {
        const int32_t at = lane + kWarp * i;
        piece.held_key[i] = at < count ? keys[at] : 0;
        piece.held_weight[i] = at < count ? weights[at] : 0;
    }
    return piece;
}

// The largest key for which enough(sum over the tokens with at least that key of term(weight)). REQUIRES:
// enough() holds for the sum over all tokens.
template <typename Term, typename Enough>
__device__ inline uint32_t search_key(const DrawPiece& piece, DrawShared& shared, Term term, Enough enough) {
    uint32_t key = 0;
    for (int bit = 31; bit >= 0; --bit) {
        const uint32_t trial = key | 1u << bit;
        uint64_t sum = 0;
        for_each(piece, [&](uint32_t k, uint32_t weight) { sum += k >= trial ? term(weight) : uint64_t{0}; });
        if (enough(block_reduce(sum, Sum{}, uint64_t{0}, shared.reduce))) {
            key = trial;
        }
    }
    return key;
}

template <typename Term>
__device__ inline uint64_t sum_over(const DrawPiece& piece, DrawShared& shared, Term term) {
    uint64_t sum = 0;
    for_each(piece, [&](uint32_t key, uint32_t weight) { sum += term(key, weight); });
    return block_reduce(sum, Sum{}, uint64_t{0}, shared.reduce);
}

// The inclusive sum over the lanes up to this one.
__device__ __forceinline__ uint64_t warp_scan(uint64_t value) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint64_t below = __shfl_up_sync(kFullWarp, value, offset);
        value += lane >= offset ? below : 0;
    }
    return value;
}

// Monotone: a better token is in no later bucket.
__device__ __forceinline__ int32_t bucket_of(uint32_t key, float max) {
    const float distance = __fsub_rn(max, from_ordered_bits(key));
    return min(static_cast<int32_t>(__fmul_rn(distance, kDrawBucketScale)), kDrawBuckets - 1);
}

// Fills the buckets' counts and masses.
__device__ inline void fill_buckets(const DrawPiece& piece, float max, DrawShared& shared) {
    shared.bucket_count[threadIdx.x] = 0;
    shared.bucket_mass[threadIdx.x] = 0;
    __syncthreads();
    for_each(piece, [&](uint32_t key, uint32_t weight) {
        const int32_t bucket = bucket_of(key, max);
        atomicAdd(&shared.bucket_count[bucket], 1u);
        atomicAdd(&shared.bucket_mass[bucket], static_cast<unsigned long long>(weight));
    });
    __syncthreads();
}

// The first bucket at which enough(sum of `own` over the buckets up to it); thread t gives bucket t's `own`.
// REQUIRES: enough(0) is false and enough(the whole sum) is true
template <typename Enough>
__device__ inline void find_bucket(uint64_t own, DrawShared& shared, Enough enough) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    uint64_t sum = warp_scan(own);
    if (lane == kWarp - 1) {
        shared.reduce[warp] = sum;
    }
    __syncthreads();
    sum += warp_reduce(lane < warp ? shared.reduce[lane] : uint64_t{0}, Sum{});
    if (enough(sum) && !enough(sum - own)) {
        shared.bucket = static_cast<int32_t>(threadIdx.x);
        shared.bucket_before = sum - own;
    }
    __syncthreads();
}

// Tokens among which a cut lies, and the sum over the better ones.
struct DrawPart {
    DrawPiece piece;
    uint64_t before = 0;
};

// The found bucket's tokens, in registers. A warp with too many of them, as equal logits make, leaves the
// whole row.
__device__ inline DrawPart bucket_part(const DrawPiece& piece, float max, DrawShared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (lane == 0) {
        shared.member_count[warp] = 0;
    }
    __syncwarp();
    for_each(piece, [&](uint32_t key, uint32_t weight) {
        if (bucket_of(key, max) == shared.bucket) {
            const int32_t place = atomicAdd(&shared.member_count[warp], 1);
            if (place < kWarp * kDrawHeld) {
                shared.members[warp][place] = make_uint2(key, weight);
            }
        }
    });
    __syncwarp();
    const int32_t count = shared.member_count[warp];
    if (__syncthreads_or(count > kWarp * kDrawHeld ? 1 : 0) != 0) {
        return {piece, 0};
    }
    DrawPart part{{nullptr, nullptr, nullptr, count, {}, {}}, shared.bucket_before};
#pragma unroll
    for (int i = 0; i < kDrawHeld; ++i) {
        const int32_t at = lane + kWarp * i;
        const uint2 member = at < count ? shared.members[warp][at] : make_uint2(0, 0);
        part.piece.held_key[i] = member.x;
        part.piece.held_weight[i] = member.y;
    }
    __syncthreads();
    return part;
}

// top_k keeps all that tie with the k-th.
__device__ inline DrawCut cut_top_k(const DrawRow& row, const DrawPiece& piece, DrawShared& shared) {
    DrawCut cut;
    const bool first = threadIdx.x % kWarp == 0;
    const uint64_t count =
        block_reduce(static_cast<uint64_t>(first ? piece.count : 0), Sum{}, uint64_t{0}, shared.reduce);
    const uint64_t k = static_cast<uint64_t>(row.slot.top_k);
    if (k < count) {
        find_bucket(shared.bucket_count[threadIdx.x], shared, [&](uint64_t sum) { return sum >= k; });
        const DrawPart part = bucket_part(piece, row.max, shared);
        cut.key = search_key(
            part.piece, shared, [](uint32_t) { return uint64_t{1}; },
            [&](uint64_t sum) { return part.before + sum >= k; });
    }
    return cut;
}

// top_p keeps the shortest beginning of the order (best first, ties in order of ids) whose share of what
// top_k left reaches it.
__device__ inline DrawCut cut_top_p(const DrawRow& row, const DrawPiece& piece, DrawCut top_k,
                                    DrawShared& shared) {
    const uint64_t all = sum_over(piece, shared, [&](uint32_t key, uint32_t weight) {
        return key >= top_k.key ? uint64_t{weight} : uint64_t{0};
    });
    const double target = __dmul_rn(static_cast<double>(row.slot.top_p), static_cast<double>(all));
    const auto reached = [&](uint64_t mass) { return static_cast<double>(mass) >= target; };
    find_bucket(shared.bucket_mass[threadIdx.x], shared, reached);
    const DrawPart part = bucket_part(piece, row.max, shared);
    DrawCut cut;
    cut.key = search_key(
        part.piece, shared, [](uint32_t weight) { return uint64_t{weight}; },
        [&](uint64_t mass) { return reached(part.before + mass); });
    const uint64_t before = part.before + sum_over(part.piece, shared, [&](uint32_t key, uint32_t weight) {
                                return key > cut.key ? uint64_t{weight} : uint64_t{0};
                            });
    const uint64_t ties = sum_over(part.piece, shared, [&](uint32_t key, uint32_t) {
        return key == cut.key ? uint64_t{1} : uint64_t{0};
    });
    uint64_t tie_weight = 0;  // equal keys have equal weights
    for_each(part.piece,
             [&](uint32_t key, uint32_t weight) { tie_weight = key == cut.key ? weight : tie_weight; });
    tie_weight = block_reduce(tie_weight, Max{}, uint64_t{0}, shared.reduce);
    uint64_t low = 1;
    uint64_t high = ties;
    while (low < high) {
        const uint64_t middle = (low + high) / 2;
        if (reached(before + middle * tie_weight)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    cut.ties = static_cast<int32_t>(low);
    return cut;
}

// A point in [0, total): 64 bits of Philox4x32-10 (Salmon et al., 2011) keyed by the seed, counted by the
// position.
__device__ inline uint64_t draw_point(uint64_t seed, uint64_t position, uint64_t total) {
    uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * c0;
        const uint64_t b = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(b);
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return __umul64hi(uint64_t{c1} << 32 | c0, total);
}

// The token of the warp's piece that holds `point`, counted from the piece's own begin. `ties` of the piece
// are kept.
__device__ inline int32_t find_in_piece(const DrawPiece& piece, DrawCut cut, int32_t ties, uint64_t point) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    uint64_t before = 0;
    for (int32_t i0 = 0; i0 < piece.count; i0 += kWarp) {
        const bool in = i0 + lane < piece.count;
        const uint32_t key = in ? piece.keys[i0 + lane] : 0;
        const uint32_t tie_votes = __ballot_sync(kFullWarp, in && key == cut.key);
        const bool kept =
            in && (key > cut.key || (key == cut.key && __popc(tie_votes & ((1u << lane) - 1)) < ties));
        ties -= min(ties, __popc(tie_votes));
        const uint64_t sum = before + warp_scan(kept ? piece.weights[i0 + lane] : 0);
        const uint32_t beyond = __ballot_sync(kFullWarp, sum > point);
        if (beyond != 0) {
            return piece.ids[i0 + __ffs(static_cast<int>(beyond)) - 1];
        }
        before = __shfl_sync(kFullWarp, sum, kWarp - 1);
    }
    return -1;
}

// Draws by the cut. All threads of the block take part and get the token.
__device__ inline int32_t draw_by_cut(const SampleSlot& slot, const DrawPiece& piece, DrawCut cut,
                                      DrawShared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    int32_t my_ties = 0;
    uint64_t above = 0;
    uint64_t tie_mass = 0;
    for_each(piece, [&](uint32_t key, uint32_t weight) {
        my_ties += key == cut.key ? 1 : 0;
        tie_mass += key == cut.key ? uint64_t{weight} : uint64_t{0};
        above += key > cut.key ? uint64_t{weight} : uint64_t{0};
    });
    my_ties = warp_reduce(my_ties, Sum{});
    above = warp_reduce(above, Sum{});
    tie_mass = warp_reduce(tie_mass, Sum{});
    if (lane == 0) {
        shared.ties[warp] = my_ties;
    }
    __syncthreads();
    const int32_t ties_before = warp_reduce(lane < warp ? shared.ties[lane] : 0, Sum{});
    const int32_t kept_ties = max(0, min(my_ties, cut.ties - ties_before));
    if (lane == 0) {
        shared.mass[warp] = above + (my_ties == 0 ? 0 : tie_mass / my_ties * kept_ties);
    }
    __syncthreads();
    const uint64_t sums = warp_scan(shared.mass[lane]);
    const uint64_t total = __shfl_sync(kFullWarp, sums, kWarp - 1);
    const uint64_t point = draw_point(slot.seed, static_cast<uint64_t>(slot.outputs), total);
    const int owner = __ffs(static_cast<int>(__ballot_sync(kFullWarp, sums > point))) - 1;
    if (warp == owner) {
        const uint64_t first = __shfl_sync(kFullWarp, sums - shared.mass[lane], owner);
        const int32_t token = find_in_piece(piece, cut, kept_ties, point - first);
        if (lane == 0) {
            shared.token = token;
        }
    }
    __syncthreads();
    return shared.token;
}

// Draws a token. All threads of the block take part and get it.
__device__ inline int32_t draw_token(const DrawRow& row, DrawShared& shared) {
    const DrawPiece piece = weigh_piece(row);
    DrawCut cut;
    if (row.slot.top_k > 0 || row.slot.top_p < 1) {
        fill_buckets(piece, row.max, shared);
    }
    if (row.slot.top_k > 0) {
        cut = cut_top_k(row, piece, shared);
    }
    if (row.slot.top_p < 1) {
        cut = cut_top_p(row, piece, cut, shared);
    }
    return draw_by_cut(row.slot, piece, cut, shared);
}

}  // namespace tessera::cuda
