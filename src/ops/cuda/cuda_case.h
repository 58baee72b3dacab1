// CudaOpCase: one shape of one operator on the device, with its data, its reference and its costs. Each
// operator lists its cases once, in cuda/<op>_cuda_cases.h; the test program, `tessera ops test` and `tessera
// ops bench` read that list.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include "device/cuda/blocking_copy.h"
#include "device/cuda/buffer.h"
#include "ops/common/half.h"
#include "ops/op_case.h"

namespace tessera {

// Which unit does the operations, for the floor.
enum class CudaUnit : uint8_t { kFloat32, kBFloat16, kFloat8 };

// A case whose data exists, in `sets` equal copies, so that a benchmark's inputs need not come from the
// cache.
struct CudaCaseRun {
    int sets = 1;
    std::function<void(cudaStream_t, int set)> launch;  // enters the operator on a set's data
    std::function<OpError(cudaStream_t)> check;         // set 0, with poisoned outputs, against the reference
    int64_t bytes = 0;                                  // read and written at least once
    int64_t flops = 0;                                  // 2 for a multiply-add
    CudaUnit unit = CudaUnit::kFloat32;
};

// What a case costs at least.
struct CudaCosts {
    int64_t bytes = 0;
    int64_t flops = 0;
    CudaUnit unit = CudaUnit::kFloat32;
};

// The run over a Case with launch(stream, set) and check(stream).
template <typename Case>
CudaCaseRun make_cuda_run(std::shared_ptr<Case> data, int sets, const CudaCosts& costs) {
    return {.sets = sets,
            .launch = [data](cudaStream_t stream, int set) { data->launch(stream, set); },
            .check = [data](cudaStream_t stream) { return data->check(stream); },
            .bytes = costs.bytes,
            .flops = costs.flops,
            .unit = costs.unit};
}

// Where a case's data comes from.
struct CudaCaseData {
    MemoryBudget& budget;
    int sets = 1;       // copies wanted
    uint64_t seed = 1;  // of the random inputs
};

struct CudaOpCase {
    std::string shape;
    std::string dtype;
    bool bench = true;  // false: only a test, and small
    std::function<CudaCaseRun(const CudaCaseData&)> prepare;
    int64_t bytes = 0;  // as in CudaCaseRun, known (roughly) before the data is made
};

// Memory of a case, which must fit.
inline DeviceBuffer case_memory(MemoryBudget& budget, int64_t bytes) {
    Result<DeviceBuffer> memory =
        DeviceBuffer::allocate(budget, MemoryCategory::kWorkspace, "operator case", bytes);
    check(memory.ok(), "the device has too little memory for an operator case");
    return memory.take();
}

// An array on the device in several equal copies, each 256-byte aligned.
template <typename T>
class DeviceArray {
  public:
    DeviceArray(MemoryBudget& budget, std::span<const T> host, int sets)
        : count_(static_cast<int64_t>(host.size())), sets_(sets) {
        stride_ = (count_ * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
        memory_ = case_memory(budget, stride_ * sets);
        for (int set = 0; set < sets; ++set) {
            copy_blocking(memory_.data() + set * stride_, host.data(),
                          static_cast<int64_t>(host.size_bytes()));
        }
    }
    T* at(int set) const { return reinterpret_cast<T*>(memory_.data() + set * stride_); }
    // Set 0. Waits for the device.
    std::vector<T> download() const {
        std::vector<T> host(static_cast<size_t>(count_));
        copy_blocking(host.data(), memory_.data(), static_cast<int64_t>(host.size() * sizeof(T)));
        return host;
    }
    // Set 0 again from the host.
    void upload(std::span<const T> host) {
        check(static_cast<int64_t>(host.size()) == count_, "DeviceArray: another size");
        copy_blocking(memory_.data(), host.data(), static_cast<int64_t>(host.size_bytes()));
    }
    // All bytes 0xFF: a NaN in every float format, -1 as an integer.
    void poison() { fill_blocking(memory_.data(), 0xFF, stride_ * sets_); }

  private:
    int64_t count_ = 0;
    int64_t stride_ = 0;  // bytes
    int sets_ = 1;
    DeviceBuffer memory_;
};

// Deterministic bfloat16 data in [-scale, scale), as bits.
inline std::vector<uint16_t> random_bf16(OpRandom& random, int64_t count, float scale = 1) {
    std::vector<uint16_t> out(static_cast<size_t>(count));
    for (uint16_t& value : out) {
        value = f32_to_bf16(random.uniform() * scale);
    }
    return out;
}

inline std::vector<float> widen_bf16(std::span<const uint16_t> bits) {
    std::vector<float> out;
    out.reserve(bits.size());
    for (const uint16_t value : bits) {
        out.push_back(bf16_to_f32(value));
    }
    return out;
}
inline std::vector<float> widen_e4m3(std::span<const uint8_t> bits) {
    std::vector<float> out;
    out.reserve(bits.size());
    for (const uint8_t value : bits) {
        out.push_back(e4m3_to_f32(value));
    }
    return out;
}
// Of a reference over large data.
inline int reference_threads() {
    return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 32);
}
inline float rounded_bf16(float value) {
    return bf16_to_f32(f32_to_bf16(value));
}

// Compares elementwise: |got - want| may reach absolute + relative * |want|. A NaN equals a NaN alone, since
// outputs that nobody wrote are NaN.
inline OpError compare_close(std::span<const float> got, std::span<const float> want, double absolute,
                             double relative) {
    OpError error;
    error.compared = static_cast<int64_t>(want.size());
    if (got.size() != want.size()) {
        error.mismatches = error.compared + 1;
        return error;
    }
    double squares = 0;
    double norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
        const double g = static_cast<double>(got[i]);
        const double w = static_cast<double>(want[i]);
        norm += std::isfinite(w) ? w * w : 0;
        if (g == w || (std::isnan(g) && std::isnan(w))) {
            continue;
        }
        const double difference = std::fabs(g - w);
        squares += difference * difference;
        error.max_abs = std::fmax(error.max_abs, difference);
        error.max_rel = std::fmax(error.max_rel, difference / std::fmax(std::fabs(w), 1e-6));
        error.mismatches += difference <= absolute + relative * std::fabs(w) ? 0 : 1;
    }
    error.rms = std::sqrt(squares / std::fmax(norm, 1e-30));
    return error;
}

// Compares sums of many products, whose error is a share of their typical size: an element may differ by
// `absolute` times the root mean square of `want` and by `relative` of itself.
inline OpError compare_sums(std::span<const float> got, std::span<const float> want, double absolute,
                            double relative) {
    double norm = 0;
    for (const float w : want) {
        norm += static_cast<double>(w) * w;
    }
    return compare_close(
        got, want, absolute * std::sqrt(norm / std::fmax(1, static_cast<double>(want.size()))), relative);
}

inline OpError& operator+=(OpError& sum, const OpError& other) {
    sum.max_abs = std::fmax(sum.max_abs, other.max_abs);
    sum.max_rel = std::fmax(sum.max_rel, other.max_rel);
    sum.rms = std::fmax(sum.rms, other.rms);
    sum.mismatches += other.mismatches;
    sum.compared += other.compared;
    return sum;
}

}  // namespace tessera
