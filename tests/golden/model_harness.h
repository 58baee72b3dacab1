// What the golden tests of the model share: the demonstration model, one sequence with its own pages, and the
// reference outputs.
#pragma once

#include <cmath>
#include <cstring>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "device/host_buffer.h"
#include "model/hy3_model.h"
#include "weights/loader.h"

namespace tessera::golden {

inline std::string data_path(const std::string& name) {
    return std::string(TESSERA_SOURCE_DIR) + "/tests/golden/data/" + name;
}

inline std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

// The model.safetensors of the goldens: float32 tensors by name.
inline std::map<std::string, std::vector<float>> read_tensors(const std::string& path) {
    const std::string file = read_file(path);
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, file.data(), 8);
    const json::Value header = json::parse(file.substr(8, header_bytes)).take();
    std::map<std::string, std::vector<float>> tensors;
    for (const auto& [name, entry] : header.members()) {
        const json::Value* offsets = entry.find("data_offsets");
        if (offsets == nullptr) {
            continue;
        }
        const auto begin = static_cast<size_t>(*offsets->items()[0].as_int64());
        const auto end = static_cast<size_t>(*offsets->items()[1].as_int64());
        std::vector<float>& values = tensors[name];
        values.resize((end - begin) / 4);
        std::memcpy(values.data(), file.data() + 8 + header_bytes + begin, end - begin);
    }
    return tensors;
}

template <typename T>
std::vector<T> numbers(const json::Value& array) {
    std::vector<T> out;
    for (const json::Value& item : array.items()) {
        out.push_back(static_cast<T>(item.as_double()));
    }
    return out;
}

struct Engine {
    explicit Engine(const ModelOptions& options = {}) : threads(2) {
        Result<LoadedModel> result = load_model(std::string(TESSERA_SOURCE_DIR) + "/models/demo");
        EXPECT_TRUE(result.ok()) << result.status().message();
        loaded = result.take();
        Result<std::unique_ptr<Hy3Model>> made =
            Hy3Model::create(loaded.config, loaded.weights, options, threads);
        EXPECT_TRUE(made.ok()) << made.status().message();
        model = made.take();
    }

    LoadedModel loaded;
    ThreadPool threads;
    std::unique_ptr<Hy3Model> model;
};

// One sequence with pages of its own, scattered in its pool.
class Sequence {
  public:
    Sequence(Hy3Model& model, int64_t tokens_max) : model_(model) {
        const int64_t count = tokens_max / kPageTokens + 1;
        stride_ = model.page_format().page_bytes();
        pool_ = HostBuffer(count * stride_);
        std::memset(pool_.data(), 0xFF,
                    static_cast<size_t>(pool_.bytes()));  // NaN wherever nothing was written
        for (int64_t i = 0; i < count; ++i) {
            pages_.push_back(static_cast<PageId>(count - 1 - i));
        }
    }

    int32_t length() const { return length_; }
    const float* trailer(int64_t page) const {
        const PageId id = pages_[static_cast<size_t>(page)];
        return reinterpret_cast<const float*>(pool_.data() + id * stride_ +
                                              model_.page_format().trailer_offset());
    }

    // Appends the tokens; logits [tokens, vocab] and hidden [tokens, hidden] of all of them.
    struct Output {
        std::vector<float> logits;
        std::vector<float> hidden;
    };
    Output extend(const std::vector<TokenId>& tokens, ForwardTrace* trace = nullptr) {
        Output output = make_output(tokens.size());
        const SequenceSpan span{0, static_cast<int32_t>(tokens.size()), length_, pages_};
        model_.forward({tokens, {&span, 1}, rows_, view()}, {output.logits.data(), output.hidden.data()},
                       trace);
        length_ += static_cast<int32_t>(tokens.size());
        return output;
    }

    // The MTP layer over the entries position .. position + next.size().
    Output mtp(const std::vector<float>& hidden, const std::vector<TokenId>& next, int32_t position) {
        Output output = make_output(next.size());
        const SequenceSpan span{0, static_cast<int32_t>(next.size()), position, pages_};
        model_.mtp_forward({hidden.data(), next, {&span, 1}, rows_, view()},
                           {output.logits.data(), output.hidden.data()});
        return output;
    }

    PagePoolView view() const { return {pool_.data(), stride_}; }
    const std::vector<PageId>& pages() const { return pages_; }

  private:
    Output make_output(size_t tokens) {
        rows_.resize(tokens);
        for (size_t i = 0; i < tokens; ++i) {
            rows_[i] = static_cast<int32_t>(i);
        }
        Output output;
        output.logits.resize(tokens * static_cast<size_t>(model_.config().vocab_size));
        output.hidden.resize(tokens * static_cast<size_t>(model_.config().hidden_size));
        return output;
    }

    Hy3Model& model_;
    HostBuffer pool_;
    int64_t stride_ = 0;
    int32_t length_ = 0;
    std::vector<PageId> pages_;
    std::vector<int32_t> rows_;
};

inline std::vector<double> log_softmax(const float* logits, size_t n) {
    double top = logits[0];
    for (size_t i = 1; i < n; ++i) {
        top = std::max<double>(top, logits[i]);
    }
    double sum = 0;
    for (size_t i = 0; i < n; ++i) {
        sum += std::exp(logits[i] - top);
    }
    std::vector<double> out(n);
    for (size_t i = 0; i < n; ++i) {
        out[i] = logits[i] - top - std::log(sum);
    }
    return out;
}

inline TokenId argmax(const float* logits, size_t n) {
    size_t best = 0;
    for (size_t i = 1; i < n; ++i) {
        best = logits[i] > logits[best] ? i : best;
    }
    return static_cast<TokenId>(best);
}

}  // namespace tessera::golden
