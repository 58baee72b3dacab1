#include <algorithm>
#include <fmt/format.h>

#include "base/check.h"
#include "ops/common/gemm.h"
#include "ops/common/gemm_own.h"
#include "ops/moe/moe.h"

namespace tessera {
namespace {

int64_t padded(int64_t width) {
    return (width + kPanelOutputs - 1) / kPanelOutputs * kPanelOutputs;
}

int64_t chunks_of(int64_t rows) {
    return (rows + kGemmRowsMax - 1) / kGemmRowsMax;
}

}  // namespace

MoeWorkspace::MoeWorkspace(const MoeShape& shape) : tokens_max_(shape.tokens_max) {
    const int64_t rows = shape.tokens_max * shape.k;
    first_.resize(static_cast<size_t>(shape.experts) + 1);
    active_.reserve(static_cast<size_t>(shape.experts));
    tokens_.resize(static_cast<size_t>(rows));
    weights_.resize(static_cast<size_t>(rows));
    const int64_t blocks = (padded(shape.width) * 2 + kBlockOutputs - 1) / kBlockOutputs;
    const int64_t shared_blocks = (padded(shape.shared_width) * 2 + kBlockOutputs - 1) / kBlockOutputs;
    const int64_t expert_chunks = std::min(rows, rows / kGemmRowsMax + shape.experts);
    items_.reserve(static_cast<size_t>(expert_chunks * blocks + chunks_of(shape.tokens_max) * shared_blocks));
    hidden_floats_ = rows * padded(shape.width) + shape.tokens_max * padded(shape.shared_width);
}

Result<MoeWorkspace> MoeWorkspace::create(const MoeShape& shape) {
    MoeWorkspace workspace(shape);
    Result<HostBuffer> hidden = HostBuffer::allocate(
        workspace.hidden_floats_ * 4, fmt::format("the experts' workspace of {} tokens", shape.tokens_max),
        "lower --max-num-batched-tokens");
    if (!hidden.ok()) {
        return hidden.status();
    }
    workspace.hidden_ = hidden.take();
    return workspace;
}

// One call of moe(): the rows of each expert are gathered into lists; then all gate and up projections (with
// SwiGLU) run as one parallel loop over (expert, rows, block of outputs), and all down projections with the
// sum over the experts as a second one over (tokens, block of outputs), so that a token's sum has one owner.
class MoeRun {
  public:
    explicit MoeRun(const MoeArgs& args)
        : args_(args), ws_(*args.workspace), experts_(static_cast<int64_t>(args.experts.size())) {
        width_ = experts_ > 0 ? args.experts[0].gate_up.outputs / 2 : 0;
        shared_width_ = args.shared != nullptr ? args.shared->gate_up.outputs / 2 : 0;
        check(args.tokens <= ws_.tokens_max_ && experts_ < static_cast<int64_t>(ws_.first_.size()) &&
                  args.tokens * args.k <= static_cast<int64_t>(ws_.tokens_.size()) &&
                  args.tokens * (args.k * width_ + shared_width_) <= ws_.hidden_floats_,
              "moe: the workspace is too small");
    }

    void run(const OpContext& context) {
        sort_rows();
        list_items();
        const auto items = static_cast<int64_t>(ws_.items_.size());
        if (pairs_up(context, items)) {
            gate_up_pairs(context, items);
        } else {
            context.threads.parallel_for(items, [&](int64_t i, int) {
                const auto place = static_cast<size_t>(context.threads.place(i, items));
                gate_up(ws_.items_[place], place + 1 < ws_.items_.size() ? &ws_.items_[place + 1] : nullptr);
            });
        }
        const int64_t blocks = (args_.hidden + kBlockOutputs - 1) / kBlockOutputs;
        if (pairs_up(context, blocks)) {
            down_pairs(context, blocks);
            return;
        }
        const int64_t chunks = chunks_of(args_.tokens);
        context.threads.parallel_for(chunks * blocks, [&](int64_t i, int) {
            const int64_t place = context.threads.place(i, chunks * blocks);  // whose y it wrote in linear
            const int64_t chunk = place / blocks;
            down(args_.tokens * chunk / chunks, args_.tokens * (chunk + 1) / chunks, place % blocks);
        });
    }

  private:
    const ExpertWeights& expert(int64_t e) const {
        return e < experts_ ? args_.experts[static_cast<size_t>(e)] : *args_.shared;
    }

    // A counting sort of the (token, expert) pairs by expert; tokens stay in order.
    void sort_rows() {
        const int64_t rows = args_.tokens * args_.k;
        std::vector<int32_t>& first = ws_.first_;
        std::fill(first.begin(), first.end(), 0);
        for (int64_t i = 0; i < rows; ++i) {
            ++first[static_cast<size_t>(args_.chosen[i]) + 1];
        }
        ws_.active_.clear();
        for (int64_t e = 0; e < experts_; ++e) {
            if (first[static_cast<size_t>(e) + 1] > 0) {
                ws_.active_.push_back(static_cast<int32_t>(e));
            }
            first[static_cast<size_t>(e) + 1] += first[static_cast<size_t>(e)];
        }
        // Filling moves each beginning to its end, which is the next expert's beginning: shift back
        // afterwards.
        for (int64_t i = 0; i < rows; ++i) {
            const auto row = static_cast<size_t>(first[static_cast<size_t>(args_.chosen[i])]++);
            ws_.tokens_[row] = static_cast<int32_t>(i / args_.k);
            ws_.weights_[row] = args_.weights[i];
        }
        for (int64_t e = experts_; e > 0; --e) {
            first[static_cast<size_t>(e)] = first[static_cast<size_t>(e) - 1];
        }
        first[0] = 0;
    }

    void list_items() {
        ws_.items_.clear();
        if (args_.shared != nullptr) {
            add_items(experts_, args_.tokens);
        }
        for (int32_t e : ws_.active_) {
            add_items(e, ws_.first_[static_cast<size_t>(e) + 1] - ws_.first_[static_cast<size_t>(e)]);
        }
    }

    void add_items(int64_t e, int64_t rows) {
        const int64_t chunks = chunks_of(rows);
        const int64_t blocks = expert(e).gate_up.blocks();
        for (int64_t c = 0; c < chunks; ++c) {
            const int64_t row = rows * c / chunks;
            for (int64_t b = 0; b < blocks; ++b) {
                ws_.items_.push_back({static_cast<int32_t>(e), static_cast<int32_t>(row),
                                      static_cast<int32_t>(rows * (c + 1) / chunks - row),
                                      static_cast<int32_t>(b)});
            }
        }
    }

    // The SwiGLU outputs of an expert's row: [width] floats.
    float* hidden_row(int64_t e, int64_t row) const {
        float* hidden = ws_.hidden_.as<float>();
        if (e < experts_) {
            return hidden + (ws_.first_[static_cast<size_t>(e)] + row) * width_;
        }
        return hidden + args_.tokens * args_.k * width_ + row * shared_width_;
    }

    // `next`: what this thread computes then, or null.
    void gate_up(const MoeWorkspace::Item& item, const MoeWorkspace::Item* next) const {
        const float* rows[kGemmRowsMax];
        for (int64_t r = 0; r < item.rows; ++r) {
            int64_t token = item.row + r;
            if (item.expert < experts_) {
                token =
                    ws_.tokens_[static_cast<size_t>(ws_.first_[static_cast<size_t>(item.expert)] + token)];
            }
            rows[r] = args_.x + token * args_.x_stride;
        }
        const PackedMatrix& weight = expert(item.expert).gate_up;
        const int64_t width = item.expert < experts_ ? width_ : shared_width_;
        float* hidden = hidden_row(item.expert, item.row) + item.block * kBlockOutputs / 2;
        const int64_t pairs = weight.block_panels(item.block) / 2;
        for (int64_t r = 0; r < std::min<int64_t>(item.rows, kOwnRowsMax); ++r) {
            own_lines(hidden + r * width, pairs * kPanelOutputs);
        }
        alignas(64) float out[kGemmRowsMax * kBlockOutputs];
        gemm_block({rows, item.rows, &weight, item.block, out,
                    next == nullptr ? nullptr : expert(next->expert).gate_up.block_data(next->block)});
        swiglu_block({out, item.rows, pairs, hidden, width});
    }

    // One token is all reading, and two streams of memory are read faster than one: `items` blocks are taken
    // in pairs, each of the first half with its counterpart in the second, where all threads have some.
    bool pairs_up(const OpContext& context, int64_t items) const {
        return args_.tokens == 1 && items >= 2 * context.threads.size();
    }

    void gate_up_pairs(const OpContext& context, int64_t items) const {
        const int64_t pairs = (items + 1) / 2;
        context.threads.parallel_for(pairs, [&](int64_t i, int) {
            const int64_t place = context.threads.place(i, pairs);
            const int64_t count = place + pairs < items ? 2 : 1;
            const bool more = i + context.threads.size() < pairs && place + pairs + 1 < items;
            alignas(64) float out[2][kBlockOutputs];
            GemmBlockArgs blocks[2];
            float* hidden[2] = {};
            for (int64_t p = 0; p < count; ++p) {
                const MoeWorkspace::Item* item = &ws_.items_[static_cast<size_t>(place + p * pairs)];
                hidden[p] = hidden_row(item->expert, 0) + item->block * kBlockOutputs / 2;
                blocks[p] = {
                    .rows = &args_.x,
                    .row_count = 1,
                    .weight = &expert(item->expert).gate_up,
                    .block = item->block,
                    .out = out[p],
                    .next = more ? expert(item[1].expert).gate_up.block_data(item[1].block) : nullptr};
                own_lines(hidden[p], kBlockOutputs / 2);
            }
            gemm_blocks(blocks, count);
            for (int64_t p = 0; p < count; ++p) {
                const int64_t panels = blocks[p].weight->block_panels(blocks[p].block) / 2;
                swiglu_block({out[p], 1, panels, hidden[p], panels * kPanelOutputs});
            }
        });
    }

    void down_pairs(const OpContext& context, int64_t blocks) const {
        const int64_t pairs = (blocks + 1) / 2;
        context.threads.parallel_for(pairs, [&](int64_t item, int) {
            const int64_t place = context.threads.place(item, pairs);
            const int64_t count = place + pairs < blocks ? 2 : 1;
            alignas(64) float sums[2][kBlockOutputs] = {};
            const PairSums pair{place, pairs, count, sums};
            for (size_t i = 0; i < ws_.active_.size(); ++i) {
                const int32_t e = ws_.active_[i];
                const int64_t next = i + 1 < ws_.active_.size() ? ws_.active_[i + 1] : experts_;
                add_to_pair(e, ws_.weights_[static_cast<size_t>(ws_.first_[static_cast<size_t>(e)])], pair,
                            next < experts_ || args_.shared != nullptr ? &expert(next).down : nullptr);
            }
            if (args_.shared != nullptr) {
                add_to_pair(experts_, 1.0f, pair, nullptr);
            }
            for (int64_t p = 0; p < count; ++p) {
                const int64_t column = (place + p * pairs) * kBlockOutputs;
                for (int64_t c = 0; c < std::min(kBlockOutputs, args_.hidden - column); ++c) {
                    args_.y[column + c] += sums[p][c];
                }
            }
        });
    }

    // The blocks first and, where count is 2, first + distance.
    struct PairSums {
        int64_t first = 0;
        int64_t distance = 0;
        int64_t count = 0;
        float (*data)[kBlockOutputs] = nullptr;
    };

    void add_to_pair(int64_t e, float weight, const PairSums& sums, const PackedMatrix* next) const {
        const PackedMatrix& down = expert(e).down;
        const float* row = hidden_row(e, 0);
        alignas(64) float out[2][kBlockOutputs];
        GemmBlockArgs blocks[2];
        for (int64_t p = 0; p < sums.count; ++p) {
            blocks[p] = {.rows = &row,
                         .row_count = 1,
                         .weight = &down,
                         .block = sums.first + p * sums.distance,
                         .out = out[p]};
            if (next != nullptr) {
                blocks[p].next = next->block_data(blocks[p].block);
            }
        }
        gemm_blocks(blocks, sums.count);
        for (int64_t p = 0; p < sums.count; ++p) {
            const int64_t columns = down.block_panels(blocks[p].block) * kPanelOutputs;
            for (int64_t c = 0; c < columns; ++c) {
                sums.data[p][c] += weight * out[p][c];
            }
        }
    }

    static void gemm_blocks(const GemmBlockArgs (&blocks)[2], int64_t count) {
        if (count == 2) {
            gemm_block_pair(blocks[0], blocks[1]);
        } else {
            gemm_block(blocks[0]);
        }
    }

    // The sums of the tokens [begin, end) for one block of outputs.
    struct Sums {
        float* data = nullptr;  // [end - begin][kBlockOutputs]
        int64_t begin = 0;
        int64_t end = 0;
        int64_t block = 0;
    };

    // Rows [row, row + rows) of an expert.
    struct ExpertRows {
        int64_t expert = 0;
        int64_t row = 0;
        int64_t rows = 0;
    };

    // An expert's rows among the tokens [begin, end).
    ExpertRows expert_rows(int32_t e, int64_t begin, int64_t end) const {
        const int32_t* tokens = ws_.tokens_.data();
        const int32_t* first = tokens + ws_.first_[static_cast<size_t>(e)];
        const int32_t* last = tokens + ws_.first_[static_cast<size_t>(e) + 1];
        const int32_t* from = std::lower_bound(first, last, begin);
        const int32_t* to = std::lower_bound(from, last, end);
        return {e, from - first, to - from};
    }

    // y[begin .. end) += the sum over experts, for one block of outputs.
    void down(int64_t begin, int64_t end, int64_t block) const {
        alignas(64) float data[kGemmRowsMax * kBlockOutputs];
        std::fill_n(data, (end - begin) * kBlockOutputs, 0.0f);
        const Sums sums{data, begin, end, block};
        const int64_t columns = std::min(kBlockOutputs, args_.hidden - block * kBlockOutputs);
        float* y_block = args_.y + begin * args_.y_stride + block * kBlockOutputs;
        for (int64_t t = 0; t < std::min(end - begin, kOwnRowsMax); ++t) {
            own_lines(y_block + t * args_.y_stride, columns);
        }
        // One expert behind: its weights are fetched while those before it are used.
        ExpertRows waiting;
        const auto add = [&](const ExpertRows& part) {
            if (waiting.rows > 0) {
                add_expert(waiting, sums,
                           part.rows > 0 ? expert(part.expert).down.block_data(block) : nullptr);
            }
            waiting = part;
        };
        for (int32_t e : ws_.active_) {
            if (const ExpertRows part = expert_rows(e, begin, end); part.rows > 0) {
                add(part);
            }
        }
        if (args_.shared != nullptr) {
            add({experts_, begin, end - begin});
        }
        add({});
        for (int64_t t = 0; t < end - begin; ++t) {
            float* y = y_block + t * args_.y_stride;
            const float* sum = data + t * kBlockOutputs;
            for (int64_t c = 0; c < columns; ++c) {
                y[c] += sum[c];
            }
        }
    }

    // sums += weight * down(row) for the rows [row, row + rows) of an expert.
    // `next`: the weights after these.
    void add_expert(const ExpertRows& part, const Sums& sums, const std::byte* next) const {
        const auto [e, row, rows] = part;
        const float* pointers[kGemmRowsMax];
        for (int64_t r = 0; r < rows; ++r) {
            pointers[r] = hidden_row(e, row + r);
        }
        alignas(64) float out[kGemmRowsMax * kBlockOutputs];
        gemm_block({pointers, rows, &expert(e).down, sums.block, out, next});
        const int64_t columns = expert(e).down.block_panels(sums.block) * kPanelOutputs;
        for (int64_t r = 0; r < rows; ++r) {
            int64_t token = row + r;
            float weight = 1.0f;
            if (e < experts_) {
                const auto index = static_cast<size_t>(ws_.first_[static_cast<size_t>(e)] + row + r);
                token = ws_.tokens_[index];
                weight = ws_.weights_[index];
            }
            float* sum = sums.data + (token - sums.begin) * kBlockOutputs;
            for (int64_t c = 0; c < columns; ++c) {
                sum[c] += weight * out[r * kBlockOutputs + c];
            }
        }
    }

    const MoeArgs& args_;
    MoeWorkspace& ws_;
    int64_t experts_ = 0;
    int64_t width_ = 0;  // padded to 16, as the packed weights have it
    int64_t shared_width_ = 0;
};

void moe(const OpContext& context, const MoeArgs& args) {
    MoeRun(args).run(context);
}

}  // namespace tessera
