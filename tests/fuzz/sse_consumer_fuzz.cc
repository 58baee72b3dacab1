// The consumer of server-sent events (the load test's): the first byte is a stride, the rest is what a server
// sends. Any bytes give figures or an error, the same for every way of cutting them.
#include <algorithm>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "load_stream.h"

namespace {

using namespace tessera;

LoadResult consume(std::string_view bytes, size_t stride) {
    LoadResult result;
    LoadStream stream(result);
    for (size_t at = 0; at < bytes.size(); at += stride) {
        stream.feed(bytes.substr(at, stride), 5);
    }
    stream.end(9);
    check(!result.error.empty() || stream.done(), "a stream without [DONE] is an error");
    return result;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) {
        return 0;
    }
    const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
    const LoadResult whole = consume(bytes, std::max<size_t>(1, bytes.size()));
    for (const size_t stride : {size_t{1}, size_t{data[0]} + 1}) {
        const LoadResult cut = consume(bytes, stride);
        check(cut.error == whole.error && cut.gaps == whole.gaps && cut.first == whole.first &&
                  cut.finished == whole.finished && cut.output_tokens == whole.output_tokens &&
                  cut.prompt_tokens == whole.prompt_tokens && cut.cached_tokens == whole.cached_tokens,
              "the cuts do not show in the result");
    }
    return 0;
}
