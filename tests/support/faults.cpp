// Faults in the calls that move bytes, for LD_PRELOAD: the calls do what the kernel does until `ds_tba_fault` says
// otherwise. `victims.py` compiles it and is its only user.

#include <cerrno>
#include <cstdint>
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <vector>

namespace {

enum Call { WRITE, READ, ALLOCATE, OP_WRITE, OP_READ, CALLS };
enum Action { NONE, FAIL, HALF, NOTHING, DROP, SLOW };

struct Rule {
    std::atomic<int> action{NONE};
    std::atomic<int> code{0};
    std::atomic<long> first{0};
    std::atomic<long> last{0};
    std::atomic<long> count{0};
};

Rule rules[CALLS];
constexpr size_t PAGE = 4096;

// What is to happen to this request; requests are counted while a fault is set.
int strike(Call call)
{
    Rule& rule = rules[call];
    if (rule.action == NONE) { return NONE; }
    const long number = rule.count++;
    const int action = number >= rule.first && number <= rule.last ? rule.action.load() : NONE;
    if (action == SLOW) { sleep(rule.code); }
    return action;
}

// One request, moved by `real(parts, count)` unless a fault strikes it.
template <typename Real>
ssize_t move(Call call, const iovec* parts, int count, Real real)
{
    switch (strike(call)) {
        case FAIL: errno = rules[call].code; return -1;
        case NOTHING: return 0;
        case DROP: return static_cast<ssize_t>(parts[0].iov_len);
        case HALF: {
            iovec part = parts[0];
            if (part.iov_len > PAGE) { part.iov_len = part.iov_len / 2 / PAGE * PAGE; }
            return real(&part, 1);
        }
        default: return real(parts, count);
    }
}

using Plain = ssize_t (*)(int, const iovec*, int, off_t);
using Flagged = ssize_t (*)(int, const iovec*, int, off_t, int);

ssize_t plain(Call call, const char* name, int fd, const iovec* parts, int count, off_t offset)
{
    const auto real = reinterpret_cast<Plain>(dlsym(RTLD_NEXT, name));
    return move(call, parts, count, [=](const iovec* some, int of) { return real(fd, some, of, offset); });
}

ssize_t flagged(Call call, const char* name, int fd, const iovec* parts, int count, off_t offset, int flags)
{
    const auto real = reinterpret_cast<Flagged>(dlsym(RTLD_NEXT, name));
    return move(call, parts, count, [=](const iovec* some, int of) { return real(fd, some, of, offset, flags); });
}

}  // namespace

extern "C" {

// The requests of `call` from number `first` to `last`, counted from now, fail as `action` says.
void ds_tba_fault(int call, int action, int code, long first, long last)
{
    Rule& rule = rules[call];
    rule.action = NONE;
    rule.code = code;
    rule.first = first;
    rule.last = last;
    rule.count = 0;
    rule.action = action;
}

// How many requests of `call` there were since the fault was set.
long ds_tba_fault_count(int call) { return rules[call].count; }

// Which of these Python calls depends on its build.
ssize_t pwritev64(int fd, const iovec* parts, int count, off_t offset)
{
    return plain(WRITE, "pwritev64", fd, parts, count, offset);
}

ssize_t preadv64(int fd, const iovec* parts, int count, off_t offset)
{
    return plain(READ, "preadv64", fd, parts, count, offset);
}

ssize_t pwritev64v2(int fd, const iovec* parts, int count, off_t offset, int flags)
{
    return flagged(WRITE, "pwritev64v2", fd, parts, count, offset, flags);
}

ssize_t preadv64v2(int fd, const iovec* parts, int count, off_t offset, int flags)
{
    return flagged(READ, "preadv64v2", fd, parts, count, offset, flags);
}

// Which of these Python calls depends on its build, too. Their result is the error number.
int posix_fallocate(int fd, off_t offset, off_t length)
{
    static const auto real = reinterpret_cast<int (*)(int, off_t, off_t)>(dlsym(RTLD_NEXT, "posix_fallocate"));
    return strike(ALLOCATE) == FAIL ? rules[ALLOCATE].code.load() : real(fd, offset, length);
}

int posix_fallocate64(int fd, off64_t offset, off64_t length)
{
    static const auto real = reinterpret_cast<int (*)(int, off64_t, off64_t)>(dlsym(RTLD_NEXT, "posix_fallocate64"));
    return strike(ALLOCATE) == FAIL ? rules[ALLOCATE].code.load() : real(fd, offset, length);
}

// libaio's: a dropped block goes to /dev/null instead, so that the kernel completes it as if all were well.
int io_submit(aio_context_t context, long count, iocb** requests)
{
    static const int nowhere = open("/dev/null", O_WRONLY);
    std::vector<iocb> kept;
    for (long index = 0; index < count; ++index) {
        iocb& request = *requests[index];
        kept.push_back(request);
        const bool writes = request.aio_lio_opcode == IOCB_CMD_PWRITE;
        if (strike(writes ? OP_WRITE : OP_READ) != DROP) { continue; }
        request.aio_lio_opcode = IOCB_CMD_PWRITE;
        request.aio_fildes = nowhere;
    }
    const long done = syscall(SYS_io_submit, context, count, requests);
    const int code = errno;
    for (long index = 0; index < count; ++index) {
        requests[index]->aio_lio_opcode = kept[index].aio_lio_opcode;
        requests[index]->aio_fildes = kept[index].aio_fildes;
    }
    return done < 0 ? -code : static_cast<int>(done);
}
}
