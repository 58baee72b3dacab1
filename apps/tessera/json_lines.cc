#include "json_lines.h"

#include <cstdio>
#include <iostream>
#include <string>

namespace tessera {

bool answer_json_lines(const std::function<Result<json::Value>(const json::Value&)>& answer) {
    std::ios::sync_with_stdio(false);
    std::string line;
    while (std::getline(std::cin, line)) {
        if (line.find_first_not_of(" \t\r") == std::string::npos) {
            continue;
        }
        Result<json::Value> given = json::parse(line);
        if (given.ok() && !given->is_object()) {
            given = invalid_argument("the line must be a JSON object");
        }
        Result<json::Value> result = given.ok() ? answer(*given) : given;
        if (!result.ok()) {
            result = json::Value::object({{"error", result.status().message()}});
        }
        std::cout << json::dump(*result) << '\n';
        if (std::cin.rdbuf()->in_avail() <= 0) {  // the other side may wait for this line before it writes on
            std::cout.flush();
        }
    }
    return static_cast<bool>(std::cout.flush());
}

}  // namespace tessera
