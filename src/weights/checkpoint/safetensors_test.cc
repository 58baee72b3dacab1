#include "weights/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "weights/checkpoint/checkpoint_testing.h"
#include "weights/checkpoint/shard_list.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::safetensors_file;

Result<std::vector<TensorEntry>> parse(const std::string& file) {
    return parse_safetensors(std::as_bytes(std::span(file)), "f.safetensors");
}

std::string error_of(std::string_view header, size_t data_bytes) {
    const auto entries = parse(safetensors_file(header, std::string(data_bytes, 'x')));
    EXPECT_FALSE(entries.ok()) << header;
    EXPECT_THAT(entries.status().message(), HasSubstr("f.safetensors"));
    return entries.status().message();
}

TEST(Safetensors, EntriesInOrderOfTheirBytes) {
    const std::string header =
        R"({"__metadata__": {"format": "pt"},
            "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
            "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
            "z": {"dtype": "F8_E4M3", "shape": [0, 7], "data_offsets": [16, 16]}})";
    const auto entries = parse(safetensors_file(header, std::string(16, 'x')));
    ASSERT_TRUE(entries.ok()) << entries.status().message();
    ASSERT_EQ(entries->size(), 3U);
    EXPECT_EQ((*entries)[0].name, "a");
    EXPECT_EQ((*entries)[0].offset, 8 + header.size());
    EXPECT_EQ((*entries)[1].bytes, 12U);
    EXPECT_THAT((*entries)[1].shape, ElementsAre(2, 3));
    EXPECT_EQ((*entries)[2].bytes, 0U);
}

TEST(Safetensors, UnknownTypesAreListed) {
    const auto entries =
        parse(safetensors_file(R"({"a": {"dtype": "Q9", "shape": [5], "data_offsets": [0, 3]}})", "xyz"));
    ASSERT_TRUE(entries.ok()) << entries.status().message();
    EXPECT_EQ((*entries)[0].dtype, "Q9");
    EXPECT_EQ(weight_dtype("Q9"), std::nullopt);
    EXPECT_EQ(weight_dtype("I64"), std::nullopt);
    EXPECT_EQ(weight_dtype("F16"), DType::kFloat16);
}

TEST(Safetensors, BadLengths) {
    EXPECT_THAT(parse("short").status().message(), HasSubstr("too few"));
    EXPECT_THAT(parse(std::string(8, '\xff')).status().message(), HasSubstr("header length"));
    std::string cut = safetensors_file("{}", "");
    cut[0] = 100;
    EXPECT_THAT(parse(cut).status().message(), HasSubstr("truncated"));
}

TEST(Safetensors, BadHeaders) {
    EXPECT_THAT(error_of("", 0), HasSubstr("bad safetensors header"));
    EXPECT_THAT(error_of("[]", 0), HasSubstr("object"));
    EXPECT_THAT(error_of(R"({"a": [[[[[]]]]]})", 0), HasSubstr("deeper"));
    EXPECT_THAT(error_of(R"({"a": 1})", 0), HasSubstr("dtype"));
    EXPECT_THAT(error_of(R"({"a": {"dtype": "F32", "data_offsets": [0, 4]}})", 4), HasSubstr("shape"));
    EXPECT_THAT(error_of(R"({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})", 4),
                HasSubstr("shape"));
    EXPECT_THAT(error_of(R"({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}})", 4),
                HasSubstr("shape"));
    EXPECT_THAT(error_of(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}})", 4),
                HasSubstr("data_offsets"));
    EXPECT_THAT(error_of(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}})", 4),
                HasSubstr("data_offsets"));
    EXPECT_THAT(
        error_of(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 99999999999999999999]}})", 4),
        HasSubstr("data_offsets"));
    EXPECT_THAT(error_of(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                             "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})",
                         8),
                HasSubstr("tensor a stands twice"));
    EXPECT_THAT(error_of("{\"a\":" + std::string(3'100'000, ',') + "}", 0), HasSubstr("at most"));
}

TEST(Safetensors, SizesThatDoNotFit) {
    EXPECT_THAT(error_of(R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}})", 4),
                HasSubstr("fill"));
    EXPECT_THAT(
        error_of(R"({"a": {"dtype": "BF16", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}})", 0),
        HasSubstr("2^63"));
    EXPECT_THAT(
        error_of(R"({"a": {"dtype": "F64", "shape": [4611686018427387904], "data_offsets": [0, 0]}})", 0),
        HasSubstr("fill"));
}

TEST(Safetensors, OverlapGapsAndMissingBytes) {
    EXPECT_THAT(error_of(R"({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                             "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}})",
                         6),
                HasSubstr("overlap"));
    EXPECT_THAT(error_of(R"({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                             "b": {"dtype": "U8", "shape": [4], "data_offsets": [6, 10]}})",
                         10),
                HasSubstr("gap"));
    const std::string truncated =
        error_of(R"({"w": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}})", 5);
    EXPECT_THAT(truncated, HasSubstr("truncated: tensor w"));
    EXPECT_THAT(error_of("{}", 5), HasSubstr("belong to none"));
    EXPECT_THAT(
        error_of(
            R"({"w": {"dtype": "U8", "shape": [9223372036854775807], "data_offsets": [0, 9223372036854775807]}})",
            5),
        ::testing::AnyOf(HasSubstr("truncated"), HasSubstr("fill")));
}

// Whatever the bytes are, the answer is an error or entries that lie inside the file.
RC_GTEST_PROP(Safetensors, EntriesStayInsideTheFile, (const std::string& noise)) {
    std::string file = safetensors_file(testing::tiny_tensors());
    const auto place = *rc::gen::inRange<size_t>(8, file.size());
    file.replace(place, std::min(noise.size(), file.size() - place), noise.substr(0, file.size() - place));
    const auto entries = parse(file);
    if (entries.ok()) {
        for (const TensorEntry& entry : *entries) {
            RC_ASSERT(entry.offset <= file.size());
            RC_ASSERT(entry.bytes <= file.size() - entry.offset);
        }
    }
}

TEST(ShardIndex, NamesMustBePlain) {
    for (const char* shard : {"\"../x.safetensors\"", "\"/x.safetensors\"", "\"a/b.safetensors\"", "\"\"",
                              "\"..\"", "7", "\"a\\u0000b\""}) {
        const auto list =
            parse_shard_index(std::string("{\"weight_map\": {\"w\": ") + shard + "}}", "index.json");
        ASSERT_FALSE(list.ok()) << shard;
        EXPECT_THAT(list.status().message(), HasSubstr("plain file name"));
    }
}

TEST(ShardIndex, ListsEachShardOnce) {
    const auto list =
        parse_shard_index(R"({"weight_map": {"a": "2.st", "b": "1.st", "c": "2.st"}})", "index.json");
    ASSERT_TRUE(list.ok()) << list.status().message();
    EXPECT_THAT(list->files, ElementsAre("1.st", "2.st"));
    EXPECT_EQ(list->placement.size(), 3U);
}

TEST(ShardIndex, BadIndex) {
    for (const char* text : {"", "[]", "{}", R"({"weight_map": []})", R"({"weight_map": {}})"}) {
        const auto list = parse_shard_index(text, "index.json");
        ASSERT_FALSE(list.ok()) << text;
        EXPECT_THAT(list.status().message(), HasSubstr("index.json"));
    }
}

}  // namespace
}  // namespace tessera
