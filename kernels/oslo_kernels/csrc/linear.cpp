// Products of a few rows of activations with a matrix of weights, as in decoding; see linear.py.
//
// Such a product is limited by memory bandwidth if every weight is read once. So the weights are traversed in memory
// order, a few rows at a time, the next ones are prefetched, and all rows of activations are multiplied with those at
// hand.

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "half.h"
#include "threads.h"

namespace {

typedef float Floats __attribute__((vector_size(32)));
constexpr int kWidth = 8;

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline Floats load(const BFloat16* from) {
    typedef uint16_t Narrow __attribute__((vector_size(16)));
    typedef uint32_t Wide __attribute__((vector_size(32)));
    Narrow bits;
    std::memcpy(&bits, from, sizeof bits);
    const Wide wide = __builtin_convertvector(bits, Wide) << 16;
    Floats values;
    std::memcpy(&values, &wide, sizeof values);
    return values;
}

inline Floats load(const _Float16* from) {
#if defined(__F16C__)
    __m128i halves;
    std::memcpy(&halves, from, sizeof halves);
    return _mm256_cvtph_ps(halves);
#else
    typedef _Float16 Halves __attribute__((vector_size(16)));
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
    typedef uint32_t Bits __attribute__((vector_size(32)));
    Bits bits;
    std::memcpy(&bits, from, sizeof bits);
    const Bits low = bits << 16, high = bits & 0xffff0000u;
    std::memcpy(&even, &low, sizeof even);
    std::memcpy(&odd, &high, sizeof odd);
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline float total(Floats v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

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
    constexpr int kStep = 64 / sizeof(T); // a cache line
    const int64_t inner = p.inner;
    const float* x = p.x + row * inner;
    const T* w = static_cast<const T*>(p.w) + n * inner;
    Floats sums[C][R] = {};
    int64_t k = 0;
    for (; k + kStep <= inner; k += kStep) {
        if (kPrefetch)
            for (int c = 0; c < C; ++c) prefetch(w + (C + c) * inner + k);
        for (int i = 0; i < kStep; i += 2 * kWidth) {
            Floats a[R][2];
            for (int r = 0; r < R; ++r)
                for (int h = 0; h < 2; ++h) a[r][h] = load(x + r * inner + k + i + h * kWidth);
            for (int c = 0; c < C; ++c) {
                Floats b[2];
                load_pair(w + c * inner + k + i, b[0], b[1]);
                for (int h = 0; h < 2; ++h)
                    for (int r = 0; r < R; ++r) sums[c][r] += a[r][h] * b[h];
            }
        }
    }
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < R; ++r) {
            float sum = total(sums[c][r]);
            for (int64_t j = k; j < inner; ++j) sum += x[r * inner + j] * float(w[c * inner + j]);
            static_cast<O*>(p.out)[(row + r) * p.outer + n + c] = O(sum + bias_of<O>(p, n + c));
        }
}

template <typename T, typename O, int R, int C>
inline void all_rows(const Product& p, int64_t n) {
    tile<T, O, R, C, true>(p, 0, n);
    int64_t row = R;
    for (; row + R <= p.rows; row += R) tile<T, O, R, C, false>(p, row, n);
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
        default: return by_rows<T, O, 4, 3>(p, begin, end);
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
                static_cast<T*>(p.out)[row * p.outer + n + c] = T(totals[row * kColumns + c]);
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

struct Work {
    const Product* product;
    Part part;
};

void share(void* given) {
    const Work& work = *static_cast<Work*>(given);
    const Share mine(work.product->outer, 16);
    if (mine.begin < mine.end) work.part(*work.product, mine.begin, mine.end);
}

template <typename T>
const float* widened(const void* x, int64_t count, std::vector<float>& buffer) {
    buffer.resize(count);
    for (int64_t i = 0; i < count; ++i) buffer[i] = float(static_cast<const T*>(x)[i]);
    return buffer.data();
}

// x in the order of `load_pair` of bfloat16, up to the columns that do not fill a cache line of weights.
const float* paired(const float* x, int64_t rows, int64_t inner, std::vector<float>& buffer) {
    std::vector<float> sorted(rows * inner);
    for (int64_t row = 0; row < rows; ++row) {
        const float* from = x + row * inner;
        float* to = sorted.data() + row * inner;
        const int64_t full = inner / 32 * 32;
        int64_t k = 0;
        for (; k < full; k += 16)
            for (int i = 0; i < kWidth; ++i) to[k + i] = from[k + 2 * i], to[k + kWidth + i] = from[k + 2 * i + 1];
        for (; k < inner; ++k) to[k] = from[k];
    }
    buffer.swap(sorted);
    return buffer.data();
}

} // namespace

// Whether more than one thread can be used.
extern "C" int oslo_linear_threads(void) { return has_threads(); }

// out = x w^T + bias, or x w + bias, with at least 8 columns; all tensors are dense. `a` holds x, w, bias or 0, out,
// rows, inner, outer, the kind (all tensors are 0 float32, 1 bfloat16, 2 float16; or float32 but for w, which is
// 3 bfloat16, 4 int8), whether w is [inner, outer] (not of kinds 3 and 4), the number of threads, and the scales of
// w's rows or 0.
extern "C" void oslo_linear(const int64_t* a) {
    thread_local std::vector<float> wide, pairs;
    thread_local Narrowed narrowed;
    const auto pointer = [&](int i) { return reinterpret_cast<void*>(a[i]); };
    const int64_t rows = a[4], inner = a[5], kind = a[7];
    Product p{static_cast<const float*>(pointer(0)), pointer(1), pointer(2), pointer(3), rows, inner, a[6]};
    if (kind == 1) p.x = widened<BFloat16>(pointer(0), rows * inner, wide);
    if (kind == 2) p.x = widened<_Float16>(pointer(0), rows * inner, wide);
    if (!a[8] && (kind == 1 || kind == 3)) p.x = paired(p.x, rows, inner, pairs);
    if (kind == 4) {
        narrow_rows(p.x, rows, inner, narrowed);
        p.narrowed = &narrowed, p.scale = static_cast<const float*>(pointer(10));
    }
    static const Part parts[5][2] = {
        {outer_first<float>, inner_first<float>},
        {outer_first<BFloat16>, inner_first<BFloat16>},
        {outer_first<_Float16>, inner_first<_Float16>},
        {outer_first<BFloat16, float>, nullptr},
        {of_bytes, nullptr},
    };
    Work work{&p, parts[kind][a[8]]};
    if (a[9] > 1)
        GOMP_parallel(share, &work, static_cast<unsigned>(a[9]), 0);
    else
        work.part(p, 0, p.outer);
}
