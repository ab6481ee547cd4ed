// A limit of the memory that tensors of the CPU may have at once, for LD_PRELOAD: a device of so many bytes. Counted is
// what comes from posix_memalign, as torch's allocator takes it; staging, which is mapped, is not. Beyond the limit that
// call fails as it does where memory is full. `scripts/memory_runs.py` compiles it and is its only user.

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <dlfcn.h>

namespace {

constexpr size_t SLOTS = 1 << 20;  // many times the tensors of a small run
constexpr size_t LEAST = 4096;     // smaller ones are not counted
struct Slot {
    void* address;
    size_t nbytes;
};
Slot slots[SLOTS];
std::atomic_flag is_taken = ATOMIC_FLAG_INIT;
std::atomic<size_t> now{0}, peak{0}, limit{SIZE_MAX};
void* const GONE = reinterpret_cast<void*>(1);

struct Lock {
    Lock()
    {
        while (is_taken.test_and_set(std::memory_order_acquire)) {}
    }
    ~Lock() { is_taken.clear(std::memory_order_release); }
};

size_t place(void* address) { return reinterpret_cast<uintptr_t>(address) / 64 * 0x9E3779B97F4A7C15ull >> 44; }

void enter(void* address, size_t nbytes)
{
    for (size_t at = place(address);; at = (at + 1) % SLOTS) {
        if (slots[at].address == nullptr || slots[at].address == GONE) {
            slots[at] = {address, nbytes};
            return;
        }
    }
}

size_t leave(void* address)
{
    for (size_t at = place(address); slots[at].address != nullptr; at = (at + 1) % SLOTS) {
        if (slots[at].address == address) {
            slots[at].address = GONE;
            return slots[at].nbytes;
        }
    }
    return 0;
}

template <typename Function>
Function* real(const char* name)
{
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int posix_memalign(void** address, size_t alignment, size_t nbytes)
{
    static auto* allocate = real<int(void**, size_t, size_t)>("posix_memalign");
    if (nbytes < LEAST) { return allocate(address, alignment, nbytes); }
    Lock lock;
    if (now + nbytes > limit) { return ENOMEM; }
    const int failed = allocate(address, alignment, nbytes);
    if (failed == 0) {
        enter(*address, nbytes);
        now += nbytes;
        if (now > peak) { peak = now.load(); }
    }
    return failed;
}

void free(void* address)
{
    static auto* release = real<void(void*)>("free");
    if (reinterpret_cast<uintptr_t>(address) % 64 == 0 && address != nullptr) {
        Lock lock;
        now -= leave(address);
    }
    release(address);
}

void limit_tensors(size_t nbytes) { limit = nbytes; }

size_t peak_of_tensors()
{
    const size_t found = peak;
    peak = now.load();
    return found;
}

}
