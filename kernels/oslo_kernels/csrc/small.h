// A root-mean-square norm and rotary positions of few rows, each in one call; see small_operations.py.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace small {

template <typename T>
T mean_square(const T* x, int64_t width) {
    constexpr int64_t kWidth = Vector<T>::kWidth;
    typename Vector<T>::Type sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kWidth <= width; i += 4 * kWidth)
        for (int j = 0; j < 4; ++j) {
            const auto values = load(x + i + j * kWidth);
            sums[j] += values * values;
        }
    const auto all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    T total = 0;
    for (int64_t j = 0; j < kWidth; ++j) total += all[j];
    for (; i < width; ++i) total += x[i] * x[i];
    return total / T(width);
}

struct Norm {
    const void *x, *weight; // [rows, width], [width]
    void* out;              // [rows, width]
    int64_t rows, width, is_double;
    double eps, offset;     // the latter is added to the weight
};

template <typename T>
void norm(const Norm& p) {
    const T *x = static_cast<const T*>(p.x), *weight = static_cast<const T*>(p.weight), offset = T(p.offset);
    T* out = static_cast<T*>(p.out);
    for (int64_t row = 0; row < p.rows; ++row, x += p.width, out += p.width) {
        const T scale = T(1) / std::sqrt(mean_square(x, p.width) + T(p.eps));
        for (int64_t i = 0; i < p.width; ++i) out[i] = x[i] * scale * (weight[i] + offset);
    }
}

struct Heads {
    const void* x; // strides of batch, head and position
    void* out;
    int64_t heads, of_batch, of_head, of_position, out_of_batch, out_of_head, out_of_position;
};

struct Rotation {
    Heads query, key;
    const void *cos, *sin; // [batch or 1, length, turned]
    int64_t batch, length, width, turned, table_of_batch, is_double;
};

// The positions from `begin` to `end` of the batch's rows one after another; or their gradients.
template <typename T>
void rotate(const Rotation& p, const Heads& h, int64_t begin, int64_t end, bool is_backward = false) {
    const int64_t half = p.turned / 2;
    for (int64_t each = begin; each < end; ++each) {
        const int64_t b = each / p.length, position = each % p.length;
        const int64_t at = b * p.table_of_batch + position * p.turned;
        const T *cos = static_cast<const T*>(p.cos) + at, *sin = static_cast<const T*>(p.sin) + at;
        for (int64_t head = 0; head < h.heads; ++head) {
            const T* x = static_cast<const T*>(h.x) + b * h.of_batch + head * h.of_head + position * h.of_position;
            T* __restrict__ out =
                static_cast<T*>(h.out) + b * h.out_of_batch + head * h.out_of_head + position * h.out_of_position;
            if (is_backward) {
                for (int64_t i = 0; i < half; ++i) out[i] = x[i] * cos[i] + x[half + i] * sin[half + i];
                for (int64_t i = 0; i < half; ++i) out[half + i] = x[half + i] * cos[half + i] - x[i] * sin[i];
            } else {
                for (int64_t i = 0; i < half; ++i) out[i] = x[i] * cos[i] - x[half + i] * sin[i];
                for (int64_t i = 0; i < half; ++i) out[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
            }
            for (int64_t i = p.turned; i < p.width; ++i) out[i] = x[i];
        }
    }
}

} // namespace small
