// The cases of rms_norm on the device.
#pragma once

#include <algorithm>
#include <fmt/format.h>

#include "ops/cuda/cuda_case.h"
#include "ops/rms_norm/cuda/rms_norm_cuda.h"

namespace tessera {

struct RmsNormCudaSpec {
    int64_t rows = 1;
    int64_t width = 8;
    bool add = false;        // the residual add
    bool fp8 = false;        // the FP8 output
    bool bf16 = true;        // the bfloat16 output
    bool row_scale = false;  // an FP8 scale for each row
    bool pick = false;       // every second row, backwards, and one passed over
};

class RmsNormCudaCase {
  public:
    RmsNormCudaCase(const CudaCaseData& data, const RmsNormCudaSpec& spec)
        : spec_(spec),
          random_(data.seed),
          x_rows_(spec.pick ? 2 * spec.rows : spec.rows),
          host_x_(random_bf16(random_, x_rows_ * spec.width, 3)),
          host_add_(random_bf16(random_, x_rows_ * spec.width)),
          host_weight_(random_bf16(random_, spec.width, 2)),
          host_rows_(picked()),
          x_(data.budget, host_x_, data.sets),
          add_(data.budget, host_add_, data.sets),
          weight_(data.budget, host_weight_, 1),
          rows_(data.budget, host_rows_, 1),
          y_(data.budget, std::vector<uint16_t>(static_cast<size_t>(spec.rows * spec.width)), data.sets),
          y8_(data.budget, std::vector<uint8_t>(static_cast<size_t>(spec.rows * spec.width)), data.sets),
          row_scale_(data.budget, std::vector<float>(static_cast<size_t>(spec.rows)), data.sets) {}

    void launch(cudaStream_t stream, int set) {
        rms_norm_cuda(stream,
                      {.x = reinterpret_cast<__nv_bfloat16*>(x_.at(set)),
                       .x_stride = spec_.width,
                       .add = spec_.add ? reinterpret_cast<const __nv_bfloat16*>(add_.at(set)) : nullptr,
                       .add_stride = spec_.width,
                       .x_rows = spec_.pick ? rows_.at(0) : nullptr,
                       .weight = reinterpret_cast<const __nv_bfloat16*>(weight_.at(0)),
                       .y = spec_.bf16 ? reinterpret_cast<__nv_bfloat16*>(y_.at(set)) : nullptr,
                       .y_stride = spec_.width,
                       .y8 = spec_.fp8 ? y8_.at(set) : nullptr,
                       .y8_stride = spec_.width,
                       .y8_scale = kScale,
                       .y8_row_scale = spec_.row_scale ? row_scale_.at(set) : nullptr,
                       .rows = spec_.rows,
                       .width = spec_.width,
                       .eps = 1e-5f});
    }
    OpError check(cudaStream_t stream) {
        x_.upload(host_x_);
        y_.poison();
        y8_.poison();
        row_scale_.poison();
        launch(stream, 0);
        std::vector<float> x = widen_bf16(host_x_);
        std::vector<float> y(static_cast<size_t>(spec_.rows * spec_.width), NAN);
        reference(x, y);
        OpError error = compare_close(widen_bf16(x_.download()), x, 0, 0);
        const std::vector<float> got = widen_bf16(y_.download());
        if (spec_.bf16) {
            // Two roundings to bfloat16, each of which may fall the other way by up to 1 part in 128.
            error += compare_close(got, y, 0, 0.0157);
        }
        if (spec_.fp8) {
            error += check_fp8(spec_.bf16 ? got : y);
        }
        return error;
    }

  private:
    static constexpr float kScale = 0.013f;

    // Exact where y is the device's own; its roundings may fall the other way where y is the reference's.
    OpError check_fp8(std::vector<float> y) const {
        OpError error;
        const std::vector<float> scales = row_scale_.download();
        for (int64_t r = 0; r < spec_.rows; ++r) {
            float largest = 0;
            const auto row =
                std::span(y).subspan(static_cast<size_t>(r * spec_.width), static_cast<size_t>(spec_.width));
            for (const float value : row) {
                largest = std::fmax(largest, std::fabs(value));
            }
            float scale = kScale;
            if (spec_.row_scale && !std::isnan(row[0])) {
                scale = scales[static_cast<size_t>(r)];
                const float want = largest / 448;
                error += compare_close({&scale, 1}, {&want, 1}, 0, spec_.bf16 ? 1e-6 : 0.0157);
            }
            for (float& value : row) {
                value = std::isnan(value) ? value : round_to_e4m3(value / scale);
            }
        }
        error += compare_close(widen_e4m3(y8_.download()), y, spec_.bf16 ? 0 : 0.002, spec_.bf16 ? 0 : 0.126);
        return error;
    }
    std::vector<int32_t> picked() const {
        std::vector<int32_t> out;
        for (int64_t r = 0; r < spec_.rows; ++r) {
            out.push_back(r == 1 ? -1 : static_cast<int32_t>(2 * (spec_.rows - 1 - r)));
        }
        return out;
    }
    void reference(std::vector<float>& x, std::vector<float>& y) const {
        for (int64_t r = 0; r < spec_.rows; ++r) {
            const int64_t from = spec_.pick ? host_rows_[static_cast<size_t>(r)] : r;
            if (from < 0) {
                continue;
            }
            float* row = x.data() + from * spec_.width;
            double squares = 0;
            for (int64_t i = 0; i < spec_.width; ++i) {
                if (spec_.add) {
                    row[i] = rounded_bf16(
                        row[i] + bf16_to_f32(host_add_[static_cast<size_t>(from * spec_.width + i)]));
                }
                squares += static_cast<double>(row[i]) * row[i];
            }
            const float scale =
                static_cast<float>(1 / std::sqrt(squares / static_cast<double>(spec_.width) + 1e-5));
            for (int64_t i = 0; i < spec_.width; ++i) {
                const float weight = bf16_to_f32(host_weight_[static_cast<size_t>(i)]);
                y[static_cast<size_t>(r * spec_.width + i)] =
                    rounded_bf16(rounded_bf16(row[i] * scale) * weight);
            }
        }
    }

    RmsNormCudaSpec spec_;
    OpRandom random_;
    int64_t x_rows_;
    std::vector<uint16_t> host_x_, host_add_, host_weight_;
    std::vector<int32_t> host_rows_;
    DeviceArray<uint16_t> x_, add_, weight_;
    DeviceArray<int32_t> rows_;
    DeviceArray<uint16_t> y_;
    DeviceArray<uint8_t> y8_;
    DeviceArray<float> row_scale_;
};

inline CudaOpCase rms_norm_cuda_case(const RmsNormCudaSpec& spec, bool bench) {
    const int64_t bytes =
        spec.rows * spec.width * ((spec.add ? 6 : 2) + (spec.bf16 ? 2 : 0) + (spec.fp8 ? 1 : 0));
    return {fmt::format("rows={} width={}{}{}{}{}{}", spec.rows, spec.width, spec.add ? " add" : "",
                        spec.fp8 ? " fp8" : "", spec.row_scale ? " row scales" : "",
                        spec.fp8 && spec.bf16 ? " and bfloat16" : "", spec.pick ? " pick" : ""),
            spec.fp8 ? "fp8_e4m3" : "bfloat16", bench,
            [=](const CudaCaseData& data) {
                auto run = std::make_shared<RmsNormCudaCase>(data, spec);
                return make_cuda_run(std::move(run), data.sets, {bytes, spec.rows * spec.width * 5});
            },
            bytes};
}

inline std::vector<CudaOpCase> rms_norm_cuda_cases() {
    std::vector<CudaOpCase> cases;
    for (const int64_t width : {8, 256, 1000, 4096, 6152, 16384}) {
        for (const bool add : {false, true}) {
            for (const bool pick : {false, true}) {
                RmsNormCudaSpec spec{width > 4096 ? 3 : 65, width, add, !add || pick};
                spec.pick = pick;
                spec.row_scale = spec.fp8 && pick;
                cases.push_back(rms_norm_cuda_case(spec, false));
            }
        }
    }
    cases.push_back(rms_norm_cuda_case({300, 4096, true, true, false}, false));
    cases.push_back(rms_norm_cuda_case({300, 1000, false, true, false, true}, false));
    for (const int64_t rows : {1, 64, 4096, 8192}) {
        cases.push_back(rms_norm_cuda_case({rows, 4096, true}, true));
    }
    for (const int64_t rows : {64, 4096}) {
        cases.push_back(rms_norm_cuda_case({rows, 4096, true, true, false}, true));
        cases.push_back(rms_norm_cuda_case({rows, 4096, true, true, false, true}, true));
    }
    cases.push_back(rms_norm_cuda_case({8192, 4096, false, true, false}, true));
    cases.push_back(rms_norm_cuda_case({8192, 4096, false, true, true}, true));
    return cases;
}

}  // namespace tessera
