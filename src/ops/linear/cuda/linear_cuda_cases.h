// The cases of linear and quantize on the device.
#pragma once

#include <fmt/format.h>

#include "base/thread_pool.h"
#include "ops/cuda/cuda_case.h"
#include "ops/cuda/cuda_noise.h"
#include "ops/linear/cuda/linear_cuda.h"

namespace tessera {

struct LinearCudaSpec {
    std::string name;  // of the projection
    int64_t rows = 1;
    int64_t inputs = 0;
    int64_t outputs = 0;
    bool fp8 = false;
    bool float_out = false;
    bool accumulate = false;
    bool channel_scales = false;  // a scale for each output and row
    int64_t gap = 0;              // elements between the rows of y
    bool deterministic = false;   // the plan that serves any number of rows
};

class LinearCudaCase {
  public:
    LinearCudaCase(const CudaCaseData& data, const LinearCudaSpec& spec)
        : spec_(spec),
          stride_(spec.outputs + spec.gap),
          random_(data.seed),
          x_(data, spec.rows * spec.inputs, noise(1)),
          weight_(data, spec.outputs * spec.inputs, noise(2)),
          before_(data, spec.accumulate ? spec.rows * stride_ : 0, {random_.next(), 3}),
          y_(data, spec.rows * stride_ * y_size(), data.sets),
          workspace_(data, LinearCuda::kWorkspaceBytes, 1),
          column_scale_(data.budget, scales(spec.outputs), 1),
          row_scale_(data.budget, scales(spec.rows), 1),
          linear_(workspace_.at(0), LinearCuda::kWorkspaceBytes, spec.deterministic) {}

    void launch(cudaStream_t stream, int set) {
        std::byte* y = spec_.accumulate ? before_.at(set) : y_.at(set);
        linear_.run(stream, {.x = x_.at(set),
                             .weight = weight_.at(set),
                             .y = y,
                             .rows = spec_.rows,
                             .inputs = spec_.inputs,
                             .outputs = spec_.outputs,
                             .y_stride = stride_,
                             .dtype = dtype(),
                             .y_dtype = spec_.float_out ? DType::kFloat32 : DType::kBFloat16,
                             .accumulate = spec_.accumulate,
                             .scale = scale(),
                             .column_scale = spec_.channel_scales ? column_scale_.at(0) : nullptr,
                             .row_scale = spec_.channel_scales ? row_scale_.at(0) : nullptr});
    }
    OpError check(cudaStream_t stream) {
        y_.poison();
        if (spec_.accumulate) {
            before_.refill();
        }
        launch(stream, 0);
        cuda_check(cudaStreamSynchronize(stream));
        const std::vector<float> all = result();
        std::vector<float> got;
        std::vector<float> want;
        reference(all, got, want);
        // Products of e4m3 are summed with 14 bits or more; a bfloat16 result is rounded once, with += twice:
        // the product, which is as large as `before` where the two cancel, and the result. The tensor cores
        // cut the sum of every 16 products to float32, 2^-23 of a sum that may have been several times its
        // end.
        const double cut = 1e-5 + 2e-8 * static_cast<double>(spec_.inputs);
        const double absolute = spec_.fp8 ? 2e-3 : (spec_.accumulate ? 1e-3 : cut);
        OpError error = compare_sums(got, want, absolute, spec_.float_out ? 0 : 0.0079);
        for (int64_t r = 0; r < spec_.rows; ++r) {
            error += count_unwritten({all.data() + r * stride_, static_cast<size_t>(spec_.outputs)});
            error.mismatches += spec_.gap > 0 && !spec_.accumulate &&
                                !std::isnan(all[static_cast<size_t>(r * stride_ + spec_.outputs)]);
        }
        return error;
    }

  private:
    DType dtype() const { return spec_.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16; }
    int64_t y_size() const { return spec_.float_out ? 4 : 2; }
    float scale() const { return spec_.fp8 ? 0.37f : 1.0f; }
    NoiseSpec noise(float deviation) { return {random_.next() & 0xFFFFFF, deviation, dtype()}; }
    static std::vector<float> scales(int64_t count) {
        std::vector<float> out;
        for (int64_t i = 0; i < count; ++i) {
            out.push_back(0.5f + static_cast<float>(i % 7) * 0.25f);
        }
        return out;
    }
    std::vector<float> result() const {
        if (spec_.float_out) {
            return y_.download<float>();
        }
        if (!spec_.accumulate) {
            return widen_bf16(y_.download<uint16_t>());
        }
        std::vector<uint16_t> y(static_cast<size_t>(spec_.rows * stride_));
        copy_blocking(y.data(), before_.at(0), static_cast<int64_t>(y.size() * 2));
        return widen_bf16(y);
    }
    // All elements of a small case, some of a large one.
    void reference(const std::vector<float>& all, std::vector<float>& got, std::vector<float>& want) {
        const std::vector<int64_t> rows = sampled_indices(spec_.rows, 130, random_);
        const std::vector<int64_t> columns =
            sampled_indices(spec_.outputs, spec_.rows * spec_.outputs > 600000 ? 48 : 4096, random_);
        std::vector<float> x;
        for (const int64_t r : rows) {
            for (int64_t i = 0; i < spec_.inputs; ++i) {
                x.push_back(x_.value(r * spec_.inputs + i));
            }
        }
        want.resize(rows.size() * columns.size());
        got.resize(want.size());
        const std::vector<float> column_scale = scales(spec_.outputs);
        const std::vector<float> row_scale = scales(spec_.rows);
        ThreadPool threads(reference_threads());
        threads.parallel_for(static_cast<int64_t>(columns.size()), [&](int64_t item, int) {
            const int64_t c = columns[static_cast<size_t>(item)];
            std::vector<float> weight;
            for (int64_t i = 0; i < spec_.inputs; ++i) {
                weight.push_back(weight_.value(c * spec_.inputs + i));
            }
            for (size_t n = 0; n < rows.size(); ++n) {
                const int64_t r = rows[n];
                double sum = 0;
                for (size_t i = 0; i < weight.size(); ++i) {
                    sum += static_cast<double>(x[n * weight.size() + i]) * weight[i];
                }
                sum *= scale();
                if (spec_.channel_scales) {
                    sum *= column_scale[static_cast<size_t>(c)] * row_scale[static_cast<size_t>(r)];
                }
                const size_t at = n * columns.size() + static_cast<size_t>(item);
                want[at] =
                    static_cast<float>(sum) + (spec_.accumulate ? before_.value(r * stride_ + c) : 0.0f);
                got[at] = all[static_cast<size_t>(r * stride_ + c)];
            }
        });
    }

    LinearCudaSpec spec_;
    int64_t stride_;
    OpRandom random_;
    DeviceNoise x_, weight_, before_;
    DeviceScratch y_, workspace_;
    DeviceArray<float> column_scale_, row_scale_;
    LinearCuda linear_;
};

inline CudaOpCase linear_cuda_case(const LinearCudaSpec& spec, bool bench) {
    const int64_t size = spec.fp8 ? 1 : 2;
    const int64_t y = spec.rows * spec.outputs * (spec.float_out ? 4 : 2) * (spec.accumulate ? 2 : 1);
    const CudaCosts costs{.bytes = (spec.rows + spec.outputs) * spec.inputs * size + y,
                          .flops = 2 * spec.rows * spec.outputs * spec.inputs,
                          .unit = spec.fp8 ? CudaUnit::kFloat8 : CudaUnit::kBFloat16};
    return {fmt::format("{}{}rows={} inputs={} outputs={}{}{}{}{}", spec.name, spec.name.empty() ? "" : " ",
                        spec.rows, spec.inputs, spec.outputs, spec.float_out ? " to float32" : "",
                        spec.accumulate ? " +=" : "", spec.channel_scales ? " scales" : "",
                        spec.deterministic ? " deterministic" : ""),
            spec.fp8 ? "fp8_e4m3" : "bfloat16", bench,
            [=](const CudaCaseData& data) {
                return make_cuda_run(std::make_shared<LinearCudaCase>(data, spec), data.sets, costs);
            },
            costs.bytes};
}

inline std::vector<CudaOpCase> linear_cuda_cases() {
    std::vector<CudaOpCase> cases;
    for (const LinearCudaSpec& spec : std::vector<LinearCudaSpec>{
             {.rows = 1, .inputs = 256, .outputs = 512},
             {.rows = 63, .inputs = 256, .outputs = 4096, .float_out = true},
             {.rows = 65, .inputs = 4096, .outputs = 48, .accumulate = true},
             {.rows = 129, .inputs = 528, .outputs = 112, .gap = 48},
             {.rows = 1, .inputs = 1024, .outputs = 256, .fp8 = true},
             {.rows = 17, .inputs = 4096, .outputs = 208, .fp8 = true, .accumulate = true},
             {.rows = 127, .inputs = 512, .outputs = 256, .fp8 = true, .gap = 256},
             {.rows = 300, .inputs = 256, .outputs = 64, .fp8 = true},
             {.rows = 33, .inputs = 512, .outputs = 272, .fp8 = true, .channel_scales = true},
             // The kernel of few rows: both tiles, every class of rows, ragged ends of K and of the columns.
             {.rows = 8, .inputs = 528, .outputs = 5136, .fp8 = true, .channel_scales = true, .gap = 16},
             {.rows = 9, .inputs = 1040, .outputs = 4304, .accumulate = true},
             {.rows = 64, .inputs = 2064, .outputs = 4400, .fp8 = true, .accumulate = true},
             {.rows = 16, .inputs = 2064, .outputs = 176, .fp8 = true, .accumulate = true},
             {.rows = 31, .inputs = 272, .outputs = 1040, .float_out = true},
             {.rows = 20, .inputs = 528, .outputs = 1044, .accumulate = true},
             {.rows = 10, .inputs = 1040, .outputs = 5000, .fp8 = true, .gap = 2},
             {.rows = 63, .inputs = 3072, .outputs = 144, .fp8 = true, .channel_scales = true},
             {.rows = 1, .inputs = 16, .outputs = 16},
             {.rows = 1, .inputs = 256, .outputs = 512, .deterministic = true},
             {.rows = 65, .inputs = 4096, .outputs = 48, .accumulate = true, .deterministic = true},
             {.rows = 63, .inputs = 256, .outputs = 4096, .float_out = true, .deterministic = true},
             {.rows = 33,
              .inputs = 512,
              .outputs = 272,
              .fp8 = true,
              .channel_scales = true,
              .deterministic = true}}) {
        cases.push_back(linear_cuda_case(spec, false));
    }
    for (const bool fp8 : {false, true}) {
        for (const int64_t rows : {1, 16, 64, 512, 2048}) {
            // An fp8 checkpoint's q, k and v have a scale each.
            cases.push_back(linear_cuda_case(
                {.name = "qkv", .rows = rows, .inputs = 4096, .outputs = 10240, .fp8 = fp8}, true));
            if (fp8) {
                cases.push_back(linear_cuda_case({.name = "qkv",
                                                  .rows = rows,
                                                  .inputs = 4096,
                                                  .outputs = 10240,
                                                  .fp8 = true,
                                                  .channel_scales = true},
                                                 true));
            }
            cases.push_back(linear_cuda_case(
                {.name = "o", .rows = rows, .inputs = 8192, .outputs = 4096, .fp8 = fp8, .accumulate = true},
                true));
        }
    }
    for (const int64_t rows : {1, 64, 2048}) {
        for (LinearCudaSpec spec : std::vector<LinearCudaSpec>{
                 {.name = "qkv", .inputs = 4096, .outputs = 10240},
                 {.name = "qkv", .inputs = 4096, .outputs = 10240, .fp8 = true, .channel_scales = true},
                 {.name = "o", .inputs = 8192, .outputs = 4096, .fp8 = true, .accumulate = true}}) {
            spec.rows = rows;
            spec.deterministic = true;
            cases.push_back(linear_cuda_case(spec, true));
        }
    }
    for (const int64_t rows : {1, 16, 64, 512}) {
        cases.push_back(linear_cuda_case(
            {.name = "lm_head", .rows = rows, .inputs = 4096, .outputs = 120832, .float_out = true}, true));
    }
    return cases;
}

// y = e4m3(x / scale), to the bit.
class QuantizeCudaCase {
  public:
    QuantizeCudaCase(const CudaCaseData& data, int64_t count)
        : count_(count), x_(data, count, {data.seed & 0xFFFFFF, 3}), y_(data, count, data.sets) {}

    void launch(cudaStream_t stream, int set) {
        quantize_cuda(stream, {.x = x_.at(set), .count = count_, .scale = kScale, .y = y_.at(set)});
    }
    OpError check(cudaStream_t stream) {
        y_.poison();
        launch(stream, 0);
        std::vector<float> want(static_cast<size_t>(count_));
        for (int64_t i = 0; i < count_; ++i) {
            want[static_cast<size_t>(i)] = round_to_e4m3(x_.value(i) / kScale);
        }
        return compare_close(widen_e4m3(y_.download<uint8_t>()), want, 0, 0);
    }

  private:
    static constexpr float kScale = 0.0173f;

    int64_t count_;
    DeviceNoise x_;
    DeviceScratch y_;
};

inline std::vector<CudaOpCase> quantize_cuda_cases() {
    std::vector<CudaOpCase> cases;
    for (const int64_t rows : {0, 1, 64, 2048}) {  // 0: a small case
        const int64_t width = rows == 0 ? 1072 : 8192;
        const int64_t count = std::max<int64_t>(rows, 1) * width;
        const CudaCosts costs{.bytes = count * 3, .flops = count};
        cases.push_back(
            {fmt::format("rows={} width={}", std::max<int64_t>(rows, 1), width), "fp8_e4m3", rows > 0,
             [=](const CudaCaseData& data) {
                 return make_cuda_run(std::make_shared<QuantizeCudaCase>(data, count), data.sets, costs);
             },
             costs.bytes});
    }
    return cases;
}

}  // namespace tessera
