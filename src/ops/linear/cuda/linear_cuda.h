// linear on CUDA: y = x W^T or y += x W^T in bfloat16 or e4m3, with float32 sums: through cuBLASLt, and where
// there are few rows by a kernel of our own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <type_traits>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "base/dtype.h"

namespace tessera {

// y = e4m3(x / scale): saturating at 448, rounded to nearest even.
struct QuantizeCudaArgs {
    const void* x = nullptr;  // [count] bfloat16, 16-byte aligned, as y
    int64_t count = 0;        // a multiple of 16
    float scale = 1;
    void* y = nullptr;  // [count] e4m3
};
// Reads 2 and writes 1 byte an element: count * 3 / 4.27 TB/s.
void quantize_cuda(cudaStream_t stream, const QuantizeCudaArgs& args);

// q, k and v (gate and up) of an fp8 checkpoint have one weight scale each: as one weight they need
// column_scale.
struct LinearCudaArgs {
    const void* x = nullptr;       // [rows, inputs], dtype as the weight's
    const void* weight = nullptr;  // [outputs, inputs] row-major
    void* y = nullptr;             // [rows, outputs] of y_dtype
    int64_t rows = 0;
    int64_t inputs = 0;                // a multiple of 16
    int64_t outputs = 0;               // a multiple of 16
    int64_t y_stride = 0;              // elements between rows of y; 0 = outputs
    DType dtype = DType::kBFloat16;    // of x and weight: kBFloat16 or kFloat8E4M3
    DType y_dtype = DType::kBFloat16;  // or kFloat32
    bool accumulate = false;  // y +=; some of the library's kernels round the product before they add
    float scale = 1;          // y = (x W^T) * scale: fp8, input scale * weight scale
    // fp8 only; both or neither. In device memory, float32: y[r, c] gets row_scale[r] * column_scale[c] too.
    const float* column_scale = nullptr;  // [outputs]
    const float* row_scale = nullptr;     // [rows]
};

// What computes a product: the library, or the kernel of skinny_linear.h.
enum class LinearCudaConfig : uint8_t { kLibrary, kSkinny };

// The library handle, its workspace and the plans (algorithms) chosen so far. A plan depends on the shape
// with the rows rounded up to a class (powers of two up to 256, then multiples of 256 up
// to 2048, then powers of two), never on the data. Choosing one takes some 50 us of the host the first time;
// prepare() does it ahead of a graph capture. One stream and one thread at a time. Throughput: max(bytes
// / 4.27 TB/s, operations / 0.8 (bf16) or 1.5 (fp8) PFLOP/s) is the floor.
class LinearCuda {
  public:
    // 64 MiB is enough for Hopper. `deterministic`: one plan for every number of rows, without a split of K,
    // so that a row's bits do not depend on the others.
    LinearCuda(std::byte* workspace, int64_t workspace_bytes, bool deterministic = false);

    LinearCudaConfig choose_config(const LinearCudaArgs& args) const;
    void prepare(const LinearCudaArgs& args);
    void run(cudaStream_t stream, const LinearCudaArgs& args);

    static constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;

  private:
    struct Release {
        void operator()(cublasLtContext* handle) const;
    };
    using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, DType, DType, bool, bool>;

    const cublasLtMatmulAlgo_t& find_plan(const LinearCudaArgs& args);
    bool serves_all_rows(const LinearCudaArgs& args, const cublasLtMatmulAlgo_t& algorithm) const;

    std::unique_ptr<cublasLtContext, Release> handle_;
    std::byte* workspace_ = nullptr;
    int64_t workspace_bytes_ = 0;
    bool deterministic_ = false;
    std::map<Key, cublasLtMatmulAlgo_t> plans_;
};

}  // namespace tessera
