// tokenizer.json: any bytes give a tokenizer or an error. What loads must give back the text that it encodes.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "base/utf8.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace tessera;
    const std::string_view file(reinterpret_cast<const char*>(data), size);
    const Result<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::parse(file, "{}");
    if (!tokenizer.ok()) {
        check(!tokenizer.status().message().empty(), "an error says what is wrong");
        return 0;
    }
    // The file's own tail is a text that meets its added tokens and patterns.
    for (const std::string_view text :
         {std::string_view("Hello,  w\u00f6rld 123\n<think>"), file.substr(size - size / 4)}) {
        const Result<std::vector<TokenId>> ids = (*tokenizer)->encode(text);
        if (!ids.ok()) {
            continue;
        }
        Detokenizer detokenizer(**tokenizer, false);
        std::string shown;
        for (const TokenId id : *ids) {
            check(id >= 0 && id < (*tokenizer)->size(), "ids are the tokenizer's own");
            shown += detokenizer.push(id);
        }
        shown += detokenizer.flush();
        check(shown == (*tokenizer)->decode(*ids, false), "token by token as at once");
    }
    return 0;
}
