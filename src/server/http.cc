#include "server/http.h"

namespace tessera {

std::string_view HttpRequest::header(std::string_view lower_case_name) const {
    for (const auto& [name, value] : headers) {
        if (name == lower_case_name) {
            return value;
        }
    }
    return {};
}

}  // namespace tessera
