// What each thread will read in a later operator, for a matrix kernel to fetch into the thread's second-level
// cache while arithmetic alone would leave memory idle. A hint: it changes no result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera {

// Where blocks of memory begin, for each thread, taken in order; who fetches knows how much. Filled by one
// thread; then each thread takes its own.
class FetchAhead {
  public:
    void clear(int threads) {
        hands_.resize(static_cast<size_t>(threads));
        for (Hand& hand : hands_) {
            hand.blocks.clear();
            hand.taken = 0;
        }
    }

    void add(int64_t thread, const std::byte* block) {
        hands_[static_cast<size_t>(thread)].blocks.push_back(block);
    }

    // Null when there is no more.
    const std::byte* take(int thread) {
        Hand& hand = hands_[static_cast<size_t>(thread)];
        return hand.taken < hand.blocks.size() ? hand.blocks[hand.taken++] : nullptr;
    }

  private:
    struct alignas(64) Hand {
        std::vector<const std::byte*> blocks;
        size_t taken = 0;
    };
    std::vector<Hand> hands_;
};

}  // namespace tessera
