// The two passes over the logits of a linear cross entropy on a CPU; see cross_entropy.py.

#include "attention.h"
#include "threads.h"

namespace {

struct Rows {
    void* logits;           // [rows, columns], rows `stride` apart
    const int64_t* columns_of; // [rows]: column of the target; -1 if it is on another rank; -2 if the row is ignored
    void* statistics;       // [4, rows]: maximum, sum of exponentials, target's logit, sum of logits
    const void* log_total;  // [rows], or null: make the statistics
    int64_t rows, columns, stride, is_double, threads;
    double hit, rest;       // of the gradient
};

constexpr int64_t kBlock = 1024; // stays in the first-level cache

template <typename T>
T highest(const T* x, int64_t count) {
    constexpr int64_t kWidth = Vector<T>::kWidth;
    T found = x[0];
    int64_t i = 0;
    if (count >= kWidth) {
        auto most = load(x);
        for (i = kWidth; i + kWidth <= count; i += kWidth) {
            const auto values = load(x + i);
            most = values > most ? values : most;
        }
        for (int64_t j = 0; j < kWidth; ++j) found = most[j] > found ? most[j] : found;
    }
    for (; i < count; ++i) found = x[i] > found ? x[i] : found;
    return found;
}

template <typename T>
T total(const T* x, int64_t count) {
    constexpr int64_t kWidth = Vector<T>::kWidth;
    typename Vector<T>::Type sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * kWidth <= count; i += 2 * kWidth) sums[0] += load(x + i), sums[1] += load(x + i + kWidth);
    const auto both = sums[0] + sums[1];
    T sum = 0;
    for (int64_t j = 0; j < kWidth; ++j) sum += both[j];
    for (; i < count; ++i) sum += x[i];
    return sum;
}

template <typename T>
void statistics(const Rows& p, int64_t begin, int64_t end) {
    T block[kBlock], *out = static_cast<T*>(p.statistics);
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(p.logits) + row * p.stride;
        const T most = highest(x, p.columns);
        double exponential = 0, plain = 0; // of many blocks
        for (int64_t first = 0; first < p.columns; first += kBlock) {
            const int64_t n = p.columns - first < kBlock ? p.columns - first : kBlock;
            for (int64_t i = 0; i < n; ++i) block[i] = x[first + i] - most;
            attention::exponentials(block, n);
            exponential += total(block, n);
            plain += total(x + first, n);
        }
        const int64_t column = p.columns_of[row];
        out[row] = most;
        out[p.rows + row] = T(exponential);
        out[2 * p.rows + row] = column < 0 ? T(0) : x[column];
        out[3 * p.rows + row] = T(plain);
    }
}

template <typename T>
void gradient(const Rows& p, int64_t begin, int64_t end) {
    const T rest = T(p.rest);
    for (int64_t row = begin; row < end; ++row) {
        T* x = static_cast<T*>(p.logits) + row * p.stride;
        const int64_t column = p.columns_of[row];
        if (column == -2) {
            std::memset(x, 0, p.columns * sizeof(T));
            continue;
        }
        const T log_total = static_cast<const T*>(p.log_total)[row];
        for (int64_t first = 0; first < p.columns; first += kBlock) {
            T* part = x + first;
            const int64_t n = p.columns - first < kBlock ? p.columns - first : kBlock;
            for (int64_t i = 0; i < n; ++i) part[i] -= log_total;
            attention::exponentials(part, n);
            if (rest != 0)
                for (int64_t i = 0; i < n; ++i) part[i] -= rest;
        }
        if (column >= 0) x[column] -= T(p.hit);
    }
}

template <typename T>
void compute(const Rows& p, int64_t begin, int64_t end) {
    p.log_total ? gradient<T>(p, begin, end) : statistics<T>(p, begin, end);
}

void compute_any(const Rows& p, int64_t begin, int64_t end) {
    p.is_double ? compute<double>(p, begin, end) : compute<float>(p, begin, end);
}

void share(void* given) {
    const Rows& p = *static_cast<Rows*>(given);
    const Share mine(p.rows);
    if (mine.begin < mine.end) compute_any(p, mine.begin, mine.end);
}

} // namespace

// Whether more than one thread can be used.
extern "C" int oslo_logits_threads(void) { return has_threads(); }

// The statistics of rows, or in place of the logits exp(logit - log_total) - rest, less `hit` in the target's column.
extern "C" void oslo_logits(const void* arguments) {
    Rows p;
    std::memcpy(&p, arguments, sizeof p);
    if (p.threads > 1)
        GOMP_parallel(share, &p, static_cast<unsigned>(p.threads), 0);
    else
        compute_any(p, 0, p.rows);
}
