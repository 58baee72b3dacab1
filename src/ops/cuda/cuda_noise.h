// Random arrays made on the device, for cases too large to make on the host. An element is a function of the
// seed and its index, so that the host knows any of them without a copy.
#pragma once

#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include "base/dtype.h"
#include "ops/common/half.h"
#include "ops/cuda/cuda_case.h"

namespace tessera {

// The sum of four random bytes less its mean: in [-510, 510], deviation 148, near normal.
constexpr int32_t noise_sum(uint64_t seed, uint64_t index) {
    uint64_t z = (seed << 40) + index * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    const auto byte = [z](int i) { return static_cast<int32_t>(z >> (8 * i) & 0xFF); };
    return byte(0) + byte(1) + byte(2) + byte(3) - 510;
}

struct NoiseSpec {
    uint64_t seed = 0;
    float deviation = 1;
    DType dtype = DType::kBFloat16;  // or kFloat8E4M3, to which the values are rounded
};

// to: [count] of spec.dtype. Element i is the noise of index first + i.
void fill_noise_cuda(cudaStream_t stream, void* to, int64_t count, const NoiseSpec& spec, int64_t first = 0);

// The same element on the host, as float32.
inline float noise_value(const NoiseSpec& spec, int64_t index) {
    const float value = static_cast<float>(noise_sum(spec.seed, static_cast<uint64_t>(index))) *
                        (spec.deviation * (1.0f / 148));
    return spec.dtype == DType::kBFloat16 ? rounded_bf16(value) : round_to_e4m3(value);
}

// Uniform random bytes: eight from one index / 8.
constexpr uint8_t noise_byte(uint64_t seed, uint64_t index) {
    uint64_t z = (seed << 40) + index / 8 * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return static_cast<uint8_t>(z >> (index % 8 * 8));
}
// to: [count] noise_byte(seed, i).
void fill_noise_bytes_cuda(cudaStream_t stream, void* to, int64_t count, uint64_t seed);

// Noise on the device in data.sets different copies, each 256-byte aligned.
class DeviceNoise {
  public:
    DeviceNoise(const CudaCaseData& data, int64_t count, const NoiseSpec& spec)
        : spec_(spec), count_(count), stride_((count * dtype_size(spec.dtype) + 255) / 256 * 256) {
        memory_ = case_memory(data.budget, stride_ * data.sets + 256);
        for (int set = 0; set < data.sets; ++set) {
            fill_noise_cuda(nullptr, at(set), count, spec, set * count);
        }
        cuda_check(cudaDeviceSynchronize());
    }
    std::byte* at(int set) const { return memory_.data() + set * stride_; }
    // Of set 0.
    float value(int64_t index) const { return noise_value(spec_, index); }
    void refill() {
        fill_noise_cuda(nullptr, at(0), count_, spec_);
        cuda_check(cudaDeviceSynchronize());
    }

  private:
    NoiseSpec spec_;
    int64_t count_ = 0;
    int64_t stride_ = 0;  // bytes
    DeviceBuffer memory_;
};

// Uninitialised memory on the device, one piece a set.
class DeviceScratch {
  public:
    DeviceScratch(const CudaCaseData& data, int64_t bytes, int sets)
        : bytes_(bytes), stride_((bytes + 255) / 256 * 256), sets_(sets) {
        memory_ = case_memory(data.budget, stride_ * sets + 256);
        poison();
    }
    std::byte* at(int set) const { return memory_.data() + set * stride_; }
    // All bytes 0xFF: a NaN in every float format, -1 as an integer, and what workspaces through which blocks
    // meet must hold at first.
    void poison() { fill_blocking(memory_.data(), 0xFF, stride_ * sets_); }
    // Set 0. Waits for the device.
    template <typename T>
    std::vector<T> download() const {
        std::vector<T> host(static_cast<size_t>(bytes_) / sizeof(T));
        copy_blocking(host.data(), memory_.data(), static_cast<int64_t>(host.size() * sizeof(T)));
        return host;
    }

  private:
    int64_t bytes_ = 0;
    int64_t stride_ = 0;
    int sets_ = 1;
    DeviceBuffer memory_;
};

// Up to `most` of the indices below count, ascending: all, or the first, the last and random ones.
inline std::vector<int64_t> sampled_indices(int64_t count, int64_t most, OpRandom& random) {
    std::vector<int64_t> out;
    for (int64_t i = 0; i < std::min(count, most); ++i) {
        out.push_back(count <= most || i == 0 ? i : (i == 1 ? count - 1 : random.below(count)));
    }
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
    return out;
}

// Sampled elements were compared; of the others, each that is NaN was not written.
inline OpError count_unwritten(std::span<const float> all) {
    OpError error;
    error.mismatches = std::count_if(all.begin(), all.end(), [](float v) { return std::isnan(v); });
    return error;
}

}  // namespace tessera
