// Products of a few rows of activations with a matrix of weights, as in decoding; see linear.py.
//
// Such a product is limited by memory bandwidth if every weight is read once. So the weights are traversed in memory
// order, a few rows at a time, the next ones are prefetched, and all rows of activations are multiplied with those at
// hand.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "half.h"
#include "threads.h"

namespace linear {

#if defined(__AVX512BW__)
constexpr int kBytes = 64; // of a register
#else
constexpr int kBytes = 32; // compilers divide them where the registers are shorter
#endif
typedef float Floats __attribute__((vector_size(kBytes)));
constexpr int kWidth = kBytes / 4;

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline Floats load(const BFloat16* from) {
    typedef uint16_t Narrow __attribute__((vector_size(kBytes / 2)));
    typedef uint32_t Wide __attribute__((vector_size(kBytes)));
    Narrow bits;
    std::memcpy(&bits, from, sizeof bits);
    const Wide wide = __builtin_convertvector(bits, Wide) << 16;
    Floats values;
    std::memcpy(&values, &wide, sizeof values);
    return values;
}

inline Floats load(const _Float16* from) {
#if defined(__AVX512BW__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    __m128i halves;
    std::memcpy(&halves, from, sizeof halves);
    return _mm256_cvtph_ps(halves);
#else
    typedef _Float16 Halves __attribute__((vector_size(kBytes / 2)));
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return __builtin_convertvector(halves, Floats);
#endif
}

// Weights 2 * kWidth at a time: of bfloat16 the even ones, then the odd ones, which takes no conversion.
template <typename T>
inline void load_pair(const T* from, Floats& first, Floats& second) {
    first = load(from);
    second = load(from + kWidth);
}

inline void load_pair(const BFloat16* from, Floats& even, Floats& odd) {
    typedef uint32_t Bits __attribute__((vector_size(kBytes)));
    Bits bits;
    std::memcpy(&bits, from, sizeof bits);
    const Bits low = bits << 16, high = bits & 0xffff0000u;
    std::memcpy(&even, &low, sizeof even);
    std::memcpy(&odd, &high, sizeof odd);
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline float total(Floats v) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight parts[kBytes / 32];
    std::memcpy(parts, &v, sizeof parts);
    const Eight eight = kBytes > 32 ? parts[0] + parts[kBytes / 32 - 1] : parts[0];
    Four halves[2];
    std::memcpy(halves, &eight, sizeof halves);
    const Four four = halves[0] + halves[1];
    return (four[0] + four[1]) + (four[2] + four[3]);
}

// Into the second-level cache: the first one cannot wait for as many lines at once, which halves the bandwidth.
template <typename T>
inline void prefetch(const T* address) {
    __builtin_prefetch(address, 0, 2);
}

struct Narrowed; // of bytes.h

struct Product {
    const float* x;      // [rows, inner]
    const void *w, *bias; // [outer, inner], or [inner, outer] of Conv1D; [outer] or null
    void* out;           // [rows, outer]
    int64_t rows, inner, outer;
    int64_t out_row; // elements from a row of out to the next
    // of weights of 8 bits only:
    const Narrowed* narrowed = nullptr; // x
    const float* scale = nullptr;       // [outer], the units of w
};

template <typename T>
inline float bias_of(const Product& p, int64_t n) {
    return p.bias ? float(static_cast<const T*>(p.bias)[n]) : 0.0f;
}

// Weights [outer, inner] ----------------------------------------------------------------------------------------------

// R rows of x times C rows of w, with R * C sums in registers.
template <typename T, typename O, int R, int C, bool kPrefetch>
inline __attribute__((always_inline)) void tile(const Product& p, int64_t row, int64_t n) {
    constexpr int kLine = 64 / sizeof(T), kStep = kLine > 2 * kWidth ? kLine : 2 * kWidth;
    const int64_t inner = p.inner;
    const float* x = p.x + row * inner;
    const T* w = static_cast<const T*>(p.w) + n * inner;
    Floats sums[C][R] = {};
    int64_t k = 0;
    for (; k + kStep <= inner; k += kStep) {
        if (kPrefetch)
            for (int c = 0; c < C; ++c)
                for (int i = 0; i < kStep; i += kLine) prefetch(w + (C + c) * inner + k + i);
        for (int i = 0; i < kStep; i += 2 * kWidth) {
            Floats b[C][2];
            for (int c = 0; c < C; ++c) load_pair(w + c * inner + k + i, b[c][0], b[c][1]);
            for (int h = 0; h < 2; ++h)
                for (int r = 0; r < R; ++r) {
                    const Floats a = load(x + r * inner + k + i + h * kWidth);
                    for (int c = 0; c < C; ++c) sums[c][r] += a * b[c][h];
                }
        }
    }
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < R; ++r) {
            float sum = total(sums[c][r]);
            for (int64_t j = k; j < inner; ++j) sum += x[r * inner + j] * float(w[c * inner + j]);
            static_cast<O*>(p.out)[(row + r) * p.out_row + n + c] = O(sum + bias_of<O>(p, n + c));
        }
}

template <typename T, typename O, int R, int C>
inline void all_rows(const Product& p, int64_t n) {
    tile<T, O, R, C, true>(p, 0, n);
    int64_t row = R;
    for (; row + R <= p.rows; row += R) tile<T, O, R, C, false>(p, row, n);
    if constexpr (R > 4)
        for (; row + 4 <= p.rows; row += 4) tile<T, O, 4, C, false>(p, row, n);
    for (; row < p.rows; ++row) tile<T, O, 1, C, false>(p, row, n);
}

template <typename T, typename O, int R, int C>
void by_rows(const Product& p, int64_t n, int64_t end) {
    for (; n + C <= end; n += C) all_rows<T, O, R, C>(p, n);
    if (n < end) all_rows<T, O, R, C>(p, end - C); // recomputes some columns, with the same result
}

template <typename T, typename O = T>
void outer_first(const Product& p, int64_t begin, int64_t end) {
    switch (p.rows) { // as many sums as fit into registers
        case 1: return by_rows<T, O, 1, 8>(p, begin, end);
        case 2: return by_rows<T, O, 2, 6>(p, begin, end);
        case 3: return by_rows<T, O, 3, 4>(p, begin, end);
#if defined(__AVX512BW__)
        case 4: return by_rows<T, O, 4, 6>(p, begin, end);
        case 5: return by_rows<T, O, 5, 4>(p, begin, end);
        case 6: return by_rows<T, O, 6, 4>(p, begin, end);
        case 7: return by_rows<T, O, 7, 3>(p, begin, end);
        default: return by_rows<T, O, 8, 3>(p, begin, end);
#else
        default: return by_rows<T, O, 4, 3>(p, begin, end);
#endif
    }
}

#include "bytes.h"

// Weights [inner, outer] ----------------------------------------------------------------------------------------------

constexpr int64_t kColumns = 1024; // their sums stay in the second-level cache
constexpr int64_t kChain = 256;    // terms per running sum, which limits its rounding error

// Add the products with K rows of w to R rows of sums.
template <typename T, int R, int K, bool kPrefetch>
inline __attribute__((always_inline)) void add(
    const Product& p, float* sums, int64_t row, int64_t k, int64_t n, int64_t count) {
    const T* w = static_cast<const T*>(p.w) + k * p.outer + n;
    Floats x[R][K];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < K; ++i) x[r][i] = p.x[(row + r) * p.inner + k + i] - Floats{};
    int64_t c = 0;
    for (; c + kWidth <= count; c += kWidth) {
        if (kPrefetch && c * sizeof(T) % 64 == 0)
            for (int i = 0; i < K; ++i) prefetch(w + (K + i) * p.outer + c);
        Floats sum[R];
        for (int r = 0; r < R; ++r) sum[r] = load(sums + r * kColumns + c);
        for (int i = 0; i < K; ++i) {
            const Floats b = load(w + i * p.outer + c);
            for (int r = 0; r < R; ++r) sum[r] += x[r][i] * b;
        }
        for (int r = 0; r < R; ++r) store(sums + r * kColumns + c, sum[r]);
    }
    for (; c < count; ++c)
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < K; ++i) sums[r * kColumns + c] += x[r][i][0] * float(w[i * p.outer + c]);
}

template <typename T, int R, int K>
inline void add_all(const Product& p, float* sums, int64_t k, int64_t n, int64_t count) {
    add<T, R, K, true>(p, sums, 0, k, n, count);
    int64_t row = R;
    for (; row + R <= p.rows; row += R) add<T, R, K, false>(p, sums + row * kColumns, row, k, n, count);
    for (; row < p.rows; ++row) add<T, 1, K, false>(p, sums + row * kColumns, row, k, n, count);
}

template <typename T, int R, int K>
void by_columns(const Product& p, int64_t n, int64_t end) {
    std::vector<float> sums(p.rows * kColumns), totals(p.rows * kColumns);
    for (; n < end; n += kColumns) {
        const int64_t count = end - n < kColumns ? end - n : kColumns;
        for (int64_t row = 0; row < p.rows; ++row)
            for (int64_t c = 0; c < count; ++c) totals[row * kColumns + c] = bias_of<T>(p, n + c);
        for (int64_t k = 0; k < p.inner;) {
            std::memset(sums.data(), 0, sums.size() * sizeof(float));
            const int64_t stop = k + kChain < p.inner ? k + kChain : p.inner;
            for (; k + K <= stop; k += K) add_all<T, R, K>(p, sums.data(), k, n, count);
            for (; k < stop; ++k) add_all<T, R, 1>(p, sums.data(), k, n, count);
            for (size_t i = 0; i < sums.size(); ++i) totals[i] += sums[i];
        }
        for (int64_t row = 0; row < p.rows; ++row)
            for (int64_t c = 0; c < count; ++c)
                static_cast<T*>(p.out)[row * p.out_row + n + c] = T(totals[row * kColumns + c]);
    }
}

template <typename T>
void inner_first(const Product& p, int64_t begin, int64_t end) {
    if (p.rows == 1)
        by_columns<T, 1, 8>(p, begin, end);
    else
        by_columns<T, 2, 4>(p, begin, end);
}

// Threads and types ---------------------------------------------------------------------------------------------------

using Part = void (*)(const Product&, int64_t, int64_t);

template <typename T>
inline const float* widened(const void* x, int64_t count, std::vector<float>& buffer) {
    buffer.resize(count);
    for (int64_t i = 0; i < count; ++i) buffer[i] = float(static_cast<const T*>(x)[i]);
    return buffer.data();
}

// x in the order of `load_pair` of bfloat16, up to the columns that do not fill a cache line of weights.
inline const float* paired(const float* x, int64_t rows, int64_t inner, std::vector<float>& buffer) {
    constexpr int kStep = 32 > 2 * kWidth ? 32 : 2 * kWidth; // of `tile`
    std::vector<float> sorted(rows * inner);
    for (int64_t row = 0; row < rows; ++row) {
        const float* from = x + row * inner;
        float* to = sorted.data() + row * inner;
        const int64_t full = inner / kStep * kStep;
        int64_t k = 0;
        for (; k < full; k += 2 * kWidth)
            for (int i = 0; i < kWidth; ++i) to[k + i] = from[k + 2 * i], to[k + kWidth + i] = from[k + 2 * i + 1];
        for (; k < inner; ++k) to[k] = from[k];
    }
    buffer.swap(sorted);
    return buffer.data();
}

// Buffers for converted copies of the activations.
struct Scratch {
    std::vector<float> wide, pairs;
    Narrowed narrowed;
};

// Convert x as the kernels need it, complete the product, and return the kernel. `kind` and `is_inner_first` are
// oslo_linear's arguments.
inline Part prepare(Product& p, const void* x, int64_t kind, bool is_inner_first, Scratch& scratch) {
    const int64_t count = p.rows * p.inner;
    p.x = static_cast<const float*>(x);
    if (kind == 1) p.x = widened<BFloat16>(x, count, scratch.wide);
    if (kind == 2) p.x = widened<_Float16>(x, count, scratch.wide);
    if (!is_inner_first && (kind == 1 || kind == 3)) p.x = paired(p.x, p.rows, p.inner, scratch.pairs);
    if (kind == 4) {
        narrow_rows(p.x, p.rows, p.inner, scratch.narrowed);
        p.narrowed = &scratch.narrowed;
    }
    static const Part parts[5][2] = {
        {outer_first<float>, inner_first<float>},
        {outer_first<BFloat16>, inner_first<BFloat16>},
        {outer_first<_Float16>, inner_first<_Float16>},
        {outer_first<BFloat16, float>, nullptr},
        {of_bytes, nullptr},
    };
    return parts[kind][is_inner_first];
}

// Products to compute one after another. Each thread computes its share of each.
struct Work {
    const Product* products;
    Part part;
    int count;
};

inline void share(void* given) {
    const Work& work = *static_cast<Work*>(given);
    for (int i = 0; i < work.count; ++i) {
        const Share mine(work.products[i].outer, 16);
        if (mine.begin < mine.end) work.part(work.products[i], mine.begin, mine.end);
    }
}

inline void run(Work work, int64_t threads) {
    if (threads > 1)
        GOMP_parallel(share, &work, static_cast<unsigned>(threads), 0);
    else
        for (int i = 0; i < work.count; ++i) work.part(work.products[i], 0, work.products[i].outer);
}

} // namespace linear
