// A root-mean-square norm and rotary positions with their gradients, in one pass each; see passes.py.

#include <initializer_list>

#include "small.h"
#include "threads.h"

namespace {

// One call, divided among threads by rows or positions.
template <typename Call>
struct Work {
    const Call& call;
    int64_t count;

    static void part(void* given) {
        const Work& work = *static_cast<Work*>(given);
        const Share mine(work.count);
        if (mine.begin < mine.end) work.call(mine.begin, mine.end, omp_get_thread_num());
    }
};

template <typename Call>
void divide(int64_t count, int64_t threads, const Call& call) {
    Work<Call> work{call, count};
    if (threads > 1)
        GOMP_parallel(Work<Call>::part, &work, static_cast<unsigned>(threads), 0);
    else
        call(0, count, 0);
}

struct Norm {
    const void *x, *weight; // [rows, width], [width]
    void *out, *scale;      // [rows, width], [rows]
    const void* grad;       // [rows, width], or null: compute `out`
    void *of_x, *of_weight; // [rows, width], [threads, width] that is zero
    int64_t rows, width, is_double, threads;
    double eps, offset;     // the latter is added to the weight
};

template <typename T>
void norm_rows(const Norm& p, int64_t begin, int64_t end) {
    const T *weight = static_cast<const T*>(p.weight), offset = T(p.offset);
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(p.x) + row * p.width;
        T* __restrict__ out = static_cast<T*>(p.out) + row * p.width;
        const T scale = T(1) / std::sqrt(small::mean_square(x, p.width) + T(p.eps));
        for (int64_t i = 0; i < p.width; ++i) out[i] = x[i] * scale * (weight[i] + offset);
        static_cast<T*>(p.scale)[row] = scale;
    }
}

// The sum of x grad (weight + offset).
template <typename T>
T weighted(const T* x, const T* grad, const T* weight, T offset, int64_t width) {
    constexpr int64_t kWidth = Vector<T>::kWidth;
    typename Vector<T>::Type sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * kWidth <= width; i += 2 * kWidth)
        for (int64_t j = 0; j < 2; ++j) {
            const int64_t at = i + j * kWidth;
            sums[j] += load(x + at) * load(grad + at) * (load(weight + at) + offset);
        }
    const auto all = sums[0] + sums[1];
    T total = 0;
    for (int64_t j = 0; j < kWidth; ++j) total += all[j];
    for (; i < width; ++i) total += x[i] * grad[i] * (weight[i] + offset);
    return total;
}

template <typename T>
void norm_gradients(const Norm& p, int64_t begin, int64_t end, int64_t thread) {
    const T *weight = static_cast<const T*>(p.weight), offset = T(p.offset);
    T* __restrict__ of_weight = static_cast<T*>(p.of_weight) + thread * p.width;
    for (int64_t row = begin; row < end; ++row) {
        const T *x = static_cast<const T*>(p.x) + row * p.width, *grad = static_cast<const T*>(p.grad) + row * p.width;
        T* __restrict__ of_x = static_cast<T*>(p.of_x) + row * p.width;
        const T scale = static_cast<const T*>(p.scale)[row];
        const T shared = weighted(x, grad, weight, offset, p.width) * scale * scale / T(p.width);
        for (int64_t i = 0; i < p.width; ++i) {
            of_x[i] = scale * (grad[i] * (weight[i] + offset) - x[i] * shared);
            of_weight[i] += grad[i] * x[i] * scale;
        }
    }
}

} // namespace

// Whether more than one thread can be used.
extern "C" int oslo_passes_threads(void) { return has_threads(); }

// out = x * scale * (weight + offset), and scale = 1 / sqrt(mean(x^2) + eps), of dense rows; or their gradients.
extern "C" void oslo_norm(const void* arguments) {
    Norm p;
    std::memcpy(&p, arguments, sizeof p);
    divide(p.rows, p.threads, [&](int64_t begin, int64_t end, int64_t thread) {
        if (p.grad)
            p.is_double ? norm_gradients<double>(p, begin, end, thread) : norm_gradients<float>(p, begin, end, thread);
        else
            p.is_double ? norm_rows<double>(p, begin, end) : norm_rows<float>(p, begin, end);
    });
}

struct ManyRotations {
    small::Rotation rotation;
    int64_t is_backward, threads;
};

// As oslo_rotate of small.cpp, divided among threads; or its gradients.
extern "C" void oslo_rotate_many(const void* arguments) {
    ManyRotations p;
    std::memcpy(&p, arguments, sizeof p);
    const small::Rotation& r = p.rotation;
    divide(r.batch * r.length, p.threads, [&](int64_t begin, int64_t end, int64_t) {
        for (const small::Heads* heads : {&r.query, &r.key})
            r.is_double ? small::rotate<double>(r, *heads, begin, end, p.is_backward)
                        : small::rotate<float>(r, *heads, begin, end, p.is_backward);
    });
}
