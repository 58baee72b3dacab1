// The load generator's reader of server-sent events, fed any bytes whole and in two pieces: the same answer.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "load_stream.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace tessera;
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    LoadResult whole;
    LoadStream whole_stream(whole);
    whole_stream.feed(text, 1);
    whole_stream.end(2);
    const size_t cut = size == 0 ? 0 : data[0] % size;
    LoadResult pieces;
    LoadStream pieces_stream(pieces);
    pieces_stream.feed(text.substr(0, cut), 1);
    pieces_stream.feed(text.substr(cut), 1);
    pieces_stream.end(2);
    check(whole.error == pieces.error, "the cut changes the error");
    check(whole.output_tokens == pieces.output_tokens, "the cut changes the outputs");
    check(whole_stream.done() == pieces_stream.done(), "the cut changes the end");
    return 0;
}
