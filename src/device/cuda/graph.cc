#include "device/cuda/graph.h"

#include "device/cuda/cuda_check.h"

namespace tessera {

Graph Graph::capture(cudaStream_t stream, const std::function<void()>& body) {
    // Thread-local: start-up work of other threads may go on.
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    body();
    cudaGraph_t recorded = nullptr;
    cuda_check(cudaStreamEndCapture(stream, &recorded));
    cudaGraphExec_t exec = nullptr;
    cuda_check(cudaGraphInstantiate(&exec, recorded, 0));
    cuda_check(cudaGraphDestroy(recorded));
    Graph graph;
    graph.exec_.reset(exec);
    cuda_check(cudaGraphUpload(exec, stream));
    return graph;
}

void Graph::launch(cudaStream_t stream) const {
    cuda_check(cudaGraphLaunch(exec_.get(), stream));
}

void Graph::Release::operator()(cudaGraphExec_t exec) const {
    cuda_check(cudaGraphExecDestroy(exec));
}

}  // namespace tessera
