// Attention of one query per row over a cache of keys and values, as in decoding; see decode_attention.py.
//
// A row's keys are read once for all queries of a group, in blocks that stay in the first cache. Keys that a mask hides
// are neither read nor counted.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace attention {

constexpr int64_t kBlock = 32; // keys, or values, of a block

template <typename T>
inline void store(T* to, const typename Vector<T>::Type& values) {
    std::memcpy(to, &values, sizeof values);
}

template <typename T>
inline T total(const typename Vector<T>::Type& values) {
    typename Vector<T>::Half halves[2];
    std::memcpy(halves, &values, sizeof values);
    const auto half = halves[0] + halves[1];
    T sum = half[0] + half[1];
    if constexpr (sizeof(T) == 4) sum += half[2] + half[3];
    return sum;
}

template <typename T>
inline T dot(const T* x, const T* y, int64_t width) {
    constexpr int64_t kWidth = Vector<T>::kWidth;
    typename Vector<T>::Type sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * kWidth <= width; i += 2 * kWidth)
        for (int j = 0; j < 2; ++j) sums[j] += load(x + i + j * kWidth) * load(y + i + j * kWidth);
    T sum = total<T>(sums[0] + sums[1]);
    for (; i < width; ++i) sum += x[i] * y[i];
    return sum;
}

// out += weights[i] * values[i] of `count` vectors, which lie `stride` apart; N registers' width of each.
template <typename T, int N>
inline void add_part(T* out, const T* values, int64_t stride, const T* weights, int64_t count) {
    constexpr int64_t kWidth = Vector<T>::kWidth;
    typename Vector<T>::Type sums[N] = {};
    for (int64_t i = 0; i < count; ++i)
        for (int j = 0; j < N; ++j) sums[j] += weights[i] * load(values + i * stride + j * kWidth);
    for (int j = 0; j < N; ++j) store(out + j * kWidth, load(out + j * kWidth) + sums[j]);
}

template <typename T>
inline void add(T* out, const T* values, int64_t stride, const T* weights, int64_t count, int64_t width) {
    constexpr int64_t kWidth = Vector<T>::kWidth;
    int64_t at = 0;
    for (; at + 4 * kWidth <= width; at += 4 * kWidth) add_part<T, 4>(out + at, values + at, stride, weights, count);
    for (; at + kWidth <= width; at += kWidth) add_part<T, 1>(out + at, values + at, stride, weights, count);
    for (; at < width; ++at)
        for (int64_t i = 0; i < count; ++i) out[at] += weights[i] * values[i * stride + at];
}

// exp(x) of numbers up to 0, in place. Below -87, where a float would be subnormal, it is 0.
inline void exponentials(float* x, int64_t count) {
    typedef int32_t Integers __attribute__((vector_size(32)));
    typedef Vector<float>::Type Floats;
    constexpr int64_t kWidth = Vector<float>::kWidth;
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) {
        // 2^n e^r, with r between -ln(2) / 2 and ln(2) / 2 and the Taylor series of e^r, with a remainder below 2e-8
        const Floats given = load(x + i), low = given < -87.0f ? Floats{} - 87.0f : given;
        const Integers n = __builtin_convertvector(low * 1.44269504f - 0.5f, Integers); // to the nearest, as it is negative
        const Floats whole = __builtin_convertvector(n, Floats);
        const Floats r = (low - whole * 0.693359375f) + whole * 2.12194440e-4f; // ln(2) in two parts
        Floats sum = r * (1.0f / 5040) + 1.0f / 720;
        sum = sum * r + 1.0f / 120;
        sum = sum * r + 1.0f / 24;
        sum = sum * r + 1.0f / 6;
        sum = sum * r + 0.5f;
        sum = sum * r + 1.0f;
        sum = sum * r + 1.0f;
        const Integers exponent = (n + 127) << 23;
        Floats power;
        std::memcpy(&power, &exponent, sizeof power);
        store(x + i, given < -87.0f ? Floats{} : sum * power);
    }
    for (; i < count; ++i) x[i] = std::exp(x[i]);
}

inline void exponentials(double* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] = std::exp(x[i]);
}

// Use several partial sums, since the rounding error grows with the length of a sum.
template <typename T>
inline T sum_of(const T* x, int64_t count) {
    constexpr int64_t kWidth = Vector<T>::kWidth;
    typename Vector<T>::Type sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * kWidth <= count; i += 2 * kWidth)
        for (int j = 0; j < 2; ++j) sums[j] += load(x + i + j * kWidth);
    T sum = total<T>(sums[0] + sums[1]);
    for (; i < count; ++i) sum += x[i];
    return sum;
}

struct Attention {
    const void *query, *key, *value; // [batch, heads, 1, width], [batch, groups, keys, width or value_width]
    const void *shown, *added;       // 0, or one byte or one number for each score, [batch, heads, 1, keys]
    void* out;                       // [batch, 1, heads, value_width], dense
    int64_t batch, heads, groups, keys, width, value_width;
    int64_t query_of[2], key_of[3], value_of[3], shown_of[2], added_of[2]; // strides of batch, head and position
    int64_t is_double, threads;
    double scale;
};

template <typename T>
struct Scratch {
    std::vector<T> weights;      // [heads of a group, keys]
    std::vector<T> largest;      // by head
    std::vector<const T*> added; // by head
    std::vector<const uint8_t*> shown;
};

// The heads of one group of one row.
template <typename T>
void attend(const Attention& p, int64_t row, int64_t group, Scratch<T>& s) {
    const T lowest = -std::numeric_limits<T>::infinity(), scale = T(p.scale);
    const int64_t heads = p.heads / p.groups, first = group * heads;
    const T* queries = static_cast<const T*>(p.query) + row * p.query_of[0] + first * p.query_of[1];
    const T* keys = static_cast<const T*>(p.key) + row * p.key_of[0] + group * p.key_of[1];
    const T* values = static_cast<const T*>(p.value) + row * p.value_of[0] + group * p.value_of[1];
    T* out = static_cast<T*>(p.out) + (row * p.heads + first) * p.value_width;
    s.weights.resize(heads * p.keys), s.largest.assign(heads, lowest);
    s.shown.assign(heads, nullptr), s.added.assign(heads, nullptr);
    for (int64_t h = 0; h < heads; ++h) {
        if (p.shown) s.shown[h] = static_cast<const uint8_t*>(p.shown) + row * p.shown_of[0] + (first + h) * p.shown_of[1];
        if (p.added) s.added[h] = static_cast<const T*>(p.added) + row * p.added_of[0] + (first + h) * p.added_of[1];
    }
    for (int64_t begin = 0; begin < p.keys; begin += kBlock) {
        const int64_t end = begin + kBlock < p.keys ? begin + kBlock : p.keys;
        for (int64_t h = 0; h < heads; ++h) {
            const uint8_t* shown = s.shown[h];
            T *weights = s.weights.data() + h * p.keys, largest = s.largest[h];
            for (int64_t k = begin; k < end; ++k) {
                T score = lowest;
                if (!shown || shown[k]) {
                    score = scale * dot(queries + h * p.query_of[1], keys + k * p.key_of[2], p.width);
                    if (s.added[h]) score += s.added[h][k];
                }
                weights[k] = score;
                largest = score > largest || score != score ? score : largest;
            }
            s.largest[h] = largest;
        }
    }
    for (int64_t h = 0; h < heads; ++h) {
        T* weights = s.weights.data() + h * p.keys;
        const T largest = s.largest[h] == lowest ? T(0) : s.largest[h];
        for (int64_t k = 0; k < p.keys; ++k) weights[k] -= largest;
        exponentials(weights, p.keys);
        const T sum = sum_of(weights, p.keys);
        const T inverse = sum == 0 ? T(0) : T(1) / sum; // zeros where no key is shown, as torch
        for (int64_t k = 0; k < p.keys; ++k) weights[k] *= inverse;
        for (int64_t i = 0; i < p.value_width; ++i) out[h * p.value_width + i] = 0;
    }
    for (int64_t begin = 0; begin < p.keys; begin += kBlock) {
        const int64_t end = begin + kBlock < p.keys ? begin + kBlock : p.keys;
        for (int64_t h = 0; h < heads; ++h) {
            const T* weights = s.weights.data() + h * p.keys;
            int64_t first_seen = begin;
            while (first_seen < end && weights[first_seen] == 0) ++first_seen;
            add(out + h * p.value_width, values + first_seen * p.value_of[2], p.value_of[2], weights + first_seen,
                end - first_seen, p.value_width);
        }
    }
}

template <typename T>
void attend(const Attention& p, int64_t begin, int64_t end) {
    thread_local Scratch<T> scratch;
    for (int64_t i = begin; i < end; ++i) attend<T>(p, i / p.groups, i % p.groups, scratch);
}

inline void part(const Attention& p, int64_t begin, int64_t end) {
    p.is_double ? attend<double>(p, begin, end) : attend<float>(p, begin, end);
}

inline void share(void* given) {
    const Attention& p = *static_cast<const Attention*>(given);
    const Share mine(p.batch * p.groups);
    part(p, mine.begin, mine.end);
}

inline void run(Attention& p) {
    if (p.threads > 1)
        GOMP_parallel(share, &p, static_cast<unsigned>(p.threads), 0);
    else
        part(p, 0, p.batch * p.groups);
}

} // namespace attention
