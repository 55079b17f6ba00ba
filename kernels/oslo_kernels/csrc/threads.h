// The OpenMP runtime that the process has loaded, torch's, if any.

#pragma once

extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
__attribute__((weak)) int omp_get_thread_num(void);
__attribute__((weak)) int omp_get_num_threads(void);
}

// Whether more than one thread can be used.
inline bool has_threads() { return GOMP_parallel && omp_get_thread_num && omp_get_num_threads; }

// The part of `count` that the calling thread computes, in multiples of `step`.
struct Share {
    long begin, end;
    Share(long count, long step = 1) {
        const long threads = omp_get_num_threads(), each = ((count + threads - 1) / threads + step - 1) / step * step;
        begin = omp_get_thread_num() * each;
        end = begin + each < count ? begin + each : count;
    }
};
