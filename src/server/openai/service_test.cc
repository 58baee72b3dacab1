// The service's routes: bodies that are no requests, limits of the context, models, tokenise and detokenise.
#include "server/openai/openai_test_support.h"
#include "server/openai_service.h"

namespace tessera {
namespace {

const char* const kPosts[] = {"POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize",
                              "POST /detokenize"};

ScriptedModel::Play silent() {
    return [](const SlotInit&) { return Script{}; };
}

std::string text_of(const json::Value& answer, const char* key) {
    const json::Value* error = answer.find("error");
    const json::Value* value = error == nullptr ? nullptr : error->find(key);
    return value != nullptr && value->is_string() ? value->as_string() : "";
}

TEST(OpenAiService, RefusesBodiesThatAreNoObject) {
    OpenAiFixture fixture(silent());
    const std::string deep = std::string(100, '[') + std::string(100, ']');
    for (const char* route : kPosts) {
        for (const std::string& body :
             {std::string(), std::string("{"), std::string("[]"), std::string("null"), std::string("{} {}"),
              std::string("{\"n\":NaN}"), std::string("{\"n\":Infinity}"), std::string("{\"n\":1e999}"),
              std::string(R"({"prompt":"\ud800"})"), std::string("{\"prompt\":\"\xff\"}"),
              "{\"prompt\":" + deep + "}", "{\"prompt\":[" + std::string(1 << 21, ',') + "]}"}) {
            auto answer = fixture.ask(route, body);
            EXPECT_EQ(answer->status(), 400) << route << " " << body.substr(0, 80);
            EXPECT_EQ(text_of(answer->json(), "type"), "invalid_request_error");
            EXPECT_FALSE(text_of(answer->json(), "message").empty());
        }
    }
}

TEST(OpenAiService, SaysBothNumbersWhenTheContextIsTooShort) {
    OpenAiFixture fixture(silent());
    const std::string chat = R"({"messages":[{"role":"user","content":"hi"}],"max_tokens":2048})";
    auto answer = fixture.ask(kPosts[0], chat);
    EXPECT_EQ(answer->status(), 400);
    EXPECT_EQ(text_of(answer->json(), "code"), "context_length_exceeded");
    EXPECT_EQ(text_of(answer->json(), "param"), "max_tokens");
    EXPECT_NE(text_of(answer->json(), "message").find("2048"), std::string::npos);
    answer = fixture.ask(kPosts[0],
                         R"({"messages":[{"role":"user","content":"hi"}],"max_completion_tokens":2048})");
    EXPECT_EQ(text_of(answer->json(), "param"), "max_completion_tokens");
    std::string words;
    for (int i = 0; i < 3000; ++i) {
        words += "goat ";
    }
    answer = fixture.ask(kPosts[1], R"({"prompt":")" + words + "\"}");
    EXPECT_EQ(answer->status(), 400);
    EXPECT_EQ(text_of(answer->json(), "code"), "context_length_exceeded");
    EXPECT_EQ(text_of(answer->json(), "param"), "prompt");
    answer = fixture.ask(kPosts[1], R"({"prompt":"x","min_tokens":2048})");
    EXPECT_EQ(text_of(answer->json(), "param"), "min_tokens");
    EXPECT_EQ(text_of(answer->json(), "code"), "context_length_exceeded");
}

TEST(OpenAiService, RefusesAnEmptyPrompt) {
    OpenAiFixture fixture(silent());
    for (const char* body : {R"({"prompt":""})", R"({"prompt":["a",""]})", R"({"prompt":[[]]})"}) {
        auto answer = fixture.ask(kPosts[1], body);
        EXPECT_EQ(answer->status(), 400) << body;
        EXPECT_EQ(text_of(answer->json(), "param"), "prompt");
    }
}

TEST(OpenAiService, MaxTokensDefaultsToTheRestOfTheContext) {
    int32_t max_tokens = 0;
    OpenAiFixture fixture([&](const SlotInit& init) {
        max_tokens = init.sampling.max_tokens;
        return Script{};
    });
    fixture.ask(kPosts[1], R"({"prompt":[1,2,3]})");
    EXPECT_EQ(max_tokens, 2045);
    fixture.ask(kPosts[1], R"({"prompt":[1,2,3],"max_tokens":7})");
    EXPECT_EQ(max_tokens, 7);
}

TEST(OpenAiService, ListsModels) {
    OpenAiFixture fixture(silent());
    const json::Value list = fixture.ask("GET /v1/models", "")->json();
    ASSERT_EQ(list.find("data")->items().size(), 2u);
    EXPECT_EQ(list.find("data")->items()[0].find("id")->as_string(), "demo");
    EXPECT_EQ(list.find("data")->items()[0].find("max_model_len")->as_int64(), 2048);
    for (const char* path : {"/v1/models/org/demo", "/v1/models/org%2Fdemo"}) {
        auto one = fixture.send("GET /v1/models/*", "", "", path);
        EXPECT_EQ(one->status(), 200);
        EXPECT_EQ(one->json().find("id")->as_string(), "org/demo");
    }
    auto unknown = fixture.send("GET /v1/models/*", "", "", "/v1/models/other");
    EXPECT_EQ(unknown->status(), 404);
    EXPECT_EQ(text_of(unknown->json(), "code"), "model_not_found");
    auto chat = fixture.ask(kPosts[0], R"({"model":"other","messages":[{"role":"user","content":"x"}]})");
    EXPECT_EQ(chat->status(), 404);
}

TEST(OpenAiService, TokenisesAndDetokenises) {
    OpenAiFixture fixture(silent());
    const json::Value tokens =
        fixture.ask("POST /tokenize", R"({"model":"demo","prompt":"Hello 世界","return_token_strs":true})")
            ->json();
    const auto count = static_cast<size_t>(tokens.find("count")->as_int64().value());
    EXPECT_EQ(count, demo_ids("Hello 世界").size());
    EXPECT_EQ(tokens.find("tokens")->items().size(), count);
    EXPECT_EQ(tokens.find("token_strs")->items().size(), count);
    EXPECT_EQ(tokens.find("max_model_len")->as_int64(), 2048);
    auto back = fixture.ask("POST /detokenize", R"({"tokens":)" + json::dump(*tokens.find("tokens")) + "}");
    EXPECT_EQ(back->json().find("prompt")->as_string(), "Hello 世界");
    const json::Value chat =
        fixture
            .ask("POST /tokenize",
                 R"({"messages":[{"role":"user","content":"hi"}],"add_generation_prompt":false})")
            ->json();
    const json::Value longer =
        fixture.ask("POST /tokenize", R"({"messages":[{"role":"user","content":"hi"}]})")->json();
    EXPECT_LT(chat.find("count")->as_int64(), longer.find("count")->as_int64());
}

TEST(OpenAiService, RefusesBadTokeniseRequests) {
    OpenAiFixture fixture(silent());
    const std::pair<const char*, const char*> kBad[] = {
        {"{}", "prompt"},
        {R"({"prompt":5})", "prompt"},
        {R"({"prompt":"x","model":"no"})", "model"},
        {R"({"prompt":"x","return_token_strs":1})", "return_token_strs"},
        {R"({"messages":[]})", "messages"}};
    for (const auto& [body, param] : kBad) {
        auto answer = fixture.ask("POST /tokenize", body);
        EXPECT_TRUE(answer->status() == 400 || answer->status() == 404) << body;
        EXPECT_EQ(text_of(answer->json(), "param"), param) << body;
    }
    const std::pair<const char*, const char*> kBadIds[] = {{"{}", "tokens"},
                                                           {R"({"tokens":"x"})", "tokens"},
                                                           {R"({"tokens":[4096]})", "tokens[0]"},
                                                           {R"({"tokens":[1,-1]})", "tokens[1]"},
                                                           {R"({"tokens":[null]})", "tokens[0]"}};
    for (const auto& [body, param] : kBadIds) {
        auto answer = fixture.ask("POST /detokenize", body);
        EXPECT_EQ(answer->status(), 400) << body;
        EXPECT_EQ(text_of(answer->json(), "param"), param) << body;
    }
}

TEST(OpenAiService, ContinuesTheFinalMessage) {
    std::vector<TokenId> prompt;
    OpenAiFixture fixture([&](const SlotInit& init) {
        prompt = init.prompt;
        return Script{.tokens = demo_ids(" world")};
    });
    const json::Value answer =
        fixture
            .ask(kPosts[0],
                 R"({"messages":[{"role":"user","content":"greet"},{"role":"assistant","content":"Hello"}],)"
                 R"("continue_final_message":true,"add_generation_prompt":false})")
            ->json();
    EXPECT_TRUE(demo_tokenizer().decode(prompt, false).ends_with("Hello"));
    EXPECT_EQ(answer.find("choices")->items()[0].find("message")->find("content")->as_string(), " world");
}

}  // namespace
}  // namespace tessera
