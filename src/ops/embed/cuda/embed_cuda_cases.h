// The cases of embed on the device.
#pragma once

#include <fmt/format.h>

#include "ops/cuda/cuda_case.h"
#include "ops/embed/cuda/embed_cuda.h"

namespace tessera {

class EmbedCudaCase {
  public:
    EmbedCudaCase(const CudaCaseData& data, int64_t rows, int64_t width, int64_t vocab)
        : rows_(rows),
          width_(width),
          vocab_(vocab),
          random_(data.seed),
          host_table_(random_bf16(random_, vocab * width)),
          host_tokens_(tokens()),
          table_(data.budget, host_table_, 1),
          tokens_(data.budget, host_tokens_, data.sets),
          y_(data.budget, std::vector<uint16_t>(static_cast<size_t>(rows * width)), data.sets) {}

    void launch(cudaStream_t stream, int set) {
        embed_cuda(stream, {.table = reinterpret_cast<const __nv_bfloat16*>(table_.at(0)),
                            .vocab = vocab_,
                            .width = width_,
                            .tokens = tokens_.at(set),
                            .rows = rows_,
                            .y = reinterpret_cast<__nv_bfloat16*>(y_.at(set)),
                            .y_stride = width_});
    }
    OpError check(cudaStream_t stream) {
        y_.poison();
        launch(stream, 0);
        std::vector<float> want;
        for (const int32_t token : host_tokens_) {
            for (int64_t i = 0; i < width_; ++i) {
                const bool known = token >= 0 && token < vocab_;
                want.push_back(known ? bf16_to_f32(host_table_[static_cast<size_t>(token * width_ + i)])
                                     : 0.0f);
            }
        }
        return compare_close(widen_bf16(y_.download()), want, 0, 0);
    }

  private:
    // Row 1 is padding, row 2 out of range.
    std::vector<int32_t> tokens() {
        std::vector<int32_t> out;
        for (int64_t r = 0; r < rows_; ++r) {
            out.push_back(r == 1 ? -1
                                 : (r == 2 ? static_cast<int32_t>(vocab_)
                                           : static_cast<int32_t>(random_.below(vocab_))));
        }
        return out;
    }

    int64_t rows_, width_, vocab_;
    OpRandom random_;
    std::vector<uint16_t> host_table_;
    std::vector<int32_t> host_tokens_;
    DeviceArray<uint16_t> table_;
    DeviceArray<int32_t> tokens_;
    DeviceArray<uint16_t> y_;
};

inline std::vector<CudaOpCase> embed_cuda_cases() {
    std::vector<CudaOpCase> cases;
    const auto add = [&](int64_t rows, int64_t width, int64_t vocab, bool bench) {
        const int64_t bytes = rows * width * 4;
        cases.push_back({fmt::format("rows={} width={}", rows, width), "bfloat16", bench,
                         [=](const CudaCaseData& data) {
                             auto run = std::make_shared<EmbedCudaCase>(data, rows, width, vocab);
                             return make_cuda_run(std::move(run), data.sets, {bytes, 0});
                         },
                         bytes});
    };
    for (const int64_t rows : {1, 63, 65}) {
        add(rows, 8, 100, false);
        add(rows, 256, 4096, false);
        add(rows, 4096, 300, false);
    }
    add(64, 4096, 30000, true);
    add(8192, 4096, 30000, true);
    return cases;
}

}  // namespace tessera
