#include <algorithm>
#include <bit>
#include <iterator>
#include <string>

#include "base/check.h"
#include "ops/linear/cuda/linear_cuda.h"
#include "ops/linear/cuda/skinny_linear.h"

namespace tessera {
namespace {

void blas_check(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS) [[unlikely]] {
        check(false, std::string("cuBLASLt: ") + what + ": " + cublasLtGetStatusString(status));
    }
}

cudaDataType_t blas_type(DType dtype) {
    check(dtype == DType::kBFloat16 || dtype == DType::kFloat32 || dtype == DType::kFloat8E4M3,
          "linear: bfloat16, float32 or e4m3 only");
    return dtype == DType::kBFloat16 ? CUDA_R_16BF : dtype == DType::kFloat32 ? CUDA_R_32F : CUDA_R_8F_E4M3;
}

// Deterministic: every number of rows takes the plan of this one.
constexpr int64_t kDeterministicRows = 128;
constexpr int64_t kOtherRows[] = {1, 7, 64, 513, 16384};  // which it must be able to compute, too
constexpr int kCandidates = 16;

// Rows rounded up: one plan serves a class of batches.
int64_t row_class(int64_t rows) {
    if (rows <= 256 || rows > 2048) {
        return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
    }
    return (rows + 255) / 256 * 256;
}

// The library is column-major: y^T [outputs, rows] = W (transposed) x^T. All on the stack, made for each
// call.
struct Problem {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t weight;
    cublasLtMatrixLayoutOpaque_t x;
    cublasLtMatrixLayoutOpaque_t y;

    Problem(const LinearCudaArgs& args, int64_t rows) {
        blas_check(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor");
        set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
        set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
        if (args.column_scale != nullptr) {
            set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
            set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
            set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, args.column_scale);
            set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, args.row_scale);
        }
        const uint64_t inputs = static_cast<uint64_t>(args.inputs);
        const uint64_t outputs = static_cast<uint64_t>(args.outputs);
        const int64_t stride = args.y_stride != 0 ? args.y_stride : args.outputs;
        blas_check(cublasLtMatrixLayoutInit(&weight, blas_type(args.dtype), inputs, outputs, args.inputs),
                   "W");
        blas_check(cublasLtMatrixLayoutInit(&x, blas_type(args.dtype), inputs, static_cast<uint64_t>(rows),
                                            args.inputs),
                   "x");
        blas_check(cublasLtMatrixLayoutInit(&y, blas_type(args.y_dtype), outputs, static_cast<uint64_t>(rows),
                                            stride),
                   "y");
    }

    template <typename T>
    void set(cublasLtMatmulDescAttributes_t attribute, T value) {
        blas_check(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof(value)), "attribute");
    }
};

}  // namespace

void LinearCuda::Release::operator()(cublasLtContext* handle) const {
    cublasLtDestroy(handle);
}

LinearCuda::LinearCuda(std::byte* workspace, int64_t workspace_bytes, bool deterministic)
    : workspace_(workspace), workspace_bytes_(workspace_bytes), deterministic_(deterministic) {
    cublasLtHandle_t handle = nullptr;
    blas_check(cublasLtCreate(&handle), "handle");
    handle_.reset(handle);
    skinny_linear_prepare();
}

LinearCudaConfig LinearCuda::choose_config(const LinearCudaArgs& args) const {
    // A sequence's rows are computed many at a time in a prefill: the library's one plan for all numbers of
    // rows.
    return !deterministic_ && skinny_linear_serves(args) ? LinearCudaConfig::kSkinny
                                                         : LinearCudaConfig::kLibrary;
}

void LinearCuda::prepare(const LinearCudaArgs& args) {
    if (choose_config(args) == LinearCudaConfig::kLibrary) {
        find_plan(args);
    }
}

bool LinearCuda::serves_all_rows(const LinearCudaArgs& args, const cublasLtMatmulAlgo_t& algorithm) const {
    return std::all_of(std::begin(kOtherRows), std::end(kOtherRows), [&](int64_t rows) {
        Problem problem(args, rows);
        cublasLtMatmulHeuristicResult_t result{};
        return cublasLtMatmulAlgoCheck(handle_.get(), &problem.operation, &problem.weight, &problem.x,
                                       &problem.y, &problem.y, &algorithm,
                                       &result) == CUBLAS_STATUS_SUCCESS &&
               result.workspaceSize <= static_cast<size_t>(workspace_bytes_);
    });
}

const cublasLtMatmulAlgo_t& LinearCuda::find_plan(const LinearCudaArgs& args) {
    const int64_t rows = deterministic_ ? kDeterministicRows : row_class(args.rows);
    const Key key{rows,       args.inputs,  args.outputs,    args.y_stride,
                  args.dtype, args.y_dtype, args.accumulate, args.column_scale != nullptr};
    if (const auto found = plans_.find(key); found != plans_.end()) {
        return found->second;
    }
    check(args.inputs % 16 == 0 && args.outputs % 16 == 0,
          "linear: inputs and outputs must be multiples of 16");
    Problem problem(args, rows);
    cublasLtMatmulPreferenceOpaque_t preference;
    blas_check(cublasLtMatmulPreferenceInit(&preference), "preference");
    const auto limit = static_cast<uint64_t>(workspace_bytes_);
    blas_check(cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &limit, sizeof(limit)),
               "workspace limit");
    // Parts of a split K are added in float32, never in the output's type.
    const uint32_t schemes =
        deterministic_ ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    blas_check(cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                    &schemes, sizeof(schemes)),
               "reduction scheme");
    cublasLtMatmulHeuristicResult_t results[kCandidates];
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle_.get(), &problem.operation, &problem.weight, &problem.x, &problem.y, &problem.y, &preference,
        deterministic_ ? kCandidates : 1, results, &found);
    auto* end = results + found;
    const auto* best = std::find_if(results, end, [&](const cublasLtMatmulHeuristicResult_t& result) {
        return !deterministic_ || serves_all_rows(args, result.algo);
    });
    blas_check(best == end && status == CUBLAS_STATUS_SUCCESS ? CUBLAS_STATUS_NOT_SUPPORTED : status,
               "no algorithm for this shape");
    return plans_.emplace(key, best->algo).first->second;
}

void LinearCuda::run(cudaStream_t stream, const LinearCudaArgs& args) {
    check(args.rows >= 1, "linear: at least one row");
    if (choose_config(args) == LinearCudaConfig::kSkinny) {
        skinny_linear_cuda(stream, args);
        return;
    }
    const cublasLtMatmulAlgo_t& algorithm = find_plan(args);
    Problem problem(args, args.rows);
    const float alpha = args.scale;
    const float beta = args.accumulate ? 1 : 0;
    blas_check(cublasLtMatmul(handle_.get(), &problem.operation, &alpha, args.weight, &problem.weight, args.x,
                              &problem.x, &beta, args.y, &problem.y, args.y, &problem.y, &algorithm,
                              workspace_, static_cast<size_t>(workspace_bytes_), stream),
               "matmul");
}

}  // namespace tessera
