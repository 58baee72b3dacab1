// Every field of the API with what is wrong: each must be refused with a 4xx that names the field.
#include "server/openai/chat_request.h"
#include "server/openai/completion_request.h"
#include "server/openai/openai_test_support.h"

namespace tessera {
namespace {

OpenAiConfig config() {
    return OpenAiFixture::service_config({});
}

json::Value parse(const std::string& text) {
    auto parsed = json::parse(text);
    EXPECT_TRUE(parsed.ok()) << text;
    return parsed.ok() ? parsed.take() : json::Value::object();
}

std::string chat_body(const std::string& field) {
    return R"({"model":"demo","messages":[{"role":"user","content":"hi"}])" +
           (field.empty() ? "" : "," + field) + "}";
}

std::optional<ApiError> chat_error(const std::string& body) {
    ChatRequest out;
    return parse_chat_request(parse(body), config(), out);
}

std::optional<ApiError> completion_error(const std::string& body) {
    CompletionRequest out;
    return parse_completion_request(parse(body), config(), out);
}

ChatRequest valid_chat(const std::string& body) {
    ChatRequest out;
    const auto error = parse_chat_request(parse(body), config(), out);
    EXPECT_FALSE(error) << body << ": " << error->message;
    return out;
}

struct BadField {
    const char* field;  // a member of the body
    const char* param;  // what the error must name
};

// Types wrong, out of range, huge, empty, unknown enum, ids outside the vocabulary.
constexpr BadField kBadCommon[] = {
    {R"("model":7)", "model"},
    {R"("model":"nobody")", "model"},
    {R"("model":"")", "model"},
    {R"("temperature":"hot")", "temperature"},
    {R"("temperature":true)", "temperature"},
    {R"("temperature":-0.1)", "temperature"},
    {R"("temperature":2.01)", "temperature"},
    {R"("temperature":1e300)", "temperature"},
    {R"("temperature":[])", "temperature"},
    {R"("temperature":99999999999999999999999999)", "temperature"},
    {R"("top_p":0)", "top_p"},
    {R"("top_p":1.5)", "top_p"},
    {R"("top_p":"1")", "top_p"},
    {R"("top_k":-2)", "top_k"},
    {R"("top_k":1.5)", "top_k"},
    {R"("top_k":99999999999)", "top_k"},
    {R"("top_k":"5")", "top_k"},
    {R"("min_p":-0.5)", "min_p"},
    {R"("min_p":1.01)", "min_p"},
    {R"("min_p":{})", "min_p"},
    {R"("repetition_penalty":0)", "repetition_penalty"},
    {R"("repetition_penalty":1e-300)", "repetition_penalty"},
    {R"("repetition_penalty":2.5)", "repetition_penalty"},
    {R"("repetition_penalty":"x")", "repetition_penalty"},
    {R"("presence_penalty":-2.1)", "presence_penalty"},
    {R"("presence_penalty":3)", "presence_penalty"},
    {R"("presence_penalty":"")", "presence_penalty"},
    {R"("frequency_penalty":2.1)", "frequency_penalty"},
    {R"("frequency_penalty":-1e9)", "frequency_penalty"},
    {R"("frequency_penalty":false)", "frequency_penalty"},
    {R"("logit_bias":[])", "logit_bias"},
    {R"("logit_bias":"x")", "logit_bias"},
    {R"("logit_bias":{"4096":1})", "logit_bias"},
    {R"("logit_bias":{"-1":1})", "logit_bias"},
    {R"("logit_bias":{"one":1})", "logit_bias"},
    {R"("logit_bias":{"":1})", "logit_bias"},
    {R"("logit_bias":{"1 ":1})", "logit_bias"},
    {R"("logit_bias":{"99999999999999":1})", "logit_bias"},
    {R"("logit_bias":{"1":101})", "logit_bias"},
    {R"("logit_bias":{"1":"x"})", "logit_bias"},
    {R"("logit_bias":{"1":null})", "logit_bias"},
    {R"("seed":1.5)", "seed"},
    {R"("seed":"1")", "seed"},
    {R"("seed":9223372036854775808)", "seed"},
    {R"("stop":5)", "stop"},
    {R"("stop":"")", "stop"},
    {R"("stop":[""])", "stop"},
    {R"("stop":[1])", "stop"},
    {R"("stop":{})", "stop"},
    {R"("stop":["a","b","c","d","e","f","g","h","i","j","k","l","m","n","o","p","q"])", "stop"},
    {R"("stop_token_ids":7)", "stop_token_ids"},
    {R"("stop_token_ids":[4096])", "stop_token_ids[0]"},
    {R"("stop_token_ids":[1,-1])", "stop_token_ids[1]"},
    {R"("stop_token_ids":["1"])", "stop_token_ids[0]"},
    {R"("stop_token_ids":[1.5])", "stop_token_ids[0]"},
    {R"("include_stop_str_in_output":1)", "include_stop_str_in_output"},
    {R"("skip_special_tokens":"no")", "skip_special_tokens"},
    {R"("spaces_between_special_tokens":1)", "spaces_between_special_tokens"},
    {R"("ignore_eos":"true")", "ignore_eos"},
    {R"("min_tokens":-1)", "min_tokens"},
    {R"("min_tokens":2049)", "min_tokens"},
    {R"("min_tokens":5,"max_tokens":4)", "min_tokens"},
    {R"("max_tokens":0)", "max_tokens"},
    {R"("max_tokens":-5)", "max_tokens"},
    {R"("max_tokens":1.25)", "max_tokens"},
    {R"("max_tokens":"10")", "max_tokens"},
    {R"("max_tokens":1e40)", "max_tokens"},
    {R"("max_completion_tokens":0)", "max_completion_tokens"},
    {R"("max_completion_tokens":[])", "max_completion_tokens"},
    {R"("n":0)", "n"},
    {R"("n":129)", "n"},
    {R"("n":1.5)", "n"},
    {R"("n":"2")", "n"},
    {R"("best_of":2)", "best_of"},
    {R"("best_of":"x")", "best_of"},
    {R"("use_beam_search":true)", "use_beam_search"},
    {R"("length_penalty":0.5)", "length_penalty"},
    {R"("stream":"true")", "stream"},
    {R"("stream":1)", "stream"},
    {R"("stream":true,"stream_options":[])", "stream_options"},
    {R"("stream":true,"stream_options":{"include_usage":1})", "stream_options.include_usage"},
    {R"("stream":true,"stream_options":{"continuous_usage_stats":"x"})",
     "stream_options.continuous_usage_stats"},
    {R"("stream_options":{"include_usage":true})", "stream_options"},
    {R"("return_token_ids":0)", "return_token_ids"},
    {R"("priority":"high")", "priority"},
    {R"("priority":3000000000)", "priority"},
    {R"("cache_salt":"")", "cache_salt"},
    {R"("cache_salt":5)", "cache_salt"},
    {R"("request_id":"")", "request_id"},
    {R"("request_id":"two words")", "request_id"},
    {R"("request_id":"new\nline")", "request_id"},
    {R"("request_id":5)", "request_id"},
    {R"("response_format":"json")", "response_format"},
    {R"("response_format":{"type":"json_object"})", "response_format"},
    {R"("response_format":{"type":"json_schema","json_schema":{}})", "response_format"},
    {R"("response_format":{"type":"xml"})", "response_format.type"},
    {R"("response_format":{})", "response_format.type"},
    {R"("guided_json":{"type":"object"})", "guided_json"},
    {R"("grammar":"root ::= \"a\"")", "grammar"},
    {R"("regex":"[0-9]+")", "regex"},
    {R"("n_predict":5)", "n_predict"},
    {R"("return_tokens_as_token_ids":true)", "return_tokens_as_token_ids"},
    {R"("structured_outputs":{"choice":["a"]})", "structured_outputs"},
    {R"("echo":true)", "echo"},
    {R"("prompt_logprobs":1)", "prompt_logprobs"},
    {R"("bad_words":["x"])", "bad_words"},
    {R"("truncate_prompt_tokens":5)", "truncate_prompt_tokens"},
};

constexpr BadField kBadChat[] = {
    {R"("logprobs":1)", "logprobs"},
    {R"("top_logprobs":3)", "top_logprobs"},
    {R"("logprobs":true,"top_logprobs":21)", "top_logprobs"},
    {R"("logprobs":true,"top_logprobs":-1)", "top_logprobs"},
    {R"("logprobs":true,"top_logprobs":"x")", "top_logprobs"},
    {R"("reasoning_effort":"extreme")", "reasoning_effort"},
    {R"("reasoning_effort":"")", "reasoning_effort"},
    {R"("include_reasoning":false)", "include_reasoning"},
    {R"("reasoning_effort":3)", "reasoning_effort"},
    {R"("chat_template_kwargs":[])", "chat_template_kwargs"},
    {R"("chat_template_kwargs":{"reasoning_effort":"max"})", "chat_template_kwargs.reasoning_effort"},
    {R"("chat_template_kwargs":{"reasoning_effort":null})", "chat_template_kwargs.reasoning_effort"},
    {R"("chat_template_kwargs":{"messages":[]})", "chat_template_kwargs.messages"},
    {R"("chat_template":"{{x}}")", "chat_template"},
    {R"("add_generation_prompt":"x")", "add_generation_prompt"},
    {R"("continue_final_message":1)", "continue_final_message"},
    {R"("continue_final_message":true)", "continue_final_message"},
    {R"("tools":{})", "tools"},
    {R"("tools":[7])", "tools[0]"},
    {R"("tools":[{}])", "tools[0].type"},
    {R"("tools":[{"type":"code"}])", "tools[0].type"},
    {R"("tools":[{"type":"function"}])", "tools[0].function"},
    {R"("tools":[{"type":"function","function":{}}])", "tools[0].function.name"},
    {R"("tools":[{"type":"function","function":{"name":""}}])", "tools[0].function.name"},
    {R"("tools":[{"type":"function","function":{"name":"a b"}}])", "tools[0].function.name"},
    {R"("tools":[{"type":"function","function":{"name":5}}])", "tools[0].function.name"},
    {R"("tools":[{"type":"function","function":{"name":"f","parameters":[]}}])",
     "tools[0].function.parameters"},
    {R"("tools":[{"type":"function","function":{"name":"f","description":1}}])",
     "tools[0].function.description"},
    {R"("tools":[{"type":"function","function":{"name":"f","strict":1}}])", "tools[0].function.strict"},
    {R"("tool_choice":"required")", "tool_choice"},
    {R"("tool_choice":"always")", "tool_choice"},
    {R"("tool_choice":5)", "tool_choice"},
    {R"("tool_choice":{})", "tool_choice.type"},
    {R"("tool_choice":{"type":"function"})", "tool_choice.function.name"},
    {R"("tool_choice":{"type":"function","function":{"name":"f"}})", "tool_choice"},
    {R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function","function":{"name":"g"}})",
     "tool_choice.function.name"},
    {R"("parallel_tool_calls":"no")", "parallel_tool_calls"},
    {R"("functions":[{"name":"f"}])", "functions"},
    {R"("function_call":"auto")", "function_call"},
    {R"("audio":{"voice":"x"})", "audio"},
    {R"("modalities":["text","audio"])", "modalities"},
    {R"("modalities":"text")", "modalities"},
    {R"("web_search_options":{})", "web_search_options"},
    {R"("prediction":{"type":"content"})", "prediction"},
    {R"("documents":[{}])", "documents"},
    {R"("messages":null)", "messages"},
    {R"("messages":[])", "messages"},
    {R"("messages":"hi")", "messages"},
    {R"("messages":[5])", "messages[0]"},
    {R"("messages":[{}])", "messages[0].role"},
    {R"("messages":[{"role":"robot","content":"x"}])", "messages[0].role"},
    {R"("messages":[{"role":5,"content":"x"}])", "messages[0].role"},
    {R"("messages":[{"role":"user"}])", "messages[0].content"},
    {R"("messages":[{"role":"user","content":5}])", "messages[0].content"},
    {R"("messages":[{"role":"user","content":{}}])", "messages[0].content"},
    {R"("messages":[{"role":"user","content":[5]}])", "messages[0].content[0]"},
    {R"("messages":[{"role":"user","content":[{}]}])", "messages[0].content[0]"},
    {R"("messages":[{"role":"user","content":[{"type":"text"}]}])", "messages[0].content[0].text"},
    {R"("messages":[{"role":"user","content":[{"type":"text","text":5}]}])", "messages[0].content[0].text"},
    {R"("messages":[{"role":"user","content":"a"},{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}])",
     "messages[1].content[0]"},
    {R"("messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"input_audio"}]}])",
     "messages[0].content[1]"},
    {R"("messages":[{"role":"assistant","content":5}])", "messages[0].content"},
    {R"("messages":[{"role":"assistant","reasoning_content":5}])", "messages[0].reasoning_content"},
    {R"("messages":[{"role":"assistant","tool_calls":{}}])", "messages[0].tool_calls"},
    {R"("messages":[{"role":"assistant","tool_calls":[5]}])", "messages[0].tool_calls[0]"},
    {R"("messages":[{"role":"assistant","tool_calls":[{}]}])", "messages[0].tool_calls[0].function"},
    {R"("messages":[{"role":"assistant","tool_calls":[{"type":"code"}]}])", "messages[0].tool_calls[0].type"},
    {R"("messages":[{"role":"assistant","tool_calls":[{"id":5,"function":{"name":"f"}}]}])",
     "messages[0].tool_calls[0].id"},
    {R"("messages":[{"role":"assistant","tool_calls":[{"function":{"name":""}}]}])",
     "messages[0].tool_calls[0].function.name"},
    {R"("messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{}}}]}])",
     "messages[0].tool_calls[0].function.arguments"},
    {R"("messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"[]"}}]}])",
     "messages[0].tool_calls[0].function.arguments"},
    {R"("messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{"}}]}])",
     "messages[0].tool_calls[0].function.arguments"},
    {R"("messages":[{"role":"assistant","function_call":{"name":"f"}}])", "messages[0].function_call"},
    {R"("messages":[{"role":"tool","tool_call_id":"x"}])", "messages[0].content"},
    {R"("messages":[{"role":"tool","content":"x","tool_call_id":5}])", "messages[0].tool_call_id"},
    {R"("messages":[{"role":"user","content":"x","name":5}])", "messages[0].name"},
};

constexpr BadField kBadCompletion[] = {
    {R"("prompt":null)", "prompt"},
    {R"("prompt":5)", "prompt"},
    {R"("prompt":{})", "prompt"},
    {R"("prompt":[])", "prompt"},
    {R"("prompt":[true])", "prompt[0]"},
    {R"("prompt":["a",5])", "prompt[1]"},
    {R"("prompt":[1,"a"])", "prompt[1]"},
    {R"("prompt":[1,4096])", "prompt[1]"},
    {R"("prompt":[-1])", "prompt[0]"},
    {R"("prompt":[1.5])", "prompt[0]"},
    {R"("prompt":[[1],"a"])", "prompt[1]"},
    {R"("prompt":[[1],[9999]])", "prompt[1][0]"},
    {R"("prompt":[[99999999999999999999]])", "prompt[0][0]"},
    {R"("prompt":["a","b","c"],"n":100)", "n"},
    {R"("suffix":"x")", "suffix"},
    {R"("suffix":5)", "suffix"},
    {R"("logprobs":21)", "logprobs"},
    {R"("logprobs":-1)", "logprobs"},
    {R"("logprobs":true)", "logprobs"},
};

void expect_named(const std::optional<ApiError>& error, const BadField& bad) {
    ASSERT_TRUE(error) << bad.field;
    EXPECT_EQ(error->param, bad.param) << bad.field << ": " << error->message;
    EXPECT_EQ(error->status, error->code == "model_not_found" ? 404 : 400) << bad.field;
    EXPECT_EQ(error->type, "invalid_request_error");
    EXPECT_GT(error->message.size(), 15u) << bad.field;
}

TEST(OpenAiRequests, RefuseEachBadCommonField) {
    for (const BadField& bad : kBadCommon) {
        expect_named(chat_error(chat_body(bad.field)), bad);
        expect_named(completion_error(std::string(R"({"prompt":"x",)") + bad.field + "}"), bad);
    }
}

TEST(OpenAiRequests, RefuseEachBadChatField) {
    for (const BadField& bad : kBadChat) {
        expect_named(chat_error(chat_body(bad.field)), bad);
    }
}

TEST(OpenAiRequests, RefuseEachBadCompletionField) {
    for (const BadField& bad : kBadCompletion) {
        expect_named(completion_error(std::string(R"({"prompt":"x",)") + bad.field + "}"), bad);
    }
    expect_named(completion_error("{}"), {"", "prompt"});
    expect_named(chat_error("{}"), {"", "messages"});
}

TEST(OpenAiRequests, IgnoreWhatOnlyOtherServersUse) {
    valid_chat(
        chat_body(R"("user":"u","store":true,"metadata":{"a":"b"},"service_tier":"auto","unknown":[1],)"
                  R"("safety_identifier":"s","prompt_cache_key":"k","verbosity":"low","modalities":["text"],)"
                  R"("response_format":{"type":"text"},"best_of":1,"echo":false,"functions":null,"tools":[],)"
                  R"("tool_choice":"none","stop":[],"suffix":"")"));
}

TEST(OpenAiRequests, NullIsAbsent) {
    const ChatRequest chat = valid_chat(chat_body(
        R"("model":null,"temperature":null,"top_p":null,"n":null,"stop":null,"logit_bias":null,"seed":null,)"
        R"("max_tokens":null,"stream":null,"stream_options":null,"tools":null,"tool_choice":null,)"
        R"("logprobs":null,"top_logprobs":null,"reasoning_effort":null,"response_format":null)"));
    EXPECT_EQ(chat.common.n, 1);
    EXPECT_FALSE(chat.common.max_tokens);
    EXPECT_FALSE(chat.logprobs);
    EXPECT_EQ(chat.prompt.input.kwargs.find("reasoning_effort"), nullptr);
}

TEST(OpenAiRequests, ReadEveryField) {
    const ChatRequest chat = valid_chat(chat_body(
        R"("temperature":0.5,"top_p":0.9,"top_k":5.0,"min_p":0.1,"repetition_penalty":1.1,"presence_penalty":0.2,)"
        R"("frequency_penalty":-0.2,"logit_bias":{"7":-100,"9":2.5},"seed":-3,"stop":"END","stop_token_ids":[1,2],)"
        R"("include_stop_str_in_output":true,"ignore_eos":true,"min_tokens":2,"max_tokens":5,"n":3,"logprobs":true,)"
        R"("top_logprobs":4,"skip_special_tokens":false,"return_token_ids":true,"priority":-1,"cache_salt":"s",)"
        R"("request_id":"r","stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true})"));
    const SamplingParams& sampling = chat.common.sampling;
    EXPECT_EQ(sampling.temperature, 0.5);
    EXPECT_EQ(sampling.top_p, 0.9);
    EXPECT_EQ(sampling.top_k, 5);
    EXPECT_EQ(sampling.min_p, 0.1);
    EXPECT_EQ(sampling.repetition_penalty, 1.1);
    EXPECT_EQ(sampling.presence_penalty, 0.2);
    EXPECT_EQ(sampling.frequency_penalty, -0.2);
    EXPECT_EQ(sampling.logit_bias, (std::vector<std::pair<TokenId, float>>{{7, -100.0F}, {9, 2.5F}}));
    EXPECT_EQ(sampling.stop_ids, (std::vector<TokenId>{1, 2}));
    EXPECT_TRUE(sampling.ignore_eos);
    EXPECT_EQ(sampling.min_tokens, 2);
    EXPECT_EQ(chat.common.seed, -3);
    EXPECT_EQ(chat.common.stop, std::vector<std::string>{"END"});
    EXPECT_TRUE(chat.common.include_stop && chat.common.return_token_ids && chat.common.continuous_usage);
    EXPECT_FALSE(chat.common.skip_special);
    EXPECT_EQ(chat.common.max_tokens, 5);
    EXPECT_EQ(chat.common.n, 3);
    EXPECT_EQ(chat.common.priority, -1);
    EXPECT_EQ(chat.common.cache_salt, "s");
    EXPECT_EQ(chat.common.request_id, "r");
    EXPECT_EQ(chat.logprobs, 4);
}

TEST(OpenAiRequests, TakeSamplingDefaultsFromTheCheckpoint) {
    OpenAiConfig with_defaults = config();
    with_defaults.defaults = {
        .temperature = 0.9, .top_p = 0.8, .top_k = 40, .min_p = 0.05, .repetition_penalty = 1.2};
    ChatRequest out;
    ASSERT_FALSE(parse_chat_request(parse(chat_body(R"("top_k":-1)")), with_defaults, out));
    EXPECT_EQ(out.common.sampling.temperature, 0.9);
    EXPECT_EQ(out.common.sampling.top_p, 0.8);
    EXPECT_EQ(out.common.sampling.top_k, 0) << "-1 switches it off";
    EXPECT_EQ(out.common.sampling.min_p, 0.05);
    EXPECT_EQ(out.common.sampling.repetition_penalty, 1.2);
}

TEST(OpenAiRequests, MapReasoningEffort) {
    const std::pair<const char*, const char*> kMapped[] = {{"no_think", "no_think"}, {"none", "no_think"},
                                                           {"minimal", "no_think"},  {"low", "low"},
                                                           {"medium", "high"},       {"high", "high"}};
    for (const auto& [given, expected] : kMapped) {
        const std::string text = std::string("\"reasoning_effort\":\"") + given + "\"";
        for (const std::string& field : {text, "\"chat_template_kwargs\":{" + text + "}"}) {
            const ChatRequest chat = valid_chat(chat_body(field));
            EXPECT_EQ(chat.prompt.input.kwargs.find("reasoning_effort")->as_string(), expected) << field;
        }
    }
    const ChatRequest both = valid_chat(chat_body(
        R"("reasoning_effort":"low","chat_template_kwargs":{"reasoning_effort":"high","other":1})"));
    EXPECT_EQ(both.prompt.input.kwargs.find("reasoning_effort")->as_string(), "high");
    EXPECT_NE(both.prompt.input.kwargs.find("other"), nullptr);
}

TEST(OpenAiRequests, NormaliseMessages) {
    const ChatRequest chat = valid_chat(
        R"({"messages":[{"role":"developer","content":[{"type":"text","text":"a"},"b"]},{"role":"user","content":"q","name":"bob"},)"
        R"({"role":"assistant","content":null,"reasoning_content":"r","refusal":null,"audio":null,"annotations":[],)"
        R"("tool_calls":[{"id":"call_1","type":"function","index":0,"function":{"name":"f","arguments":""}}]},)"
        R"({"role":"tool","tool_call_id":"call_1","content":"42"}]})");
    EXPECT_EQ(
        json::dump(chat.prompt.input.messages),
        R"([{"role":"system","content":[{"type":"text","text":"a"},"b"]},{"role":"user","content":"q"},)"
        R"({"role":"assistant","reasoning_content":"r","tool_calls":[{"id":"call_1","type":"function",)"
        R"("function":{"name":"f","arguments":"{}"}}]},{"role":"tool","content":"42","tool_call_id":"call_1"}])");
}

TEST(OpenAiRequests, ReadToolChoices) {
    const std::string tools = R"("tools":[{"type":"function","function":{"name":"get_weather"}}],)";
    EXPECT_EQ(valid_chat(chat_body(tools + R"("tool_choice":"auto")")).tool_choice, ToolChoice::kAuto);
    EXPECT_EQ(valid_chat(chat_body(tools + R"("tool_choice":"none")")).tool_choice, ToolChoice::kNone);
    EXPECT_EQ(valid_chat(chat_body(tools + R"("tool_choice":"required")")).tool_choice,
              ToolChoice::kRequired);
    const ChatRequest named = valid_chat(chat_body(
        tools +
        R"("parallel_tool_calls":false,"tool_choice":{"type":"function","function":{"name":"get_weather"}})"));
    EXPECT_EQ(named.tool_choice, ToolChoice::kNamed);
    EXPECT_EQ(named.tool_name, "get_weather");
    EXPECT_FALSE(named.parallel_tool_calls);
}

TEST(OpenAiRequests, ReadEveryFormOfPrompt) {
    const auto prompts = [](const std::string& prompt) {
        CompletionRequest out;
        EXPECT_FALSE(parse_completion_request(parse(R"({"prompt":)" + prompt + "}"), config(), out))
            << prompt;
        return out.prompts;
    };
    using Ids = std::vector<TokenId>;
    EXPECT_EQ(prompts(R"("hi")"), std::vector<TextOrIds>{"hi"});
    EXPECT_EQ(prompts(R"(["a","b"])"), (std::vector<TextOrIds>{"a", "b"}));
    EXPECT_EQ(prompts("[1,2,3]"), (std::vector<TextOrIds>{Ids{1, 2, 3}}));
    EXPECT_EQ(prompts("[[1],[2,3]]"), (std::vector<TextOrIds>{Ids{1}, Ids{2, 3}}));
}

// Any value in the place of any field gives a request or an error, and never a crash.
TEST(OpenAiRequests, SurviveEveryValueInEveryField) {
    const char* values[] = {"null",
                            "true",
                            "0",
                            "-1",
                            "1.5",
                            "1e308",
                            "123456789012345678901234567890",
                            "\"\"",
                            "\"x\"",
                            "[]",
                            "[[]]",
                            "[{}]",
                            "[null]",
                            "{}",
                            "{\"\":null}",
                            "{\"type\":[]}",
                            "{\"function\":5}",
                            "[\"a\",5]",
                            "{\"type\":\"function\",\"function\":null}"};
    std::vector<BadField> fields(std::begin(kBadCommon), std::end(kBadCommon));
    fields.insert(fields.end(), std::begin(kBadChat), std::end(kBadChat));
    fields.insert(fields.end(), std::begin(kBadCompletion), std::end(kBadCompletion));
    int refused = 0;
    for (const BadField& field : fields) {
        const std::string name = std::string(field.field).substr(0, std::string(field.field).find(':') + 1);
        for (const char* value : values) {
            for (const auto& error : {chat_error(chat_body(name + value)),
                                      completion_error(R"({"prompt":[1],)" + name + value + "}")}) {
                refused += error ? 1 : 0;
                if (error) {
                    EXPECT_TRUE(error->status == 400 || error->status == 404) << name << value;
                    EXPECT_FALSE(error->param.empty()) << name << value;
                }
            }
        }
    }
    EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace tessera
