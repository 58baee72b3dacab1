// The HTTP client of the load test: sends requests at given times, over one thread and one connection a
// request.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "load_stream.h"

namespace tessera {

// http://HOST:PORT/PREFIX
struct LoadTarget {
    std::string host = "127.0.0.1";
    std::string port = "8000";
    std::string prefix;   // before "/v1/...": empty, or "/something"
    std::string api_key;  // empty: no Authorization header
};

Result<LoadTarget> parse_base_url(const std::string& url);

struct LoadPlan {
    LoadTarget target;
    std::string path;                         // "/v1/completions"
    std::vector<TimeNs> arrivals;             // of request i, after the start, ascending
    std::function<std::string(size_t)> body;  // of request i; called when it is sent
    int64_t concurrency_max = 0;              // 0 = no limit; a request that would go over it waits
    double timeout_s = 600;                   // of one request
    std::function<void(size_t done, size_t running)> progress;  // after each request; may be empty
};

struct LoadOutcome {
    std::vector<LoadResult> results;  // of request i
    double duration_s = 0;            // from the first arrival to the last answer
    int64_t concurrency_peak = 0;
};

LoadOutcome run_load(const LoadPlan& plan);
// The body of a 200 answer.
Result<std::string> http_get(const LoadTarget& target, const std::string& path);

}  // namespace tessera
