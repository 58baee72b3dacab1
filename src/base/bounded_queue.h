// A bounded queue between threads. A full queue refuses; nothing here waits without limit to push.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace tessera {

// Many producers, many consumers; every member may be called from any thread.
template <typename T>
class BoundedQueue {
  public:
    explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

    // False when the queue is full or closed; the value is then untouched.
    bool try_push(T&& value) {
        {
            std::lock_guard lock(mutex_);
            if (closed_ || items_.size() >= capacity_) {
                return false;
            }
            items_.push_back(std::move(value));
        }
        ready_.notify_one();
        return true;
    }

    std::optional<T> try_pop() {
        std::lock_guard lock(mutex_);
        return pop_locked();
    }

    // Waits until an item comes or the queue is closed and empty (then nothing).
    std::optional<T> pop() {
        std::unique_lock lock(mutex_);
        ready_.wait(lock, [&] { return closed_ || !items_.empty(); });
        return pop_locked();
    }

    std::optional<T> pop_for(std::chrono::nanoseconds timeout) {
        std::unique_lock lock(mutex_);
        ready_.wait_for(lock, timeout, [&] { return closed_ || !items_.empty(); });
        return pop_locked();
    }

    // After close() pushes fail and pops drain what is left.
    void close() {
        {
            std::lock_guard lock(mutex_);
            closed_ = true;
        }
        ready_.notify_all();
    }

    size_t size() const {
        std::lock_guard lock(mutex_);
        return items_.size();
    }
    size_t capacity() const { return capacity_; }

  private:
    std::optional<T> pop_locked() {
        if (items_.empty()) {
            return std::nullopt;
        }
        std::optional<T> value(std::move(items_.front()));
        items_.pop_front();
        return value;
    }

    const size_t capacity_;
    mutable std::mutex mutex_;
    std::condition_variable ready_;
    std::deque<T> items_;
    bool closed_ = false;
};

}  // namespace tessera
