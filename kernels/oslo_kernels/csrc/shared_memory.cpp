// All-reduce, reduce-scatter and all-gather between the processes of one host, through shared memory.
//
// Every rank has two slots and a counter. In an exchange, each rank fills a slot, increments its counter, waits until
// all counters have reached the same value, and reads all slots. The two slots alternate: a rank that refills one has
// passed the exchange in between, which all others entered only after reading the older slot. Sums are formed in rank
// order, so that all ranks get the same bits.

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "half.h"

namespace {

// The spin time before sleeping is learned: if ranks share cores, a spinning rank keeps the others from running.
constexpr int kMostSpins = 2000;      // 20 to 100 us
constexpr int kFewestSpins = 20;      // enough to notice that the others arrive immediately again
constexpr int kSpinsPerYield = 10;    // after spinning, yield the core a tenth as often
constexpr int64_t kSoon = 150000;     // ns; a rank that comes in this time would have been worth spinning for
constexpr long kPatience = 100000000; // ns of sleep, after which the caller checks signals, timeout and peer
constexpr int kClosed = 1 << 30;      // returned by calls without a region

struct alignas(64) Rank {
    std::atomic<uint32_t> posted;   // number of exchanges for which this rank has filled a slot
    std::atomic<uint32_t> sleepers; // number of ranks that sleep until `posted` changes
    uint64_t call[2];               // the call that each slot belongs to, to detect mismatches
    std::atomic<int32_t> core;      // on which this rank last filled a slot
};

struct Region {
    char* memory;
    int64_t slot, length;
    int fd, rank, size;
    uint32_t exchanges = 0;
    int64_t offset = 0;  // bytes of the current call that are done; a call may be interrupted and continued
    bool posted = false; // whether this rank has filled its slot for the bytes at `offset`
    int spins = kMostSpins;

    Rank& state(int peer) { return reinterpret_cast<Rank*>(memory)[peer]; }
    char* part(int peer) { return memory + size * sizeof(Rank) + (2 * peer + (exchanges & 1)) * slot; }
};

long futex(std::atomic<uint32_t>& word, int op, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op, value, timeout, nullptr, 0);
}

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

void post(Rank& state, uint32_t exchange) {
    state.core.store(sched_getcpu(), std::memory_order_relaxed);
    state.posted.store(exchange);
    if (state.sleepers.load()) futex(state.posted, FUTEX_WAKE, INT_MAX, nullptr);
}

bool reached(Rank& state, uint32_t exchange) {
    return static_cast<int32_t>(state.posted.load(std::memory_order_acquire) - exchange) >= 0;
}

// Spin, then yield, then sleep until the rank arrives or `kPatience` is over. Return whether it has arrived.
bool wait_long(Rank& state, uint32_t exchange, int spins) {
    for (int i = 0; i < spins; ++i) {
        if (reached(state, exchange)) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    for (int i = 0; i < spins / kSpinsPerYield; ++i) {
        if (reached(state, exchange)) return true;
        sched_yield();
    }
    state.sleepers.fetch_add(1);
    const uint32_t seen = state.posted.load();
    const timespec patience{0, kPatience};
    if (!reached(state, exchange)) futex(state.posted, FUTEX_WAIT, seen, &patience);
    state.sleepers.fetch_sub(1);
    return reached(state, exchange);
}

bool wait(Region& region, Rank& state, uint32_t exchange) {
    if (reached(state, exchange)) return true;
    const int64_t start = now();
    const bool came = wait_long(state, exchange, region.spins);
    const bool on_other_core = state.core.load(std::memory_order_relaxed) != sched_getcpu();
    if (came && on_other_core && now() - start < kSoon)
        region.spins = region.spins * 2 < kMostSpins ? region.spins * 2 : kMostSpins;
    else
        region.spins = region.spins / 2 > kFewestSpins ? region.spins / 2 : kFewestSpins;
    return came;
}

// Fill this rank's slot and wait for the others: 0, or 1 + a rank that has not arrived, or -1 - a rank that made
// another call.
int exchange(Region& region, const char* data, int64_t bytes, uint64_t call) {
    if (!region.posted) {
        ++region.exchanges;
        std::memcpy(region.part(region.rank), data, bytes);
        Rank& own = region.state(region.rank);
        own.call[region.exchanges & 1] = call;
        post(own, region.exchanges);
        region.posted = true;
    }
    for (int peer = 0; peer < region.size; ++peer)
        if (!wait(region, region.state(peer), region.exchanges)) return 1 + peer;
    for (int peer = 0; peer < region.size; ++peer)
        if (region.state(peer).call[region.exchanges & 1] != call) return -1 - peer;
    region.posted = false;
    return 0;
}

// Reduce `bytes` bytes of all slots, from byte `start` on.
template <typename T, typename Sum, bool kMax>
void combine(Region& region, void* out, int64_t start, int64_t bytes) {
    constexpr int64_t kBlock = 1024; // stays in the first-level cache
    const int64_t count = bytes / sizeof(T);
    T* to = static_cast<T*>(out);
    for (int64_t first = 0; first < count; first += kBlock) {
        const int64_t n = count - first < kBlock ? count - first : kBlock;
        Sum sum[kBlock];
        for (int peer = 0; peer < region.size; ++peer) {
            const T* from = reinterpret_cast<const T*>(region.part(peer) + start) + first;
            if (peer == 0)
                for (int64_t i = 0; i < n; ++i) sum[i] = from[i];
            else if (kMax)
                for (int64_t i = 0; i < n; ++i) sum[i] = sum[i] < Sum(from[i]) ? Sum(from[i]) : sum[i];
            else
                for (int64_t i = 0; i < n; ++i) sum[i] += Sum(from[i]);
        }
        for (int64_t i = 0; i < n; ++i) to[first + i] = T(sum[i]);
    }
}

using Combine = void (*)(Region&, void*, int64_t, int64_t);

template <bool kMax>
Combine combine_of(int dtype) {
    switch (dtype) {
        case 2: return combine<float, float, kMax>;
        case 4: return combine<double, double, kMax>;
        case 6: return combine<BFloat16, float, kMax>;
        default: return combine<_Float16, float, kMax>;
    }
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

} // namespace

extern "C" {

// Create an unnamed file of shared memory for `size` ranks with slots of `slot` bytes: its descriptor, or -errno.
int oslo_shm_create(int size, int64_t slot) {
    const int fd = memfd_create("oslo-all-reduce", MFD_CLOEXEC);
    if (fd < 0) return -errno;
    if (ftruncate(fd, size * (static_cast<int64_t>(sizeof(Rank)) + 2 * slot)) == 0) return fd;
    const int error = errno;
    close(fd);
    return -error;
}

// Map the file and mark this rank as alive in it until its process ends. Takes ownership of `fd`. Null on failure.
void* oslo_shm_open(int fd, int rank, int size, int64_t slot) {
    const int64_t length = size * (static_cast<int64_t>(sizeof(Rank)) + 2 * slot);
    void* memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    // The lock ends with the process, however it ends, and is not inherited by children.
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_start = rank;
    lock.l_len = 1;
    if (memory == MAP_FAILED || fcntl(fd, F_SETLK, &lock) != 0) {
        if (memory != MAP_FAILED) munmap(memory, length);
        close(fd);
        return nullptr;
    }
    Region* region = new Region;
    region->memory = static_cast<char*>(memory);
    region->slot = slot;
    region->length = length;
    region->fd = fd;
    region->rank = rank;
    region->size = size;
    return region;
}

void oslo_shm_close(void* handle) {
    Region* region = static_cast<Region*>(handle);
    munmap(region->memory, region->length);
    close(region->fd);
    delete region;
}

// Whether the process of the rank still has the region open.
int oslo_shm_alive(void* handle, int peer) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_start = peer;
    lock.l_len = 1;
    return fcntl(static_cast<Region*>(handle)->fd, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// Reduce `data` over the ranks, in place; `call` is bytes << 8 | dtype | whether to take the maximum. Returns 0 when
// done; 1 + rank while that rank has not arrived: call again with the same arguments to continue; -1 - rank when that
// rank made another call.
int oslo_shm_all_reduce(void* handle, void* data, int64_t call) {
    if (!handle) return kClosed;
    Region& region = *static_cast<Region*>(handle);
    char* bytes_of = static_cast<char*>(data);
    const int64_t bytes = call >> 8;
    const Combine combine = call & 1 ? combine_of<true>(call & 0xfe) : combine_of<false>(call & 0xfe);
    for (int64_t& done = region.offset; done < bytes;) {
        const int64_t n = least(region.slot, bytes - done);
        if (const int error = exchange(region, bytes_of + done, n, call)) return error;
        combine(region, bytes_of + done, 0, n);
        done += n;
    }
    region.offset = 0;
    return 0;
}

// Sum `data` over the ranks, and write the bytes from `first` to `last` of the sum to `out`; `call` is bytes << 8 | 16 |
// dtype. Returns as above.
int oslo_shm_reduce_scatter(void* handle, const void* data, void* out, int64_t call, int64_t first, int64_t last) {
    if (!handle) return kClosed;
    Region& region = *static_cast<Region*>(handle);
    const int64_t bytes = call >> 8;
    const Combine combine = combine_of<false>(call & 0x0e);
    for (int64_t& done = region.offset; done < bytes;) {
        const int64_t n = least(region.slot, bytes - done);
        if (const int error = exchange(region, static_cast<const char*>(data) + done, n, call)) return error;
        const int64_t from = most(first, done), to = least(last, done + n);
        if (from < to) combine(region, static_cast<char*>(out) + from - first, from - done, to - from);
        done += n;
    }
    region.offset = 0;
    return 0;
}

// Concatenate the `bytes` bytes at `data` of all ranks at `out`. Returns as above.
int oslo_shm_all_gather(void* handle, const void* data, void* out, int64_t bytes) {
    if (!handle) return kClosed;
    Region& region = *static_cast<Region*>(handle);
    for (int64_t& done = region.offset; done < bytes;) {
        const int64_t n = least(region.slot, bytes - done);
        if (const int error = exchange(region, static_cast<const char*>(data) + done, n, static_cast<uint64_t>(bytes) << 8))
            return error;
        for (int peer = 0; peer < region.size; ++peer)
            std::memcpy(static_cast<char*>(out) + peer * bytes + done, region.part(peer), n);
        done += n;
    }
    region.offset = 0;
    return 0;
}

} // extern "C"
