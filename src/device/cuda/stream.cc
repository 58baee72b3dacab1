#include "device/cuda/stream.h"

#include "device/cuda/cuda_check.h"

namespace tessera {

Event::Event(Timing timing) {
    cudaEvent_t event = nullptr;
    cuda_check(
        cudaEventCreateWithFlags(&event, timing == Timing::kOn ? cudaEventDefault : cudaEventDisableTiming));
    event_.reset(event);
}

void Event::Release::operator()(cudaEvent_t event) const {
    cuda_check(cudaEventDestroy(event));
}

void Event::record(cudaStream_t stream) {
    cuda_check(cudaEventRecord(event_.get(), stream));
}

bool Event::done() const {
    const cudaError_t state = cudaEventQuery(event_.get());
    if (state == cudaErrorNotReady) {
        return false;
    }
    cuda_check(state);
    return true;
}

void Event::wait() const {
    cuda_check(cudaEventSynchronize(event_.get()));
}

double Event::elapsed_us(const Event& begin, const Event& end) {
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, begin.get(), end.get()));
    return static_cast<double>(ms) * 1e3;
}

Stream::Stream(int priority) {
    cudaStream_t stream = nullptr;
    cuda_check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
    stream_.reset(stream);
}

void Stream::Release::operator()(cudaStream_t stream) const {
    cuda_check(cudaStreamDestroy(stream));
}

void Stream::wait(const Event& event) {
    cuda_check(cudaStreamWaitEvent(stream_.get(), event.get(), 0));
}

void Stream::synchronize() const {
    cuda_check(cudaStreamSynchronize(stream_.get()));
}

}  // namespace tessera
