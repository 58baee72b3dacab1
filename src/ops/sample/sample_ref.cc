#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "base/check.h"
#include "ops/sample/sample.h"
#include "ops/sample/sample_common.h"

namespace tessera {
namespace {

// Best first; equal logits in order of ids.
std::vector<int32_t> order_of(const std::vector<float>& x) {
    std::vector<int32_t> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return x[static_cast<size_t>(a)] > x[static_cast<size_t>(b)];
    });
    return order;
}

void report_logprobs(const SampleRowArgs& row, const std::vector<float>& raw, SampleRowResult& result) {
    const float max = *std::max_element(raw.begin(), raw.end());
    double sum = 0;
    for (const float value : raw) {
        sum += std::exp(static_cast<double>(value) - max);
    }
    const double log_sum = max + std::log(sum);
    result.logprob = static_cast<float>(raw[static_cast<size_t>(result.token)] - log_sum);
    const std::vector<int32_t> order = order_of(raw);
    const size_t top = std::min(static_cast<size_t>(std::min(row.top, kSampleTopMax)), raw.size());
    for (size_t i = 0; i < top && raw[static_cast<size_t>(order[i])] != kMinusInf; ++i) {
        const float value = raw[static_cast<size_t>(order[i])];
        result.top[i] = {order[i], static_cast<float>(value - log_sum)};
        result.top_count = static_cast<int32_t>(i) + 1;
    }
}

void edit(const SampleRowArgs& row, std::vector<float>& x) {
    const int64_t vocab = static_cast<int64_t>(x.size());
    for (int64_t i = 0; i < vocab && row.allowed != nullptr; ++i) {
        if (!bit_is_set(row.allowed, i)) {
            x[static_cast<size_t>(i)] = kMinusInf;
        }
    }
    apply_named_edits(row, vocab, x.data());
    for (int64_t i = 0; i < vocab && has_penalties(row); ++i) {
        const bool in_prompt = row.prompt_seen != nullptr && bit_is_set(row.prompt_seen, i);
        const int32_t count = row.output_counts == nullptr ? 0 : row.output_counts[i];
        x[static_cast<size_t>(i)] = penalised(x[static_cast<size_t>(i)], in_prompt, count, row);
    }
}

// Of each tile: the mass by which it is drawn, those of its runs, and the weights of its tokens.
struct Tile {
    uint64_t mass = 0;
    std::vector<uint32_t> runs;
    std::vector<uint32_t> weights;
};
std::vector<Tile> tiles_of(const SampleRowArgs& row, const std::vector<float>& x) {
    const SampleWeights weigh(row.temperature);
    const float max = *std::max_element(x.begin(), x.end());
    std::vector<Tile> tiles;
    for (size_t first = 0; first < x.size(); first += kSampleTile) {
        const auto begin = x.begin() + static_cast<int64_t>(first);
        const auto end = x.begin() + static_cast<int64_t>(std::min(x.size(), first + kSampleTile));
        const float best = *std::max_element(begin, end);
        Tile& tile = tiles.emplace_back();
        for (auto it = begin; it != end && best > kMinusInf; ++it) {
            tile.weights.push_back(weigh(*it, best));
        }
        uint64_t sum = 0;
        for (size_t i = 0; i < tile.weights.size(); i += kSampleRun) {
            const auto from = tile.weights.begin() + static_cast<int64_t>(i);
            const auto to =
                tile.weights.begin() + static_cast<int64_t>(std::min(tile.weights.size(), i + kSampleRun));
            tile.runs.push_back(std::accumulate(from, to, 0u) >> SampleWeightConstants::kRunBits);
            sum += tile.runs.back();
        }
        tile.mass = weigh.tile_mass(sum << SampleWeightConstants::kRunBits, best, max);
    }
    return tiles;
}

uint64_t mass_of(const std::vector<Tile>& tiles) {
    uint64_t mass = 0;
    for (const Tile& tile : tiles) {
        mass += tile.mass;
    }
    return mass;
}

// The index at which the running sum of `of(index)` passes `point`.
template <typename F>
size_t find_point(size_t count, uint64_t point, F of) {
    size_t i = 0;
    for (uint64_t sum = of(0); i + 1 < count && sum <= point; sum += of(i)) {
        ++i;
    }
    return i;
}

// A tile, then a token of it.
int32_t draw_by_tiles(const SampleRowArgs& row, const std::vector<float>& x) {
    const DrawFractions fractions = draw_fractions(row);
    const std::vector<Tile> tiles = tiles_of(row, x);
    const size_t at = find_point(tiles.size(), draw_point(fractions.whole, mass_of(tiles)),
                                 [&](size_t i) { return tiles[i].mass; });
    const Tile& tile = tiles[at];
    const uint32_t all = std::accumulate(tile.runs.begin(), tile.runs.end(), 0u);
    const size_t run = find_point(tile.runs.size(), draw_point(fraction_of_run(fractions.tile), all),
                                  [&](size_t i) { return tile.runs[i]; });
    const auto weights = std::span(tile.weights).subspan(run * kSampleRun);
    const size_t count = std::min<size_t>(kSampleRun, weights.size());
    const uint32_t sum = std::accumulate(weights.begin(), weights.begin() + static_cast<int64_t>(count), 0u);
    const size_t place = find_point(count, draw_point(fraction_of_token(fractions.tile), sum),
                                    [&](size_t i) { return weights[i]; });
    return static_cast<int32_t>(at * kSampleTile + run * kSampleRun + place);
}

// The kept tokens' weights by id; 0 = dropped.
std::vector<uint64_t> kept_weights(const SampleRowArgs& row, const std::vector<float>& x) {
    const SampleWeights weigh(row.temperature);
    const std::vector<int32_t> order = order_of(x);
    const float max = x[static_cast<size_t>(order[0])];
    const auto top_k = static_cast<size_t>(top_k_of(row, static_cast<int64_t>(x.size())));
    std::vector<uint64_t> weights(x.size());
    uint64_t total = 0;
    for (size_t rank = 0; rank < order.size(); ++rank) {
        const size_t id = static_cast<size_t>(order[rank]);
        if (top_k > 0 && rank >= top_k && x[id] < x[static_cast<size_t>(order[top_k - 1])]) {
            break;
        }
        weights[id] = weigh(x[id], max, row.min_p);
        total += weights[id];
    }
    if (row.top_p < 1) {
        const double whole = sums_tiles(row, static_cast<int64_t>(x.size()))
                                 ? whole_of_tiles(mass_of(tiles_of(row, x)))
                                 : static_cast<double>(total);
        const double target = static_cast<double>(row.top_p) * whole;
        uint64_t before = 0;
        for (size_t rank = 0; rank < order.size(); ++rank) {
            uint64_t& weight = weights[static_cast<size_t>(order[rank])];
            const uint64_t own = weight;
            if (rank > 0 && static_cast<double>(before) >= target) {
                weight = 0;
            }
            before += own;
        }
    }
    return weights;
}

int32_t choose(const SampleRowArgs& row, const std::vector<float>& x) {
    if (is_greedy(row)) {
        return order_of(x)[0];
    }
    if (row.top_p >= 1 && sums_tiles(row, static_cast<int64_t>(x.size()))) {
        return draw_by_tiles(row, x);
    }
    const std::vector<uint64_t> weights = kept_weights(row, x);
    const uint64_t total = std::accumulate(weights.begin(), weights.end(), uint64_t{0});
    return static_cast<int32_t>(find_point(weights.size(), draw_point(draw_fractions(row).whole, total),
                                           [&](size_t i) { return weights[i]; }));
}

SampleRowResult sample_row(const SampleRowArgs& row, int64_t vocab) {
    SampleRowResult result;
    const std::vector<float> raw(row.logits, row.logits + vocab);
    const bool finite = std::none_of(raw.begin(), raw.end(),
                                     [](float v) { return std::isnan(v) || (std::isinf(v) && v > 0); });
    if (!finite) {
        result.error = SampleError::kNotFinite;
        return result;
    }
    if (row.forced_token >= 0) {
        result.token = row.forced_token;
    } else {
        std::vector<float> x = raw;
        edit(row, x);
        if (*std::max_element(x.begin(), x.end()) == kMinusInf) {
            result.error = SampleError::kNoToken;
            return result;
        }
        result.token = choose(row, x);
    }
    if (row.logprobs) {
        report_logprobs(row, raw, result);
    }
    return result;
}

}  // namespace

std::string_view sample_error_name(SampleError error) {
    switch (error) {
        case SampleError::kNone:
            return "none";
        case SampleError::kNotFinite:
            return "the logits hold a NaN or an infinity";
        case SampleError::kNoToken:
            return "every token is masked";
    }
    return "none";
}

void sample_ref(const SampleArgs& args) {
    check(args.rows.size() == args.results.size(), "sample: one result for each row");
    for (size_t i = 0; i < args.rows.size(); ++i) {
        args.results[i] = sample_row(args.rows[i], args.vocab);
    }
}

}  // namespace tessera
