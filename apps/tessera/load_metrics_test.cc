#include "load_metrics.h"

#include <cstdio>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "load_dataset.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

LoadResult answered(int64_t ttft_ms, int64_t e2el_ms, int64_t tokens) {
    LoadResult result;
    result.sent = kNsPerSecond;
    result.first = result.sent + ttft_ms * kNsPerMs;
    result.finished = result.sent + e2el_ms * kNsPerMs;
    result.prompt_tokens = 10;
    result.output_tokens = tokens;
    return result;
}

TEST(LoadMetrics, TimesOfRequests) {
    LoadOutcome outcome;
    outcome.duration_s = 2;
    outcome.results = {answered(100, 1100, 11), answered(300, 300, 1), answered(0, 0, 5)};
    outcome.results[0].gaps = {40 * kNsPerMs, 60 * kNsPerMs};
    outcome.results[2].error = "lost";
    GoodputLimits limits;
    limits.ttft_ms = 200;
    const LoadMetrics metrics = measure(outcome, limits);
    EXPECT_EQ(metrics.completed, 2);
    EXPECT_EQ(metrics.failed, 1);
    EXPECT_EQ(metrics.input_tokens, 20);
    EXPECT_EQ(metrics.output_tokens, 12);
    EXPECT_DOUBLE_EQ(metrics.ttft.mean, 200);
    EXPECT_DOUBLE_EQ(metrics.tpot.mean, 100);  // (1100 - 100) / 10; one token has no TPOT
    EXPECT_DOUBLE_EQ(metrics.itl.p50, 50);
    EXPECT_DOUBLE_EQ(metrics.e2el.p99, 1092);
    EXPECT_DOUBLE_EQ(metrics.good_requests_per_s, 0.5);
    const json::Value object = metrics_json(metrics, true);
    EXPECT_DOUBLE_EQ(object.find("request_throughput")->as_double(), 1);
    EXPECT_DOUBLE_EQ(object.find("output_throughput")->as_double(), 6);
    EXPECT_DOUBLE_EQ(object.find("mean_tpot_ms")->as_double(), 100);
}

TEST(LoadMetrics, NothingAnswered) {
    const LoadMetrics metrics = measure({}, {});
    EXPECT_EQ(metrics.completed, 0);
    EXPECT_DOUBLE_EQ(metrics.ttft.p99, 0);
    EXPECT_THAT(metrics_table(metrics, false), HasSubstr("completed requests"));
}

TEST(LoadMetrics, GoodputWords) {
    const Result<GoodputLimits> limits = parse_goodput({"ttft:4000", "tpot:50.5"});
    ASSERT_TRUE(limits.ok());
    EXPECT_EQ(limits->ttft_ms, 4000);
    EXPECT_EQ(limits->tpot_ms, 50.5);
    EXPECT_FALSE(limits->e2el_ms.has_value());
    for (const char* word : {"ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:1s", "itl:5", ""}) {
        EXPECT_FALSE(parse_goodput({word}).ok()) << word;
    }
}

TEST(LoadDataset, RandomPromptsShareTheirPrefixOnly) {
    RandomSpec spec;
    spec.count = 2;
    spec.prefix_tokens = 3;
    spec.input_tokens = 5;
    spec.output_tokens = 7;
    const std::vector<LoadPrompt> prompts = random_prompts(spec);
    ASSERT_EQ(prompts.size(), 2U);
    const Result<json::Value> a = json::parse(prompt_ids_json(prompts[0], {100, 10000}));
    const Result<json::Value> b = json::parse(prompt_ids_json(prompts[1], {100, 10000}));
    ASSERT_EQ(a->items().size(), 8U);
    for (size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(*a->items()[i].as_int64(), *b->items()[i].as_int64());
    }
    EXPECT_NE(json::dump(*a), json::dump(*b));
    EXPECT_GE(*a->items()[7].as_int64(), 100);
    EXPECT_EQ(prompt_ids_json(random_prompts(spec)[0], {100, 10000}), json::dump(*a));
    EXPECT_EQ(std::ranges::count(prompt_words(prompts[0]), ' '), 7);
}

class DatasetFile : public ::testing::Test {
  protected:
    FileSpec write(const std::string& text) {
        std::ofstream(path_) << text;
        FileSpec spec;
        spec.path = path_;
        return spec;
    }
    void TearDown() override { std::remove(path_.c_str()); }

    std::string path_ = ::testing::TempDir() + "tessera_dataset_" +
                        ::testing::UnitTest::GetInstance()->current_test_info()->name() + ".jsonl";
};

TEST_F(DatasetFile, MooncakeTrace) {
    FileSpec spec = write(
        "{\"timestamp\": 3000, \"input_length\": 700, \"output_length\": 5, \"hash_ids\": [1, 2]}\n\n"
        "{\"timestamp\": 1000, \"input_length\": 600, \"output_length\": 0, \"hash_ids\": [1, 9]}\n");
    spec.speedup = 2;
    const Result<std::vector<LoadPrompt>> prompts = mooncake_prompts(spec);
    ASSERT_TRUE(prompts.ok()) << prompts.status().message();
    EXPECT_EQ((*prompts)[0].arrival, 0);
    EXPECT_EQ((*prompts)[1].arrival, kNsPerSecond);
    EXPECT_EQ((*prompts)[0].output_tokens, 1);
    EXPECT_EQ((*prompts)[1].segments[0].tokens, 512);
    EXPECT_EQ((*prompts)[1].segments[1].tokens, 188);
    EXPECT_EQ((*prompts)[0].segments[0].seed, (*prompts)[1].segments[0].seed);
}

TEST_F(DatasetFile, BadLinesAreNamed) {
    for (const char* line :
         {"x", "{}", R"({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]})",
          R"({"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]})"}) {
        const auto prompts = mooncake_prompts(write(line));
        ASSERT_FALSE(prompts.ok()) << line;
        EXPECT_THAT(prompts.status().message(), HasSubstr("line 1"));
    }
    EXPECT_FALSE(mooncake_prompts(write("")).ok());
    EXPECT_FALSE(custom_prompts(write("{\"prompt\": 1}")).ok());
}

TEST_F(DatasetFile, CustomPrompts) {
    FileSpec spec =
        write("{\"prompt\": \"a\"}\n{\"prompt\": \"b\", \"output_tokens\": 3}\n{\"prompt\": \"c\"}\n");
    spec.count = 2;
    const auto prompts = custom_prompts(spec);
    ASSERT_TRUE(prompts.ok()) << prompts.status().message();
    ASSERT_EQ(prompts->size(), 2U);
    EXPECT_EQ((*prompts)[0].output_tokens, 128);
    EXPECT_EQ((*prompts)[1].text, "b");
    EXPECT_EQ((*prompts)[1].output_tokens, 3);
}

TEST(LoadTarget, BaseUrls) {
    const Result<LoadTarget> target = parse_base_url("http://host:81/api/");
    ASSERT_TRUE(target.ok());
    EXPECT_EQ(target->host, "host");
    EXPECT_EQ(target->port, "81");
    EXPECT_EQ(target->prefix, "/api");
    EXPECT_EQ(parse_base_url("http://[::1]:9")->host, "::1");
    EXPECT_EQ(parse_base_url("http://h")->port, "80");
    for (const char* url : {"", "host:80", "https://host", "http://", "http://:80", "http://host:"}) {
        EXPECT_FALSE(parse_base_url(url).ok()) << url;
    }
}

}  // namespace
}  // namespace tessera
