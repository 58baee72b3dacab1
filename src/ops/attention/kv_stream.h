// What decode fetches while it computes: the keys and values that come after those at hand, as one stream of
// memory. Private to this operator.
#pragma once

#include <cstdint>

#include "ops/attention/attention.h"

namespace tessera {

// Each step of the kernels takes as much of the stream as it uses of the keys or values at hand, so that the
// stream stays a fixed distance ahead, over the ends of tiles and of items, and memory has work all the time.
// Only a hint: it changes no result.
class KvStream {
  public:
    // The tiles that an item reads, in order: [tile, last], `keys` slots of the last one. The default is
    // none.
    struct Tiles {
        const AttentionArgs* args = nullptr;
        const AttentionSequence* sequence = nullptr;
        int64_t kv_head = 0;
        int32_t tile = 0;
        int32_t last = -1;
        int32_t keys = 0;
    };

    // A stream that is at its end. `idle`: memory that is near, to be named when there is nothing to fetch.
    explicit KvStream(const float* idle) : idle_(idle) {}

    // Begins `ahead` floats into `now`, and goes on with `after`.
    void start(const Tiles& now, const Tiles& after, int64_t ahead) {
        after_ = after;
        enter(now);
        while (left_ > 0 && ahead >= left_) {
            ahead -= left_;
            advance();
        }
        at_ += ahead;
        left_ -= ahead;
    }

    // Where the next `count` floats begin; some may lie past the end of a block.
    const float* take(int64_t count) {
        if (left_ <= 0) {
            return idle_;
        }
        const float* from = at_;
        at_ += count;
        left_ -= count;
        if (left_ <= 0) {
            advance();
        }
        return from;
    }

  private:
    static constexpr int32_t kScoredKeys = 16;  // keys are scored in groups of up to so many

    void enter(const Tiles& tiles) {
        tiles_ = tiles;
        values_ = false;
        left_ = 0;
        if (tiles.tile <= tiles.last) {
            point();
        }
    }

    // To the next block of keys or of values.
    void advance() {
        if (!values_) {
            values_ = true;
            point();
        } else if (tiles_.tile < tiles_.last) {
            ++tiles_.tile;
            values_ = false;
            point();
        } else {
            enter(after_);
            after_ = {};
        }
    }

    void point() {
        const AttentionArgs& args = *tiles_.args;
        const int64_t head_dim = args.plan->shape().head_dim;
        const int64_t page = tiles_.sequence->pages[static_cast<size_t>(tiles_.tile)];
        const int64_t offset = page * args.page_stride + (values_ ? args.v_offset : args.k_offset);
        at_ = reinterpret_cast<const float*>(args.pool + offset) + tiles_.kv_head * kAttentionTile * head_dim;
        int32_t keys = tiles_.tile < tiles_.last ? kAttentionTile : tiles_.keys;
        if (!values_) {
            keys = (keys + kScoredKeys - 1) / kScoredKeys * kScoredKeys;
        }
        left_ = keys * head_dim;
    }

    const float* idle_ = nullptr;
    const float* at_ = nullptr;
    int64_t left_ = 0;  // floats of the block
    Tiles tiles_;
    Tiles after_;
    bool values_ = false;
};

}  // namespace tessera
