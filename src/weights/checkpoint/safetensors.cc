#include "weights/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unordered_set>

#include "base/json.h"

namespace tessera {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr int kDepthMax = 4;
constexpr size_t kRankMax = 8;
// A parsed JSON value takes about a hundred bytes, so a header of 100 MB made of commas would take gigabytes.
// The largest honest header (a 295B FP8 model's 140,000 tensors in one file) has 1.3 million values.
constexpr size_t kValuesMax = 3'000'000;

struct DTypeBits {
    std::string_view name;
    uint64_t bits;
};
constexpr std::array kDTypes = std::to_array<DTypeBits>({
    {"BF16", 16},   {"F16", 16},    {"F32", 32},        {"F64", 64},        {"F8_E4M3", 8}, {"F8_E5M2", 8},
    {"F8_E8M0", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"F4", 4},          {"BOOL", 8},    {"I8", 8},
    {"U8", 8},      {"I16", 16},    {"U16", 16},        {"I32", 32},        {"U32", 32},    {"I64", 64},
    {"U64", 64},    {"C64", 64},    {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
});

uint64_t dtype_bits(std::string_view name) {
    const auto* found = std::ranges::find(kDTypes, name, &DTypeBits::name);
    return found == kDTypes.end() ? 0 : found->bits;
}

// What the header's text holds, counted without building anything. Meaningful for well-formed JSON only.
struct HeaderCounts {
    size_t values = 0;                       // at most this many JSON values
    std::vector<std::string_view> top_keys;  // raw text of the keys at depth 1, escapes kept
};

HeaderCounts count_header(std::string_view text) {
    HeaderCounts counts;
    int depth = 0;
    std::string_view last_string;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (c == '"') {
            const size_t begin = ++i;
            while (i < text.size() && text[i] != '"') {
                i += text[i] == '\\' ? 2 : 1;
            }
            last_string = text.substr(begin, std::min(i, text.size()) - begin);
        } else if (c == '{' || c == '[') {
            ++depth;
            ++counts.values;
        } else if (c == '}' || c == ']') {
            --depth;
        } else if (c == ',') {
            ++counts.values;
        } else if (c == ':' && depth == 1 && counts.top_keys.size() < kValuesMax) {
            counts.top_keys.push_back(last_string);
        }
    }
    return counts;
}

// json::parse keeps the last of two equal keys; a header that names a tensor twice is refused instead.
Status check_repeated_keys(const HeaderCounts& counts, const json::Value& header, const std::string& file) {
    if (counts.top_keys.size() == header.members().size()) {
        return {};
    }
    std::unordered_set<std::string_view> seen;
    for (std::string_view key : counts.top_keys) {
        if (!seen.insert(key).second) {
            return data_loss(fmt::format("{}: tensor {} stands twice in the header", file, key));
        }
    }
    return data_loss(fmt::format("{}: the header holds a key twice", file));
}

Result<json::Value> parse_header_json(std::string_view text, const std::string& file) {
    const HeaderCounts counts = count_header(text);
    if (counts.values > kValuesMax) {
        return data_loss(fmt::format("{}: the header holds {} JSON values; at most {} are read", file,
                                     counts.values, kValuesMax));
    }
    Result<json::Value> header = json::parse(text, {.depth_max = kDepthMax});
    if (!header.ok()) {
        return data_loss(fmt::format("{}: bad safetensors header: {}", file, header.status().message()));
    }
    if (!header->is_object()) {
        return data_loss(fmt::format("{}: bad safetensors header: it must be a JSON object", file));
    }
    if (Status status = check_repeated_keys(counts, *header, file); !status.ok()) {
        return status;
    }
    return header;
}

// The shape's element count; none when it is no list of sizes or the product leaves 63 bits.
std::optional<uint64_t> read_shape(const json::Value* value, std::vector<int64_t>& shape) {
    if (value == nullptr || !value->is_array() || value->items().size() > kRankMax) {
        return std::nullopt;
    }
    uint64_t elements = 1;
    for (const json::Value& item : value->items()) {
        const std::optional<int64_t> extent = item.as_int64();
        if (!extent || *extent < 0) {
            return std::nullopt;
        }
        shape.push_back(*extent);
        if (*extent != 0 && elements > static_cast<uint64_t>(INT64_MAX) / static_cast<uint64_t>(*extent)) {
            return std::nullopt;
        }
        elements *= static_cast<uint64_t>(*extent);
    }
    return elements;
}

struct OffsetPair {
    uint64_t begin = 0;
    uint64_t end = 0;
};

std::optional<OffsetPair> read_offsets(const json::Value* value) {
    if (value == nullptr || !value->is_array() || value->items().size() != 2) {
        return std::nullopt;
    }
    const std::optional<int64_t> begin = value->items()[0].as_int64();
    const std::optional<int64_t> end = value->items()[1].as_int64();
    if (!begin || !end || *begin < 0 || *end < *begin) {
        return std::nullopt;
    }
    return OffsetPair{static_cast<uint64_t>(*begin), static_cast<uint64_t>(*end)};
}

// `offset` of the result is still relative to the data section.
Result<TensorEntry> read_entry(const json::Member& member, const std::string& file) {
    const auto& [name, value] = member;
    const auto wrong = [&, &tensor = name](std::string_view what) {
        return data_loss(fmt::format("{}: tensor {}: {}", file, tensor, what));
    };
    const json::Value* dtype = value.find("dtype");
    if (dtype == nullptr || !dtype->is_string()) {
        return wrong("its header entry has no dtype");
    }
    TensorEntry entry;
    entry.name = name;
    entry.dtype = dtype->as_string();
    const std::optional<uint64_t> elements = read_shape(value.find("shape"), entry.shape);
    if (!elements) {
        return wrong(
            fmt::format("its shape must be a list of at most {} sizes with a product below 2^63", kRankMax));
    }
    const std::optional<OffsetPair> offsets = read_offsets(value.find("data_offsets"));
    if (!offsets) {
        return wrong("its data_offsets must be [begin, end] with 0 <= begin <= end < 2^63");
    }
    entry.offset = offsets->begin;
    entry.bytes = offsets->end - offsets->begin;
    const uint64_t bits = dtype_bits(entry.dtype);
    if (bits == 0) {
        return entry;  // an unknown type: refused later, if the tensor is needed
    }
    if (*elements > static_cast<uint64_t>(INT64_MAX) / bits || *elements * bits != entry.bytes * 8) {
        return wrong(fmt::format("shape {} of {} does not fill its {} bytes", shape_text(entry.shape),
                                 entry.dtype, entry.bytes));
    }
    return entry;
}

// Sorts by place and requires that the entries cover [0, data_bytes) exactly.
Status check_cover(std::vector<TensorEntry>& entries, uint64_t data_bytes, const std::string& file) {
    std::ranges::sort(entries, [](const TensorEntry& a, const TensorEntry& b) {
        return a.offset != b.offset ? a.offset < b.offset : a.bytes < b.bytes;
    });
    uint64_t end = 0;
    for (const TensorEntry& entry : entries) {
        if (entry.offset < end) {
            return data_loss(fmt::format("{}: tensor {}: its bytes overlap those of the tensor before it",
                                         file, entry.name));
        }
        if (entry.offset > end) {
            return data_loss(
                fmt::format("{}: tensor {}: a gap of {} bytes lies before it; the format allows none", file,
                            entry.name, entry.offset - end));
        }
        if (entry.bytes > data_bytes - end) {
            return data_loss(
                fmt::format("{}: truncated: tensor {} ends at byte {} of the data, of which there are {}",
                            file, entry.name, entry.offset + entry.bytes, data_bytes));
        }
        end += entry.bytes;
    }
    if (end != data_bytes) {
        return data_loss(fmt::format("{}: {} bytes after the last tensor belong to none; the file is damaged",
                                     file, data_bytes - end));
    }
    return {};
}

}  // namespace

std::optional<DType> weight_dtype(std::string_view dtype) {
    if (dtype == "BF16") {
        return DType::kBFloat16;
    }
    if (dtype == "F16") {
        return DType::kFloat16;
    }
    if (dtype == "F32") {
        return DType::kFloat32;
    }
    if (dtype == "F8_E4M3") {
        return DType::kFloat8E4M3;
    }
    return std::nullopt;
}

std::string shape_text(std::span<const int64_t> shape) {
    return fmt::format("[{}]", fmt::join(shape, ", "));
}

Result<std::vector<TensorEntry>> parse_safetensors(std::span<const std::byte> file,
                                                   const std::string& file_name) {
    if (file.size() < kLengthBytes) {
        return data_loss(
            fmt::format("{}: {} bytes are too few for a safetensors file", file_name, file.size()));
    }
    uint64_t length = 0;
    for (size_t i = 0; i < kLengthBytes; ++i) {
        length |= static_cast<uint64_t>(file[i]) << (8 * i);
    }
    if (length > kSafetensorsHeaderMax) {
        return data_loss(
            fmt::format("{}: the header length is {} bytes; at most {} are allowed (is this a safetensors "
                        "file?)",
                        file_name, length, kSafetensorsHeaderMax));
    }
    if (length > file.size() - kLengthBytes) {
        return data_loss(fmt::format("{}: truncated: the header is {} bytes long, the file {}", file_name,
                                     length, file.size()));
    }
    const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, length);
    const Result<json::Value> header = parse_header_json(text, file_name);
    if (!header.ok()) {
        return header.status();
    }
    std::vector<TensorEntry> entries;
    for (const json::Member& member : header->members()) {
        if (member.first == "__metadata__") {
            continue;  // free text of the writer
        }
        Result<TensorEntry> entry = read_entry(member, file_name);
        if (!entry.ok()) {
            return entry.status();
        }
        entries.push_back(entry.take());
    }
    const uint64_t data_begin = kLengthBytes + length;
    if (Status status = check_cover(entries, file.size() - data_begin, file_name); !status.ok()) {
        return status;
    }
    for (TensorEntry& entry : entries) {
        entry.offset += data_begin;
    }
    return entries;
}

}  // namespace tessera
