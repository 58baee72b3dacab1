// The safetensors format: 8 bytes of header length (little endian), a JSON header, then the tensors' bytes
// without gaps. Reading the header is a pure function on bytes, strict where a lenient reader would take a
// corrupt or hostile file for a good one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"

namespace tessera {

inline constexpr uint64_t kSafetensorsHeaderMax = 100'000'000;  // bytes; the format's own limit

struct TensorEntry {
    std::string name;
    std::string dtype;  // as the file spells it: "BF16"
    std::vector<int64_t> shape;
    uint64_t offset = 0;  // from the first byte of the file
    uint64_t bytes = 0;
};

// The entries in order of their offsets. Every entry lies inside `file`, none overlap, together they cover
// all bytes after the header, and the size of each is its shape times its element size (where the dtype is
// known).
Result<std::vector<TensorEntry>> parse_safetensors(std::span<const std::byte> file,
                                                   const std::string& file_name);

// The element type of a weight that can be computed with; none for the others that the format knows.
std::optional<DType> weight_dtype(std::string_view dtype);

// "[2, 3]", for messages.
std::string shape_text(std::span<const int64_t> shape);

}  // namespace tessera
