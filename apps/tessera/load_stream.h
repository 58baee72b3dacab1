// What a load test takes from one streamed answer. Pure: bytes and times in, figures out.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"

namespace tessera {

struct LoadResult {
    std::string error;  // empty: the request was answered whole
    TimeNs sent = 0;
    TimeNs first = 0;          // when the first output came
    TimeNs finished = 0;       // when the answer was complete
    std::vector<TimeNs> gaps;  // between streamed outputs
    int64_t prompt_tokens = 0;
    int64_t cached_tokens = 0;
    int64_t output_tokens = 0;  // from the answer's usage; the number of outputs when it gives none
};

// Reads the server-sent events of a chat or text completion. Feed bytes as they come, in any pieces.
class LoadStream {
  public:
    explicit LoadStream(LoadResult& result) : result_(result) {}

    void feed(std::string_view bytes, TimeNs now);
    // The body has ended. Sets an error unless the stream ended by its contract.
    void end(TimeNs now);
    bool done() const { return done_; }

  private:
    void take_line(std::string_view line, TimeNs now);
    void take_event(std::string_view json_text, TimeNs now);
    void take_output(TimeNs now);

    LoadResult& result_;
    std::string line_;
    TimeNs last_ = 0;
    int64_t outputs_ = 0;
    bool finish_seen_ = false;
    bool usage_seen_ = false;
    bool done_ = false;
};

}  // namespace tessera
