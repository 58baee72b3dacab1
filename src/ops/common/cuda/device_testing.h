// What the device tests share: arrays on the device, and values rounded as the device holds them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include "device/cuda/blocking_copy.h"
#include "device/cuda/buffer.h"
#include "device/cuda/device_props.h"
#include "device/memory_budget.h"
#include "ops/common/half.h"

namespace tessera {

// Device memory of a test, released with it.
class DeviceArena {
  public:
    // `count` elements whose bytes are all 0xFF: NaN in every float format, -1 as an integer.
    template <typename T>
    T* poisoned(int64_t count) {
        Result<DeviceBuffer> buffer =
            DeviceBuffer::allocate(budget_, MemoryCategory::kWorkspace, "test", count * sizeof(T) + 256);
        check(buffer.ok(), buffer.status().message());
        buffers_.push_back(std::move(buffer.value()));
        fill_blocking(buffers_.back().data(), 0xFF, buffers_.back().bytes());
        return buffers_.back().as<T>();
    }
    template <typename T>
    T* upload(const std::vector<T>& values) {
        T* to = poisoned<T>(static_cast<int64_t>(values.size()));
        copy_blocking(to, values.data(), static_cast<int64_t>(values.size() * sizeof(T)));
        return to;
    }
    template <typename T>
    static std::vector<T> download(const T* from, int64_t count) {
        std::vector<T> values(static_cast<size_t>(count));
        copy_blocking(values.data(), from, static_cast<int64_t>(values.size() * sizeof(T)));
        return values;
    }

  private:
    MemoryBudget budget_{int64_t{1} << 40};
    std::vector<DeviceBuffer> buffers_;
};

inline int device_sm_count() {
    const Result<DeviceProps> device = open_device(0);
    check(device.ok(), "no device");
    return device->sm_count;
}

// Random values as the device holds them, and as float32.
struct TestValues {
    std::vector<float> values;
    std::vector<uint16_t> bf16;
    std::vector<uint8_t> fp8;
};

// The e4m3 byte of a value that is one of e4m3's.
inline uint8_t e4m3_bits(float value) {
    const uint8_t sign = value < 0 ? 0x80 : 0;
    for (int bits = 0; bits < 0x7F; ++bits) {
        if (e4m3_to_f32(static_cast<uint8_t>(bits)) == (value < 0 ? -value : value)) {
            return static_cast<uint8_t>(sign | bits);
        }
    }
    return 0x7F;
}

// Normally distributed. fp8: rounded to e4m3 and stored so, otherwise bfloat16.
inline TestValues random_values(std::mt19937& random, int64_t count, float deviation, bool fp8) {
    std::normal_distribution<float> normal(0, deviation);
    TestValues out;
    for (int64_t i = 0; i < count; ++i) {
        const float raw = normal(random);
        if (fp8) {
            out.values.push_back(round_to_e4m3(raw));
            out.fp8.push_back(e4m3_bits(out.values.back()));
        } else {
            out.bf16.push_back(f32_to_bf16(raw));
            out.values.push_back(bf16_to_f32(out.bf16.back()));
        }
    }
    return out;
}

inline float to_bf16(double value) {
    return bf16_to_f32(f32_to_bf16(static_cast<float>(value)));
}

// Of a plain program in float32, which rounds to bfloat16 what the operator says is rounded so; one in double
// does not.
template <typename T>
T rounded(T value) {
    return sizeof(T) == sizeof(float) ? static_cast<T>(to_bf16(static_cast<double>(value))) : value;
}

// |got - want| / |want| over all elements (2-norm); NaN where any element is.
inline double relative_error(std::span<const float> got, std::span<const double> want) {
    double difference = 0;
    double norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
        const double d = static_cast<double>(got[i]) - want[i];
        difference += d * d;
        norm += want[i] * want[i];
    }
    return std::sqrt(difference / (norm > 0 ? norm : 1));
}

inline std::vector<float> bf16_values(const std::vector<uint16_t>& bits) {
    std::vector<float> out;
    for (const uint16_t b : bits) {
        out.push_back(bf16_to_f32(b));
    }
    return out;
}

}  // namespace tessera
