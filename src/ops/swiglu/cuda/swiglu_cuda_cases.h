// The cases of swiglu on the device.
#pragma once

#include <fmt/format.h>

#include "ops/common/exp.h"
#include "ops/cuda/cuda_case.h"
#include "ops/swiglu/cuda/swiglu_cuda.h"

namespace tessera {

class SwigluCudaCase {
  public:
    SwigluCudaCase(const CudaCaseData& data, int64_t rows, int64_t width, bool fp8)
        : rows_(rows),
          width_(width),
          fp8_(fp8),
          random_(data.seed),
          host_(inputs(random_, rows, width, !fp8)),
          in_(data.budget, host_, data.sets),
          y_(data.budget, std::vector<uint16_t>(static_cast<size_t>(rows * width)), data.sets),
          y8_(data.budget, std::vector<uint8_t>(static_cast<size_t>(rows * width)), data.sets) {}

    void launch(cudaStream_t stream, int set) {
        const auto* gate = reinterpret_cast<const __nv_bfloat16*>(in_.at(set));
        swiglu_cuda(stream, {.gate = gate,
                             .up = gate + width_,
                             .in_stride = 2 * width_,
                             .y = fp8_ ? nullptr : reinterpret_cast<__nv_bfloat16*>(y_.at(set)),
                             .y_stride = width_,
                             .y8 = fp8_ ? y8_.at(set) : nullptr,
                             .y8_stride = width_,
                             .y8_scale = kScale,
                             .rows = rows_,
                             .width = width_});
    }
    OpError check(cudaStream_t stream) {
        y_.poison();
        y8_.poison();
        launch(stream, 0);
        std::vector<float> want;
        for (int64_t r = 0; r < rows_; ++r) {
            for (int64_t i = 0; i < width_; ++i) {
                const float gate = bf16_to_f32(host_[static_cast<size_t>(r * 2 * width_ + i)]);
                const float up = bf16_to_f32(host_[static_cast<size_t>(r * 2 * width_ + width_ + i)]);
                const float y = rounded_bf16(rounded_bf16(silu_f32(gate)) * up);
                want.push_back(fp8_ ? round_to_e4m3(y / kScale) : y);
            }
        }
        return compare_close(fp8_ ? widen_e4m3(y8_.download()) : widen_bf16(y_.download()), want, 0, 0);
    }

  private:
    static constexpr float kScale = 0.021f;

    // With extremes: gates in the first row that a division's shortcut must leave to the division, each among
    // others of its thread that it may take.
    static std::vector<uint16_t> inputs(OpRandom& random, int64_t rows, int64_t width, bool extremes) {
        std::vector<uint16_t> values = random_bf16(random, rows * 2 * width, 4);
        const uint16_t gates[] = {0x7F80, 0xFF80, 0x7F7F, 0xFF7F, 0x0001, 0x8000, 0x0080};  // inf .. 2^-126
        for (int64_t i = 0; extremes && i < 7 && 9 * i < width; ++i) {
            values[static_cast<size_t>(9 * i)] = gates[i];
        }
        return values;
    }

    int64_t rows_, width_;
    bool fp8_;
    OpRandom random_;
    std::vector<uint16_t> host_;
    DeviceArray<uint16_t> in_, y_;
    DeviceArray<uint8_t> y8_;
};

inline std::vector<CudaOpCase> swiglu_cuda_cases() {
    std::vector<CudaOpCase> cases;
    const auto add = [&](int64_t rows, int64_t width, bool fp8, bool bench) {
        const int64_t bytes = rows * width * (fp8 ? 5 : 6);
        cases.push_back({fmt::format("rows={} width={}", rows, width), fp8 ? "fp8_e4m3" : "bfloat16", bench,
                         [=](const CudaCaseData& data) {
                             auto run = std::make_shared<SwigluCudaCase>(data, rows, width, fp8);
                             return make_cuda_run(std::move(run), data.sets, {bytes, rows * width * 25});
                         },
                         bytes});
    };
    for (const bool fp8 : {false, true}) {
        add(1, 8, fp8, false);
        add(65, 128, fp8, false);
        add(129, 1000, fp8, false);
        add(64, 13312, fp8, true);
        add(8192, 1536, fp8, true);
    }
    return cases;
}

}  // namespace tessera
