// Graph: a recorded sequence of launches, replayed as one. What is recorded keeps its pointers and grid
// sizes, so everything that varies from replay to replay (lengths, page tables, tokens) lies in device
// memory.
#pragma once

#include <functional>
#include <memory>
#include <type_traits>

#include <cuda_runtime_api.h>

namespace tessera {

class Graph {
  public:
    Graph() = default;

    // Records what `body` enters into the stream; nothing runs. The body may fork to other streams by events
    // that it joins again, and must not synchronise.
    static Graph capture(cudaStream_t stream, const std::function<void()>& body);

    bool empty() const { return exec_ == nullptr; }
    void launch(cudaStream_t stream) const;

  private:
    struct Release {
        void operator()(cudaGraphExec_t exec) const;
    };
    std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, Release> exec_;
};

}  // namespace tessera
