#include "weights/fp8_export.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weights/checkpoint/checkpoint_testing.h"
#include "weights/checkpoint/files.h"
#include "weights/checkpoint/safetensors.h"
#include "weights/export/e4m3.h"
#include "weights/export/safetensors_writer.h"
#include "weights/export_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::safetensors_file;
using testing::TempFolder;
using testing::TestTensors;
using testing::tiny_config;
using testing::tiny_fp8_tensors;
using testing::tiny_tensors;

// The value of an e4m3 code, from the format's definition.
float code_value(int code) {
    const int exponent = code >> 3 & 15;
    const int fraction = code & 7;
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                     : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
    return (code & 128) != 0 ? -size : size;
}

TEST(E4m3, every_value_has_its_own_code) {
    for (int code = 0; code < 256; ++code) {
        if ((code & 127) != 127) {
            EXPECT_EQ(e4m3_code(code_value(code)), code) << code_value(code);
        }
    }
}

TEST(E4m3, rounds_to_the_nearest_code_and_ties_to_the_even_one) {
    for (int code = 0; code < 126; ++code) {
        const float low = code_value(code);
        const float high = code_value(code + 1);
        const float middle = (low + high) / 2;
        EXPECT_EQ(e4m3_code(std::nextafter(middle, low)), code);
        EXPECT_EQ(e4m3_code(std::nextafter(middle, high)), code + 1);
        EXPECT_EQ(e4m3_code(middle), code % 2 == 0 ? code : code + 1);
        EXPECT_EQ(e4m3_code(-middle), 128 + (code % 2 == 0 ? code : code + 1));
    }
    EXPECT_EQ(e4m3_code(1e30F), 126);
    EXPECT_EQ(e4m3_code(-INFINITY), 254);
}

TEST(E4m3, a_tensor_of_zeros_has_a_scale_that_can_be_divided_by) {
    EXPECT_GT(e4m3_scale(0), 0);
    EXPECT_FLOAT_EQ(e4m3_scale(448), 1);
}

// The tiny model in a folder, loaded.
struct Source {
    Source() {
        folder.write("config.json", tiny_config());
        folder.write("model.safetensors", safetensors_file(tiny_tensors()));
        folder.write("tokenizer.json", "{}");
        folder.write("chat_template.jinja", "template");
        model.emplace(*load_model(folder.path()));
    }
    TempFolder folder;
    std::optional<LoadedModel> model;
};

Fp8Export tiny_export() {
    Fp8Export options;
    for (int i = 1; i <= 3; ++i) {
        const auto layer = static_cast<float>(100 * i);
        options.layers.push_back({.attention_input = layer + 1,
                                  .output_input = layer + 2,
                                  .key = layer + 3,
                                  .value = layer + 4,
                                  .mlp_input = layer + 5,
                                  .expert_down_input = layer + 6,
                                  .shared_down_input = layer + 7});
    }
    return options;
}

void expect_rounded(const LinearWeights& got, const LinearWeights& source, float limit) {
    ASSERT_EQ(got.weight.dtype, DType::kFloat8E4M3);
    ASSERT_EQ(got.weight.rows, source.weight.rows);
    ASSERT_EQ(got.weight.cols, source.weight.cols);
    EXPECT_FLOAT_EQ(*got.input_scale, limit / 448);
    float largest = 0;
    for (int64_t i = 0; i < got.weight.rows * got.weight.cols; ++i) {
        uint16_t bits = 0;
        std::memcpy(&bits, static_cast<const std::byte*>(source.weight.data) + 2 * i, 2);
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value = 0;
        std::memcpy(&value, &wide, 4);
        largest = std::max(largest, std::fabs(value));
        const auto code = static_cast<const uint8_t*>(got.weight.data)[i];
        // Half a step: 1/16 of a normal value, half of the smallest one of all.
        EXPECT_NEAR(code_value(code) * *got.weight_scale, value,
                    std::max(std::fabs(value) / 16, *got.weight_scale * 0x1p-10F) * 1.001F);
    }
    EXPECT_FLOAT_EQ(*got.weight_scale, largest / 448);
}

TEST(Fp8Export, the_folder_is_the_official_format) {
    const Source source;
    const TempFolder parent;
    const std::string out = parent.file("fp8");
    ThreadPool pool(2);
    const Status status = export_fp8(*source.model, tiny_export(), out, pool);
    ASSERT_TRUE(status.ok()) << status.message();
    const Result<LoadedModel> loaded = load_model(out);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    const ModelWeights& got = loaded->weights;
    const ModelWeights& from = source.model->weights;
    const AttentionWeights& attention = got.layers[1].attention;
    expect_rounded(attention.q, from.layers[1].attention.q, 201);
    expect_rounded(attention.k, from.layers[1].attention.k, 201);
    expect_rounded(attention.v, from.layers[1].attention.v, 201);
    expect_rounded(attention.o, from.layers[1].attention.o, 202);
    EXPECT_FLOAT_EQ(attention.k_scale, 203.0F / 448);
    EXPECT_FLOAT_EQ(attention.v_scale, 204.0F / 448);
    expect_rounded(got.layers[0].dense->down, from.layers[0].dense->down, 107);
    expect_rounded(got.layers[1].moe->experts[2].up, from.layers[1].moe->experts[2].up, 205);
    expect_rounded(got.layers[1].moe->experts[0].down, from.layers[1].moe->experts[0].down, 206);
    expect_rounded(got.layers[1].moe->shared.down, from.layers[1].moe->shared.down, 207);
    expect_rounded(got.mtp->layer.moe->shared.gate, from.mtp->layer.moe->shared.gate, 305);
    EXPECT_FLOAT_EQ(got.mtp->layer.attention.k_scale, 303.0F / 448);
    EXPECT_TRUE(got.kv_scales_static);
    // What stays as it is, byte by byte.
    for (const auto& [mine, theirs] :
         {std::pair(got.layers[1].moe->router, from.layers[1].moe->router),
          std::pair(got.mtp->projection.weight, from.mtp->projection.weight),
          std::pair(got.lm_head.weight, from.lm_head.weight), std::pair(got.embedding, from.embedding)}) {
        ASSERT_EQ(mine.dtype, DType::kBFloat16);
        EXPECT_EQ(std::memcmp(mine.data, theirs.data, static_cast<size_t>(mine.rows * mine.cols * 2)), 0);
    }
    EXPECT_TRUE(fs::exists(out + "/tokenizer.json"));
    EXPECT_TRUE(fs::exists(out + "/chat_template.jinja"));
    EXPECT_FALSE(fs::exists(out + "/model.safetensors"));
}

TEST(Fp8Export, a_stop_leaves_nothing_and_says_so) {
    const Source source;
    const TempFolder parent;
    ThreadPool pool(1);
    Fp8Export options = tiny_export();
    options.progress = [](int64_t, int64_t) { return false; };
    const Status status = export_fp8(*source.model, options, parent.file("fp8"), pool);
    EXPECT_EQ(status.code(), StatusCode::kCancelled);
    EXPECT_NE(status.message().find("unfinished copy is removed"), std::string::npos) << status.message();
    EXPECT_TRUE(fs::is_empty(parent.path()));
}

TEST(Fp8Export, weights_are_cut_into_files_of_a_bounded_size) {
    const Source source;
    const TempFolder parent;
    ThreadPool pool(1);
    Fp8Export options = tiny_export();
    options.shard_bytes_max = 600;
    int64_t last = 0;
    int64_t all = 0;
    options.progress = [&](int64_t done, int64_t total) {
        EXPECT_GT(done, last);
        last = done;
        all = total;
        return true;
    };
    ASSERT_TRUE(export_fp8(*source.model, options, parent.file("fp8"), pool).ok());
    EXPECT_EQ(last, all);
    int files = 0;
    for (const auto& entry : fs::directory_iterator(parent.file("fp8"))) {
        files += entry.path().filename().string().starts_with("model-0") ? 1 : 0;
    }
    EXPECT_GT(files, 3);
    const Result<LoadedModel> loaded = load_model(parent.file("fp8"));
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    EXPECT_EQ(loaded->weight_bytes, all + 3 * 2 * 4);  // and the KV scales
}

TEST(Fp8Export, nothing_is_written_over_and_nothing_is_left_after_a_failure) {
    const Source source;
    const TempFolder parent;
    ThreadPool pool(1);
    fs::create_directory(parent.file("there"));
    EXPECT_THAT(export_fp8(*source.model, tiny_export(), parent.file("there") + "/", pool).message(),
                HasSubstr("exists already"));
    EXPECT_THAT(export_fp8(*source.model, tiny_export(), parent.file("no/such/folder"), pool).message(),
                HasSubstr("no folder can be made there"));
    EXPECT_THAT(check_export_folder("").message(), HasSubstr("no name"));
    EXPECT_THAT(check_export_folder(parent.file("there")).message(), HasSubstr("exists already"));
    EXPECT_THAT(check_export_folder(parent.file("no/such/folder")).message(),
                HasSubstr("no folder can be made there"));
    EXPECT_TRUE(check_export_folder(parent.file("fp8")).ok());
    Fp8Export broken = tiny_export();
    broken.layers[1].value = NAN;
    EXPECT_THAT(export_fp8(*source.model, broken, parent.file("fp8"), pool).message(), HasSubstr("layer 1"));
    // A file that cannot be copied ends it half way.
    fs::remove(source.folder.file("config.json"));
    EXPECT_THAT(export_fp8(*source.model, tiny_export(), parent.file("fp8"), pool).message(),
                HasSubstr("config.json"));
    EXPECT_EQ(std::distance(fs::directory_iterator(parent.path()), fs::directory_iterator()), 1)
        << "only 'there'";
}

TEST(Fp8Export, a_weight_that_is_not_finite_is_named) {
    constexpr uint16_t kWrong[] = {0x7FC0, 0xFFC1, 0x7F80, 0xFF80};  // NaNs and infinities
    for (const uint16_t wrong : kWrong) {
        TestTensors tensors = tiny_tensors();
        const std::string name = "model.layers.1.mlp.experts.2.up_proj.weight";
        ASSERT_TRUE(tensors.contains(name));
        std::memcpy(tensors[name].bytes.data() + 6, &wrong, 2);
        const TempFolder folder;
        folder.write("config.json", tiny_config());
        folder.write("model.safetensors", safetensors_file(tensors));
        const Result<LoadedModel> model = load_model(folder.path());
        ASSERT_TRUE(model.ok()) << model.status().message();
        ThreadPool pool(2);
        EXPECT_THAT(export_fp8(*model, tiny_export(), folder.file("out"), pool).message(),
                    HasSubstr("model.layers.1.mlp.experts.2.up_proj.weight: holds"));
        EXPECT_FALSE(fs::exists(folder.file("out")));
    }
}

TEST(Fp8Export, a_quantised_model_is_refused) {
    const TempFolder folder;
    folder.write("config.json", testing::tiny_config_with("quantization_config", testing::kFp8Section));
    folder.write("model.safetensors", safetensors_file(tiny_fp8_tensors()));
    const Result<LoadedModel> model = load_model(folder.path());
    ASSERT_TRUE(model.ok());
    EXPECT_THAT(check_fp8_export(*model, folder.file("out")).message(), HasSubstr("quantised already"));
}

TEST(SafetensorsWriter, what_is_written_reads_back) {
    const TempFolder folder;
    const std::vector<float> values = {1, 2, 3};
    const std::vector<OutputTensor> tensors = {
        {.name = "a", .dtype = "F32", .shape = {3}, .bytes = 12, .data = values.data()},
        {.name = "b", .dtype = "U8", .shape = {0}, .bytes = 0, .data = nullptr},
        {.name = "c", .dtype = "U8", .shape = {2, 1}, .bytes = 2, .make = [](std::span<std::byte> out) {
             out[0] = std::byte{7};
             out[1] = std::byte{9};
         }}};
    ASSERT_TRUE(write_safetensors(folder.file("x.safetensors"), tensors).ok());
    const Result<MappedFile> file = MappedFile::open(folder.file("x.safetensors"));
    ASSERT_TRUE(file.ok());
    const Result<std::vector<TensorEntry>> entries = parse_safetensors(file->bytes(), "x");
    ASSERT_TRUE(entries.ok()) << entries.status().message();
    ASSERT_EQ(entries->size(), 3);
    const TensorEntry& last = entries->back();
    EXPECT_EQ(last.name, "c");
    EXPECT_EQ(last.shape, (std::vector<int64_t>{2, 1}));
    EXPECT_EQ(file->bytes()[last.offset + 1], std::byte{9});
    EXPECT_EQ(std::memcmp(file->bytes().data() + entries->front().offset, values.data(), 12), 0);
    EXPECT_THAT(write_safetensors(folder.file("x.safetensors"), tensors).message(),
                HasSubstr("cannot be created"));
}

}  // namespace
}  // namespace tessera
