// TensorView: a non-owning view of a tensor in host or device memory, at the borders of operators.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "base/check.h"
#include "base/dtype.h"

namespace tessera {

struct TensorView {
    static constexpr int kMaxRank = 4;

    void* data = nullptr;  // may be null when a dimension is 0
    DType dtype = DType::kFloat32;
    int rank = 0;
    std::array<int64_t, kMaxRank> shape{};
    std::array<int64_t, kMaxRank> stride{};  // in elements

    // A dense row-major view.
    static TensorView dense(void* data, DType dtype, std::initializer_list<int64_t> shape) {
        TensorView view;
        view.data = data;
        view.dtype = dtype;
        view.rank = static_cast<int>(shape.size());
        check(view.rank <= kMaxRank, "TensorView: rank over 4");
        int i = 0;
        for (int64_t extent : shape) {
            view.shape[static_cast<size_t>(i++)] = extent;
        }
        int64_t step = 1;
        for (int d = view.rank - 1; d >= 0; --d) {
            view.stride[static_cast<size_t>(d)] = step;
            step *= view.shape[static_cast<size_t>(d)];
        }
        return view;
    }

    int64_t elements() const {
        int64_t n = 1;
        for (int d = 0; d < rank; ++d) {
            n *= shape[static_cast<size_t>(d)];
        }
        return n;
    }
    int64_t bytes() const { return elements() * dtype_size(dtype); }
    template <typename T>
    T* as() const {
        return static_cast<T*>(data);
    }
};

}  // namespace tessera
