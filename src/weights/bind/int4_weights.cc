#include "weights/int4_weights.h"

#include <bit>
#include <cstring>

#include "base/check.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little);

// Byte b of a row's codes holds columns 2 b and 2 b + 1, as byte b % 4 of word b / 4 does.
void words_down(const std::byte* words, const Int4Rows& args) {
    const int64_t cols = args.linear->weight.cols;
    for (int64_t w = 0; w < cols / 8; ++w) {
        const std::byte* from = words + (w * args.linear->weight.rows + args.first) * 4;
        for (int64_t r = 0; r < args.rows; ++r) {
            uint32_t word = 0;
            std::memcpy(&word, from + 4 * r, 4);
            word ^= 0x88888888u;
            std::memcpy(args.codes + r * (cols / 2) + 4 * w, &word, 4);
        }
    }
}

void row_pairs(const std::byte* pairs, const Int4Rows& args) {
    const int64_t cols = args.linear->weight.cols;
    for (int64_t r = 0; r < args.rows; ++r) {
        const int64_t row = args.first + r;
        const auto* from = reinterpret_cast<const uint8_t*>(pairs + row / 2 * cols);
        const int shift = row % 2 == 0 ? 0 : 4;
        for (int64_t b = 0; b < cols / 2; ++b) {
            const int low = from[2 * b] >> shift & 15;
            const int high = from[2 * b + 1] >> shift & 15;
            args.codes[r * (cols / 2) + b] = static_cast<uint8_t>(low | high << 4);
        }
    }
}

void read_scales(const Int4Rows& args) {
    const Int4Form& form = *args.linear->int4;
    const int64_t groups = args.linear->weight.cols / kInt4Group;
    const auto* from = static_cast<const std::byte*>(form.scales);
    if (form.layout != Int4Layout::kWordsDown) {
        std::memcpy(args.scales, from + args.first * groups * 2, static_cast<size_t>(args.rows * groups) * 2);
        return;
    }
    for (int64_t g = 0; g < groups; ++g) {
        for (int64_t r = 0; r < args.rows; ++r) {
            std::memcpy(args.scales + r * groups + g,
                        from + (g * args.linear->weight.rows + args.first + r) * 2, 2);
        }
    }
}

}  // namespace

void int4_rows(const Int4Rows& args) {
    const WeightView& weight = args.linear->weight;
    check(args.linear->int4.has_value() && args.first >= 0 && args.first + args.rows <= weight.rows,
          "int4_rows: rows of an int4 weight");
    const auto* data = static_cast<const std::byte*>(weight.data);
    const int64_t row_bytes = weight.cols / 2;
    switch (args.linear->int4->layout) {
        case Int4Layout::kBytes:
        case Int4Layout::kOffsetBytes: {
            const int64_t bytes = args.rows * row_bytes;
            std::memcpy(args.codes, data + args.first * row_bytes, static_cast<size_t>(bytes));
            if (args.linear->int4->layout == Int4Layout::kOffsetBytes) {
                for (int64_t i = 0; i < bytes; ++i) {
                    args.codes[i] ^= 0x88;
                }
            }
            break;
        }
        case Int4Layout::kWordsDown:
            words_down(data, args);
            break;
        case Int4Layout::kRowPairs:
            row_pairs(data, args);
            break;
    }
    if (args.scales != nullptr) {
        read_scales(args);
    }
}

}  // namespace tessera
