// Products of float32 matrices by bfloat16 tile units (AMX); see split_product.py.
//
// Every number is the sum of three bfloat16 parts, largest first. Two numbers have nine products of parts. The three
// smallest are left out (second by third, third by second, third by third): together they are less than a rounding
// error.
//
// Sizes: a panel has 32 rows and `kTerms` terms, and a step has 32 terms. The panels of the right operand in use stay
// in the second-level cache, and the panels of the left operand stream through it.

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "threads.h"

namespace {

typedef uint32_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

constexpr int kSide = 16, kPanel = 32, kDepth = 32; // rows of a tile; rows of a panel; terms of a step
constexpr int kParts = 3;
constexpr int64_t kTile = kSide * kDepth;    // numbers of a tile
constexpr int64_t kStep = kParts * 2 * kTile; // of a panel's step: of each part, two tiles
constexpr int64_t kTerms = 512, kLeft = 1024, kRight = 256; // packed at a time: terms, rows of the operands

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename To, typename From>
inline To as(From from) {
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

// A matrix with the element (row, term) at data[row * of_row + term * of_term]. One of these strides is 1.
struct Operand {
    const float* data;
    int64_t of_row, of_term, rows;
};

// Packing -------------------------------------------------------------------------------------------------------------

// The parts of each number, in the upper halves of words. Finite values and sums of their parts never overflow to
// infinity. Infinities and NaNs set bits in `strange`.
inline void split(Floats x, Words parts[kParts], Words& strange) {
    const Words bits = as<Words>(x), magnitude = bits & 0x7fffffffu;
    const Words round = (Words)(magnitude < 0x7f7f8000u) & 0x8000u;
    strange |= (Words)(magnitude > 0x7f7fffffu);
    parts[0] = (bits + round) & 0xffff0000u;
    const Floats rest = x - as<Floats>(parts[0]);
    parts[1] = (as<Words>(rest) + round) & 0xffff0000u;
    parts[2] = as<Words>(rest - as<Floats>(parts[1])); // has no more digits
}

#define BOTH(...) __builtin_shufflevector(a, b, __VA_ARGS__)

inline void transpose(Words m[kSide]) {
    const auto swap = [m](int distance, auto low, auto high) {
        for (int i = 0; i < kSide; ++i)
            if (!(i & distance)) {
                const Words a = m[i], b = m[i + distance];
                m[i] = low(a, b);
                m[i + distance] = high(a, b);
            }
    };
    swap(8, [](Words a, Words b) { return BOTH(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23); },
         [](Words a, Words b) { return BOTH(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31); });
    swap(4, [](Words a, Words b) { return BOTH(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27); },
         [](Words a, Words b) { return BOTH(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31); });
    swap(2, [](Words a, Words b) { return BOTH(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29); },
         [](Words a, Words b) { return BOTH(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31); });
    swap(1, [](Words a, Words b) { return BOTH(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30); },
         [](Words a, Words b) { return BOTH(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31); });
}

#undef BOTH

// Pack tiles of 16 rows and 32 terms. A tile row of the left operand holds one matrix row. A tile row of the right
// operand holds one pair of terms, of all matrix rows in order. In both operands, terms t and t + 16 make a pair.
inline void pack_tiles(
    const float* data, int64_t of_row, int64_t of_term, bool is_left, uint16_t* to, Words& strange) {
    const bool by_rows = of_term == 1;
    const int64_t next = by_rows ? of_row : of_term, half = by_rows ? kSide : kSide * of_term;
    Words words[kParts][kSide];
    for (int i = 0; i < kSide; ++i) {
        Words first[kParts], second[kParts];
        split(load(data + i * next), first, strange);
        split(load(data + i * next + half), second, strange);
        for (int part = 0; part < kParts; ++part) words[part][i] = first[part] >> 16 | (second[part] & 0xffff0000u);
    }
    for (int part = 0; part < kParts; ++part) {
        if (by_rows != is_left) transpose(words[part]);
        for (int i = 0; i < kSide; ++i) std::memcpy(to + part * 2 * kTile + i * kDepth, &words[part][i], sizeof(Words));
    }
}

// A panel of up to 32 rows, and `count` terms; beyond them there are zeros.
void pack(
    const Operand& x, int64_t row, int64_t term, int64_t count, bool is_left, uint16_t* to, Words& strange) {
    for (int64_t end = term + count; term < end; term += kDepth, to += kStep)
        for (int upper = 0; upper < 2; ++upper) {
            const int64_t first = row + upper * kSide, rows = least(x.rows - first, kSide), terms = least(end - term, kDepth);
            uint16_t* tile = to + upper * kTile;
            if (rows == kSide && terms == kDepth) {
                pack_tiles(x.data + first * x.of_row + term * x.of_term, x.of_row, x.of_term, is_left, tile, strange);
                continue;
            }
            float block[kSide * kDepth] = {};
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t j = 0; j < terms; ++j)
                    block[i * kDepth + j] = x.data[(first + i) * x.of_row + (term + j) * x.of_term];
            pack_tiles(block, kDepth, 1, is_left, tile, strange);
        }
}

// Multiplying ---------------------------------------------------------------------------------------------------------

// In plain C++, for processors without such units: for tests, since it is slow.
struct Plain {
    static void multiply(const uint16_t* left, const uint16_t* right, int64_t steps, float* out, int64_t of_row) {
        for (int64_t i = 0; i < kPanel; ++i)
            for (int64_t j = 0; j < kPanel; ++j) {
                double sum = 0.0;
                for (int64_t step = 0; step < steps; ++step)
                    for (int p = 0; p < kParts; ++p)
                        for (int q = 0; p + q < kParts; ++q) {
                            const uint16_t* x = left + step * kStep + (2 * p + i / kSide) * kTile + i % kSide * kDepth;
                            const uint16_t* y = right + step * kStep + (2 * q + j / kSide) * kTile + j % kSide * 2;
                            for (int k = 0; k < kDepth; ++k) sum += double(wide(x[k])) * wide(y[k / 2 * kDepth + k % 2]);
                        }
                out[i * of_row + j] = static_cast<float>(sum);
            }
    }

    static float wide(uint16_t x) { return as<float>(static_cast<uint32_t>(x) << 16); }
};

#if defined(__AMX_BF16__)
struct alignas(64) Tiles {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// GCC's intrinsics declare 8 of the 64 bytes only, so that it would drop the stores to the others as dead.
inline void configure(const Tiles& tiles) {
    __asm__ volatile("" : : "r"(&tiles) : "memory");
    _tile_loadconfig(&tiles);
}

inline void read_configuration(Tiles& tiles) {
    __asm__ volatile("" : : "r"(&tiles) : "memory");
    _tile_storeconfig(&tiles);
    __asm__ volatile("" : : "r"(&tiles) : "memory");
}

// Set the tile shapes for the lifetime of the object. Then restore them, since other code, such as oneDNN, may rely on
// the shapes it has set.
struct Configured {
    Tiles before;

    Configured() {
        read_configuration(before);
        Tiles tiles;
        for (int i = 0; i < 8; ++i) tiles.bytes[i] = 64, tiles.rows[i] = kSide;
        configure(tiles);
    }

    ~Configured() { configure(before); }
};

struct ByTiles : Configured {
    // Two by two tiles of sums; each tile that is loaded is used twice.
    static void multiply(const uint16_t* left, const uint16_t* right, int64_t steps, float* out, int64_t of_row) {
        float* low = out + kSide * of_row;
        const int64_t stride = of_row * sizeof(float);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t step = 0; step < steps; ++step, left += kStep, right += kStep) {
            const uint16_t *next_left = left + kStep, *next_right = right + kStep;
            const auto fetch = [&](int sixth) { // of the next step, into the first-level cache
                for (int64_t i = sixth * kTile; i < (sixth + 1) * kTile; i += 32) {
                    __builtin_prefetch(next_left + i);
                    __builtin_prefetch(next_right + i);
                }
            };
            load_left(left, 0), load_right(right, 2), add_products(), fetch(0);
            load_right(right, 1), add_products(), fetch(1);
            load_right(right, 0), add_products(), fetch(2);
            load_left(left, 1), add_products(), fetch(3);
            load_right(right, 1), add_products(), fetch(4);
            load_left(left, 2), load_right(right, 0), add_products(), fetch(5);
        }
        _tile_stored(0, out, stride);
        _tile_stored(1, out + kSide, stride);
        _tile_stored(2, low, stride);
        _tile_stored(3, low + kSide, stride);
    }

    static void load_left(const uint16_t* step, int part) {
        _tile_loadd(4, step + 2 * part * kTile, 64);
        _tile_loadd(5, step + (2 * part + 1) * kTile, 64);
    }

    static void load_right(const uint16_t* step, int part) {
        _tile_loadd(6, step + 2 * part * kTile, 64);
        _tile_loadd(7, step + (2 * part + 1) * kTile, 64);
    }

    static void add_products() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
};
#else
using ByTiles = Plain;
#endif

struct Product {
    Operand left, right; // [m, k], [n, k]
    float* out;          // [m, n], rows `of_row` apart
    int64_t of_row, terms, add;
    std::atomic<int>* strange; // set where an operand has infinities or NaNs
};

// Numbers that begin on a cache line.
struct Packed {
    std::vector<uint16_t> memory;

    uint16_t* of(int64_t count) {
        if (static_cast<int64_t>(memory.size()) < count + 32) memory.resize(count + 32);
        return reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
    }
};

template <typename Unit>
void multiply_panels(
    const Product& p, const uint16_t* left, const uint16_t* right, int64_t steps, int64_t row, int64_t column, bool add) {
    const int64_t rows = least(p.left.rows - row, kPanel), columns = least(p.right.rows - column, kPanel);
    float* out = p.out + row * p.of_row + column;
    if (rows == kPanel && columns == kPanel && !add) return Unit::multiply(left, right, steps, out, p.of_row);
    alignas(64) float sums[kPanel * kPanel]; // of these terms alone, so that they are rounded as little as they can be
    Unit::multiply(left, right, steps, sums, kPanel);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) out[i * p.of_row + j] = sums[i * kPanel + j] + (add ? out[i * p.of_row + j] : 0.0f);
}

template <typename Unit>
void multiply_all(const Product& p) {
    thread_local Packed of_left, of_right;
    [[maybe_unused]] Unit unit;
    Words strange = {};
    for (int64_t term = 0; term < p.terms; term += kTerms) {
        const int64_t count = least(p.terms - term, kTerms), steps = ceiling(count, kDepth), panel = steps * kStep;
        const bool add = p.add || term;
        for (int64_t top = 0; top < p.left.rows; top += kLeft) {
            const int64_t bottom = least(p.left.rows, top + kLeft);
            uint16_t* left = of_left.of(ceiling(bottom - top, kPanel) * panel);
            for (int64_t row = top; row < bottom; row += kPanel)
                pack(p.left, row, term, count, true, left + (row - top) / kPanel * panel, strange);
            for (int64_t begin = 0; begin < p.right.rows; begin += kRight) {
                const int64_t end = least(p.right.rows, begin + kRight);
                uint16_t* right = of_right.of(ceiling(end - begin, kPanel) * panel);
                for (int64_t column = begin; column < end; column += kPanel)
                    pack(p.right, column, term, count, false, right + (column - begin) / kPanel * panel, strange);
                for (int64_t row = top; row < bottom; row += kPanel)
                    for (int64_t column = begin; column < end; column += kPanel)
                        multiply_panels<Unit>(p, left + (row - top) / kPanel * panel,
                                              right + (column - begin) / kPanel * panel, steps, row, column, add);
            }
        }
    }
    for (int i = 0; i < kSide; ++i)
        if (strange[i]) *p.strange = 1;
}

// Compute the share of a thread: some columns of the result or, if it has more rows than columns, some rows.
template <typename Unit>
void share(void* given) {
    Product p = *static_cast<Product*>(given);
    const bool by_rows = p.left.rows > p.right.rows;
    Operand& divided = by_rows ? p.left : p.right;
    const Share mine(divided.rows, kPanel);
    if (mine.begin >= mine.end) return;
    divided.data += mine.begin * divided.of_row;
    divided.rows = mine.end - mine.begin;
    p.out += mine.begin * (by_rows ? p.of_row : 1);
    multiply_all<Unit>(p);
}

template <typename Unit>
void run(Product& p, int64_t threads) {
    if (threads > 1)
        GOMP_parallel(share<Unit>, &p, static_cast<unsigned>(threads), 0);
    else
        multiply_all<Unit>(p);
}

} // namespace

// Request the units from the system, once per process. Return 0 or an error number: ENOTSUP if the processor has none.
extern "C" int oslo_split_ready(void) {
#if defined(__AMX_BF16__)
    constexpr int kRequest = 0x1023, kTileData = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) ? errno : 0;
#else
    return ENOTSUP;
#endif
}

// Whether more than one thread can be used.
extern "C" int oslo_split_threads(void) { return has_threads(); }

// out = left right^T, or out += left right^T. `a` holds left, right, out; the numbers of rows of left and right, and of
// terms; the strides of left's rows and terms, then right's, then of out's rows; whether to add; the number of threads;
// and whether to compute in plain C++. Returns whether an operand has infinities, which become NaNs in out, or NaNs.
extern "C" int oslo_split_product(const int64_t* a) {
    const auto floats = [&](int i) { return reinterpret_cast<float*>(a[i]); };
    std::atomic<int> strange{0};
    Product p{{floats(0), a[6], a[7], a[3]}, {floats(1), a[8], a[9], a[4]}, floats(2), a[10], a[5], a[11], &strange};
    a[13] ? run<Plain>(p, a[12]) : run<ByTiles>(p, a[12]);
    return strange;
}
