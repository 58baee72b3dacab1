// Element types of weights, activations and KV pages.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

// kInt4: two codes of -8 .. 7 a byte; a weight of it has scales beside it (weights/model_weights.h).
enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16, kFloat8E4M3, kInt32, kInt64, kUInt8, kInt4 };

// 0 for kInt4.
constexpr int64_t dtype_size(DType dtype) {
    switch (dtype) {
        case DType::kInt4:
            return 0;
        case DType::kInt64:
            return 8;
        case DType::kFloat32:
        case DType::kInt32:
            return 4;
        case DType::kBFloat16:
        case DType::kFloat16:
            return 2;
        case DType::kFloat8E4M3:
        case DType::kUInt8:
            return 1;
    }
    return 0;
}

constexpr std::string_view dtype_name(DType dtype) {
    switch (dtype) {
        case DType::kFloat32:
            return "float32";
        case DType::kBFloat16:
            return "bfloat16";
        case DType::kFloat16:
            return "float16";
        case DType::kFloat8E4M3:
            return "fp8_e4m3";
        case DType::kInt32:
            return "int32";
        case DType::kInt64:
            return "int64";
        case DType::kUInt8:
            return "uint8";
        case DType::kInt4:
            return "int4";
    }
    return "unknown";
}

}  // namespace tessera
