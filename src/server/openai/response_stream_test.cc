// Answers over a real engine whose model is scripted: streams keep their contract, and joined they equal
// whole answers.
#include "server/openai/response_stream.h"

#include <random>

#include "server/openai/openai_test_support.h"

namespace tessera {
namespace {

constexpr const char* kChat = "POST /v1/chat/completions";
constexpr const char* kCompletions = "POST /v1/completions";
constexpr const char* kTools =
    R"("tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":)"
    R"({"city":{"type":"string"},"days":{"type":"integer"}}}}}],)";

const Hy3Tokens& tokens() {
    static const Hy3Tokens kTokens(demo_tokenizer().token_suffix());
    return kTokens;
}

std::string call_text(const std::string& city) {
    const Hy3Tokens& t = tokens();
    return t.tool_call_begin + "get_weather" + t.tool_sep + "\n" + t.arg_key_begin + "city" + t.arg_key_end +
           "\n" + t.arg_value_begin + city + t.arg_value_end + "\n" + t.arg_key_begin + "days" +
           t.arg_key_end + "\n" + t.arg_value_begin + "3" + t.arg_value_end + "\n" + t.tool_call_end + "\n";
}

std::string calls_text(const std::vector<std::string>& cities) {
    std::string out = tokens().tool_calls_begin + "\n";
    for (const std::string& city : cities) {
        out += call_text(city);
    }
    return out + tokens().tool_calls_end;
}

ScriptedModel::Play say(const std::string& text) {
    return [ids = demo_ids(text)](const SlotInit&) { return Script{.tokens = ids}; };
}

std::string body(const std::string& fields, const std::string& content = "hi") {
    return R"({"messages":[{"role":"user","content":")" + content + "\"}]," + fields + "\"temperature\":1}";
}

// What both ways of answering say about a choice.
JoinedChoice whole_choice(const json::Value& choice, bool chat) {
    JoinedChoice out;
    const json::Value& message = chat ? *choice.find("message") : choice;
    const auto text = [&](const char* key) {
        const json::Value* value = message.find(key);
        return value != nullptr && value->is_string() ? value->as_string() : std::string();
    };
    out.content = text(chat ? "content" : "text");
    out.reasoning = text("reasoning_content");
    EXPECT_EQ(text("reasoning"), out.reasoning);
    if (const json::Value* calls = message.find("tool_calls")) {
        for (const json::Value& call : calls->items()) {
            out.calls.emplace_back(call.find("function")->find("name")->as_string(),
                                   call.find("function")->find("arguments")->as_string());
        }
    }
    out.finish_reason = choice.find("finish_reason")->as_string();
    out.stop_reason = json::dump(*choice.find("stop_reason"));
    if (const json::Value* logprobs = choice.find("logprobs"); logprobs->is_object()) {
        out.logprobs = logprobs->find(chat ? "content" : "token_logprobs")->items();
    }
    if (const json::Value* ids = choice.find("token_ids")) {
        for (const json::Value& id : ids->items()) {
            out.token_ids.push_back(id.as_int64().value());
        }
    }
    return out;
}

void expect_equal(const JoinedChoice& a, const JoinedChoice& b) {
    EXPECT_EQ(a.reasoning, b.reasoning);
    EXPECT_EQ(a.content, b.content);
    EXPECT_EQ(a.calls, b.calls);
    EXPECT_EQ(a.finish_reason, b.finish_reason);
    EXPECT_EQ(a.stop_reason, b.stop_reason);
    EXPECT_EQ(a.token_ids, b.token_ids);
    EXPECT_EQ(json::dump(json::Value::array(a.logprobs)), json::dump(json::Value::array(b.logprobs)));
}

int64_t usage_of(const json::Value& usage, const char* key) {
    return usage.find(key)->as_int64().value();
}

int64_t cached_of(const json::Value& answer) {
    return usage_of(*answer.find("usage")->find("prompt_tokens_details"), "cached_tokens");
}

// Sends the request whole and streamed, checks that both agree, and returns the whole answer.
json::Value ask_both(OpenAiFixture& fixture, const char* route, const std::string& request) {
    const bool chat = std::string(route) == kChat;
    auto whole = fixture.ask(route, request);
    EXPECT_EQ(whole->status(), 200) << whole->body();
    const std::string streamed_request =
        request.substr(0, request.size() - 1) + R"(,"stream":true,"stream_options":{"include_usage":true}})";
    auto streamed = fixture.ask(route, streamed_request);
    EXPECT_EQ(streamed->status(), 200) << streamed->body();
    const JoinedStream joined = read_stream(streamed->body(), chat, true);
    json::Value answer = whole->json();
    EXPECT_EQ(answer.find("choices")->items().size(), joined.choices.size());
    for (const json::Value& choice : answer.find("choices")->items()) {
        const int64_t index = choice.find("index")->as_int64().value();
        expect_equal(joined.choices.at(index), whole_choice(choice, chat));
    }
    for (const char* key : {"prompt_tokens", "completion_tokens", "total_tokens"}) {
        EXPECT_EQ(usage_of(joined.usage, key), usage_of(*answer.find("usage"), key)) << key;
    }
    return answer;
}

JoinedChoice first_choice(const json::Value& answer, bool chat = true) {
    return whole_choice(answer.find("choices")->items().front(), chat);
}

TEST(ResponseStream, PlainAnswer) {
    OpenAiFixture fixture(say("Hello, 世界! \xF0\x9F\xA6\xA6"));
    const json::Value answer = ask_both(fixture, kChat, body(""));
    const JoinedChoice choice = first_choice(answer);
    EXPECT_EQ(choice.content, "Hello, 世界! \xF0\x9F\xA6\xA6");
    EXPECT_EQ(choice.finish_reason, "stop");
    EXPECT_EQ(answer.find("object")->as_string(), "chat.completion");
    EXPECT_EQ(answer.find("id")->as_string(), "chatcmpl-test");
    EXPECT_EQ(answer.find("model")->as_string(), "demo");
}

TEST(ResponseStream, ReasoningAndToolCalls) {
    OpenAiFixture fixture(
        say("I should look." + tokens().think_end + "Let me see." + calls_text({"Lisbon", "Po\"rto"})));
    const json::Value answer =
        ask_both(fixture, kChat, body(std::string(kTools) + R"("reasoning_effort":"low",)"));
    const JoinedChoice choice = first_choice(answer);
    EXPECT_EQ(choice.reasoning, "I should look.");
    EXPECT_EQ(choice.content, "Let me see.");
    ASSERT_EQ(choice.calls.size(), 2u);
    EXPECT_EQ(choice.calls[0].first, "get_weather");
    for (const auto& [index, city] : {std::pair{0, "Lisbon"}, std::pair{1, "Po\"rto"}}) {
        const auto arguments = json::parse(choice.calls[static_cast<size_t>(index)].second);
        ASSERT_TRUE(arguments.ok());
        EXPECT_EQ(arguments->find("city")->as_string(), city);
        EXPECT_EQ(arguments->find("days")->as_int64(), 3);
    }
    EXPECT_EQ(choice.finish_reason, "tool_calls");
    EXPECT_EQ(usage_of(*answer.find("usage")->find("completion_tokens_details"), "reasoning_tokens"),
              static_cast<int64_t>(demo_ids("I should look.").size()));
}

TEST(ResponseStream, ToolChoiceNoneLeavesTheTextAlone) {
    OpenAiFixture fixture(say(calls_text({"Lisbon"})));
    const JoinedChoice choice =
        first_choice(ask_both(fixture, kChat, body(std::string(kTools) + R"("tool_choice":"none",)")));
    EXPECT_TRUE(choice.calls.empty());
    EXPECT_EQ(choice.content, calls_text({"Lisbon"}));
    EXPECT_EQ(choice.finish_reason, "stop");
}

TEST(ResponseStream, OneCallWhenCallsMayNotBeParallel) {
    OpenAiFixture fixture(say(calls_text({"Lisbon", "Porto", "Faro"})));
    const json::Value answer =
        ask_both(fixture, kChat, body(std::string(kTools) + R"("parallel_tool_calls":false,)"));
    const JoinedChoice choice = first_choice(answer);
    EXPECT_EQ(choice.calls.size(), 1u);
    EXPECT_EQ(choice.finish_reason, "tool_calls");
    EXPECT_LT(usage_of(*answer.find("usage"), "completion_tokens"),
              static_cast<int64_t>(demo_ids(calls_text({"Lisbon", "Porto"})).size()));
}

TEST(ResponseStream, ToolChoiceForcesTheOpeningTokens) {
    ForcedTokens seen;
    OpenAiFixture fixture([&seen](const SlotInit& init) {
        seen = init.sampling.forced;
        return Script{.tokens = init.sampling.forced.tokens};
    });
    const std::string required = tokens().tool_calls_begin + "\n" + tokens().tool_call_begin;
    // Of one tool the name is known; of two the model chooses.
    fixture.ask(kChat, body(std::string(kTools) + R"("tool_choice":"required",)"));
    EXPECT_EQ(seen.tokens, demo_ids(required + "get_weather" + tokens().tool_sep + "\n"));
    fixture.ask(kChat, body(R"("tools":[{"type":"function","function":{"name":"a"}},)"
                            R"({"type":"function","function":{"name":"b"}}],"tool_choice":"required",)"));
    EXPECT_EQ(seen.tokens, demo_ids(required));
    EXPECT_EQ(seen.after, -1);
    const std::string named = R"("tool_choice":{"type":"function","function":{"name":"get_weather"}},)";
    fixture.ask(kChat, body(kTools + named + R"("reasoning_effort":"high",)"));
    EXPECT_EQ(seen.tokens, demo_ids(required + "get_weather" + tokens().tool_sep + "\n"));
    EXPECT_EQ(seen.after, demo_tokenizer().added_token(tokens().think_end).value());
    fixture.ask(kChat, body(kTools));
    EXPECT_TRUE(seen.tokens.empty());
}

TEST(ResponseStream, LogprobsAndIdsCoverEveryToken) {
    OpenAiFixture fixture(say("a stop comes \xF0\x9F\xA6\xA6 here END more"));
    const json::Value answer = ask_both(
        fixture, kChat, body(R"("logprobs":true,"top_logprobs":2,"return_token_ids":true,"stop":"END",)"));
    const JoinedChoice choice = first_choice(answer);
    EXPECT_EQ(choice.content, "a stop comes \xF0\x9F\xA6\xA6 here ");
    const auto count = static_cast<size_t>(usage_of(*answer.find("usage"), "completion_tokens"));
    EXPECT_EQ(choice.logprobs.size(), count);
    EXPECT_EQ(choice.token_ids.size(), count);
    EXPECT_FALSE(answer.find("prompt_token_ids")->items().empty());
    std::string bytes;
    for (const json::Value& entry : choice.logprobs) {
        ASSERT_EQ(entry.find("top_logprobs")->items().size(), 2u);
        EXPECT_EQ(entry.find("top_logprobs")->items()[1].find("logprob")->as_double(), -9999.0)
            << "-inf is clamped";
        for (const json::Value& byte : entry.find("bytes")->items()) {
            bytes += static_cast<char>(byte.as_int64().value());
        }
    }
    EXPECT_TRUE(bytes.starts_with(choice.content + "END")) << bytes;
}

TEST(ResponseStream, CompletionsWithSeveralPrompts) {
    OpenAiFixture fixture(
        [](const SlotInit& init) { return Script{.tokens = {init.prompt.rbegin(), init.prompt.rend()}}; });
    const json::Value answer =
        ask_both(fixture, kCompletions,
                 R"({"prompt":[[70,71],[80,81,82]],"n":2,"logprobs":1,"return_token_ids":true})");
    const auto& choices = answer.find("choices")->items();
    ASSERT_EQ(choices.size(), 4u);
    for (size_t i = 0; i < choices.size(); ++i) {
        const std::vector<TokenId> expected =
            i < 2 ? std::vector<TokenId>{71, 70} : std::vector<TokenId>{82, 81, 80};
        EXPECT_EQ(choices[i].find("text")->as_string(), demo_tokenizer().decode(expected, true));
        EXPECT_EQ(choices[i].find("prompt_token_ids")->items().size(), i < 2 ? 2u : 3u);
        EXPECT_EQ(choices[i].find("token_ids")->items().size(), expected.size() + 1) << "EOS is a token";
        const json::Value& logprobs = *choices[i].find("logprobs");
        for (const char* key : {"tokens", "token_logprobs", "top_logprobs", "text_offset"}) {
            EXPECT_EQ(logprobs.find(key)->items().size(), expected.size() + 1) << key;
        }
    }
    EXPECT_EQ(usage_of(*answer.find("usage"), "prompt_tokens"), 5) << "each prompt once";
    EXPECT_EQ(usage_of(*answer.find("usage"), "completion_tokens"), 2 * 3 + 2 * 4);
}

TEST(ResponseStream, ChoicesHaveTheirOwnSeeds) {
    std::mutex mutex;
    std::vector<uint64_t> seeds;
    OpenAiFixture fixture([&](const SlotInit& init) {
        std::lock_guard lock(mutex);
        seeds.push_back(init.sampling.seed);
        return Script{};
    });
    fixture.ask(kChat, body(R"("n":3,"seed":41,)"));
    std::sort(seeds.begin(), seeds.end());
    EXPECT_EQ(seeds, (std::vector<uint64_t>{41, 42, 43}));
    seeds.clear();
    fixture.ask(kChat, body(R"("n":2,)"));
    ASSERT_EQ(seeds.size(), 2u);
    EXPECT_NE(seeds[0], seeds[1]);
}

// Random mixtures of text, structure and broken structure.
std::string random_output(std::mt19937& random) {
    const Hy3Tokens& t = tokens();
    const std::vector<std::string> pieces = {"word ",
                                             "\n",
                                             "\xF0\x9F\xA6\xA6",
                                             "世界",
                                             "END",
                                             "EN",
                                             "{\"a\": 1}",
                                             "<",
                                             t.think_end,
                                             t.think_begin,
                                             t.tool_calls_begin + "\n",
                                             t.tool_calls_end,
                                             t.tool_call_begin,
                                             t.tool_call_end,
                                             t.tool_sep,
                                             t.arg_key_begin,
                                             t.arg_key_end,
                                             t.arg_value_begin,
                                             t.arg_value_end,
                                             "get_weather",
                                             "city",
                                             call_text("Faro")};
    std::string out;
    for (size_t i = 0, count = random() % 24; i < count; ++i) {
        out += pieces[random() % pieces.size()];
    }
    return out;
}

TEST(ResponseStream, JoinedStreamsEqualWholeAnswers) {
    std::mt19937 random(7);
    std::vector<TokenId> output;
    OpenAiFixture fixture([&output](const SlotInit&) { return Script{.tokens = output}; });
    for (int round = 0; round < 150; ++round) {
        output = demo_ids(random_output(random));
        std::string fields = random() % 2 == 0 ? kTools : "";
        fields += random() % 2 == 0 ? R"("reasoning_effort":"high",)" : "";
        fields += random() % 2 == 0 ? R"("stop":["END"],)" : "";
        fields += random() % 2 == 0 ? R"("logprobs":true,"top_logprobs":1,)" : "";
        fields += random() % 2 == 0 ? R"("return_token_ids":true,)" : "";
        fields += random() % 4 == 0 ? R"("max_tokens":5,)" : "";
        fields += random() % 4 == 0 ? R"("min_tokens":3,)" : "";
        fields += random() % 4 == 0 ? R"("n":2,)" : "";
        if (fields.find("max_tokens") != std::string::npos ||
            fields.find("min_tokens") == std::string::npos) {
            ask_both(fixture, kChat, body(fields));
        }
        if (testing::Test::HasFailure()) {
            FAIL() << "round " << round << ": " << fields << "\n" << demo_tokenizer().decode(output, false);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// How answers end when they cannot go on

std::string error_field(const json::Value& answer, const char* key) {
    const json::Value* value = answer.find("error") == nullptr ? nullptr : answer.find("error")->find(key);
    return value != nullptr && value->is_string() ? value->as_string() : "";
}

TEST(ResponseStream, AFailedRowBeforeTheFirstTokenIsAnHttpError) {
    OpenAiFixture fixture([](const SlotInit&) { return Script{.error_at_end = "not a number"}; });
    for (const char* fields : {"", R"("stream":true,)"}) {
        auto answer = fixture.ask(kChat, body(fields));
        EXPECT_EQ(answer->status(), 500);
        EXPECT_EQ(error_field(answer->json(), "type"), "server_error");
        EXPECT_NE(error_field(answer->json(), "message").find("not a number"), std::string::npos);
    }
}

TEST(ResponseStream, AFailedRowLaterIsAnErrorEventAndDone) {
    OpenAiFixture fixture([](const SlotInit& init) {
        return init.sampling.seed == 1
                   ? Script{.tokens = demo_ids("some text"), .error_at_end = "not a number"}
                   : Script{.tokens = demo_ids("x"), .endless = true};
    });
    auto answer = fixture.ask(kChat, body(R"("stream":true,"n":2,"seed":1,)"));
    const JoinedStream joined = read_stream(answer->body(), true, false);
    ASSERT_TRUE(joined.error.is_object());
    EXPECT_EQ(joined.error.find("type")->as_string(), "server_error");
    EXPECT_EQ(joined.choices.at(0).content, "some text");
    fixture.wait_idle();  // the endless choice was cancelled
}

TEST(ResponseStream, ADeadlineEndsWithATimeout) {
    OpenAiConfig config;
    config.request_deadline = std::chrono::milliseconds(50);
    OpenAiFixture fixture([](const SlotInit&) { return Script{.tokens = demo_ids("x"), .endless = true}; },
                          config, std::chrono::microseconds(1000));
    auto answer = fixture.ask(kChat, body(R"("ignore_eos":true,)"));
    EXPECT_EQ(answer->status(), 504);
    EXPECT_EQ(error_field(answer->json(), "type"), "timeout");
}

TEST(ResponseStream, AFullQueueIs429AndNothingIsLeft) {
    OpenAiFixture fixture([](const SlotInit&) { return Script{.tokens = demo_ids("x"), .endless = true}; },
                          {}, std::chrono::microseconds(1000));
    auto answer = fixture.ask(kChat, body(R"("n":100,"max_tokens":1500,)"));
    EXPECT_EQ(answer->status(), 429);
    EXPECT_EQ(error_field(answer->json(), "code"), "queue_full");
    ASSERT_FALSE(answer->headers().empty());
    EXPECT_EQ(answer->headers()[0].first, "Retry-After");
    fixture.wait_idle();
}

TEST(ResponseStream, ADrainingServerIs503) {
    OpenAiFixture fixture(say("x"));
    fixture.engine().stop_admission();
    auto answer = fixture.ask(kChat, body(""));
    EXPECT_EQ(answer->status(), 503);
    EXPECT_EQ(error_field(answer->json(), "code"), "shutting_down");
    ASSERT_FALSE(answer->headers().empty());
}

TEST(ResponseStream, ShutdownEndsRunningStreamsByTheContract) {
    OpenAiFixture fixture(
        [](const SlotInit&) { return Script{.tokens = demo_ids("word "), .endless = true}; }, {},
        std::chrono::microseconds(500));
    auto streamed = fixture.send(kChat, body(R"("stream":true,)"));
    streamed->wait_for_text(R"("delta":{"content":")");
    fixture.engine().abort_all();
    streamed->wait();
    EXPECT_EQ(read_stream(streamed->body(), true, false).error.find("type")->as_string(),
              "service_unavailable_error");
}

TEST(ResponseStream, ADisconnectCancelsEverySequence) {
    OpenAiFixture fixture(
        [](const SlotInit&) { return Script{.tokens = demo_ids("word "), .endless = true}; }, {},
        std::chrono::microseconds(500));
    auto streamed = fixture.send(kChat, body(R"("stream":true,"n":3,)"));
    streamed->wait_for_text(R"("delta":{"content":")");
    streamed->disconnect();
    fixture.wait_idle();
    EXPECT_FALSE(streamed->answered());
    auto whole = fixture.send(kChat, body(""));
    whole->disconnect();
    fixture.wait_idle();
    EXPECT_FALSE(whole->answered());
}

TEST(ResponseStream, AClientThatDoesNotReadIsCancelled) {
    OpenAiFixture fixture(
        [](const SlotInit&) { return Script{.tokens = demo_ids("word "), .endless = true}; }, {},
        std::chrono::microseconds(500));
    auto streamed = fixture.send(kChat, body(R"("stream":true,)"));
    streamed->stop_reading();
    fixture.wait_idle();
    EXPECT_FALSE(streamed->answered());
}

TEST(ResponseStream, SilenceIsBrokenByPings) {
    OpenAiConfig config;
    config.ping_interval = std::chrono::milliseconds(1);
    OpenAiFixture fixture(say("late"), config, std::chrono::milliseconds(300));
    auto streamed = fixture.send(kChat, body(R"("stream":true,)"));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    streamed->fire_timers();
    streamed->wait();
    const JoinedStream joined = read_stream(streamed->body(), true, false);
    EXPECT_GE(joined.pings, 1);
    EXPECT_EQ(joined.choices.at(0).content, "late");
    streamed->fire_timers();  // too late to do anything
}

// ---------------------------------------------------------------------------------------------------------------
// Prefix reuse

std::string long_text() {
    std::string out;
    for (int i = 0; i < 60; ++i) {
        out += "The goat walked to the market to look for bread. ";
    }
    return out;
}

TEST(ResponseStream, PagesServeOneKeyUnlessShared) {
    OpenAiFixture fixture(say("ok"));
    const std::string request = body(R"("max_tokens":4,)", long_text());
    EXPECT_EQ(cached_of(fixture.ask(kChat, request, "key-a")->json()), 0);
    EXPECT_GT(cached_of(fixture.ask(kChat, request, "key-a")->json()), 0);
    EXPECT_EQ(cached_of(fixture.ask(kChat, request, "key-b")->json()), 0);
    const std::string salted = body(R"("max_tokens":4,"cache_salt":"s",)", long_text());
    EXPECT_EQ(cached_of(fixture.ask(kChat, salted, "key-a")->json()), 0);
    EXPECT_GT(cached_of(fixture.ask(kChat, salted, "key-b")->json()), 0);
    EXPECT_EQ(
        cached_of(fixture.ask(kChat, body(R"("cache_salt":"tenant:key-a",)", long_text()), "x")->json()), 0);
}

// The client sends back what we answered; the prompt of the next turn must begin with the last prompt and
// what the model generated, so that every complete page of both is found: 64 * floor((prompt + output - 1) /
// 64) tokens. (The last token of the output, EOS, is never computed, hence the minus one.)
TEST(ResponseStream, AThreeTurnChatWithToolsReusesItsPages) {
    std::string output;
    std::vector<TokenId> prompt;
    OpenAiFixture fixture([&](const SlotInit& init) {
        prompt = init.prompt;
        return Script{.tokens = demo_ids(output)};
    });
    json::Value messages = json::Value::array();
    const auto add = [&](const std::string& text) { messages.push_back(json::parse(text).take()); };
    add(R"({"role":"system","content":")" + long_text() + "\"}");
    const std::vector<std::string> outputs = {
        "The user asks for weather, so I call." + tokens().think_end + "Looking.\n" +
            calls_text({"Lisbon", "a, \"b\""}),
        "One more call is needed." + tokens().think_end + calls_text({"Porto"}),
        "Done." + tokens().think_end + "It is sunny in both."};
    std::vector<TokenId> before;
    for (size_t turn = 0; turn < outputs.size(); ++turn) {
        output = outputs[turn];
        add(turn == 1 ? R"({"role":"tool","tool_call_id":"x","content":"sunny"})"
                      : R"({"role":"user","content":"What is the weather in Lisbon and Porto?"})");
        json::Value request = json::parse("{" + std::string(kTools) + R"("reasoning_effort":"low"})").take();
        request.set("messages", messages);
        const json::Value answer = fixture.ask(kChat, json::dump(request))->json();
        ASSERT_NE(answer.find("choices"), nullptr) << json::dump(answer);
        ASSERT_GE(prompt.size(), before.size());
        EXPECT_TRUE(std::equal(before.begin(), before.end(), prompt.begin())) << "turn " << turn;
        const auto reusable = static_cast<int64_t>(before.empty() ? 0 : (before.size() - 1) / 64 * 64);
        EXPECT_EQ(cached_of(answer), reusable) << "turn " << turn;
        messages.push_back(*answer.find("choices")->items().front().find("message"));
        before = prompt;
        const std::vector<TokenId> generated = demo_ids(output);
        before.insert(before.end(), generated.begin(), generated.end());
        before.push_back(kDemoEos);
    }
}

// Without tools the format drops the reasoning of earlier turns, so only the previous prompt is found again.
TEST(ResponseStream, AChatWithoutToolsReusesThePreviousPrompt) {
    std::vector<TokenId> prompt;
    OpenAiFixture fixture([&](const SlotInit& init) {
        prompt = init.prompt;
        return Script{.tokens = demo_ids("Hm." + tokens().think_end + "Yes.")};
    });
    const std::string user = R"({"role":"user","content":")" + long_text() + "\"}";
    const std::string effort = R"("reasoning_effort":"high"})";
    const json::Value first = fixture.ask(kChat, R"({"messages":[)" + user + "]," + effort)->json();
    const size_t first_prompt = prompt.size();
    const std::string reply = json::dump(*first.find("choices")->items().front().find("message"));
    const json::Value second = fixture
                                   .ask(kChat, R"({"messages":[)" + user + "," + reply +
                                                   R"(,{"role":"user","content":"Why?"}],)" + effort)
                                   ->json();
    EXPECT_GE(cached_of(second), static_cast<int64_t>(first_prompt / 64 * 64));
}

}  // namespace
}  // namespace tessera
