// Stream and Event: owned CUDA streams and events. Both are made at start and may be used by one thread at a
// time.
#pragma once

#include <memory>
#include <type_traits>

#include <cuda_runtime_api.h>

namespace tessera {

class Event {
  public:
    enum class Timing : bool { kOff, kOn };
    explicit Event(Timing timing = Timing::kOff);

    cudaEvent_t get() const { return event_.get(); }
    void record(cudaStream_t stream);
    // Whether everything recorded has run. Does not block.
    bool done() const;
    // Blocks the calling thread.
    void wait() const;
    // Microseconds between two recorded, completed events with timing.
    static double elapsed_us(const Event& begin, const Event& end);

  private:
    struct Release {
        void operator()(cudaEvent_t event) const;
    };
    std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, Release> event_;
};

class Stream {
  public:
    // Not synchronised with the default stream. Smaller priority values run first; out of range is clamped.
    explicit Stream(int priority = 0);

    cudaStream_t get() const { return stream_.get(); }
    // Work entered from here on waits for the event; the host does not.
    void wait(const Event& event);
    // Blocks the calling thread until the stream is empty. Tests and start-up only.
    void synchronize() const;

  private:
    struct Release {
        void operator()(cudaStream_t stream) const;
    };
    std::unique_ptr<std::remove_pointer_t<cudaStream_t>, Release> stream_;
};

}  // namespace tessera
