// The weights that tokens are drawn by: integers, so that sums do not depend on their order. One sequence of
// float32 operations, written here for scalars, in sample_cpu.cc for vectors and in cuda/sample_row.cuh for
// the device, so that all draw the same token. Private to this operator.
//
// weight = round(2^26 exp((x - best) / temperature)), 0 below 2^-27 of the best. exp is 2^n p(r): n the
// rounded and r the rest of (x - best) rate, rate = log2(e) / temperature, p of degree 4 with an error of
// 2.9e-6, three times what the last bit of a logit of 12 makes.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace tessera {

// A tile is this many neighbouring ids; the last of a row may be shorter.
inline constexpr int32_t kSampleTile = 1024;
// And a run of a tile this many: one of them is drawn by its mass, then a token of it by its weight.
inline constexpr int32_t kSampleRun = 32;

struct SampleWeightConstants {
    static constexpr int kBits = 26;          // the best token weighs 2^26
    static constexpr int kRunBits = 5;        // a run's mass counts 1 for 2^5 of its tokens', to fit 32 bits
    static constexpr int kTileBits = 10;      // and a tile's mass counts 2^10 for each of a token's
    static constexpr float kLowest = -28.0f;  // powers of two below which nothing is told apart
    static constexpr float kTileLowest = -48.0f;
    static constexpr float kLog2E = 1.44269504088896341f;
    static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    static constexpr float kMantissa = 16777216.0f;
    static constexpr int kDegree = 4;
    static constexpr float kPoly[kDegree + 1] = {1.0f, 0x1.62e12cp-1f, 0x1.ec0378p-3f, 0x1.c9fc5cp-5f,
                                                 0x1.3a02f0p-7f};
};

class SampleWeights {
    using C = SampleWeightConstants;

  public:
    explicit SampleWeights(float temperature)
        : rate_(C::kLog2E / temperature), lowest_(C::kLowest / rate_), tile_lowest_(C::kTileLowest / rate_) {}

    float rate() const { return rate_; }
    float lowest() const { return lowest_; }

    // Not yet rounded. REQUIRES: x <= best, and best is finite.
    float unrounded(float x, float best) const {
        const float shifted_zero = C::kRound + C::kBits;
        const float t = std::max(x - best, lowest_);
        const float shifted = std::fma(t, rate_, shifted_zero);
        const float p = power(std::fma(t, rate_, -(shifted - shifted_zero)));
        return std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23));
    }
    uint32_t operator()(float x, float best) const {
        return static_cast<uint32_t>(std::lrint(unrounded(x, best)));
    }
    // 0 where min_p drops the token.
    uint32_t operator()(float x, float best, float min_p) const {
        const float weight = unrounded(x, best);
        return weight < min_p * (1 << C::kBits) ? 0 : static_cast<uint32_t>(std::lrint(weight));
    }
    // The mass of a tile among others: `sum` of its tokens' weights by the tile's best logit, of each run
    // without its lowest kRunBits, brought to the row's best. At most 2^46.
    uint64_t tile_mass(uint64_t sum, float tile_best, float best) const {
        const float t = std::max(tile_best - best, tile_lowest_);
        const float shifted = std::fma(t, rate_, C::kRound);
        const float n = shifted - C::kRound;
        const auto mantissa = static_cast<uint64_t>(power(std::fma(t, rate_, -n)) * C::kMantissa);
        return sum * mantissa >> (24 - C::kTileBits - static_cast<int>(n));
    }

  private:
    // 2^r for |r| <= 0.5
    static float power(float r) {
        float p = C::kPoly[C::kDegree];
        for (int i = C::kDegree - 1; i >= 0; --i) {
            p = std::fma(p, r, C::kPoly[i]);
        }
        return p;
    }

    float rate_, lowest_, tile_lowest_;
};

}  // namespace tessera
