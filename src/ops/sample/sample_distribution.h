// What the draws of a row must follow, in float64 from the published rules alone, and rows of every kind to
// draw from. For the tests of the CPU and of the device.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <fmt/format.h>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/sample/sample_cases.h"
#include "ops/sample/sample_common.h"

namespace tessera {

// What happens to logits before a draw.
enum class SampleStep : uint8_t {
    kMasks,
    kBias,
    kRepetition,
    kCounts,  // frequency and presence
    kTemperature,
    kMinP,
    kTopK,
    kTopP
};
using SampleOrder = std::array<SampleStep, 8>;
inline constexpr SampleOrder kVllmOrder = {
    SampleStep::kMasks,       SampleStep::kBias, SampleStep::kRepetition, SampleStep::kCounts,
    SampleStep::kTemperature, SampleStep::kMinP, SampleStep::kTopK,       SampleStep::kTopP};

inline std::vector<double> softmax(std::span<const double> x) {
    const double max = *std::max_element(x.begin(), x.end());
    std::vector<double> p;
    for (const double v : x) {
        p.push_back(std::exp(v - max));
    }
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& v : p) {
        v /= sum;
    }
    return p;
}

// The distributions that a row's logits become, step by step.
class ExpectedDistribution {
  public:
    ExpectedDistribution(const SampleRowArgs& row, int64_t vocab)
        : row_(row), x_(row.logits, row.logits + vocab) {}

    void apply(SampleStep step) {
        switch (step) {
            case SampleStep::kMasks:
                return mask();
            case SampleStep::kBias:
                for (const auto& [id, bias] : row_.logit_bias) {
                    x_[static_cast<size_t>(id)] += bias;
                }
                return;
            case SampleStep::kRepetition:
                return edit([&](size_t i, double v) {
                    const bool seen = count(i) > 0 || (row_.prompt_seen != nullptr &&
                                                       bit_is_set(row_.prompt_seen, static_cast<int64_t>(i)));
                    const double by = seen ? row_.repetition_penalty : 1;
                    return v > 0 ? v / by : v * by;
                });
            case SampleStep::kCounts:
                return edit([&](size_t i, double v) {
                    return v - static_cast<double>(row_.frequency_penalty) * count(i) -
                           (count(i) > 0 ? static_cast<double>(row_.presence_penalty) : 0);
                });
            case SampleStep::kTemperature:
                return edit([&](size_t, double v) { return v / static_cast<double>(row_.temperature); });
            case SampleStep::kMinP:
                return keep_min_p();
            case SampleStep::kTopK:
                return keep_top_k();
            case SampleStep::kTopP:
                return keep_top_p();
        }
    }
    std::vector<double> probabilities() const { return softmax(x_); }

  private:
    int32_t count(size_t i) const { return row_.output_counts == nullptr ? 0 : row_.output_counts[i]; }
    template <typename F>
    void edit(F f) {
        for (size_t i = 0; i < x_.size(); ++i) {
            x_[i] = f(i, x_[i]);
        }
    }
    void mask() {
        edit([&](size_t i, double v) {
            const bool may = row_.allowed == nullptr || bit_is_set(row_.allowed, static_cast<int64_t>(i));
            return may ? v : -INFINITY;
        });
        for (const int32_t id : row_.masked) {
            x_[static_cast<size_t>(id)] = -INFINITY;
        }
    }
    void keep_min_p() {
        const std::vector<double> p = softmax(x_);
        const double least = static_cast<double>(row_.min_p) * *std::max_element(p.begin(), p.end());
        edit([&](size_t i, double v) { return p[i] < least ? -INFINITY : v; });
    }
    void keep_top_k() {
        if (row_.top_k > 0) {
            std::vector<double> sorted = x_;
            std::sort(sorted.rbegin(), sorted.rend());
            const double least = sorted[static_cast<size_t>(row_.top_k) - 1];
            edit([&](size_t, double v) { return v < least ? -INFINITY : v; });
        }
    }
    void keep_top_p() {
        const std::vector<double> p = softmax(x_);
        std::vector<size_t> order(p.size());
        std::iota(order.begin(), order.end(), size_t{0});
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
        double before = 0;
        for (const size_t id : order) {
            x_[id] = row_.top_p < 1 && before >= static_cast<double>(row_.top_p) ? -INFINITY : x_[id];
            before += p[id];
        }
    }

    const SampleRowArgs& row_;
    std::vector<double> x_;
};

inline std::vector<double> expected_distribution(const SampleRowArgs& row, int64_t vocab,
                                                 const SampleOrder& order = kVllmOrder) {
    ExpectedDistribution expected(row, vocab);
    for (const SampleStep step : order) {
        expected.apply(step);
    }
    return expected.probabilities();
}

// Draws against a distribution.
struct ChiSquare {
    double statistic = 0;
    int degrees = -1;
    int64_t outside = 0;  // draws of what is never drawn

    // Whether chance makes such draws more than once in 10^7 times (Wilson and Hilferty's quantile).
    bool plausible() const {
        constexpr double kDeviations = 5.2;
        const double part = 2 / (9.0 * std::max(degrees, 1));
        const double bound = degrees * std::pow(1 - part + kDeviations * std::sqrt(part), 3);
        return outside == 0 && statistic <= bound;
    }
};

inline ChiSquare chi_square(std::span<const int64_t> counts, std::span<const double> p) {
    constexpr double kCellMin = 5;  // draws expected of a cell; rarer tokens are in one with their neighbours
    const auto draws = static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    ChiSquare result;
    double rare = 0;
    double rare_expected = 0;
    const auto add = [&](double count, double expected) {
        result.statistic += (count - expected) * (count - expected) / expected;
        ++result.degrees;
    };
    for (size_t i = 0; i < p.size(); ++i) {
        const double expected = p[i] * draws;
        if (p[i] == 0) {
            result.outside += counts[i];
        } else if (expected >= kCellMin) {
            add(static_cast<double>(counts[i]), expected);
        } else if (rare += static_cast<double>(counts[i]), (rare_expected += expected) >= kCellMin) {
            add(rare, rare_expected);
            rare = rare_expected = 0;
        }
    }
    return result;
}

// A kind of row: what it has of each control.
struct SampleKind {
    enum class Penalties : uint8_t { kNone, kRepetition, kPresence, kFrequency, kAll };
    enum class Mask : uint8_t { kNone, kAllowed, kMasked };

    Penalties penalties = Penalties::kNone;
    bool bias = false;
    Mask mask = Mask::kNone;
    int32_t top_k = 0;
    float top_p = 1;
    float min_p = 0;
    float temperature = 1;
    bool ties = false;  // logits are few different numbers

    std::string name() const {
        constexpr std::array<std::string_view, 5> kPenalties = {"", " repetition", " presence", " frequency",
                                                                " penalties"};
        constexpr std::array<std::string_view, 3> kMasks = {"", " allowed", " masked"};
        return fmt::format("temperature={} top_k={} top_p={} min_p={}{}{}{}{}", temperature, top_k, top_p,
                           min_p, kPenalties[static_cast<size_t>(penalties)], bias ? " bias" : "",
                           kMasks[static_cast<size_t>(mask)], ties ? " ties" : "");
    }

    // Every row has a history, which counts where there are penalties alone.
    void edit(SampleRowArgs& row, OpRandom& random, SampleCase& owner) const {
        const int64_t vocab = owner.vocab();
        auto* logits = const_cast<float*>(row.logits);
        for (int64_t i = 0; i < vocab && ties; ++i) {
            logits[i] = std::round(logits[i] * 2) / 2;
        }
        row.temperature = temperature;
        row.top_k = top_k;
        row.top_p = top_p;
        row.min_p = min_p;
        const bool all = penalties == Penalties::kAll;
        row.repetition_penalty = all ? 1.3f : penalties == Penalties::kRepetition ? 1.7f : 1;
        row.presence_penalty = all ? 0.4f : penalties == Penalties::kPresence ? 0.9f : 0;
        row.frequency_penalty = all ? 0.3f : penalties == Penalties::kFrequency ? 0.6f : 0;
        owner.add_history(row, random);
        if (mask == Mask::kAllowed) {
            std::vector<uint32_t>& allowed = owner.keep_masks((vocab + 31) / 32);
            for (uint32_t& word : allowed) {
                word = static_cast<uint32_t>(random.next() | random.next());
            }
            row.allowed = allowed.data();
        } else if (mask == Mask::kMasked) {
            std::vector<int32_t>& masked = owner.keep_ints(6);
            for (int32_t& id : masked) {
                id = static_cast<int32_t>(random.below(vocab));
            }
            masked[0] = static_cast<int32_t>(std::max_element(logits, logits + vocab) - logits);
            row.masked = masked;
        }
        if (bias) {
            auto& biases = owner.keep_biases();
            for (int i = 0; i < 5; ++i) {
                biases.emplace_back(static_cast<int32_t>(random.below(vocab)), random.uniform() * 1.5f);
            }
            row.logit_bias = biases;
        }
    }
};

// Few ids: every combination of controls. Many ids: those that cut beyond 64, where the device takes its slow
// way. Both: more tokens than k where several tie with the k-th.
inline constexpr int64_t kSampleKindsFewIds = 40;
inline constexpr int64_t kSampleKindsManyIds = 200;

inline std::vector<SampleKind> sample_kinds(int64_t vocab) {
    using Penalties = SampleKind::Penalties;
    using Mask = SampleKind::Mask;
    const bool many = vocab > kSampleKindsFewIds;
    const std::vector<SampleKind> cuts =
        many ? std::vector<SampleKind>{{.top_k = 90},
                                       {.top_p = 0.95f},
                                       {.min_p = 0.1f},
                                       {.top_k = 100, .top_p = 0.9f},
                                       {.top_k = 120, .top_p = 0.9f, .min_p = 0.03f}}
             : std::vector<SampleKind>{{},
                                       {.top_k = 8},
                                       {.top_p = 0.75f},
                                       {.min_p = 0.15f},
                                       {.top_k = 14, .top_p = 0.8f},
                                       {.top_k = 18, .top_p = 0.9f, .min_p = 0.08f}};
    const std::vector<float> temperatures = many ? std::vector<float>{1} : std::vector<float>{1, 0.75f};
    std::vector<SampleKind> kinds;
    for (const SampleKind& cut : cuts) {
        for (const Penalties penalties : {Penalties::kNone, Penalties::kRepetition, Penalties::kPresence,
                                          Penalties::kFrequency, Penalties::kAll}) {
            const bool either = penalties == Penalties::kNone || penalties == Penalties::kAll;
            for (const Mask mask : {Mask::kNone, Mask::kAllowed, Mask::kMasked}) {
                SampleKind kind = cut;
                kind.penalties = penalties;
                kind.mask = mask;
                for (const float temperature : temperatures) {
                    kind.temperature = temperature;
                    for (const bool bias : {false, true}) {
                        kind.bias = bias;
                        if (either || !many) {
                            kinds.push_back(kind);
                        }
                    }
                }
                if (either && kind.top_k > 0 && mask != Mask::kMasked) {
                    kind.ties = true;
                    kind.bias = false;
                    kinds.push_back(kind);
                }
            }
        }
    }
    return kinds;
}

// Logits of the kinds' rows lie in [-2, 2): no token is rare.
inline constexpr float kSampleKindsSpread = 2;

// Row i is of kind i.
inline SampleCase::Edit edit_to_kinds(int64_t vocab) {
    return [kinds = sample_kinds(vocab)](SampleRowArgs& row, OpRandom& random, SampleCase& owner) {
        kinds[row.position].edit(row, random, owner);
    };
}
inline std::shared_ptr<SampleCase> sample_kinds_case(int64_t vocab) {
    return std::make_shared<SampleCase>(vocab, static_cast<int64_t>(sample_kinds(vocab).size()),
                                        kSampleKindsSpread, edit_to_kinds(vocab));
}

}  // namespace tessera
