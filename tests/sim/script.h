// Script: what the pretended model answers to one request, a pure function of the request's key and the place
// in the output. So every output can be checked exactly, whatever was cached, preempted and computed again on
// the way.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "sim/random.h"
#include "types/request.h"

namespace tessera::sim {

inline constexpr TokenId kEos = 2;
inline constexpr TokenId kOwnStop = 3;  // in the stop_ids of some requests

struct Script {
    uint64_t key = 0;
    uint64_t salt = 0;  // of the request's cache_salt: pages of two tenants must differ
    // Output places, -1 = nowhere: a token that ends the request; an EOS that must not end it (before
    // min_tokens, or with ignore_eos); a row that fails instead of sampling.
    int32_t stop_at = -1;
    TokenId stop_token = kEos;
    int32_t eos_ignored_at = -1;
    int32_t error_at = -1;

    TokenId token(int32_t place) const {
        if (place == stop_at) {
            return stop_token;
        }
        if (place == eos_ignored_at) {
            return kEos;
        }
        return static_cast<TokenId>(100 + mix(key, static_cast<uint64_t>(place)) % 900);
    }
};

// By SamplingParams::seed, which is all that a runner knows of who asks.
using Scripts = std::unordered_map<uint64_t, Script>;

}  // namespace tessera::sim
