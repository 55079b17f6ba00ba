// Vectors of 32 bytes. Compilers divide them where the registers are shorter.

#pragma once

#include <cstdint>
#include <cstring>

template <typename T>
struct Vector {
    static constexpr int64_t kWidth = 32 / sizeof(T);
    typedef T Type __attribute__((vector_size(32)));
    typedef T Half __attribute__((vector_size(16)));
};

template <typename T>
inline typename Vector<T>::Type load(const T* from) {
    typename Vector<T>::Type values;
    std::memcpy(&values, from, sizeof values);
    return values;
}
