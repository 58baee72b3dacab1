#include <algorithm>

#include "text/detokenizer.h"

namespace tessera {
namespace {

constexpr int32_t kNone = -1;

}  // namespace

StopMatcher::StopMatcher(std::vector<std::string> stops, bool include_stop) : include_stop_(include_stop) {
    states_.emplace_back();
    for (const std::string& stop : stops) {
        int32_t state = 0;
        for (const char byte : stop) {
            int32_t next = find(state, byte);
            if (next == kNone) {
                next = static_cast<int32_t>(states_.size());
                states_[state].next.emplace_back(byte, next);
                const int32_t depth = states_[state].depth + 1;
                states_.push_back({.next = {}, .fallback = 0, .depth = depth, .match = 0});
            }
            state = next;
        }
        states_[state].match = states_[state].depth;
    }
    link();
}

// Breadth first, so that a state's fallback, which is shorter, is complete before it.
void StopMatcher::link() {
    std::vector<int32_t> queue = {0};
    for (size_t i = 0; i < queue.size(); ++i) {
        const int32_t parent = queue[i];
        for (const auto& [byte, child] : states_[parent].next) {
            State& state = states_[child];
            state.fallback = parent == 0 ? 0 : step(states_[parent].fallback, byte);
            state.match = std::max(state.match, states_[state.fallback].match);
            queue.push_back(child);
        }
    }
}

int32_t StopMatcher::find(int32_t state, char byte) const {
    for (const auto& [label, next] : states_[state].next) {
        if (label == byte) {
            return next;
        }
    }
    return kNone;
}

int32_t StopMatcher::step(int32_t state, char byte) const {
    while (true) {
        const int32_t next = find(state, byte);
        if (next != kNone || state == 0) {
            return next == kNone ? 0 : next;
        }
        state = states_[state].fallback;
    }
}

StopMatcher::Output StopMatcher::push(std::string_view text) {
    Output out{.text = {}, .stopped = stopped_, .found = {}};
    if (stopped_) {
        return out;
    }
    std::string& shown = out.text;
    shown.swap(held_);
    for (const char byte : text) {
        state_ = step(state_, byte);
        shown += byte;
        if (const auto match = static_cast<size_t>(states_[state_].match); match > 0) {
            out.found = shown.substr(shown.size() - match);
            if (!include_stop_) {
                shown.resize(shown.size() - match);
            }
            stopped_ = out.stopped = true;
            return out;
        }
    }
    const size_t safe = shown.size() - static_cast<size_t>(states_[state_].depth);
    held_ = shown.substr(safe);
    shown.resize(safe);
    return out;
}

std::string StopMatcher::flush() {
    state_ = 0;
    return std::exchange(held_, {});
}

}  // namespace tessera
