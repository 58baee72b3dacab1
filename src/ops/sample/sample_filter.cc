#include "ops/sample/sample_filter.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <numeric>
#include <span>

#include "ops/sample/sample_common.h"

namespace tessera {
namespace {

struct Bucket {
    int32_t index = 0;
    uint64_t mass_before = 0;  // of the better buckets
    int64_t count_before = 0;
};

// The tokens of a bucket, best first, ties in order of ids.
std::span<const int32_t> sorted_bucket(const SampleMemory& memory, int32_t bucket) {
    int64_t count = 0;
    for (int64_t i = 0; i < memory.padded; ++i) {
        memory.candidates[count] = static_cast<int32_t>(i);
        count += memory.buckets[i] == bucket ? 1 : 0;
    }
    const std::span<int32_t> ids(memory.candidates, static_cast<size_t>(count));
    std::sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
        return memory.x[a] != memory.x[b] ? memory.x[a] > memory.x[b] : a < b;
    });
    return ids;
}

void fill_histogram(const SampleMemory& memory) {
    std::fill_n(memory.bucket_mass, kSampleBuckets, uint64_t{0});
    std::fill_n(memory.bucket_count, kSampleBuckets, 0);
    for (int64_t i = 0; i < memory.padded; ++i) {
        const int32_t bucket = memory.buckets[i];
        memory.bucket_mass[bucket] += static_cast<uint64_t>(memory.weights[i]);
        ++memory.bucket_count[bucket];
    }
}

// What top_k leaves: every token at least as good as the k-th, and their mass.
struct TopK {
    float logit = kMinusInf;
    uint64_t mass = 0;
};

TopK find_top_k(const SampleRowArgs& row, const SampleMemory& memory) {
    const int32_t top_k = top_k_of(row, memory.vocab);
    Bucket at;
    while (at.index < kSampleBuckets - 1 &&
           (top_k == 0 || at.count_before + memory.bucket_count[at.index] < top_k)) {
        at.mass_before += memory.bucket_mass[at.index];
        at.count_before += memory.bucket_count[at.index];
        ++at.index;
    }
    TopK result{.mass = at.mass_before};
    if (at.index == kSampleBuckets - 1) {
        return result;  // no more tokens with a weight than k
    }
    const std::span<const int32_t> ids = sorted_bucket(memory, at.index);
    result.logit = memory.x[ids[static_cast<size_t>(top_k - at.count_before - 1)]];
    for (const int32_t id : ids) {
        result.mass += memory.x[id] >= result.logit ? static_cast<uint64_t>(memory.weights[id]) : 0;
    }
    return result;
}

}  // namespace

SampleMemory SampleMemory::at(std::byte* memory, int64_t vocab, int64_t* bytes) {
    int64_t used = 0;
    const auto take = [&](int64_t size) {
        std::byte* piece = memory == nullptr ? nullptr : memory + used;
        used += (size + 63) / 64 * 64;
        return piece;
    };
    SampleMemory m;
    m.vocab = vocab;
    m.padded = (vocab + 15) / 16 * 16;
    m.x = reinterpret_cast<float*>(take(m.padded * 4));
    m.weights = reinterpret_cast<int32_t*>(take(m.padded * 4));
    m.buckets = reinterpret_cast<int32_t*>(take(m.padded * 4));
    m.tile_sums = reinterpret_cast<uint64_t*>(take(m.tiles() * 8));
    m.tile_best = reinterpret_cast<float*>(take(m.tiles() * 4));
    m.bucket_mass = reinterpret_cast<uint64_t*>(take(std::max<int64_t>(kSampleBuckets, m.tiles()) * 8));
    m.bucket_count = reinterpret_cast<int32_t*>(take(int64_t{kSampleBuckets} * 4));
    m.candidates = reinterpret_cast<int32_t*>(take((m.padded + 16) * 4));
    if (bytes != nullptr) {
        *bytes = used;
    }
    return m;
}

SampleCut find_cut(const SampleRowArgs& row, const SampleMemory& memory, double whole) {
    fill_histogram(memory);
    const TopK top_k = find_top_k(row, memory);
    SampleCut cut{.logit = top_k.logit, .id = std::numeric_limits<int32_t>::max()};
    if (row.top_p >= 1) {
        return cut;
    }
    const double target =
        static_cast<double>(row.top_p) * (whole > 0 ? whole : static_cast<double>(top_k.mass));
    Bucket at;
    while (at.index < kSampleBuckets - 2 &&
           static_cast<double>(at.mass_before + memory.bucket_mass[at.index]) < target) {
        at.mass_before += memory.bucket_mass[at.index];
        ++at.index;
    }
    uint64_t before = at.mass_before;
    bool first = at.index == 0;  // the best token is always kept
    for (const int32_t id : sorted_bucket(memory, at.index)) {
        if (memory.x[id] < top_k.logit || (!first && static_cast<double>(before) >= target)) {
            break;
        }
        cut = {memory.x[id], id};
        before += static_cast<uint64_t>(memory.weights[id]);
        first = false;
    }
    return cut;
}

namespace {

// The index at which the running sum of `values` passes `point`, which becomes the rest.
template <typename T>
int64_t find_point(const T* values, uint64_t& point) {
    int64_t i = 0;
    for (; point >= static_cast<uint64_t>(values[i]); ++i) {
        point -= static_cast<uint64_t>(values[i]);
    }
    return i;
}

uint32_t run_mass(const int32_t* weights, int64_t count) {
    return std::accumulate(weights, weights + count, 0u) >> SampleWeightConstants::kRunBits;
}

}  // namespace

int32_t draw_token(const SampleRowArgs& row, const SampleMemory& memory) {
    const uint64_t total = std::accumulate(memory.tile_sums, memory.tile_sums + memory.tiles(), uint64_t{0});
    uint64_t point = draw_point(draw_fractions(row).whole, total);
    const int64_t first = find_point(memory.tile_sums, point) * kSampleTile;
    return static_cast<int32_t>(first + find_point(memory.weights + first, point));
}

uint64_t tile_masses(const SampleRowArgs& row, const SampleMemory& memory, float max, uint64_t* masses) {
    const SampleWeights weigh(row.temperature);
    uint64_t total = 0;
    for (int64_t tile = 0; tile < memory.tiles(); ++tile) {
        masses[tile] = weigh.tile_mass(memory.tile_sums[tile], memory.tile_best[tile], max);
        total += masses[tile];
    }
    return total;
}

uint64_t sum_of_runs(const int32_t* weights, int64_t count) {
    uint64_t sum = 0;
    for (int64_t first = 0; first < count; first += kSampleRun) {
        sum += run_mass(weights + first, std::min<int64_t>(kSampleRun, count - first));
    }
    return sum << SampleWeightConstants::kRunBits;
}

int32_t draw_by_tiles(const SampleRowArgs& row, const SampleMemory& memory, float max) {
    const DrawFractions fractions = draw_fractions(row);
    uint64_t* masses = memory.bucket_mass;
    uint64_t point = draw_point(fractions.whole, tile_masses(row, memory, max, masses));
    const int64_t tile = find_point(masses, point);
    const auto runs = static_cast<uint32_t>(memory.tile_sums[tile] >> SampleWeightConstants::kRunBits);
    uint32_t rest = draw_point(fraction_of_run(fractions.tile), runs);
    int64_t first = tile * kSampleTile;
    const auto count = [&] { return std::min<int64_t>(kSampleRun, memory.padded - first); };
    for (uint32_t mass; rest >= (mass = run_mass(memory.weights + first, count())); first += kSampleRun) {
        rest -= mass;
    }
    const uint32_t sum = std::accumulate(memory.weights + first, memory.weights + first + count(), 0u);
    point = draw_point(fraction_of_token(fractions.tile), sum);
    return static_cast<int32_t>(first + find_point(memory.weights + first, point));
}

Result<SampleWorkspace> SampleWorkspace::create(int64_t vocab, int threads) {
    SampleWorkspace workspace(vocab);
    SampleMemory::at(nullptr, vocab, &workspace.stride_);
    Result<HostBuffer> memory = HostBuffer::allocate(
        workspace.stride_ * threads, fmt::format("the sampler's workspaces of {} threads", threads),
        "lower --threads");
    if (!memory.ok()) {
        return memory.status();
    }
    workspace.memory_ = memory.take();
    return workspace;
}

}  // namespace tessera
