// Moves requests and replies (RESP) over a blocking socket. Of replies it knows only how a blob is announced and how it
// ends: what any other line means is for Python to decide, which also says how long a blob may be and where it goes.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define KVLOOM_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint64_t STEP_BYTES = 256 << 10;  // stays in L2 until it was verified
constexpr uint32_t MAX_PARTS = 512;         // in one call: systems take 1024
constexpr uint32_t END_BYTES = 2;
constexpr uint32_t MAX_LINE_BYTES = 8 << 10;
constexpr int64_t MAX_DIGITS = 18;  // of a length that is told here

// Results, beside sizes and errnos, which are negated. The same in kvloom_native/resp.py.
constexpr int64_t A_LINE = -5000, CLOSED = -5001, WRONG_END = -5002, TOO_SLOW = -5003, NOT_TAKEN = -5004,
                  ENDLESS = -5005;
#ifdef MSG_NOSIGNAL
constexpr int SEND_FLAGS = MSG_NOSIGNAL;
#else
constexpr int SEND_FLAGS = 0;
#endif

using Filled = int (*)(void* state, uint64_t num_bytes);

// One connection. The same in kvloom_native/resp.py.
struct Connection {
    int32_t fd;
    uint32_t start, end;     // of what has arrived in `buffer` and was not taken
    uint32_t capacity;       // of `buffer`
    uint8_t* buffer;
    iovec* parts;            // still to be sent; changed as they are
    uint64_t part_count;
    uint64_t moved;          // bytes, in both directions
    double waited, timeout;  // seconds in calls to the system; and how many of them there may be
    double slowest;          // bytes a second, which add to that
    iovec request;
};

// Where a blob goes. The same in kvloom_native/resp.py.
struct Blob {
    uint8_t* into;
    uint64_t done, until;
    Filled filled;  // told of what has arrived; may be null
    void* state;
};

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// moved: what the call to the system returned.
int64_t account(Connection& link, double began, ssize_t moved) {
    link.waited += now() - began;
    if (moved < 0) return -static_cast<int64_t>(errno);
    link.moved += static_cast<uint64_t>(moved);
    return link.waited > link.timeout + static_cast<double>(link.moved) / link.slowest ? TOO_SLOW : 0;
}

int64_t send_parts(Connection& link) {
    while (link.part_count) {
        msghdr message = {};
        message.msg_iov = link.parts;
        message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(std::min<uint64_t>(link.part_count, MAX_PARTS));
        const double began = now();
        ssize_t sent = sendmsg(link.fd, &message, SEND_FLAGS);
        const int64_t error = account(link, began, sent);
        if (sent < 0) return error;
        while (link.part_count && static_cast<size_t>(sent) >= link.parts->iov_len) {
            sent -= static_cast<ssize_t>(link.parts->iov_len);
            ++link.parts, --link.part_count;
        }
        if (link.part_count) {
            link.parts->iov_base = static_cast<uint8_t*>(link.parts->iov_base) + sent;
            link.parts->iov_len -= static_cast<size_t>(sent);
        }
        if (error) return error;
    }
    return 0;
}

// Receives what there is, at least a byte: at most `size` bytes to `into`, and of what is behind them up to `ahead`
// bytes to the buffer, which is empty if `size` is not 0.
int64_t receive(Connection& link, uint8_t* into, uint64_t size, uint32_t ahead, uint64_t& got) {
    got = 0;
    if (link.start == link.end) {
        link.start = link.end = 0;
    } else if (link.end == link.capacity || link.start > link.capacity / 2) {
        std::memmove(link.buffer, link.buffer + link.start, link.end - link.start);
        link.end -= link.start, link.start = 0;
    }
    iovec places[2] = {{into, size}, {link.buffer + link.end, std::min(ahead, link.capacity - link.end)}};
    msghdr message = {};
    message.msg_iov = size ? places : places + 1;
    message.msg_iovlen = size && places[1].iov_len ? 2 : 1;
    const double began = now();
    const ssize_t received = recvmsg(link.fd, &message, 0);
    const int64_t error = account(link, began, received);
    if (received < 0) return error;
    if (received == 0) return CLOSED;
    got = std::min<uint64_t>(static_cast<uint64_t>(received), size);
    link.end += static_cast<uint32_t>(static_cast<uint64_t>(received) - got);
    return error;
}

// The length of the line that the buffer begins with, or -1 if it does not end there.
int64_t line_in(const Connection& link) {
    const uint8_t *const start = link.buffer + link.start, *const end = link.buffer + link.end;
    for (const uint8_t* at = start; at < end; ++at) {
        at = static_cast<const uint8_t*>(std::memchr(at, '\r', static_cast<size_t>(end - at)));
        if (!at || at + 1 == end) return -1;
        if (at[1] == '\n') return at - start;
    }
    return -1;
}

// The length that a line announces, if it is `$` and few digits; else A_LINE.
int64_t length_in(const uint8_t* line, int64_t length) {
    if (length < 2 || length > 1 + MAX_DIGITS || *line != '$') return A_LINE;
    int64_t size = 0;
    for (const uint8_t* at = line + 1; at < line + length; ++at) {
        if (*at < '0' || *at > '9') return A_LINE;
        size = 10 * size + (*at - '0');
    }
    return size;
}

}  // namespace

// Returns whether nothing has arrived on a connection, not even its end.
KVLOOM_API int32_t kvloom_resp_is_silent(int32_t fd) {
    pollfd polled = {fd, POLLIN, 0};
    return poll(&polled, 1, 0) == 0;
}

// Sends `request` (null: the parts), then receives until the buffer begins with a whole line. If that announces a blob,
// takes it and returns the blob's size; other lines are left there: A_LINE.
// ahead: receive no more bytes at once, because they belong elsewhere.
//
// -EINTR is returned too: only Python knows whether a signal is to end this. If not, it calls again, with no request,
// and this goes on. So it is with `kvloom_resp_fill`.
KVLOOM_API int64_t kvloom_resp_next(Connection* link, const char* request, uint64_t request_bytes, uint32_t ahead) {
    if (request) {
        link->request = {const_cast<char*>(request), request_bytes};
        link->parts = &link->request, link->part_count = 1;
    }
    if (const int64_t error = send_parts(*link)) {
        if (error != -EINTR) link->part_count = 0;
        return error == -EAGAIN ? NOT_TAKEN : error;
    }
    int64_t length;
    while ((length = line_in(*link)) < 0) {
        if (link->end - link->start > MAX_LINE_BYTES) return ENDLESS;
        uint64_t none;
        if (const int64_t error = receive(*link, nullptr, 0, ahead, none)) return error;
    }
    const int64_t size = length_in(link->buffer + link->start, length);
    if (size >= 0) link->start += static_cast<uint32_t>(length) + END_BYTES;
    return size;
}

// Receives a blob from byte `done` to byte `until`, and its end if `ends`. Returns how many bytes are in the buffer.
// ahead: of the bytes behind that end, take up to this many that have arrived.
KVLOOM_API int64_t kvloom_resp_fill(Connection* link, Blob* blob, int32_t ends, uint32_t ahead) {
    while (blob->done < blob->until) {
        const uint64_t left = blob->until - blob->done;
        uint64_t got = std::min<uint64_t>(left, link->end - link->start);
        int64_t error = 0;
        if (got) {
            std::memcpy(blob->into + blob->done, link->buffer + link->start, got);
            link->start += static_cast<uint32_t>(got);
        } else {
            const uint32_t behind = ends && left <= STEP_BYTES ? END_BYTES + ahead : 0;
            error = receive(*link, blob->into + blob->done, std::min(left, STEP_BYTES), behind, got);
        }
        blob->done += got;
        if (error) return error;
        // What is not right is received all the same.
        if (blob->filled && blob->filled(blob->state, blob->done) != 0) blob->filled = nullptr;
    }
    if (ends) {
        while (link->end - link->start < END_BYTES) {
            uint64_t none;
            if (const int64_t error = receive(*link, nullptr, 0, END_BYTES + ahead, none)) return error;
        }
        if (std::memcmp(link->buffer + link->start, "\r\n", END_BYTES) != 0) return WRONG_END;
        link->start += END_BYTES;
    }
    return link->end - link->start;
}
