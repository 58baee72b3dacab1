#include "ops/linear/cuda/linear_cuda.h"

#include <cmath>
#include <gtest/gtest.h>
#include <random>
#include <vector>

#include "device/cuda/stream.h"
#include "ops/common/cuda/device_testing.h"

namespace tessera {
namespace {

struct Shape {
    int64_t rows, inputs, outputs;
    bool fp8, float_out, accumulate;
    int64_t y_stride = 0;
    bool column_scales = false;
};

double run_case(const Shape& shape, bool deterministic) {
    std::mt19937 random(static_cast<uint32_t>(shape.rows * 31 + shape.outputs));
    DeviceArena arena;
    Stream stream;
    const TestValues x = random_values(random, shape.rows * shape.inputs, 1, shape.fp8);
    const TestValues w = random_values(random, shape.outputs * shape.inputs, 0.5f, shape.fp8);
    const int64_t stride = shape.y_stride != 0 ? shape.y_stride : shape.outputs;
    const TestValues before = random_values(random, shape.rows * stride, 3, false);
    const float scale = shape.fp8 ? 0.37f : 1.0f;
    std::vector<float> column_scale;
    for (int64_t o = 0; o < shape.outputs; ++o) {
        column_scale.push_back(shape.column_scales ? 0.5f + static_cast<float>(o % 7) : 1.0f);
    }
    const std::vector<float> row_scale(static_cast<size_t>(shape.rows), shape.column_scales ? 0.25f : 1.0f);
    std::vector<double> want(static_cast<size_t>(shape.rows * shape.outputs));
    for (int64_t r = 0; r < shape.rows; ++r) {
        for (int64_t o = 0; o < shape.outputs; ++o) {
            double sum = 0;
            for (int64_t i = 0; i < shape.inputs; ++i) {
                sum += static_cast<double>(x.values[static_cast<size_t>(r * shape.inputs + i)]) *
                       w.values[static_cast<size_t>(o * shape.inputs + i)];
            }
            want[static_cast<size_t>(r * shape.outputs + o)] =
                sum * scale * column_scale[static_cast<size_t>(o)] * row_scale[static_cast<size_t>(r)] +
                (shape.accumulate ? before.values[static_cast<size_t>(r * stride + o)] : 0.0f);
        }
    }
    LinearCuda linear(arena.poisoned<std::byte>(LinearCuda::kWorkspaceBytes), LinearCuda::kWorkspaceBytes,
                      deterministic);
    auto* y = arena.poisoned<uint8_t>(shape.rows * stride * (shape.float_out ? 4 : 2));
    if (shape.accumulate) {
        y = reinterpret_cast<uint8_t*>(arena.upload(before.bf16));
    }
    const LinearCudaArgs args{
        .x = shape.fp8 ? static_cast<void*>(arena.upload(x.fp8)) : arena.upload(x.bf16),
        .weight = shape.fp8 ? static_cast<void*>(arena.upload(w.fp8)) : arena.upload(w.bf16),
        .y = y,
        .rows = shape.rows,
        .inputs = shape.inputs,
        .outputs = shape.outputs,
        .y_stride = shape.y_stride,
        .dtype = shape.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16,
        .y_dtype = shape.float_out ? DType::kFloat32 : DType::kBFloat16,
        .accumulate = shape.accumulate,
        .scale = scale,
        .column_scale = shape.column_scales ? arena.upload(column_scale) : nullptr,
        .row_scale = shape.column_scales ? arena.upload(row_scale) : nullptr};
    linear.prepare(args);
    linear.run(stream.get(), args);
    stream.synchronize();
    const std::vector<float> all =
        shape.float_out
            ? DeviceArena::download(reinterpret_cast<float*>(y), shape.rows * stride)
            : bf16_values(DeviceArena::download(reinterpret_cast<uint16_t*>(y), shape.rows * stride));
    std::vector<float> got;
    for (int64_t r = 0; r < shape.rows; ++r) {
        got.insert(got.end(), all.begin() + r * stride, all.begin() + r * stride + shape.outputs);
    }
    return relative_error(got, want);
}

TEST(LinearCuda, agrees_with_a_loop_in_double) {
    const std::vector<Shape> shapes = {
        {1, 256, 512, false, false, false},         {63, 256, 4096, false, true, false},
        {65, 4096, 48, false, false, true},         {129, 528, 112, false, false, false, 160},
        {1, 1024, 256, true, false, false},         {17, 4096, 208, true, false, true},
        {127, 512, 256, true, false, false, 512},   {300, 256, 64, true, false, false},
        {33, 512, 272, true, false, false, 0, true}};
    for (const Shape& shape : shapes) {
        for (const bool deterministic : {false, true}) {
            const double error = run_case(shape, deterministic);
            std::printf("linear rows=%ld inputs=%ld outputs=%ld %s%s%s: relative error %.2e\n", shape.rows,
                        shape.inputs, shape.outputs, shape.fp8 ? "fp8" : "bf16",
                        shape.float_out ? " -> float32" : "", shape.accumulate ? " +=" : "", error);
            EXPECT_LT(error, shape.float_out ? 1e-6 : 4e-3);
        }
    }
}

// The bits of y for the first `rows` of x.
std::vector<uint16_t> bits_of(LinearCuda& linear, Stream& stream, LinearCudaArgs args, int64_t rows) {
    args.rows = rows;
    linear.run(stream.get(), args);
    stream.synchronize();
    return DeviceArena::download(static_cast<uint16_t*>(args.y), rows * args.outputs);
}

TEST(LinearCuda, deterministic_rows_have_the_same_bits_in_any_batch) {
    struct Matrix {
        int64_t outputs, inputs;
        bool fp8, column_scales;
    };
    constexpr int64_t kRows = 2048;
    for (const Matrix& matrix :
         {Matrix{2560, 256, false, false}, Matrix{256, 2048, false, false}, Matrix{10240, 4096, false, false},
          Matrix{4096, 8192, false, false}, Matrix{2560, 256, true, true}, Matrix{256, 2048, true, false},
          Matrix{10240, 4096, true, true}, Matrix{4096, 8192, true, false}}) {
        std::mt19937 random(static_cast<uint32_t>(matrix.outputs));
        DeviceArena arena;
        Stream stream;
        const TestValues x = random_values(random, kRows * matrix.inputs, 1, matrix.fp8);
        const TestValues w = random_values(random, matrix.outputs * matrix.inputs, 0.5f, matrix.fp8);
        const std::vector<float> columns(static_cast<size_t>(matrix.outputs), 0.3f);
        const std::vector<float> row_scale(kRows, 0.7f);
        LinearCuda linear(arena.poisoned<std::byte>(LinearCuda::kWorkspaceBytes), LinearCuda::kWorkspaceBytes,
                          true);
        const LinearCudaArgs args{
            .x = matrix.fp8 ? static_cast<void*>(arena.upload(x.fp8)) : arena.upload(x.bf16),
            .weight = matrix.fp8 ? static_cast<void*>(arena.upload(w.fp8)) : arena.upload(w.bf16),
            .y = arena.poisoned<uint16_t>(kRows * matrix.outputs),
            .inputs = matrix.inputs,
            .outputs = matrix.outputs,
            .dtype = matrix.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16,
            .column_scale = matrix.column_scales ? arena.upload(columns) : nullptr,
            .row_scale = matrix.column_scales ? arena.upload(row_scale) : nullptr};
        const std::vector<uint16_t> all = bits_of(linear, stream, args, kRows);
        for (const int64_t rows : {1, 3, 16, 24, 64, 100, 256, 513, 1024}) {
            const std::vector<uint16_t> some = bits_of(linear, stream, args, rows);
            EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin()))
                << rows << " rows, [" << matrix.outputs << ", " << matrix.inputs << "]"
                << (matrix.fp8 ? " fp8" : "");
        }
    }
}

TEST(LinearCuda, few_rows_have_the_same_bits_in_any_batch_of_few) {
    struct Matrix {
        int64_t outputs, inputs;
        bool fp8;
    };
    constexpr int64_t kRows = 64;
    for (const Matrix& matrix : {Matrix{5120, 1024, true}, Matrix{5120, 1024, false},
                                 Matrix{1024, 4096, true}, Matrix{1024, 2048, false}}) {
        std::mt19937 random(static_cast<uint32_t>(matrix.outputs));
        DeviceArena arena;
        Stream stream;
        const TestValues x = random_values(random, kRows * matrix.inputs, 1, matrix.fp8);
        const TestValues w = random_values(random, matrix.outputs * matrix.inputs, 0.5f, matrix.fp8);
        LinearCuda linear(arena.poisoned<std::byte>(LinearCuda::kWorkspaceBytes),
                          LinearCuda::kWorkspaceBytes);
        LinearCudaArgs args{
            .x = matrix.fp8 ? static_cast<void*>(arena.upload(x.fp8)) : arena.upload(x.bf16),
            .weight = matrix.fp8 ? static_cast<void*>(arena.upload(w.fp8)) : arena.upload(w.bf16),
            .y = arena.poisoned<uint16_t>(kRows * matrix.outputs),
            .rows = kRows,
            .inputs = matrix.inputs,
            .outputs = matrix.outputs,
            .dtype = matrix.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16};
        ASSERT_EQ(linear.choose_config(args), LinearCudaConfig::kSkinny);
        const std::vector<uint16_t> all = bits_of(linear, stream, args, kRows);
        for (const int64_t rows : {1, 7, 8, 9, 16, 17, 33, 63}) {
            const std::vector<uint16_t> some = bits_of(linear, stream, args, rows);
            EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin()))
                << rows << " rows, [" << matrix.outputs << ", " << matrix.inputs << "]"
                << (matrix.fp8 ? " fp8" : "");
        }
        args.rows = kRows + 1;
        EXPECT_EQ(linear.choose_config(args), LinearCudaConfig::kLibrary);
    }
}

// The own kernel takes up to 64 rows of as many columns as its blocks hold at once; all else is the
// library's, and so is all with `deterministic`.
TEST(LinearCuda, few_rows_of_the_projections_are_the_own_kernels_and_the_rest_the_librarys) {
    using enum LinearCudaConfig;
    DeviceArena arena;
    auto* workspace = arena.poisoned<std::byte>(LinearCuda::kWorkspaceBytes);
    const LinearCuda linear(workspace, LinearCuda::kWorkspaceBytes);
    const LinearCuda deterministic(workspace, LinearCuda::kWorkspaceBytes, true);
    struct Product {
        const char* name;
        LinearCudaArgs args;
        LinearCudaConfig few = kSkinny;  // up to 64 rows
    };
    const auto* scales = reinterpret_cast<const float*>(workspace);  // not read
    const DType fp8 = DType::kFloat8E4M3;
    const DType f32 = DType::kFloat32;
    const Product products[] = {
        {"qkv", {.inputs = 4096, .outputs = 10240}},
        {"qkv fp8", {.inputs = 4096, .outputs = 10240, .dtype = fp8}},
        {"qkv fp8, column scales",
         {.inputs = 4096, .outputs = 10240, .dtype = fp8, .column_scale = scales, .row_scale = scales}},
        {"o", {.inputs = 8192, .outputs = 4096, .accumulate = true}},
        {"o fp8", {.inputs = 8192, .outputs = 4096, .dtype = fp8, .accumulate = true}},
        {"the most columns of pairs of blocks", {.inputs = 4096, .outputs = 4224}},
        {"the most columns", {.inputs = 4096, .outputs = 10560}},
        {"a block more", {.inputs = 4096, .outputs = 10576}, kLibrary},
        {"lm_head", {.inputs = 4096, .outputs = 120832, .y_dtype = f32}, kLibrary},
        {"lm_head fp8", {.inputs = 4096, .outputs = 120832, .dtype = fp8, .y_dtype = f32}, kLibrary},
        {"to float32", {.inputs = 4096, .outputs = 4096, .y_dtype = f32}},
        {"onto float32", {.inputs = 4096, .outputs = 4096, .y_dtype = f32, .accumulate = true}, kLibrary}};
    for (const Product& product : products) {
        for (const int64_t rows : {1, 16, 64, 65, 2048}) {
            LinearCudaArgs args = product.args;
            args.rows = rows;
            EXPECT_EQ(linear.choose_config(args), rows <= 64 ? product.few : kLibrary)
                << product.name << ", " << rows << " rows";
            EXPECT_EQ(deterministic.choose_config(args), kLibrary) << product.name << ", " << rows << " rows";
        }
    }
}

TEST(LinearCuda, quantises_to_the_nearest_e4m3_value) {
    DeviceArena arena;
    std::vector<uint16_t> x;
    for (int bits = 0; bits < 0x10000; bits += 3) {  // a multiple of 16 of them
        if (std::isfinite(bf16_to_f32(static_cast<uint16_t>(bits)))) {
            x.push_back(static_cast<uint16_t>(bits));
        }
    }
    x.resize(x.size() / 16 * 16);
    const auto count = static_cast<int64_t>(x.size());
    for (const float scale : {1.0f, 0.0123f, 3.3f}) {
        auto* y = arena.poisoned<uint8_t>(count);
        quantize_cuda(nullptr, {.x = arena.upload(x), .count = count, .scale = scale, .y = y});
        const std::vector<uint8_t> got = DeviceArena::download(y, count);
        int64_t wrong = 0;
        for (size_t i = 0; i < x.size(); ++i) {
            wrong += e4m3_to_f32(got[i]) != round_to_e4m3(bf16_to_f32(x[i]) / scale);
        }
        EXPECT_EQ(wrong, 0) << "of " << count << " at scale " << scale;
    }
}

}  // namespace
}  // namespace tessera
