// Products of few rows with weights [outer, inner] of 8 bits, a part of linear.cpp.
//
// x is rounded to 16 bits, in units of the largest value of each group of columns. Integer products take fewer
// instructions than converting the weights. The error of 2^-16 is far below the rounding error of the weights.

constexpr int64_t kGroup = 512; // their sum fits into 32 bits

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// x is 256 * high + low, two signed bytes. VNNI multiplies 64 weights at a time with each, without converting them. It
// takes the weights as unsigned, so 128 is added to them, and sums begin at minus what this adds.

constexpr int kColumnsFor[] = {0, 8, 4, 3, 2}; // as many sums as fit into registers, by rows

struct Narrowed {
    std::vector<int8_t> high, low;  // [rows, groups, kGroup], zero behind the last column
    std::vector<int32_t> begin;     // [rows, groups, 2, 16]: the first value of the sums with high and with low
    std::vector<float> units;       // [rows, groups]
    int64_t groups;
};

inline __m512i add_products_of_bytes(__m512i sum, __m512i weights, const int8_t* x) {
    return _mm512_dpbusd_epi32(sum, weights, _mm512_loadu_si512(x));
}

// One group of one row. Its unit becomes NaN if a value is not finite.
inline void halve(const float* x, int64_t count, int8_t* high, int8_t* low, int32_t* begin, float& unit) {
    const auto mask = [&](int64_t k) { return __mmask16(count - k < 16 ? (1u << (count - k)) - 1 : 0xffff); };
    __m512 most = _mm512_setzero_ps(), finite = most;
    for (int64_t k = 0; k < count; k += 16) {
        const __m512 values = _mm512_maskz_loadu_ps(mask(k), x + k);
        most = _mm512_max_ps(most, _mm512_abs_ps(values));
        finite = _mm512_fmadd_ps(values, _mm512_setzero_ps(), finite);
    }
    constexpr float kMost = 127 * 256 + 127;
    const float largest = _mm512_reduce_max_ps(most), zero = _mm512_reduce_add_ps(finite);
    const __m512 factor = _mm512_set1_ps(zero == 0 && largest > 1e-30f ? kMost / largest : 0.0f);
    unit = largest / kMost + zero;
    for (int64_t k = 0; k < kGroup; k += 16) {
        __m512i rounded = _mm512_setzero_si512();
        if (k < count && zero == 0) {
            const __m512 values = _mm512_maskz_loadu_ps(mask(k), x + k);
            rounded = _mm512_cvtps_epi32(_mm512_mul_ps(values, factor));
        }
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(128)), 8);
        const __m512i lower = _mm512_sub_epi32(rounded, _mm512_slli_epi32(upper, 8));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + k), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + k), _mm512_cvtepi32_epi8(lower));
    }
    const __m512i added = _mm512_set1_epi8(char(128));
    __m512i of_high = _mm512_setzero_si512(), of_low = of_high;
    for (int64_t k = 0; k < count; k += 64) {
        of_high = add_products_of_bytes(of_high, added, high + k);
        of_low = add_products_of_bytes(of_low, added, low + k);
    }
    _mm512_storeu_si512(begin, _mm512_sub_epi32(_mm512_setzero_si512(), of_high));
    _mm512_storeu_si512(begin + 16, _mm512_sub_epi32(_mm512_setzero_si512(), of_low));
}

inline void narrow_rows(const float* x, int64_t rows, int64_t inner, Narrowed& to) {
    to.groups = (inner + kGroup - 1) / kGroup;
    const int64_t all = rows * to.groups;
    to.high.resize(all * kGroup), to.low.resize(all * kGroup), to.begin.resize(all * 32), to.units.resize(all);
    for (int64_t i = 0; i < all; ++i) {
        const int64_t row = i / to.groups, first = i % to.groups * kGroup;
        const int64_t count = inner - first < kGroup ? inner - first : kGroup;
        const float* from = x + row * inner + first;
        halve(from, count, to.high.data() + i * kGroup, to.low.data() + i * kGroup, to.begin.data() + i * 32, to.units[i]);
    }
}

template <int R, int C, bool kPrefetch>
inline __attribute__((always_inline)) void tile_of_bytes(const Product& p, int64_t row, int64_t n) {
    const Narrowed& x = *p.narrowed;
    const int64_t inner = p.inner;
    const int8_t* w = static_cast<const int8_t*>(p.w) + n * inner;
    const __m512i flip = _mm512_set1_epi8(char(128));
    __m512 sums[C][R];
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < R; ++r) sums[c][r] = _mm512_setzero_ps();
    for (int64_t group = 0; group < x.groups; ++group) {
        const int64_t first = group * kGroup, count = inner - first < kGroup ? inner - first : kGroup;
        __m512i high[C][R], low[C][R];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) {
                const int32_t* begin = x.begin.data() + ((row + r) * x.groups + group) * 32;
                high[c][r] = _mm512_loadu_si512(begin);
                low[c][r] = _mm512_loadu_si512(begin + 16);
            }
        const auto step = [&](int64_t k, auto load_weights) __attribute__((always_inline)) {
            for (int c = 0; c < C; ++c) {
                const int8_t* from = w + c * inner + first + k;
                if (kPrefetch) prefetch(from + C * inner);
                const __m512i weights = _mm512_xor_si512(load_weights(from), flip);
                for (int r = 0; r < R; ++r) {
                    const int64_t at = ((row + r) * x.groups + group) * kGroup + k;
                    high[c][r] = add_products_of_bytes(high[c][r], weights, x.high.data() + at);
                    low[c][r] = add_products_of_bytes(low[c][r], weights, x.low.data() + at);
                }
            }
        };
        int64_t k = 0;
        for (; k + 64 <= count; k += 64) step(k, [](const int8_t* from) { return _mm512_loadu_si512(from); });
        if (k < count) {
            const __mmask64 mask = (uint64_t(1) << (count - k)) - 1;
            step(k, [&](const int8_t* from) { return _mm512_maskz_loadu_epi8(mask, from); });
        }
        for (int r = 0; r < R; ++r) {
            const __m512 unit = _mm512_set1_ps(x.units[(row + r) * x.groups + group]);
            for (int c = 0; c < C; ++c) {
                const __m512 upper = _mm512_mul_ps(_mm512_cvtepi32_ps(high[c][r]), _mm512_set1_ps(256));
                const __m512 both = _mm512_add_ps(upper, _mm512_cvtepi32_ps(low[c][r]));
                sums[c][r] = _mm512_fmadd_ps(both, unit, sums[c][r]);
            }
        }
    }
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < R; ++r)
            static_cast<float*>(p.out)[(row + r) * p.out_row + n + c] =
                __builtin_fmaf(_mm512_reduce_add_ps(sums[c][r]), p.scale[n + c], bias_of<float>(p, n + c)); // alike in every tile
}

#else

constexpr int kColumnsFor[] = {0, 8, 8, 6, 4};

struct Narrowed {
    std::vector<int16_t> values; // [rows, inner]
    std::vector<float> units;    // [rows, groups]
};

// x of one row in 16 bits, and its units. A group with a value that is not finite makes the row's sums NaN.
void narrow(const float* x, int64_t inner, int16_t* to, float* units) {
    for (int64_t begin = 0; begin < inner; begin += kGroup) {
        const int64_t end = begin + kGroup < inner ? begin + kGroup : inner;
        float most = 0, finite = 0;
        for (int64_t k = begin; k < end; ++k) {
            const float size = x[k] < 0 ? -x[k] : x[k];
            most = size > most ? size : most;
            finite += x[k] * 0;
        }
        const bool counts = finite == 0 && most > 1e-30f;
        for (int64_t k = begin; k < end; ++k) to[k] = counts ? int16_t(__builtin_rintf(x[k] * (32767 / most))) : 0;
        *units++ = most / 32767 + finite;
    }
}

void narrow_rows(const float* x, int64_t rows, int64_t inner, Narrowed& to) {
    const int64_t groups = (inner + kGroup - 1) / kGroup;
    to.values.resize(rows * inner), to.units.resize(rows * groups);
    for (int64_t row = 0; row < rows; ++row)
        narrow(x + row * inner, inner, to.values.data() + row * inner, to.units.data() + row * groups);
}

#if defined(__AVX512BW__)
typedef int32_t Ints __attribute__((vector_size(64)));
inline Ints eights(const int8_t* from) {
    return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Ints add_products(Ints sum, Ints a, Ints b) {
    return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
#elif defined(__AVX2__)
typedef int32_t Ints __attribute__((vector_size(32)));
inline Ints eights(const int8_t* from) {
    return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Ints add_products(Ints sum, Ints a, Ints b) { return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#else
typedef int32_t Ints __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(32)));
inline Ints eights(const int8_t* from) {
    Shorts wide;
    for (int i = 0; i < 16; ++i) wide[i] = from[i];
    return (Ints)wide;
}
inline Ints add_products(Ints sum, Ints a, Ints b) {
    const Shorts x = (Shorts)a, y = (Shorts)b;
    for (int i = 0; i < 8; ++i) sum[i] += int32_t(x[2 * i]) * y[2 * i] + int32_t(x[2 * i + 1]) * y[2 * i + 1];
    return sum;
}
#endif

typedef float Sums __attribute__((vector_size(sizeof(Ints))));

inline float total_of(Sums v) {
    Floats parts[sizeof(Sums) / sizeof(Floats)];
    std::memcpy(parts, &v, sizeof parts);
    return sizeof(Sums) > sizeof(Floats) ? total(parts[0] + parts[sizeof(Sums) / sizeof(Floats) - 1]) : total(parts[0]);
}

template <int R, int C, bool kPrefetch>
inline __attribute__((always_inline)) void tile_of_bytes(const Product& p, int64_t row, int64_t n) {
    constexpr int kStep = sizeof(Ints) / 2;
    const int64_t inner = p.inner, groups = (inner + kGroup - 1) / kGroup;
    const int16_t* x = p.narrowed->values.data() + row * inner;
    const float* units = p.narrowed->units.data() + row * groups;
    const int8_t* w = static_cast<const int8_t*>(p.w) + n * inner;
    Sums sums[C][R] = {};
    for (int64_t group = 0, k = 0; group < groups; ++group) {
        const int64_t stop = k + kGroup < inner ? k + kGroup : inner;
        Ints found[C][R] = {};
        for (; k + kStep <= stop; k += kStep) {
            Ints a[R];
            for (int r = 0; r < R; ++r) std::memcpy(&a[r], x + r * inner + k, sizeof a[r]);
            for (int c = 0; c < C; ++c) {
                if (kPrefetch && k % 64 == 0) prefetch(w + (C + c) * inner + k);
                const Ints b = eights(w + c * inner + k);
                for (int r = 0; r < R; ++r) found[c][r] = add_products(found[c][r], a[r], b);
            }
        }
        for (int r = 0; r < R; ++r) {
            const float unit = units[r * groups + group];
            for (int c = 0; c < C; ++c) {
                int32_t rest = 0;
                for (int64_t j = k; j < stop; ++j) rest += x[r * inner + j] * w[c * inner + j];
                found[c][r][0] += rest;
                sums[c][r] += __builtin_convertvector(found[c][r], Sums) * unit;
            }
        }
        k = stop;
    }
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < R; ++r)
            static_cast<float*>(p.out)[(row + r) * p.out_row + n + c] =
                __builtin_fmaf(total_of(sums[c][r]), p.scale[n + c], bias_of<float>(p, n + c)); // alike in every tile
}

#endif

template <int R, int C>
void by_rows_of_bytes(const Product& p, int64_t begin, int64_t end) {
    for (int64_t next = begin; next < end; next += C) {
        const int64_t n = next + C <= end ? next : end - C; // recomputes some columns, with the same result
        tile_of_bytes<R, C, true>(p, 0, n);
        int64_t row = R;
        for (; row + R <= p.rows; row += R) tile_of_bytes<R, C, false>(p, row, n);
        for (; row < p.rows; ++row) tile_of_bytes<1, C, false>(p, row, n);
    }
}

void of_bytes(const Product& p, int64_t begin, int64_t end) {
    switch (p.rows) {
        case 1: return by_rows_of_bytes<1, kColumnsFor[1]>(p, begin, end);
        case 2: return by_rows_of_bytes<2, kColumnsFor[2]>(p, begin, end);
        case 3: return by_rows_of_bytes<3, kColumnsFor[3]>(p, begin, end);
        default: return by_rows_of_bytes<4, kColumnsFor[4]>(p, begin, end);
    }
}
