// The cases of rms_norm on the device.
#pragma once

#include <algorithm>
#include <fmt/format.h>

#include "ops/cuda/value_range.h"
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
    bool near_zero = false;  // rows that are small beside a large epsilon, and one of zeros
};

// A bfloat16's place among all of them in order; both zeros have one.
inline int32_t bf16_place(uint16_t bits) {
    const int32_t magnitude = bits & 0x7FFF;
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// Elementwise, against float64: at most `units` bfloat16 numbers away. NaN: nobody writes it.
inline OpError compare_bf16_units(std::span<const uint16_t> got, std::span<const double> want,
                                  int32_t units) {
    OpError error;
    error.compared = static_cast<int64_t>(want.size());
    for (size_t i = 0; i < want.size(); ++i) {
        const float g = bf16_to_f32(got[i]);
        if (std::isnan(g) || std::isnan(want[i])) {
            error.mismatches += std::isnan(g) && std::isnan(want[i]) ? 0 : 1;
            continue;
        }
        const double difference = std::fabs(static_cast<double>(g) - want[i]);
        error.max_abs = std::fmax(error.max_abs, difference);
        error.max_rel = std::fmax(error.max_rel, difference / std::fmax(std::fabs(want[i]), 1e-6));
        const uint16_t nearest = f32_to_bf16(static_cast<float>(want[i]));
        error.mismatches += std::abs(bf16_place(got[i]) - bf16_place(nearest)) <= units ? 0 : 1;
    }
    return error;
}

class RmsNormCudaCase {
  public:
    RmsNormCudaCase(const CudaCaseData& data, const RmsNormCudaSpec& spec)
        : spec_(spec),
          random_(data.seed),
          x_rows_(spec.pick ? 2 * spec.rows : spec.rows),
          host_x_(random_rows(spec.near_zero ? 0.03f : 3)),
          host_add_(random_rows(spec.near_zero ? 0.01f : 1)),
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
                       .eps = eps()});
    }
    OpError check(cudaStream_t stream) {
        x_.upload(host_x_);
        y_.poison();
        y8_.poison();
        row_scale_.poison();
        launch(stream, 0);
        const int64_t count = spec_.rows * spec_.width;
        Expected want{.x = widen_bf16(host_x_),
                      .y = std::vector<double>(static_cast<size_t>(count), NAN),
                      .y8 = OutputRange(count, kE4m3LastPlace),
                      .scales = OutputRange(spec_.rows, kScaleLastPlace)};
        reference(want);
        OpError error = compare_close(widen_bf16(x_.download()), want.x, 0, 0);
        const std::vector<uint16_t> y = y_.download();
        if (spec_.bf16) {
            error += compare_bf16_units(y, want.y, 2);
        }
        if (spec_.fp8) {
            error += compare_range(widen_e4m3(y8_.download()), want.y8);
        }
        if (spec_.row_scale) {
            error += compare_range(row_scale_.download(), want.scales);
        }
        if (spec_.fp8 && spec_.bf16) {
            error += check_fp8(widen_bf16(y));
        }
        return error;
    }

  private:
    static constexpr float kScale = 0.013f;

    // Of the factor of a norm: the sum of at most 16,384 squares, a lane's share one after the other, rsqrtf
    // and a product.
    static constexpr double kNormError = 3e-6;

    float eps() const { return spec_.near_zero ? 1e-2f : 1e-5f; }
    std::vector<uint16_t> random_rows(float spread) {
        std::vector<uint16_t> out = random_bf16(random_, x_rows_ * spec_.width, spread);
        if (spec_.near_zero) {
            std::fill_n(out.end() - spec_.width, spec_.width, uint16_t{0});
        }
        return out;
    }
    // What the codes are of the device's own y and scales, exactly.
    OpError check_fp8(std::vector<float> y) const {
        const std::vector<float> scales = row_scale_.download();
        for (size_t i = 0; i < y.size(); ++i) {
            const float scale = spec_.row_scale ? scales[i / static_cast<size_t>(spec_.width)] : kScale;
            y[i] = std::isnan(y[i]) ? y[i] : round_to_e4m3(y[i] / scale);
        }
        return compare_close(widen_e4m3(y8_.download()), y, 0, 0);
    }
    std::vector<int32_t> picked() const {
        std::vector<int32_t> out;
        for (int64_t r = 0; r < spec_.rows; ++r) {
            out.push_back(r == 1 ? -1 : static_cast<int32_t>(2 * (spec_.rows - 1 - r)));
        }
        return out;
    }
    struct Expected {
        std::vector<float> x;
        std::vector<double> y;  // never rounded
        OutputRange y8, scales;
    };
    void reference(Expected& want) const {
        const auto width = static_cast<size_t>(spec_.width);
        const std::vector<float> weight = widen_bf16(host_weight_);
        for (size_t r = 0; r < static_cast<size_t>(spec_.rows); ++r) {
            const int64_t from = spec_.pick ? host_rows_[r] : static_cast<int64_t>(r);
            if (from < 0) {
                continue;
            }
            const std::span<float> row(want.x.data() + static_cast<size_t>(from) * width, width);
            double squares = 0;
            for (size_t i = 0; i < width; ++i) {
                if (spec_.add) {
                    row[i] =
                        rounded_bf16(row[i] + bf16_to_f32(host_add_[static_cast<size_t>(from) * width + i]));
                }
                squares += static_cast<double>(row[i]) * row[i];
            }
            const double eps = static_cast<double>(this->eps());
            const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + eps);
            for (size_t i = 0; i < width; ++i) {
                want.y[r * width + i] = row[i] * scale * weight[i];
            }
            if (spec_.fp8) {
                reference_fp8(row, weight, static_cast<int64_t>(r), want);
            }
        }
    }
    void reference_fp8(std::span<const float> row, std::span<const float> weight, int64_t r,
                       Expected& want) const {
        ValueRanges y = exact_ranges(row);
        range_norm(y, weight, static_cast<double>(eps()), kNormError);
        const ValueRange scale = spec_.row_scale ? range_scale(y) : ValueRange{kScale, kScale};
        want.scales.set(r, scale);
        for (ValueRange& value : y) {
            value = range_e4m3(value, scale, 0);
        }
        want.y8.set(r * spec_.width, y);
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
    return {fmt::format("rows={} width={}{}{}{}{}{}{}", spec.rows, spec.width, spec.add ? " add" : "",
                        spec.fp8 ? " fp8" : "", spec.row_scale ? " row scales" : "",
                        spec.fp8 && spec.bf16 ? " and bfloat16" : "", spec.pick ? " pick" : "",
                        spec.near_zero ? " near zero" : ""),
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
    for (const int64_t width : {256, 4096, 16384}) {
        for (const bool bf16 : {false, true}) {
            for (const bool row_scale : {false, true}) {
                cases.push_back(rms_norm_cuda_case({.rows = width > 4096 ? 3 : 40,
                                                    .width = width,
                                                    .add = row_scale,
                                                    .fp8 = true,
                                                    .bf16 = bf16,
                                                    .row_scale = row_scale,
                                                    .near_zero = true},
                                                   false));
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
