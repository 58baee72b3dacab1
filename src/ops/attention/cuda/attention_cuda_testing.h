// What the tests of attention share: a case with its pages, run on the device and in loops in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "device/cuda/graph.h"
#include "device/cuda/stream.h"
#include "ops/attention/cuda/attention_cuda.h"
#include "ops/common/cuda/device_testing.h"

namespace tessera::attention_testing {

constexpr int64_t kHeadDim = 128;
constexpr int64_t kSlots = 64;

struct Sequence {
    int32_t position;  // < 0: an empty row
    int32_t q_len;
};

struct Shape {
    AttentionCudaShape heads;
    bool fp8;
    int32_t first_slot;
    std::vector<Sequence> sequences;
    bool rising = false;    // each 128 slots' scores lie far above those of the slots after them
    bool scaled = false;    // scales of K for each token and head, of V for each head
    bool peaked = false;    // slots 70 and 530 outweigh all others
    bool partial = false;   // lists leave out a third of the KV tiles
    bool level = false;     // keys are zeros, so all slots weigh the same; dimension d of V is 2^(d % 4 - 2)
    bool positive = false;  // V is
};

// Pages in a shuffled pool of two layers, the second of which is used; every slot that no query may see is
// NaN.
class Case {
  public:
    explicit Case(const Shape& shape)
        : shape_(shape), random_(static_cast<uint32_t>(shape.sequences.size() + 5)) {
        element_ = shape.fp8 ? 1 : 2;
        head_bytes_ = kSlots * kHeadDim * element_;
        layer_bytes_ = 2 * shape.heads.kv_heads * head_bytes_;
        scales_begin_ = 2 * layer_bytes_ + shape.heads.kv_heads * kSlots * 4;
        page_stride_ = 2 * layer_bytes_ + 2 * shape.heads.kv_heads * kSlots * 4 + 64;
        for (int32_t head = 0; head < shape.heads.kv_heads; ++head) {
            v_scales_.push_back(shape.scaled ? 1.5f / static_cast<float>(head + 1) : v_scale());
        }
        int32_t pages = 0;
        for (const Sequence& s : shape.sequences) {
            const int32_t slots = s.position < 0 ? 0 : shape.first_slot + s.position + s.q_len;
            slots_.push_back(slots);
            pages_max_ = std::max(pages_max_, (slots + 63) / 64);
            pages += (slots + 63) / 64;
        }
        std::vector<int32_t> ids(static_cast<size_t>(pages));
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random_);
        pool_.assign(static_cast<size_t>(pages * page_stride_), 0xFF);
        size_t next = 0;
        for (size_t b = 0; b < slots_.size(); ++b) {
            std::vector<int32_t> table(static_cast<size_t>(pages_max_), -1);
            for (int32_t page = 0; page < (slots_[b] + 63) / 64; ++page) {
                table[static_cast<size_t>(page)] = ids[next++];
            }
            tables_.insert(tables_.end(), table.begin(), table.end());
            const int64_t count = slots_[b] * shape.heads.kv_heads * kHeadDim;
            keys_.push_back(random_values(random_, count, 1, shape.fp8));
            if (shape.rising) {
                lower_later_keys(keys_.back());
            }
            if (shape.peaked) {
                place_peaks(keys_.back());
            }
            values_.push_back(random_values(random_, count, 1, shape.fp8));
            if (shape.level || shape.positive) {
                shape_values(keys_.back(), values_.back());
            }
            fill(b);
            first_rows_.push_back(rows_);
            rows_ += shape.sequences[b].q_len;
        }
        first_rows_.push_back(rows_);
        q_ = random_values(random_, rows_ * width(), 1.5f, false);
        for (int64_t i = 0; shape.rising && i < rows_ * width(); i += i % kHeadDim == 7 ? kHeadDim - 7 : 1) {
            q_.values[static_cast<size_t>(i)] = 4;
            q_.bf16[static_cast<size_t>(i)] = f32_to_bf16(4);
        }
        for (int64_t row = 0; shape.peaked && row < rows_ * shape.heads.q_heads; ++row) {
            const auto at = static_cast<size_t>(row * kHeadDim + 7);
            q_.values[at] = static_cast<float>(24 + row / shape.heads.q_heads % 9);
            q_.bf16[at] = f32_to_bf16(q_.values[at]);
        }
        // The last row is zeros: it has no scale of its own.
        std::fill(q_.values.end() - width(), q_.values.end(), 0.0f);
        std::fill(q_.bf16.end() - width(), q_.bf16.end(), uint16_t{0});
    }

    // lse: or null.
    std::vector<double> reference(std::vector<double>* lse = nullptr) const {
        std::vector<double> want;
        const int64_t group = shape_.heads.q_heads / shape_.heads.kv_heads;
        for (size_t b = 0; b < slots_.size(); ++b) {
            for (int32_t i = 0; i < shape_.sequences[b].q_len; ++i) {
                for (int64_t head = 0; head < shape_.heads.q_heads; ++head) {
                    const std::vector<double> row = attend(b, i, head, head / group, lse);
                    want.insert(want.end(), row.begin(), row.end());
                }
            }
        }
        return want;
    }

    PagedKvCuda place(DeviceArena& arena) const {
        return {.pool = reinterpret_cast<const std::byte*>(arena.upload(pool_)),
                .page_stride = page_stride_,
                .k_offset = layer_bytes_,
                .v_offset = layer_bytes_ + shape_.heads.kv_heads * head_bytes_,
                .dtype = shape_.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16,
                .k_scale = k_scale(),
                .v_scale = v_scale(),
                .k_scales_offset = shape_.scaled ? scales_begin_ : -1,
                .v_scales = shape_.scaled ? arena.upload(v_scales_) : nullptr,
                .page_tables = arena.upload(tables_),
                .pages_max = pages_max_};
    }

    // Of the last of four layers, in the last of three replays of a step. lse: or null.
    std::vector<float> decode(int32_t slots_max, std::vector<float>* lse = nullptr) const {
        DeviceArena arena;
        Stream stream;
        const auto batch = static_cast<int32_t>(slots_.size());
        DecodePlanCudaArgs plan{.shape = shape_.heads,
                                .positions = arena.upload(positions()),
                                .batch = batch,
                                .q_len = shape_.sequences[0].q_len,
                                .first_slot = shape_.first_slot,
                                .slots_max = slots_max,
                                .sm_count = device_sm_count()};
        // Not of the bytes that mark a result as not written.
        plan.workspace = arena.upload(
            std::vector<std::byte>(static_cast<size_t>(decode_cuda_workspace_bytes(plan)), std::byte{0x11}));
        uint16_t* out = arena.poisoned<uint16_t>(rows_ * width());
        float* logarithms = arena.poisoned<float>(rows_ * shape_.heads.q_heads);
        const uint16_t* q = arena.upload(q_.bf16);
        const uint16_t* other_q = arena.upload(std::vector<uint16_t>(q_.bf16.rbegin(), q_.bf16.rend()));
        DecodeCudaArgs args{.plan = plan,
                            .kv = place(arena),
                            .q_stride = width(),
                            .out = out,
                            .out_stride = width(),
                            .lse = lse == nullptr ? nullptr : logarithms,
                            .scale = scale()};
        const Graph step = Graph::capture(stream.get(), [&] {
            decode_plan_cuda(stream.get(), plan);
            for (int layer = 0; layer < 4; ++layer) {
                args.q = layer % 2 == 0 ? other_q : q;
                args.settled = layer > 0;
                attention_decode_cuda(stream.get(), args);
            }
        });
        for (int replay = 0; replay < 3; ++replay) {
            cuda_check(cudaMemsetAsync(out, 0xFF, static_cast<size_t>(rows_ * width() * 2), stream.get()));
            step.launch(stream.get());
        }
        stream.synchronize();
        if (lse != nullptr) {
            *lse = DeviceArena::download(logarithms, rows_ * shape_.heads.q_heads);
        }
        const std::vector<float> values = bf16_values(DeviceArena::download(out, rows_ * width()));
        const int64_t group = shape_.heads.q_heads / shape_.heads.kv_heads;
        if (group * shape_.sequences[0].q_len > kDecodeCudaRowsOfE4m3) {
            return values;
        }
        args.settled = false;  // the plan is of the kernel just before
        args.out = nullptr;
        args.out8 = arena.poisoned<uint8_t>(rows_ * width());
        args.out8_scale = 0.013f;
        decode_plan_cuda(stream.get(), plan);
        attention_decode_cuda(stream.get(), args);
        stream.synchronize();
        const std::vector<uint8_t> codes = DeviceArena::download(args.out8, rows_ * width());
        int64_t wrong = 0;
        for (size_t i = 0; i < codes.size(); ++i) {
            wrong += e4m3_to_f32(codes[i]) != round_to_e4m3(values[i] / args.out8_scale);
        }
        EXPECT_EQ(wrong, 0) << "codes of " << codes.size();
        return values;
    }

    // listed: by lists of all KV tiles (partial: of some). skip: without this many queries of a single
    // sequence.
    std::vector<float> prefill(bool listed = false, int32_t skip = 0) const {
        PrefillPart part{first_rows_, positions(), 0, skip, listed};
        part.first_rows.back() -= skip;
        part.positions.back() += skip;
        return prefill_part(part);
    }
    // The rows of one of the sequences, prefilled without the others.
    std::vector<float> prefill_alone(size_t b) const {
        return prefill_part(
            {{0, shape_.sequences[b].q_len}, {shape_.sequences[b].position}, b, first_rows_[b]});
    }
    // Of all rows, those of a sequence.
    std::vector<float> rows_of(const std::vector<float>& all, size_t b) const {
        const auto begin = all.begin() + first_rows_[b] * width();
        return {begin, begin + shape_.sequences[b].q_len * width()};
    }
    // What each row of a level case must give.
    std::vector<double> level_output() const {
        std::vector<double> out;
        for (int64_t i = 0; i < rows_ * width(); ++i) {
            out.push_back(to_bf16(static_cast<double>(v_scale() * level_value(i % kHeadDim))));
        }
        return out;
    }

  private:
    // Of the sequences: from `sequence` on, with queries from row `row` of q on.
    struct PrefillPart {
        std::vector<int32_t> first_rows;
        std::vector<int32_t> positions;
        size_t sequence = 0;
        int32_t row = 0;
        bool listed = false;  // of all sequences
    };
    std::vector<float> prefill_part(const PrefillPart& part) const {
        DeviceArena arena;
        Stream stream;
        const auto sequences = static_cast<int32_t>(part.positions.size());
        const int32_t rows = part.first_rows.back();
        const int32_t rows_max = rows + 3;
        uint16_t* out = arena.poisoned<uint16_t>(rows * width());
        const PrefillPlanCudaArgs plan{.first_rows = arena.upload(part.first_rows),
                                       .positions = arena.upload(part.positions),
                                       .first_slot = shape_.first_slot,
                                       .sequences = sequences,
                                       .rows_max = rows_max,
                                       .shape = shape_.heads,
                                       .workspace = arena.poisoned<std::byte>(
                                           prefill_cuda_workspace_bytes(shape_.heads, sequences, rows_max))};
        const auto first_q = q_.bf16.begin() + part.row * width();
        std::vector<uint16_t> q(first_q, first_q + rows * width());
        q.resize(static_cast<size_t>(rows_max * width()), 0xFFFF);
        const uint16_t* right_q = arena.upload(q);
        const uint16_t* other_q = arena.upload(std::vector<uint16_t>(q.rbegin(), q.rend()));
        PrefillCudaArgs args{.plan = plan,
                             .kv = place(arena),
                             .kv_tiles = kv_tiles(plan, part.listed, arena),
                             .q_stride = width(),
                             .out = out,
                             .out_stride = width(),
                             .scale = scale(),
                             .sm_count = device_sm_count()};
        args.kv.page_tables += static_cast<int64_t>(part.sequence) * pages_max_;
        const Graph step = Graph::capture(stream.get(), [&] {
            prefill_plan_cuda(stream.get(), plan);
            for (int layer = 0; layer < 4; ++layer) {
                args.q = layer % 2 == 0 ? other_q : right_q;
                args.settled = layer > 0;
                attention_prefill_cuda(stream.get(), args);
            }
        });
        for (int replay = 0; replay < 2; ++replay) {
            cuda_check(cudaMemsetAsync(out, 0xFF, static_cast<size_t>(rows * width() * 2), stream.get()));
            step.launch(stream.get());
        }
        stream.synchronize();
        return bf16_values(DeviceArena::download(out, rows * width()));
    }

    // The first 8 dimensions of a key tell how late its slot is; those of the queries are 4.
    void lower_later_keys(TestValues& keys) const {
        const int64_t row = shape_.heads.kv_heads * kHeadDim;
        for (size_t i = 0; i < keys.values.size(); ++i) {
            if (static_cast<int64_t>(i) % kHeadDim < 8) {
                set(keys, i, -2.0f * static_cast<float>(static_cast<int64_t>(i) / row / 128));
            }
        }
    }
    // Both peaks lie along dimension 7 alone, the first above the second: in fp8 by less than what moves the
    // number that is subtracted from the scores.
    void place_peaks(TestValues& keys) const {
        const int64_t row = shape_.heads.kv_heads * kHeadDim;
        for (size_t i = 0; i < keys.values.size(); ++i) {
            const int64_t slot = static_cast<int64_t>(i) / row;
            const bool along = static_cast<int64_t>(i) % kHeadDim == 7;
            if (slot == 70 || slot == 530) {
                const float second = shape_.fp8 ? 7 : 3;
                set(keys, i, !along ? 0 : slot == 70 ? 8 : second);
            } else if (along) {
                set(keys, i, 0);
            }
        }
    }
    void shape_values(TestValues& keys, TestValues& values) const {
        for (size_t i = 0; i < values.values.size(); ++i) {
            if (shape_.level) {
                set(keys, i, 0);
                set(values, i, level_value(static_cast<int64_t>(i) % kHeadDim));
            } else {
                set(values, i, std::fabs(values.values[i]));
            }
        }
    }
    static float level_value(int64_t d) { return std::ldexp(1.0f, static_cast<int>(d % 4) - 2); }
    void set(TestValues& to, size_t i, float value) const {
        to.values[i] = value;
        if (shape_.fp8) {
            to.fp8[i] = e4m3_bits(value);
        } else {
            to.bf16[i] = f32_to_bf16(value);
        }
    }

    PrefillKvTiles kv_tiles(const PrefillPlanCudaArgs& plan, bool listed, DeviceArena& arena) const {
        if (!listed) {
            return {};
        }
        const int32_t queries = prefill_cuda_tile_queries(shape_.heads);
        const int32_t tiles_max = (pages_max_ + 1) / 2;
        const auto lists =
            static_cast<size_t>((plan.rows_max / queries + plan.sequences) * shape_.heads.kv_heads);
        std::vector<int32_t> counts(lists, -1);
        std::vector<int32_t> tiles(lists * static_cast<size_t>(tiles_max), -1);
        for (size_t b = 0; b < slots_.size(); ++b) {
            for (int32_t query = 0; query < shape_.sequences[b].q_len; query += queries) {
                for (int32_t head = 0; head < shape_.heads.kv_heads; ++head) {
                    const int32_t number = (first_rows_[b] + query) / queries + static_cast<int32_t>(b);
                    const auto list = static_cast<size_t>(number * shape_.heads.kv_heads + head);
                    counts[list] = 0;
                    for (int32_t tile = 0; tile < tiles_seen(b, query); ++tile) {
                        if (lists_tile(b, query, head, tile)) {
                            tiles[list * static_cast<size_t>(tiles_max) +
                                  static_cast<size_t>(counts[list]++)] = tile;
                        }
                    }
                }
            }
        }
        return {.tiles = arena.upload(tiles), .counts = arena.upload(counts), .tiles_max = tiles_max};
    }

    // KV tiles that the query tile of a query sees.
    int32_t tiles_seen(size_t b, int32_t query) const {
        const int32_t queries = prefill_cuda_tile_queries(shape_.heads);
        const Sequence& s = shape_.sequences[b];
        const int32_t end = std::min((query / queries + 1) * queries, s.q_len);
        return s.position < 0 ? 0 : (shape_.first_slot + s.position + end + 127) / 128;
    }
    // The last two are always there, so that each query sees something.
    bool lists_tile(size_t b, int32_t query, int64_t kv_head, int32_t tile) const {
        const int64_t query_tile = query / prefill_cuda_tile_queries(shape_.heads);
        return !shape_.partial || tile + 2 >= tiles_seen(b, query) ||
               (static_cast<int64_t>(b) + query_tile + kv_head + tile) % 3 > 0;
    }

    int64_t width() const { return shape_.heads.q_heads * kHeadDim; }
    static float scale() { return 1 / std::sqrt(static_cast<float>(kHeadDim)); }
    float k_scale() const { return shape_.fp8 ? 0.7f : 1.0f; }
    float v_scale() const { return shape_.fp8 ? 1.3f : 1.0f; }
    float slot_scale(int64_t slot, int64_t head) const {
        return shape_.scaled ? 0.5f + static_cast<float>((slot * 7 + head * 3) % 13) / 13 : k_scale();
    }
    std::vector<int32_t> positions() const {
        std::vector<int32_t> out;
        for (const Sequence& s : shape_.sequences) {
            out.push_back(s.position);
        }
        return out;
    }
    size_t index(int64_t slot, int64_t kv_head, int64_t d) const {
        return static_cast<size_t>((slot * shape_.heads.kv_heads + kv_head) * kHeadDim + d);
    }

    void fill(size_t b) {
        for (int64_t slot = shape_.first_slot; slot < slots_[b]; ++slot) {
            const int64_t page =
                tables_[b * static_cast<size_t>(pages_max_) + static_cast<size_t>(slot / 64)];
            for (int64_t head = 0; head < shape_.heads.kv_heads; ++head) {
                const float scale = slot_scale(slot, head);
                std::memcpy(
                    pool_.data() + page * page_stride_ + scales_begin_ + (head * kSlots + slot % 64) * 4,
                    &scale, sizeof(scale));
                for (int64_t d = 0; d < kHeadDim; ++d) {
                    const int64_t at = page * page_stride_ + layer_bytes_ + head * head_bytes_ +
                                       (slot % 64 * kHeadDim + d) * element_;
                    put(at, keys_[b], index(slot, head, d));
                    put(at + shape_.heads.kv_heads * head_bytes_, values_[b], index(slot, head, d));
                }
            }
        }
    }
    void put(int64_t at, const TestValues& from, size_t i) {
        if (shape_.fp8) {
            pool_[static_cast<size_t>(at)] = from.fp8[i];
        } else {
            pool_[static_cast<size_t>(at)] = static_cast<uint8_t>(from.bf16[i] & 0xFF);
            pool_[static_cast<size_t>(at + 1)] = static_cast<uint8_t>(from.bf16[i] >> 8);
        }
    }

    std::vector<double> attend(size_t b, int32_t query, int64_t head, int64_t kv_head,
                               std::vector<double>* lse) const {
        std::vector<double> out(kHeadDim);
        if (shape_.sequences[b].position < 0) {
            if (lse != nullptr) {
                lse->push_back(-std::numeric_limits<double>::infinity());
            }
            return out;
        }
        const float* q = q_.values.data() + (first_rows_[b] + query) * width() + head * kHeadDim;
        const int32_t last = shape_.first_slot + shape_.sequences[b].position + query;
        std::vector<double> scores;
        double max = -std::numeric_limits<double>::infinity();
        for (int32_t slot = shape_.first_slot; slot <= last; ++slot) {
            if (!lists_tile(b, query, kv_head, slot / 128)) {
                scores.push_back(-std::numeric_limits<double>::infinity());
                continue;
            }
            double score = 0;
            for (int64_t d = 0; d < kHeadDim; ++d) {
                score += static_cast<double>(q[d]) * keys_[b].values[index(slot, kv_head, d)];
            }
            scores.push_back(score * scale() * slot_scale(slot, kv_head));
            max = std::max(max, scores.back());
        }
        double sum = 0;
        for (size_t i = 0; i < scores.size(); ++i) {
            const double p = std::exp(scores[i] - max);
            sum += p;
            for (int64_t d = 0; d < kHeadDim; ++d) {
                out[static_cast<size_t>(d)] +=
                    p * values_[b].values[index(shape_.first_slot + static_cast<int64_t>(i), kv_head, d)];
            }
        }
        for (double& value : out) {
            value *= v_scales_[static_cast<size_t>(kv_head)] / sum;
        }
        if (lse != nullptr) {
            lse->push_back(max + std::log(sum));
        }
        return out;
    }

    Shape shape_;
    std::mt19937 random_;
    int64_t element_ = 0, head_bytes_ = 0, layer_bytes_ = 0, page_stride_ = 0, scales_begin_ = 0;
    std::vector<float> v_scales_;
    int32_t pages_max_ = 1, rows_ = 0;
    std::vector<int32_t> slots_, tables_, first_rows_;
    std::vector<uint8_t> pool_;
    std::vector<TestValues> keys_, values_;
    TestValues q_;
};

}  // namespace tessera::attention_testing
